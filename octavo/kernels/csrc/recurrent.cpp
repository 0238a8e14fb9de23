// Single steps of recurrent states, one pass over each state: it is read once and written once.
//
// A state is a matrix per head. Requests' states lie anywhere, so a step may go from page to page, or stay where it is.
// reference: octavo/ops/oracles/recurrent.py.

#include "simd.h"

namespace OCTAVO_ISA {

constexpr int COLUMNS = 4;  // vectors of a state's row that are taken together

// S of head h of request i, contiguous: state[i] + h * state_head, zeros where state[i] is null; and so with `after`.
struct Step {
    const float *q, *k, *v, *decay, *beta;  // [n, key_heads, keys] twice, [n, heads, values], [n, heads(, keys)], [n, heads]
    float* out;                             // [n, heads, values]
    const float* const* state;
    float* const* after;
    int64_t state_head, after_head;  // elements
    int64_t count, heads, key_heads, keys, values;
    int64_t decay_keys;  // 1: one log decay per head; keys: one for each key
};

// A head's state and where it goes. What there is not yet becomes zeros where it goes.
struct Move {
    const float* from;
    float* to;
};

static inline Move move_of(const Step& call, int64_t request, int64_t head) {
    float* to = call.after[request] + head * call.after_head;
    if (call.state[request]) return {call.state[request] + head * call.state_head, to};
    memset(to, 0, call.keys * call.values * sizeof(float));
    return {to, to};
}

static inline float sum_of(const float* a, const float* b, int64_t count) {
    float total = 0;
    for (int64_t i = 0; i < count; i++) total += a[i] * b[i];
    return total;
}

// S [values, keys]: S = exp(decay) S + v k^T, out = S q.
static void decayed(void* context, int64_t item) {
    const Step& call = *(const Step*)context;
    int64_t request = item / call.heads, head = item % call.heads, keys = call.keys;
    int64_t key_at = (request * call.key_heads + head * call.key_heads / call.heads) * keys;
    const float *q = call.q + key_at, *k = call.k + key_at, *v = call.v + item * call.values;
    Move move = move_of(call, request, head);
    const float* from = move.from;
    float* to = move.to;
    float decay = exponential(splat(call.decay[item]))[0], *out = call.out + item * call.values;
    int64_t whole = keys / W * W, p = 0;
    for (; p < call.values; p++, from += keys, to += keys) {
        vec total = {}, push = splat(v[p]);
        for (int64_t i = 0; i < whole; i += W) {
            vec now = load(from + i) * decay + push * load(k + i);
            store(to + i, now);
            total += now * load(q + i);
        }
        for (int64_t i = whole; i < keys; i++) to[i] = from[i] * decay + v[p] * k[i];
        out[p] = sum(total) + sum_of(to + whole, q + whole, keys - whole);
    }
}

// What a head's keys do: decays, keys and queries of its rows, and the strength of its correction.
struct Rule {
    const float *kept, *k, *q;
    float beta;
    int64_t keys, values;
};

// Columns [0, N * W) of a state that begins at `from`; S is read from memory once, and from the caches once more.
template <int N>
static inline void correct(const Rule& rule, const float* from, float* to, const float* v, float* out) {
    vec seen[N] = {}, total[N] = {};
    for (int64_t d = 0; d < rule.keys; d++) {
        vec weight = splat(rule.kept[d] * rule.k[d]);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) seen[j] += weight * load(from + d * rule.values + j * W);
    }
    for (int j = 0; j < N; j++) seen[j] = (load(v + j * W) - seen[j]) * rule.beta;
    for (int64_t d = 0; d < rule.keys; d++) {
        vec kept = splat(rule.kept[d]), key = splat(rule.k[d]), query = splat(rule.q[d]);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            vec now = load(from + d * rule.values + j * W) * kept + key * seen[j];
            store(to + d * rule.values + j * W, now);
            total[j] += now * query;
        }
    }
    for (int j = 0; j < N; j++) store(out + j * W, total[j]);
}

static inline void correct_one(const Rule& rule, const float* from, float* to, const float* v, float* out) {
    float seen = 0, total = 0;
    for (int64_t d = 0; d < rule.keys; d++) seen += rule.kept[d] * rule.k[d] * from[d * rule.values];
    float change = (*v - seen) * rule.beta;
    for (int64_t d = 0; d < rule.keys; d++) {
        float now = from[d * rule.values] * rule.kept[d] + rule.k[d] * change;
        to[d * rule.values] = now;
        total += now * rule.q[d];
    }
    *out = total;
}

// S [keys, values]: S = exp(decay) S; S += k (beta (v - S^T k))^T; out = S^T q.
static void delta(void* context, int64_t item) {
    const Step& call = *(const Step*)context;
    int64_t request = item / call.heads, head = item % call.heads, keys = call.keys, values = call.values;
    int64_t key_at = (request * call.key_heads + head * call.key_heads / call.heads) * keys;
    float* kept = (float*)octavo_scratch(SLOT_QUERY, round_up(keys, W) * sizeof(float));
    for (int64_t d = 0; d < keys; d += W) {
        alignas(64) float logs[W];
        for (int i = 0; i < W; i++) logs[i] = call.decay[call.decay_keys == 1 ? item : item * keys + min64(d + i, keys - 1)];
        store(kept + d, exponential(load(logs)));
    }
    Rule rule = {kept, call.k + key_at, call.q + key_at, call.beta[item], keys, values};
    Move move = move_of(call, request, head);
    const float* from = move.from;
    float* to = move.to;
    const float* v = call.v + item * values;
    float* out = call.out + item * values;
    int64_t c = 0;
    for (; c + COLUMNS * W <= values; c += COLUMNS * W) correct<COLUMNS>(rule, from + c, to + c, v + c, out + c);
    for (; c + W <= values; c += W) correct<1>(rule, from + c, to + c, v + c, out + c);
    for (; c < values; c++) correct_one(rule, from + c, to + c, v + c, out + c);
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(decayed_step)(const OCTAVO_ISA::Step* call, int threads) {
    octavo_parallel(threads, call->count * call->heads, OCTAVO_ISA::decayed, (void*)call);
}

OCTAVO_EXPORT(delta_step)(const OCTAVO_ISA::Step* call, int threads) {
    octavo_parallel(threads, call->count * call->heads, OCTAVO_ISA::delta, (void*)call);
}
