// Matrix products for few rows. An output is one chain of multiply-adds over k in ascending order, whatever the
// number of rows: its bits depend on its row alone.
//
// `Dense`, `Panels`, `Int8` and `Int4` say how rows are multiplied with blocks of sixteen outputs. SUMS: as many as rows
// times blocks may take at once. PAIRED_ROWS: as many are multiplied with two blocks at a time, and more with one: where
// sums are few, that takes half the passes, each of twice the rows.
//
// Packed weights: [out / 16][in / S][16 outputs][S inputs] with S = 2 for bf16 and 1 for fp32, so that one load brings
// sixteen outputs' worth, and every byte of a weight is read once a step. Sums are fp32.
#include <algorithm>
#include <climits>
#include <memory>

namespace {

constexpr bool FEW_SUMS = MOST_SUMS < 24;
constexpr int ANY_ROWS = INT_MAX;
template <typename T> constexpr int STEP = sizeof(T) == 2 ? 2 : 1;  // inputs that one load of weights brings

LANEWISE f16v multiply_add(f16v sum, const float* weight, const float* x) { return sum + load(weight) * *x; }
#ifdef __AVX512BF16__
LANEWISE f16v multiply_add(f16v sum, const bf16* weight, const bf16* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (f16v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_set1_epi32(pair));
}
#else
LANEWISE f16v multiply_add(f16v sum, const bf16* weight, const bf16* x) {
    u16v both;
    uint32_t pair;
    read(weight, both);
    std::memcpy(&pair, x, sizeof pair);
    const u16v twice = u16v{} + pair;
    sum = sum + as_floats(both << 16) * as_floats(twice << 16);
    return sum + as_floats(both & 0xffff0000u) * as_floats(twice & 0xffff0000u);
}
#endif

// Weights to fetch while others are multiplied: `blocks` neighbouring blocks from `first` on, `stride` bytes apart; none
// where blocks is 0. Without it the memory would rest whenever several rows make the arithmetic take longer than the
// loads. soon: where `lines` more begin, of what the adapter needs. step: bytes from what is fetched beside one load of
// weights to what is fetched beside the next.
constexpr int LINE = 64;  // bytes of a load, and of a cache line
struct Ahead {
    const char* first; int64_t stride; int blocks; const char* soon = nullptr; int64_t lines = 0; int64_t step = LINE;
};
constexpr Ahead NOTHING{nullptr, 0, 0};

// The lines that are fetched beside each load of weights. Without anything to fetch, what is at hand is "fetched"
// again: cheaper than to ask each time.
struct Fetch {
    const char *one, *two, *soon;
    int64_t lines, step;
    Fetch(Ahead ahead, const void* at_hand)
        : one(ahead.blocks > 0 ? ahead.first : (const char*)at_hand), two(ahead.blocks > 1 ? ahead.first + ahead.stride : one),
          soon(ahead.lines > 0 ? ahead.soon : one), lines(ahead.lines), step(ahead.step) {}
    void line(int64_t n) const {
        const int64_t at = n * (FEW_SUMS ? step : LINE);  // (one block by itself, whose halves are fetched, is theirs)
        __builtin_prefetch(one + at);
        __builtin_prefetch(two + at);
        __builtin_prefetch(soon + (n < lines ? n : 0) * LINE);
    }
};

// Rows x [rows, in] against packed weights of their own type.
template <typename T> struct Dense {
    static constexpr int SUMS = MOST_SUMS, PAIRED_ROWS = FEW_SUMS ? 9 : ANY_ROWS;
    const T *x, *weight;
    int in;
    Ahead ahead(int first, int blocks) const {
        return {(const char*)(weight + int64_t(first) * in), int64_t(sizeof(T)) * LANES * in, blocks};
    }
    // Adds rows [r, r + R) times B neighbouring blocks of 16 outputs to sums.
    template <int R, int B> LANEWISE void add(f16v (&sums)[R][B], int r, int first, Ahead next) const {
        constexpr int S = STEP<T>;
        const T *rows = x + int64_t(r) * in, *block = weight + int64_t(first) * in;
        const Fetch fetch(next, block);
        for (int k = 0; k < in; k += S) {
            fetch.line(k / S);
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int b = 0; b < B; b++)
                    sums[i][b] =
                        multiply_add(sums[i][b], block + (int64_t(b) * in + k) * LANES, rows + int64_t(i) * in + k);
        }
    }
    template <int R, int B> LANEWISE void finish(f16v (&)[R][B], int) const {}
};

// What is added to the base product on mask rows: low [all rows, rank] times `up`, packed like a weight.
template <typename T> struct LowRank { const T* low; const T* up; int rank; };

