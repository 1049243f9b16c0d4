// A mixture of experts in one call: rows are gathered by expert, go through its MLP together, and a row's results are
// added in the order of its experts. What comes of a row depends on that row alone, as its products do.
#include <vector>

namespace {

// As in `cpu_experts.py`. experts, shares: [rows, chosen]; gate_up, down: packed matrices of experts 0, 1, …, so many
// bytes apart.
template <typename T> struct Mixture {
    const T* x;
    const int64_t* experts;
    const float* shares;
    const char *gate_up, *down;
    int64_t gate_up_bytes, down_bytes;
    T* out;
    int32_t rows, hidden, inner, count, chosen, activation, threads;
};

// An entry is a row and one of its experts, numbered row by row. order: entries by expert, those of one in ascending
// order, expert e's from starts[e] on; place: where in `order` an entry is.
struct ByExpert { std::vector<int32_t> starts, order, place; };

inline ByExpert by_expert(const int64_t* experts, int entries, int count) {
    ByExpert found{std::vector<int32_t>(count + 1), std::vector<int32_t>(entries), std::vector<int32_t>(entries)};
    for (int i = 0; i < entries; i++) found.starts[experts[i] + 1]++;
    for (int e = 0; e < count; e++) found.starts[e + 1] += found.starts[e];
    std::vector<int32_t> next(found.starts.begin(), found.starts.end() - 1);
    for (int i = 0; i < entries; i++) {
        found.place[i] = next[experts[i]]++;
        found.order[found.place[i]] = i;
    }
    return found;
}

template <typename Kind, typename T> void mix_experts(const Mixture<T>& m) {
    const int entries = m.rows * m.chosen;
    const ByExpert found = by_expert(m.experts, entries, m.count);
    int64_t most = 0;
    for (int e = 0; e < m.count; e++) most = std::max<int64_t>(most, found.starts[e + 1] - found.starts[e]);
    std::vector<T> own(most * m.hidden), wide(most * 2 * m.inner), mixed(most * m.inner), results(int64_t(entries) * m.hidden);
    std::vector<char> rounding(most * std::max(rounded_bytes(m.hidden), rounded_bytes(m.inner)));
    for (int e = 0; e < m.count; e++) {
        const int from = found.starts[e], rows = found.starts[e + 1] - from;
        if (rows == 0) continue;
        for (int i = 0; i < rows; i++)
            std::memcpy(&own[int64_t(i) * m.hidden], m.x + int64_t(found.order[from + i] / m.chosen) * m.hidden,
                        sizeof(T) * m.hidden);
        const T* none = nullptr;
        auto multiply = [&](const T* x, int in, const char* weight, int outs, T* out) {
            base_product<Kind>(x, rows, in, weight, outs, none, out, rows, none, none, 0, (T*)nullptr, rounding.data(),
                               m.threads);
        };
        multiply(own.data(), m.hidden, m.gate_up + e * m.gate_up_bytes, 2 * m.inner, wide.data());
        gate(wide.data(), mixed.data(), rows, m.inner, m.activation, m.threads);
        multiply(mixed.data(), m.inner, m.down + e * m.down_bytes, m.hidden, &results[int64_t(from) * m.hidden]);
    }
#pragma omp parallel for num_threads(m.threads) if (int64_t(m.rows) * m.chosen * m.hidden > 65536)
    for (int r = 0; r < m.rows; r++)
        for (int i = 0; i < m.hidden; i += LANES) {
            f16v total{};
            for (int c = 0; c < m.chosen; c++) {
                const int entry = r * m.chosen + c;
                total += load(&results[int64_t(found.place[entry]) * m.hidden + i]) * m.shares[entry];
            }
            store(m.out + int64_t(r) * m.hidden + i, total);
        }
}

}  // namespace

#define EXPORT_EXPERTS(KIND, NAME, T)                                                                                 \
    extern "C" void mix_experts_##NAME(const Mixture<T>* mixture) { mix_experts<KIND>(*mixture); }

#ifdef PART_bf16
EXPORT_EXPERTS(Dense<bf16>, bf16, bf16)
#endif
#ifdef PART_rounded_bf16
EXPORT_EXPERTS(Int8, int8_bf16, bf16)
EXPORT_EXPERTS(Int4, int4_bf16, bf16)
#endif
#ifdef PART_float
EXPORT_EXPERTS(Dense<float>, float, float)
#endif
#ifdef PART_rounded_float
EXPORT_EXPERTS(Int8, int8_float, float)
EXPORT_EXPERTS(Int4, int4_float, float)
#endif
