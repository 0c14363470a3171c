// Rows of floats → rows of 8-bit integers with a scale of their own.
#pragma once
#include <cmath>
#include <limits>

#include "lanes.h"

namespace {

constexpr float LEVELS = 127.0f;
constexpr float SMALLEST = 1e-30f;  // a row of zeros is divided by this
constexpr int32_t INFINITE = 0x7f800000;

constexpr int64_t SUMMED = 32;

// A quantised row is values[i] * scale; `sum` = sum of the values, `sums` those of SUMMED neighbours each, or null. A row that was not finite
// has zeros for values and NaN for scale, so that everything that comes of it is NaN.
struct Quantised {
    int8_t* values;
    float* scale;
    int32_t* sum;
    int64_t stride;
    int32_t* sums;

    int8_t* row(int64_t r) const { return values + r * stride; }
    int32_t* group_sums(int64_t r) const { return sums + r * (stride / SUMMED); }
};

inline void give_up(const Quantised& to, int64_t row, int64_t n) {
    std::memset(to.row(row), 0, n);
    to.scale[row] = std::numeric_limits<float>::quiet_NaN();
    to.sum[row] = 0;
    if (to.sums != nullptr) std::memset(to.group_sums(row), 0, n / SUMMED * sizeof(int32_t));
}

inline float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// x [n], with `top` = bits of its largest magnitude, finite → values round(x * 127 / top). `factor` goes into the scale.
inline void quantise_by(const float* x, int64_t n, int32_t top_bits, float factor, const Quantised& to, int64_t row) {
    const float seen = as_float(top_bits), top = seen > SMALLEST ? seen : SMALLEST;
    const Lanes up = every(LEVELS / top);
    int8_t* values = to.row(row);
    Ints total = every_int(0);
    for (int64_t i = 0; i < n; i += LANES) {
        const Ints q = to_int(mul(load(x + i), up));
        total = add(total, q);
        store_bytes(values + i, q);
    }
    to.scale[row] = top / LEVELS * factor;
    to.sum[row] = sum(total);
    if (to.sums == nullptr) return;
    for (int64_t g = 0; g < n / SUMMED; g++) {
        int32_t some = 0;
        for (int64_t i = 0; i < SUMMED; i++) some += values[g * SUMMED + i];
        to.group_sums(row)[g] = some;
    }
}

inline void quantise(const float* x, int64_t n, const Quantised& to, int64_t row) {
    const Ints magnitude = every_int(0x7fffffff);
    Ints top = every_int(0);
    for (int64_t i = 0; i < n; i += LANES) top = maximum(top, both(bits(load(x + i)), magnitude));
    const int32_t top_bits = largest(top);
    if (top_bits >= INFINITE) return give_up(to, row, n);
    quantise_by(x, n, top_bits, 1.0f, to, row);
}

// x * weight / sqrt(mean(x^2) + eps), quantised. The root scales the row as a whole, so it goes into the scale alone. `room` [n].
inline void norm_and_quantise(const float* x, const float* weight, int64_t n, float eps, float* room, const Quantised& to, int64_t row) {
    const Ints magnitude = every_int(0x7fffffff);
    Ints top = every_int(0);
    Lanes squares = every(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        const Lanes a = load(x + i), y = mul(a, load(weight + i));
        squares = fma(a, a, squares);
        top = maximum(top, both(bits(y), magnitude));
        store(room + i, y);
    }
    const float mean = sum(squares) / static_cast<float>(n);
    const int32_t top_bits = largest(top);
    if (top_bits >= INFINITE || !std::isfinite(mean)) return give_up(to, row, n);
    quantise_by(room, n, top_bits, 1.0f / std::sqrt(mean + eps), to, row);
}

// x [n] *= weight / sqrt(mean(x^2) + eps)
inline void norm(float* x, const float* weight, int64_t n, float eps) {
    Lanes squares = every(0.0f);
    for (int64_t i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const Lanes factor = every(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += LANES) store(x + i, mul(mul(load(x + i), factor), load(weight + i)));
}

// Dimensions i and i + dim / 2 of a head turn together (Su et al. 2021, arXiv 2104.09864, eq. 34). cosines, sines [dim / 2].
inline void turn(float* x, const float* cosines, const float* sines, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

// Puts 0 in place of what is not finite, and says whether there was anything.
inline bool made_finite(float* x, int64_t n) {
    const Ints magnitude = every_int(0x7fffffff);
    Ints top = every_int(0);
    for (int64_t i = 0; i < n; i += LANES) top = maximum(top, both(bits(load(x + i)), magnitude));
    if (largest(top) < INFINITE) return false;
    for (int64_t i = 0; i < n; i++) x[i] = std::isfinite(x[i]) ? x[i] : 0.0f;
    return true;
}

}  // namespace
