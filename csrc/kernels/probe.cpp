// What the processor can do at most: a streaming read, and multiply-adds in registers.
#include "codes.h"
#include "kernels.h"

namespace fw::FW_ISA {

// As a checksum: what memory delivers to a kernel that does almost nothing.
uint64_t sum_words(const uint8_t* data, int64_t nbytes) {
  constexpr int kStreams = 8;  // enough chains to hide the latency of an add
  constexpr int64_t kStep = kStreams * FW_VECTOR_BYTES;
  U64 sums[kStreams] = {};
  int64_t at = 0;
  for (; at + kStep <= nbytes; at += kStep) {
    for (int i = 0; i < kStreams; ++i) sums[i] += load<U64>(data + at + i * FW_VECTOR_BYTES);
  }
  uint64_t total = 0;
  for (int i = 0; i < kStreams; ++i) total += sum(sums[i]);
  for (; at + 8 <= nbytes; at += 8) total += load<uint64_t>(data + at);
  uint64_t tail = 0;
  memcpy(&tail, data + at, size_t(nbytes - at));
  return total + tail;
}

constexpr int kChains = 12;  // covers two units of 4 cycles, and fits 16 registers

int64_t multiply_add_f32(int64_t rounds, float* sink) {
  F32 chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = splat(*sink + float(i));
  const F32 scale = splat(0.5f), offset = splat(1.0f);  // tends to 2: never huge, never denormal
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * scale + offset;
  }
  for (int i = 0; i < kChains; ++i) *sink += sum(chains[i]);
  return rounds * kChains * kLanes * 2;
}

int64_t multiply_add_i8(int64_t rounds, const int8_t* codes, int32_t* sink) {
  I32 chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = splat(*sink + i);  // equal ones would become one
  const I8 w = load<I8>(codes);
  for (int64_t round = 0; round < rounds; ++round) {
    const I8 x = load<I8>(codes + (round & 1) * FW_VECTOR_BYTES);  // or it would be hoisted
    for (int i = 0; i < kChains; ++i) chains[i] = multiply_add(chains[i], w, x);
  }
  for (int i = 0; i < kChains; ++i) *sink += int32_t(sum(U32(chains[i])));
  return rounds * kChains * FW_VECTOR_BYTES * 2;
}

}  // namespace fw::FW_ISA
