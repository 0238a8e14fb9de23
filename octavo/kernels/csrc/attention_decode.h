// Attention of one query: keys and values are read once, from where they lie, for all query heads of their head.
#pragma once

#include "attention.h"

namespace OCTAVO_ISA {

constexpr int64_t KEYS = 64;  // keys between two updates of the running softmax

// One query's state: G heads, value_dim rounded up to vectors.
struct Decode {
    int64_t shared, row, width, stride;  // heads; items of a query head; floats and rounded floats of a value
    const void* q;
    float *scores, *sums, *most, *total;  // [G, KEYS], [G, stride], [G], [G]
};

template <class P, int M, class T>
static void score(const Decode& state, int64_t g, const T* const* k, const T* const* v, int64_t count, int64_t size) {
    constexpr int N = W / M;
    const typename P::item* q = (const typename P::item*)state.q + g * state.row;
    for (int64_t j = 0; j < count; j += N) {
        const T* b[N];
        for (int i = 0; i < N; i++) {
            b[i] = k[min64(j + i, count - 1)];
            if (g == 0) prefetch(v[min64(j + i, count - 1)], state.width * sizeof(T));
        }
        float parts[W];
        store(parts, dots<P, M, T>(q, state.row, b, size));
        for (int i = 0; i < M; i++) memcpy(state.scores + (g + i) * KEYS + j, parts + i * N, N * sizeof(float));
    }
}

// Scores become weights; what was summed before is scaled to the new maximum.
static void weigh(const Attention& call, const Decode& state, int64_t g, int64_t count) {
    float* scores = state.scores + g * KEYS;
    vec most = splat(state.most[g]);
    for (int64_t j = 0; j < count; j += W) {
        vec x = capped(call, load(scores + j));
        if (j + W > count) {
            float parts[W];
            store(parts, x);
            for (int64_t i = count - j; i < W; i++) parts[i] = -__builtin_inff();
            x = load(parts);
        }
        store(scores + j, x);
        most = larger(x, most);
    }
    float now = largest(most), scale = exponential(splat(state.most[g] - now))[0];
    vec total = {};
    for (int64_t j = 0; j < count; j += W) {
        vec weight = exponential(load(scores + j) - now);
        store(scores + j, weight);
        total += weight;
    }
    state.total[g] = state.total[g] * scale + sum(total);
    state.most[g] = now;
    float* sums = state.sums + g * state.stride;
    for (int64_t d = 0; scale != 1 && d < state.stride; d += W) store(sums + d, load(sums + d) * scale);
}

template <int M, int V, class T>
static void mix(const Decode& state, int64_t g, int64_t d, const T* const* v, const T* const* next, int64_t count, int64_t bytes) {
    const float* weights = state.scores + g * KEYS;
    float* sums = state.sums + g * state.stride + d;
    vec acc[M][V];
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < V; j++) acc[i][j] = load(sums + i * state.stride + j * W);
    }
    for (int64_t t = 0; t < count; t++) {
        vec value[V];
        if (next) prefetch(next[t], bytes);
#pragma GCC unroll 16
        for (int j = 0; j < V; j++) value[j] = load(v[t] + d + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            vec weight = splat(weights[i * KEYS + t]);
#pragma GCC unroll 16
            for (int j = 0; j < V; j++) acc[i][j] += weight * value[j];
        }
    }
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < V; j++) store(sums + i * state.stride + j * W, acc[i][j]);
    }
}

// M query heads from g: scores, weights, sums of one batch of keys. next: keys of the batch to come.
template <class P, int M, class T>
static void heads_of(const Attention& call, const Decode& state, int64_t g, const T* const* k, const T* const* v,
                     const T* const* next, int64_t count, int64_t size) {
    score<P, M, T>(state, g, k, v, count, size);
    for (int i = 0; i < M; i++) weigh(call, state, g + i, count);
    int64_t d = 0, bytes = size * (int64_t)sizeof(T);
    const T* const* ahead = g == 0 ? next : nullptr;
    for (; d + 4 * W <= state.stride; d += 4 * W, ahead = nullptr) mix<M, 4, T>(state, g, d, v, ahead, count, bytes);
    for (; d + 2 * W <= state.stride; d += 2 * W, ahead = nullptr) mix<M, 2, T>(state, g, d, v, ahead, count, bytes);
    for (; d < state.stride; d += W, ahead = nullptr) mix<M, 1, T>(state, g, d, v, ahead, count, bytes);
}

template <class S>
static void widen(const S** rows, int64_t count, int64_t size, int64_t stride, float* to, const float** widened) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t d = 0; d < size; d++) to[i * stride + d] = to_float(rows[i][d]);
        for (int64_t d = size; d < stride; d++) to[i * stride + d] = 0;
        widened[i] = to + i * stride;
    }
}

static inline void pack_query(const Attention& call, const Job& job, int64_t shared, int64_t row, float* q) {
    for (int64_t g = 0; g < shared; g++) {
        for (int64_t d = 0; d < row; d++) {
            q[g * row + d] = d < call.dim ? query_at(call, job.token, job.head * shared + g, d) : 0;
        }
    }
}
static inline void pack_query(const Attention& call, const Job& job, int64_t shared, int64_t row, uint32_t* q) {
    for (int64_t g = 0; g < shared; g++) {
        for (int64_t d = 0; d < row; d++) {
            int64_t head = job.head * shared + g;
            q[g * row + d] = pair_of(query_at(call, job.token, head, 2 * d), query_at(call, job.token, head, 2 * d + 1));
        }
    }
}

