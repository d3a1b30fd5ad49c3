// Random numbers, the same at every run, and memory for them that is not a byte too long.
#pragma once

#include <math.h>
#include <string.h>

#include <cmath>
#include <random>
#include <vector>

#include "featherweight.h"

typedef std::vector<double> Numbers;

inline std::mt19937 generator;

inline int64_t between(int64_t low, int64_t high) {
  return low + int64_t(generator() % uint64_t(high - low + 1));
}
inline bool one_in(int64_t n) { return between(1, n) == 1; }

inline const int kTypes[] = {FW_F32, FW_BF16, FW_F16};
inline const double kEpsilon[] = {0x1p-23, 0x1p-7, 0x1p-10};  // of each type

// n numbers of a type. AddressSanitizer sees the first step past the end; where the memory begins
// one number earlier, no vector in it is aligned.
class Array {
 public:
  Array(int type, size_t n)
      : type_(type), size_(type == FW_F32 ? 4 : 2), offset_(one_in(2) ? size_ : 0),
        bytes_(offset_ + n * size_, 0xff) {}

  // Values that the type holds exactly: small multiples of 1/64, infinity, NaN.
  Array(int type, const Numbers& numbers) : Array(type, numbers.size()) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      const float number = float(numbers[i]);
      uint32_t bits;
      memcpy(&bits, &number, 4);
      const uint16_t half = type == FW_F16 ? to_half(bits) : uint16_t(bits >> 16);
      memcpy(at(i), type == FW_F32 ? static_cast<const void*>(&bits) : &half, size_);
    }
  }

  void* data() { return bytes_.data() + offset_; }
  const void* data() const { return bytes_.data() + offset_; }

  double operator[](size_t i) const {
    uint32_t bits = 0;
    memcpy(&bits, const_cast<Array*>(this)->at(i), size_);
    if (type_ == FW_F16) return from_half(bits);
    if (type_ == FW_BF16) bits <<= 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
  }

 private:
  uint8_t* at(size_t i) { return bytes_.data() + offset_ + i * size_; }

  static uint16_t to_half(uint32_t bits) {
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x7f800000) return sign | 0x7c00 | uint16_t(bits > 0x7f800000);
    return sign | uint16_t(bits ? (bits - 0x38000000) >> 13 : 0);
  }

  static double from_half(uint32_t bits) {
    const int exponent = int(bits >> 10 & 31), sign = bits & 0x8000 ? -1 : 1;
    const double fraction = bits & 1023;
    if (exponent == 31) return fraction > 0 ? NAN : sign * INFINITY;
    return sign * ldexp(exponent ? 1024 + fraction : fraction, exponent ? exponent - 25 : -24);
  }

  int type_;
  size_t size_, offset_;
  std::vector<uint8_t> bytes_;
};
