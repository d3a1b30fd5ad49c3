// Float32 to codes. Compiled without fused multiply-adds: a product that is rounded on its own is
// part of the definition, and decides ties.
#include "codes.h"
#include "kernels.h"
#include "simd.h"

namespace fw::FW_ISA {
namespace {

constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, ties to even
constexpr int32_t kInfinity = 0x7f800000;
constexpr int64_t kPiece = 64;  // weights quantised together; vectors of every width divide it

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

// How many of the midpoints each number is above: its rank in the sorted codebook.
inline NarrowI8 ranks(F32 v, const float* midpoints) {
  I32 below = {};
  for (int i = 0; i < 15; ++i) below -= v > splat(midpoints[i]);
  return __builtin_convertvector(below, NarrowI8);
}

// The codes of a piece's ranks, two a byte, the first in the high nibble.
template <class Table>
inline void pack(const int8_t* ranks, Table table, uint8_t* codes) {
  typedef uint16_t Pairs __attribute__((vector_size(FW_VECTOR_BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(FW_VECTOR_BYTES / 2)));
  for (int64_t i = 0; i < kPiece; i += FW_VECTOR_BYTES) {
    const Pairs pairs = Pairs(lookup(table, load<I8>(ranks + i)));
    store(codes + i / 2, __builtin_convertvector((pairs << 4 | pairs >> 8) & 255, Bytes));
  }
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
  int8_t signed_order[16];
  memcpy(signed_order, order, sizeof signed_order);
  const auto table = load_table(signed_order);
  const auto piece = [&](const float* values, uint8_t* target) {
    alignas(64) int8_t rank[kPiece];
    for (int64_t i = 0; i < kPiece; i += kLanes) {
      const F32 v = load<F32>(values + i);
      store(rank + i, ranks(whole ? v * reciprocal : v / most, midpoints));
    }
    pack(rank, table, target);
  };
  int64_t begin = 0;
  for (; begin + kPiece <= n; begin += kPiece) piece(x + begin, codes + begin / 2);
  if (begin < n) {
    float values[kPiece] = {};  // zeros fill up the last byte of an odd number
    uint8_t packed[kPiece / 2];
    memcpy(values, x + begin, size_t(n - begin) * sizeof *x);
    piece(values, packed);
    memcpy(codes + begin / 2, packed, size_t(n - begin + 1) / 2);
  }
  return 0;
}

}  // namespace fw::FW_ISA
