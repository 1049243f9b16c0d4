// What training needs beside the products: gradients of the row-wise operations, and of mask rows' attention all but the
// products with clean keys and values, in fp32. Layouts: cpu_training.py.
#include <algorithm>
#include <vector>

struct MaskHeads { int32_t rows, heads, kv_heads, head_dim, block; };

namespace {

template <Activation A> inline f16v steeper(f16v x) {  // the derivative of `steep`
    if constexpr (A == SILU) return splat(1.0f);
    return 1.5957691216f + 3.0f * 0.0713548163f * x * x;
}

template <typename T, Activation A>
void gate_slope_rows(const T* gate_up, const T* slope, T* out, int rows, int n, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++) {
        const T *gate = gate_up + int64_t(r) * 2 * n, *d = slope + int64_t(r) * n;
        T* to = out + int64_t(r) * 2 * n;
        for (int i = 0; i < n; i += LANES) {
            f16v g = load(gate + i), share = 1.0f / (1.0f + exp_of(-steep<A>(g)));
            store(to + i, load(d + i) * load(gate + n + i) * (share + g * share * (1.0f - share) * steeper<A>(g)));
            store(to + n + i, load(d + i) * (g * share));
        }
    }
}

// d_total: what reaches the sum from elsewhere, if anything.
template <typename T>
void norm_slope(const T* total, const T* weight, const T* d_normed, const T* d_total, T* out, int rows, int n, float eps,
                int threads) {
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++) {
        const int64_t at = int64_t(r) * n;
        f16v squares{}, along{};
        for (int i = 0; i < n; i += LANES) {
            f16v x = load(total + at + i);
            squares += x * x;
            along += x * (load(d_normed + at + i) * load(weight + i));
        }
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
        const float back = scale * scale * scale * sum(along) / n;
        for (int i = 0; i < n; i += LANES) {
            f16v d = load(d_normed + at + i) * load(weight + i) * scale - load(total + at + i) * back;
            store(out + at + i, d_total ? d + load(d_total + at + i) : d);
        }
    }
}

// x [head_dim] turned, times `scale`. sign: -1 turns back.
LANEWISE void turn(const float* x, const float* cos, const float* sin, int head_dim, float sign, float scale, float* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float left = x[i], right = x[half + i], c = cos[i] * scale, n = sin[i] * sign * scale;
        out[i] = left * c - right * n;
        out[half + i] = right * c + left * n;
    }
}

// Blocks first … first + count - 1 as one chunk: its matrices are [kv_heads, count * block * groups, width], the first
// `block` columns for the slots of a row's own block. Calls run(head, number of the block in the chunk).
template <typename Run> void each_block(MaskHeads s, int count, int threads, Run run) {
#pragma omp parallel for num_threads(threads)
    for (int unit = 0; unit < s.kv_heads * count; unit++) run(unit / count, unit % count);
}

struct BlockRows {  // where the rows of one block and key/value head lie
    int queries;    // of the block: slots times groups
    int64_t slots, asked, chunk;  // first row among those of k and v, of q, of the chunk's matrices
    BlockRows(MaskHeads s, int first, int count, int head, int number)
        : queries(s.block * (s.heads / s.kv_heads)),
          slots(int64_t(head) * s.rows + int64_t(first + number) * s.block),
          asked(slots * (s.heads / s.kv_heads)),
          chunk((int64_t(head) * count + number) * queries) {}
};

// The slots' vectors [block, head_dim] beside each other: [head_dim, LANES].
std::vector<float> beside(const float* rows, MaskHeads s) {
    std::vector<float> out(s.head_dim * LANES);
    for (int slot = 0; slot < s.block; slot++)
        for (int d = 0; d < s.head_dim; d++) out[d * LANES + slot] = rows[slot * s.head_dim + d];
    return out;
}

f16v products(const float* row, const std::vector<float>& slots, int head_dim) {
    f16v even{}, odd{};
    for (int d = 0; d < head_dim; d += 2) {
        even += row[d] * load(&slots[d * LANES]);
        odd += row[d + 1] * load(&slots[(d + 1) * LANES]);
    }
    return even + odd;
}

// `count` numbers from p on, `other` behind them.
LANEWISE f16v load_some(const float* p, int count, float other) {
    if (count == LANES) return load(p);
    float t[LANES];
    std::fill(std::copy(p, p + count, t), t + LANES, other);
    return load(t);
}

LANEWISE void store_some(float* p, f16v v, int count) {
    if (count == LANES) return store(p, v);
    float t[LANES];
    store(t, v);
    std::copy(t, t + count, p);
}

// Numbers that are not normal would make the products behind them slow.
LANEWISE f16v normal_or_zero(f16v v) { return choose(v < splat(1.17549435e-38f), f16v{}, v); }

