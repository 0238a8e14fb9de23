// One call of paged attention, and where each of its keys lies. Which keys a query sees is given by numbers: everything from
// `first` of the query to its own position, and positions below `prefix`.
#pragma once

#include "simd.h"

namespace OCTAVO_ISA {

constexpr float LOWEST = -1e30f;  // a maximum that no score has raised yet; finite, so that differences are numbers

// One field of a layer in every page: data[page * page_stride + head * head_stride + row * entry_stride], counted in elements.
struct Field {
    const void* data;
    int64_t page, head, entry;
};

// The step's own keys or values, [entries, heads, dim].
struct Fresh {
    const void* data;
    int64_t token, head;
};

// What one step reads of one group: R requests with E entries, at consecutive positions, and Q queries, at some of these.
struct Reads {
    const int32_t* table;        // [rows, table_row] page of every column
    const int64_t* rows;         // [R] the requests' rows of the table
    const int64_t* entry_start;  // [R + 1] their entries among all
    const int64_t* query_start;  // [R + 1] their queries among all
    const int64_t* start;        // [R] position of the first entry
    const uint8_t* fresh;        // [R] whether the step's own entries are not in pages yet
    const int64_t* position;     // [Q] of every query, ascending within a request
    const int64_t* first;        // [Q] first position seen behind the prefix
    int64_t requests, table_row;
    int64_t fixed, turning;      // column of block b: b below fixed, fixed + (b - fixed) % turning behind; fixed -1: b
    int64_t block_tokens;
    int64_t prefix;              // positions below it are always seen; -1: all
};

struct Attention {
    const void* q;       // [Q, heads, dim]
    const float* sinks;  // [heads] or null
    void* out;           // [Q, heads, value_dim], contiguous
    const Reads* reads;
    Field k, v;
    Fresh fresh_k, fresh_v;
    int64_t q_token, q_head, heads, kv_heads, dim, value_dim;
    float scale, softcap;  // softcap 0: none
    int32_t q_type, kv_type;
};

// Queries [token, token + count) of a request against K/V head `head`. A decode has one query and, of all that it sees, reads
// [low, high); where that is not all, the result goes to `part`.
struct Job {
    int64_t request, token, count, head, low, high, part;
};

// Positions seen by some queries, in one or two runs.
struct Span {
    int64_t start[2], length[2];
    int64_t total() const { return length[0] + length[1]; }
};

static inline int64_t first_of(const Reads& reads, int64_t token) {
    return reads.prefix < 0 ? 0 : max64(reads.first[token], 0);
}

// What queries [token, token + count), all of one request, see together.
static inline Span span_of(const Reads& reads, int64_t token, int64_t count) {
    int64_t end = reads.position[token + count - 1] + 1;
    int64_t low = first_of(reads, token), prefix = max64(reads.prefix, 0);
    if (low <= prefix && prefix > 0) return {{0, 0}, {end, 0}};
    if (prefix == 0) return {{low, 0}, {end - low, 0}};
    return {{0, low}, {prefix, end - low}};
}

// Where the keys and values of positions [position, position + count) of a request lie.
template <class S>
static void find_run(const Attention& call, const Job& job, int64_t position, int64_t count, const S** k, const S** v) {
    const Reads& reads = *call.reads;
    const int32_t* table = reads.table + reads.rows[job.request] * reads.table_row;
    int64_t fresh = reads.fresh[job.request] ? reads.start[job.request] : INT64_MAX;
    while (count > 0) {
        const S *key, *value;
        int64_t n, key_step, value_step;
        if (position >= fresh) {
            int64_t token = reads.entry_start[job.request] + position - fresh;
            key = (const S*)call.fresh_k.data + token * call.fresh_k.token + job.head * call.fresh_k.head;
            value = (const S*)call.fresh_v.data + token * call.fresh_v.token + job.head * call.fresh_v.head;
            key_step = call.fresh_k.token, value_step = call.fresh_v.token, n = count;
        } else {
            int64_t block = position / reads.block_tokens, row = position % reads.block_tokens, column = block;
            if (reads.fixed >= 0 && block >= reads.fixed) column = reads.fixed + (block - reads.fixed) % reads.turning;
            int64_t page = table[column];
            key = (const S*)call.k.data + page * call.k.page + job.head * call.k.head + row * call.k.entry;
            value = (const S*)call.v.data + page * call.v.page + job.head * call.v.head + row * call.v.entry;
            key_step = call.k.entry, value_step = call.v.entry;
            n = min64(count, min64(reads.block_tokens - row, fresh - position));
        }
        for (int64_t i = 0; i < n; i++) k[i] = key + i * key_step, v[i] = value + i * value_step;
        position += n, count -= n, k += n, v += n;
    }
}

// The same for places [index, index + count) of a span, and the positions themselves.
template <class S>
static void find(const Attention& call, const Job& job, const Span& span, int64_t index, int64_t count, const S** k, const S** v,
                 int32_t* positions) {
    for (int part = 0; part < 2; part++) {
        int64_t before = part ? span.length[0] : 0;
        int64_t low = max64(index, before), high = min64(index + count, before + span.length[part]);
        if (low >= high) continue;
        int64_t position = span.start[part] + low - before, at = low - index;
        find_run(call, job, position, high - low, k + at, v + at);
        for (int64_t i = 0; positions && i < high - low; i++) positions[at + i] = (int32_t)(position + i);
    }
}

// Element d of a query as a float.
static inline float query_at(const Attention& call, int64_t token, int64_t head, int64_t d) {
    int64_t at = token * call.q_token + head * call.q_head + d;
    return call.q_type == TYPE_BFLOAT16 ? to_float(((const bf16*)call.q)[at]) : ((const float*)call.q)[at];
}

static inline void put_out(const Attention& call, int64_t token, int64_t head, int64_t d, float value) {
    int64_t at = (token * call.heads + head) * call.value_dim + d;
    if (call.q_type == TYPE_BFLOAT16) {
        from_float((bf16*)call.out + at, value);
    } else {
        ((float*)call.out)[at] = value;
    }
}

static inline vec capped(const Attention& call, vec score) {
    score = score * call.scale;
    return call.softcap == 0 ? score : call.softcap * tanh_of(score / call.softcap);
}

static inline uint32_t pair_of(float low, float high) {
    bf16 a, b;
    from_float(&a, low);
    from_float(&b, high);
    return (uint32_t)a.bits | (uint32_t)b.bits << 16;
}

}  // namespace OCTAVO_ISA
