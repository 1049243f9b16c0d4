// Attention by a processor's tile unit, for bf16: products of many queries and a page cost little more than of one.
//
// A page of keys is laid as weights are packed (`cpu_tiles.cpp`), its keys in the place of outputs. Of values two
// pages are laid together, 32 keys as inputs; what these weigh is rounded to bf16. A query is a row of a tile: its bits
// do not depend on the others.
#include <algorithm>
#include <memory>

namespace {

// Queries that share what is laid, at most, and how many scores they may have (a core's cache holds them).
constexpr int MOST_TILED = 4 * TILE_ROWS, MOST_SCORES = 1 << 18;

#ifdef TILED

constexpr int PAIR = 2 * LANES;  // keys of two pages
constexpr int SOON = 3;          // pages that are fetched ahead

// A page is fetched while another is laid; null where none is to come.
inline void fetch_line(const bf16* page, int at) {
    if (page) __builtin_prefetch(page + at);
}

// Sixteen numbers and sixteen others in turn.
LANEWISE __m512i in_turn(__m512i both) {
    alignas(64) static const uint16_t places[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(places), both);
}

// A page's keys [head_dim, 16] with pairs of coordinates side by side, and zeros up to whole tiles.
inline void lay_keys(const bf16* page, const bf16* soon, int head_dim, int deep, bf16* to) {
    for (int d = 0; d < head_dim; d += 2) {
        fetch_line(soon, d * LANES);
        _mm512_store_si512(to + d * LANES, in_turn(_mm512_loadu_si512(page + d * LANES)));
    }
    if (deep > head_dim) std::memset(to + head_dim * LANES, 0, sizeof(bf16) * (deep - head_dim) * LANES);
}

// As many rows, at most 16, that lie `stride` apart, as a page's keys are laid.
inline void lay_rows(const bf16* rows, int64_t stride, int count, int head_dim, int deep, bf16* to) {
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(int(stride * sizeof(bf16))));
    const __mmask16 there = __mmask16((1u << count) - 1);
    for (int d = 0; d < head_dim; d += 2)
        _mm512_store_si512(to + d * LANES,
                           _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, places, rows + d, 1));
    if (deep > head_dim) std::memset(to + head_dim * LANES, 0, sizeof(bf16) * (deep - head_dim) * LANES);
}

// A page's values [16, head_dim] with pairs of keys side by side, in blocks of 16 coordinates that lie `stride` apart.
// Where they are sifted, numbers that are none become zero, and which keys have some comes back, a bit each.
template <bool SIFTED>
inline unsigned lay_values(const bf16* page, const bf16* soon, int head_dim, bf16* to, int64_t stride) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    unsigned broken = 0;
    for (int i = 0; i < LANES; i += 2) {
        __mmask32 none = 0;
        const bf16 *even = page + i * head_dim, *odd = even + head_dim;
        for (int d = 0; d < head_dim; d += LANES) {
            fetch_line(soon, i * head_dim + 2 * d);
            __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(even + d)));
            both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i*)(odd + d)), 1);
            if constexpr (SIFTED) {
                const __mmask32 here = _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
                both = _mm512_maskz_mov_epi16(~here, both);
                none |= here;
            }
            _mm512_store_si512(to + d / LANES * stride + i * LANES, in_turn(both));
        }
        broken |= unsigned((none & 0xffff) != 0) << i | unsigned((none >> LANES) != 0) << (i + 1);
    }
    return broken;
}

// Weights rounded to bf16, side by side from where they were on.
inline void narrow_weights(float* row, int count) {
    for (int i = 0; i < count; i += LANES)
        _mm256_storeu_si256((__m256i*)((bf16*)row + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(row + i)));
}

inline bool are_numbers(const float* all, int count) {
    __mmask16 unequal = 0;  // a number less itself is zero
    for (int i = 0; i < count; i += LANES) {
        const __m512 x = _mm512_loadu_ps(all + i);
        unequal |= _mm512_cmp_ps_mask(_mm512_sub_ps(x, x), _mm512_setzero_ps(), _CMP_NEQ_UQ);
    }
    return unequal == 0;
}

