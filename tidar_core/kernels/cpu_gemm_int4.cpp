// Products of weights kept in 4 bits: whole numbers from 0 to 15, for each output and group of 32 inputs times a scale
// plus a minimum. Rows are rounded as for 8 bits, in the same groups, and the order is the same: an output's bits depend
// on its row alone.
//
// Packed weights, a block for 16 outputs, in it [in / 32] groups of 320 bytes: four lines of [16 outputs][4 inputs], each
// byte with one number of the line's first four inputs below and of its next four above, then 16 scales and 16 minima
// in fp16.
namespace {

#if defined(__AVX512F__)
LANEWISE f16v load_halves(const uint8_t* from) {
    return (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
#else
LANEWISE f16v load_halves(const uint8_t* from) {
    u16v bits;
    load_widened((const uint16_t*)from, bits);
    // fp16's exponent read as fp32's is 112 too small.
    return as_floats((bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16) * 0x1p112f;
}
#endif

struct Int4 {
    static constexpr int SUMS = MOST_SUMS, PAIRED_ROWS = ANY_ROWS;
    static constexpr int GROUP = 32, GROUP_BYTES = GROUP / 2 * LANES + 4 * LANES, GROUP_LINES = GROUP_BYTES / LINE;
    static int group_of(int) { return GROUP; }
    Rows rows;
    const uint8_t* weight;
    int64_t block_bytes() const { return int64_t(rows.groups()) * GROUP_BYTES; }
    const uint8_t* block(int first) const { return weight + first / LANES * block_bytes(); }
    Ahead ahead(int first, int blocks) const { return {(const char*)block(first), block_bytes(), blocks}; }
    template <int R, int B> LANEWISE void add(f16v (&sums)[R][B], int r, int first, Ahead next) const {
        const uint8_t* weights = block(first);
        const Fetch fetch(next, weights);
        for (int g = 0; g < rows.groups(); g++) {
            i16v whole[R][B];
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int b = 0; b < B; b++) whole[i][b] = i16v{};
            const uint8_t* group = weights + int64_t(g) * GROUP_BYTES;
            for (int line = 0; line < GROUP_LINES - 1; line++) {
                fetch.line(g * GROUP_LINES + line);
                const int k = g * GROUP + line * 2 * QUAD;
                UNROLL for (int b = 0; b < B; b++) {
                    const u16v both = load_quads(group + b * block_bytes() + line * LINE);
                    const u16v below = both & 0x0f0f0f0fu, above = both >> 4 & 0x0f0f0f0fu;
                    UNROLL for (int i = 0; i < R; i++) {
                        whole[i][b] = add_products(whole[i][b], below, rows.row(r + i) + k);
                        whole[i][b] = add_products(whole[i][b], above, rows.row(r + i) + k + QUAD);
                    }
                }
            }
            fetch.line(g * GROUP_LINES + GROUP_LINES - 1);
            UNROLL for (int b = 0; b < B; b++) {
                const uint8_t* behind = group + b * block_bytes() + (GROUP_LINES - 1) * LINE;
                const f16v scales = load_halves(behind), minima = load_halves(behind + 2 * LANES);
                UNROLL for (int i = 0; i < R; i++) {
                    const float step = rows.scale(r + i, g);
                    sums[i][b] += to_floats(whole[i][b]) * step * scales;
                    sums[i][b] += minima * (float(rows.total(r + i, g)) * step);
                }
            }
        }
    }
    template <int R, int B> LANEWISE void finish(f16v (&)[R][B], int) const {}
};

}  // namespace

#ifdef PART_rounded_bf16
EXPORT_ROUNDED(Int4, int4_bf16, bf16)
#endif
#ifdef PART_rounded_float
EXPORT_ROUNDED(Int4, int4_float, float)
#endif
