// Float32 to codes. Compiled without fused multiply-adds: a product that is rounded on its own is
// part of the definition, and decides ties.
#include "kernels.h"
#include "simd.h"

namespace fw::FW_ISA {
namespace {

constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, ties to even
constexpr int32_t kInfinity = 0x7f800000;

// Bits of the largest magnitude; at least kInfinity if any number is infinite or NaN.
int32_t largest(const float* x, int64_t n) {
  I32 most = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const I32 bits = load<I32>(x + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = most[lane] > bits ? most[lane] : bits;
  for (; i < n; ++i) {
    int32_t one;
    memcpy(&one, x + i, 4);
    one &= 0x7fffffff;
    bits = one > bits ? one : bits;
  }
  return bits;
}

float from_bits(int32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline F32 clamp(F32 v) {
  v = v < 1.0f ? v : splat(1.0f);
  return v > -1.0f ? v : splat(-1.0f);
}

}  // namespace

void quantize_codes(const float* x, int64_t n, int64_t block, int8_t* codes, float* absmax) {
  for (int64_t begin = 0; begin < n; begin += block, ++absmax) {
    const int64_t end = begin + block < n ? begin + block : n;
    const int32_t bits = largest(x + begin, end - begin);
    *absmax = bits < kInfinity ? from_bits(bits) : __builtin_nanf("");
    if (!(*absmax >= 1e-35f)) {  // below, 127 / absmax may be infinite
      memset(codes + begin, 0, size_t(end - begin));
      continue;
    }
    const float scale = 1.0f / *absmax * 127.0f;  // in the order in which torch divides 127
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const F32 rounded = load<F32>(x + i) * scale + kRound - kRound;
      store(codes + i, __builtin_convertvector(__builtin_convertvector(rounded, I32), NarrowI8));
    }
    for (; i < end; ++i) codes[i] = int8_t(x[i] * scale + kRound - kRound);
  }
}

int quantize_4bit(const float* x, int64_t n, bool whole, const float* midpoints,
                  const uint8_t* order, uint8_t* codes, float* absmax) {
  const int32_t bits = largest(x, n);
  if (bits >= kInfinity) return -1;
  const float floor = 1e-38f, most = from_bits(bits) > floor ? from_bits(bits) : floor;
  // A last block that is not whole is divided, others multiplied by a reciprocal: the rounding of
  // bitsandbytes, byte for byte.
  *absmax = whole ? from_bits(bits) : most;
  const float reciprocal = 1.0f / most;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    alignas(64) float values[kLanes] = {};
    const int64_t left = n - begin, count = left < kLanes ? left : kLanes;
    memcpy(values, x + begin, size_t(count) * sizeof *x);
    const F32 v = clamp(whole ? load<F32>(values) * reciprocal : load<F32>(values) / most);
    I32 below = {};
    for (int i = 0; i < 15; ++i) below -= v > splat(midpoints[i]);
    for (int lane = 0; lane < count; lane += 2) {
      *codes++ = uint8_t(order[below[lane]] << 4 | order[below[lane + 1]]);
    }
  }
  return 0;
}

}  // namespace fw::FW_ISA
