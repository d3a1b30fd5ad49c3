// The scale of each block of a 4-bit matrix, nested or not.
#pragma once

#include "featherweight.h"
#include "simd.h"

namespace fw::FW_ISA {

constexpr int64_t kNestedBlock = 256;

inline float block_scale(const fw_matrix& w, int64_t block) {
  if (!w.absmax_codes) return w.absmax[block];
  return w.nested_code[w.absmax_codes[block]] * w.absmax[block / kNestedBlock] + w.nested_offset;
}

// table[codes[lane]]. Gathering eight with AVX2 takes no less than loading them.
inline F32 look_up(const float* table, const uint8_t* codes) {
#if defined(__AVX512F__)
  return F32(_mm512_i32gather_ps(_mm512_cvtepu8_epi32(load<__m128i>(codes)), table, 4));
#else
  F32 found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = table[codes[lane]];
  return found;
#endif
}

// The scale of the block that weight first + j · step lies in, for j < n: in buffer[n], or where
// they stand one after the other already.
inline const float* block_scales(const fw_matrix& w, int64_t first, int64_t step, int64_t n,
                                 float* buffer) {
  const int shift = __builtin_ctzll(uint64_t(w.blocksize));  // a power of two
  if (step != w.blocksize) {  // several steps a block, or a block that began in the row before
    int64_t block = -1;
    float scale = 0;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t next = (first + j * step) >> shift;
      if (next != block) scale = block_scale(w, block = next);
      buffer[j] = scale;
    }
    return buffer;
  }
  const int64_t block = first >> shift;
  if (!w.absmax_codes) return w.absmax + block;
  for (int64_t j = 0; j < n;) {  // runs with one nested absmax
    const int64_t left = kNestedBlock - (block + j) % kNestedBlock;
    const int64_t end = left < n - j ? j + left : n;
    const float absmax = w.absmax[(block + j) / kNestedBlock];
    for (; j + kLanes <= end; j += kLanes) {
      store(buffer + j, look_up(w.nested_code, w.absmax_codes + block + j) * absmax + w.nested_offset);
    }
    for (; j < end; ++j) {
      buffer[j] = w.nested_code[w.absmax_codes[block + j]] * absmax + w.nested_offset;
    }
  }
  return buffer;
}

}  // namespace fw::FW_ISA
