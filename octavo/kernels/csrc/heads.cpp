// Products of a few rows with a matrix per head, at the speed at which memory gives the matrices.
//
// reference: octavo/ops/oracles/products.py, project_heads.

#include "simd.h"

namespace OCTAVO_ISA {

struct ByHead {
    const void* x;       // [n, heads, inner]
    const void* weight;  // [heads, inner, outer], or [heads, outer, inner] where flipped
    void* out;           // [n, heads, outer], contiguous
    int64_t count, heads, inner, outer, x_token, x_head, weight_head;  // the last three in elements
    int32_t type, flipped;
};

constexpr int ROWS = 4;  // rows of a matrix that are added together

// sums[token] += x[token] @ weight for tokens [0, count).
template <class T>
static void add_rows(const float* x, const T* weight, float* sums, int64_t count, int64_t inner, int64_t outer) {
    for (int64_t k = 0; k < inner; k += ROWS) {
        for (int64_t token = 0; token < count; token++) {
            const float* left = x + token * inner + k;
            float* to = sums + token * outer;
            for (int64_t i = 0; i < outer; i += W) {
                vec total = load(to + i);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) total += splat(left[r]) * load(weight + (k + r) * outer + i);
                store(to + i, total);
            }
        }
    }
}

// sums[token] = x[token] @ weight^T for M tokens.
template <int M, class T>
static void dot_rows(const float* x, const T* weight, float* sums, int64_t inner, int64_t outer) {
    constexpr int N = W / M;
    for (int64_t i = 0; i < outer; i += N) {
        const T* rows[N];
        for (int j = 0; j < N; j++) rows[j] = weight + (i + j) * inner;
        alignas(64) float parts[W];
        store(parts, dots<Floats, M, T>(x, inner, rows, inner));
        for (int m = 0; m < M; m++) memcpy(sums + m * outer + i, parts + m * N, N * sizeof(float));
    }
}

template <class T>
static void head_of(const ByHead& call, int64_t head) {
    const T *from = (const T*)call.x + head * call.x_head, *weight = (const T*)call.weight + head * call.weight_head;
    T* to = (T*)call.out + head * call.outer;
    float* x = (float*)octavo_scratch(SLOT_QUERY, call.count * call.inner * sizeof(float));
    float* sums = (float*)octavo_scratch(SLOT_SUMS, call.count * call.outer * sizeof(float));
    for (int64_t token = 0; token < call.count; token++) {
        for (int64_t i = 0; i < call.inner; i += W) store(x + token * call.inner + i, load(from + token * call.x_token + i));
    }
    if (!call.flipped) {
        memset(sums, 0, call.count * call.outer * sizeof(float));
        add_rows<T>(x, weight, sums, call.count, call.inner, call.outer);
    } else {
        int64_t token = 0;
        for (; token + 4 <= call.count; token += 4) {
            dot_rows<4, T>(x + token * call.inner, weight, sums + token * call.outer, call.inner, call.outer);
        }
        for (; token < call.count; token++) {
            dot_rows<1, T>(x + token * call.inner, weight, sums + token * call.outer, call.inner, call.outer);
        }
    }
    for (int64_t token = 0; token < call.count; token++) {
        T* row = to + token * call.heads * call.outer;
        for (int64_t i = 0; i < call.outer; i += W) store(row + i, load(sums + token * call.outer + i));
    }
}

static void run(void* context, int64_t head) {
    const ByHead& call = *(const ByHead*)context;
    if (call.type == TYPE_BFLOAT16) return head_of<bf16>(call, head);
    head_of<float>(call, head);
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(by_head)(const OCTAVO_ISA::ByHead* call, int threads) {
    octavo_parallel(threads, call->heads, OCTAVO_ISA::run, (void*)call);
}
