// Vectors of the widest registers that OCTAVO_ISA has, by the compilers' vector extensions: one text for all instruction sets.
//
// The one exception is `pairs`, the dot product of pairs of bfloat16 that AVX512-BF16 has an instruction for. It is all that
// is written for that instruction set. OCTAVO_EMULATE_BF16 writes it out with plain AVX-512, so that everything built on it
// can be tested on machines without it.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));

static inline vec splat(float x) { return x - vec{}; }
static inline ivec isplat(int32_t x) { return x - ivec{}; }

static inline vec load(const float* from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}
// Written out where there is an instruction for it: g++ makes five of the conversion.
static inline vec load(const bf16* from) {
#if defined(__AVX512F__)
    return (vec)((uvec)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)from)) << 16);
#elif defined(__AVX2__)
    return (vec)((uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#else
    hvec x;
    memcpy(&x, from, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
#endif
}
static inline ivec load(const int32_t* from) {
    ivec x;
    memcpy(&x, from, sizeof x);
    return x;
}

// float to the nearest bfloat16, ties to even, NaN stays NaN; in the low halves.
static inline uvec rounded(vec x) {
    uvec bits = (uvec)x;
    uvec even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (bits >> 16) | 0x40;
    return (uvec)(x != x ? (ivec)nan : (ivec)even);
}
static inline void store(float* to, vec x) { memcpy(to, &x, sizeof x); }
static inline void store(bf16* to, vec x) {
    hvec half = __builtin_convertvector(rounded(x), hvec);
    memcpy(to, &half, sizeof half);
}
// What x becomes when it passes through memory as T.
static inline vec through(const float*, vec x) { return x; }
static inline vec through(const bf16*, vec x) { return (vec)(rounded(x) << 16); }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
static inline void from_float(float* to, float x) { *to = x; }
static inline void from_float(bf16* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to->bits = x != x ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vec larger(vec a, vec b) { return a > b ? a : b; }

static inline float sum(vec x) {
    float parts[W], total = 0;
    store(parts, x);
    for (int i = 0; i < W; i++) total += parts[i];
    return total;
}

// e^x within 2 ulp; 0 below -87, infinity above 88, NaN for NaN. Cephes' reduction, a polynomial of degree 6.
static inline vec exponential(vec x) {
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    vec power = (vec)(((ivec)shifted - 0x4b400000 + 127) << 23);
    vec y = p * power;
    y = x < -87.0f ? vec{} : y;
    return x > 88.0f ? splat(__builtin_inff()) : y;
}
// tanh by e^2x: absolute error about 1e-7.
static inline vec tanh_of(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// Sums of W vectors, one in each lane: pairs of vectors are folded into one, at distances 1, 2, 4, ...
template <int... I>
struct Lanes {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    typedef Lanes<I...> type;
};
template <int S, int... I>
static inline vec fold(vec a, vec b, Lanes<I...>) {
    // Lane i takes from b where bit S of i is set.
    vec x = __builtin_shufflevector(a, b, ((I & S) ? W + (I & ~S) : (I & ~S))...);
    vec y = __builtin_shufflevector(a, b, ((I & S) ? W + I : (I | S))...);
    return x + y;
}
template <int S>
struct Fold {
    static inline vec of(const vec* x) {
        return fold<S>(Fold<S / 2>::of(x), Fold<S / 2>::of(x + S), typename Count<W>::type());
    }
};
template <>
struct Fold<0> {
    static inline vec of(const vec* x) { return *x; }
};
static inline vec sums(const vec* x) { return Fold<W / 2>::of(x); }

template <int S, int... I>
static inline vec swapped(vec x, Lanes<I...>) {
    return __builtin_shufflevector(x, x, (I ^ S)...);
}
template <int S>
static inline vec largest_within(vec x) {
    x = larger(x, swapped<S>(x, typename Count<W>::type()));
    if constexpr (S > 1) return largest_within<S / 2>(x);
    return x;
}
static inline float largest(vec x) { return largest_within<W / 2>(x)[0]; }

#if defined(__AVX512BF16__)
#define OCTAVO_PAIRS 1
static inline vec pairs(vec sum, uvec a, uvec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
#elif defined(OCTAVO_EMULATE_BF16)
#define OCTAVO_PAIRS 1
static inline vec pairs(vec sum, uvec a, uvec b) {
    sum += (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
    return sum + (vec)(a << 16) * (vec)(b << 16);
}
#endif

// How products are summed. A policy has `item` (what one lane of an operand holds), the number of elements in it, and madd.
struct Floats {
    typedef float item;
    typedef vec reg;
    static constexpr int elements = 1;
    template <class T>
    static inline reg get(const T* from) {
        return load(from);
    }
    static inline reg spread(float x) { return splat(x); }
    static inline vec madd(vec sum, reg a, reg b) { return sum + a * b; }
};
#if defined(OCTAVO_PAIRS)
struct Pairs {
    typedef uint32_t item;
    typedef uvec reg;
    static constexpr int elements = 2;
    template <class T>
    static inline reg get(const T* from) {
        uvec x;
        memcpy(&x, from, sizeof x);
        return x;
    }
    static inline reg spread(uint32_t x) { return x - uvec{}; }
    static inline vec madd(vec sum, reg a, reg b) { return pairs(sum, a, b); }
};
#endif

// W dot products at once: out[i * N + j] = sum over k < size of a[i * row + k] * b[j][k] for i < M and j < N = W / M.
// a holds the policy's items; size is a multiple of the elements of a vector.
template <class P, int M, class T>
static inline vec dots(const typename P::item* a, int64_t row, const T* const* b, int64_t size) {
    constexpr int N = W / M, STEP = W * P::elements;
    vec acc[W] = {};
    for (int64_t k = 0; k < size; k += STEP) {
        typename P::reg right[N];
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) right[j] = P::get(b[j] + k);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            typename P::reg left = P::get(a + i * row + k / P::elements);
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) acc[i * N + j] = P::madd(acc[i * N + j], left, right[j]);
        }
    }
    return sums(acc);
}

static inline void prefetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 3);
}

}  // namespace OCTAVO_ISA