// [G, stride] sums, then [G] maxima, then [G] totals.
static inline int64_t part_size(int64_t shared, int64_t stride) { return shared * (stride + 2); }

static void begin(const Attention& call, const Job& job, const Decode& state) {
    memset(state.sums, 0, state.shared * state.stride * sizeof(float));
    for (int64_t g = 0; g < state.shared; g++) {
        bool sink = call.sinks && job.low == 0;
        state.most[g] = sink ? call.sinks[job.head * state.shared + g] : LOWEST;
        state.total[g] = sink ? 1 : 0;
    }
}

static void finish(const Attention& call, const Job& job, const Decode& state) {
    for (int64_t g = 0; g < state.shared; g++) {
        float inverse = 1 / state.total[g];
        for (int64_t d = 0; d < call.value_dim; d++) {
            put_out(call, job.token, job.head * state.shared + g, d, state.sums[g * state.stride + d] * inverse);
        }
    }
}

// S: how entries are stored. T: how they are read; float, where S or a head's size do not suit vectors, after widening.
template <class P, class T, class S>
static void decode(const Attention& call, const Job& job, float* parts, bool wide) {
    int64_t shared = call.heads / call.kv_heads, step = W * P::elements;
    int64_t size = round_up(call.dim, step), stride = round_up(call.value_dim, W);
    float* sums = job.part < 0 ? (float*)octavo_scratch(SLOT_SUMS, part_size(shared, stride) * sizeof(float))
                               : parts + job.part * part_size(shared, stride);
    typename P::item* q = (typename P::item*)octavo_scratch(SLOT_QUERY, shared * size * sizeof(float));
    float* scores = (float*)octavo_scratch(SLOT_SCORES, shared * KEYS * sizeof(float));
    Decode state = {shared, size / P::elements, call.value_dim, stride, q, scores, sums, sums + shared * stride,
                    sums + shared * (stride + 1)};
    pack_query(call, job, shared, state.row, q);
    begin(call, job, state);
    Span span = span_of(*call.reads, job.request, job.token, 1);
    const S *found[2][2][KEYS];  // keys and values, of this batch and of the next
    const float* widened[2][KEYS];
    find<S>(call, job, span, job.low, min64(KEYS, job.high - job.low), found[0][0], found[0][1], nullptr);
    for (int64_t low = job.low, turn = 0; low < job.high; low += KEYS, turn ^= 1) {
        int64_t count = min64(KEYS, job.high - low), more = min64(KEYS, job.high - low - count);
        const S **k = found[turn][0], **v = found[turn][1], **next = found[turn ^ 1][0];
        if (more > 0) find<S>(call, job, span, low + count, more, next, found[turn ^ 1][1], nullptr);
        for (int64_t i = max64(more, 0); i < count; i++) next[i] = k[i];
        const T *const *keys = (const T* const*)k, *const *values = (const T* const*)v;
        const T* const* ahead = (const T* const*)next;
        if (wide) {
            float* memory = (float*)octavo_scratch(SLOT_KEYS, KEYS * (size + stride) * sizeof(float));
            widen(k, count, call.dim, size, memory, widened[0]);
            widen(v, count, call.value_dim, stride, memory + KEYS * size, widened[1]);
            keys = (const T* const*)widened[0], values = (const T* const*)widened[1], ahead = nullptr;
        }
        int64_t g = 0;
        for (; W == 16 && g + 4 <= shared; g += 4) heads_of<P, W == 16 ? 4 : 2, T>(call, state, g, keys, values, ahead, count, size);
        for (; g + 2 <= shared; g += 2) heads_of<P, 2, T>(call, state, g, keys, values, ahead, count, size);
        for (; g < shared; g++) heads_of<P, 1, T>(call, state, g, keys, values, ahead, count, size);
    }
    if (job.part < 0) finish(call, job, state);
}

// Parts [first, first + count) of one query, into the first of them, and out.
static void merge(const Attention& call, const Job& job, float* parts, int64_t count) {
    int64_t shared = call.heads / call.kv_heads, stride = round_up(call.value_dim, W), size = part_size(shared, stride);
    float* first = parts + job.part * size;
    for (int64_t g = 0; g < shared; g++) {
        float* most = first + shared * stride + g;
        float* total = most + shared;
        float all = *most;
        for (int64_t i = 1; i < count; i++) all = most[i * size] > all ? most[i * size] : all;
        for (int64_t i = 0; i < count; i++) {
            float scale = exponential(splat(most[i * size] - all))[0];
            *total = (i ? *total : 0) + total[i * size] * scale;
            for (int64_t d = 0; d < stride; d += W) {
                float* sums = first + g * stride + d;
                store(sums, (i ? load(sums) : vec{}) + load(sums + i * size) * scale);
            }
        }
    }
    Decode state = {shared, 0, call.value_dim, stride, nullptr, nullptr, first, first + shared * stride,
                    first + shared * (stride + 1)};
    finish(call, job, state);
}

}  // namespace OCTAVO_ISA
