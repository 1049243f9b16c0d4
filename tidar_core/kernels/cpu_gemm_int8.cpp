// Products of weights kept in 8 bits, and the rounding of rows that those of 4 bits share. A weight is a whole number
// times its output's scale; a row is rounded to whole numbers times a scale for each group of its inputs. Within a group
// sums are whole numbers, which have no order, and groups are added in ascending order: an output's bits depend on its
// row alone.
//
// Packed weights, a block for 16 outputs: [in / 4][16 outputs][4 inputs] as bytes (the whole number + 128), then 16
// scales in fp32.
namespace {

constexpr int QUAD = 4;  // inputs that one lane takes at once

// Bytes of a row of `in` inputs once it is rounded, its groups as small as can be.
inline int64_t rounded_bytes(int in) { return in + int64_t(sizeof(float) + sizeof(int32_t)) * (in / LANES); }

// Sixteen quads of weights, one for each output, as unsigned bytes.
LANEWISE u16v load_quads(const uint8_t* weights) {
    u16v quads;
    read(weights, quads);
    return quads;
}

// Adds four products a lane: unsigned bytes of weights times the same four signed bytes of a row.
#if defined(__AVX512VNNI__)
LANEWISE Whole add_products(Whole sum, Bits quads, int32_t four) {
    return (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)quads, _mm512_set1_epi32(four));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
// As 16 bits each, the even bytes and the odd ones: the 32 bits that two products are added in are never too few.
LANEWISE Whole add_products(Whole sum, Bits quads, int32_t four) {
    const __m256i weights = (__m256i)quads, x = _mm256_set1_epi32(four);
    const __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(weights, 8);
    const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd_x = _mm256_srai_epi16(x, 8);
    return sum + (Whole)_mm256_madd_epi16(even, even_x) + (Whole)_mm256_madd_epi16(odd, odd_x);
}
#else
LANEWISE Whole add_products(Whole sum, Bits quads, int32_t four) {
    for (int bit = 0; bit < 32; bit += 8) sum += (Whole)((quads >> bit) & 0xffu) * int32_t(int8_t(four >> bit));
    return sum;
}
#endif
template <typename W, typename B> LANEWISE Pair<W> add_products(Pair<W> sum, Pair<B> quads, int32_t four) {
    return {add_products(sum.lo, quads.lo, four), add_products(sum.hi, quads.hi, four)};
}
LANEWISE i16v add_products(i16v sum, u16v quads, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, QUAD);
    return add_products(sum, quads, four);
}

// Rows rounded to 8 bits: x [rows, in], and for each group its scale and the sum of its numbers, [rows, in / group].
struct Rows {
    const int8_t* x;
    const float* scales;
    const int32_t* totals;
    int in, group;
    int groups() const { return in / group; }
    const int8_t* row(int r) const { return x + int64_t(r) * in; }
    float scale(int r, int g) const { return scales[int64_t(r) * groups() + g]; }
    int32_t total(int r, int g) const { return totals[int64_t(r) * groups() + g]; }
};

struct Int8 {
    static constexpr int SUMS = MOST_SUMS, PAIRED_ROWS = ANY_ROWS;
    static int group_of(int in) { return in % 64 == 0 ? 64 : in % 32 == 0 ? 32 : LANES; }
    static constexpr int SCALES = LANES * sizeof(float);  // bytes behind a block's weights
    Rows rows;
    const uint8_t* weight;
    int64_t block_bytes() const { return int64_t(rows.in) * LANES + SCALES; }
    const uint8_t* block(int first) const { return weight + first / LANES * block_bytes(); }
    Ahead ahead(int first, int blocks) const { return {(const char*)block(first), block_bytes(), blocks}; }
    template <int R, int B> LANEWISE void add(f16v (&sums)[R][B], int r, int first, Ahead next) const {
        const int group = rows.group;
        const uint8_t* weights = block(first);
        const Fetch fetch(next, weights);
        for (int g = 0; g < rows.groups(); g++) {
            i16v whole[R][B];
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int b = 0; b < B; b++) whole[i][b] = i16v{} + -128 * rows.total(r + i, g);
            for (int k = g * group; k < (g + 1) * group; k += QUAD) {
                fetch.line(k / QUAD);
                UNROLL for (int i = 0; i < R; i++)
                    UNROLL for (int b = 0; b < B; b++)
                        whole[i][b] = add_products(whole[i][b], load_quads(weights + b * block_bytes() + k * LANES),
                                                   rows.row(r + i) + k);
            }
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int b = 0; b < B; b++)
                    sums[i][b] += to_floats(whole[i][b]) * rows.scale(r + i, g);
        }
    }
    template <int R, int B> LANEWISE void finish(f16v (&sums)[R][B], int first) const {
        UNROLL for (int b = 0; b < B; b++) {
            f16v scale;
            read(block(first + b * LANES) + int64_t(rows.in) * LANES, scale);
            UNROLL for (int i = 0; i < R; i++) sums[i][b] = sums[i][b] * scale;
        }
    }
};

