// Matrix products by a processor's tile unit (Intel's AMX), for bf16: sixteen rows cost little more than one, so that
// on such processors products hardly make the rows of drafts dearer.
//
// A tile of sums is C [rows, 16 outputs] += A [rows, 32 inputs] · B [32 inputs, 16 outputs]; B is as weights are packed
// (`cpu_gemm.cpp`). Each row of C is computed by itself: for every 32 inputs, one after the other, their products are
// summed and added. So a row's bits depend on that row alone, whatever the number of rows, as long as all products of a
// matrix are computed here; they are others than those of `cpu_gemm.cpp`.
#include <omp.h>

// Its own instructions, and those that turn its sums into bf16: a machine that hides some of them goes without.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define TILED
#endif
#ifdef TILED
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE_ROWS = 16, TILE_INPUTS = 32;

// Low-rank products are as wide as tiles, filled up with zeros.
inline int tiled_rank(int rank) { return (rank + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }

// Whether threads share the adapter's product with `down` and wait for one another; else each computes all of it, which
// costs a thread as much as `rank` more outputs. Two would wait longer than that takes.
inline bool shares_down(int threads, int rank, int out_features) {
    return threads > 2 && 4 * int64_t(threads) * rank > out_features;
}

// The ranks [rank, rank_end) of rows [row, row_end) that are one thread's part of that product: blocks of ranks, and
// where there are fewer of these than threads, slices of at least `height` rows. A thread too many has no ranks.
struct DownPart { int rank, rank_end, row, row_end; };
inline DownPart part_of_down(int me, int team, int rank, int rows, int height) {
    const int blocks = tiled_rank(rank) / TILE_INPUTS, across = blocks < team ? blocks : team;
    const int most = (rows + height - 1) / height, slices = team / across < most ? team / across : most;
    const int column = me % across, slice = me / across, end = TILE_INPUTS * (blocks * (column + 1) / across);
    if (slice >= slices) return {0, 0, 0, rows};
    return {TILE_INPUTS * (blocks * column / across), end < rank ? end : rank, rows * slice / slices,
            rows * (slice + 1) / slices};
}

#ifdef TILED

// Linux gives a process the unit's registers when it asks for them.
inline bool has_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return permitted;
}

