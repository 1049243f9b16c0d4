// The token rule of tidar_core.sampling for rows of scores, without a sort. What S keeps is always the head of a row by
// descending score, then ascending token: so the best of all with its noise is the answer where S has it, and where S
// has not, nor has it anything behind it, and the best of those before it is next. Noise is made where it may decide.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int BLOCK = 4 * LANES;  // scores looked at together
constexpr float LOWEST = -std::numeric_limits<float>::infinity(), HIGHEST = -LOWEST;
constexpr float MOST_NOISE = 22.88f;  // of the smallest word
constexpr float MASS = 17592186044416.0f;  // of the best token: 2^44

// heat: the temperature, 0 for the best. words: of the noise: seed low and high, position, choice. top_k: 0 for all.
// cut: 1 - top_p, below 0 for all.
struct Rule {
    float heat = 0.0f, cut = -1.0f, min_p = 0.0f;
    uint32_t words[4] = {};
    int top_k = 0;
};

// Scores of a row, of tokens side by side from 0 on, or of those in `tokens`, in ascending order.
struct Row {
    const float* scores;
    int count;
    const int32_t* tokens;
    uint32_t token(int at) const { return uint32_t(tokens ? tokens[at] : at); }
};

typedef uint64_t Longs __attribute__((vector_size(REGISTER)));
constexpr int QUADS = REGISTER / sizeof(uint64_t);  // of tokens, in one register

