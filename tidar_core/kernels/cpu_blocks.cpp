// Attention of blocks of neighbouring rows in training, with its gradient, in fp32: a row sees rows of its document that
// were laid before, and those of its own block. Layouts: cpu_blocks.py.
//
// One key/value head of one block is a unit of work. The group's queries of all its slots are rows beside each other
// [queries, head_dim], slot by slot; what they see is columns [queries, width]: LANES for the slots of the block, then
// the document's, filled up to whole lanes.
#include <algorithm>
#include <vector>

struct BlockHeads { int32_t rows, heads, kv_heads, head_dim; };

// row: the block's first among those that attend. first, seen: where its document begins among the rows laid before, and
// how many of them it sees at most. shares: where its shares begin.
struct Block { int64_t row, slots, first, seen, shares; };

// What was laid before, keys or values of each: row r of head h begins at rows + r * step + h * head_dim, and `across`
// is [kv_heads, head_dim, wide].
struct LaidRows { const float* rows; int64_t step; const float* across; int64_t wide; };

namespace {

constexpr float NEVER = -3.0e38f;

inline int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// x [head_dim] turned, times `scale`. sign: -1 turns back.
LANEWISE void turn(const float* x, const float* cos, const float* sin, int head_dim, float sign, float scale, float* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float left = x[i], right = x[half + i], c = cos[i] * scale, n = sin[i] * sign * scale;
        out[i] = left * c - right * n;
        out[half + i] = right * c + left * n;
    }
}

// Products that are added up: a(row, k) at a[row * down + k * along], b(k, column) at b[k * step + column], `count` of k.
struct Part { const float* a; int64_t down, along; const float* b; int64_t step, count; };

// out [rows, columns], rows `step` apart: the sum of all parts' products, columns being whole lanes. As many sums at once
// as fit the registers: the loads of b serve them all.
template <int PARTS> void add_up(const Part (&parts)[PARTS], int rows, int64_t columns, float* out, int64_t step) {
    constexpr int BESIDE = MOST_SUMS >= 16 ? 2 : 1, HEIGHT = MOST_SUMS / BESIDE;
    auto tile = [&](auto height, auto beside, int row, int64_t column) {
        constexpr int R = decltype(height)::value, B = decltype(beside)::value;
        f16v sums[R][B] = {};
        for (const Part& part : parts) {
            const float *a = part.a + row * part.down, *b = part.b + column;
            for (int64_t k = 0; k < part.count; k++, a += part.along, b += part.step)
                UNROLL for (int c = 0; c < B; c++) {
                    const f16v several = load(b + c * LANES);
                    UNROLL for (int r = 0; r < R; r++) sums[r][c] = sums[r][c] + several * a[r * part.down];
                }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < B; c++) store(out + (row + r) * step + column + c * LANES, sums[r][c]);
    };
    for (int64_t column = 0; column < columns; column += BESIDE * LANES)
        for (int row = 0; row < rows; row += HEIGHT)
            with_count<HEIGHT>(std::min(HEIGHT, rows - row), [&](auto height) {
                if (BESIDE > 1 && column + BESIDE * LANES <= columns)
                    tile(height, std::integral_constant<int, BESIDE>{}, row, column);
                else tile(height, std::integral_constant<int, 1>{}, row, column);
            });
}

// Numbers that are not normal would make the products behind them slow.
LANEWISE f16v normal_or_zero(f16v v) { return choose(v < splat(1.17549435e-38f), f16v{}, v); }

// A row of scores [width] becomes shares, in place: of the block's own columns `own` are seen, of the others those from
// begin to end; what the rest held counts for nothing.
void share_out(float* row, int own, int64_t begin, int64_t end, int64_t width) {
    float* others = row + LANES;
    std::fill(row + own, others, NEVER);
    std::fill(others, others + begin, NEVER);
    std::fill(others + end, row + width, NEVER);
    f16v most = load(row), total{};
    for (int64_t i = LANES; i < width; i += LANES) most = max_of(most, load(row + i));
    float each[LANES];
    store(each, most);
    const float highest = *std::max_element(each, each + LANES);
    for (int64_t i = 0; i < width; i += LANES) {
        const f16v e = exp_below(load(row + i) - highest);
        store(row + i, e);
        total += e;
    }
    const float part = 1.0f / sum(total);
    for (int64_t i = 0; i < width; i += LANES) store(row + i, normal_or_zero(load(row + i) * part));
}

// The gradient with respect to a row's shares becomes that with respect to its scores, in place.
void slopes_of_scores(float* d, const float* shares, int64_t width) {
    f16v along{};
    for (int64_t i = 0; i < width; i += LANES) along += load(shares + i) * load(d + i);
    const float mean = sum(along);
    for (int64_t i = 0; i < width; i += LANES) store(d + i, load(shares + i) * (load(d + i) - mean));
}

