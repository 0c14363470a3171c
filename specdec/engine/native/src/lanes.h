// Sixteen floats or integers side by side, one register of AVX-512 or two of AVX2. Every operation is the same for a lane on both, and
// sums over lanes are one fixed tree, so bits do not depend on which of the two was compiled.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 16;

#if defined(__AVX512F__)

struct Lanes {
    __m512 v;
};
struct Ints {
    __m512i v;
};

inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes every(float a) { return {_mm512_set1_ps(a)}; }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where one of the two is NaN the answer is b, as the instruction has it.
inline Lanes maximum(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes minimum(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes rounded(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes first(Lanes a, int64_t n) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>((1u << n) - 1), a.v)}; }

inline Ints every_int(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints maximum(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Ints both(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints bits(Lanes a) { return {_mm512_castps_si512(a.v)}; }
inline Ints to_int(Lanes a) { return {_mm512_cvtps_epi32(a.v)}; }  // to the nearest, ties to even
inline Lanes to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Lanes power_of_two(Ints n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
inline void store_bytes(int8_t* p, Ints a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v)); }
inline __m256 folded(Lanes a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t largest(Ints a) { return _mm512_reduce_max_epi32(a.v); }
inline float largest(Lanes a) { return _mm512_reduce_max_ps(a.v); }

#else

struct Lanes {
    __m256 lo, hi;
};
struct Ints {
    __m256i lo, hi;
};

inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline Lanes every(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Lanes maximum(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Lanes minimum(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Lanes rounded(Lanes a) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, how), _mm256_round_ps(a.hi, how)};
}
inline Lanes first(Lanes a, int64_t n) {
    const __m256i count = _mm256_set1_epi32(static_cast<int>(n));
    const __m256i low = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i high = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
    return {_mm256_and_ps(a.lo, _mm256_castsi256_ps(low)), _mm256_and_ps(a.hi, _mm256_castsi256_ps(high))};
}

inline Ints every_int(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Ints maximum(Ints a, Ints b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline Ints both(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Ints bits(Lanes a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Ints to_int(Lanes a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Lanes to_float(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline __m256 power_of_two(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline Lanes power_of_two(Ints n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
inline void store_bytes(int8_t* p, Ints a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline __m256 folded(Lanes a) { return _mm256_add_ps(a.lo, a.hi); }
inline int32_t sum(Ints a) {
    alignas(32) int32_t part[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_add_epi32(a.lo, a.hi));
    return part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
}
inline int32_t largest(Ints a) {
    alignas(32) int32_t part[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_max_epi32(a.lo, a.hi));
    int32_t top = part[0];
    for (int i = 1; i < 8; i++) top = part[i] > top ? part[i] : top;
    return top;
}
inline float largest(Lanes a) {
    alignas(32) float part[8];
    _mm256_store_ps(part, _mm256_max_ps(a.lo, a.hi));
    float top = part[0];
    for (int i = 1; i < 8; i++) top = part[i] > top ? part[i] : top;
    return top;
}

#endif

// Lanes i and i + 8, then i and i + 4, i and i + 2, i and i + 1.
inline float sum(Lanes a) {
    const __m256 eight = folded(a);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// e^x within 2 units in the last place for x <= 88; 0 is 1e-38 or so below -87; NaN stays.
inline Lanes exponential(Lanes x) {
    x = maximum(every(-87.0f), minimum(every(88.0f), x));
    const Lanes n = rounded(mul(x, every(1.44269504088896341f)));
    Lanes r = fma(n, every(-0.693359375f), x);  // ln 2 in two parts, of which the first has few digits
    r = fma(n, every(2.12194440e-4f), r);
    Lanes p = every(1.9875691500e-4f);
    p = fma(p, r, every(1.3981999507e-3f));
    p = fma(p, r, every(8.3334519073e-3f));
    p = fma(p, r, every(4.1665795894e-2f));
    p = fma(p, r, every(1.6666665459e-1f));
    p = fma(p, r, every(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), every(1.0f));
    return mul(p, power_of_two(to_int(n)));
}

}  // namespace
