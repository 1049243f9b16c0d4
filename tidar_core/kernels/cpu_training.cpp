// Gradients of the row-wise operations, which training needs beside the products. Layouts: cpu_training.py.

namespace {

template <Activation A> inline f16v steeper(f16v x) {  // the derivative of `steep`
    if constexpr (A == SILU) return splat(1.0f);
    return 1.5957691216f + 3.0f * 0.0713548163f * x * x;
}

template <typename T, Activation A>
void gate_slope_rows(const T* gate_up, const T* slope, T* out, int rows, int n, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++) {
        const T *gate = gate_up + int64_t(r) * 2 * n, *d = slope + int64_t(r) * n;
        T* to = out + int64_t(r) * 2 * n;
        for (int i = 0; i < n; i += LANES) {
            f16v g = load(gate + i), share = 1.0f / (1.0f + exp_of(-steep<A>(g)));
            store(to + i, load(d + i) * load(gate + n + i) * (share + g * share * (1.0f - share) * steeper<A>(g)));
            store(to + n + i, load(d + i) * (g * share));
        }
    }
}

// d_total: what reaches the sum from elsewhere, if anything.
template <typename T>
void norm_slope(const T* total, const T* weight, const T* d_normed, const T* d_total, T* out, int rows, int n, float eps,
                int threads) {
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++) {
        const int64_t at = int64_t(r) * n;
        f16v squares{}, along{};
        for (int i = 0; i < n; i += LANES) {
            f16v x = load(total + at + i);
            squares += x * x;
            along += x * (load(d_normed + at + i) * load(weight + i));
        }
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
        const float back = scale * scale * scale * sum(along) / n;
        for (int i = 0; i < n; i += LANES) {
            f16v d = load(d_normed + at + i) * load(weight + i) * scale - load(total + at + i) * back;
            store(out + at + i, d_total ? d + load(d_total + at + i) : d);
        }
    }
}

}  // namespace

#define EXPORT_TRAINING(NAME, T)                                                                                       \
    extern "C" void gate_slope_##NAME(const T* gate_up, const T* slope, T* out, int rows, int n, int activation,       \
                                      int threads) {                                                                   \
        if (activation == GELU_TANH) gate_slope_rows<T, GELU_TANH>(gate_up, slope, out, rows, n, threads);             \
        else gate_slope_rows<T, SILU>(gate_up, slope, out, rows, n, threads); }                                        \
    extern "C" void norm_slope_##NAME(const T* total, const T* weight, const T* d_normed, const T* d_total, T* out,    \
                                      int rows, int n, float eps, int threads) {                                       \
        norm_slope(total, weight, d_normed, d_total, out, rows, n, eps, threads); }
#ifdef PART_training
EXPORT_TRAINING(bf16, bf16)
EXPORT_TRAINING(float, float)
#endif