// One group of a row. What is not finite makes the scale NaN, and with it every output of the row.
template <typename T> void round_group(const T* x, int group, int8_t* out, float* scale, int32_t* total) {
    f16v most{}, finite{};
    for (int k = 0; k < group; k += LANES) {
        const f16v v = load(x + k);
        most = max_of(most, max_of(v, -v));
        finite += v * 0.0f;
    }
    float top = 0.0f;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    const float step = top / 127.0f, inverse = step > 0.0f ? 1.0f / step : 0.0f;
    i16v totals{};
    for (int k = 0; k < group; k += LANES) {
        const f16v v = load(x + k) * inverse;
        f16v nearest = nearest_whole(v);
        nearest = choose(nearest > splat(127.0f), splat(127.0f), nearest);  // (what is not finite may become any number)
        const i16v whole = to_whole(nearest);
        store_narrowed(out + k, whole);
        totals += whole;
    }
    *scale = step + sum(finite);
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all += totals[i];
    *total = all;
}

// The product with weights of a kind that takes rounded rows. scratch: rows * rounded_bytes(in).
template <typename Kind, typename T, typename Out>
void product_of_rounded(const T* x, int rows, int in, const uint8_t* weight, int out_features, const T* bias, Out* out,
                        int first_mask_row, const T* down, const T* up, int rank, T* low, char* scratch, int threads) {
    const int group = Kind::group_of(in), groups = in / group;
    float* scales = (float*)scratch;
    int32_t* totals = (int32_t*)(scales + int64_t(rows) * groups);
    int8_t* whole = (int8_t*)(totals + int64_t(rows) * groups);
#pragma omp parallel for num_threads(threads) if (rows > 32)
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            const int64_t at = int64_t(r) * in + g * group, pair = int64_t(r) * groups + g;
            round_group(x + at, group, whole + at, scales + pair, totals + pair);
        }
    product(Kind{Rows{whole, scales, totals, in, group}, weight}, x, rows, in, out_features, bias, out, first_mask_row,
            down, up, rank, low, threads);
}

}  // namespace

#define EXPORT_ROUNDED(KIND, NAME, T)                                                                                 \
    extern "C" void linear_##NAME(const T* x, int rows, int in, const uint8_t* weight, int out_features,              \
                                  const T* bias, T* out, int first_mask_row, const T* down, const T* up, int rank,    \
                                  T* low, char* scratch, int threads) {                                               \
        product_of_rounded<KIND>(x, rows, in, weight, out_features, bias, out, first_mask_row, down, up, rank, low,   \
                                 scratch, threads); }                                                                 \
    extern "C" void head_##NAME(const T* x, int rows, int in, const uint8_t* weight, int out_features, float* out,    \
                                char* scratch, int threads) {                                                         \
        const T* none = nullptr;                                                                                      \
        product_of_rounded<KIND>(x, rows, in, weight, out_features, none, out, rows, none, none, 0, (T*)nullptr,      \
                                 scratch, threads); }

#ifdef PART_rounded_bf16
EXPORT_ROUNDED(Int8, int8_bf16, bf16)
#endif
#ifdef PART_rounded_float
EXPORT_ROUNDED(Int8, int8_float, float)
#endif
