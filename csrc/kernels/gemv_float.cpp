// A few rows of float32 activations times rows of weights as float32.
#include "elements.h"
#include "kernels.h"
#include "streams.h"

namespace fw::FW_ISA {
namespace {

// R rows of weights, w_stride elements apart, share each load of M of activations.
// Adds to out[m · out_stride + r · apart].
template <int R, int M, class E>
void dot(E type, const typename E::Stored* w, int64_t w_stride, const float* x, int64_t x_stride,
         int64_t n, float* out, int64_t out_stride, int64_t apart) {
  F32 sums[R][M] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    F32 xs[M];
    FW_UNROLLED
    for (int m = 0; m < M; ++m) xs[m] = load<F32>(x + m * x_stride + k);
    FW_UNROLLED
    for (int r = 0; r < R; ++r) {
      fetch_ahead<M>(w + r * w_stride + k);
      const F32 ws = type.get(w + r * w_stride + k);
      FW_UNROLLED
      for (int m = 0; m < M; ++m) sums[r][m] += ws * xs[m];
    }
  }
  FW_UNROLLED
  for (int r = 0; r < R; ++r) {
    FW_UNROLLED
    for (int m = 0; m < M; ++m) {
      float total = sum(sums[r][m]);
      for (int64_t tail = k; tail < n; ++tail) {
        total += type.get1(w + r * w_stride + tail) * x[m * x_stride + tail];
      }
      out[m * out_stride + r * apart] += total;
    }
  }
}

template <int M, class E>
void rows_times(E type, const typename E::Stored* w, int64_t w_stride, int64_t rows, const float* x,
                int64_t x_stride, int64_t n, float* out, int64_t out_stride) {
  in_streams<kStreams<M>>(0, rows, [&](auto count, int64_t row, int64_t apart) {
    dot<count.value, M>(type, w + row * w_stride, apart * w_stride, x, x_stride, n, out + row,
                        out_stride, apart);
  });
}

template <class E>
void multiply(E type, const typename E::Stored* w, int64_t w_stride, int64_t rows, const float* x,
              int64_t x_stride, int64_t n, int m, float* out, int64_t out_stride) {
  const auto call = [&](auto rows_times, int first) {
    rows_times(type, w, w_stride, rows, x + first * x_stride, x_stride, n,
               out + first * out_stride, out_stride);
  };
  int first = 0;
  for (; first + 4 <= m; first += 4) call(rows_times<4, E>, first);
  if (m - first == 3) call(rows_times<3, E>, first);
  if (m - first == 2) call(rows_times<2, E>, first);
  if (m - first == 1) call(rows_times<1, E>, first);
}

}  // namespace

void gemv_float(const fw_matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                int m, float* tile, int64_t tile_stride) {
  for (int i = 0; i < m; ++i) memset(tile + i * tile_stride, 0, size_t(end - begin) * sizeof *tile);
  if (w.format <= FW_F16) {
    with_elements(w.format, [&](auto type) {
      multiply(type, elements(type, w.data, begin * w.columns), w.columns, end - begin, x, x_stride,
               w.columns, m, tile, tile_stride);
    });
    return;
  }
  constexpr int64_t kRows = 8, kColumns = 512;  // decoded into L1: 16 KiB
  alignas(64) float decoded[kRows * kColumns];
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t rows = end - row < kRows ? end - row : kRows;
    for (int64_t column = 0; column < w.columns; column += kColumns) {
      const int64_t left = w.columns - column, columns = left < kColumns ? left : kColumns;
      for (int64_t r = 0; r < rows; ++r) decode(w, row + r, column, columns, decoded + r * kColumns);
      multiply(Elements<FW_F32>{}, decoded, kColumns, rows, x + column, x_stride, columns, m,
               tile + row - begin, tile_stride);
    }
  }
}

}  // namespace fw::FW_ISA
