// Entries without heads as caches keep them: found through a table of pages, decoded to floats, multiplied with many queries.
//
// An entry is one or two parts, one behind the other: float32, bfloat16, or fp8 and fp4 with scales (octavo/ops/codec.py).
// It meets all heads of a query, so it is decoded once, into a panel that stays in the nearest caches. Heads lie in lanes:
// products need no sums across lanes, and neither does a softmax over entries.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace OCTAVO_ISA {

enum Stored : int32_t { STORED_FLOAT32 = 0, STORED_BFLOAT16 = 1, STORED_E4M3 = 2, STORED_E2M1 = 3 };

// One field, and that of its scales: data + page * `page` + row * `entry`, in bytes. size: elements of an entry.
// block: elements that share a scale, a multiple of 32. scale null: all are 1.
struct Part {
    const char *data, *scale;
    int64_t page, entry, scale_page, scale_entry, size, block;
    int32_t type, scale_exponent;  // scales are float32, or 8-bit exponents
};

// Entry n of the request in row r of the table lies in page table[r * table_row + n / per_block], row n % per_block.
struct Paged {
    const int32_t* table;
    int64_t table_row, per_block, count;
    Part parts[2];
};

// W bytes. Written out where there is an instruction for it: g++ makes many of the conversion.
static inline uvec load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (uvec)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef uint8_t bvec __attribute__((vector_size(W)));
    bvec x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, uvec);
#endif
}
static inline uvec load_bytes(const uint8_t* from, int64_t count) {
    if (count >= W) return load_bytes(from);
    uint8_t some[W] = {};
    memcpy(some, from, count);
    return load_bytes(some);
}
static inline vec from_e4m3(uvec x) {
    uvec size = x & 0x7f;
    vec normal = (vec)((size << 20) + (120u << 23));
    vec value = size < 8 ? __builtin_convertvector((ivec)size, vec) * 0x1p-9f : normal;
    value = size == 0x7f ? splat(__builtin_nanf("")) : value;
    return (vec)((uvec)value | (x & 0x80) << 24);
}
static inline vec from_e2m1(uvec x) {
    uvec size = x & 7;
    vec value = size < 2 ? __builtin_convertvector((ivec)size, vec) * 0.5f : (vec)((size << 22) + (126u << 23));
    return (vec)((uvec)value | (x & 8) << 28);
}
static inline float from_e8m0(uint8_t x) {
    uint32_t bits = x == 255 ? 0x7fc00000u : x ? (uint32_t)x << 23 : 1u << 22;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

template <class T>
static inline void decode_plain(const T* from, int64_t size, float* to) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(to + i, load(from + i));
    for (; i < size; i++) to[i] = to_float(from[i]);
}

// Where element e of an entry in fp4 lies when decoded: of 2 W elements, first the even ones. Others stay where they are.
static inline int64_t place_of(const Part& part, int64_t e) {
    return part.type == STORED_E2M1 ? e / (2 * W) * (2 * W) + (e & 1) * W + e % (2 * W) / 2 : e;
}
// Floats of a decoded part, what may be written behind its end excluded.
static inline int64_t width_of(const Part& part) { return part.type == STORED_E2M1 ? round_up(part.size, 2 * W) : part.size; }
static inline int64_t width_of(const Paged& from) {
    int64_t width = 0;
    for (int64_t i = 0; i < from.count; i++) width += width_of(from.parts[i]);
    return width;
}

// May write up to 2 W floats behind the end.
static inline void decode_part(const Part& part, int64_t page, int64_t row, float* to) {
    const char* data = part.data + page * part.page + row * part.entry;
    if (part.type == STORED_FLOAT32) return decode_plain((const float*)data, part.size, to);
    if (part.type == STORED_BFLOAT16) return decode_plain((const bf16*)data, part.size, to);
    const char* scales = part.scale ? part.scale + page * part.scale_page + row * part.scale_entry : nullptr;
    const uint8_t* bytes = (const uint8_t*)data;
    for (int64_t low = 0, n = 0; low < part.size; low += part.block, n++) {
        int64_t high = min64(part.size, low + part.block);
        float scale = !scales ? 1 : part.scale_exponent ? from_e8m0(((const uint8_t*)scales)[n]) : ((const float*)scales)[n];
        if (part.type == STORED_E4M3) {
            for (int64_t i = low; i < high; i += W) store(to + i, from_e4m3(load_bytes(bytes + i, high - i)) * scale);
        } else {
            for (int64_t i = low; i < high; i += 2 * W) {
                uvec x = load_bytes(bytes + i / 2, (high - i) / 2);
                store(to + i, from_e2m1(x & 15) * scale);
                store(to + i + W, from_e2m1(x >> 4) * scale);
            }
        }
    }
}

static inline void decode_entry(const Paged& from, int64_t table, int64_t number, float* to) {
    int64_t page = from.table[table * from.table_row + number / from.per_block], row = number % from.per_block;
    for (int64_t i = 0; i < from.count; to += width_of(from.parts[i++])) decode_part(from.parts[i], page, row, to);
}

// Writes where the cache lines of an entry begin; at most size / LINE + 2, and one for its scales.
constexpr int64_t LINE = 64;
static inline const char** lines_of(const Paged& from, int64_t table, int64_t number, const char** to) {
    int64_t page = from.table[table * from.table_row + number / from.per_block], row = number % from.per_block;
    for (int64_t i = 0; i < from.count; i++) {
        const Part& part = from.parts[i];
        const char* data = part.data + page * part.page + row * part.entry;
        for (int64_t at = 0; at < part.entry; at += LINE) *to++ = data + at;
        if (part.scale) *to++ = part.scale + page * part.scale_page + row * part.scale_entry;
    }
    return to;
}

// Queries of one token, [heads, elements] of float or bfloat16.
struct Heads {
    const void* data;
    int64_t head, heads, dim;  // `head`: elements between heads
    int32_t type;
};

// Heads in lanes: to[place * padded + head], padded to a multiple of W with zeros. first: the part whose places are taken.
static void pack_heads(const Heads& q, const Part* first, int64_t padded, int64_t width, float* to) {
    memset(to, 0, width * padded * sizeof(float));
    for (int64_t h = 0; h < q.heads; h++) {
        for (int64_t d = 0; d < q.dim; d++) {
            int64_t at = h * q.head + d;
            float x = q.type == TYPE_BFLOAT16 ? to_float(((const bf16*)q.data)[at]) : ((const float*)q.data)[at];
            to[(first ? place_of(*first, d) : d) * padded + h] = x;
        }
    }
}

// Registers of products: so many entries by so many vectors of heads.
constexpr int GROUP = W == 16 ? 6 : W == 8 ? 6 : 4, VECTORS = W == 16 ? 4 : 2;

// acc[m][v] += sum over d in [low, high) of rows[m * row + d] * q[d * padded + v * W + lane].
template <int M, int V>
static inline void multiply(vec (&acc)[M][V], const float* rows, int64_t row, const float* q, int64_t padded, int64_t low,
                            int64_t high) {
    for (int64_t d = low; d < high; d++) {
        vec right[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) right[v] = load(q + d * padded + v * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            vec left = splat(rows[m * row + d]);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) acc[m][v] += left * right[v];
        }
    }
}

}  // namespace OCTAVO_ISA
