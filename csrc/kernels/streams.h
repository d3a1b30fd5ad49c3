// The order in which rows of a weight are read: memory is what a few rows of activations wait for.
#pragma once

#include <type_traits>

#include "simd.h"

namespace fw::FW_ISA {

// Calls rows(count, row, apart) for `count` rows at a time: row, row + apart, … Each of so many
// streams is read from front to end, far from the others, so that the processor fetches ahead in
// all of them. Neighbouring rows at a time would be streams that end with each row.
template <int R, class Rows>
inline void in_streams(int64_t begin, int64_t end, const Rows& rows) {
  const int64_t apart = (end - begin) / R;
  for (int64_t row = begin; row < begin + apart; ++row) {
    rows(std::integral_constant<int, R>{}, row, apart);
  }
  for (int64_t row = begin + R * apart; row < end; ++row) {
    rows(std::integral_constant<int, 1>{}, row, 0);
  }
}

// With several rows of activations there is too much to do between loads for the processor to look
// as far ahead by itself.
template <int M>
inline void fetch_ahead(const void* at) {
  if constexpr (M > 1) prefetch(static_cast<const char*>(at) + 512);
}

// Rows of weights at a time for M of activations: their sums are to stay in registers.
template <int M>
constexpr int kStreams = M <= 2 || FW_VECTOR_BYTES == 64 ? 4 : 2;

}  // namespace fw::FW_ISA
