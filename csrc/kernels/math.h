// Functions of whole vectors.
#pragma once

#include <math.h>

#include "simd.h"

namespace fw::FW_ISA {

// e^x to 2 units in the last place, from -87 to 88; beyond, the value at that end.
inline F32 exponential(F32 x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  x = x > splat(88.0f) ? splat(88.0f) : x;
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const F32 rounded = x * 1.44269504f + kRound;
  const F32 n = rounded - kRound;
  // x − n · ln 2 in two steps, the first exact; a polynomial of degree 6 does the rest.
  const F32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F32 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I32 exponent = (I32(rounded) << 23) + (127 << 23);  // the low bits of `rounded` are n
  return p * F32(exponent);
}

inline F32 largest(F32 a, F32 b) { return a > b ? a : b; }

inline float largest(F32 vector) {
  float most = vector[0];
  for (int lane = 1; lane < kLanes; ++lane) most = vector[lane] > most ? vector[lane] : most;
  return most;
}

#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) { return __mmask16((1u << count) - 1); }
#elif defined(__AVX2__)
inline __m256i first_lanes(int64_t count) {
  alignas(64) static constexpr int32_t kLanesOn[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return load<__m256i>(kLanesOn + kLanes - count);
}
#endif

// The first `count` lanes of source, the others `fill`.
inline F32 load_part(const float* source, int64_t count, float fill) {
#if defined(__AVX512F__)
  return F32(_mm512_mask_loadu_ps(__m512(splat(fill)), first_lanes(count), source));
#elif defined(__AVX2__)
  const __m256i on = first_lanes(count);
  const __m256 there = _mm256_maskload_ps(source, on);
  return F32(_mm256_blendv_ps(__m256(splat(fill)), there, __m256(on)));
#else
  F32 values = splat(fill);
  memcpy(&values, source, size_t(count) * sizeof(float));
  return values;
#endif
}

inline void store_part(float* target, F32 vector, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(target, first_lanes(count), __m512(vector));
#elif defined(__AVX2__)
  _mm256_maskstore_ps(target, first_lanes(count), __m256(vector));
#else
  memcpy(target, &vector, size_t(count) * sizeof(float));
#endif
}

inline float largest(const float* x, int64_t n) {
  F32 tops = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) tops = largest(load<F32>(x + i), tops);
  float most = largest(tops);
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// exp((x − most) · scaling) of the first n numbers in place; their sum.
inline float exponentials(float* x, int64_t n, float most, float scaling) {
  F32 sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 v = exponential((load<F32>(x + i) - most) * scaling);
    store(x + i, v);
    sums += v;
  }
  float total = sum(sums);
  if (i < n) {
    const F32 v = exponential((load_part(x + i, n - i, -INFINITY) - most) * scaling);
    store_part(x + i, v, n - i);
    for (int64_t lane = 0; lane < n - i; ++lane) total += v[lane];
  }
  return total;
}

}  // namespace fw::FW_ISA