// The rows of a unit, where they lie and as they are worked with.
struct Unit {
    BlockHeads s;
    Block block;
    int head, groups, slots, queries;
    int64_t width, line;  // line: from one row of qkv to the next
    const float *cos, *sin;

    Unit(BlockHeads s, Block block, int head, const float* cos, const float* sin)
        : s(s), block(block), head(head), groups(s.heads / s.kv_heads), slots(block.slots), queries(slots * groups),
          width(LANES + whole_lanes(block.seen)), line(int64_t(s.heads + 2 * s.kv_heads) * s.head_dim),
          cos(cos + block.row * (s.head_dim / 2)), sin(sin + block.row * (s.head_dim / 2)) {}

    int64_t shares() const { return block.shares + int64_t(head) * queries * width; }
    // Of heads [.., rows, .. * head_dim], the group's first in the block's first row.
    int64_t asked() const { return (block.row * s.heads + int64_t(head) * groups) * s.head_dim; }
    int64_t key() const { return block.row * line + int64_t(s.heads + head) * s.head_dim; }
    int64_t value() const { return key() + int64_t(s.kv_heads) * s.head_dim; }

    void turned(const float* x, int slot, float sign, float scale, float* out) const {
        turn(x, cos + slot * (s.head_dim / 2), sin + slot * (s.head_dim / 2), s.head_dim, sign, scale, out);
    }
    // q [queries, head_dim], scaled, and k [slots, head_dim].
    void lay(const float* qkv, float scale, float* q, float* k) const {
        const float* from = qkv + block.row * line + int64_t(head) * groups * s.head_dim;
        for (int slot = 0; slot < slots; slot++) {
            for (int g = 0; g < groups; g++)
                turned(from + slot * line + g * s.head_dim, slot, 1.0f, scale, q + (slot * groups + g) * s.head_dim);
            turned(qkv + key() + slot * line, slot, 1.0f, 1.0f, k + slot * s.head_dim);
        }
    }
    // The slots' vectors, `step` apart, beside each other: [head_dim, LANES], zeros behind the last.
    void beside(const float* vectors, int64_t step, float* out) const {
        std::fill(out, out + s.head_dim * LANES, 0.0f);
        for (int slot = 0; slot < slots; slot++)
            for (int d = 0; d < s.head_dim; d++) out[d * LANES + slot] = vectors[slot * step + d];
    }
    // Rows [queries, head_dim] times the slots beside each other and the document's rows across: [queries, width].
    void against_all(const float* rows, const float* own, LaidRows laid, float* out) const {
        const float* across = laid.across + int64_t(head) * s.head_dim * laid.wide + block.first;
        add_up<1>({{rows, s.head_dim, 1, own, LANES, s.head_dim}}, queries, LANES, out, width);
        add_up<1>({{rows, s.head_dim, 1, across, laid.wide, s.head_dim}}, queries, width - LANES, out + LANES, width);
    }
    // Weights [queries, width] times the slots' vectors, `step` apart, and the document's: [queries, head_dim].
    void mixed(const float* weights, const float* own, int64_t step, LaidRows laid, float* out) const {
        const float* others = laid.rows + block.first * laid.step + int64_t(head) * s.head_dim;
        add_up<2>({{weights, width, 1, own, step, slots}, {weights + LANES, width, 1, others, laid.step, block.seen}}, queries,
                  s.head_dim, out, s.head_dim);
    }
    // Rows [queries, head_dim] summed for each slot with its weights [queries, width]: [slots, head_dim].
    void by_slot(const float* weights, const float* rows, float* out) const {
        add_up<1>({{weights, 1, width, rows, s.head_dim, queries}}, slots, s.head_dim, out, s.head_dim);
    }
};

// Calls run(unit, matrix, vectors, size) for every head of every block: room for one matrix [queries, width], and for
// `vectors` of [queries or slots, head_dim], `size` apart.
template <typename Run>
void each_unit(BlockHeads s, const Block* blocks, int count, const float* cos, const float* sin, int vectors, int threads,
               Run run) {
    int64_t most = 0, queries = LANES;
    for (int b = 0; b < count; b++) {
        const Unit unit(s, blocks[b], 0, cos, sin);
        most = std::max(most, unit.queries * unit.width);
        queries = std::max<int64_t>(queries, unit.queries);
    }
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch(most + vectors * queries * s.head_dim);
#pragma omp for schedule(dynamic)
        for (int u = 0; u < s.kv_heads * count; u++)
            run(Unit(s, blocks[u % count], u / count, cos, sin), scratch.data(), scratch.data() + most, queries * s.head_dim);
    }
}

}  // namespace

#ifdef PART_training
extern "C" {

// kv [rows, 2 * kv_heads, head_dim] out of qkv: keys, turned, then values.
void lay_keys(const float* qkv, BlockHeads s, const float* cos, const float* sin, float* kv, int threads) {
    const int half = s.head_dim / 2, size = s.kv_heads * s.head_dim;
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < s.rows; r++) {
        const float* from = qkv + r * (s.heads + 2 * s.kv_heads) * s.head_dim + int64_t(s.heads) * s.head_dim;
        float* to = kv + r * 2 * size;
        for (int at = 0; at < size; at += s.head_dim)
            turn(from + at, cos + r * half, sin + r * half, s.head_dim, 1.0f, 1.0f, to + at);
        std::memcpy(to + size, from + size, sizeof(float) * size);
    }
}

