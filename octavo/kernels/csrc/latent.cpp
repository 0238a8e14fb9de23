// Attention of single tokens over entries that all heads share and that are key and value at once: chosen ones, the first so
// many, and a window of rows beside the pages, in one softmax with a sink.
//
// The first `value_dim` elements of an entry are its value. Entries are decoded once for all heads, so what is read does not
// grow with heads, and chosen entries are all that is read.
// reference: octavo/ops/oracles/attention.py.

#include "entries.h"

namespace OCTAVO_ISA {

constexpr float LOWEST = -1e30f;  // a maximum that no score has raised yet; finite, so that differences are numbers
constexpr int64_t PANEL = 60;     // entries between two updates of the running softmax; a multiple of GROUP
constexpr int64_t DEPTH = 96;     // elements of queries that stay in the nearest cache during products

struct Latent {
    const void* q;            // [n, heads, dim]
    const float* sinks;       // [heads] or null
    void* out;                // [n, heads, value_dim], of q's type
    const int64_t* table;     // [n] row of the table
    const int64_t* visible;   // [n] entries read, of `chosen`, or the first so many; null: none are
    const int64_t* chosen;    // [n, chosen_row] their numbers, or null
    const void* near;         // [rows, dim], float32 or bfloat16, or null
    const int64_t* near_low;  // [n, 2] first row of two runs
    const int64_t* near_count;
    Paged entries;
    int64_t count, heads, dim, value_dim, chosen_row, near_row;
    float scale;
    int32_t q_type, near_type;
};

// Places [low, high) of what a token reads: its window's two runs, then its entries. part -1: that is all there is.
struct Job {
    int64_t token, low, high, part;
};

struct Work {
    Latent call;
    Job* jobs;
    float* parts;
    int64_t count, part_count;
};

// One token's state. Heads in lanes: q [dim, padded], scores [PANEL, padded], most, total, factor [padded].
struct State {
    int64_t heads, padded, width, row, stride;  // width: floats of an entry; row: of one in the panel; stride: of sums
    float *q, *panel, *scores, *sums, *most, *total, *factor;
    const char **ahead, **last;  // lines of the next panel that nobody has asked for yet
};

static inline int64_t total_of(const Latent& call, int64_t token) {
    int64_t near = call.near ? call.near_count[2 * token] + call.near_count[2 * token + 1] : 0;
    return near + (call.visible ? call.visible[token] : 0);
}

static inline int64_t part_size(int64_t heads, int64_t stride) { return heads * stride + 2 * round_up(heads, W); }

// Where places of a token lie: in a row of `near` (number below 0: row is -1 - number), or entry `number` of the pages.
static inline int64_t number_at(const Latent& call, int64_t token, int64_t place) {
    for (int run = 0; call.near && run < 2; run++) {
        int64_t count = call.near_count[2 * token + run];
        if (place < count) return -1 - (call.near_low[2 * token + run] + place);
        place -= count;
    }
    return call.chosen ? call.chosen[token * call.chosen_row + place] : place;
}

static inline void fill(const Latent& call, int64_t token, int64_t place, float* to) {
    int64_t number = number_at(call, token, place);
    if (number >= 0) return decode_entry(call.entries, call.table[token], number, to);
    int64_t at = (-1 - number) * call.near_row;
    if (call.near_type == TYPE_BFLOAT16) return decode_plain((const bf16*)call.near + at, call.dim, to);
    decode_plain((const float*)call.near + at, call.dim, to);
}

// Lists the lines of entries [low, high). Chosen entries lie anywhere, so nothing but this list says what is read next.
static void list_ahead(const Latent& call, int64_t token, int64_t low, int64_t high, State* state) {
    int64_t lines = 0;
    for (int64_t i = 0; i < call.entries.count; i++) lines += call.entries.parts[i].entry / LINE + 3;
    const char** to = (const char**)octavo_scratch(SLOT_ROWS, (PANEL * lines + 1) * sizeof(char*));
    state->ahead = to;
    for (int64_t place = low; place < high; place++) {
        int64_t number = number_at(call, token, place);
        if (number >= 0) to = lines_of(call.entries, call.table[token], number, to);
    }
    state->last = to;
}

// Asks for one line, which memory brings while others are computed with; many at once would wait for each other.
static inline void one_ahead(const char**& from, const char** last) {
    if (from < last) __builtin_prefetch(*from++, 0, 2);
}
static inline void rest_ahead(State* state) {
    while (state->ahead < state->last) one_ahead(state->ahead, state->last);
}

template <int M, int V>
static inline void score(State& state, int64_t t, int64_t h, int64_t low, int64_t high) {
    constexpr int64_t STEP = 4;  // elements between two lines asked for
    const char **ahead = state.ahead, **last = state.last;
    vec acc[M][V];
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) acc[m][v] = low ? load(state.scores + (t + m) * state.padded + h + v * W) : vec{};
    }
    for (int64_t d = low; d < high; d += STEP) {
        one_ahead(ahead, last);
        multiply<M, V>(acc, state.panel + t * state.row, state.row, state.q + h, state.padded, d, min64(high, d + STEP));
    }
    state.ahead = ahead;
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) store(state.scores + (t + m) * state.padded + h + v * W, acc[m][v]);
    }
}