// All tiles of queries, two at a time, by all blocks of sixteen, two at a time: run(R, B, first tile, first block).
template <typename Run> LANEWISE void in_pairs(int tiles, int blocks, Run run) {
    for (int b = 0; b < blocks; b += 2)
        for (int r = 0; r < tiles; r += 2)
            with_count<2>(std::min(2, tiles - r), [&](auto rows) {
                with_count<2>(std::min(2, blocks - b), [&](auto columns) { run(rows, columns, r, b); });
            });
}

// What one thread works with: scores [rows, stride] that become weights, sums of values [rows, head_dim], queries, and
// pages as they are laid.
struct TileWork {
    int tiles, height, deep;  // deep: a query's inputs, in whole tiles
    int64_t stride;
    float *scores, *mixed, *sums;
    bf16 *asked, *laid;
};

inline void score_by_tiles(const TileWork& work, const Span& span, const Pages<bf16>& all) {
    const int deep = work.deep;
    for (int from = span.begin; from < span.pages; from += CHAIN_PAGES) {
        const int some = std::min(CHAIN_PAGES, span.pages - from);
        for (int p = from; p < from + some; p++) {
            const bf16* soon = p + SOON < span.pages ? all.page(all.keys, p + SOON) : nullptr;
            lay_keys(all.page(all.keys, p), soon, all.head_dim, deep, work.laid + (p - from) * deep * LANES);
        }
        written(work.laid);
        in_pairs(work.tiles, some, [&](auto R, auto B, int tile, int page) {
            const int row = tile * work.height, column = (from + page - span.begin) * LANES;
            clear_tiles<R, B>();
            add_tiles<R, B>(work.asked + row * deep, deep, work.height, work.laid + page * deep * LANES, deep, deep);
            store_tiles<R, B>(work.scores + row * work.stride + column, work.stride, work.height);
        });
    }
    for (int p = span.begin; p < std::min(span.pages, span.begin + SOON); p++)
        for (int line = 0; line < all.head_dim * LANES; line += PAIR) fetch_line(all.page(all.values, p), line);
    written(work.scores);
}

// The keys of the queries' tails, which lie `stride` apart in the rows of the step: a query sees its own of them.
struct Tails { const bf16* first; int64_t stride; int count; };

inline Tails tails_of(const Query<bf16>* queries, int count, int64_t stride) {
    const bf16 *first = nullptr, *behind = nullptr;
    for (int m = 0; m < count; m++) {
        if (!queries[m].tail) continue;
        const bf16* last = queries[m].tail_k + queries[m].tail * stride;
        first = first && first < queries[m].tail_k ? first : queries[m].tail_k;
        behind = behind > last ? behind : last;
    }
    return {first, stride, int((behind - first) / stride)};
}

// What the queries score the keys of their own tails, sixteen keys at a time for all.
inline void score_tails(const TileWork& work, const Span& span, const Tails& tails, const Query<bf16>* queries,
                        int count, int head_dim) {
    for (int key = 0; key < tails.count; key += LANES) {
        const int some = std::min(LANES, tails.count - key);
        lay_rows(tails.first + key * tails.stride, tails.stride, some, head_dim, work.deep, work.laid);
        written(work.laid);
        in_pairs(work.tiles, 1, [&](auto R, auto B, int tile, int) {
            clear_tiles<R, B>();
            const int row = tile * work.height;
            add_tiles<R, B>(work.asked + row * work.deep, work.deep, work.height, work.laid, work.deep, work.deep);
            store_tiles<R, B>(work.sums + row * LANES, LANES, work.height);
        });
        written(work.sums);
        for (int m = 0; m < count; m++) {
            if (!queries[m].tail) continue;
            const int own = int((queries[m].tail_k - tails.first) / tails.stride);
            float* scores = work.scores + m * work.stride + span.tail_at - own;
            for (int k = std::max(own, key); k < std::min(own + queries[m].tail, key + some); k++)
                scores[k] = work.sums[m * LANES + k - key];
        }
    }
}

