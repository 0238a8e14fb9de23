// What a step does to single rows and stores: norms, rotation, writing entries to pages, finding the largest logit. Little
// arithmetic; what is saved is the time of many small operations.
//
// reference: octavo/ops/oracles/pointwise.py.

#include "simd.h"

namespace OCTAVO_ISA {

enum Style : int32_t { STYLE_NONE = -1, STYLE_UNIT = 0, STYLE_SCALE = 1, STYLE_WIDE = 2, STYLE_OFFSET = 3, STYLE_CENTER = 4 };

// Heads [tokens, heads, size]: normalised, if there is a style, rounded, and then rotated, if there are tables.
struct Rows {
    const void* x;       // rows are contiguous
    const void* weight;  // [size]; null for STYLE_UNIT
    const void* cosine;  // [tokens, rotated] in x's type, or null
    const void* sine;
    void* y;             // [tokens, heads, size], contiguous
    int64_t tokens, heads, size, x_token, x_head, rotated;
    float eps;
    int32_t style, interleaved, type;
};

template <class T>
static void normalise(const Rows& call, const T* x, float* row) {
    const T* weight = (const T*)call.weight;
    int64_t size = call.size, whole = size / W * W;
    float mean = 0;
    if (call.style == STYLE_CENTER) {
        vec total = {};
        for (int64_t d = 0; d < whole; d += W) total += load(x + d);
        mean = sum(total);
        for (int64_t d = whole; d < size; d++) mean += to_float(x[d]);
        mean /= size;
    }
    vec squares = {};
    for (int64_t d = 0; d < whole; d += W) {
        vec centred = load(x + d) - mean;
        squares += centred * centred;
    }
    float square = sum(squares);
    for (int64_t d = whole; d < size; d++) square += (to_float(x[d]) - mean) * (to_float(x[d]) - mean);
    float inverse = 1.0f / __builtin_sqrtf(square / size + call.eps), shift = call.style == STYLE_OFFSET ? 1 : 0;
    for (int64_t d = 0; d < whole; d += W) {
        vec normal = (load(x + d) - mean) * inverse;
        if (call.style == STYLE_SCALE) normal = through((T*)0, normal);
        store(row + d, through((T*)0, weight ? normal * (load(weight + d) + shift) : normal));
    }
    for (int64_t d = whole; d < size; d++) {
        float normal = (to_float(x[d]) - mean) * inverse;
        T rounded;
        from_float(&rounded, normal);
        if (call.style == STYLE_SCALE) normal = to_float(rounded);
        from_float(&rounded, weight ? normal * (to_float(weight[d]) + shift) : normal);
        row[d] = to_float(rounded);
    }
}

template <class T>
static void rotate(const Rows& call, const T* cosine, const T* sine, float* row) {
    int64_t half = call.rotated / 2;
    if (call.interleaved) {
        for (int64_t d = 0; d < call.rotated; d += 2) {
            float a = row[d], b = row[d + 1];
            row[d] = a * to_float(cosine[d]) - b * to_float(sine[d]);
            row[d + 1] = b * to_float(cosine[d + 1]) + a * to_float(sine[d + 1]);
        }
        return;
    }
    int64_t d = 0;
    for (; d + W <= half; d += W) {
        vec a = load(row + d), b = load(row + half + d);
        store(row + d, a * load(cosine + d) - b * load(sine + d));
        store(row + half + d, b * load(cosine + half + d) + a * load(sine + half + d));
    }
    for (; d < half; d++) {
        float a = row[d], b = row[half + d];
        row[d] = a * to_float(cosine[d]) - b * to_float(sine[d]);
        row[half + d] = b * to_float(cosine[half + d]) + a * to_float(sine[half + d]);
    }
}

template <class T>
static void head_of(const Rows& call, const T* x, int64_t token, T* y) {
    float* row = (float*)octavo_scratch(SLOT_ROWS, call.size * sizeof(float));
    int64_t size = call.size, whole = size / W * W;
    if (call.style == STYLE_NONE) {
        for (int64_t d = 0; d < whole; d += W) store(row + d, load(x + d));
        for (int64_t d = whole; d < size; d++) row[d] = to_float(x[d]);
    } else {
        normalise(call, x, row);
    }
    if (call.cosine) {
        int64_t at = token * call.rotated;
        rotate(call, (const T*)call.cosine + at, (const T*)call.sine + at, row);
    }
    for (int64_t d = 0; d < whole; d += W) store(y + d, load(row + d));
    for (int64_t d = whole; d < size; d++) from_float(y + d, row[d]);
}

template <class T>
static void token_of(void* context, int64_t token) {
    const Rows& call = *(const Rows*)context;
    const T* x = (const T*)call.x + token * call.x_token;
    T* y = (T*)call.y + token * call.heads * call.size;
    for (int64_t head = 0; head < call.heads; head++) head_of(call, x + head * call.x_head, token, y + head * call.size);
}

// Row `tokens[i]` of values [T, heads, entry] goes to row `rows[i]` of page `pages[i]`, all counted in bytes.
struct Scatter {
    const void* values;
    void* field;
    const int64_t *tokens, *pages, *rows;
    int64_t count, heads, entry, value_token, value_head, page, head, row;
};

// The place of the largest element of every row, the first of equal ones; NaN is passed over.
struct Argmax {
    const void* values;  // [rows, size], contiguous
    int64_t* places;     // [rows]
    int64_t rows, size, parts;
    int32_t type;
    // Of every part of every row.
    float* most;
    int64_t* where;
};

template <class T>
static void part_of(void* context, int64_t number) {
    const Argmax& call = *(const Argmax*)context;
    int64_t length = round_up((call.size + call.parts - 1) / call.parts, W), first = number % call.parts * length;
    int64_t last = min64(first + length, call.size), at = first, row = number / call.parts;
    const T* x = (const T*)call.values + row * call.size;
    float lowest = -__builtin_inff();
    vec most = splat(lowest);
    ivec where = {}, step = {};
    for (; at + W <= last; at += W, step += 1) {
        vec found = load(x + at);
        where = found > most ? step : where;
        most = larger(found, most);
    }
    float values[W], best = lowest;
    int32_t steps[W];
    int64_t place = first;
    store(values, most);
    memcpy(steps, &where, sizeof where);
    for (int lane = 0; lane < W; lane++) {
        int64_t here = first + (int64_t)steps[lane] * W + lane;
        if (values[lane] > best || (values[lane] == best && best > lowest && here < place)) best = values[lane], place = here;
    }
    for (; at < last; at++) {
        if (to_float(x[at]) > best) best = to_float(x[at]), place = at;
    }
    call.most[number] = best;
    call.where[number] = place;
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(argmax)(OCTAVO_ISA::Argmax* call, int threads) {
    using namespace OCTAVO_ISA;
    int64_t count = call->rows * call->parts;
    call->where = (int64_t*)octavo_scratch(SLOT_JOBS, count * (sizeof(int64_t) + sizeof(float)));
    call->most = (float*)(call->where + count);
    octavo_parallel(threads, count, call->type == TYPE_BFLOAT16 ? part_of<bf16> : part_of<float>, call);
    for (int64_t row = 0; row < call->rows; row++) {
        int64_t best = row * call->parts;
        for (int64_t i = best + 1; i < (row + 1) * call->parts; i++) best = call->most[i] > call->most[best] ? i : best;
        call->places[row] = call->where[best];
    }
}

OCTAVO_EXPORT(heads)(OCTAVO_ISA::Rows* call, int threads) {
    using namespace OCTAVO_ISA;
    constexpr int64_t WORTH_SHARING = 1 << 16;  // elements
    if (call->tokens * call->heads * call->size < WORTH_SHARING) threads = 1;
    octavo_parallel(threads, call->tokens, call->type == TYPE_BFLOAT16 ? token_of<bf16> : token_of<float>, call);
}

OCTAVO_EXPORT(scatter)(const OCTAVO_ISA::Scatter* calls, int fields) {
    for (const OCTAVO_ISA::Scatter* call = calls; call < calls + fields; call++) {
        for (int64_t i = 0; i < call->count; i++) {
            const char* from = (const char*)call->values + call->tokens[i] * call->value_token;
            char* to = (char*)call->field + call->pages[i] * call->page + call->rows[i] * call->row;
            for (int64_t h = 0; h < call->heads; h++) memcpy(to + h * call->head, from + h * call->value_head, call->entry);
        }
    }
}