template <int V>
static inline void score_lanes(State& state, int64_t count, int64_t h, int64_t low, int64_t high) {
    constexpr int MANY = V == 1 ? 2 * GROUP : GROUP;  // as many sums as it takes to wait for none
    int64_t t = 0;
    for (; t + MANY <= count; t += MANY) score<MANY, V>(state, t, h, low, high);
    for (; t + 2 <= count; t += 2) score<2, V>(state, t, h, low, high);
    for (; t < count; t++) score<1, V>(state, t, h, low, high);
}

static void score_all(State& state, int64_t count) {
    for (int64_t low = 0; low < state.width; low += DEPTH) {
        int64_t high = min64(state.width, low + DEPTH), h = 0;
        for (; h + VECTORS * W <= state.padded; h += VECTORS * W) score_lanes<VECTORS>(state, count, h, low, high);
        for (; VECTORS > 2 && h + 2 * W <= state.padded; h += 2 * W) score_lanes<2>(state, count, h, low, high);
        for (; h < state.padded; h += W) score_lanes<1>(state, count, h, low, high);
    }
}

// Scores become weights; what was summed before is scaled to the new maximum.
static void weigh(const Latent& call, const State& state, int64_t count) {
    for (int64_t h = 0; h < state.padded; h += W) {
        vec before = load(state.most + h), most = before, total = {};
        float* scores = state.scores + h;
        for (int64_t t = 0; t < count; t++) {
            vec x = load(scores + t * state.padded) * call.scale;
            store(scores + t * state.padded, x);
            most = larger(x, most);
        }
        for (int64_t t = 0; t < count; t++) {
            vec weight = exponential(load(scores + t * state.padded) - most);
            store(scores + t * state.padded, weight);
            total += weight;
        }
        vec factor = exponential(before - most);
        store(state.factor + h, factor);
        store(state.total + h, load(state.total + h) * factor + total);
        store(state.most + h, most);
    }
    for (int64_t h = 0; h < state.heads; h++) {
        float* sums = state.sums + h * state.stride;
        float factor = state.factor[h];
        for (int64_t d = 0; factor != 1 && d < state.stride; d += W) store(sums + d, load(sums + d) * factor);
    }
}

