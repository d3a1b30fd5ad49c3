// A streaming read, as a checksum: what memory delivers to a kernel that does almost nothing.
#include "kernels.h"
#include "simd.h"

namespace fw::FW_ISA {

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

}  // namespace fw::FW_ISA
