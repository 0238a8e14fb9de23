// Attention of one query: keys and values are read once, from where they lie, for all query heads of their head.
#pragma once

#include "attention.h"

namespace OCTAVO_ISA {

// Keys between two updates of the running softmax. As many are on their way to the cache while others are read.
constexpr int64_t KEYS = 32;
constexpr int64_t UNIT = 2 * W;  // elements read at once

// One query's state: G heads, value_dim rounded up to vectors. Queries and sums lie in the order in which entries are read.
struct Decode {
    int64_t shared, row, stride;  // heads; items of a query head; rounded floats of a value
    const void* q;
    float *scores, *sums, *most, *total;  // [G, KEYS], [G, stride], [G], [G, W]: of a sum, each lane's share
};

// UNIT elements as two vectors. Those of bfloat16 are the even and the odd elements: a shift and a mask, where widening them
// in order takes shuffles, of which there are fewer in a cycle.
static inline void read_unit(const float* from, vec* a, vec* b) { *a = load(from), *b = load(from + W); }
static inline void read_unit(const bf16* from, vec* a, vec* b) {
    uvec x;
    memcpy(&x, from, sizeof x);
    *a = (vec)(x << 16), *b = (vec)(x & 0xffff0000u);
}

// Where element d of `size` lies when it is read so; what is behind the last whole unit is read in order.
static inline int64_t place_of(const float*, int64_t d, int64_t) { return d; }
static inline int64_t place_of(const bf16*, int64_t d, int64_t size) {
    return d < size / UNIT * UNIT ? d / UNIT * UNIT + (d & 1) * W + d % UNIT / 2 : d;
}

// Lines are asked for one by one, as others are used: many at once would wait for each other.
template <class T>
static inline void prefetch_unit(const T* from) {
    constexpr int64_t BYTES = UNIT * sizeof(T);
    if (BYTES >= 64 || ((uintptr_t)from & 63) < (uintptr_t)BYTES) prefetch(from, BYTES);
}

// acc[i * N + j] += elements [k, k + UNIT) of query head i times those of key j.
template <int M, class T>
static inline void multiply(vec* acc, const float* q, int64_t row, const T* const* b, const T* const* ahead, int64_t k) {
    constexpr int N = W / M;
    vec low[M], high[M];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) read_unit(q + i * row + k, &low[i], &high[i]);
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
        vec x, y;
        read_unit(b[j] + k, &x, &y);
        prefetch_unit(ahead[j] + k);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) acc[i * N + j] += low[i] * x;
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) acc[i * N + j] += high[i] * y;
    }
}
#if defined(OCTAVO_PAIRS)
template <int M, class T>
static inline void multiply(vec* acc, const uint32_t* q, int64_t row, const T* const* b, const T* const* ahead, int64_t k) {
    constexpr int N = W / M;
    uvec left[M];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) left[i] = Pairs::get(q + i * row + k / 2);
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
        uvec x = Pairs::get(b[j] + k);
        prefetch_unit(ahead[j] + k);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) acc[i * N + j] = pairs(acc[i * N + j], left[i], x);
    }
}
#endif

template <class P, int M, class T>
static void score(const Decode& state, int64_t g, const T* const* k, const T* const* v, int64_t count, int64_t size) {
    constexpr int N = W / M;
    const typename P::item* q = (const typename P::item*)state.q + g * state.row;
    for (int64_t j = 0; j < count; j += N) {
        const T *b[N], *ahead[N];
        for (int i = 0; i < N; i++) b[i] = k[min64(j + i, count - 1)], ahead[i] = v[min64(j + i, count - 1)];
        vec acc[W] = {};
        int64_t d = 0;
        for (; d + UNIT <= size; d += UNIT) multiply<M, T>(acc, q, state.row, b, ahead, d);
        if (P::elements == 1 && d < size) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) acc[i] += load((const float*)q + i / N * state.row + d) * load(b[i % N] + d);
        }
        float parts[W];
        store(parts, sums(acc));
        for (int i = 0; i < M; i++) memcpy(state.scores + (g + i) * KEYS + j, parts + i * N, N * sizeof(float));
    }
}

template <int... I>
static inline ivec numbers(Lanes<I...>) {
    return ivec{I...};
}