// R rows of outputs [first, first + 16 B); the adapter counts from row `first_mask_row` on (R: for none). Rows before
// it are stored before the adapter is added to all: asking row by row would cost more than the few products.
template <int R, int B, typename Base, typename T, typename Out>
void tile(const Base& base, int r, const T* bias, LowRank<T> extra, int first_mask_row, int first, Out* out,
          int64_t stride, Ahead ahead) {
    f16v sums[R][B];
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int b = 0; b < B; b++) sums[i][b] = f16v{};
    base.template add<R, B>(sums, r, first, ahead);
    base.template finish<R, B>(sums, first);
    if (bias)
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int b = 0; b < B; b++) sums[i][b] += load(bias + first + LANES * b);
    auto keep = [&](int from, int to) {
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int b = 0; b < B; b++)
                if (from <= i && i < to) store(out + i * stride + first + LANES * b, sums[i][b]);
    };
    keep(0, first_mask_row);
    if (first_mask_row >= R) return;
    Dense<T>{extra.low, extra.up, extra.rank}.template add<R, B>(sums, 0, first, NOTHING);
    keep(first_mask_row, R);
}

// Rows in as few passes of at most `most` as can be, of equal size, the larger ones first.
struct Passes {
    int rows, count;
    Passes(int rows, int most) : rows(rows), count((rows + most - 1) / most) {}
    int first_row(int pass) const { return pass * (rows / count) + std::min(pass, rows % count); }
    int size(int pass) const { return rows / count + (pass < rows % count); }
};

// What a pass fetches: the first two half each, a single one all.
inline Ahead share_of(Ahead all, int pass, int passes) {
    if (passes == 1 || all.blocks == 0) return all;
    if (pass > 1) return NOTHING;
    Ahead half{all.first + pass * all.stride, all.stride, 1};
    if (all.blocks == 1) half.first = all.first + pass * all.stride / 2, half.step = LINE / 2;
    if (pass == 0) half.soon = all.soon, half.lines = all.lines;
    return half;
}

// Rows [from, from + rows) of outputs [first, first + 16 B). out is row `from`'s.
template <int B, typename Base, typename T, typename Out>
void rows_of_tiles(const Base& base, int from, int rows, const T* bias, LowRank<T> extra, int first_mask_row, int first,
                   Out* out, int64_t stride, Ahead ahead) {
    constexpr int MOST = Base::SUMS / B;
    const Passes passes(rows, MOST);
    for (int pass = 0; pass < passes.count; pass++) {
        const int r = passes.first_row(pass), plain = first_mask_row < r ? 0 : first_mask_row - r;
        LowRank<T> mine{extra.low + int64_t(r) * extra.rank, extra.up, extra.rank};
        with_count<MOST>(passes.size(pass), [&](auto count) {
            tile<decltype(count)::value, B>(base, from + r, bias, mine, plain, first, out + r * stride, stride,
                                            share_of(ahead, pass, passes.count));
        });
    }
}

// Many rows against packed bf16 where no instruction takes both as they are: the rows are made fp32 once, and nothing but
// weights is unpacked beside the products. Numbers and order are `Dense`'s. x: by pass, [in][rows of the pass].
struct Panels {
    static constexpr int SUMS = MOST_SUMS - 1, PAIRED_ROWS = 0;  // (a sum's room is the unpacked weights')
    const float* x;
    const bf16* weight;
    int in;
    Ahead ahead(int first, int blocks) const { return Dense<bf16>{nullptr, weight, in}.ahead(first, blocks); }
    template <int R, int B> LANEWISE void add(f16v (&sums)[R][B], int r, int first, Ahead next) const {
        const float* panel = x + int64_t(r) * in;
        const bf16* block = weight + int64_t(first) * in;
        const Fetch fetch(next, block);
        for (int k = 0; k < in; k += 2, panel += 2 * R) {
            fetch.line(k / 2);
            UNROLL for (int b = 0; b < B; b++) {
                const bf16* both = block + (int64_t(b) * in + k) * LANES;
                u16v weights;
                read(both, weights);
                const f16v even = as_floats(weights << 16);
                UNROLL for (int i = 0; i < R; i++) sums[i][b] = sums[i][b] + even * panel[i];
                read(anew(both), weights);
                const f16v odd = as_floats(weights & 0xffff0000u);
                UNROLL for (int i = 0; i < R; i++) sums[i][b] = sums[i][b] + odd * panel[R + i];
            }
        }
    }
    template <int R, int B> LANEWISE void finish(f16v (&)[R][B], int) const {}
};

inline std::unique_ptr<float[]> laid_in_panels(const bf16* x, int rows, int in, int threads) {
    std::unique_ptr<float[]> panels(new float[int64_t(rows) * in]);
    const Passes passes(rows, Panels::SUMS);
#pragma omp parallel for num_threads(threads) if (rows > 32)
    for (int pass = 0; pass < passes.count; pass++) {
        const int r = passes.first_row(pass), size = passes.size(pass);
        float* panel = &panels[int64_t(r) * in];
        for (int i = 0; i < size; i++)
            for (int k = 0; k < in; k++) panel[int64_t(k) * size + i] = widen(x[int64_t(r + i) * in + k]);
    }
    return panels;
}

