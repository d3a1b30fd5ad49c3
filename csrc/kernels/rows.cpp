// What happens to rows of activations between two products.
#include <math.h>

#include "kernels.h"
#include "math.h"

namespace fw::FW_ISA {
namespace {

// Calls body(i, vector operation on lanes i …) over [0, n), the last time on a part of a vector.
template <class Body>
inline void over(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t(kLanes));
  if (i < n) body(i, n - i);
}

inline F32 get(const float* x, int64_t count) {
  return count == kLanes ? load<F32>(x) : load_part(x, count, 0);
}
inline void put(float* x, F32 v, int64_t count) {
  if (count == kLanes) {
    store(x, v);
  } else {
    store_part(x, v, count);
  }
}

inline F32 sigmoid(F32 v) { return 1.0f / (1.0f + exponential(-v)); }

// erf to 1.5e-7, Abramowitz and Stegun 7.1.26.
inline F32 error_function(F32 v) {
  const F32 a = v < 0.0f ? -v : v;
  const F32 t = 1.0f / (1.0f + 0.3275911f * a);
  F32 p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const F32 value = 1.0f - p * t * exponential(-a * a);
  return v < 0.0f ? -value : value;
}

inline F32 activate(F32 v, int activation) {
  switch (activation) {
    case FW_SILU:
      return v * sigmoid(v);
    case FW_GELU_TANH:  // 0.5 v (1 + tanh(u)) = v · sigmoid(2u)
      return v * sigmoid(1.5957691216f * (v + 0.044715f * v * v * v));
    case FW_GELU:
      return 0.5f * v * (1.0f + error_function(v * 0.70710678f));
    default:  // FW_RELU
      return v > 0.0f ? v : splat(0.0f);
  }
}

}  // namespace

void normalise(const float* x, int64_t n, const float* weight, const float* bias, float eps,
               int center, float* out) {
  float mean = 0;
  if (center) {
    F32 sums = {};
    over(n, [&](int64_t i, int64_t count) { sums += get(x + i, count); });
    mean = sum(sums) / float(n);
  }
  F32 squares = {};
  over(n, [&](int64_t i, int64_t count) {
    const F32 v = (count == kLanes ? load<F32>(x + i) : load_part(x + i, count, mean)) - mean;
    squares += v * v;
  });
  const float scale = 1.0f / sqrtf(sum(squares) / float(n) + eps);
  over(n, [&](int64_t i, int64_t count) {
    F32 v = (get(x + i, count) - mean) * scale;
    if (weight) v *= get(weight + i, count);
    if (bias) v += get(bias + i, count);
    put(out + i, v, count);
  });
}

void activate(const float* gate, const float* up, int64_t n, int activation, float* out) {
  over(n, [&](int64_t i, int64_t count) {
    F32 v = activate(get(gate + i, count), activation);
    if (up) v *= get(up + i, count);
    put(out + i, v, count);
  });
}

void rotate(float* x, int64_t half, const float* cos, const float* sin) {
  over(half, [&](int64_t i, int64_t count) {
    const F32 a = get(x + i, count), b = get(x + half + i, count);
    const F32 c = get(cos + i, count), s = get(sin + i, count);
    put(x + i, a * c - b * s, count);
    put(x + half + i, b * c + a * s, count);
  });
}

void add(float* x, const float* y, int64_t n) {
  over(n, [&](int64_t i, int64_t count) { put(x + i, get(x + i, count) + get(y + i, count), count); });
}

}  // namespace fw::FW_ISA
