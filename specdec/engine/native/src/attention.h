// Causal attention that walks each row's keys in order: scores by fixed trees, weights by lanes of the key's position, values one after the
// other. Rows and heads that share keys are computed side by side; no sum sees which, or how many, they are.
#pragma once
#include <algorithm>
#include <vector>

#include "rows.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t QUERIES = 4;  // computed side by side, on the registers there are
#else
constexpr int64_t QUERIES = 1;
#endif
constexpr int KEYS = 4;
constexpr int64_t MOST_CHUNKS = 4;  // of 16 dimensions, whose sums are kept in registers at once

// Where a segment's keys and values are. Token t < base lies at index t of `parent`, others at index t - base of `own`; both are
// [layers][2 * kv heads][capacity][dim] floats, keys first.
struct Segment {
    float* own;
    const float* parent;
    int64_t own_capacity, parent_capacity, base, start, rows;
};

// One head's keys, or values, of a segment.
struct Head {
    const float *before, *behind;
    int64_t base, dim;

    const float* at(int64_t token) const { return token < base ? before + token * dim : behind + (token - base) * dim; }
};

inline Head head_of(const Segment& s, int64_t layer, int64_t heads, int64_t head, int64_t dim) {
    const int64_t plane = layer * heads + head;
    const float* before = s.base ? s.parent + plane * s.parent_capacity * dim : nullptr;
    return {before, s.own + plane * s.own_capacity * dim, s.base, dim};
}

#if defined(__AVX512F__)

inline __m512 halves(__m512 a, __m512 b) {  // of each: lanes i + (i + 8)
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}

