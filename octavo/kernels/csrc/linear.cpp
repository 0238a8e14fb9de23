// y = x W^T + bias for a few rows of x: W is read once, at the speed of memory. And the same for gated MLPs, with both halves
// and the activation in one pass.
//
// reference: octavo/kernels/reference.py, linear and gated.

#include "simd.h"

namespace OCTAVO_ISA {

enum Gate : int32_t { GATE_SILU = 0, GATE_GELU = 1, GATE_GELU_TANH = 2 };

struct Linear {
    const void* x;       // [m, size], rows `x_row` elements apart
    const void* weight;  // [n, size], contiguous
    const void* up;      // [n, size] of gated MLPs; the weight is the gate's
    const void* bias;    // [n] or null
    void* y;             // [m, n], contiguous
    int64_t m, n, size, x_row;
    int32_t type, gate;
    // x as the policy takes it: [m rounded up to the rows of a tile, size], zero below.
    const void* items;
    int64_t rows, chunk;
};

static inline vec gated(int32_t gate, vec g, vec u) {
    if (gate == GATE_SILU) return g / (1.0f + exponential(-g)) * u;
    if (gate == GATE_GELU_TANH) {
        vec inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        return 0.5f * g * (1.0f + tanh_of(inner)) * u;
    }
    float parts[W];
    store(parts, g);
    for (int i = 0; i < W; i++) parts[i] = 0.5f * parts[i] * (1.0f + __builtin_erff(parts[i] * 0.70710678118654752f));
    return load(parts) * u;
}

// Outputs [m, m + M) of weight rows [n, n + N).
template <class P, int M, class T>
static inline void tile(const Linear& call, int64_t m, int64_t n, int64_t last) {
    constexpr int N = W / M;
    const T *weight = (const T*)call.weight, *up = (const T*)call.up, *bias = (const T*)call.bias;
    const T *b[N], *c[N];
    for (int j = 0; j < N; j++) {
        int64_t at = min64(n + j, call.n - 1) * call.size;
        b[j] = weight + at;
        c[j] = up + (up ? at : 0);
    }
    int64_t row = call.size / P::elements;
    const typename P::item* x = (const typename P::item*)call.items + m * row;
    vec out = dots<P, M, T>(x, row, b, call.size);
    if (up) out = gated(call.gate, through((T*)0, out), through((T*)0, dots<P, M, T>(x, row, c, call.size)));
    float parts[W];
    store(parts, out);
    for (int i = 0; i < M && m + i < call.m; i++) {
        T* y = (T*)call.y + (m + i) * call.n + n;
        for (int j = 0; j < N && n + j < last; j++) from_float(y + j, parts[i * N + j] + (bias ? to_float(bias[n + j]) : 0.0f));
    }
}

// Weight rows [first, last), some of them at a time: these stay in L2, and M rows of x in L1.
template <class P, int M, class T>
static void rows_of(const Linear& call, int64_t first, int64_t last) {
    constexpr int N = W / M;
    constexpr int64_t GROUP_BYTES = 64 << 10, AHEAD_BYTES = 16 << 10;
    int64_t bytes = call.size * (int64_t)sizeof(T);
    int64_t group = call.rows > M ? round_up(max64(1, GROUP_BYTES / bytes), N) : N;
    int64_t ahead = round_up(max64(1, AHEAD_BYTES / bytes), N);
    for (int64_t low = first; low < last; low += group) {
        int64_t high = min64(low + group, last);
        for (int64_t m = 0; m < call.rows; m += M) {
            for (int64_t n = low; n < high; n += N) {
                for (int j = 0; m == 0 && j < N && n + ahead + j < call.n; j++) {
                    prefetch((const T*)call.weight + (n + ahead + j) * call.size, bytes);
                    if (call.up) prefetch((const T*)call.up + (n + ahead + j) * call.size, bytes);
                }
                tile<P, M, T>(call, m, n, high);
            }
        }
    }
}

template <class P, int M, class T>
static void item(void* context, int64_t number) {
    const Linear& call = *(const Linear*)context;
    rows_of<P, M, T>(call, number * call.chunk, min64((number + 1) * call.chunk, call.n));
}

static inline void copy_row(float* to, const float* from, int64_t size) { memcpy(to, from, 4 * size); }
static inline void copy_row(float* to, const bf16* from, int64_t size) {
    for (int64_t k = 0; k < size; k += W) store(to + k, load(from + k));
}
static inline void copy_row(uint32_t* to, const bf16* from, int64_t size) { memcpy(to, from, 2 * size); }

template <class P, int M, class T>
static void run(Linear call, int threads) {
    constexpr int64_t JOB_BYTES = 96 << 10;
    call.rows = round_up(call.m, M);
    int64_t row = call.size / P::elements;
    typename P::item* x = (typename P::item*)octavo_scratch(SLOT_SHARED, call.rows * row * 4);
    for (int64_t m = 0; m < call.m; m++) copy_row(x + m * row, (const T*)call.x + m * call.x_row, call.size);
    memset(x + call.m * row, 0, (call.rows - call.m) * row * 4);
    call.items = x;
    call.chunk = round_up(max64(1, JOB_BYTES / (call.size * (int64_t)sizeof(T))), W);
    octavo_parallel(threads, (call.n + call.chunk - 1) / call.chunk, item<P, M, T>, &call);
}

template <class P, class T>
static void by_rows(const Linear& call, int threads) {
    if (call.m == 1) return run<P, 1, T>(call, threads);
    if (call.m == 2 || W == 4) return run<P, 2, T>(call, threads);
    return run<P, W == 16 ? 4 : 2, T>(call, threads);
}

}  // namespace OCTAVO_ISA

// size: a multiple of 32. x, weight, bias and y have one type.
OCTAVO_EXPORT(linear)(const OCTAVO_ISA::Linear* call, int threads) {
    using namespace OCTAVO_ISA;
    if (call->type == TYPE_FLOAT32) return by_rows<Floats, float>(*call, threads);
#if defined(OCTAVO_PAIRS)
    by_rows<Pairs, bf16>(*call, threads);
#else
    by_rows<Floats, bf16>(*call, threads);
#endif
}
