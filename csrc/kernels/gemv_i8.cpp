// A few rows of int8 activations times rows of int8 weights.
#include "codes.h"
#include "kernels.h"

namespace fw::FW_ISA {
namespace {

constexpr int kCodes = FW_VECTOR_BYTES;

// R rows of weights and M of activations share each load, and hide the latency of one another's
// sums. out[m][r] = the exact integer products.
template <int R, int M>
void dot(const int8_t* w, const int8_t* x, int64_t x_stride, int64_t n, int32_t out[M][R]) {
  constexpr int64_t kLine = 64;  // codes of a cache line
  I32 sums[R][M] = {};
  const auto step = [&](int64_t k) {
    I8 xs[M];
    for (int m = 0; m < M; ++m) xs[m] = load<I8>(x + m * x_stride + k);
    for (int r = 0; r < R; ++r) {
      const I8 ws = unsigned_side(load<I8>(w + r * n + k));
      for (int m = 0; m < M; ++m) sums[r][m] = multiply_add(sums[r][m], ws, xs[m]);
    }
  };
  int64_t k = 0;
  for (; k + kLine <= n; k += kLine) {
    for (int r = 0; r < R; ++r) prefetch(w + (R + r) * n + k);  // the next rows
    for (int64_t i = 0; i < kLine; i += kCodes) step(k + i);
  }
  for (; k + kCodes <= n; k += kCodes) step(k);
  if (k < n) {
    for (int r = 0; r < R; ++r) {
      int8_t tail[kCodes] = {};
      memcpy(tail, w + r * n + k, size_t(n - k));
      const I8 ws = unsigned_side(load<I8>(tail));
      // x is padded with zeros to a whole vector.
      for (int m = 0; m < M; ++m) {
        sums[r][m] = multiply_add(sums[r][m], ws, load<I8>(x + m * x_stride + k));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) out[m][r] = int32_t(sum(U32(sums[r][m])));
  }
}

template <int R, int M>
void block(const fw_matrix& w, int64_t row, const int8_t* x, int64_t x_stride, const float* scales,
           const int32_t* sums, float* tile, int64_t tile_stride) {
  int32_t dots[M][R];
  dot<R, M>(static_cast<const int8_t*>(w.data) + row * w.columns, x, x_stride, w.columns, dots);
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      // The offset in unsigned arithmetic: the sum may have wrapped, and wraps back here.
      const int32_t exact = int32_t(uint32_t(dots[m][r]) - uint32_t(kOffset) * uint32_t(sums[m]));
      tile[m * tile_stride + r] = float(exact) * scales[m] * (w.absmax[row + r] * (1 / 127.0f));
    }
  }
}

template <int M>
void rows_times(const fw_matrix& w, int64_t begin, int64_t end, const int8_t* x, int64_t x_stride,
                const float* scales, const int32_t* sums, float* tile, int64_t tile_stride) {
  constexpr int kRows = M == 1 ? 8 : M == 2 ? 4 : 2;
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    block<kRows, M>(w, row, x, x_stride, scales, sums, tile + (row - begin), tile_stride);
  }
  for (; row < end; ++row) {
    block<1, M>(w, row, x, x_stride, scales, sums, tile + (row - begin), tile_stride);
  }
}

}  // namespace

void gemv_i8(const fw_matrix& w, int64_t begin, int64_t end, const int8_t* x, int64_t x_stride,
             const float* scales, const int32_t* sums, int m, float* tile, int64_t tile_stride) {
  const auto call = [&](auto rows_times, int first) {
    rows_times(w, begin, end, x + first * x_stride, x_stride, scales + first, sums + first,
               tile + first * tile_stride, tile_stride);
  };
  int first = 0;
  for (; first + 4 <= m; first += 4) call(rows_times<4>, first);
  if (m - first == 3) call(rows_times<3>, first);
  if (m - first == 2) call(rows_times<2>, first);
  if (m - first == 1) call(rows_times<1>, first);
}

}  // namespace fw::FW_ISA
