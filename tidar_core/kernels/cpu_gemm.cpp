// Matrix products for few rows, bf16 in, fp32 sums, for processors with AVX-512 BF16. An output is one chain of
// dot products over k in ascending order, whatever the number of rows: its bits depend on its row alone.
//
// Packed weights: [out / 16][in / 2][16 outputs][2 inputs], so that one load brings a pair of inputs for sixteen
// outputs, and every byte of a weight is read once a step.
#ifdef __AVX512BF16__
#include <immintrin.h>
#include <omp.h>
#include <type_traits>

namespace {


// Adds x [R rows, k] times one pair of packed 16-output blocks to sums; `pairs` = k / 2, x rows are `stride` apart.
template <int R, int B>
inline void accumulate(__m512 (&sums)[R][B], const bf16* x, int64_t stride, const bf16* weight, int64_t block, int pairs) {
    for (int p = 0; p < pairs; p++) {
        __m512bh w[B];
        for (int b = 0; b < B; b++) w[b] = (__m512bh)_mm512_loadu_si512(weight + b * block + p * 32);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride + 2 * p, 4);
            __m512bh wide = (__m512bh)_mm512_set1_epi32(pair);
            for (int b = 0; b < B; b++) sums[r][b] = _mm512_dpbf16_ps(sums[r][b], w[b], wide);
        }
    }
}

inline void put(float* out, __m512 v) { _mm512_storeu_ps(out, v); }
inline void put(bf16* out, __m512 v) { _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(v)); }
inline __m512 widen16(const bf16* p) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}

// R rows of outputs [first, first + 16 B); `low` and `up` are the adapter's part, null for base rows.
template <int R, int B, typename Out>
void tile(const bf16* x, const bf16* weight, int in, const bf16* bias, const bf16* low, const bf16* up, int rank,
          int first, Out* out, int64_t out_stride) {
    __m512 sums[R][B];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums[r][b] = bias ? widen16(bias + first + 16 * b) : _mm512_setzero_ps();
    accumulate<R, B>(sums, x, in, weight + int64_t(first) * in, int64_t(16) * in, in / 2);
    if (low) accumulate<R, B>(sums, low, rank, up + int64_t(first) * rank, int64_t(16) * rank, rank / 2);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) put(out + r * out_stride + first + 16 * b, sums[r][b]);
}

template <int B, typename Out>
void rows_of_tiles(const bf16* x, int rows, const bf16* weight, int in, const bf16* bias, const bf16* low,
                   const bf16* up, int rank, int first, Out* out, int64_t out_stride) {
    constexpr int MOST = 24 / B;  // sums that fit the registers beside the weights
    for (int r = 0; r < rows;) {
        int take = rows - r;
        auto run = [&](auto count) {
            constexpr int R = decltype(count)::value;
            tile<R, B>(x + int64_t(r) * in, weight, in, bias, low ? low + int64_t(r) * rank : nullptr, up, rank, first,
                       out + r * out_stride, out_stride);
            r += R;
        };
        if (take >= MOST) run(std::integral_constant<int, MOST>{});
        else if (take >= 8) run(std::integral_constant<int, 8>{});
        else if (take >= 4) run(std::integral_constant<int, 4>{});
        else if (take >= 2) run(std::integral_constant<int, 2>{});
        else run(std::integral_constant<int, 1>{});
    }
}

template <typename Out>
void product(const bf16* x, int rows, int in, const bf16* weight, int out_features, const bf16* bias, Out* out,
             int first_mask_row, const bf16* down, const bf16* up, int rank, bf16* low, int threads) {
    const int blocks = out_features / 32, mask_rows = rows - first_mask_row;
    // `low` = x downᵀ of the mask rows, one copy a thread: computing it twice costs less than waiting for it.
#pragma omp parallel num_threads(threads)
    {
        const bf16* mine = nullptr;
#pragma omp for schedule(static)
        for (int b = 0; b < blocks; b++) {
            if (down && !mine) {
                bf16* own = low + int64_t(omp_get_thread_num()) * mask_rows * rank;
                for (int first = 0; first < rank; first += 16)
                    rows_of_tiles<1>(x + int64_t(first_mask_row) * in, mask_rows, down, in, nullptr, nullptr, nullptr, 0,
                                     first, own, rank);
                mine = own;
            }
            int base = down ? first_mask_row : rows;
            rows_of_tiles<2>(x, base, weight, in, bias, nullptr, nullptr, 0, 32 * b, out, out_features);
            if (down)
                rows_of_tiles<2>(x + int64_t(base) * in, mask_rows, weight, in, bias, mine, up, rank, 32 * b,
                                 out + int64_t(base) * out_features, out_features);
        }
    }
}

}  // namespace

extern "C" int has_products() { return 1; }
extern "C" void product_bf16(const bf16* x, int rows, int in, const bf16* weight, int out_features, const bf16* bias,
                             bf16* out, int first_mask_row, const bf16* down, const bf16* up, int rank, bf16* low,
                             int threads) {
    product(x, rows, in, weight, out_features, bias, out, first_mask_row, down, up, rank, low, threads);
}
extern "C" void product_float(const bf16* x, int rows, int in, const bf16* weight, int out_features, float* out,
                              int threads) {
    product(x, rows, in, weight, out_features, nullptr, out, rows, nullptr, nullptr, 0, nullptr, threads);
}

#else
extern "C" int has_products() { return 0; }
#endif
