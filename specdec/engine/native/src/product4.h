// Weights of 4 bits: half of the bytes to read, where reading them is what a pass takes. A code names one of 16 levels, and 32 inputs of an
// output share a scale. Codes become bytes in registers; a group's sum of products is exact, and groups are added as floats in their order,
// so a row has the same bits in any batch and on any CPU.
#pragma once
#include "product.h"

namespace {

constexpr int64_t GROUP = SUMMED;
constexpr int64_t HALF = 32;                            // columns of a block
constexpr int64_t BLOCK = 2 * HALF + HALF * GROUP / 2;  // bytes: scales (bfloat16), then codes
constexpr int64_t PIECES = GROUP / 8;                   // of a block: eight inputs
constexpr int64_t CODES = 16;

// Quantiles of the normal distribution (Dettmers et al. 2023, arXiv 2305.14314, NF4) in 127ths: weights are spread like that.
constexpr float LEVELS_OF[CODES] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
// The same as unsigned bytes, plus OFFSET.
alignas(16) constexpr uint8_t BYTES_OF[CODES] = {1, 40, 61, 78, 92, 105, 116, 128, 138, 148, 159, 171, 184, 199, 220, 255};

// 64 numbers of one row, without the row's own scale.
struct Totals {
    Lanes part[4];
};

// `weights` of such a Linear: [out / 64][2 halves][in / 32] blocks. Codes [4 pieces][2][16 columns][4 inputs]; the lower four bits of a byte
// belong to one of the first four inputs of the piece, the upper ones to the input four behind it.
inline const uint8_t* blocks(const Linear& linear, int64_t p) { return linear.weights + p * 2 * (linear.in / GROUP) * BLOCK; }

inline Lanes scales_of(const uint8_t* block, int i) {
#if defined(__AVX512F__)
    const __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block) + i));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(half, 16))};
#else
    const auto* halves = reinterpret_cast<const __m128i*>(block) + 2 * i;
    const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
#endif
}

#if defined(__AVX512VNNI__)

// R rows against one panel. Fetches `next` where it is not null.
template <int R>
[[gnu::noinline]] void coded_tile(const uint8_t* panel, const Quantised& rows, int64_t first, int64_t groups, const uint8_t* next,
                                  Totals* out) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i levels = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(BYTES_OF)));
    for (int h = 0; h < 2; h++) {
        __m512 totals[R][2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (h * groups + g) * BLOCK;
            const uint8_t* block = panel + at;
            if (next != nullptr)
                for (int64_t i = 0; i < BLOCK; i += 64) _mm_prefetch(reinterpret_cast<const char*>(next) + at + i, _MM_HINT_T1);
            __m512i sums[R][2];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const int32_t offset = static_cast<int32_t>(OFFSET) * rows.group_sums(first + r)[g];
                sums[r][0] = sums[r][1] = _mm512_set1_epi32(-offset);
            }
            const uint8_t* codes = block + 2 * HALF;
            const int8_t* inputs = rows.row(first) + g * GROUP;
#pragma GCC unroll 8
            for (int k = 0; k < PIECES; k++) {
                __m512i lower[2], upper[2];
                for (int i = 0; i < 2; i++) {
                    const __m512i both = _mm512_loadu_si512(codes + k * 128 + i * 64);
                    lower[i] = _mm512_shuffle_epi8(levels, _mm512_and_si512(both, nibble));
                    upper[i] = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    int32_t four[2];
                    std::memcpy(four, inputs + r * rows.stride + 8 * k, 8);
                    const __m512i a = _mm512_set1_epi32(four[0]), b = _mm512_set1_epi32(four[1]);
                    for (int i = 0; i < 2; i++) sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], lower[i], a);
                    for (int i = 0; i < 2; i++) sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], upper[i], b);
                }
            }
            const __m512 scales[2] = {scales_of(block, 0).v, scales_of(block, 1).v};
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) totals[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][i]), scales[i], totals[r][i]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) out[r].part[2 * h + i].v = totals[r][i];
    }
}

#else

// A group of a panel as 8-bit weights [8 steps][64][4].
inline void uncode(const uint8_t* panel, int64_t groups, int64_t g, uint8_t* bytes) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(BYTES_OF)));
    for (int h = 0; h < 2; h++)
        for (int64_t at = 0; at < BLOCK - 2 * HALF; at += 32) {
            const uint8_t* codes = panel + (h * groups + g) * BLOCK + 2 * HALF + at;
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
            uint8_t* to = bytes + 2 * (at / 128) * STEP + h * 4 * HALF + at % 128;
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(levels, _mm256_and_si256(both, nibble)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + STEP), _mm256_shuffle_epi8(levels, upper));
        }
}

// As above, by way of 8-bit weights.
template <int R>
[[gnu::noinline]] void coded_tile(const uint8_t* panel, const Quantised& rows, int64_t first, int64_t groups, const uint8_t*, Totals* out) {
    alignas(64) uint8_t bytes[GROUP * PANEL];
    Sums sums[R];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) out[r].part[j] = every(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        uncode(panel, groups, g, bytes);
        tile<R, 0>(bytes, rows.row(first) + g * GROUP, rows.stride, GROUP / 4, bytes, sums);
        for (int j = 0; j < 4; j++) {
            const Lanes scales = scales_of(panel + (j / 2 * groups + g) * BLOCK, j % 2);
            for (int r = 0; r < R; r++) {
                const Ints offset = every_int(static_cast<int32_t>(OFFSET) * rows.group_sums(first + r)[g]);
                out[r].part[j] = fma(to_float(sub(sums[r].part[j], offset)), scales, out[r].part[j]);
            }
        }
    }
}

