// Attention of many queries at once. Query heads of one K/V head lie in the lanes of vectors, panel by panel, and keys and
// value elements in their rows, so that nothing is ever transposed or summed across lanes:
//
//     scores[key][query] = sum over d    of key[d]        * q[d][query]
//     out[d][query]      = sum over keys of value[key][d] * weight[key][query]
#pragma once

#include "attention.h"

namespace OCTAVO_ISA {

constexpr int VECTORS = W == 16 ? 4 : 2;
constexpr int PANEL = VECTORS * W;      // query heads of a panel
constexpr int64_t TILE_ROWS = 128;      // query heads of a job
constexpr int64_t TILE_KEYS = 96;

// M rows of a product: c[i][lane] (+)= sum over k < size of a[i][k * step] * b[k][lane].
template <class P, int M>
static inline void product(const typename P::item* const* a, int64_t step, int64_t size, const typename P::item* b, float* c,
                           bool add) {
    vec acc[M][VECTORS];
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < VECTORS; j++) acc[i][j] = add ? load(c + i * PANEL + j * W) : vec{};
    }
    for (int64_t k = 0; k < size; k++) {
        typename P::reg right[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) right[j] = P::get(b + k * PANEL + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            typename P::item one;
            memcpy(&one, a[i] + k * step, sizeof one);
            typename P::reg left = P::spread(one);
#pragma GCC unroll 16
            for (int j = 0; j < VECTORS; j++) acc[i][j] = P::madd(acc[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < VECTORS; j++) store(c + i * PANEL + j * W, acc[i][j]);
    }
}

template <class P>
static void products(const typename P::item* const* a, int64_t rows, int64_t step, int64_t size, const typename P::item* b,
                     float* c, bool add) {
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6) product<P, 6>(a + i, step, size, b, c + i * PANEL, add);
    for (; i + 4 <= rows; i += 4) product<P, 4>(a + i, step, size, b, c + i * PANEL, add);
    for (; i + 2 <= rows; i += 2) product<P, 2>(a + i, step, size, b, c + i * PANEL, add);
    for (; i < rows; i++) product<P, 1>(a + i, step, size, b, c + i * PANEL, add);
}

// The tile of keys at hand, as the policy reads it: rows[key] and values[key or pair of keys][d].
template <class P>
struct Keys {
    const typename P::item* rows[TILE_KEYS];
    typename P::item* values;
    int32_t positions[TILE_KEYS];
    int64_t count;
};

template <class S>
static void read_keys(const Attention& call, Keys<Floats>* keys, const S** k, const S** v) {
    int64_t dim = call.dim, width = call.value_dim;
    float* memory = (float*)octavo_scratch(SLOT_KEYS, TILE_KEYS * (dim + W) * sizeof(float));
    keys->values = (float*)octavo_scratch(SLOT_VALUES, TILE_KEYS * (width + W) * sizeof(float));
    for (int64_t i = 0; i < keys->count; i++) {
        int64_t d = 0;
        float *key = memory + i * dim, *value = keys->values + i * width;
        for (; d + W <= dim; d += W) store(key + d, load(k[i] + d));
        for (; d < dim; d++) key[d] = to_float(k[i][d]);
        for (d = 0; d + W <= width; d += W) store(value + d, load(v[i] + d));
        for (; d < width; d++) value[d] = to_float(v[i][d]);
        keys->rows[i] = key;
    }
}

#if defined(OCTAVO_PAIRS)
static void read_keys(const Attention& call, Keys<Pairs>* keys, const bf16** k, const bf16** v) {
    int64_t width = call.value_dim;
    keys->values = (uint32_t*)octavo_scratch(SLOT_VALUES, TILE_KEYS * (width + W) * sizeof(uint32_t));
    for (int64_t i = 0; i < keys->count; i++) keys->rows[i] = (const uint32_t*)k[i];
    for (int64_t i = 0; i < keys->count; i += 2) {
        const bf16 *low = v[i], *high = i + 1 < keys->count ? v[i + 1] : nullptr;
        uint32_t* to = keys->values + i / 2 * width;
        for (int64_t d = 0; d < width; d++) to[d] = low[d].bits | (high ? (uint32_t)high[d].bits << 16 : 0);
    }
}
#endif

