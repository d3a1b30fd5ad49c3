// Products of int8 codes, summed exactly in int32, and look-ups of 4-bit codes.
#pragma once

#include "simd.h"

namespace fw::FW_ISA {

// Bytes times bytes, four neighbouring products to a lane. vpdpbusd wants one side unsigned: there
// unsigned_side() adds 128 to it, and the sums hold kOffset · Σ(other side) too much.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kOffset = 128;
#else
constexpr int kOffset = 0;
#endif

inline I8 unsigned_side(I8 codes) {
  if constexpr (kOffset) return codes ^ int8_t(-128);
  return codes;
}

#if defined(__AVX512VNNI__)

inline I32 multiply_add(I32 sums, I8 unsigned_codes, I8 codes) {
  return I32(_mm512_dpbusd_epi32(__m512i(sums), __m512i(unsigned_codes), __m512i(codes)));
}
inline I8 lookup(__m512i table, I8 nibbles) {
  return I8(_mm512_shuffle_epi8(table, __m512i(nibbles)));
}
inline __m512i load_table(const int8_t* table) {
  return _mm512_broadcast_i32x4(load<__m128i>(table));
}

#elif defined(__AVX2__)

// |w| · sign(x, w): with |x| ≤ 127 a pair of products is at most 2 · 128 · 127, which int16 holds.
inline I32 multiply_add(I32 sums, I8 w, I8 x) {
#if defined(__AVXVNNI__)
  return I32(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(w), __m256i(x)));
#else
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(__m256i(w)), _mm256_sign_epi8(__m256i(x), __m256i(w)));
  return sums + I32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
inline I8 lookup(__m256i table, I8 nibbles) {
  return I8(_mm256_shuffle_epi8(table, __m256i(nibbles)));
}
inline __m256i load_table(const int8_t* table) {
  return _mm256_broadcastsi128_si256(load<__m128i>(table));
}

#else

inline I32 multiply_add(I32 sums, I8 w, I8 x) {
  for (int i = 0; i < FW_VECTOR_BYTES; ++i) sums[i / 4] += w[i] * x[i];
  return sums;
}
inline I8 lookup(I8 table, I8 nibbles) {
  I8 codes;
  for (int i = 0; i < FW_VECTOR_BYTES; ++i) codes[i] = table[nibbles[i]];
  return codes;
}
inline I8 load_table(const int8_t* table) { return load<I8>(table); }

#endif

// The first `count` codes of source, the others 0.
inline I8 load_codes(const void* source, int64_t count) {
#if defined(__AVX512BW__)
  return I8(_mm512_maskz_loadu_epi8(~__mmask64(0) >> (64 - count), source));
#else
  I8 codes = {};
  memcpy(&codes, source, size_t(count));
  return codes;
#endif
}

// The two nibbles of each byte: first (high), second (low).
inline I8 high_nibbles(I8 bytes) {
  typedef uint16_t Words __attribute__((vector_size(FW_VECTOR_BYTES)));
  return I8(Words(bytes) >> 4) & int8_t(15);
}
inline I8 low_nibbles(I8 bytes) { return bytes & int8_t(15); }

}  // namespace fw::FW_ISA
