// The widest vectors of the ISA being compiled, and the int8 multiply-add, which alone differs.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define FW_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FW_VECTOR_BYTES 32
#else
#define FW_VECTOR_BYTES 16
#endif

namespace fw::FW_ISA {

typedef float F32 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef uint64_t U64 __attribute__((vector_size(FW_VECTOR_BYTES)));
constexpr int kLanesF32 = FW_VECTOR_BYTES / 4;
constexpr int kLanesU64 = FW_VECTOR_BYTES / 8;

template <class Vector>
inline Vector load(const void* source) {
  Vector vector;
  memcpy(&vector, source, sizeof vector);  // an unaligned load
  return vector;
}

// Int8 products: I8 holds kStepI8 codes, I32 their running sums. multiply_add() adds
// w · (x + kOffsetI8) to the sums, so that a row's result lacks −kOffsetI8 · Σw.

#if defined(__AVX512VNNI__)

typedef __m512i I8;
typedef int32_t I32 __attribute__((vector_size(64)));
constexpr int kStepI8 = 64;
constexpr int kOffsetI8 = 128;  // vpdpbusd wants one side unsigned
inline I8 activations(const int8_t* x) {
  return _mm512_xor_si512(load<I8>(x), _mm512_set1_epi8(-128));
}
inline I32 multiply_add(I32 sums, I8 w, I8 x) {
  return I32(_mm512_dpbusd_epi32(__m512i(sums), x, w));
}

#elif defined(__AVX2__)

typedef __m256i I8;
typedef int32_t I32 __attribute__((vector_size(32)));
constexpr int kStepI8 = 32;
#if defined(__AVXVNNI__)
constexpr int kOffsetI8 = 128;
inline I8 activations(const int8_t* x) {
  return _mm256_xor_si256(load<I8>(x), _mm256_set1_epi8(-128));
}
inline I32 multiply_add(I32 sums, I8 w, I8 x) {
  return I32(_mm256_dpbusd_avx_epi32(__m256i(sums), x, w));
}
#else
constexpr int kOffsetI8 = 0;
inline I8 activations(const int8_t* x) { return load<I8>(x); }
// |w| · sign(x, w): a pair of products is at most 2 · 128 · 127, which int16 holds.
inline I32 multiply_add(I32 sums, I8 w, I8 x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return sums + I32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#else  // one code at a time, for the compiler to vectorise

typedef int8_t I8;
typedef int32_t I32;
constexpr int kStepI8 = 1;
constexpr int kOffsetI8 = 0;
inline I8 activations(const int8_t* x) { return *x; }
inline I32 multiply_add(I32 sums, I8 w, I8 x) { return sums + int32_t(w) * int32_t(x); }

#endif

// Sum of the lanes, modulo 2^32 or 2^64 where they are integers.
inline float sum(F32 vector) {
  float total = 0;
  for (int lane = 0; lane < kLanesF32; ++lane) total += vector[lane];
  return total;
}

inline uint64_t sum(U64 vector) {
  uint64_t total = 0;
  for (int lane = 0; lane < kLanesU64; ++lane) total += vector[lane];
  return total;
}

inline uint32_t sum(I32 sums) {
  uint32_t parts[sizeof sums / 4], total = 0;
  memcpy(parts, &sums, sizeof sums);
  for (uint32_t part : parts) total += part;
  return total;
}

}  // namespace fw::FW_ISA
