// Rows of int8 weights times one int8 vector, exact in int32.
#include "kernels.h"
#include "simd.h"

namespace fw::FW_ISA {
namespace {

constexpr int kBlock = 8;

// R rows share each load of x, and hide the latency of one another's sums.
template <int R>
void dot(const int8_t* w, const int32_t* row_sums, const int8_t* x, int32_t* out, int64_t n) {
  I32 sums[R] = {};
  int64_t k = 0;
  for (; k + kStepI8 <= n; k += kStepI8) {
    const I8 xs = activations(x + k);
    for (int r = 0; r < R; ++r) sums[r] = multiply_add(sums[r], load<I8>(w + r * n + k), xs);
  }
  for (int r = 0; r < R; ++r) {
    // In unsigned arithmetic: with an offset the partial sum may wrap, and wraps back here.
    uint32_t total = sum(sums[r]) - kOffsetI8 * uint32_t(row_sums[r]);
    for (int64_t tail = k; tail < n; ++tail) {
      total += uint32_t(w[r * n + tail] * (x[tail] + kOffsetI8));
    }
    out[r] = int32_t(total);
  }
}

}  // namespace

void dot_i8(const int8_t* w, const int32_t* row_sums, const int8_t* x, int32_t* out, int64_t rows,
            int64_t n) {
  int64_t row = 0;
  for (; row + kBlock <= rows; row += kBlock) dot<kBlock>(w + row * n, row_sums + row, x, out + row, n);
  for (; row < rows; ++row) dot<1>(w + row * n, row_sums + row, x, out + row, n);
}

}  // namespace fw::FW_ISA
