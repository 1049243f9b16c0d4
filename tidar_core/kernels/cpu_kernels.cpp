// Row-wise operations for a CPU. Every row is computed by itself, so that its bits do not depend on the batch.
// Layouts: ops.py.
#include <type_traits>

namespace {

inline f16v power(f16v x) {  // exp(x), from -87 to 89: 2^n times a polynomial on [-1/2, 1/2]; error below 2 ulp
    f16v t = x * 1.44269504f;
    f16v n = (t + 12582912.0f) - 12582912.0f;
    f16v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f16v p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_floats((to_whole(n) + 127) << 23);
}

inline f16v exp_of(f16v x) {  // NaN stays NaN
    f16v least = splat(-87.0f), most = splat(89.0f);  // which makes infinity, as it should: 2^128
    x = choose(x < least, least, x);
    return power(choose(x > most, most, x));
}

struct Shape { int rows, heads, kv_heads, head_dim; };

template <typename T> void norm_row(const T* x, const T* w, T* out, int n, float eps) {
    f16v squares{};
    for (int i = 0; i < n; i += LANES) { f16v v = load(x + i); squares += v * v; }
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
    for (int i = 0; i < n; i += LANES) store(out + i, rounded<T>(load(x + i) * scale) * load(w + i));
}

template <typename T>
void add_norm(const T* x, T* residual, const T* weight, T* out, int rows, int n, float eps, int add, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > 4096)
    for (int r = 0; r < rows; r++) {
        const T* xr = x + int64_t(r) * n;
        T* rr = residual + int64_t(r) * n;
        for (int i = 0; i < n; i += LANES) store(rr + i, add ? load(rr + i) + load(xr + i) : load(xr + i));
        norm_row(rr, weight, out + int64_t(r) * n, n, eps);
    }
}

enum Activation { SILU, GELU_TANH };

// What x is divided by 1 + exp(-steep) of: x itself for SiLU; for GELU's approximation by tanh, since
// (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), twice u.
template <Activation A> inline f16v steep(f16v x) {
    if constexpr (A == SILU) return x;
    return x * (1.5957691216f + 0.0713548163f * x * x);
}

template <typename T, Activation A> void gate_rows(const T* gate_up, T* out, int rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > 4096)
    for (int r = 0; r < rows; r++) {
        const T* gate = gate_up + int64_t(r) * 2 * n;
        for (int i = 0; i < n; i += LANES) {
            f16v g = load(gate + i);
            store(out + int64_t(r) * n + i, rounded<T>(g / (1.0f + exp_of(-steep<A>(g)))) * load(gate + n + i));
        }
    }
}

template <typename T> void gate(const T* gate_up, T* out, int rows, int n, int activation, int threads) {
    if (activation == GELU_TANH) gate_rows<T, GELU_TANH>(gate_up, out, rows, n, threads);
    else gate_rows<T, SILU>(gate_up, out, rows, n, threads);
}

template <typename T> void rotate_head(T* x, const float* cos, const float* sin, int head_dim, const T* norm, float eps) {
    if (norm) norm_row(x, norm, x, head_dim, eps);
    constexpr int HALF_LANES = LANES / 2;  // half a head may be no longer
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += HALF_LANES) {
        T pairs[LANES], crossed[LANES];
        std::memcpy(pairs, x + i, sizeof pairs / 2);
        std::memcpy(pairs + HALF_LANES, x + half + i, sizeof pairs / 2);
        std::memcpy(crossed, pairs + HALF_LANES, sizeof pairs / 2);
        std::memcpy(crossed + HALF_LANES, pairs, sizeof pairs / 2);
        float c[LANES], n[LANES];
        for (int j = 0; j < HALF_LANES; j++) {
            c[j] = c[j + HALF_LANES] = cos[i + j];
            n[j] = -sin[i + j], n[j + HALF_LANES] = sin[i + j];
        }
        store(pairs, load(pairs) * load(c) + load(crossed) * load(n));
        std::memcpy(x + i, pairs, sizeof pairs / 2);
        std::memcpy(x + half + i, pairs + HALF_LANES, sizeof pairs / 2);
    }
}

template <typename T>
void rotate_and_store(T* qkv, Shape s, int verify, const int32_t* positions, const float* cos, const float* sin,
                      const T* q_norm, const T* k_norm, float eps, T* keys, T* values, const int32_t* slots, int threads) {
    int width = (s.heads + 2 * s.kv_heads) * s.head_dim, half = s.head_dim / 2;
#pragma omp parallel for num_threads(threads) if (s.rows * width > 4096)
    for (int r = 0; r < s.rows; r++) {
        T* row = qkv + int64_t(r) * width;
        const float *c = cos + int64_t(positions[r]) * half, *n = sin + int64_t(positions[r]) * half;
        for (int h = 0; h < s.heads + s.kv_heads; h++)
            rotate_head(row + h * s.head_dim, c, n, s.head_dim, h < s.heads ? q_norm : k_norm, eps);
        if (r >= verify) continue;
        int64_t page = slots[r] / LANES, offset = slots[r] % LANES;
        for (int h = 0; h < s.kv_heads; h++) {
            const T* k = row + (s.heads + h) * s.head_dim;
            T* key_page = keys + (page * s.kv_heads + h) * s.head_dim * LANES;
            for (int d = 0; d < s.head_dim; d++) key_page[d * LANES + offset] = k[d];
            std::memcpy(values + ((page * s.kv_heads + h) * LANES + offset) * s.head_dim,
                        row + (s.heads + s.kv_heads + h) * s.head_dim, s.head_dim * sizeof(T));
        }
    }
}

// Calls run with a count, at most MOST, as a constant.
template <int MOST, typename Run> inline void with_count(int count, Run run) {
    if constexpr (MOST > 1) {
        if (count < MOST) return with_count<MOST - 1>(count, run);
    }
    run(std::integral_constant<int, MOST>{});
}

}  // namespace

#define EXPORT(NAME, T)                                                                                              \
    extern "C" void add_norm_##NAME(const T* x, T* residual, const T* weight, T* out, int rows, int n, float eps,    \
                                    int add, int threads) { add_norm(x, residual, weight, out, rows, n, eps, add, threads); } \
    extern "C" void gate_##NAME(const T* gate_up, T* out, int rows, int n, int activation, int threads) {            \
        gate(gate_up, out, rows, n, activation, threads); }                                                          \
    extern "C" void rotate_and_store_##NAME(T* qkv, int rows, int heads, int kv_heads, int head_dim, int verify,     \
        const int32_t* positions, const float* cos, const float* sin, const T* q_norm, const T* k_norm, float eps,   \
        T* keys, T* values, const int32_t* slots, int threads) {                                                     \
        rotate_and_store(qkv, Shape{rows, heads, kv_heads, head_dim}, verify, positions, cos, sin, q_norm, k_norm,   \
                         eps, keys, values, slots, threads); }
#if defined(PART_bf16) || defined(PART_training)
EXPORT(bf16, bf16)
#endif
#if defined(PART_float) || defined(PART_training)
EXPORT(float, float)
#endif