// All of a job's state. Panels lie one behind the other: q [panels][items][PANEL], sums [panels][value_dim][PANEL].
template <class P>
struct Tile {
    int64_t shared, queries, panels, items;
    typename P::item *q, *weights;
    float *sums, *scores, *most, *total, *scale;
    int32_t *position, *first;
};

template <class P>
static Tile<P> make_tile(const Attention& call, const Job& job) {
    Tile<P> tile;
    tile.shared = call.heads / call.kv_heads;
    tile.queries = job.count * tile.shared;
    tile.panels = (tile.queries + PANEL - 1) / PANEL;
    tile.items = call.dim / P::elements;
    int64_t lanes = tile.panels * PANEL;
    tile.q = (typename P::item*)octavo_scratch(SLOT_QUERY, lanes * tile.items * 4);
    tile.sums = (float*)octavo_scratch(SLOT_SUMS, lanes * call.value_dim * 4);
    tile.scores = (float*)octavo_scratch(SLOT_SCORES, 2 * TILE_KEYS * PANEL * 4);
    tile.weights = (typename P::item*)(tile.scores + TILE_KEYS * PANEL);
    tile.most = (float*)octavo_scratch(SLOT_ROWS, 5 * lanes * 4);
    tile.total = tile.most + lanes, tile.scale = tile.total + lanes;
    tile.position = (int32_t*)(tile.scale + lanes), tile.first = tile.position + lanes;
    memset(tile.sums, 0, lanes * call.value_dim * 4);
    const Reads& reads = *call.reads;
    for (int64_t lane = 0; lane < lanes; lane++) {
        // Lanes past the last query repeat it.
        int64_t row = min64(lane, tile.queries - 1), token = job.token + row / tile.shared;
        int64_t head = job.head * tile.shared + row % tile.shared;
        tile.position[lane] = (int32_t)reads.position[token];
        tile.first[lane] = (int32_t)first_of(reads, token);
        tile.most[lane] = call.sinks ? call.sinks[head] : LOWEST;
        tile.total[lane] = call.sinks ? 1 : 0;
        typename P::item* q = tile.q + lane / PANEL * tile.items * PANEL + lane % PANEL;
        for (int64_t d = 0; d < tile.items; d++) {
            if (P::elements == 1) {
                float value = query_at(call, token, head, d);
                memcpy(q + d * PANEL, &value, 4);
            } else {
                uint32_t value = pair_of(query_at(call, token, head, 2 * d), query_at(call, token, head, 2 * d + 1));
                memcpy(q + d * PANEL, &value, 4);
            }
        }
    }
    return tile;
}

// Whether some query of the job does not see some key of the tile.
template <class P>
static bool hides(const Attention& call, const Tile<P>& tile, const Keys<P>& keys) {
    int32_t low = keys.positions[0], high = keys.positions[keys.count - 1], last = tile.first[tile.queries - 1];
    return high > tile.position[0] || (low < last && high >= call.reads->prefix && call.reads->prefix >= 0);
}