// Of each lane's lower half; what the upper has is of no account.
LANEWISE Longs times(Longs lower, uint32_t by) {
#if defined(__AVX512F__)
    return (Longs)_mm512_mul_epu32((__m512i)lower, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
    return (Longs)_mm256_mul_epu32((__m256i)lower, _mm256_set1_epi64x(by));
#else
    return (lower & 0xffffffffu) * by;
#endif
}

inline uint64_t times(uint64_t lower, uint32_t by) { return (lower & 0xffffffffu) * by; }

// Philox4x32-10 (tidar_core.sampling.philox) of quads of tokens, in the lower halves of x; x[0] comes in as the quads'
// numbers.
template <typename V> LANEWISE void philox(const Rule& rule, V (&x)[4]) {
    x[1] = V{} + rule.words[2], x[2] = V{} + rule.words[3], x[3] = V{};
    uint32_t low = rule.words[0], high = rule.words[1];
    UNROLL for (int round = 0; round < 10; round++) {
        const V even = times(x[0], 0xD2511F53u), odd = times(x[2], 0xCD9E8D57u);
        x[0] = (odd >> 32) ^ x[1] ^ (V{} + low), x[2] = (even >> 32) ^ x[3] ^ (V{} + high);
        x[1] = odd, x[3] = even;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
}

inline uint32_t word_of(const Rule& rule, uint32_t token) {
    uint64_t x[4] = {token >> 2};
    philox(rule, x);
    return uint32_t(x[token & 3]);
}

// The words of all scores of a block.
inline void make_words(const Rule& rule, const Row& row, int first, uint32_t* words) {
    if (row.tokens) {
        for (int i = 0; i < BLOCK; i++) words[i] = first + i < row.count ? word_of(rule, row.token(first + i)) : 0;
        return;
    }
    for (int i = 0; i < BLOCK; i += 4 * QUADS) {
        Longs x[4] = {};
        for (int q = 0; q < QUADS; q++) x[0][q] = uint64_t(first + i) / 4 + q;
        philox(rule, x);
        const Longs left = (x[0] & 0xffffffffu) | (x[1] << 32), right = (x[2] & 0xffffffffu) | (x[3] << 32);
        uint64_t pairs[2 * QUADS];
        for (int q = 0; q < QUADS; q++) pairs[2 * q] = left[q], pairs[2 * q + 1] = right[q];
        std::memcpy(words + i, pairs, sizeof pairs);
    }
}

// Each step rounded once, so that it is the same with any library.
inline float gumbel(uint32_t word) {
    const float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f), rest = -float(std::log1p(-double(u)));
    return -float(std::log(double(rest)));
}

LANEWISE bool any(i16v mask) {
    uint64_t lanes[LANES / 2], all = 0;
    write(lanes, mask);
    for (uint64_t lane : lanes) all |= lane;
    return all;
}

// Calls look(first, block) for the blocks of a row, the last filled up with what is excluded, until it gives true.
template <typename Look> inline void each_block(const Row& row, Look look) {
    int first = 0;
    for (; first + BLOCK <= row.count; first += BLOCK)
        if (look(first, row.scores + first)) return;
    if (first == row.count) return;
    float last[BLOCK];
    for (int i = 0; i < BLOCK; i++) last[i] = first + i < row.count ? row.scores[first + i] : LOWEST;
    look(first, last);
}

inline float highest(f16v v) {
    float lanes[LANES], most = LOWEST;
    store(lanes, v);
    for (float lane : lanes) most = std::max(most, lane);
    return most;
}

// The best score; LOWEST where there is none, or one that is no number or without end.
inline float best_score(const Row& row) {
    f16v most = splat(LOWEST);
    i16v none{};
    each_block(row, [&](int, const float* x) {
        for (int i = 0; i < BLOCK; i += LANES) {
            const f16v v = load(x + i);
            most = max_of(v, most);
            none = none | (v != v);
        }
        return false;
    });
    const float best = highest(most);
    return any(none) || best == HIGHEST ? LOWEST : best;
}

// The first place whose score is that, over the divisor.
inline int place_of(const Row& row, float score, float divisor) {
    int place = -1;
    each_block(row, [&](int first, const float* x) {
        for (int i = 0; i < BLOCK && place < 0; i += LANES)
            if (any(load(x + i) / divisor == splat(score)))
                for (int j = i; place < 0; j++)
                    if (x[j] / divisor == score) place = first + j;
        return place >= 0;
    });
    return place;
}

// The k-th best score, k below the row's length. Those no less than the k-th best of the blocks' best are few.
inline float kth_best(const Row& row, int k) {
    std::vector<float> found;
    each_block(row, [&](int, const float* x) {
        f16v most = load(x);
        for (int i = LANES; i < BLOCK; i += LANES) most = max_of(load(x + i), most);
        found.push_back(highest(most));
        return false;
    });
    float least = LOWEST;
    if (int(found.size()) > k) {
        std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
        least = found[k - 1];
    }
    found.clear();
    for (int i = 0; i < row.count; i++)
        if (row.scores[i] >= least) found.push_back(row.scores[i]);
    std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
    return found[k - 1];
}

struct Sampled {
    Row row;
    const Rule& rule;
    float best;             // z of the best
    float border = LOWEST;  // z of the last that top-k keeps
    int64_t total = 0;      // mass of what top-k keeps, where top-p asks
    float floor = LOWEST;   // no z below is kept, but for rounding

    float z(float x) const { return x / rule.heat; }

    // The mass of the scores of which z is above `least`, and of those that have it at places below `place`.
    int64_t mass_before(float least, int place) const {
        int64_t mass = 0;
        // What division rounds off is a share of z, but of one that is subnormal.
        const float floor = least * rule.heat - std::abs(least * rule.heat) * 1e-6f - 0x1p-126f;
        each_block(row, [&](int first, const float* x) {
            for (int i = 0; i < BLOCK; i += LANES) {
                const f16v v = load(x + i);
                if (floor > LOWEST && !any((v > splat(floor)) | (v == splat(floor)))) continue;
                const f16v scaled = v / rule.heat;
                float scores[LANES], weights[LANES];
                store(scores, scaled), store(weights, exp_of(scaled - splat(best)) * MASS);
                for (int j = 0; j < LANES; j++)
                    if (scores[j] > least || (scores[j] == least && first + i + j < place)) mass += int64_t(weights[j]);
            }
            return false;
        });
        return mass;
    }

    bool keeps(float score, int place) const {
        if (score < border) return false;
        if (exp_of(splat(score - best))[0] < rule.min_p) return false;
        if (rule.cut < 0.0f) return true;
        return float(double(total - mass_before(score, place)) / double(total)) > rule.cut;
    }

    // The place of the greatest z plus noise before `end` (by descending z, then ascending place). start: of the best.
    int winner(int start, float end_z, int end) const {
        float most = best + gumbel(word_of(rule, row.token(start)));
        int place = start;
        const float lowest = std::max(floor, end_z);
        const float slack = 1e-3f + 0x1p-20f * std::abs(most), inverse = 1.0f / rule.heat;
        each_block(row, [&](int first, const float* x) {
            f16v about[BLOCK / LANES], top = splat(LOWEST);
            for (int i = 0; i < BLOCK / LANES; i++) about[i] = load(x + i * LANES) * inverse, top = max_of(about[i], top);
            if (!any(top > splat(std::max(lowest, most - MOST_NOISE) - slack))) return false;
            uint32_t words[BLOCK];
            make_words(rule, row, first, words);
            // G > g only where u < exp(-g).
            i16v may[BLOCK / LANES], some{};
            for (int i = 0; i < BLOCK / LANES; i++) {
                i16v word;
                read(words + i * LANES, word);
                const f16v half = to_floats((word >> 1) & 0x7fffffff);
                may[i] = (half < exp_of(about[i] - splat(most - slack)) * 0x1p31f) &
                         (about[i] > splat(lowest - slack));
                some = some | may[i];
            }
            if (!any(some)) return false;
            int32_t hits[BLOCK];
            for (int i = 0; i < BLOCK / LANES; i++) write(hits + i * LANES, may[i]);
            for (int i = 0; i < BLOCK; i++) {
                const int at = first + i;
                const float score = z(x[i]);
                if (!hits[i] || score < border || score < end_z || (score == end_z && at >= end)) continue;
                const float noisy = gumbel(words[i]) + score;
                if (noisy > most || (noisy == most && at < place)) most = noisy, place = at;
            }
            return false;
        });
        return place;
    }
};

// The place of the token that the rule picks; -1 where no score is finite, or one is no number or without end.
inline int pick(const Row& row, const Rule& rule) {
    const float divisor = rule.heat > 0.0f ? rule.heat : 1.0f, best = best_score(row) / divisor;
    if (!std::isfinite(best)) return -1;
    const int start = place_of(row, best, divisor);
    if (rule.heat == 0.0f) return start;
    Sampled sampled{row, rule, best};
    if (rule.top_k > 0 && rule.top_k < row.count) sampled.border = sampled.z(kth_best(row, rule.top_k));
    sampled.floor = std::max(sampled.border, best + std::log(rule.min_p));
    if (rule.cut >= 0.0f) {
        sampled.total = sampled.mass_before(sampled.border, row.count);
        // All tokens of so little mass have no more than the share that is left out, be they ever so many.
        const float least = rule.cut * (float(sampled.total) / MASS) / float(row.count);
        sampled.floor = std::max(sampled.floor, best + std::log(least));
    }
    int place = sampled.winner(start, LOWEST, 0);
    for (float score; place != start && !sampled.keeps(score = sampled.z(row.scores[place]), place);)
        place = sampled.winner(start, score, place);
    return place;  // the best is kept always
}

// reals: [3, rows], heat, cut and min_p; whole: [5, rows], words and top_k (rules.py). Without them all rows take
// the best.
struct Rules {
    const float* reals;
    const int32_t* whole;
    int rows;
    Rule of(int row) const {
        Rule rule;
        if (!reals) return rule;
        rule.heat = reals[row], rule.cut = reals[rows + row], rule.min_p = reals[2 * rows + row];
        for (int i = 0; i < 4; i++) rule.words[i] = uint32_t(whole[i * rows + row]);
        rule.top_k = whole[4 * rows + row];
        return rule;
    }
};

}  // namespace

#if defined(PART_bf16) || defined(PART_float)
extern "C" void pick_tokens(const float* logits, int64_t stride, int rows, int vocab, const float* reals,
                            const int32_t* whole, int64_t* picks, int threads) {
    const Rules rules{reals, whole, rows};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int r = 0; r < rows; r++) picks[r] = pick(Row{logits + r * stride, vocab, nullptr}, rules.of(r));
}
#endif
