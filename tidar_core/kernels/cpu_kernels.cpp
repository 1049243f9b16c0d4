// Row-wise operations and paged attention for a CPU. Every row is computed by itself, in an order that depends on
// the positions of its keys alone, so that its bits do not depend on the batch. Layouts and masks: ops.py.
#include <limits>
#include <type_traits>
#include <vector>

namespace {

inline f16v exp_of(f16v x) {  // 2^n times a polynomial on [-1/2, 1/2]; error below 2 ulp; NaN stays NaN
    f16v least = splat(-87.0f), most = splat(89.0f);  // which makes infinity, as it should: 2^128
    x = choose(x < least, least, x);
    x = choose(x > most, most, x);
    f16v t = x * 1.44269504f;
    f16v n = (t + 12582912.0f) - 12582912.0f;
    f16v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f16v p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_floats((to_whole(n) + 127) << 23);
}

struct Shape { int rows, heads, kv_heads, head_dim; };

template <typename T> void norm_row(const T* x, const T* w, T* out, int n, float eps) {
    f16v squares{};
    for (int i = 0; i < n; i += LANES) { f16v v = load(x + i); squares += v * v; }
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
    for (int i = 0; i < n; i += LANES) store(out + i, rounded<T>(load(x + i) * scale) * load(w + i));
}

template <typename T>
void add_norm(const T* x, T* residual, const T* weight, T* out, int rows, int n, float eps, int add, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > 4096)
    for (int r = 0; r < rows; r++) {
        const T* xr = x + int64_t(r) * n;
        T* rr = residual + int64_t(r) * n;
        for (int i = 0; i < n; i += LANES) store(rr + i, add ? load(rr + i) + load(xr + i) : load(xr + i));
        norm_row(rr, weight, out + int64_t(r) * n, n, eps);
    }
}

enum Activation { SILU, GELU_TANH };

// What x is divided by 1 + exp(-steep) of: x itself for SiLU; for GELU's approximation by tanh, since
// (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), twice u.
template <Activation A> inline f16v steep(f16v x) {
    if constexpr (A == SILU) return x;
    return x * (1.5957691216f + 0.0713548163f * x * x);
}

template <typename T, Activation A> void gate_rows(const T* gate_up, T* out, int rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > 4096)
    for (int r = 0; r < rows; r++) {
        const T* gate = gate_up + int64_t(r) * 2 * n;
        for (int i = 0; i < n; i += LANES) {
            f16v g = load(gate + i);
            store(out + int64_t(r) * n + i, rounded<T>(g / (1.0f + exp_of(-steep<A>(g)))) * load(gate + n + i));
        }
    }
}

template <typename T> void gate(const T* gate_up, T* out, int rows, int n, int activation, int threads) {
    if (activation == GELU_TANH) gate_rows<T, GELU_TANH>(gate_up, out, rows, n, threads);
    else gate_rows<T, SILU>(gate_up, out, rows, n, threads);
}

template <typename T> void rotate_head(T* x, const float* cos, const float* sin, int head_dim, const T* norm, float eps) {
    if (norm) norm_row(x, norm, x, head_dim, eps);
    constexpr int HALF_LANES = LANES / 2;  // half a head may be no longer
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += HALF_LANES) {
        T pairs[LANES], crossed[LANES];
        std::memcpy(pairs, x + i, sizeof pairs / 2);
        std::memcpy(pairs + HALF_LANES, x + half + i, sizeof pairs / 2);
        std::memcpy(crossed, pairs + HALF_LANES, sizeof pairs / 2);
        std::memcpy(crossed + HALF_LANES, pairs, sizeof pairs / 2);
        float c[LANES], n[LANES];
        for (int j = 0; j < HALF_LANES; j++) {
            c[j] = c[j + HALF_LANES] = cos[i + j];
            n[j] = -sin[i + j], n[j + HALF_LANES] = sin[i + j];
        }
        store(pairs, load(pairs) * load(c) + load(crossed) * load(n));
        std::memcpy(x + i, pairs, sizeof pairs / 2);
        std::memcpy(x + half + i, pairs + HALF_LANES, sizeof pairs / 2);
    }
}

