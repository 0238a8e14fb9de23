// The thread pool of all kernels, their scratch memory, and which instruction sets the machine has.
//
// Threads are started when first wanted and live as long as the process. They wait awake for hundreds of microseconds, which is
// more than the time between two kernels of a step, and asleep after that. A thread that wakes too late to help is not waited
// for. Weights are read in the same order step after step: while memory has nothing to do, a thread that waits awake asks for
// the weights that came next the last time.

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common.h"

namespace {

constexpr int64_t AWAKE_NANOSECONDS = 500000;
// The state of the pool: a count of threads at work, whether a job is open to more, and above these the job's number.
constexpr uint64_t ONE = 1, COUNT = 0xffff, OPEN = 1 << 16, JOB = 1 << 17;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What was read behind `key` the last time. Addresses that may be stale by now: they are only ever prefetched.
struct Successor {
    const void* key = nullptr;
    Range ranges[RANGES] = {};
};

struct Pool {
    Successor successors[1024];
    const void* latest = nullptr;
    std::atomic<const char*> expected[RANGES] = {};
    std::atomic<int64_t> expected_bytes[RANGES] = {}, asked{0};
    std::mutex user;  // held by whoever has a job open
    std::mutex mutex;
    std::condition_variable wake, idle;
    std::atomic<uint64_t> state{0};
    std::atomic<int64_t> next{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> waiting{false};
    std::atomic<int> limit{0};
    int started = 0;
    int64_t items = 0;
    void (*run)(void*, int64_t) = nullptr;
    void* context = nullptr;

    void work() {
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) run(context, item);
    }

    Successor& successor(const void* key) { return successors[(uintptr_t)key / 64 * 0x9e3779b97f4a7c15u >> 54]; }

    void expect(const Range* ranges) {
        Successor& before = successor(latest);
        before.key = latest;
        memcpy(before.ranges, ranges, sizeof before.ranges);
        latest = ranges[0].from;
        const Successor& after = successor(latest);
        for (int i = 0; i < RANGES; i++) {
            expected[i].store((const char*)after.ranges[i].from, std::memory_order_relaxed);
            expected_bytes[i].store(after.key == latest ? after.ranges[i].bytes : 0, std::memory_order_relaxed);
        }
        asked.store(0, std::memory_order_relaxed);
    }

    // Asks for a little more of what is expected; false where that is enough.
    bool ask() {
        constexpr int64_t SLICE = 1024, MOST = 6 << 20;
        int64_t at = asked.load(std::memory_order_relaxed);
        if (at >= MOST) return false;
        at = asked.fetch_add(SLICE, std::memory_order_relaxed);
        for (int i = 0; i < RANGES; i++) {
            int64_t bytes = expected_bytes[i].load(std::memory_order_relaxed);
            const char* from = expected[i].load(std::memory_order_relaxed);
            if (at < bytes) {
                for (int64_t line = 0; line < SLICE; line += 64) __builtin_prefetch(from + at + line, 0, 2);
                return true;
            }
            at -= (bytes + SLICE - 1) / SLICE * SLICE;
        }
        asked.store(MOST, std::memory_order_relaxed);
        return false;
    }

    bool join(uint64_t* last) {
        uint64_t seen = state.load(std::memory_order_acquire);
        while ((seen & OPEN) && seen / JOB != *last && (seen & COUNT) < (uint64_t)limit.load()) {
            if (state.compare_exchange_weak(seen, seen + ONE, std::memory_order_acq_rel)) {
                *last = seen / JOB;
                return true;
            }
        }
        return false;
    }

    bool news(uint64_t last) {
        uint64_t seen = state.load();
        return (seen & OPEN) && seen / JOB != last;
    }

    void live() {
        uint64_t last = 0;
        for (;;) {
            if (join(&last)) {
                work();
                if (((state.fetch_sub(ONE) - ONE) & COUNT) == 0 && waiting.load()) {
                    std::lock_guard<std::mutex> lock(mutex);
                    idle.notify_one();
                }
                continue;
            }
            last = (state.load(std::memory_order_acquire) & OPEN) ? state.load() / JOB : last;
            bool found = false;
            for (int64_t until = now() + AWAKE_NANOSECONDS; !(found = news(last)) && now() < until;) {
                if (ask()) continue;
                for (int i = 0; i < 16; i++) pause();
            }
            if (found) continue;
            // Who is woken too late for one job stays awake for the next: kernels follow each other closely.
            uint64_t known = state.load() / JOB;
            std::unique_lock<std::mutex> lock(mutex);
            sleepers.fetch_add(1);
            wake.wait(lock, [&] { return news(last) || state.load() / JOB != known; });
            sleepers.fetch_sub(1);
        }
    }

    void offer(int threads, int64_t count, void (*function)(void*, int64_t), void* argument) {
        for (; started < threads - 1; started++) std::thread([this] { live(); }).detach();
        run = function, context = argument, items = count, limit = threads - 1;
        next.store(0, std::memory_order_relaxed);
        state.store((state.load() / JOB + 1) * JOB + OPEN);
        if (sleepers.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        work();
        state.fetch_and(~OPEN);
        for (int64_t until = now() + AWAKE_NANOSECONDS; state.load(std::memory_order_acquire) & COUNT;) {
            pause();
            if (now() < until) continue;
            std::unique_lock<std::mutex> lock(mutex);
            waiting.store(true);
            idle.wait(lock, [&] { return !(state.load() & COUNT); });
            waiting.store(false);
        }
    }
};

// Never freed: its threads use it until the process ends. A child of fork has none of them and needs another.
std::atomic<Pool*> pool{nullptr};

void forget() { pool.store(new Pool); }

Pool* get() {
    static const int once = (pool.store(new Pool), pthread_atfork(nullptr, nullptr, forget));
    (void)once;
    return pool.load();
}

struct Scratch {
    void* memory[SLOT_COUNT] = {};
    size_t bytes[SLOT_COUNT] = {};
    ~Scratch() {
        for (void* one : memory) free(one);
    }
};

}  // namespace

extern "C" void octavo_parallel(int threads, int64_t items, void (*run)(void*, int64_t), void* context, const Range* reads) {
    Pool* shared = threads > 1 && items > 1 ? get() : nullptr;
    if (shared && shared->user.try_lock()) {
        if (reads) shared->expect(reads);
        shared->offer(threads, items, run, context);
        shared->user.unlock();
        return;
    }
    for (int64_t item = 0; item < items; item++) run(context, item);
}

extern "C" void* octavo_scratch(int slot, size_t bytes) {
    thread_local Scratch mine;
    if (mine.bytes[slot] < bytes) {
        free(mine.memory[slot]);
        size_t size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
        if (posix_memalign(&mine.memory[slot], 64, size)) abort();
        mine.bytes[slot] = size;
    }
    return mine.memory[slot];
}

// What these kernels were compiled from (octavo/kernels/sources.py).
extern "C" __attribute__((visibility("default"))) const char* octavo_sources() { return OCTAVO_SOURCES; }

// 0: portable, 1: AVX2, 2: AVX-512, 3: AVX512-BF16. The order of octavo/kernels/library.py.
extern "C" __attribute__((visibility("default"))) int octavo_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 ? (__builtin_cpu_supports("avx512bf16") ? 3 : 2) : avx2;
#else
    return 0;
#endif
}