// Values of the panel at d, times weights, to the sums of M heads from h on.
template <int M, int V>
static inline void mix(State& state, int64_t h, int64_t d, int64_t count) {
    const char **ahead = state.ahead, **last = state.last;
    float* sums = state.sums + h * state.stride + d;
    vec acc[M][V];
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) acc[m][v] = load(sums + m * state.stride + v * W);
    }
    for (int64_t t = 0; t < count; t++) {
        vec value[V];
        one_ahead(ahead, last);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) value[v] = load(state.panel + t * state.row + d + v * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            vec weight = splat(state.scores[t * state.padded + h + m]);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) acc[m][v] += weight * value[v];
        }
    }
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) store(sums + m * state.stride + v * W, acc[m][v]);
    }
    state.ahead = ahead;
}

template <int V>
static inline void mix_heads(State& state, int64_t d, int64_t count) {
    int64_t h = 0;
    for (; h + GROUP <= state.heads; h += GROUP) mix<GROUP, V>(state, h, d, count);
    for (; h + 4 <= state.heads; h += 4) mix<4, V>(state, h, d, count);
    for (; h + 2 <= state.heads; h += 2) mix<2, V>(state, h, d, count);
    for (; h < state.heads; h++) mix<1, V>(state, h, d, count);
}

// A few columns for all heads at a time, so that they stay in the nearest cache.
static void mix_all(State& state, int64_t count) {
    int64_t d = 0;
    for (; d + VECTORS * W <= state.stride; d += VECTORS * W) mix_heads<VECTORS>(state, d, count);
    for (; VECTORS > 2 && d + 2 * W <= state.stride; d += 2 * W) mix_heads<2>(state, d, count);
    for (; d < state.stride; d += W) mix_heads<1>(state, d, count);
}

static void put(const Latent& call, int64_t token, const State& state) {
    for (int64_t h = 0; h < state.heads; h++) {
        float inverse = 1 / state.total[h];
        const float* sums = state.sums + h * state.stride;
        int64_t at = (token * call.heads + h) * call.value_dim;
        for (int64_t d = 0; d < call.value_dim; d++) {
            if (call.q_type == TYPE_BFLOAT16) {
                from_float((bf16*)call.out + at + d, sums[d] * inverse);
            } else {
                ((float*)call.out)[at + d] = sums[d] * inverse;
            }
        }
    }
}

static void use_sums(State* state, float* sums) {
    state->sums = sums, state->most = sums + state->heads * state->stride, state->total = state->most + state->padded;
}

static State state_of(const Latent& call) {
    State state = {};
    state.heads = call.heads, state.padded = round_up(call.heads, W), state.stride = round_up(call.value_dim, W);
    state.width = call.dim, state.row = round_up(call.dim, W) + 2 * W;
    return state;
}

static void begin(const Latent& call, const Job& job, float* parts, State* state) {
    int64_t size = part_size(state->heads, state->stride), padded = state->padded;
    int64_t element = call.q_type == TYPE_BFLOAT16 ? 2 : 4;
    use_sums(state, job.part < 0 ? (float*)octavo_scratch(SLOT_SUMS, size * sizeof(float)) : parts + job.part * size);
    memset(state->sums, 0, size * sizeof(float));
    for (int64_t h = 0; h < padded; h++) {
        bool sink = call.sinks && job.low == 0 && h < call.heads;
        state->most[h] = sink ? call.sinks[h] : LOWEST;
        state->total[h] = sink ? 1 : 0;
    }
    state->q = (float*)octavo_scratch(SLOT_QUERY, (state->width + 1) * padded * sizeof(float));
    state->factor = state->q + state->width * padded;
    state->scores = (float*)octavo_scratch(SLOT_SCORES, PANEL * padded * sizeof(float));
    // What is read behind the last value's end is rubbish that goes nowhere, and may be behind the last entry's.
    state->panel = (float*)octavo_scratch(SLOT_KEYS, (PANEL * state->row + VECTORS * W) * sizeof(float));
    Heads q = {(const char*)call.q + job.token * call.heads * call.dim * element, call.dim, call.heads, call.dim, call.q_type};
    pack_heads(q, nullptr, padded, state->width, state->q);
}

