// Matrix products for few rows. An output is one chain of multiply-adds over k in ascending order, whatever the
// number of rows: its bits depend on its row alone.
//
// Packed weights: [out / 16][in / S][16 outputs][S inputs] with S = 2 for bf16 and 1 for fp32, so that one load brings
// sixteen outputs' worth, and every byte of a weight is read once a step. Sums are fp32.

namespace {

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
// loads. soon: where `lines` more begin, of what the adapter needs.
struct Ahead { const char* first; int64_t stride; int blocks; const char* soon = nullptr; int64_t lines = 0; };
constexpr Ahead NOTHING{nullptr, 0, 0};
constexpr int LINE = 64;  // bytes of a load, and of a cache line

// The lines that are fetched beside each load of weights. Without anything to fetch, what is at hand is "fetched"
// again: cheaper than to ask each time.
struct Fetch {
    const char *one, *two, *soon;
    int64_t lines;
    Fetch(Ahead ahead, const void* at_hand)
        : one(ahead.blocks > 0 ? ahead.first : (const char*)at_hand), two(ahead.blocks > 1 ? ahead.first + ahead.stride : one),
          soon(ahead.lines > 0 ? ahead.soon : one), lines(ahead.lines) {}
    void line(int64_t n) const {
        __builtin_prefetch(one + n * LINE);
        __builtin_prefetch(two + n * LINE);
        __builtin_prefetch(soon + (n < lines ? n : 0) * LINE);
    }
};

// Rows x [rows, in] against packed weights of their own type.
template <typename T> struct Dense {
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

template <int B> constexpr int MOST_ROWS = MOST_SUMS / B;
template <int B> int passes_for(int rows) { return (rows + MOST_ROWS<B> - 1) / MOST_ROWS<B>; }

// Rows [from, from + rows) of outputs [first, first + 16 B), in as few passes as the registers allow, of equal size.
// The first two passes fetch one block of `ahead` each, a single one fetches both. out is row `from`'s.
template <int B, typename Base, typename T, typename Out>
void rows_of_tiles(const Base& base, int from, int rows, const T* bias, LowRank<T> extra, int first_mask_row, int first,
                   Out* out, int64_t stride, Ahead ahead) {
    const int passes = passes_for<B>(rows);
    for (int pass = 0, r = 0; pass < passes; pass++) {
        const int take = (rows - r + passes - pass - 1) / (passes - pass);
        const int blocks = passes > 1 && ahead.blocks > 1 ? 1 : ahead.blocks;
        const int plain = first_mask_row < r ? 0 : first_mask_row - r;
        LowRank<T> mine{extra.low + int64_t(r) * extra.rank, extra.up, extra.rank};
        with_count<MOST_ROWS<B>>(take, [&](auto count) {
            tile<decltype(count)::value, B>(base, from + r, bias, mine, plain, first, out + r * stride, stride,
                                            Ahead{ahead.first, ahead.stride, blocks, ahead.soon, ahead.lines});
        });
        ahead = {ahead.first + blocks * ahead.stride, ahead.stride, ahead.blocks - blocks};
        r += take;
    }
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
        for (int p = from; p < to; p++) {
            const int first = 2 * LANES * p;
            Ahead next = base.ahead(first + 2 * LANES, p + 1 < to ? 2 : 0);
            if (extra.up) {
                next.soon = (const char*)(extra.up + int64_t(first) * rank);
                next.lines = int64_t(sizeof(T)) * 2 * LANES * rank / LINE;
            }
            rows_of_tiles<2>(base, 0, rows, bias, extra, plain, first, out, out_features, next);
        }
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

EXPORT_PRODUCTS(bf16, bf16)
EXPORT_PRODUCTS(float, float)