#endif

inline void coded_tile_of(int64_t count, const uint8_t* panel, const Quantised& rows, int64_t first, int64_t groups, const uint8_t* next,
                          Totals* out) {
    switch (count) {
        case 1: return coded_tile<1>(panel, rows, first, groups, next, out);
        case 2: return coded_tile<2>(panel, rows, first, groups, next, out);
#if defined(__AVX512VNNI__)
        case 3: return coded_tile<3>(panel, rows, first, groups, next, out);
        case 4: return coded_tile<4>(panel, rows, first, groups, next, out);
        case 5: return coded_tile<5>(panel, rows, first, groups, next, out);
        default: return coded_tile<6>(panel, rows, first, groups, next, out);
#endif
    }
}

// As multiply(), with Totals in place of Sums.
template <class Sink>
inline void multiply_coded(const Linear& linear, const Quantised& rows, int64_t count, int64_t from, int64_t to, const Sink& sink) {
    const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    Totals totals[TILE_ROWS];
    for (int64_t p = from; p < to; p++)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = count * t / tiles, n = count * (t + 1) / tiles - first;
            coded_tile_of(n, blocks(linear, p), rows, first, linear.in / GROUP, t == 0 ? blocks(linear, p + 1) : nullptr, totals);
            for (int64_t r = 0; r < n; r++) sink(first + r, p * PANEL, totals[r]);
        }
}

inline Lanes number(const Linear& linear, const Totals& totals, int j, int64_t column, float row_scale) {
    const Lanes y = mul(totals.part[j], every(row_scale));
    return linear.bias == nullptr ? y : add(y, load(linear.bias + column + j * LANES));
}

// The nearest level of each of a group's weights under `scale`, and the error: squares, each times its input's importance.
inline float code(const float* x, const float* importance, float scale, uint8_t* codes) {
    Lanes error = every(0.0f);
    for (int64_t i = 0; i < GROUP; i += LANES) {
        alignas(64) float level[LANES], y[LANES];
        int32_t above[LANES] = {};
        store(y, div(load(x + i), every(scale)));
        for (int c = 1; c < CODES; c++)
            for (int64_t k = 0; k < LANES; k++) above[k] += y[k] > (LEVELS_OF[c - 1] + LEVELS_OF[c]) / 2;
        for (int64_t k = 0; k < LANES; k++) {
            codes[i + k] = static_cast<uint8_t>(above[k]);
            level[k] = LEVELS_OF[above[k]];
        }
        const Lanes off = sub(mul(load(level), every(scale)), load(x + i));
        error = fma(mul(off, off), load(importance + i), error);
    }
    return sum(error);
}

// bfloat16, rounded towards zero.
inline float shortened(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    bits &= 0xffff0000;
    std::memcpy(&scale, &bits, sizeof bits);
    return scale;
}

// weight [out, in] → blocks, `in` a multiple of 32; of each group the scale with the least error, NaN where one of its
// weights is not finite. importance [in], at least 0.
inline void pack_coded(const float* weight, int64_t out, int64_t in, const float* importance, uint8_t* packed) {
    const int64_t groups = in / GROUP;
    std::memset(packed, 0, (out + PANEL - 1) / PANEL * 2 * groups * BLOCK);
    for (int64_t o = 0; o < out; o++) {
        uint8_t* first = packed + (o / PANEL * 2 + o % PANEL / HALF) * groups * BLOCK;
        const int64_t column = o % HALF;
        for (int64_t g = 0; g < groups; g++) {
            const float* x = weight + o * in + g * GROUP;
            bool finite = true;
            for (int64_t i = 0; i < GROUP; i++) finite = finite && std::isfinite(x[i]);
            float top = 1e-30f, least = std::numeric_limits<float>::infinity(), best = std::numeric_limits<float>::quiet_NaN();
            for (int64_t i = 0; i < GROUP; i++) top = std::max(top, std::fabs(x[i]));
            uint8_t codes[GROUP] = {}, tried[GROUP];
            for (int step = 0; finite && step < 12; step++) {
                const float scale = shortened(top / 127.0f * (0.75f + 0.05f * static_cast<float>(step / 2)) * (step % 2 ? -1.0f : 1.0f));
                const float error = code(x, importance + g * GROUP, scale, tried);
                if (error >= least) continue;
                least = error, best = scale;
                std::memcpy(codes, tried, GROUP);
            }
            uint8_t* block = first + g * BLOCK;
            std::memcpy(block + 2 * column, reinterpret_cast<const char*>(&best) + 2, 2);
            uint8_t* bytes = block + 2 * HALF + column / 16 * 64 + column % 16 * 4;
            for (int64_t i = 0; i < GROUP; i++) bytes[i / 8 * 128 + i % 4] |= static_cast<uint8_t>(codes[i] << (i % 8 < 4 ? 0 : 4));
        }
    }
}

}  // namespace
