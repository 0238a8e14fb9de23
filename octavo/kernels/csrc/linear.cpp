// y = x W^T + bias, for one W or for several side by side. For a few rows of x, W is read once, at the speed of memory; for
// many, some of it stays in L2 while all of x goes by. And the same for gated MLPs, with both halves and the activation in one
// pass. A row's result does not depend on how many rows there are.
//
// reference: octavo/ops/oracles/products.py, project and gated.

#include "simd.h"

namespace OCTAVO_ISA {

enum Gate : int32_t { GATE_SILU = 0, GATE_GELU = 1, GATE_GELU_TANH = 2 };

struct Matrix {
    const void* weight;  // [n, size], contiguous
    const void* bias;    // [n] or null
    int64_t n;
};

struct Linear {
    const void* x;           // [m, size], rows `x_row` elements apart
    const Matrix* matrices;  // [count], whose outputs lie side by side; the gate's, alone, where there is `up`
    const void* up;          // [n, size] of gated MLPs
    void* y;                 // [m, y_row], contiguous
    int64_t count, m, size, x_row, y_row;
    int32_t type, gate;
};

// One matrix and a block of x as the policy takes it: [rows, row], padded with zero rows to those of a tile.
struct Slice : Linear {
    const void *items, *weight, *bias;
    int64_t row, chunk, n;
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

// How products are summed. A vector of W words holds `elements` weights for each lane; `parts` vectors of x belong to it.
struct Whole {
    typedef float item;
    static constexpr int elements = 1, parts = 1;
    static inline vec weights(const float* from, int) { return load(from); }
    static inline vec get(const float* from) { return load(from); }
    static inline vec madd(vec sum, vec a, vec b) { return sum + a * b; }
    static void copy_row(float* to, const float* from, int64_t size) { memcpy(to, from, 4 * size); }
};
#if defined(OCTAVO_PAIRS)
struct Paired {
    typedef uint32_t item;
    static constexpr int elements = 2, parts = 1;
    static inline uvec weights(const bf16* from, int) { return Pairs::get(from); }
    static inline uvec get(const uint32_t* from) { return Pairs::get(from); }
    static inline vec madd(vec sum, uvec a, uvec b) { return pairs(sum, a, b); }
    static void copy_row(uint32_t* to, const bf16* from, int64_t size) { memcpy(to, from, 2 * size); }
};
typedef Paired Brain;
#else
// The even weights are the low halves of words, the odd ones the high halves; x has W even elements, then W odd ones, ...
struct Halves {
    typedef float item;
    static constexpr int elements = 2, parts = 2;
    static inline vec weights(const bf16* from, int part) {
        uvec words;
        memcpy(&words, from, sizeof words);
        return (vec)(part ? words & 0xffff0000u : words << 16);
    }
    static inline vec get(const float* from) { return load(from); }
    static inline vec madd(vec sum, vec a, vec b) { return sum + a * b; }
    static void copy_row(float* to, const bf16* from, int64_t size) {
        for (int64_t k = 0; k < size; k += 2 * W) {
            for (int part = 0; part < 2; part++) store(to + k + part * W, weights(from + k, part));
        }
    }
};
typedef Halves Brain;
#endif

// W products at once: out[i * N + j] = row i of x times weight row b[j], for i < M and j < N = W / M. Four weight rows are read
// at a time, and with every line the one `ahead` elements further on is asked for: bursts would leave memory idle in between.
template <class P, int M, class T>
static inline vec products(const typename P::item* x, int64_t row, const T* const* b, int64_t size, int64_t ahead) {
    constexpr int N = W / M, S = N < 4 ? N : 4;
    vec acc[W] = {};
#pragma GCC unroll 16
    for (int s = 0; s < N; s += S) {
        for (int64_t k = 0; k < size; k += W * P::elements) {
#pragma GCC unroll 2
            for (int part = 0; part < P::parts; part++) {
                decltype(P::weights(b[0], 0)) right[S];
#pragma GCC unroll 4
                for (int j = 0; j < S; j++) {
                    if (part == 0) __builtin_prefetch(b[s + j] + k + ahead, 0, 2);
                    right[j] = P::weights(b[s + j] + k, part);
                }
#pragma GCC unroll 16
                for (int i = 0; i < M; i++) {
                    auto left = P::get(x + i * row + k / P::elements * P::parts + part * W);
#pragma GCC unroll 4
                    for (int j = 0; j < S; j++) acc[i * N + s + j] = P::madd(acc[i * N + s + j], left, right[j]);
                }
            }
        }
    }
    return sums(acc);
}

// Outputs [m, m + M) of weight rows [n, n + N), those below `last`.
template <class P, int M, class T>
static inline void tile(const Slice& call, int64_t m, int64_t n, int64_t last, int64_t ahead) {
    constexpr int N = W / M;
    const T *weight = (const T*)call.weight, *up = (const T*)call.up, *bias = (const T*)call.bias;
    const T *b[N], *c[N];
    for (int j = 0; j < N; j++) {
        int64_t at = min64(n + j, call.n - 1) * call.size;
        b[j] = weight + at;
        c[j] = up + (up ? at : 0);
    }
    const typename P::item* x = (const typename P::item*)call.items + m * call.row;
    vec out = products<P, M, T>(x, call.row, b, call.size, ahead);
    if (up) out = gated(call.gate, through((T*)0, out), through((T*)0, products<P, M, T>(x, call.row, c, call.size, ahead)));
    if (bias) {
        float added[W];
        for (int i = 0; i < W; i++) added[i] = to_float(bias[min64(n + i % N, call.n - 1)]);
        out += load(added);
    }
    T parts[W];
    store(parts, out);
    int64_t count = min64(M, call.m - m), columns = min64(N, last - n);
    T* y = (T*)call.y + m * call.y_row + n;
    if (count == M && columns == N) {
        for (int i = 0; i < M; i++) memcpy(y + i * call.y_row, parts + i * N, N * sizeof(T));
    } else {
        for (int i = 0; i < count; i++) memcpy(y + i * call.y_row, parts + i * N, columns * sizeof(T));
    }
}

// Weight rows [first, last). Where M rows of x are not all of them, a group of weight rows stays in L2 while all of x goes by,
// and every pass asks memory for a share of the next group.
template <class P, int M, class T>
static void rows_of(const Slice& call, int64_t first, int64_t last) {
    constexpr int N = W / M;
    constexpr int64_t GROUP_BYTES = 128 << 10;
    int64_t passes = (call.m + M - 1) / M, bytes = call.size * (int64_t)sizeof(T);
    int64_t group = passes > 1 ? round_up(max64(1, GROUP_BYTES / bytes), N) : last - first;
    int64_t near = min64(N, 4) * call.size, far = group * call.size;
    for (int64_t low = first; low < last; low += group) {
        int64_t high = min64(low + group, last);
        for (int64_t pass = 0; pass < passes; pass++) {
            for (int64_t n = low; n < high; n += N) {
                bool cold = pass == 0 && low == first, turn = (n - low) / N % passes == pass;
                tile<P, M, T>(call, pass * M, n, high, cold ? near : turn ? far : 0);
            }
        }
    }
}

template <class P, int M, class T>
static void item(void* context, int64_t number) {
    Slice slice = *(const Slice*)context;
    const Matrix* matrix = slice.matrices;
    for (int64_t jobs; number >= (jobs = (matrix->n + slice.chunk - 1) / slice.chunk); matrix++) {
        number -= jobs;
        slice.y = (T*)slice.y + matrix->n;
    }
    slice.weight = matrix->weight, slice.bias = matrix->bias, slice.n = matrix->n;
    rows_of<P, M, T>(slice, number * slice.chunk, min64((number + 1) * slice.chunk, slice.n));
}

template <class P, int M, class T>
static void run(const Linear& call, int threads) {
    constexpr int64_t BLOCK = 256, JOB_BYTES = 96 << 10, LARGE_JOB_BYTES = 2 << 20;
    static_assert(BLOCK % M == 0, "only the last block is padded");
    Slice slice = {call, nullptr, nullptr, nullptr, call.size / P::elements * P::parts, 0, 0};
    // Neighbouring rows in one job, for what it asks memory for ahead of time to be its own, and enough jobs for all threads.
    int64_t bytes = call.size * (int64_t)sizeof(T), share = call.y_row * bytes / (16 * threads), jobs = 0;
    slice.chunk = round_up(max64(1, max64(min64(share, LARGE_JOB_BYTES), JOB_BYTES) / bytes), W);
    Range reads[RANGES] = {};
    for (int64_t i = 0; i < call.count; i++) {
        jobs += (call.matrices[i].n + slice.chunk - 1) / slice.chunk;
        if (i < RANGES) reads[i] = {call.matrices[i].weight, call.matrices[i].n * bytes};
    }
    if (call.up) reads[1] = {call.up, call.y_row * bytes};
    typename P::item* x = (typename P::item*)octavo_scratch(SLOT_SHARED, round_up(min64(call.m, BLOCK), M) * slice.row * 4);
    slice.items = x;
    for (int64_t first = 0; first < call.m; first += BLOCK) {
        slice.m = min64(BLOCK, call.m - first);
        for (int64_t m = 0; m < slice.m; m++) P::copy_row(x + m * slice.row, (const T*)slice.x + m * slice.x_row, slice.size);
        memset(x + slice.m * slice.row, 0, (round_up(slice.m, M) - slice.m) * slice.row * 4);
        octavo_parallel(threads, jobs, item<P, M, T>, &slice, reads);
        slice.x = (const T*)slice.x + BLOCK * slice.x_row;
        slice.y = (T*)slice.y + BLOCK * slice.y_row;
    }
}

template <class P, class T>
static void by_rows(const Linear& call, int threads) {
    if (call.m == 1) return run<P, 1, T>(call, threads);
    if (call.m == 2 || W == 4) return run<P, 2, T>(call, threads);
    // Eight rows fit L1 where they are short.
    if (W == 16 && call.m > 4 && call.m <= 8 && call.size <= 1024) return run<P, 8, T>(call, threads);
    return run<P, W == 16 ? 4 : 2, T>(call, threads);
}

}  // namespace OCTAVO_ISA

// size: a multiple of 32. x, weights, biases and y have one type; y_row is the sum of the matrices' n.
OCTAVO_EXPORT(linear)(const OCTAVO_ISA::Linear* call, int threads) {
    using namespace OCTAVO_ISA;
    if (call->type == TYPE_FLOAT32) return by_rows<Whole, float>(*call, threads);
    by_rows<Brain, bf16>(*call, threads);
}