// out [heads, head_dim, wide] of `count` rows `step` apart, each [heads, head_dim]; zeros behind the last.
void lay_across(const float* rows, int64_t step, int64_t count, int heads, int head_dim, float* out, int64_t wide,
                int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int head = 0; head < heads; head++)
        for (int64_t first = 0; first < wide; first += LANES) {
            const float* from = rows + first * step + int64_t(head) * head_dim;
            float* to = out + int64_t(head) * head_dim * wide + first;
            const int some = std::clamp<int64_t>(count - first, 0, LANES);
            for (int d = 0; d < head_dim; d++) {
                for (int i = 0; i < some; i++) to[d * wide + i] = from[i * step + d];
                std::fill(to + d * wide + some, to + d * wide + LANES, 0.0f);
            }
        }
}

// out [rows, heads * head_dim]. Of the rows laid before, a row sees those from begins[row] on (from the first where that
// is null). laid: values, and keys across. shares: all of them are kept there; null where none are wanted.
void attend_blocks(const float* qkv, BlockHeads s, const float* cos, const float* sin, float scale, const Block* blocks,
                   int count, LaidRows laid, const int32_t* begins, int causal, float* shares, float* out, int threads) {
    each_unit(s, blocks, count, cos, sin, 4, threads, [&](const Unit& unit, float* own, float* room, int64_t size) {
        float *q = room, *k = q + size, *keys = k + size, *mixed = keys + size;
        float* share = shares ? shares + unit.shares() : own;
        unit.lay(qkv, scale, q, k);
        unit.beside(k, s.head_dim, keys);
        unit.against_all(q, keys, laid, share);
        for (int j = 0; j < unit.queries; j++) {
            const int slot = j / unit.groups, seen = causal ? slot + 1 : unit.slots;
            const int64_t begin = begins ? std::min<int64_t>(begins[unit.block.row + slot], unit.block.seen) : 0;
            share_out(share + j * unit.width, seen, begin, unit.block.seen, unit.width);
        }
        unit.mixed(share, qkv + unit.value(), unit.line, laid, mixed);
        for (int slot = 0; slot < unit.slots; slot++)
            std::memcpy(out + unit.asked() + int64_t(slot) * s.heads * s.head_dim, mixed + slot * unit.groups * s.head_dim,
                        sizeof(float) * unit.groups * s.head_dim);
    });
}

// d_qkv, as qkv, of d_out [rows, heads * head_dim]. laid: keys, and values across.
void slope_blocks(const float* d_out, const float* qkv, BlockHeads s, const float* cos, const float* sin, float scale,
                  const Block* blocks, int count, LaidRows laid, const float* shares, float* d_qkv, int threads) {
    each_unit(s, blocks, count, cos, sin, 6, threads, [&](const Unit& unit, float* d_scores, float* room, int64_t size) {
        const int head_dim = s.head_dim, groups = unit.groups;
        float *q = room, *k = q + size, *values = k + size, *d_mixed = values + size, *d_q = d_mixed + size;
        float* d_slots = d_q + size;
        const float* share = shares + unit.shares();
        unit.lay(qkv, scale, q, k);
        unit.beside(qkv + unit.value(), unit.line, values);
        for (int slot = 0; slot < unit.slots; slot++)
            std::memcpy(d_mixed + slot * groups * head_dim, d_out + unit.asked() + int64_t(slot) * s.heads * head_dim,
                        sizeof(float) * groups * head_dim);
        unit.against_all(d_mixed, values, laid, d_scores);
        for (int j = 0; j < unit.queries; j++) slopes_of_scores(d_scores + j * unit.width, share + j * unit.width, unit.width);
        unit.mixed(d_scores, k, head_dim, laid, d_q);
        float* to = d_qkv + unit.block.row * unit.line + int64_t(unit.head) * groups * head_dim;
        for (int j = 0; j < unit.queries; j++)
            unit.turned(d_q + j * head_dim, j / groups, -1.0f, scale, to + j / groups * unit.line + j % groups * head_dim);
        unit.by_slot(d_scores, q, d_slots);
        for (int slot = 0; slot < unit.slots; slot++)
            unit.turned(d_slots + slot * head_dim, slot, -1.0f, 1.0f, d_qkv + unit.key() + slot * unit.line);
        unit.by_slot(share, d_mixed, d_slots);
        for (int slot = 0; slot < unit.slots; slot++)
            std::memcpy(d_qkv + unit.value() + slot * unit.line, d_slots + slot * head_dim, sizeof(float) * head_dim);
    });
}

}  // extern "C"
#endif