inline __m512 quarters(__m512 a, __m512 b) {  // of two results of halves: lanes i + (i + 4), one 128-bit part per vector
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Sums of sums[q][k] over its lanes, as sum() has them → to[q][0 … 3].
template <int Q>
inline void reduce(const Lanes (&sums)[Q][KEYS], float* const* to) {
    __m512 t[KEYS];
    for (int k = 0; k < KEYS; k++) {
        const __m512 low = halves(sums[0][k].v, sums[Q > 1 ? 1 : 0][k].v);
        const __m512 high = Q > 2 ? halves(sums[Q > 2 ? 2 : 0][k].v, sums[Q > 3 ? 3 : 0][k].v) : low;
        t[k] = quarters(low, high);
    }
    const __m512 u = _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
    const __m512 v = _mm512_add_ps(_mm512_unpacklo_ps(t[2], t[3]), _mm512_unpackhi_ps(t[2], t[3]));
    const __m512d a = _mm512_castps_pd(u), b = _mm512_castps_pd(v);
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    _mm_storeu_ps(to[0], _mm512_castps512_ps128(all));
    if constexpr (Q > 1) _mm_storeu_ps(to[1], _mm512_extractf32x4_ps(all, 1));
    if constexpr (Q > 2) _mm_storeu_ps(to[2], _mm512_extractf32x4_ps(all, 2));
    if constexpr (Q > 3) _mm_storeu_ps(to[3], _mm512_extractf32x4_ps(all, 3));
}

#else

template <int Q>
inline void reduce(const Lanes (&sums)[Q][KEYS], float* const* to) {
    for (int q = 0; q < Q; q++)
        for (int k = 0; k < KEYS; k++) to[q][k] = sum(sums[q][k]);
}

#endif

// scores[q][t] = query q · key t for t < count; up to 3 numbers behind them are overwritten. No key from `count` on is read.
template <int Q>
inline void score(const float* const* queries, const Head& keys, int64_t count, float* const* scores) {
    for (int64_t t = 0; t < count; t += KEYS) {
        const float* key[KEYS];
        for (int k = 0; k < KEYS; k++) key[k] = keys.at(t + k < count ? t + k : count - 1);
        Lanes sums[Q][KEYS];
        for (int q = 0; q < Q; q++)
            for (int k = 0; k < KEYS; k++) sums[q][k] = every(0.0f);
        for (int64_t d = 0; d < keys.dim; d += LANES) {
            Lanes part[KEYS];
            for (int k = 0; k < KEYS; k++) part[k] = load(key[k] + d);
            for (int q = 0; q < Q; q++) {
                const Lanes a = load(queries[q] + d);
                for (int k = 0; k < KEYS; k++) sums[q][k] = fma(a, part[k], sums[q][k]);
            }
        }
        float* to[Q];
        for (int q = 0; q < Q; q++) to[q] = scores[q] + t;
        reduce<Q>(sums, to);
    }
}

// scores [count] → e^(scale * (score - largest)), zeros up to a whole number of lanes behind them; answers their sum.
inline float weigh(float* scores, int64_t count, float scale) {
    for (int64_t t = count; t % LANES; t++) scores[t] = scores[count - 1];
    Lanes top = load(scores);
    for (int64_t t = LANES; t < count; t += LANES) top = maximum(top, load(scores + t));
    const Lanes most = every(largest(top)), factor = every(scale);
    Lanes total = every(0.0f);
    for (int64_t t = 0; t < count; t += LANES) {
        Lanes weight = exponential(mul(sub(load(scores + t), most), factor));
        if (count - t < LANES) weight = first(weight, count - t);
        total = add(total, weight);
        store(scores + t, weight);
    }
    return sum(total);
}

// out[q][0 … 16C) = sum over t of weights[q][t] * value t, t ascending, divided by totals[q].
template <int Q, int C>
inline void mix(const float* const* weights, const Head& values, int64_t offset, const int64_t* counts, const float* totals, float* const* out) {
    Lanes sums[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) sums[q][c] = every(0.0f);
    int64_t t = 0;
    for (int q = 0; q < Q; q++) {  // counts ascend: from here on queries before q see no more keys
        for (; t < counts[q]; t++) {
            const float* value = values.at(t) + offset;
            Lanes part[C];
            for (int c = 0; c < C; c++) part[c] = load(value + c * LANES);
            for (int i = 0; i < Q; i++) {
                if (i < q) continue;
                const Lanes weight = every(weights[i][t]);
                for (int c = 0; c < C; c++) sums[i][c] = fma(weight, part[c], sums[i][c]);
            }
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) store(out[q] + offset + c * LANES, mul(sums[q][c], every(1.0f / totals[q])));
}

template <int Q>
inline void mix_all(const float* const* weights, const Head& values, const int64_t* counts, const float* totals, float* const* out) {
    for (int64_t d = 0; d < values.dim; d += MOST_CHUNKS * LANES) {
        switch ((values.dim - d) / LANES) {
            case 1: mix<Q, 1>(weights, values, d, counts, totals, out); break;
            case 2: mix<Q, 2>(weights, values, d, counts, totals, out); break;
            case 3: mix<Q, 3>(weights, values, d, counts, totals, out); break;
            default: mix<Q, 4>(weights, values, d, counts, totals, out); break;
        }
    }
}

// Q queries whose key counts ascend → out[q] [dim]. `scores[q]` has room for counts[q] rounded up to lanes.
template <int Q>
inline void attend(const float* const* queries, const Head& keys, const Head& values, const int64_t* counts, float scale, float* const* scores,
                   float* const* out) {
    float totals[Q];
    score<Q>(queries, keys, counts[Q - 1], scores);
    for (int q = 0; q < Q; q++) totals[q] = weigh(scores[q], counts[q], scale);
    mix_all<Q>(scores, values, counts, totals, out);
}

// Up to QUERIES queries of one K/V head of one segment: query i of the head is row i / fold, head kv_head * fold + i % fold.
struct Tile {
    int32_t segment, kv_head, first, count;
};

inline void cut_into_tiles(const Segment& s, int32_t index, int64_t kv_heads, int64_t fold, std::vector<Tile>& tiles) {
    const auto queries = static_cast<int32_t>(s.rows * fold);
    for (int32_t h = 0; h < kv_heads; h++)
        for (int32_t q = 0; q < queries; q += QUERIES) tiles.push_back({index, h, q, std::min<int32_t>(QUERIES, queries - q)});
}

struct Shape {
    int64_t heads, kv_heads, dim;
};

// `queries` and `out`: the segment's first row, rows `query_stride` and `out_stride` apart, heads side by side. `room` has QUERIES rows of
// `room_stride`, at least the segment's tokens and a lane group more.
inline void attend_tile(const Segment& s, const Tile& tile, int64_t layer, const Shape& shape, const float* queries, int64_t query_stride,
                        float* out, int64_t out_stride, float* room, int64_t room_stride) {
    const int64_t fold = shape.heads / shape.kv_heads, dim = shape.dim;
    const Head keys = head_of(s, layer, 2 * shape.kv_heads, tile.kv_head, dim);
    const Head values = head_of(s, layer, 2 * shape.kv_heads, shape.kv_heads + tile.kv_head, dim);
    const float* from[QUERIES];
    float *scores[QUERIES], *to[QUERIES];
    int64_t counts[QUERIES];
    for (int32_t i = 0; i < tile.count; i++) {
        const int64_t row = (tile.first + i) / fold, head = tile.kv_head * fold + (tile.first + i) % fold;
        from[i] = queries + row * query_stride + head * dim;
        to[i] = out + row * out_stride + head * dim;
        scores[i] = room + i * room_stride;
        counts[i] = s.start + row + 1;
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    switch (tile.count) {
        case 1: return attend<1>(from, keys, values, counts, scale, scores, to);
#if defined(__AVX512F__)
        case 2: return attend<2>(from, keys, values, counts, scale, scores, to);
        case 3: return attend<3>(from, keys, values, counts, scale, scores, to);
        default: return attend<4>(from, keys, values, counts, scale, scores, to);
#endif
    }
}

}  // namespace
