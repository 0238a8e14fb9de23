// Index scores of queries over paged keys, and the choice of the highest.
//
// score[n] = sum over heads of weight[head] * relu(q[head] . key[n]); products live in registers only.
// The choice finds the k-th highest score by its bits, 11 at a time, and then takes entries by number: linear time.
// reference: octavo/ops/oracles/attention.py.

#include "entries.h"

namespace OCTAVO_ISA {

constexpr int64_t BATCH = 48;      // keys whose sums over lanes are made together; a multiple of W and of GROUP
constexpr int64_t PIECE = 4096;    // most keys of a job
constexpr int BITS = 11;           // of a score that one pass looks at

struct Index {
    const void* q;           // [n, heads, dim]
    const float* weights;    // [n, heads]
    const int64_t* table;    // [n] row of the table
    const int64_t* visible;  // [n] keys scored; what lies behind in `scores` is not written
    float* scores;           // [n, length]
    Paged keys;
    int64_t count, length, heads, dim;
    int32_t q_type;
};

struct Choice {
    const float* scores;     // [n, length]
    const int64_t* visible;  // [n], at most length
    int64_t* out;            // [n, k] ascending, then -1
    int64_t count, length, k;
};

struct Scoring {
    const Index* call;
    int64_t pieces, piece;
};

// Queries of one token with heads in lanes, `width` rows of them, and a weight for each.
struct Lane {
    const float *q, *weights;
    int64_t padded, width;
};

// Adds to out[m][lane] what heads from h on give keys rows[m].
template <int M, int V>
static inline void score_group(const Lane& heads, int64_t h, const float* rows, int64_t stride, float* out) {
    vec acc[M][V] = {};
    multiply<M, V>(acc, rows, stride, heads.q + h, heads.padded, 0, heads.width);
    for (int m = 0; m < M; m++) {
        vec total = load(out + m * W);
        // NaN stays.
        for (int v = 0; v < V; v++) total += (vec{} > acc[m][v] ? vec{} : acc[m][v]) * load(heads.weights + h + v * W);
        store(out + m * W, total);
    }
}

template <int M>
static inline void score_heads(const Lane& heads, const float* rows, int64_t stride, float* out) {
    int64_t h = 0;
    for (; h + VECTORS * W <= heads.padded; h += VECTORS * W) score_group<M, VECTORS>(heads, h, rows, stride, out);
    for (; VECTORS > 2 && h + 2 * W <= heads.padded; h += 2 * W) score_group<M, 2>(heads, h, rows, stride, out);
    for (; h < heads.padded; h += W) score_group<M, 1>(heads, h, rows, stride, out);
}

static void score(void* context, int64_t item) {
    const Scoring& work = *(const Scoring*)context;
    const Index& call = *work.call;
    int64_t token = item / work.pieces, first = item % work.pieces * work.piece;
    int64_t stop = min64(call.visible[token], first + work.piece);
    if (first >= stop) return;
    int64_t padded = round_up(call.heads, W), width = width_of(call.keys), stride = width + 2 * W;
    float* q = (float*)octavo_scratch(SLOT_QUERY, (width + 1) * padded * sizeof(float));
    float *weights = q + width * padded, *to = call.scores + token * call.length;
    int64_t element = call.q_type == TYPE_BFLOAT16 ? 2 : 4;
    Heads heads = {(const char*)call.q + token * call.heads * call.dim * element, call.dim, call.heads, call.dim, call.q_type};
    pack_heads(heads, call.keys.parts, padded, width, q);
    for (int64_t h = 0; h < padded; h++) weights[h] = h < call.heads ? call.weights[token * call.heads + h] : 0;
    Lane lane = {q, weights, padded, width};
    float* rows = (float*)octavo_scratch(SLOT_KEYS, GROUP * stride * sizeof(float));
    alignas(64) float parts[BATCH * W];
    for (int64_t low = first; low < stop; low += BATCH) {
        int64_t count = min64(BATCH, stop - low);
        memset(parts, 0, sizeof parts);
        for (int64_t i = 0; i < count; i += GROUP) {
            int64_t more = min64(GROUP, count - i);
            // Fewer than a group: the last key fills it up, and its sums are dropped.
            for (int64_t m = 0; m < GROUP; m++) {
                decode_entry(call.keys, call.table[token], low + i + min64(m, more - 1), rows + m * stride);
            }
            score_heads<GROUP>(lane, rows, stride, parts + i * W);
        }
        for (int64_t i = 0; i < count; i += W) {
            vec both[W];
            for (int j = 0; j < W; j++) both[j] = load(parts + (i + j) * W);
            alignas(64) float found[W];
            store(found, sums(both));
            memcpy(to + low + i, found, min64(W, count - i) * sizeof(float));
        }
    }
}

// Bits that order as floats do. Both zeros are one.
static inline uint32_t order_of(float x) {
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The highest value of (order >> shift) % 2^bits that `want` of the counted ones reach; want becomes what it must still give.
static inline uint32_t reach(const int32_t* counts, int bits, int64_t* want) {
    uint32_t bucket = (1u << bits) - 1;
    while (*want > counts[bucket]) *want -= counts[bucket--];
    return bucket;
}

static void choose(void* context, int64_t token) {
    const Choice& call = *(const Choice*)context;
    const float* scores = call.scores + token * call.length;
    int64_t* out = call.out + token * call.k;
    int64_t total = min64(call.visible[token], call.length), taken = 0, want = call.k;
    if (total <= call.k) {
        for (; taken < total; taken++) out[taken] = taken;
        for (; taken < call.k; taken++) out[taken] = -1;
        return;
    }
    uint32_t* orders = (uint32_t*)octavo_scratch(SLOT_ROWS, total * sizeof(uint32_t));
    int32_t counts[1 << BITS] = {};
    for (int64_t i = 0; i < total; i++) counts[order_of(scores[i]) >> (32 - BITS)]++;
    uint32_t least = reach(counts, BITS, &want) << (32 - BITS);
    int64_t left = 0;
    for (int64_t i = 0; i < total; i++) {
        orders[left] = order_of(scores[i]);
        left += orders[left] >> (32 - BITS) == least >> (32 - BITS);
    }
    for (int shift = 32 - 2 * BITS, bits = BITS; bits; bits = shift, shift = 0) {
        uint32_t mask = (1u << bits) - 1;
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < left; i++) counts[(orders[i] >> shift) & mask]++;
        least |= reach(counts, bits, &want) << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < left; i++) {
            orders[kept] = orders[i];
            kept += ((orders[i] ^ least) >> shift & mask) == 0;
        }
        left = kept;
    }
    for (int64_t i = 0; taken < call.k; i++) {
        uint32_t order = order_of(scores[i]);
        bool equal = order == least && want > 0;
        out[taken] = i;
        taken += (order > least) | equal;
        want -= equal;
    }
}

}  // namespace OCTAVO_ISA

OCTAVO_EXPORT(index_scores)(const OCTAVO_ISA::Index* call, int threads) {
    using namespace OCTAVO_ISA;
    int64_t most = 0;
    for (int64_t i = 0; i < call->count; i++) most = max64(most, call->visible[i]);
    int64_t piece = min64(PIECE, max64(BATCH, round_up((most + 4 * threads - 1) / (4 * threads), BATCH)));
    Scoring work = {call, (most + piece - 1) / piece, piece};
    octavo_parallel(threads, work.pieces * call->count, score, &work);
}

OCTAVO_EXPORT(choose)(const OCTAVO_ISA::Choice* call, int threads) {
    octavo_parallel(threads, call->count, OCTAVO_ISA::choose, (void*)call);
}
