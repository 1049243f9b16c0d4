// Sixteen lanes at once: one register with AVX-512, two with AVX2, four elsewhere. What the other files write down over
// them is the same everywhere; only the number of sums that fit the registers differs. A library has the functions of
// the one PART that it is compiled for (`cpu_build.py`).
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANEWISE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 24")

namespace {

constexpr int LANES = 16;
typedef uint16_t bf16;

// REGISTER: its bytes. MOST_SUMS: sums of sixteen lanes that fit the registers beside what is added to them.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, MOST_SUMS = 24;
#elif defined(__AVX2__)
constexpr int REGISTER = 32, MOST_SUMS = 6;
#else
constexpr int REGISTER = 16, MOST_SUMS = 6;
#endif

typedef float Floats __attribute__((vector_size(REGISTER)));
typedef int32_t Whole __attribute__((vector_size(REGISTER)));
typedef uint32_t Bits __attribute__((vector_size(REGISTER)));

LANEWISE Floats choose(Whole mask, Floats yes, Floats no) { return mask ? yes : no; }
LANEWISE Floats as_floats(Bits v) { return (Floats)v; }
LANEWISE Floats as_floats(Whole v) { return (Floats)v; }
LANEWISE Bits as_bits(Floats v) { return (Bits)v; }
LANEWISE Bits as_bits(Whole v) { return (Bits)v; }
LANEWISE Whole to_whole(Floats v) { return __builtin_convertvector(v, Whole); }
LANEWISE Floats to_floats(Whole v) { return __builtin_convertvector(v, Floats); }
template <typename V> LANEWISE void read(const void* from, V& to) { std::memcpy(&to, from, sizeof to); }
template <typename V> LANEWISE void write(void* to, V v) { std::memcpy(to, &v, sizeof v); }
template <typename E> LANEWISE void load_widened(const E* from, Bits& to) {
    typedef E Narrow __attribute__((vector_size(REGISTER / sizeof(uint32_t) * sizeof(E))));
    Narrow narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    to = __builtin_convertvector(narrow, Bits);
}
template <typename E, typename V> LANEWISE void store_narrowed(E* to, V v) {
    typedef E Narrow __attribute__((vector_size(REGISTER / sizeof(uint32_t) * sizeof(E))));
    const Narrow narrow = __builtin_convertvector(v, Narrow);
    std::memcpy(to, &narrow, sizeof narrow);
}

// The same address, unknown to the compiler: what is read there is read anew, and takes no registers until then.
template <typename T> LANEWISE const T* anew(const T* address) { __asm__("" : "+r"(address)); return address; }

// Two of what is half as wide. A vector of the compiler's that is wider than a register would live in memory.
template <typename V> struct Pair {
    typedef std::decay_t<decltype(V()[0])> Each;
    static constexpr int HALF = sizeof(V) / sizeof(Each);
    V lo, hi;
    LANEWISE Pair() : lo{}, hi{} {}
    // (all + 0 would be computed: it makes another number of -0.)
    LANEWISE Pair(Each all) : lo(all - V{}), hi(all - V{}) {}
    LANEWISE Pair(V lo, V hi) : lo(lo), hi(hi) {}
    LANEWISE Each operator[](int i) const { return i < HALF ? lo[i] : hi[i - HALF]; }
    LANEWISE Pair operator-() const { return {-lo, -hi}; }
    LANEWISE Pair operator~() const { return {~lo, ~hi}; }
    LANEWISE Pair operator<<(int n) const { return {lo << n, hi << n}; }
    LANEWISE Pair operator>>(int n) const { return {lo >> n, hi >> n}; }
    LANEWISE Pair& operator+=(Pair b) { return *this = *this + b; }
    friend LANEWISE Pair operator+(Pair a, Pair b) { return {a.lo + b.lo, a.hi + b.hi}; }
    friend LANEWISE Pair operator-(Pair a, Pair b) { return {a.lo - b.lo, a.hi - b.hi}; }
    friend LANEWISE Pair operator*(Pair a, Pair b) { return {a.lo * b.lo, a.hi * b.hi}; }
    friend LANEWISE Pair operator/(Pair a, Pair b) { return {a.lo / b.lo, a.hi / b.hi}; }
    friend LANEWISE Pair operator&(Pair a, Pair b) { return {a.lo & b.lo, a.hi & b.hi}; }
    friend LANEWISE Pair operator|(Pair a, Pair b) { return {a.lo | b.lo, a.hi | b.hi}; }
    friend LANEWISE auto operator>(Pair a, Pair b) { return ::Pair(a.lo > b.lo, a.hi > b.hi); }
    friend LANEWISE auto operator<(Pair a, Pair b) { return ::Pair(a.lo < b.lo, a.hi < b.hi); }
    friend LANEWISE auto operator==(Pair a, Pair b) { return ::Pair(a.lo == b.lo, a.hi == b.hi); }
    friend LANEWISE auto operator!=(Pair a, Pair b) { return ::Pair(a.lo != b.lo, a.hi != b.hi); }
};
template <typename M, typename V> LANEWISE Pair<V> choose(Pair<M> mask, Pair<V> yes, Pair<V> no) {
    return {choose(mask.lo, yes.lo, no.lo), choose(mask.hi, yes.hi, no.hi)};
}
template <typename V> LANEWISE auto as_floats(Pair<V> v) { return Pair(as_floats(v.lo), as_floats(v.hi)); }
template <typename V> LANEWISE auto as_bits(Pair<V> v) { return Pair(as_bits(v.lo), as_bits(v.hi)); }
template <typename V> LANEWISE auto to_whole(Pair<V> v) { return Pair(to_whole(v.lo), to_whole(v.hi)); }
template <typename V> LANEWISE auto to_floats(Pair<V> v) { return Pair(to_floats(v.lo), to_floats(v.hi)); }
template <typename V> LANEWISE void read(const void* from, Pair<V>& to) {
    read(from, to.lo);
    read((const char*)from + sizeof to.lo, to.hi);
}
template <typename V> LANEWISE void write(void* to, Pair<V> v) {
    write(to, v.lo);
    write((char*)to + sizeof v.lo, v.hi);
}
template <typename E, typename V> LANEWISE void load_widened(const E* from, Pair<V>& to) {
    load_widened(from, to.lo);
    load_widened(from + Pair<V>::HALF, to.hi);
}
template <typename E, typename V> LANEWISE void store_narrowed(E* to, Pair<V> v) {
    store_narrowed(to, v.lo);
    store_narrowed(to + Pair<V>::HALF, v.hi);
}

template <typename V, int REGISTERS> struct Wide { typedef Pair<typename Wide<V, REGISTERS / 2>::type> type; };
template <typename V> struct Wide<V, 1> { typedef V type; };
constexpr int REGISTERS = LANES * sizeof(float) / REGISTER;
typedef Wide<Floats, REGISTERS>::type f16v;
typedef Wide<Whole, REGISTERS>::type i16v;
typedef Wide<Bits, REGISTERS>::type u16v;

LANEWISE f16v splat(float x) { return f16v{} + x; }
LANEWISE f16v max_of(f16v a, f16v b) { return choose(a > b, a, b); }
LANEWISE f16v load(const float* p) { f16v v; read(p, v); return v; }
LANEWISE f16v load(const bf16* p) { u16v v; load_widened(p, v); return as_floats(v << 16); }
LANEWISE void store(float* p, f16v v) { write(p, v); }
LANEWISE void store(bf16* p, f16v v) {
    const u16v u = as_bits(v), nan = as_bits(v != v);
    const u16v nearest = u + 0x7fffu + ((u >> 16) & 1u);  // ties to even
    store_narrowed(p, ((nearest & ~nan) | (nan & 0x7fc00000u)) >> 16);
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
template <typename T> LANEWISE f16v rounded(f16v v) { T t[LANES]; store(t, v); return load(t); }
LANEWISE f16v nearest_whole(f16v v) {  // ties to even
    float t[LANES]; store(t, v);
    for (float& each : t) each = __builtin_rintf(each);
    return load(t);
}
inline float sum(f16v v) {
    float s[LANES]; store(s, v);
    for (int w = LANES / 2; w; w /= 2) for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
}

}  // namespace