// g++'s tile instructions do not tell it what memory they read: what was written before this is there.
inline void written(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.
inline void shape_tiles(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = i < 6 ? rows : TILE_ROWS;
    written(&shapes);
    _tile_loadconfig(&shapes);
}

// Weights to fetch while others are multiplied: the blocks at `first`, of each tile the lines [from, to).
struct FetchTiles { const char* first = nullptr; int from = 0, to = 0; };

// Adds inputs [0, inputs) of R tiles of rows, `second` rows apart, times B neighbouring blocks of 16 outputs, each of
// `in` inputs, to the sums.
template <int R, int B>
LANEWISE void add_tiles(const bf16* x, int64_t stride, int64_t second, const bf16* blocks, int in, int inputs,
                        FetchTiles next = {}) {
    for (int k = 0; k < inputs; k += TILE_INPUTS) {
        _tile_loadd(6, blocks + int64_t(k) * LANES, 64);
        if constexpr (B > 1) _tile_loadd(7, blocks + (int64_t(in) + k) * LANES, 64);
        _tile_loadd(4, x + k, stride * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (B > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (R > 1) {
            _tile_loadd(5, x + second * stride + k, stride * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (B > 1) _tile_dpbf16ps(3, 5, 7);
        }
        for (int b = 0; b < B; b++)
            for (int line = next.from; line < next.to; line++)
                __builtin_prefetch(next.first + ((int64_t(b) * in + k) * LANES) * sizeof(bf16) + line * 64, 0, 2);
    }
}

template <int R, int B> LANEWISE void clear_tiles() {
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && B > 1) _tile_zero(3);
}

// The sums of R tiles, the second `second` rows behind the first, by B, side by side.
template <int R, int B> LANEWISE void store_tiles(float* to, int64_t stride, int64_t second) {
    const int64_t bytes = stride * sizeof(float);
    _tile_stored(0, to, bytes);
    if constexpr (B > 1) _tile_stored(1, to + LANES, bytes);
    if constexpr (R > 1) _tile_stored(2, to + second * stride, bytes);
    if constexpr (R > 1 && B > 1) _tile_stored(3, to + second * stride + LANES, bytes);
}

inline void keep(float* to, f16v v) { store(to, v); }
inline void keep(bf16* to, f16v v) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }

// Rows [from, to) of tiles that hold `height` rows each, of which the second begins `second` rows behind the first.
template <int R, int B, typename Out>
LANEWISE void keep_tiles(int height, int64_t second, int from, int to, const bf16* bias, Out* out, int64_t stride) {
    constexpr int WIDE = B * LANES;
    alignas(64) float sums[R][TILE_ROWS][WIDE];
    store_tiles<R, B>(sums[0][0], WIDE, TILE_ROWS);
    for (int i = 0; i < R; i++)
        for (int r = 0; r < height; r++) {
            const int64_t row = i * second + r;
            if (row < from || row >= to) continue;
            for (int b = 0; b < B; b++) {
                f16v v = load(sums[i][r] + b * LANES);
                if (bias) v += load(bias + b * LANES);
                keep(out + row * stride + b * LANES, v);
            }
        }
}

// What the adapter adds on rows from `first_row` on: low [rows, tiled rank] times `up`, [rank] of it packed like a
// weight. up is null where it adds nothing.
struct TiledLowRank { const bf16 *low, *up; int rank, first_row; };

// All rows times B neighbouring blocks of outputs, from `first` on. Rows are in tiles of equal height; the last of them
// begins earlier where they do not fill it, and computes some rows again, to the same bits.
template <int B, typename Out>
void tiled_blocks(const bf16* x, int rows, int in, int height, const bf16* blocks, const bf16* bias, TiledLowRank extra,
                  Out* out, int64_t stride, const char* next) {
    const int wide = tiled_rank(extra.rank), count = (rows + height - 1) / height;
    const int passes = (count + 1) / 2;
    auto pass = [&](auto tiles, int number, int first, int second) {
        constexpr int R = decltype(tiles)::value;
        clear_tiles<R, B>();
        const FetchTiles some{next, TILE_ROWS * number / passes, next ? TILE_ROWS * (number + 1) / passes : 0};
        add_tiles<R, B>(x + int64_t(first) * in, in, second, blocks, in, in, some);
        const int end = second + height, plain = extra.up ? extra.first_row - first : end;
        if (plain > 0) keep_tiles<R, B>(height, second, 0, plain, bias, out + first * stride, stride);
        if (plain >= end) return;
        const int whole = extra.rank / TILE_INPUTS * TILE_INPUTS;
        const bf16* low = extra.low + int64_t(first) * wide;
        add_tiles<R, B>(low, wide, second, extra.up, extra.rank, whole);
        if (whole < extra.rank) {  // the rest, filled up
            alignas(64) bf16 rest[B][TILE_INPUTS * LANES] = {};
            for (int b = 0; b < B; b++)
                std::memcpy(rest[b], extra.up + (int64_t(b) * extra.rank + whole) * LANES,
                            sizeof(bf16) * (extra.rank - whole) * LANES);
            written(rest);
            add_tiles<R, B>(low + whole, wide, second, rest[0], TILE_INPUTS, TILE_INPUTS);
        }
        keep_tiles<R, B>(height, second, plain, end, bias, out + first * stride, stride);
    };
    for (int t = 0; t < count; t += 2) {
        const int first = t * height < rows - height ? t * height : rows - height;
        const int second = (t + 1) * height < rows - height ? height : rows - height - first;
        if (t + 1 < count) pass(std::integral_constant<int, 2>{}, t / 2, first, second);
        else pass(std::integral_constant<int, 1>{}, t / 2, first, 0);
    }
}

inline int tile_height(int rows) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (rows + tiles - 1) / tiles;
}

// As `product` in `cpu_gemm.cpp`, where `in` is a multiple of 32; low: [threads, rows, tiled rank].
template <typename Out>
void tiled_product(const bf16* x, int rows, int in, const bf16* weight, int out_features, const bf16* bias, Out* out,
                   int first_mask_row, const bf16* down, const bf16* up, int rank, bf16* low, int threads) {
    if (rows == 0) return;
    const int pairs = out_features / (2 * LANES), plain = down ? first_mask_row : rows, wide = tiled_rank(rank);
    const bool together = plain < rows && shares_down(threads, rank, out_features);
    const bf16* no_bias = nullptr;
#pragma omp parallel num_threads(threads)
    {
        const int team = omp_get_num_threads(), me = omp_get_thread_num();
        const int from = pairs * me / team, to = pairs * (me + 1) / team;
        const TiledLowRank none{nullptr, nullptr, 0, rows};
        TiledLowRank extra = none;
        if (plain < rows && (together || from < to)) {
            const int mine = together ? me : 0;
            bf16* own = low + int64_t(me - mine) * rows * wide;
            if (mine == 0) {
                std::memset(own, 0, sizeof(bf16) * plain * wide);
                for (int r = plain; r < rows; r++)
                    std::memset(own + int64_t(r) * wide + rank, 0, sizeof(bf16) * (wide - rank));
            }
            const DownPart part = part_of_down(mine, together ? team : 1, rank, rows - plain, TILE_ROWS);
            const int first = plain + part.row, count = part.row_end - part.row, height = tile_height(count);
            shape_tiles(height);
            for (int r = part.rank; r < part.rank_end; r += 2 * LANES) {
                const bf16 *masked = x + int64_t(first) * in, *blocks = down + int64_t(r) * in;
                bf16* to_low = own + int64_t(first) * wide + r;
                if (r + 2 * LANES <= rank)
                    tiled_blocks<2>(masked, count, in, height, blocks, no_bias, none, to_low, wide, nullptr);
                else
                    tiled_blocks<1>(masked, count, in, height, blocks, no_bias, none, to_low, wide, nullptr);
            }
            written(own);
            extra = {own, up, rank, plain};
        }
        if (together) {
#pragma omp barrier
        }
        const int height = tile_height(rows);
        if (from < to) shape_tiles(height);
        for (int p = from; p < to; p++) {
            const int first = 2 * LANES * p;
            const bf16* blocks = weight + int64_t(first) * in;
            if (extra.up) extra.up = up + int64_t(first) * rank;
            tiled_blocks<2>(x, rows, in, height, blocks, bias ? bias + first : bias, extra, out + first, out_features,
                            p + 1 < to ? (const char*)(blocks + 2 * int64_t(LANES) * in) : nullptr);
        }
        if (from < to || together) _tile_release();
    }
}

#else

inline bool has_tiles() { return false; }

#endif

}  // namespace

extern "C" int uses_tiles() { return has_tiles(); }
