// What every kernel shares: exported names, number formats, the thread pool and scratch memory of pool.cpp.
//
// Every kernel file is compiled once per instruction set (setup.py), with OCTAVO_ISA naming it. Whatever is not exported lives
// in a namespace of that name, so that code for one instruction set never stands in for that of another. For the same reason
// kernel files use nothing from the C++ library that could be instantiated: inline functions are merged across files.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA portable
#endif

#define OCTAVO_JOIN_(a, b, c) a##b##_##c
#define OCTAVO_JOIN(a, b, c) OCTAVO_JOIN_(a, b, c)
// OCTAVO_EXPORT(linear) is octavo_avx2_linear when compiled for avx2.
#define OCTAVO_EXPORT(name) \
    extern "C" __attribute__((visibility("default"))) void OCTAVO_JOIN(octavo_, OCTAVO_ISA, name)

extern "C" {
struct Range {
    const void* from;
    int64_t bytes;
};
// Calls run(context, item) for every item in [0, items), on at most `threads` threads, the caller among them. `reads` says
// which weights are read, RANGES of them in order, of which the last may be empty.
void octavo_parallel(int threads, int64_t items, void (*run)(void* context, int64_t item), void* context,
                     const Range* reads = nullptr);
// Memory of the calling thread, 64-byte aligned, valid until the thread asks for the same slot again.
void* octavo_scratch(int slot, size_t bytes);
}

constexpr int RANGES = 4;

enum Slot { SLOT_JOBS, SLOT_SHARED, SLOT_QUERY, SLOT_SCORES, SLOT_SUMS, SLOT_KEYS, SLOT_VALUES, SLOT_ROWS, SLOT_COUNT };

// Element types as octavo/kernels/library.py numbers them.
enum Type : int32_t { TYPE_FLOAT32 = 0, TYPE_BFLOAT16 = 1 };

struct bf16 {
    uint16_t bits;
};

template <class A, class B>
static inline int64_t min64(A a, B b) {
    return (int64_t)a < (int64_t)b ? (int64_t)a : (int64_t)b;
}
template <class A, class B>
static inline int64_t max64(A a, B b) {
    return (int64_t)a > (int64_t)b ? (int64_t)a : (int64_t)b;
}
static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