// To `mixed`, whose rows are `stride` apart, the sums of so many rows of B blocks.
template <int B> APART void add_sums(float* mixed, int64_t stride, const float* sums, int rows) {
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < B; b++) {
            float* sum = mixed + r * stride + b * LANES;
            store(sum, load(sum) + load(sums + (r * B + b) * LANES));
        }
}

// The sums over the pages, in chains as `attend_together` has them. Whether they are numbers comes back. Where values
// are sifted, broken: queries that see one that is none.
template <bool SIFTED>
bool mix_by_tiles(const TileWork& work, const Span& span, const Pages<bf16>& all, const Query<bf16>* queries, int count,
                  bool* broken) {
    const int head_dim = all.head_dim;
    std::memset(work.mixed, 0, sizeof(float) * work.tiles * work.height * head_dim);
    for (int from = span.begin, to; from < span.pages; from = to) {
        to = std::min(span.pages, from / CHAIN_PAGES * CHAIN_PAGES + CHAIN_PAGES);
        const int inputs = (to - from + 1) / 2 * PAIR;
        for (int p = from; p < to; p++) {
            const bf16* soon = p + SOON < span.pages ? all.page(all.values, p + SOON) : nullptr;
            const unsigned bad = lay_values<SIFTED>(all.page(all.values, p), soon, head_dim,
                                                    work.laid + (p - from) * LANES * LANES, inputs * LANES);
            for (int i = 0; bad && i < LANES; i++)
                for (int m = 0; (bad >> i & 1) && m < count; m++)
                    broken[m] |= p * LANES + i >= queries[m].first && p * LANES + i < queries[m].context;
        }
        for (int d = 0; (to - from) % 2 && d < head_dim; d += LANES)  // the other half of the last pair
            std::memset(work.laid + d * inputs + (to - from) * LANES * LANES, 0, sizeof(bf16) * LANES * LANES);
        written(work.laid);
        const bf16* weights = (const bf16*)work.scores + (from - span.begin) * LANES;
        in_pairs(work.tiles, head_dim / LANES, [&](auto R, auto B, int tile, int block) {
            const int row = tile * work.height;
            clear_tiles<R, B>();
            add_tiles<R, B>(weights + 2 * row * work.stride, 2 * work.stride, work.height,
                            work.laid + block * inputs * LANES, inputs, inputs);
            store_tiles<R, B>(work.sums, B * LANES, work.height);
            written(work.sums);
            NormalOrZero flushed;  // as where few queries find theirs
            add_sums<B>(work.mixed + row * head_dim + block * LANES, head_dim, work.sums, R * work.height);
        });
    }
    return are_numbers(work.mixed, count * head_dim);
}

// As `ByLanes`, by tiles. Of one thread.
struct ByTiles {
    std::unique_ptr<float[]> memory;
    int64_t floats = 0;
    int shaped = 0;  // the height that tiles have

    ~ByTiles() { if (shaped) _tile_release(); }

    // Fewer where threads would have nothing to do.
    static int at_once(int queries, int kv_heads, int threads) {
        for (int some = MOST_TILED; some > TILE_ROWS; some /= 2)
            if ((queries + some - 1) / some * kv_heads >= 4 * threads) return some;
        return TILE_ROWS;
    }

