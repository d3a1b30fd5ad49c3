// How activations and weights are interleaved for products of many rows.
#pragma once

#include "simd.h"

namespace fw::FW_ISA {

// Two vectors of outputs for each of kStripRows rows: as many sums as leave registers for operands.
constexpr int kPanel = 2 * kLanes;
constexpr int kStripRows = FW_VECTOR_BYTES == 64 ? 12 : FW_VECTOR_BYTES == 32 ? 6 : 4;
constexpr int64_t kBackwardColumns = 128;  // of the weight, decoded at a time going backward

// Weights of one output that one lane multiplies at once: four int8, or two int16 where int8
// products are not summed exactly.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kStep = 4;
#else
constexpr int kStep = 2;
#endif

// 8 rows of 8 words of 32 bits, strides in bytes.
inline void transpose_8x8(const void* source, int64_t stride, void* target, int64_t target_stride) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
#if defined(__AVX2__)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load<__m256>(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    store(to + i * target_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store(to + (i + 4) * target_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) memcpy(to + j * target_stride + i * 4, from + i * stride + j * 4, 4);
  }
#endif
}

}  // namespace fw::FW_ISA
