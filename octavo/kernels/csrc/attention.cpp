// Paged attention of a step: which queries are attended together, by whom, and in how many parts.
//
// reference: octavo/ops/oracles/attention.py.

#include "attention_decode.h"
#include "attention_tile.h"

namespace OCTAVO_ISA {

// Jobs of a call. tiles: the first so many are of many queries; the others are decodes.
struct Work {
    Attention call;
    Job* jobs;
    float* parts;
    int64_t tiles, count, part_count;
};

static bool tiled(const Attention& call, int64_t queries) {
    return queries > 1 && queries * (call.heads / call.kv_heads) * 2 >= PANEL;
}

// Entries that each part of a decode reads. How a query is cut depends on nothing but itself: neither on what else there is in
// the step nor on threads. Parts are small enough to be shared evenly, and large beside the work of merging them.
static int64_t part_length(int64_t total) {
    constexpr int64_t PARTS = 16, SMALLEST = 8 * KEYS, LARGEST = 64 * KEYS;
    return max64(SMALLEST, min64(LARGEST, round_up((total + PARTS - 1) / PARTS, KEYS)));
}

// Fills jobs, or only counts them where there is no memory for them yet. Long tiles come first.
static void plan(Work* work) {
    const Attention& call = work->call;
    const Reads& reads = *call.reads;
    int64_t queries_of_tile = max64(1, TILE_ROWS / (call.heads / call.kv_heads));
    work->count = work->part_count = 0;
    auto add = [&](const Job& job) {
        if (work->jobs) work->jobs[work->count] = job;
        work->count++;
    };
    for (int64_t i = 0; i < reads.requests; i++) {
        int64_t from = reads.query_start[i], to = reads.query_start[i + 1];
        if (!tiled(call, to - from)) continue;
        for (int64_t last = to; last > from; last -= queries_of_tile) {
            int64_t first = max64(from, last - queries_of_tile);
            for (int64_t head = 0; head < call.kv_heads; head++) add({i, first, last - first, head, 0, 0, -1});
        }
    }
    work->tiles = work->count;
    for (int64_t i = 0; i < reads.requests; i++) {
        int64_t from = reads.query_start[i], to = reads.query_start[i + 1];
        if (tiled(call, to - from)) continue;
        for (int64_t token = from; token < to; token++) {
            int64_t total = span_of(reads, token, 1).total(), length = part_length(total);
            int64_t parts = (total + length - 1) / length;
            for (int64_t head = 0; head < call.kv_heads; head++) {
                for (int64_t n = 0; n < parts; n++) {
                    int64_t number = parts > 1 ? work->part_count++ : -1;
                    add({i, token, 1, head, n * length, min64((n + 1) * length, total), number});
                }
            }
        }
    }
}

// Whether entries can be read where they lie; else they are widened first.
static bool is_even(const Attention& call) { return call.dim % W == 0 && call.value_dim % W == 0; }

static void run(void* context, int64_t number) {
    const Work& work = *(const Work*)context;
    const Attention& call = work.call;
    const Job& job = work.jobs[number];
    bool tile = number < work.tiles, even = is_even(call);
    if (call.kv_type == TYPE_FLOAT32) {
        return tile ? attend_tile<Floats, float>(call, job) : decode<Floats, float, float>(call, job, work.parts, !even);
    }
#if defined(OCTAVO_PAIRS)
    bool paired = call.q_type == TYPE_BFLOAT16;
    if (tile && paired && call.dim % 2 == 0) return attend_tile<Pairs, bf16>(call, job);
    if (!tile && paired && even && call.dim % UNIT == 0) return decode<Pairs, bf16, bf16>(call, job, work.parts, false);
#endif
    if (tile) return attend_tile<Floats, bf16>(call, job);
    if (even) return decode<Floats, bf16, bf16>(call, job, work.parts, false);
    decode<Floats, float, bf16>(call, job, work.parts, true);
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(attention)(const OCTAVO_ISA::Attention* call, int threads) {
    using namespace OCTAVO_ISA;
    Work work = {*call, nullptr, nullptr, 0, 0, 0};
    plan(&work);
    int64_t size = part_size(call->heads / call->kv_heads, round_up(call->value_dim, W));
    work.jobs = (Job*)octavo_scratch(SLOT_JOBS, work.count * sizeof(Job));
    work.parts = (float*)octavo_scratch(SLOT_SHARED, work.part_count * size * sizeof(float));
    plan(&work);
    octavo_parallel(threads, work.count, run, &work);
    for (int64_t i = work.tiles; i < work.count;) {
        int64_t same = i + 1;
        while (same < work.count && work.jobs[same].part >= 0 && work.jobs[same].low > 0) same++;
        if (work.jobs[i].part >= 0) {
            bool as_float = call->kv_type == TYPE_FLOAT32 || !is_even(*call);
            (as_float ? merge<float> : merge<bf16>)(*call, work.jobs[i], work.parts, same - i);
        }
        i = same;
    }
}
