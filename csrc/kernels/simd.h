// The widest vectors of the ISA being compiled. What the compiler's vector types can say is said
// with them; intrinsics only where an instruction has no other name.
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

// Before a loop of few rounds over an array of vectors: unrolled late, GCC leaves it in memory.
#define FW_UNROLLED _Pragma("GCC unroll 8")

namespace fw::FW_ISA {

constexpr int kLanes = FW_VECTOR_BYTES / 4;  // of 32 bits

typedef float F32 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef uint64_t U64 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));  // as many as there are lanes
typedef int8_t I8 __attribute__((vector_size(FW_VECTOR_BYTES)));
typedef int8_t NarrowI8 __attribute__((vector_size(kLanes)));  // as many as there are lanes

template <class Vector>
inline Vector load(const void* source) {
  Vector vector;
  memcpy(&vector, source, sizeof vector);  // an unaligned load
  return vector;
}

template <class Vector>
inline void store(void* target, Vector vector) {
  memcpy(target, &vector, sizeof vector);
}

// What the processor fetches ahead by itself ends at a page, and begins anew with each row.
inline void prefetch(const void* address) { __builtin_prefetch(address); }
inline void prefetch_l2(const void* address) { __builtin_prefetch(address, 0, 2); }

inline F32 splat(float value) { return value - F32{}; }  // + would turn −0 into 0
inline I32 splat(int32_t value) { return value - I32{}; }
inline F32 to_float(I32 vector) { return __builtin_convertvector(vector, F32); }

// Zero- and sign-extended to 32 bits. GCC 12 takes four instructions for what is one.
inline U32 widen(U16 vector) {
#if defined(__AVX512F__)
  return U32(_mm512_cvtepu16_epi32(__m256i(vector)));
#elif defined(__AVX2__)
  return U32(_mm256_cvtepu16_epi32(__m128i(vector)));
#else
  return __builtin_convertvector(vector, U32);
#endif
}
inline I32 widen(NarrowI8 vector) {
#if defined(__AVX512F__)
  return I32(_mm512_cvtepi8_epi32(__m128i(vector)));
#elif defined(__AVX2__)
  int64_t bits;
  memcpy(&bits, &vector, 8);
  return I32(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits)));
#else
  return __builtin_convertvector(vector, I32);
#endif
}

// Sum of the lanes, modulo 2^32 or 2^64 where they are integers: halves upon halves, since lane
// after lane would wait for each addition.
template <class Vector>
inline auto sum(Vector vector) {
  constexpr int kCount = sizeof vector / sizeof vector[0];
  if constexpr (kCount == 2) {
    return vector[0] + vector[1];
  } else {
    typedef decltype(vector[0] + vector[0]) Lane;
    typedef Lane Half __attribute__((vector_size(sizeof vector / 2)));
    Half halves[2];
    memcpy(halves, &vector, sizeof vector);
    return sum(halves[0] + halves[1]);
  }
}

}  // namespace fw::FW_ISA