// Calls run(i, count) for LANES numbers at a time, and for those that are left.
template <typename Run> LANEWISE void in_lanes(int begin, int end, Run run) {
    for (; begin + LANES <= end; begin += LANES) run(begin, std::integral_constant<int, LANES>{});
    if (begin < end) run(begin, end - begin);
}

// out [block, head_dim]: the queries' rows [queries, head_dim] summed, each with its weights [queries, width].
void sum_by_slot(const float* rows, const float* weights, MaskHeads s, int queries, int width, float* out) {
    constexpr int SIDE = 4;  // slots whose sums fit the registers
    for (int i = 0; i < s.head_dim; i += LANES)
        for (int slot = 0; slot < s.block; slot += SIDE)
            with_count<SIDE>(std::min(SIDE, s.block - slot), [&](auto count) {
                constexpr int N = decltype(count)::value;
                f16v sums[N] = {};
                for (int j = 0; j < queries; j++) {
                    const f16v row = load(rows + j * s.head_dim + i);
                    UNROLL for (int n = 0; n < N; n++) sums[n] += weights[int64_t(j) * width + slot + n] * row;
                }
                for (int n = 0; n < N; n++) store(out + (slot + n) * s.head_dim + i, sums[n]);
            });
}

}  // namespace

#define EXPORT_TRAINING(NAME, T)                                                                                       \
    extern "C" void gate_slope_##NAME(const T* gate_up, const T* slope, T* out, int rows, int n, int activation,       \
                                      int threads) {                                                                   \
        if (activation == GELU_TANH) gate_slope_rows<T, GELU_TANH>(gate_up, slope, out, rows, n, threads);             \
        else gate_slope_rows<T, SILU>(gate_up, slope, out, rows, n, threads); }                                        \
    extern "C" void norm_slope_##NAME(const T* total, const T* weight, const T* d_normed, const T* d_total, T* out,    \
                                      int rows, int n, float eps, int threads) {                                       \
        norm_slope(total, weight, d_normed, d_total, out, rows, n, eps, threads); }
EXPORT_TRAINING(bf16, bf16)
EXPORT_TRAINING(float, float)

extern "C" {

// q [kv_heads, rows * groups, head_dim], scaled, and k and v [kv_heads, rows, head_dim], out of qkv.
void mask_lay(const float* qkv, MaskHeads s, const float* cos, const float* sin, float scale, float* q, float* k, float* v,
              int threads) {
    const int groups = s.heads / s.kv_heads, half = s.head_dim / 2;
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < s.rows; r++) {
        const float* from = qkv + int64_t(r) * (s.heads + 2 * s.kv_heads) * s.head_dim;
        const float *c = cos + int64_t(r) * half, *n = sin + int64_t(r) * half;
        for (int h = 0; h < s.heads; h++, from += s.head_dim)
            turn(from, c, n, s.head_dim, 1.0f, scale,
                 q + ((int64_t(h / groups) * s.rows + r) * groups + h % groups) * s.head_dim);
        for (int h = 0; h < s.kv_heads; h++, from += s.head_dim)
            turn(from, c, n, s.head_dim, 1.0f, 1.0f, k + (int64_t(h) * s.rows + r) * s.head_dim);
        for (int h = 0; h < s.kv_heads; h++, from += s.head_dim)
            std::memcpy(v + (int64_t(h) * s.rows + r) * s.head_dim, from, sizeof(float) * s.head_dim);
    }
}

// Scores of clean keys become shares of all that a row sees: its own block, up to itself where causal, and the clean
// columns from begins[row] (0 where that is null) to ends[block].
void mask_shares(float* scores, const float* q, const float* k, MaskHeads s, int first, int count, int width,
                 const int32_t* begins, const int32_t* ends, int causal, int threads) {
    const int groups = s.heads / s.kv_heads;
    constexpr float NEVER = -3.0e38f;
    each_block(s, count, threads, [&](int head, int number) {
        const BlockRows at(s, first, count, head, number);
        const std::vector<float> keys = beside(k + at.slots * s.head_dim, s);
        for (int j = 0; j < at.queries; j++) {
            const int slot = j / groups, seen = causal ? slot + 1 : s.block;
            float* row = scores + (at.chunk + j) * width;
            float* clean = row + s.block;
            const int end = ends[first + number];
            const int begin = begins ? std::min(begins[(first + number) * s.block + slot], end) : 0;
            float own[LANES];
            store(own, products(q + (at.asked + j) * s.head_dim, keys, s.head_dim));
            const f16v own_scores = load_some(own, seen, NEVER);
            f16v most = own_scores;
            in_lanes(begin, end, [&](int i, auto some) { most = max_of(most, load_some(clean + i, some, NEVER)); });
            float each[LANES];
            store(each, most);
            const float highest = *std::max_element(each, each + LANES);
            const f16v mine = exp_below(own_scores - highest);
            f16v total = mine;
            in_lanes(begin, end, [&](int i, auto some) {
                const f16v e = exp_below(load_some(clean + i, some, NEVER) - highest);
                store_some(clean + i, e, some);
                total += e;
            });
            const float part = 1.0f / sum(total);
            store_some(row, normal_or_zero(mine * part), s.block);
            std::fill(clean, clean + begin, 0.0f);
            in_lanes(begin, end, [&](int i, auto some) {
                store_some(clean + i, normal_or_zero(load_some(clean + i, some, 0.0f) * part), some);
            });
            std::fill(clean + end, row + width, 0.0f);
        }
    });
}

