// All layers of a model in one call: what `decoder.run_layers` says, by the operations of the files before this one,
// without the way through Python and torch between them, which for few rows takes as long as the work.
#include <algorithm>
#include <memory>
#include <type_traits>

namespace {

// A matrix of the base and what the adapter adds to it; a and b are null where it adds nothing. As in `cpu_pass.py`.
template <typename T> struct Matrix { const void* weight; const T *bias, *a, *b; int32_t outs, ins, rank; };

template <typename T> struct Layer {
    const T *input_norm, *post_norm, *q_norm, *k_norm;
    const float *cos, *sin;
    Matrix<T> qkv, o, gate_up, down;
    int32_t window;
};

template <typename T> struct Pass {
    const Layer<T>* layers;
    const T* final_norm;
    T *keys, *values;
    const int32_t *positions, *sequence, *context_end, *tail_start, *tail_end, *page_table, *write_slots;
    int64_t layer_keys;  // elements of one layer's keys, and of its values
    int32_t count, rows, verify, heads, kv_heads, head_dim, table_width, activation, threads;
    float eps, scale;
};

template <typename T> struct Scratch {
    std::unique_ptr<char[]> memory;
    T *residual, *normed, *wide, *mixed, *low;
    char* rounding;
};

template <typename T> Scratch<T> scratch_for(const Pass<T>& pass) {
    int64_t outputs = 0, inputs = 0, rank = 0, rounding = 0;
    const Layer<T>& first = pass.layers[0];
    for (const Matrix<T>* m : {&first.qkv, &first.o, &first.gate_up, &first.down}) {
        outputs = std::max<int64_t>(outputs, m->outs);
        inputs = std::max<int64_t>(inputs, m->ins);
        rounding = std::max<int64_t>(rounding, rounded_bytes(m->ins));
    }
    for (int i = 0; i < pass.count; i++)
        for (const Matrix<T>* m : {&pass.layers[i].qkv, &pass.layers[i].o, &pass.layers[i].gate_up, &pass.layers[i].down})
            rank = std::max<int64_t>(rank, tiled_rank(m->rank));
    const int64_t rows = pass.rows, hidden = first.qkv.ins;
    const int64_t sizes[] = {rows * hidden, rows * hidden, rows * outputs, rows * inputs, rows * rank * pass.threads};
    auto padded = [](int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; };
    int64_t total = LINE + padded(rows * rounding);
    for (int64_t size : sizes) total += padded(size * sizeof(T));
    Scratch<T> made{std::unique_ptr<char[]>(new char[total]), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    char* at = made.memory.get() + LINE - (uintptr_t)made.memory.get() % LINE;
    T** parts[] = {&made.residual, &made.normed, &made.wide, &made.mixed, &made.low};
    for (int i = 0; i < 5; at += padded(sizes[i] * sizeof(T)), i++) *parts[i] = (T*)at;
    made.rounding = at;
    return made;
}

// A product with a matrix of the base, however that is kept.
template <typename Kind, typename T>
void base_product(const T* x, int rows, int in, const void* weight, int outs, const T* bias, T* out, int first_mask_row,
                  const T* down, const T* up, int rank, T* low, char* rounding, int threads) {
    if constexpr (std::is_same_v<Kind, Dense<T>>)
        product(Kind{x, (const T*)weight, in}, x, rows, in, outs, bias, out, first_mask_row, down, up, rank, low, threads);
    else
        product_of_rounded<Kind>(x, rows, in, (const uint8_t*)weight, outs, bias, out, first_mask_row, down, up, rank, low,
                                 rounding, threads);
}

template <typename Kind, typename T>
void multiply(const T* x, const Matrix<T>& m, T* out, const Pass<T>& pass, Scratch<T>& scratch) {
    base_product<Kind>(x, pass.rows, m.ins, m.weight, m.outs, m.bias, out, pass.verify, m.a, m.b, m.rank, scratch.low,
                       scratch.rounding, pass.threads);
}

// x [rows, hidden] in, the normed hidden states out, in place. Kind: how the base's weights are kept.
template <typename Kind, typename T> void run_layers(const Pass<T>& pass, T* x) {
    const Shape shape{pass.rows, pass.heads, pass.kv_heads, pass.head_dim};
    const int hidden = pass.layers[0].qkv.ins, inner = pass.layers[0].down.ins;
    Scratch<T> s = scratch_for(pass);
    for (int i = 0; i < pass.count; i++) {
        const Layer<T>& layer = pass.layers[i];
        T *keys = pass.keys + i * pass.layer_keys, *values = pass.values + i * pass.layer_keys;
        add_norm(x, s.residual, layer.input_norm, s.normed, pass.rows, hidden, pass.eps, i > 0, pass.threads);
        multiply<Kind>(s.normed, layer.qkv, s.wide, pass, s);
        rotate_and_store(s.wide, shape, pass.verify, pass.positions, layer.cos, layer.sin, layer.q_norm, layer.k_norm,
                         pass.eps, keys, values, pass.write_slots, pass.threads);
        attend(s.wide, shape, pass.verify, pass.positions, pass.sequence, pass.context_end, pass.tail_start,
               pass.tail_end, pass.page_table, pass.table_width, layer.window, keys, values, pass.scale, s.mixed,
               pass.threads);
        multiply<Kind>(s.mixed, layer.o, x, pass, s);
        add_norm(x, s.residual, layer.post_norm, s.normed, pass.rows, hidden, pass.eps, 1, pass.threads);
        multiply<Kind>(s.normed, layer.gate_up, s.wide, pass, s);
        gate(s.wide, s.mixed, pass.rows, inner, pass.activation, pass.threads);
        multiply<Kind>(s.mixed, layer.down, x, pass, s);
    }
    add_norm(x, s.residual, pass.final_norm, s.normed, pass.rows, hidden, pass.eps, 1, pass.threads);
    std::memcpy(x, s.normed, sizeof(T) * pass.rows * hidden);
}

}  // namespace

#define EXPORT_PASS(KIND, NAME, T)                                                                                    \
    extern "C" void run_layers_##NAME(const Pass<T>* pass, T* x) { run_layers<KIND>(*pass, x); }

#ifdef PART_bf16
EXPORT_PASS(Dense<bf16>, bf16, bf16)
#endif
#ifdef PART_rounded_bf16
EXPORT_PASS(Int8, int8_bf16, bf16)
EXPORT_PASS(Int4, int4_bf16, bf16)
#endif
#ifdef PART_float
EXPORT_PASS(Dense<float>, float, float)
#endif
#ifdef PART_rounded_float
EXPORT_PASS(Int8, int8_float, float)
EXPORT_PASS(Int4, int4_float, float)
#endif