    TileWork work_for(int count, const Span& span, int head_dim) {
        TileWork work;
        work.height = tile_height(count), work.tiles = (count + work.height - 1) / work.height;
        work.deep = (head_dim + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
        work.stride = span.width | LANES;  // rows that lie a power of two apart would drive each other out
        const int64_t rows = work.tiles * work.height, pages = std::min(CHAIN_PAGES, span.pages - span.begin + 1);
        const int64_t sizes[] = {rows * work.stride, rows * head_dim, MOST_TILED * LANES, rows * work.deep / 2};
        const int64_t wanted = sizes[0] + sizes[1] + sizes[2] + sizes[3] + pages * LANES * work.deep / 2 + LANES;
        if (floats < wanted) memory.reset(new float[floats = wanted]);
        float* at = memory.get() + (64 - (uintptr_t)memory.get() % 64) % 64 / sizeof(float);
        work.scores = at, at += sizes[0];
        work.mixed = at, at += sizes[1];
        work.sums = at, at += sizes[2];
        work.asked = (bf16*)at, at += sizes[3];
        work.laid = (bf16*)at;
        return work;
    }

    // What few queries without tails find, by lanes; false where values are no numbers.
    static bool find_few(const TileWork& work, const Span& span, const Query<bf16>* queries, int count,
                         const Pages<bf16>& all, float scale, float* inverse) {
        const int head_dim = all.head_dim;
        float* asked = (float*)work.laid;
        for (int m = 0; m < count; m++)
            for (int d = 0; d < head_dim; d++) asked[d * count + m] = widen(queries[m].q[d]);
        with_count<FEW>(count, [&](auto some) {
            constexpr int M = decltype(some)::value;
            {
                NormalOrZero flushed;
                score_few<M>(asked, all, span, work.scores, work.stride);
            }
            for (int m = 0; m < M; m++) {
                float* row = work.scores + m * work.stride;
                inverse[m] = weigh(queries[m], row, span, scale);
                for (int i = 0; i < span.tail_at; i += LANES) store(row + i, in_bf16(load(row + i)));
            }
            NormalOrZero flushed;
            mix_few<M>(work.scores, work.stride, all, span, work.mixed, work.sums);
        });
        return are_numbers(work.mixed, count * head_dim);
    }

    void find(const TileWork& work, const Span& span, const Query<bf16>* queries, int count, const Pages<bf16>& all,
              const Tails& tails, float scale, float* inverse, bool* broken) {
        std::memset(work.asked, 0, sizeof(bf16) * work.tiles * work.height * work.deep);
        for (int m = 0; m < count; m++)
            std::memcpy(work.asked + m * work.deep, queries[m].q, sizeof(bf16) * all.head_dim);
        if (work.height != shaped) shape_tiles(shaped = work.height);
        score_by_tiles(work, span, all);
        score_tails(work, span, tails, queries, count, all.head_dim);
        for (int m = 0; m < count; m++) {
            inverse[m] = weigh(queries[m], work.scores + m * work.stride, span, scale);
            narrow_weights(work.scores + m * work.stride, span.tail_at);
        }
        if (!mix_by_tiles<false>(work, span, all, queries, count, broken))
            mix_by_tiles<true>(work, span, all, queries, count, broken);
    }

    void attend(const Query<bf16>* queries, int count, const Pages<bf16>& all, int64_t tail_stride, float scale) {
        const int head_dim = all.head_dim;
        const Span span = span_of(queries, count, 2);
        if (count > TILE_ROWS && int64_t(count) * span.width > MOST_SCORES) {
            for (int m = 0; m < count; m += TILE_ROWS)
                attend(queries + m, std::min(TILE_ROWS, count - m), all, tail_stride, scale);
            return;
        }
        const Tails tails = tails_of(queries, count, tail_stride);
        const bool few = count <= FEW && !tails.count && count * head_dim <= MOST_TILED * LANES;
        const TileWork work = work_for(count, span, head_dim);
        float inverse[MOST_TILED];
        bool broken[MOST_TILED] = {};
        if (!few || !find_few(work, span, queries, count, all, scale, inverse))
            find(work, span, queries, count, all, tails, scale, inverse, broken);
        for (int m = 0; m < count; m++) {
            const float* tail_weights = work.scores + m * work.stride + span.tail_at;
            for (int d = 0; d < head_dim; d += LANES) {
                f16v tail{};
                for (int t = 0; t < queries[m].tail; t++)
                    tail += load(queries[m].tail_v + t * tail_stride + d) * tail_weights[t];
                const f16v mean = (load(work.mixed + m * head_dim + d) + tail) * inverse[m];
                store(queries[m].out + d, broken[m] ? splat(__builtin_nanf("")) : mean);
            }
        }
    }
};

#endif

}  // namespace