// Scores become weights; what was summed before is scaled to the new maximum.
static void weigh(const Attention& call, const Decode& state, int64_t g, int64_t count) {
    float* scores = state.scores + g * KEYS;
    vec most = splat(state.most[g]);
    for (int64_t j = 0; j < count; j += W) {
        vec x = capped(call, load(scores + j));
        if (j + W > count) x = numbers(Count<W>::type()) < (int32_t)(count - j) ? x : splat(-__builtin_inff());
        store(scores + j, x);
        most = larger(x, most);
    }
    float now = largest(most);
    vec scale = exponential(splat(state.most[g] - now)), total = load(state.total + g * W) * scale;
    for (int64_t j = 0; j < count; j += W) {
        vec weight = exponential(load(scores + j) - now);
        store(scores + j, weight);
        total += weight;
    }
    store(state.total + g * W, total);
    state.most[g] = now;
    float* sums = state.sums + g * state.stride;
    for (int64_t d = 0; scale[0] != 1 && d < state.stride; d += W) store(sums + d, load(sums + d) * scale);
}

// Adds U units of values from d on, times weights, to the sums of M heads.
template <int M, int U, class T>
static inline void mix(const Decode& state, int64_t g, int64_t d, const T* const* v, const T* const* next, int64_t count) {
    const float* weights = state.scores + g * KEYS;
    float* sums = state.sums + g * state.stride + d;
    vec acc[M][2 * U];
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < 2 * U; j++) acc[i][j] = load(sums + i * state.stride + j * W);
    }
    for (int64_t t = 0; t < count; t++) {
        vec value[2 * U];
#pragma GCC unroll 16
        for (int j = 0; j < U; j++) read_unit(v[t] + d + j * UNIT, &value[2 * j], &value[2 * j + 1]);
#pragma GCC unroll 16
        for (int j = 0; j < U; j++) prefetch_unit(next[t] + d + j * UNIT);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            vec weight = splat(weights[i * KEYS + t]);
#pragma GCC unroll 16
            for (int j = 0; j < 2 * U; j++) acc[i][j] += weight * value[j];
        }
    }
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < 2 * U; j++) store(sums + i * state.stride + j * W, acc[i][j]);
    }
}

// The same of the W elements that are left behind whole units.
template <int M, class T>
static inline void mix_rest(const Decode& state, int64_t g, int64_t d, const T* const* v, int64_t count) {
    for (int i = 0; i < M; i++) {
        float* sums = state.sums + (g + i) * state.stride + d;
        vec acc = load(sums);
        for (int64_t t = 0; t < count; t++) acc += state.scores[(g + i) * KEYS + t] * load(v[t] + d);
        store(sums, acc);
    }
}

// M query heads from g: scores, weights, sums of one batch of keys. next: keys of the batch to come.
template <class P, int M, class T>
static void heads_of(const Attention& call, const Decode& state, int64_t g, const T* const* k, const T* const* v,
                     const T* const* next, int64_t count, int64_t size) {
    constexpr int U = W == 16 ? 2 : 1;
    score<P, M, T>(state, g, k, v, count, size);
    for (int i = 0; i < M; i++) weigh(call, state, g + i, count);
    int64_t d = 0;
    for (; d + U * UNIT <= state.stride; d += U * UNIT) mix<M, U, T>(state, g, d, v, next, count);
    for (; d + UNIT <= state.stride; d += UNIT) mix<M, 1, T>(state, g, d, v, next, count);
    if (d < state.stride) mix_rest<M, T>(state, g, d, v, count);
}

template <class S>
static void widen(const S** rows, int64_t count, int64_t size, int64_t stride, float* to, const float** widened) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t d = 0; d < size; d++) to[i * stride + d] = to_float(rows[i][d]);
        for (int64_t d = size; d < stride; d++) to[i * stride + d] = 0;
        widened[i] = to + i * stride;
    }
}

template <class T>
static void pack_query(const Attention& call, const Job& job, int64_t shared, int64_t size, float* q) {
    memset(q, 0, shared * size * sizeof(float));
    for (int64_t g = 0; g < shared; g++) {
        for (int64_t d = 0; d < call.dim; d++) {
            q[g * size + place_of((const T*)nullptr, d, size)] = query_at(call, job.token, job.head * shared + g, d);
        }
    }
}
template <class T>
static void pack_query(const Attention& call, const Job& job, int64_t shared, int64_t size, uint32_t* q) {
    for (int64_t g = 0; g < shared; g++) {
        const bf16* from = (const bf16*)call.q + job.token * call.q_token + (job.head * shared + g) * call.q_head;
        memcpy(q + g * size / 2, from, size * sizeof(bf16));
    }
}

// [G, stride] sums, then [G, W] totals, then [G] maxima.
static inline int64_t part_size(int64_t shared, int64_t stride) { return shared * (stride + W + 1); }

static Decode state_of(const Attention& call, float* sums) {
    Decode state = {};
    state.shared = call.heads / call.kv_heads, state.stride = round_up(call.value_dim, W), state.sums = sums;
    state.total = sums + state.shared * state.stride, state.most = state.total + state.shared * W;
    return state;
}

