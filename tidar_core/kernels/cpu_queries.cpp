// What the queries of attention see, and what the keys that they see weigh. Layouts and masks: ops.py.
#include <limits>
#include <vector>

namespace {

constexpr int CHAIN_PAGES = 32;  // whose values are summed in one chain: a longer one would lose what is small

// One query head of one row, and what it sees: keys first <= k < context of the pages, and so many of the tail.
template <typename T> struct Query { const T* q; const T* tail_k; const T* tail_v; int first, context, tail; T* out; };

// What some queries see of their sequence's pages, together; then come the keys of their tails, from column `tail_at`
// of a row of scores on, which is `width` long. Keys from `latest` on and below `shortest` are seen by all.
struct Span { int begin, pages, latest, shortest, longest, tail_at, width; };

// side: pages that are taken together, from a multiple of them on.
template <typename T> Span span_of(const Query<T>* queries, int count, int side = 1) {
    Span span{queries[0].first, 0, 0, queries[0].context, 0, 0, 0};
    int tail = 0;
    for (int m = 0; m < count; m++) {
        span.begin = queries[m].first < span.begin ? queries[m].first : span.begin;
        span.latest = queries[m].first > span.latest ? queries[m].first : span.latest;
        span.shortest = queries[m].context < span.shortest ? queries[m].context : span.shortest;
        span.longest = queries[m].context > span.longest ? queries[m].context : span.longest;
        tail = queries[m].tail > tail ? queries[m].tail : tail;
    }
    span.pages = (span.longest + LANES - 1) / LANES;
    span.begin = span.begin / LANES < span.pages ? span.begin / LANES : span.pages;
    span.begin -= span.begin % side;
    span.tail_at = (span.pages - span.begin + side - 1) / side * side * LANES;
    span.width = span.tail_at + (tail + LANES - 1) / LANES * LANES;
    return span;
}

// Pages of one layer, as one sequence and one K/V head find them.
template <typename T> struct Pages {
    const T *keys, *values;
    const int32_t* table;
    int kv_heads, kv_head, head_dim;
    const T* page(const T* all, int p) const {
        return all + (int64_t(table[p]) * kv_heads + kv_head) * head_dim * LANES;
    }
};

// exp(x) where x is not above zero. What is too small for a number is zero.
inline f16v exp_below(f16v x) { return choose(x < splat(-87.0f), f16v{}, power(x)); }

// A row of products of a query and the keys that it sees becomes what each key weighs; what the sum of all these is to
// be divided by comes back, inverted.
template <typename T> float weigh(const Query<T>& mine, float* row, const Span& span, float scale) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int begin = span.begin * LANES;
    for (int i = 0; i < mine.first - begin && i < span.tail_at; i++) row[i] = lowest;
    for (int i = mine.context > begin ? mine.context - begin : 0; i < span.tail_at; i++) row[i] = lowest;
    for (int i = span.tail_at + mine.tail; i < span.width; i++) row[i] = lowest;
    f16v top = splat(lowest);
    for (int i = 0; i < span.width; i += LANES) {
        const f16v x = load(row + i) * scale;
        store(row + i, x);
        top = max_of(top, x);
    }
    float best = lowest;
    for (int i = 0; i < LANES; i++) best = top[i] > best ? top[i] : best;
    f16v total{};
    for (int i = 0; i < span.width; i += LANES) {
        const f16v e = exp_below(load(row + i) - splat(best));
        store(row + i, e);
        total += e;
    }
    return 1.0f / sum(total);
}

}  // namespace
