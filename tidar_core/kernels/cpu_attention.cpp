// Paged attention for a CPU. Every row is computed by itself, in an order that depends on the positions of its keys
// alone, so that its bits do not depend on the batch. Layouts and masks: ops.py.
#include <type_traits>
#include <vector>

namespace {

constexpr int TOGETHER = MOST_SUMS < 12 ? MOST_SUMS : 12;  // queries whose sums fit the registers

// M queries of one sequence and one K/V head, which share its pages. Every score and every sum over keys is a chain of
// its own in the order of the keys, closed at places that the keys' positions alone tell, so that a query's bits do not
// depend on the others.
template <typename T, int M>
void attend_together(const Query<T>* queries, const Pages<T>& all, int64_t tail_stride, float scale,
                     std::vector<float>& scratch) {
    const int D = all.head_dim;
    const Span span = span_of(queries, M);
    const int begin = span.begin, pages = span.pages, width = span.width;
    scratch.resize(size_t(M) * (width + D));
    float *scores = scratch.data(), *query = scores + size_t(M) * width;
    for (int m = 0; m < M; m++)
        for (int d = 0; d < D; d++) query[d * M + m] = widen(queries[m].q[d]);
    // Pages side by side, so that enough sums are under way.
    constexpr int SIDE = 4 * M <= TOGETHER ? 4 : 2 * M <= TOGETHER ? 2 : 1;
    for (int p = begin; p < pages;) {
        auto score = [&](auto count) {
            constexpr int P = decltype(count)::value;
            const T *page[P], *next[P];
            for (int i = 0; i < P; i++) {
                page[i] = all.page(all.keys, p + i);
                next[i] = p + P + i < pages ? all.page(all.keys, p + P + i) : page[i];
            }
            f16v acc[P][M] = {};
            for (int d = 0; d < D; d++)
                for (int i = 0; i < P; i++) {
                    __builtin_prefetch(next[i] + d * LANES);
                    f16v k = load(page[i] + d * LANES);
                    for (int m = 0; m < M; m++) acc[i][m] += k * query[d * M + m];
                }
            for (int i = 0; i < P; i++)
                for (int m = 0; m < M; m++) store(scores + m * width + (p + i - begin) * LANES, acc[i][m]);
            p += P;
        };
        if (pages - p >= SIDE) score(std::integral_constant<int, SIDE>{});
        else score(std::integral_constant<int, 1>{});
    }
    for (int p = begin; p < pages && p < begin + 2; p++)
        for (int i = 0; i < D * LANES; i += 64 / sizeof(T)) __builtin_prefetch(all.page(all.values, p) + i);
    float inverse[M];
    for (int m = 0; m < M; m++) {
        for (int t = 0; t < queries[m].tail; t++) {
            f16v acc{};
            for (int d = 0; d < D; d += LANES)
                acc += load(queries[m].tail_k + t * tail_stride + d) * load(queries[m].q + d);
            scores[m * width + span.tail_at + t] = sum(acc);
        }
        inverse[m] = weigh(queries[m], scores + m * width, span, scale);
    }
    constexpr int WIDE = 4 * M <= MOST_SUMS ? 4 : 2 * M <= MOST_SUMS ? 2 : 1;  // vectors of values a pass
    for (int d = 0; d < D; d += WIDE * LANES) {
        f16v acc[M][WIDE] = {}, closed[M][WIDE] = {};
        const int wide = (D - d) / LANES < WIDE ? (D - d) / LANES : WIDE;
        auto add = [&](auto count) {
            constexpr int W = decltype(count)::value;
            for (int p = begin; p < pages; p++) {
                const T* page = all.page(all.values, p) + d;
                const T* next = all.page(all.values, p + 2 < pages ? p + 2 : p) + d;
                const int keys_here = span.longest - p * LANES < LANES ? span.longest - p * LANES : LANES;
                // A key that some do not see may have a value that is no number, which times zero were none either.
                const int seen_from = span.latest - p * LANES, seen_by_all = span.shortest - p * LANES;
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
                                     scores[m * width + span.tail_at + t];
        };
        with_count<WIDE>(wide, add);
        for (int m = 0; m < M; m++)
            for (int w = 0; w < wide; w++)
                store(queries[m].out + d + w * LANES, (closed[m][w] + acc[m][w]) * inverse[m]);
    }
}

// By lanes: as many queries go together as the registers take.
template <typename T> struct ByLanes {
    std::vector<float> scratch;
    static int at_once(int, int, int) { return TOGETHER; }
    void attend(const Query<T>* queries, int count, const Pages<T>& all, int64_t tail_stride, float scale) {
        with_count<TOGETHER>(count, [&](auto some) {
            attend_together<T, decltype(some)::value>(queries, all, tail_stride, scale, scratch);
        });
    }
};

// window: how many positions a row sees, the last of them its own; 0 for all.
template <typename Way, typename T>
void attend_in(const T* qkv, Shape s, int verify, const int32_t* positions, const int32_t* sequence,
            const int32_t* context_end, const int32_t* tail_start, const int32_t* tail_end, const int32_t* page_table,
            int table_width, int window, const T* keys, const T* values, float scale, T* out, int threads) {
    const int64_t width = int64_t(s.heads + 2 * s.kv_heads) * s.head_dim;
    const int group = s.heads / s.kv_heads;
    // Neighbouring rows of one sequence go together; [first row, first row of the next).
    const int at_once = Way::at_once(s.rows * group, s.kv_heads, threads);
    const int most = group < at_once ? at_once / group : 1;
    std::vector<int> starts;
    for (int r = 0; r < s.rows; r++)
        if (starts.empty() || r - starts.back() >= most || sequence[r] != sequence[r - 1]) starts.push_back(r);
    const int spans = int(starts.size());
    starts.push_back(s.rows);
#pragma omp parallel num_threads(threads)
    {
        Way way;
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
            const Pages<T> all{keys, values, table, s.kv_heads, kv, s.head_dim};
            for (size_t first = 0; first < queries.size(); first += at_once) {
                const int left = int(queries.size() - first), take = left < at_once ? left : at_once;
                way.attend(queries.data() + first, take, all, width, scale);
            }
        }
    }
}

template <typename T, typename... Rest> void attend(const T* qkv, Rest... rest) {
#ifdef TILED
    if constexpr (std::is_same_v<T, bf16>)
        if (has_tiles()) return attend_in<ByTiles>(qkv, rest...);
#endif
    attend_in<ByLanes<T>>(qkv, rest...);
}

}  // namespace

#define EXPORT_ATTENTION(NAME, T)                                                                                    \
    extern "C" void attend_##NAME(const T* qkv, int rows, int heads, int kv_heads, int head_dim, int verify,         \
        const int32_t* positions, const int32_t* sequence, const int32_t* context_end, const int32_t* tail_start,    \
        const int32_t* tail_end, const int32_t* page_table, int table_width, int window, const T* keys,              \
        const T* values, float scale, T* out, int threads) {                                                         \
        attend(qkv, Shape{rows, heads, kv_heads, head_dim}, verify, positions, sequence, context_end, tail_start,    \
               tail_end, page_table, table_width, window, keys, values, scale, out, threads); }

#ifdef PART_bf16
EXPORT_ATTENTION(bf16, bf16)
#endif
#ifdef PART_float
EXPORT_ATTENTION(float, float)
#endif
