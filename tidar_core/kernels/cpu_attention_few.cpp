// Attention of few queries by lanes, to the bits that the tile unit says (`cpu_attention_tiles.cpp`): of few, memory
// takes the time, and lanes need nothing laid anew before they begin.
//
// What a tile instruction does with 32 inputs: products of the even ones are summed in one chain and those of the odd
// ones in another, both from zero, and what the two chains come to is added. What is too small to be normal is zero.
#include <algorithm>

namespace {

#ifdef TILED

constexpr int FEW = 4;

// While it lives lanes take what is not normal for zero, as tiles do. What is computed under it must be in a function
// that is not inlined: the compiler does not know that it matters.
struct NormalOrZero {
    static constexpr unsigned FLUSHED = 0x8040;
    unsigned before = _mm_getcsr();
    NormalOrZero() { _mm_setcsr(before | FLUSHED); }
    ~NormalOrZero() { _mm_setcsr(before); }
};
#define APART __attribute__((noinline))

// Products of M queries, asked [head_dim, M], and all keys, to scores [M, stride].
template <int M>
APART void score_few(const float* asked, const Pages<bf16>& all, const Span& span, float* scores, int64_t stride) {
    constexpr int SIDE = M < FEW ? 4 : 3;  // pages whose chains are under way together
    const int head_dim = all.head_dim;
    for (int p = span.begin; p < span.pages;) {
        auto score = [&](auto count) {
            constexpr int P = decltype(count)::value;
            const bf16 *page[P], *next[P];
            for (int i = 0; i < P; i++) {
                page[i] = all.page(all.keys, p + i);
                next[i] = p + P + i < span.pages ? all.page(all.keys, p + P + i) : page[i];
            }
            for (int from = 0; from < head_dim; from += TILE_INPUTS) {
                f16v even[P][M] = {}, odd[P][M] = {};
                for (int d = from; d < std::min(from + TILE_INPUTS, head_dim); d += 2)
                    for (int i = 0; i < P; i++) {
                        __builtin_prefetch(next[i] + d * LANES);
                        const f16v first = load(page[i] + d * LANES), second = load(page[i] + (d + 1) * LANES);
                        for (int m = 0; m < M; m++) {
                            even[i][m] += first * asked[d * M + m];
                            odd[i][m] += second * asked[(d + 1) * M + m];
                        }
                    }
                for (int i = 0; i < P; i++)
                    for (int m = 0; m < M; m++) {
                        float* to = scores + m * stride + (p + i - span.begin) * LANES;
                        store(to, (from ? load(to) : f16v{}) + (even[i][m] + odd[i][m]));
                    }
            }
            p += P;
        };
        if (span.pages - p >= SIDE) score(std::integral_constant<int, SIDE>{});
        else score(std::integral_constant<int, 1>{});
    }
}

// The sums over the pages, to mixed [M, head_dim]; weights: [M, stride]. sums: scratch for as many as mixed.
template <int M>
APART void mix_few(const float* weights, int64_t stride, const Pages<bf16>& all, const Span& span, float* mixed,
                   float* sums) {
    const int head_dim = all.head_dim;
    for (int i = 0; i < M * head_dim; i++) mixed[i] = sums[i] = 0.0f;
    for (int p = span.begin; p < span.pages; p += 2) {
        auto add = [&](int d, auto width) {
            constexpr int W = decltype(width)::value;
            f16v even[M][W] = {}, odd[M][W] = {};
            for (int i = 0; i < 2 && p + i < span.pages; i++) {
                const bf16 *page = all.page(all.values, p + i) + d;
                const bf16 *next = all.page(all.values, p + i + 2 < span.pages ? p + i + 2 : p + i) + d;
                const float* mine = weights + (p + i - span.begin) * LANES;
                for (int k = 0; k < LANES; k += 2) {
                    f16v first[W], second[W];
                    for (int at = 0; at < W * LANES; at += 2 * LANES) {
                        __builtin_prefetch(next + k * head_dim + at);
                        __builtin_prefetch(next + (k + 1) * head_dim + at);
                    }
                    for (int w = 0; w < W; w++) {
                        first[w] = load(page + k * head_dim + w * LANES);
                        second[w] = load(page + (k + 1) * head_dim + w * LANES);
                    }
                    for (int m = 0; m < M; m++)
                        for (int w = 0; w < W; w++) {
                            even[m][w] += first[w] * mine[m * stride + k];
                            odd[m][w] += second[w] * mine[m * stride + k + 1];
                        }
                }
            }
            for (int m = 0; m < M; m++)
                for (int w = 0; w < W; w++) {
                    float* to = sums + m * head_dim + d + w * LANES;
                    store(to, load(to) + (even[m][w] + odd[m][w]));
                }
        };
        constexpr int WIDE = M < FEW ? 4 : 2;
        for (int d = 0; d < head_dim; d += WIDE * LANES)
            with_count<WIDE>(std::min(WIDE, (head_dim - d) / LANES), [&](auto width) { add(d, width); });
        if ((p + 2) % CHAIN_PAGES != 0 && p + 2 < span.pages) continue;
        for (int i = 0; i < M * head_dim; i += LANES) {
            store(mixed + i, load(mixed + i) + load(sums + i));
            store(sums + i, f16v{});
        }
    }
}

inline f16v in_bf16(f16v x) {
    return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}

#endif

}  // namespace
