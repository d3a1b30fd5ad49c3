// Numbers of each element type as float32 vectors, and back.
#pragma once

#include "featherweight.h"
#include "simd.h"

namespace fw::FW_ISA {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31;
  const uint32_t fraction = half & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  float value;
  if (exponent == 31) bits |= 0x7f800000;  // infinity, NaN
  if (exponent == 0) {                     // zero, subnormal
    value = float(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (bits < 0x38800000) {                       // below 2^-14: subnormal
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // lets the addition round to multiples of 2^-24
    memcpy(&bits, &magnitude, 4);
    return sign | uint16_t(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);  // to nearest, ties to even
  return sign | uint16_t((bits - 0x38000000) >> 13);
}

// kType: FW_F32, FW_BF16 or FW_F16. get() and put() move kLanes numbers, get1() and put1() one.
template <int kType>
struct Elements;

template <>
struct Elements<FW_F32> {
  typedef float Stored;
  static F32 get(const Stored* source) { return load<F32>(source); }
  static float get1(const Stored* source) { return *source; }
  static void put(Stored* target, F32 values) { store(target, values); }
  static void put1(Stored* target, float value) { *target = value; }
};

template <>
struct Elements<FW_BF16> {
  typedef uint16_t Stored;
  static F32 get(const Stored* source) {
    return F32(widen(load<U16>(source)) << 16);
  }
  static float get1(const Stored* source) {
    const uint32_t bits = uint32_t(*source) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  static void put(Stored* target, F32 values) {
    const U32 bits = U32(values);
    const U32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    const U32 nan = U32(values != values);
    store(target, __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), U16));
  }
  static void put1(Stored* target, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *target = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

template <>
struct Elements<FW_F16> {
  typedef uint16_t Stored;
  static F32 get(const Stored* source) {
#if defined(__AVX512F__)
    return F32(_mm512_cvtph_ps(load<__m256i>(source)));
#elif defined(__F16C__)
    return F32(_mm256_cvtph_ps(load<__m128i>(source)));
#else
    F32 values;
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = half_to_float(source[lane]);
    return values;
#endif
  }
  static float get1(const Stored* source) { return half_to_float(*source); }
  static void put(Stored* target, F32 values) {
#if defined(__AVX512F__)
    store(target, _mm512_cvtps_ph(__m512(values), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    store(target, _mm256_cvtps_ph(__m256(values), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < kLanes; ++lane) target[lane] = float_to_half(values[lane]);
#endif
  }
  static void put1(Stored* target, float value) { *target = float_to_half(value); }
};

// Codes of one scale, only read.
template <>
struct Elements<FW_I8> {
  typedef int8_t Stored;
  static F32 get(const Stored* source) { return to_float(widen(load<NarrowI8>(source))); }
  static float get1(const Stored* source) { return *source; }
};

// Calls body(Elements<type>{}): the type, known when the kernel runs, chooses compiled code.
template <class Body>
inline void with_elements(int type, const Body& body) {
  switch (type) {
    case FW_F32: return body(Elements<FW_F32>{});
    case FW_BF16: return body(Elements<FW_BF16>{});
    default: return body(Elements<FW_F16>{});
  }
}

// With codes too.
template <class Body>
inline void with_numbers(int type, const Body& body) {
  if (type == FW_I8) return body(Elements<FW_I8>{});
  with_elements(type, body);
}

template <class E>
inline const typename E::Stored* elements(E, const void* data, int64_t index) {
  return static_cast<const typename E::Stored*>(data) + index;
}

}  // namespace fw::FW_ISA
