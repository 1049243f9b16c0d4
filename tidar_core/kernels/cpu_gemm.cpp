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

// Weights to fetch while others are multiplied: `blocks` neighbouring blocks from `first` on; none where it is null.
// Without it the memory would rest whenever several rows make the arithmetic take longer than the loads.
template <typename T> struct Ahead { const T* first; int blocks; };

// Adds x [R rows, in] times B neighbouring blocks of 16 outputs to sums; x rows are `in` apart, blocks 16 * in.
template <int R, int B, typename T>
inline void accumulate(f16v (&sums)[R][B], const T* x, const T* weight, int in, Ahead<T> ahead = {nullptr, 0}) {
    constexpr int S = STEP<T>;
    // Without anything to fetch, what is at hand is "fetched" again: cheaper than to ask each time.
    const T* one = ahead.blocks > 0 ? ahead.first : weight;
    const T* two = ahead.blocks > 1 ? ahead.first + int64_t(in) * LANES : one;
    for (int k = 0; k < in; k += S) {
        __builtin_prefetch(one + k * LANES);
        __builtin_prefetch(two + k * LANES);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++)
                sums[r][b] = multiply_add(sums[r][b], weight + (int64_t(b) * in + k) * LANES, x + int64_t(r) * in + k);
    }
}

// What is added to the base product on mask rows: low [all rows, rank] times `up`, packed like a weight.
template <typename T> struct LowRank { const T* low; const T* up; int rank; };

// R rows of outputs [first, first + 16 B); the adapter counts from row `first_mask_row` on (R: for none). Rows before
// it are stored before the adapter is added to all: asking row by row would cost more than the few products.
template <int R, int B, typename T, typename Out>
void tile(const T* x, const T* weight, int in, const T* bias, LowRank<T> extra, int first_mask_row, int first, Out* out,
          int64_t stride, Ahead<T> ahead) {
    f16v sums[R][B];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) sums[r][b] = bias ? load(bias + first + LANES * b) : f16v{};
    accumulate<R, B, T>(sums, x, weight + int64_t(first) * in, in, ahead);
    auto keep = [&](int from, int to) {
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++)
                if (from <= r && r < to) store(out + r * stride + first + LANES * b, sums[r][b]);
    };
    keep(0, first_mask_row);
    if (first_mask_row >= R) return;
    accumulate<R, B, T>(sums, extra.low, extra.up + int64_t(first) * extra.rank, extra.rank);
    keep(first_mask_row, R);
}

template <int B> constexpr int MOST_ROWS = 24 / B;  // whose sums fit the registers beside the weights
template <int B> int passes_for(int rows) { return (rows + MOST_ROWS<B> - 1) / MOST_ROWS<B>; }

// All rows of outputs [first, first + 16 B), in as few passes as the registers allow, of equal size. The first two
// passes fetch one block of `ahead` each, a single one fetches both.
template <int B, typename T, typename Out>
void rows_of_tiles(const T* x, int rows, const T* weight, int in, const T* bias, LowRank<T> extra, int first_mask_row,
                   int first, Out* out, int64_t stride, Ahead<T> ahead) {
    const int passes = passes_for<B>(rows);
    for (int pass = 0, r = 0; pass < passes; pass++) {
        const int take = (rows - r + passes - pass - 1) / (passes - pass);
        const int blocks = passes > 1 && ahead.blocks > 1 ? 1 : ahead.blocks;
        const int plain = first_mask_row < r ? 0 : first_mask_row - r;
        LowRank<T> mine{extra.low + int64_t(r) * extra.rank, extra.up, extra.rank};
        with_count<MOST_ROWS<B>>(take, [&](auto count) {
            tile<decltype(count)::value, B>(x + int64_t(r) * in, weight, in, bias, mine, plain, first, out + r * stride,
                                            stride, Ahead<T>{ahead.first, blocks});
        });
        ahead = {ahead.first + int64_t(blocks) * in * LANES, ahead.blocks - blocks};
        r += take;
    }
}

// `low` is scratch for all rows times `down`, one copy a thread: computing it twice costs less than waiting.
template <typename T, typename Out>
void product(const T* x, int rows, int in, const T* weight, int out_features, const T* bias, Out* out,
             int first_mask_row, const T* down, const T* up, int rank, T* low, int threads) {
    const int pairs = out_features / (2 * LANES), base = down ? first_mask_row : rows;
#pragma omp parallel num_threads(threads)
    {
        const int team = omp_get_num_threads(), me = omp_get_thread_num();
        const int from = pairs * me / team, to = pairs * (me + 1) / team;
        const LowRank<T> none{nullptr, nullptr, 0};
        LowRank<T> extra = none;
        if (base < rows && from < to) {
            T* own = low + int64_t(me) * rows * rank;
            std::memset(own, 0, sizeof(T) * base * rank);
            T* masked = own + int64_t(base) * rank;
            const T *x_mask = x + int64_t(base) * in, *no_bias = nullptr;
            const int count = rows - base, even = rank / (2 * LANES) * 2 * LANES;
            const Ahead<T> own_first{weight + int64_t(2 * LANES) * from * in, 2};
            for (int r = 0; r < even; r += 2 * LANES)
                rows_of_tiles<2>(x_mask, count, down, in, no_bias, none, count, r, masked, rank, own_first);
            if (even < rank)
                rows_of_tiles<1>(x_mask, count, down, in, no_bias, none, count, even, masked, rank, own_first);
            extra = {own, up, rank};
        }
        for (int p = from; p < to; p++) {
            const int first = 2 * LANES * p;
            const Ahead<T> next{weight + int64_t(first + 2 * LANES) * in, p + 1 < to ? 2 : 0};
            rows_of_tiles<2>(x, rows, weight, in, bias, extra, base, first, out, out_features, next);
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