// Scores of one vector of queries become weights; returns whether sums have to be scaled.
template <class P>
static bool weigh(const Attention& call, const Tile<P>& tile, const Keys<P>& keys, int64_t lane, float* scores, bool hidden) {
    vec before = load(tile.most + lane), most = before, total = {};
    ivec position = load(tile.position + lane), first = load(tile.first + lane);
    int32_t prefix = (int32_t)call.reads->prefix;
    for (int64_t j = 0; j < keys.count; j++) {
        vec x = capped(call, load(scores + j * PANEL));
        if (hidden) {
            ivec key = isplat(keys.positions[j]);
            ivec seen = (key <= position) & ((key >= first) | (key < prefix));
            x = seen ? x : splat(-__builtin_inff());
        }
        store(scores + j * PANEL, x);
        most = larger(x, most);
    }
    for (int64_t j = 0; j < keys.count; j++) {
        vec weight = exponential(load(scores + j * PANEL) - most);
        store(scores + j * PANEL, weight);
        total += weight;
    }
    vec scale = exponential(before - most);
    store(tile.total + lane, load(tile.total + lane) * scale + total);
    store(tile.most + lane, most);
    store(tile.scale + lane, scale);
    float parts[W];
    store(parts, scale);
    for (int i = 0; i < W; i++) {
        if (parts[i] != 1) return true;
    }
    return false;
}

static inline const float* weights_of(const Tile<Floats>& tile, int64_t) { return tile.scores; }
#if defined(OCTAVO_PAIRS)
static inline const uint32_t* weights_of(const Tile<Pairs>& tile, int64_t count) {
    for (int64_t j = 0; j < count; j += 2) {
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            uvec low = rounded(load(tile.scores + j * PANEL + lane)), both = low;
            if (j + 1 < count) both |= rounded(load(tile.scores + (j + 1) * PANEL + lane)) << 16;
            memcpy(tile.weights + j / 2 * PANEL + lane, &both, sizeof both);
        }
    }
    return tile.weights;
}
#endif

template <class P>
static void attend_keys(const Attention& call, const Tile<P>& tile, const Keys<P>& keys) {
    constexpr int64_t ROWS = 48;
    bool hidden = hides(call, tile, keys);
    int64_t width = call.value_dim, depth = (keys.count + P::elements - 1) / P::elements;
    for (int64_t panel = 0; panel < tile.panels; panel++) {
        float* sums = tile.sums + panel * width * PANEL;
        products<P>(keys.rows, keys.count, 1, tile.items, tile.q + panel * tile.items * PANEL, tile.scores, false);
        bool moved = false;
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            moved |= weigh(call, tile, keys, panel * PANEL + lane, tile.scores + lane, hidden);
        }
        for (int64_t d = 0; moved && d < width; d++) {
            for (int64_t lane = 0; lane < PANEL; lane += W) {
                store(sums + d * PANEL + lane, load(sums + d * PANEL + lane) * load(tile.scale + panel * PANEL + lane));
            }
        }
        const typename P::item *weights = weights_of(tile, keys.count), *rows[ROWS];
        for (int64_t d = 0; d < width; d += ROWS) {
            int64_t count = min64(ROWS, width - d);
            for (int64_t i = 0; i < count; i++) rows[i] = keys.values + d + i;
            products<P>(rows, count, width, depth, weights, sums + d * PANEL, true);
        }
    }
}

template <class P, class S>
static void attend_tile(const Attention& call, const Job& job) {
    Tile<P> tile = make_tile<P>(call, job);
    Span span = span_of(*call.reads, job.token, job.count);
    Keys<P> keys;
    const S *k[TILE_KEYS], *v[TILE_KEYS];
    for (int64_t low = 0; low < span.total(); low += TILE_KEYS) {
        keys.count = min64(TILE_KEYS, span.total() - low);
        find<S>(call, job, span, low, keys.count, k, v, keys.positions);
        read_keys(call, &keys, k, v);
        attend_keys(call, tile, keys);
    }
    for (int64_t row = 0; row < tile.queries; row++) {
        const float* sums = tile.sums + row / PANEL * call.value_dim * PANEL + row % PANEL;
        int64_t token = job.token + row / tile.shared, head = job.head * tile.shared + row % tile.shared;
        float inverse = 1 / tile.total[row];
        for (int64_t d = 0; d < call.value_dim; d++) put_out(call, token, head, d, sums[d * PANEL] * inverse);
    }
}

}  // namespace OCTAVO_ISA