template <typename T>
void rotate_and_store(T* qkv, Shape s, int verify, const int32_t* positions, const float* cos, const float* sin,
                      const T* q_norm, const T* k_norm, float eps, T* keys, T* values, const int32_t* slots, int threads) {
    int width = (s.heads + 2 * s.kv_heads) * s.head_dim, half = s.head_dim / 2;
#pragma omp parallel for num_threads(threads) if (s.rows * width > 4096)
    for (int r = 0; r < s.rows; r++) {
        T* row = qkv + int64_t(r) * width;
        const float *c = cos + int64_t(positions[r]) * half, *n = sin + int64_t(positions[r]) * half;
        for (int h = 0; h < s.heads + s.kv_heads; h++)
            rotate_head(row + h * s.head_dim, c, n, s.head_dim, h < s.heads ? q_norm : k_norm, eps);
        if (r >= verify) continue;
        int64_t page = slots[r] / LANES, offset = slots[r] % LANES;
        for (int h = 0; h < s.kv_heads; h++) {
            const T* k = row + (s.heads + h) * s.head_dim;
            T* key_page = keys + (page * s.kv_heads + h) * s.head_dim * LANES;
            for (int d = 0; d < s.head_dim; d++) key_page[d * LANES + offset] = k[d];
            std::memcpy(values + ((page * s.kv_heads + h) * LANES + offset) * s.head_dim,
                        row + (s.heads + s.kv_heads + h) * s.head_dim, s.head_dim * sizeof(T));
        }
    }
}

// Calls run with a count, at most MOST, as a constant.
template <int MOST, typename Run> inline void with_count(int count, Run run) {
    if constexpr (MOST > 1) {
        if (count < MOST) return with_count<MOST - 1>(count, run);
    }
    run(std::integral_constant<int, MOST>{});
}

constexpr int TOGETHER = MOST_SUMS < 12 ? MOST_SUMS : 12;  // queries whose sums fit the registers

// One query head of one row, and what it sees: keys first <= k < context of the pages, and so many of the tail.
template <typename T> struct Query { const T* q; const T* tail_k; const T* tail_v; int first, context, tail; T* out; };

constexpr int CHAIN_PAGES = 32;  // whose values are summed in one chain: a longer one would lose what is small