// `low` is scratch for all rows times `down`, one copy a thread, the first of them for all where they share it. x is
// what the adapter reads, whatever the base makes of it.
template <typename Base, typename T, typename Out>
void product(const Base& base, const T* x, int rows, int in, int out_features, const T* bias, Out* out,
             int first_mask_row, const T* down, const T* up, int rank, T* low, int threads) {
#ifdef TILED
    if constexpr (std::is_same_v<Base, Dense<bf16>>)
        if (has_tiles() && in % TILE_INPUTS == 0)
            return tiled_product(x, rows, in, base.weight, out_features, bias, out, first_mask_row, down, up, rank, low,
                                 threads);
#endif
    if constexpr (FEW_SUMS && std::is_same_v<Base, Dense<bf16>>)
        if (rows > MOST_SUMS / 2) {
            const auto panels = laid_in_panels(x, rows, in, threads);
            return product(Panels{panels.get(), base.weight, in}, x, rows, in, out_features, bias, out, first_mask_row, down,
                           up, rank, low, threads);
        }
    const int pairs = out_features / (2 * LANES), plain = down ? first_mask_row : rows;
    const bool together = plain < rows && shares_down(threads, rank, out_features);
#pragma omp parallel num_threads(threads)
    {
        const int team = omp_get_num_threads(), me = omp_get_thread_num();
        const int from = pairs * me / team, to = pairs * (me + 1) / team;
        const LowRank<T> none{nullptr, nullptr, 0};
        LowRank<T> extra = none;
        if (plain < rows && (together || from < to)) {
            constexpr int LEAST_ROWS = 4;  // of a slice: fewer would wait for `down` more than they multiply
            const int mine = together ? me : 0;
            T* own = low + int64_t(me - mine) * rows * rank;
            if (mine == 0) std::memset(own, 0, sizeof(T) * plain * rank);
            const DownPart part = part_of_down(mine, together ? team : 1, rank, rows - plain, LEAST_ROWS);
            const int first = plain + part.row, count = part.row_end - part.row;
            T* masked = own + int64_t(first) * rank;
            const T* no_bias = nullptr;
            const Dense<T> inner{x, down, in};
            const Ahead own_first = base.ahead(2 * LANES * from, from < to ? 2 : 0);
            for (int r = part.rank; r < part.rank_end; r += 2 * LANES) {
                if (r + 2 * LANES <= rank)
                    rows_of_tiles<2>(inner, first, count, no_bias, none, count, r, masked, rank, own_first);
                else
                    rows_of_tiles<1>(inner, first, count, no_bias, none, count, r, masked, rank, own_first);
            }
            extra = {own, up, rank};
        }
        if (together) {
#pragma omp barrier
        }
        auto multiply = [&](auto blocks) {
            constexpr int B = decltype(blocks)::value;
            for (int first = 2 * LANES * from; first < 2 * LANES * to; first += B * LANES) {
                Ahead next = base.ahead(first + B * LANES, first + B * LANES < 2 * LANES * to ? B : 0);
                if (extra.up) {
                    next.soon = (const char*)(extra.up + int64_t(first) * rank);
                    next.lines = int64_t(sizeof(T)) * B * LANES * rank / LINE;
                }
                rows_of_tiles<B>(base, 0, rows, bias, extra, plain, first, out, out_features, next);
            }
        };
        if constexpr (Base::PAIRED_ROWS > 0)
            if (rows <= Base::PAIRED_ROWS) multiply(std::integral_constant<int, 2>{});
        if constexpr (Base::PAIRED_ROWS < ANY_ROWS)
            if (rows > Base::PAIRED_ROWS) multiply(std::integral_constant<int, 1>{});
    }
}

}  // namespace

#define EXPORT_PRODUCTS(NAME, T)                                                                                      \
    extern "C" void linear_##NAME(const T* x, int rows, int in, const T* weight, int out_features, const T* bias,     \
                                  T* out, int first_mask_row, const T* down, const T* up, int rank, T* low,           \
                                  int threads) {                                                                      \
        product(Dense<T>{x, weight, in}, x, rows, in, out_features, bias, out, first_mask_row, down, up, rank, low,   \
                threads); }                                                                                           \
    extern "C" void head_##NAME(const T* x, int rows, int in, const T* weight, int out_features, float* out,          \
                                int threads) {                                                                        \
        const T* none = nullptr;                                                                                      \
        product(Dense<T>{x, weight, in}, x, rows, in, out_features, none, out, rows, none, none, 0, (T*)nullptr,      \
                threads); }

#ifdef PART_bf16
EXPORT_PRODUCTS(bf16, bf16)
#endif
#ifdef PART_float
EXPORT_PRODUCTS(float, float)
#endif