// out [rows, heads * head_dim]: what the clean values came to, and the own block's.
void mask_add_own(const float* mixed, const float* share, const float* v, MaskHeads s, int first, int count, int width,
                  float* out, int threads) {
    const int groups = s.heads / s.kv_heads;
    each_block(s, count, threads, [&](int head, int number) {
        const BlockRows at(s, first, count, head, number);
        const float* values = v + at.slots * s.head_dim;
        for (int j = 0; j < at.queries; j++) {
            const float *from = mixed + (at.chunk + j) * s.head_dim, *weigh = share + (at.chunk + j) * width;
            const int64_t r = int64_t(first + number) * s.block + j / groups;
            float* to = out + (r * s.heads + head * groups + j % groups) * s.head_dim;
            for (int i = 0; i < s.head_dim; i += LANES) {
                f16v y = load(from + i);
                for (int slot = 0; slot < s.block; slot++) y += weigh[slot] * load(values + slot * s.head_dim + i);
                store(to + i, y);
            }
        }
    });
}

// The gradient with respect to a chunk's shares, of which the own block's columns are computed here, becomes that with
// respect to its scores. d_out: as q.
void mask_score_slopes(float* d_share, const float* share, const float* d_out, const float* v, MaskHeads s, int first,
                       int count, int width, int threads) {
    each_block(s, count, threads, [&](int head, int number) {
        const BlockRows at(s, first, count, head, number);
        const std::vector<float> values = beside(v + at.slots * s.head_dim, s);
        for (int j = 0; j < at.queries; j++) {
            const float* weigh = share + (at.chunk + j) * width;
            float* d = d_share + (at.chunk + j) * width;
            store_some(d, products(d_out + (at.asked + j) * s.head_dim, values, s.head_dim), s.block);
            f16v along{};
            in_lanes(0, width, [&](int i, auto some) {
                along += load_some(weigh + i, some, 0.0f) * load_some(d + i, some, 0.0f);
            });
            const float mean = sum(along);
            in_lanes(0, width, [&](int i, auto some) {
                store_some(d + i, load_some(weigh + i, some, 0.0f) * (load_some(d + i, some, 0.0f) - mean), some);
            });
        }
    });
}

// d_qkv [rows, (heads + 2 kv_heads) * head_dim], from what clean keys gave the chunk's scaled queries, d_q
// [kv_heads, count * block * groups, head_dim], and from the own block.
void mask_head_slopes(const float* d_q, const float* d_scores, const float* share, const float* d_out, const float* q,
                      const float* k, MaskHeads s, int first, int count, int width, const float* cos, const float* sin,
                      float scale, float* d_qkv, int threads) {
    const int groups = s.heads / s.kv_heads, half = s.head_dim / 2, size = s.head_dim;
    each_block(s, count, threads, [&](int head, int number) {
        const BlockRows at(s, first, count, head, number);
        const float *keys = k + at.slots * size, *d_own = d_scores + at.chunk * width;
        const int64_t row = int64_t(first + number) * s.block;
        auto to = [&](int slot, int place) { return d_qkv + ((row + slot) * (s.heads + 2 * s.kv_heads) + place) * size; };
        auto back = [&](const float* from, int slot, float times, float* out) {
            turn(from, cos + (row + slot) * half, sin + (row + slot) * half, size, -1.0f, times, out);
        };
        std::vector<float> scratch(size * (s.block + 1));
        float *d_slots = scratch.data(), *d_query = d_slots + size * s.block;
        for (int j = 0; j < at.queries; j++) {
            for (int i = 0; i < size; i += LANES) {
                f16v d = load(d_q + (at.chunk + j) * size + i);
                for (int slot = 0; slot < s.block; slot++) d += d_own[int64_t(j) * width + slot] * load(keys + slot * size + i);
                store(d_query + i, d);
            }
            back(d_query, j / groups, scale, to(j / groups, head * groups + j % groups));
        }
        sum_by_slot(q + at.asked * size, d_own, s, at.queries, width, d_slots);
        for (int slot = 0; slot < s.block; slot++) back(d_slots + slot * size, slot, 1.0f, to(slot, s.heads + head));
        sum_by_slot(d_out + at.asked * size, share + at.chunk * width, s, at.queries, width, d_slots);
        for (int slot = 0; slot < s.block; slot++)
            std::memcpy(to(slot, s.heads + s.kv_heads + head), d_slots + slot * size, sizeof(float) * size);
    });
}

}  // extern "C"
