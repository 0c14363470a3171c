// 8-bit products whose sums are exact, so a row has the same bits in any batch and on any CPU.
//
// Weights are stored as 0 … 255 (value + 128) because the instruction multiplies an unsigned by a signed byte; 128 times the sum of the row
// is taken off again. 64 output columns make a panel, in which four neighbouring inputs of a column lie side by side: a panel is read from
// front to back, once per six rows, and while it is multiplied the next one is fetched.
#pragma once
#include "rows.h"

namespace {

constexpr int64_t PANEL = 64;
constexpr int64_t STEP = 4 * PANEL;  // bytes of four inputs
constexpr int64_t OFFSET = 128;

// `weights` [out / 64][in / 4][64][4], `scales` and `bias` [out], padded to whole panels; bias may be null. Where `coded` is not 0 the
// weights have 4 bits and their scales beside them: see product4.h.
struct Linear {
    const uint8_t* weights;
    const float* scales;
    const float* bias;
    int64_t out, in, coded;

    int64_t panels() const { return (out + PANEL - 1) / PANEL; }
    const uint8_t* panel(int64_t p) const { return weights + p * PANEL * in; }
};

// 64 sums of one row, of columns column … column + 63.
struct Sums {
    Ints part[4];
};

#if defined(__AVX512VNNI__)

constexpr int64_t TILE_ROWS = 6;
constexpr bool FASTER_THAN_MEMORY = true;

// R rows against one panel. Fetches LINES cache lines of `next` per step.
template <int R, int LINES>
[[gnu::noinline]] void tile(const uint8_t* weights, const int8_t* rows, int64_t stride, int64_t steps, const uint8_t* next, Sums* out) {
    __m512i sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_si512();
    for (int64_t k = 0; k < steps; k++) {
        for (int i = 0; i < LINES; i++) _mm_prefetch(reinterpret_cast<const char*>(next) + (k * LINES + i) * 64, _MM_HINT_T1);
        __m512i w[4];
        for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(weights + k * STEP + j * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, rows + r * stride + 4 * k, 4);
            const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbusd_epi32(sums[r][j], w[j], a);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) out[r].part[j].v = sums[r][j];
}

#else

constexpr int64_t TILE_ROWS = 2;
constexpr bool FASTER_THAN_MEMORY = false;

// As above with 16-bit products, which cannot overflow, 16 columns at a time.
template <int R, int LINES>
[[gnu::noinline]] void tile(const uint8_t* weights, const int8_t* rows, int64_t stride, int64_t steps, const uint8_t* next, Sums* out) {
    for (int j = 0; j < 4; j++) {
        __m256i sums[R][4];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 4; i++) sums[r][i] = _mm256_setzero_si256();
        for (int64_t k = 0; k < steps; k++) {
            if (j == 0)
                for (int i = 0; i < LINES; i++) _mm_prefetch(reinterpret_cast<const char*>(next) + (k * LINES + i) * 64, _MM_HINT_T1);
            __m256i w[4];
            for (int i = 0; i < 4; i++) {
                const auto* bytes = reinterpret_cast<const __m128i*>(weights + k * STEP + j * 64 + i * 16);
                w[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(bytes));
            }
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, rows + r * stride + 4 * k, 4);
                const __m256i a = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
                for (int i = 0; i < 4; i++) sums[r][i] = _mm256_add_epi32(sums[r][i], _mm256_madd_epi16(w[i], a));
            }
        }
        for (int r = 0; r < R; r++) {
            const __m256i lo = _mm256_hadd_epi32(sums[r][0], sums[r][1]), hi = _mm256_hadd_epi32(sums[r][2], sums[r][3]);
            out[r].part[j] = {_mm256_permute4x64_epi64(lo, 0xD8), _mm256_permute4x64_epi64(hi, 0xD8)};
        }
    }
}

#endif