// M queries of one sequence and one K/V head, which share its pages. Every score and every sum over keys is a chain of
// its own in the order of the keys, closed at places that the keys' positions alone tell, so that a query's bits do not
// depend on the others.
template <typename T, int M>
void attend_together(const Query<T>* queries, const T* keys, const T* values, const int32_t* table, int64_t tail_stride,
                     Shape s, int kv_head, float scale, std::vector<float>& scratch) {
    const int D = s.head_dim;
    int longest = 0, shortest = queries[0].context, tail = 0, earliest = queries[0].first, latest = 0;
    for (int m = 0; m < M; m++) {
        earliest = queries[m].first < earliest ? queries[m].first : earliest;
        latest = queries[m].first > latest ? queries[m].first : latest;
        shortest = queries[m].context < shortest ? queries[m].context : shortest;
        longest = queries[m].context > longest ? queries[m].context : longest;
        tail = queries[m].tail > tail ? queries[m].tail : tail;
    }
    const int pages = (longest + LANES - 1) / LANES, begin = earliest / LANES < pages ? earliest / LANES : pages;
    const int tail_at = (pages - begin) * LANES;
    const int width = tail_at + (tail + LANES - 1) / LANES * LANES;
    scratch.resize(size_t(M) * (width + D));
    float *scores = scratch.data(), *query = scores + size_t(M) * width;
    for (int m = 0; m < M; m++)
        for (int d = 0; d < D; d++) query[d * M + m] = widen(queries[m].q[d]);
    const float lowest = -std::numeric_limits<float>::infinity();
    auto page_of = [&](const T* all, int p) { return all + (int64_t(table[p]) * s.kv_heads + kv_head) * D * LANES; };
    // Pages side by side, so that enough sums are under way.
    constexpr int SIDE = 4 * M <= TOGETHER ? 4 : 2 * M <= TOGETHER ? 2 : 1;
    for (int p = begin; p < pages;) {
        auto score = [&](auto count) {
            constexpr int P = decltype(count)::value;
            const T *page[P], *next[P];
            for (int i = 0; i < P; i++) {
                page[i] = page_of(keys, p + i);
                next[i] = p + P + i < pages ? page_of(keys, p + P + i) : page[i];
            }
            f16v acc[P][M] = {};
            for (int d = 0; d < D; d++)
                for (int i = 0; i < P; i++) {
                    __builtin_prefetch(next[i] + d * LANES);
                    f16v k = load(page[i] + d * LANES);
                    for (int m = 0; m < M; m++) acc[i][m] += k * query[d * M + m];
                }
            for (int i = 0; i < P; i++)
                for (int m = 0; m < M; m++) store(scores + m * width + (p + i - begin) * LANES, acc[i][m] * scale);
            p += P;
        };
        if (pages - p >= SIDE) score(std::integral_constant<int, SIDE>{});
        else score(std::integral_constant<int, 1>{});
    }
    for (int p = begin; p < pages && p < begin + 2; p++)
        for (int i = 0; i < D * LANES; i += 64 / sizeof(T)) __builtin_prefetch(page_of(values, p) + i);
    float inverse[M];
    for (int m = 0; m < M; m++) {
        const Query<T>& mine = queries[m];
        float* row = scores + m * width;
        for (int t = 0; t < mine.tail; t++) {
            f16v acc{};
            for (int d = 0; d < D; d += LANES) acc += load(mine.tail_k + t * tail_stride + d) * load(mine.q + d);
            row[tail_at + t] = sum(acc) * scale;
        }
        for (int i = 0; i < mine.first - begin * LANES && i < tail_at; i++) row[i] = lowest;
        for (int i = mine.context > begin * LANES ? mine.context - begin * LANES : 0; i < tail_at; i++) row[i] = lowest;
        for (int i = tail_at + mine.tail; i < width; i++) row[i] = lowest;
        f16v top = splat(lowest);
        for (int i = 0; i < width; i += LANES) top = max_of(top, load(row + i));
        float best = lowest;
        for (int i = 0; i < LANES; i++) best = top[i] > best ? top[i] : best;
        f16v total{};
        for (int i = 0; i < width; i += LANES) {
            f16v x = load(row + i), e = exp_of(x - splat(best));
            e = choose(x == splat(lowest), f16v{}, e);
            store(row + i, e);
            total += e;
        }
        inverse[m] = 1.0f / sum(total);
    }
    constexpr int WIDE = 4 * M <= MOST_SUMS ? 4 : 2 * M <= MOST_SUMS ? 2 : 1;  // vectors of values a pass
    for (int d = 0; d < D; d += WIDE * LANES) {
        f16v acc[M][WIDE] = {}, closed[M][WIDE] = {};
        const int wide = (D - d) / LANES < WIDE ? (D - d) / LANES : WIDE;
        auto add = [&](auto count) {
            constexpr int W = decltype(count)::value;
            for (int p = begin; p < pages; p++) {
                const T *page = page_of(values, p) + d, *next = page_of(values, p + 2 < pages ? p + 2 : p) + d;
                const int keys_here = longest - p * LANES < LANES ? longest - p * LANES : LANES;
                // A key that some do not see may have a value that is no number, which times zero were none either.
                const int seen_from = latest - p * LANES, seen_by_all = shortest - p * LANES;
                const int at = (p - begin) * LANES;
                for (int i = 0; i < keys_here; i++) {
                    f16v v[W];
                    for (int w = 0; w < W * LANES; w += 64 / sizeof(T)) __builtin_prefetch(next + i * D + w);
                    for (int w = 0; w < W; w++) v[w] = load(page + i * D + w * LANES);
                    if (i >= seen_from && i < seen_by_all)
                        for (int m = 0; m < M; m++)
                            for (int w = 0; w < W; w++) acc[m][w] += v[w] * scores[m * width + at + i];
                    else
                        for (int m = 0; m < M; m++) {
                            const int key = p * LANES + i;
                            for (int w = 0; w < W && key >= queries[m].first && key < queries[m].context; w++)
                                acc[m][w] += v[w] * scores[m * width + at + i];
                        }
                }
                if (p % CHAIN_PAGES != CHAIN_PAGES - 1 && p != pages - 1) continue;
                for (int m = 0; m < M; m++)
                    for (int w = 0; w < W; w++) { closed[m][w] += acc[m][w]; acc[m][w] = f16v{}; }
            }
            for (int m = 0; m < M; m++)
                for (int t = 0; t < queries[m].tail; t++)
                    for (int w = 0; w < W; w++)
                        acc[m][w] += load(queries[m].tail_v + t * tail_stride + d + w * LANES) *
                                     scores[m * width + tail_at + t];
        };
        with_count<WIDE>(wide, add);
        for (int m = 0; m < M; m++)
            for (int w = 0; w < wide; w++) store(queries[m].out + d + w * LANES, (closed[m][w] + acc[m][w]) * inverse[m]);
    }
}

