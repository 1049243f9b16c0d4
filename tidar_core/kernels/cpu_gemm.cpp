// Matrix products for few rows. An output is one chain of multiply-adds over k in ascending order, whatever the
// number of rows: its bits depend on its row alone.
//
// Packed weights: [out / 16][in / S][16 outputs][S inputs] with S = 2 for bf16 and 1 for fp32, so that one load brings
// sixteen outputs' worth, and every byte of a weight is read once a step. Sums are fp32.
#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

template <typename T> constexpr int STEP = sizeof(T) == 2 ? 2 : 1;  // inputs that one load of weights brings

inline f16v multiply_add(f16v sum, const float* weight, const float* x) { return sum + load(weight) * *x; }
#ifdef __AVX512BF16__
inline f16v multiply_add(f16v sum, const bf16* weight, const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (f16v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_set1_epi32(pair));
}
#else
inline f16v multiply_add(f16v sum, const bf16* weight, const bf16* x) {
    u16v both;
    std::memcpy(&both, weight, sizeof both);
    sum = sum + (f16v)(both << 16) * widen(x[0]);
    return sum + (f16v)(both & 0xffff0000u) * widen(x[1]);
}
#endif

// Adds x [R rows, in] times B neighbouring blocks of 16 outputs to sums; x rows are `in` apart, blocks 16 * in.
template <int R, int B, typename T>
inline void accumulate(f16v (&sums)[R][B], const T* x, const T* weight, int in) {
    constexpr int S = STEP<T>;
    for (int k = 0; k < in; k += S)
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++)
                sums[r][b] = multiply_add(sums[r][b], weight + (int64_t(b) * in + k) * LANES, x + int64_t(r) * in + k);
}

// What is added to the base product on mask rows: low [rows, rank] times `up`, packed like a weight.
template <typename T> struct LowRank { const T* low; const T* up; int rank; };

// R rows of outputs [first, first + 16 B).
template <int R, int B, typename T, typename Out>
void tile(const T* x, const T* weight, int in, const T* bias, LowRank<T> extra, int first, Out* out, int64_t stride) {
    f16v sums[R][B];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums[r][b] = bias ? load(bias + first + LANES * b) : f16v{};
    accumulate<R, B, T>(sums, x, weight + int64_t(first) * in, in);
    if (extra.low) accumulate<R, B, T>(sums, extra.low, extra.up + int64_t(first) * extra.rank, extra.rank);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) store(out + r * stride + first + LANES * b, sums[r][b]);
}

template <int B, typename T, typename Out>
void rows_of_tiles(const T* x, int rows, const T* weight, int in, const T* bias, LowRank<T> extra, int first, Out* out,
                   int64_t stride) {
    constexpr int MOST = 24 / B;  // sums that fit the registers beside the weights
    for (int r = 0; r < rows;) {
        auto run = [&](auto count) {
            constexpr int R = decltype(count)::value;
            LowRank<T> mine{extra.low ? extra.low + int64_t(r) * extra.rank : nullptr, extra.up, extra.rank};
            tile<R, B>(x + int64_t(r) * in, weight, in, bias, mine, first, out + r * stride, stride);
            r += R;
        };
        int left = rows - r;
        if (left >= MOST) run(std::integral_constant<int, MOST>{});
        else if (left >= 8) run(std::integral_constant<int, 8>{});
        else if (left >= 4) run(std::integral_constant<int, 4>{});
        else if (left >= 2) run(std::integral_constant<int, 2>{});
        else run(std::integral_constant<int, 1>{});
    }
}

// `low` is scratch for the mask rows times `down`, one copy a thread: computing it twice costs less than waiting.
template <typename T, typename Out>
void product(const T* x, int rows, int in, const T* weight, int out_features, const T* bias, Out* out,
             int first_mask_row, const T* down, const T* up, int rank, T* low, int threads) {
    const int pairs = out_features / (2 * LANES), base = down ? first_mask_row : rows, mask_rows = rows - base;
    const T* x_mask = x + int64_t(base) * in;
    Out* out_mask = out + int64_t(base) * out_features;
#pragma omp parallel num_threads(threads)
    {
        LowRank<T> extra{nullptr, up, rank};
#pragma omp for schedule(static)
        for (int p = 0; p < pairs; p++) {
            int first = 2 * LANES * p;
            rows_of_tiles<2>(x, base, weight, in, bias, LowRank<T>{}, first, out, out_features);
            if (!mask_rows) continue;
            if (!extra.low) {
                T* own = low + int64_t(omp_get_thread_num()) * mask_rows * rank;
                for (int r = 0; r < rank; r += LANES)
                    rows_of_tiles<1>(x_mask, mask_rows, down, in, (const T*)nullptr, LowRank<T>{}, r, own, rank);
                extra.low = own;
            }
            rows_of_tiles<2>(x_mask, mask_rows, weight, in, bias, extra, first, out_mask, out_features);
        }
    }
}

}  // namespace

#define EXPORT_PRODUCTS(NAME, T)                                                                                      \
    extern "C" void linear_##NAME(const T* x, int rows, int in, const T* weight, int out_features, const T* bias,     \
                                  T* out, int first_mask_row, const T* down, const T* up, int rank, T* low,           \
                                  int threads) {                                                                      \
        product(x, rows, in, weight, out_features, bias, out, first_mask_row, down, up, rank, low, threads); }        \
    extern "C" void head_##NAME(const T* x, int rows, int in, const T* weight, int out_features, float* out,          \
                                int threads) {                                                                        \
        const T* none = nullptr;                                                                                      \
        product(x, rows, in, weight, out_features, none, out, rows, none, none, 0, (T*)nullptr, threads); }

EXPORT_PRODUCTS(bf16, bf16)
EXPORT_PRODUCTS(float, float)
