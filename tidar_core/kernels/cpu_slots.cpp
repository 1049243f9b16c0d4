// Drafts of whole proposals, slot by slot: each slot's best tokens, scored anew once the token before is known
// (slot_head.py), and one of them picked by the token rule. One parallel region for all of it, since every slot waits
// for the one before.

namespace {

template <typename A, typename B> inline float dot(const A* a, const B* b, int n) {
    f16v total{};
    for (int i = 0; i < n; i += LANES) total += load(a + i) * load(b + i);
    return sum(total);
}

// The `wanted` best of n scores, in the order of the tokens: those no less than the wanted-th best of the maxima of short stretches
// are few, and the best are among them.
inline void best_tokens(const float* scores, int n, int wanted, int32_t* tokens) {
    constexpr int STRETCH = 16 * LANES;
    std::vector<float> peaks;
    for (int first = 0; first < n; first += STRETCH) {
        int last = std::min(n, first + STRETCH), i = first;
        f16v most = splat(-std::numeric_limits<float>::infinity());
        for (; i + LANES <= last; i += LANES) most = max_of(load(scores + i), most);
        float lanes[LANES], peak = -std::numeric_limits<float>::infinity();
        std::memcpy(lanes, &most, sizeof lanes);
        for (float lane : lanes) peak = std::max(peak, lane);
        for (; i < last; i++) peak = std::max(peak, scores[i]);
        peaks.push_back(peak);
    }
    float least = -std::numeric_limits<float>::infinity();
    if (int(peaks.size()) > wanted) {
        std::vector<float> sorted(peaks);
        std::nth_element(sorted.begin(), sorted.begin() + wanted - 1, sorted.end(), std::greater<float>());
        least = sorted[wanted - 1];
    }
    std::vector<std::pair<float, int32_t>> found;
    for (size_t stretch = 0; stretch < peaks.size(); stretch++) {
        if (!(peaks[stretch] >= least)) continue;
        int first = int(stretch) * STRETCH, last = std::min(n, first + STRETCH);
        for (int i = first; i < last; i++)
            if (scores[i] >= least) found.push_back({-scores[i], i});
    }
    if (int(found.size()) > wanted) std::nth_element(found.begin(), found.begin() + wanted, found.end());
    for (int i = 0; i < wanted; i++) tokens[i] = i < int(found.size()) ? found[i].second : found.empty() ? 0 : found[0].second;
    std::sort(tokens, tokens + wanted);
}

template <typename T> struct SlotHead {
    const T *hidden, *token, *state, *out;
    int size, width;
};

template <typename T>
void draft_slots(SlotHead<T> head, const T* words, const T* vocabulary, int vocab, const T* x, const float* logits,
                 int rows, int proposals, const int32_t* counts, const int64_t* anchors, int candidates, Rules rules,
                 int64_t* drafts, int threads) {
    const int size = head.size, width = head.width;
    std::vector<int32_t> tokens(int64_t(rows) * candidates), starts(proposals);
    std::vector<float> heard(int64_t(rows) * width), state(int64_t(proposals) * width), next(state.size());
    std::vector<float> correction(int64_t(proposals) * size), scores(int64_t(proposals) * candidates);
    std::vector<int64_t> before(anchors, anchors + proposals);
    int slots = 0;
    for (int p = 0, row = 0; p < proposals; row += counts[p++]) starts[p] = row, slots = std::max(slots, int(counts[p]));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int r = 0; r < rows; r++)
            best_tokens(logits + int64_t(r) * vocab, vocab, candidates, tokens.data() + int64_t(r) * candidates);
#pragma omp for
        for (int j = 0; j < width; j++)
            for (int r = 0; r < rows; r++)
                heard[int64_t(r) * width + j] = dot(head.hidden + int64_t(j) * size, x + int64_t(r) * size, size);
        for (int slot = 0; slot < slots; slot++) {
#pragma omp for
            for (int j = 0; j < width; j++)
                for (int p = 0; p < proposals; p++) {
                    if (slot >= counts[p]) continue;
                    float sees = heard[int64_t(starts[p] + slot) * width + j];
                    sees += dot(head.token + int64_t(j) * size, words + before[p] * size, size);
                    if (slot) sees += dot(head.state + int64_t(j) * width, state.data() + int64_t(p) * width, width);
                    next[int64_t(p) * width + j] = sees / (1.0f + __builtin_expf(-sees));
                }
#pragma omp for
            for (int j = 0; j < size; j++)
                for (int p = 0; p < proposals; p++)
                    if (slot < counts[p])
                        correction[int64_t(p) * size + j] =
                            dot(head.out + int64_t(j) * width, next.data() + int64_t(p) * width, width);
#pragma omp for
            for (int i = 0; i < proposals * candidates; i++) {
                int p = i / candidates, row = starts[p] + slot;
                if (slot >= counts[p]) continue;
                int32_t token = tokens[int64_t(row) * candidates + i % candidates];
                scores[i] = logits[int64_t(row) * vocab + token] +
                            dot(vocabulary + int64_t(token) * size, correction.data() + int64_t(p) * size, size);
            }
#pragma omp single
            {
                for (int p = 0; p < proposals; p++) {
                    if (slot >= counts[p]) continue;
                    const int row = starts[p] + slot;
                    const int32_t* own = tokens.data() + int64_t(row) * candidates;
                    const int place = pick(Row{scores.data() + int64_t(p) * candidates, candidates, own}, rules.of(row));
                    drafts[row] = place < 0 ? -1 : own[place];
                    before[p] = place < 0 ? 0 : own[place];  // nothing that could hold
                }
                state.swap(next);
            }
        }
    }
}

}  // namespace

#define EXPORT_SLOTS(NAME, T)                                                                                         \
    extern "C" void draft_slots_##NAME(const T* hidden, const T* token, const T* state, const T* out, int size,       \
                                       int width, const T* words, const T* vocabulary, int vocab, const T* x,         \
                                       const float* logits, int rows, int proposals, const int32_t* counts,           \
                                       const int64_t* anchors, int candidates, const float* reals, const int32_t* whole, \
                                       int64_t* drafts, int threads) {                                                \
        draft_slots(SlotHead<T>{hidden, token, state, out, size, width}, words, vocabulary, vocab, x, logits, rows,   \
                    proposals, counts, anchors, candidates, Rules{reals, whole, rows}, drafts, threads); }

#ifdef PART_bf16
EXPORT_SLOTS(bf16, bf16)
#endif
#ifdef PART_float
EXPORT_SLOTS(float, float)
#endif