static void attend(void* context, int64_t number) {
    const Work& work = *(const Work*)context;
    const Latent& call = work.call;
    const Job& job = work.jobs[number];
    State state = state_of(call);
    begin(call, job, work.parts, &state);
    list_ahead(call, job.token, job.low, min64(job.high, job.low + PANEL), &state);
    rest_ahead(&state);
    for (int64_t low = job.low; low < job.high; low += PANEL) {
        int64_t count = min64(PANEL, job.high - low);
        for (int64_t t = 0; t < count; t++) fill(call, job.token, low + t, state.panel + t * state.row);
        list_ahead(call, job.token, low + count, min64(job.high, low + count + PANEL), &state);
        score_all(state, count);
        weigh(call, state, count);
        mix_all(state, count);
        rest_ahead(&state);
    }
    if (job.part < 0) put(call, job.token, state);
}

// Parts [first, first + count) of one token, into the first of them, and out.
static void merge(const Latent& call, const Job& job, float* parts, int64_t count) {
    State state = state_of(call), other = state;
    int64_t size = part_size(state.heads, state.stride);
    use_sums(&state, parts + job.part * size);
    for (int64_t i = 1; i < count; i++) {
        use_sums(&other, parts + (job.part + i) * size);
        for (int64_t h = 0; h < state.heads; h++) {
            float most = other.most[h] > state.most[h] ? other.most[h] : state.most[h];
            vec own = exponential(splat(state.most[h] - most)), more = exponential(splat(other.most[h] - most));
            float *to = state.sums + h * state.stride, *from = other.sums + h * state.stride;
            for (int64_t d = 0; d < state.stride; d += W) store(to + d, load(to + d) * own + load(from + d) * more);
            state.total[h] = state.total[h] * own[0] + other.total[h] * more[0];
            state.most[h] = most;
        }
    }
    put(call, job.token, state);
}

// Places of a job: all of a token, unless there are fewer tokens than threads could share.
static int64_t part_length(const Latent& call, int threads) {
    constexpr int64_t SMALLEST = 4 * PANEL, PARTS_PER_THREAD = 2;
    int64_t total = 0;
    for (int64_t i = 0; threads > 1 && i < call.count; i++) total += total_of(call, i);
    if (threads <= 1) return INT64_MAX / 2;
    return max64(SMALLEST, round_up(total / (threads * PARTS_PER_THREAD), PANEL));
}

// Fills jobs, or only counts them where there is no memory for them yet.
static void plan(Work* work, int64_t part) {
    work->count = work->part_count = 0;
    for (int64_t token = 0; token < work->call.count; token++) {
        int64_t total = total_of(work->call, token), parts = max64(1, (total + part / 2) / part);
        int64_t length = max64(PANEL, round_up((total + parts - 1) / parts, PANEL));
        parts = max64(1, (total + length - 1) / length);
        for (int64_t n = 0; n < parts; n++) {
            int64_t number = parts > 1 ? work->part_count++ : -1;
            if (work->jobs) work->jobs[work->count] = {token, n * length, min64((n + 1) * length, total), number};
            work->count++;
        }
    }
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(latent)(const OCTAVO_ISA::Latent* call, int threads) {
    using namespace OCTAVO_ISA;
    Work work = {*call, nullptr, nullptr, 0, 0};
    int64_t part = part_length(*call, threads), size = part_size(call->heads, round_up(call->value_dim, W));
    plan(&work, part);
    work.jobs = (Job*)octavo_scratch(SLOT_JOBS, work.count * sizeof(Job));
    work.parts = (float*)octavo_scratch(SLOT_SHARED, work.part_count * size * sizeof(float));
    plan(&work, part);
    octavo_parallel(threads, work.count, attend, &work);
    for (int64_t i = 0; i < work.count;) {
        int64_t same = i + 1;
        while (same < work.count && work.jobs[same].part >= 0 && work.jobs[same].low > 0) same++;
        if (work.jobs[i].part >= 0) merge(*call, work.jobs[i], work.parts, same - i);
        i = same;
    }
}