static void begin(const Attention& call, const Job& job, const Decode& state) {
    memset(state.sums, 0, state.shared * (state.stride + W) * sizeof(float));
    for (int64_t g = 0; g < state.shared; g++) {
        bool sink = call.sinks && job.low == 0;
        state.most[g] = sink ? call.sinks[job.head * state.shared + g] : LOWEST;
        state.total[g * W] = sink ? 1 : 0;
    }
}

// UNIT elements of an output, as read_unit<T> takes them.
template <class T>
static inline void put_unit(const T*, float* to, vec a, vec b) {
    float parts[UNIT];
    store(parts, a), store(parts + W, b);
    for (int64_t d = 0; d < UNIT; d++) to[d] = parts[place_of((const T*)nullptr, d, UNIT)];
}
template <class T>
static inline void put_unit(const T*, bf16* to, vec a, vec b) {
    float parts[UNIT];
    put_unit((const T*)nullptr, parts, a, b);
    store(to, load(parts)), store(to + W, load(parts + W));
}
static inline void put_unit(const bf16*, bf16* to, vec a, vec b) {
    uvec both = rounded(a) | rounded(b) << 16;
    memcpy(to, &both, sizeof both);
}

template <class T, class Q>
static void put_all(const Attention& call, const Job& job, const Decode& state) {
    for (int64_t g = 0; g < state.shared; g++) {
        float inverse = 1 / sum(load(state.total + g * W));
        const float* sums = state.sums + g * state.stride;
        Q* to = (Q*)call.out + (job.token * call.heads + job.head * state.shared + g) * call.value_dim;
        int64_t d = 0;
        for (; d + UNIT <= call.value_dim; d += UNIT) {
            put_unit((const T*)nullptr, to + d, load(sums + d) * inverse, load(sums + d + W) * inverse);
        }
        for (; d < call.value_dim; d++) from_float(to + d, sums[d] * inverse);
    }
}
template <class T>
static void finish(const Attention& call, const Job& job, const Decode& state) {
    call.q_type == TYPE_BFLOAT16 ? put_all<T, bf16>(call, job, state) : put_all<T, float>(call, job, state);
}

// S: how entries are stored. T: how they are read; float, where S or a head's size do not suit vectors, after widening.
template <class P, class T, class S>
static void decode(const Attention& call, const Job& job, float* parts, bool wide) {
    int64_t shared = call.heads / call.kv_heads, size = round_up(call.dim, W), stride = round_up(call.value_dim, W);
    int64_t bytes = part_size(shared, stride) * sizeof(float);
    Decode state = state_of(call, job.part < 0 ? (float*)octavo_scratch(SLOT_SUMS, bytes) : parts + job.part * bytes / 4);
    typename P::item* q = (typename P::item*)octavo_scratch(SLOT_QUERY, shared * size * sizeof(float));
    state.scores = (float*)octavo_scratch(SLOT_SCORES, shared * KEYS * sizeof(float));
    state.q = q, state.row = size / P::elements;
    pack_query<T>(call, job, shared, size, q);
    begin(call, job, state);
    Span span = span_of(*call.reads, job.token, 1);
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
            keys = ahead = (const T* const*)widened[0], values = (const T* const*)widened[1];
        }
        int64_t g = 0;
        constexpr int M = W == 16 ? 4 : 2;
        for (; g + M <= shared; g += M) heads_of<P, M, T>(call, state, g, keys, values, ahead, count, size);
        for (; g + 2 <= shared; g += 2) heads_of<P, 2, T>(call, state, g, keys, values, ahead, count, size);
        for (; g < shared; g++) heads_of<P, 1, T>(call, state, g, keys, values, ahead, count, size);
    }
    if (job.part < 0) finish<T>(call, job, state);
}

// Parts [first, first + count) of one query, into the first of them, and out.
template <class T>
static void merge(const Attention& call, const Job& job, float* parts, int64_t count) {
    int64_t size = part_size(call.heads / call.kv_heads, round_up(call.value_dim, W));
    Decode state = state_of(call, parts + job.part * size);
    for (int64_t g = 0; g < state.shared; g++) {
        float *most = state.most + g, all = *most;
        for (int64_t i = 1; i < count; i++) all = most[i * size] > all ? most[i * size] : all;
        for (int64_t i = 0; i < count; i++) {
            vec scale = exponential(splat(most[i * size] - all));
            float *sums = state.sums + g * state.stride, *total = state.total + g * W;
            store(total, (i ? load(total) : vec{}) + load(total + i * size) * scale);
            for (int64_t d = 0; d < state.stride; d += W) {
                store(sums + d, (i ? load(sums + d) : vec{}) + load(sums + i * size + d) * scale);
            }
        }
    }
    finish<T>(call, job, state);
}

}  // namespace OCTAVO_ISA