template <int LINES>
inline void tile_of(int64_t count, const uint8_t* w, const int8_t* rows, int64_t stride, int64_t steps, const uint8_t* next, Sums* out) {
    switch (count) {
        case 1: return tile<1, LINES>(w, rows, stride, steps, next, out);
        case 2: return tile<2, LINES>(w, rows, stride, steps, next, out);
#if defined(__AVX512VNNI__)
        case 3: return tile<3, LINES>(w, rows, stride, steps, next, out);
        case 4: return tile<4, LINES>(w, rows, stride, steps, next, out);
        case 5: return tile<5, LINES>(w, rows, stride, steps, next, out);
        default: return tile<6, LINES>(w, rows, stride, steps, next, out);
#endif
    }
}

// The columns of panels from … to-1 for all rows. sink(row, column, Sums) gets each row's 64 sums, less the offset. `paced`: weights come
// from memory rather than from a cache; then a few rows are computed as TILE_ROWS, which are there to be read, and what is too much is thrown
// away. Memory is slower than the sums, and slower still when it is asked faster than it answers.
template <class Sink>
inline void multiply(const Linear& linear, const Quantised& rows, int64_t count, int64_t from, int64_t to, bool paced, const Sink& sink) {
    const int64_t steps = linear.in / 4, size = PANEL * linear.in;
    const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    Sums sums[TILE_ROWS];
    for (int64_t p = from; p < to; p++) {
        const uint8_t *panel = linear.panel(p), *next = panel + size;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = count * t / tiles, n = count * (t + 1) / tiles - first;
            if (tiles == 1) tile_of<4>(paced && FASTER_THAN_MEMORY ? TILE_ROWS : n, panel, rows.row(first), rows.stride, steps, next, sums);
            else if (tiles == 2) tile_of<2>(n, panel, rows.row(first), rows.stride, steps, next + t * size / 2, sums);
            else if (t < 4) tile_of<1>(n, panel, rows.row(first), rows.stride, steps, next + t * size / 4, sums);
            else tile_of<0>(n, panel, rows.row(first), rows.stride, steps, next, sums);
            for (int64_t r = 0; r < n; r++) {
                const Ints offset = every_int(static_cast<int32_t>(OFFSET) * rows.sum[first + r]);
                for (int j = 0; j < 4; j++) sums[r].part[j] = sub(sums[r].part[j], offset);
                sink(first + r, p * PANEL, sums[r]);
            }
        }
    }
}

// One lane group of a row's sums → numbers.
inline Lanes number(const Linear& linear, const Sums& sums, int j, int64_t column, float row_scale) {
    const Lanes y = mul(mul(to_float(sums.part[j]), load(linear.scales + column + j * LANES)), every(row_scale));
    return linear.bias == nullptr ? y : add(y, load(linear.bias + column + j * LANES));
}

// weight [out, in] → packed, scales; in one symmetric scale per output. Padding columns get zeros.
inline void pack(const float* weight, int64_t out, int64_t in, uint8_t* packed, float* scales) {
    const Ints magnitude = every_int(0x7fffffff);
    alignas(64) int8_t line[LANES];
    for (int64_t o = 0; o < (out + PANEL - 1) / PANEL * PANEL; o++) {
        uint8_t* column = packed + o / PANEL * PANEL * in + o % PANEL * 4;
        if (o >= out) {
            for (int64_t k = 0; k < in / 4; k++) std::memset(column + k * STEP, OFFSET, 4);
            scales[o] = 0.0f;
            continue;
        }
        const float* row = weight + o * in;
        Ints top = every_int(0);
        for (int64_t i = 0; i < in; i += LANES) top = maximum(top, both(bits(load(row + i)), magnitude));
        const float found = as_float(largest(top)) / LEVELS, scale = found > 1e-8f ? found : 1e-8f;
        scales[o] = scale;
        for (int64_t i = 0; i < in; i += LANES) {
            const Lanes q = minimum(every(LEVELS), maximum(every(-LEVELS), div(load(row + i), every(scale))));
            store_bytes(line, to_int(q));
            for (int64_t k = 0; k < LANES; k++) column[(i + k) / 4 * STEP + k % 4] = static_cast<uint8_t>(line[k] + OFFSET);
        }
    }
}

}  // namespace