// window: how many positions a row sees, the last of them its own; 0 for all.
template <typename T>
void attend(const T* qkv, Shape s, int verify, const int32_t* positions, const int32_t* sequence,
            const int32_t* context_end, const int32_t* tail_start, const int32_t* tail_end, const int32_t* page_table,
            int table_width, int window, const T* keys, const T* values, float scale, T* out, int threads) {
    const int64_t width = int64_t(s.heads + 2 * s.kv_heads) * s.head_dim;
    const int group = s.heads / s.kv_heads;
    // Neighbouring rows of one sequence go together, as many as the registers take; [first row, first row of the next).
    const int most = group < TOGETHER ? TOGETHER / group : 1;
    std::vector<int> starts;
    for (int r = 0; r < s.rows; r++)
        if (starts.empty() || r - starts.back() >= most || sequence[r] != sequence[r - 1]) starts.push_back(r);
    const int spans = int(starts.size());
    starts.push_back(s.rows);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch;
        std::vector<Query<T>> queries;
#pragma omp for schedule(dynamic)
        for (int item = 0; item < spans * s.kv_heads; item++) {
            const int span = item / s.kv_heads, kv = item % s.kv_heads;
            queries.clear();
            for (int r = starts[span]; r < starts[span + 1]; r++) {
                const T* tail_k = qkv + (verify + tail_start[r]) * width + (s.heads + kv) * s.head_dim;
                const int first = window && positions[r] >= window ? positions[r] + 1 - window : 0;
                for (int h = kv * group; h < (kv + 1) * group; h++)
                    queries.push_back({qkv + r * width + h * s.head_dim, tail_k, tail_k + s.kv_heads * s.head_dim,
                                       first, context_end[r], tail_end[r] - tail_start[r],
                                       out + (int64_t(r) * s.heads + h) * s.head_dim});
            }
            const int32_t* table = page_table + int64_t(sequence[starts[span]]) * table_width;
            for (size_t first = 0; first < queries.size(); first += TOGETHER) {
                const int left = int(queries.size() - first), take = left < TOGETHER ? left : TOGETHER;
                with_count<TOGETHER>(take, [&](auto count) {
                    attend_together<T, decltype(count)::value>(queries.data() + first, keys, values, table, width, s, kv,
                                                               scale, scratch);
                });
            }
        }
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                              \
    extern "C" void add_norm_##NAME(const T* x, T* residual, const T* weight, T* out, int rows, int n, float eps,    \
                                    int add, int threads) { add_norm(x, residual, weight, out, rows, n, eps, add, threads); } \
    extern "C" void gate_##NAME(const T* gate_up, T* out, int rows, int n, int activation, int threads) {            \
        gate(gate_up, out, rows, n, activation, threads); }                                                          \
    extern "C" void rotate_and_store_##NAME(T* qkv, int rows, int heads, int kv_heads, int head_dim, int verify,     \
        const int32_t* positions, const float* cos, const float* sin, const T* q_norm, const T* k_norm, float eps,   \
        T* keys, T* values, const int32_t* slots, int threads) {                                                     \
        rotate_and_store(qkv, Shape{rows, heads, kv_heads, head_dim}, verify, positions, cos, sin, q_norm, k_norm,   \
                         eps, keys, values, slots, threads); }                                                       \
    extern "C" void attend_##NAME(const T* qkv, int rows, int heads, int kv_heads, int head_dim, int verify,         \
        const int32_t* positions, const int32_t* sequence, const int32_t* context_end, const int32_t* tail_start,    \
        const int32_t* tail_end, const int32_t* page_table, int table_width, int window, const T* keys,              \
        const T* values, float scale, T* out, int threads) {                                                         \
        attend(qkv, Shape{rows, heads, kv_heads, head_dim}, verify, positions, sequence, context_end, tail_start,    \
               tail_end, page_table, table_width, window, keys, values, scale, out, threads); }

EXPORT(bf16, bf16)
EXPORT(float, float)
