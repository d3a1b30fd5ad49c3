// A few rows of int8 activations times rows of int8 weights.
#include "codes.h"
#include "kernels.h"
#include "streams.h"

namespace fw::FW_ISA {
namespace {

constexpr int kCodes = FW_VECTOR_BYTES;

// R rows of weights, w_stride apart, share each load of M of activations.
// out[m][r] = the exact integer products.
template <int R, int M>
void dot(const int8_t* w, int64_t w_stride, const int8_t* x, int64_t x_stride, int64_t n,
         int32_t out[M][R]) {
  I32 sums[R][M] = {};
  const auto step = [&](int64_t k, const auto& codes) {
    I8 xs[M];
    FW_UNROLLED
    for (int m = 0; m < M; ++m) xs[m] = load<I8>(x + m * x_stride + k);
    FW_UNROLLED
    for (int r = 0; r < R; ++r) {
      fetch_ahead<M>(w + r * w_stride + k);
      const I8 ws = unsigned_side(codes(w + r * w_stride + k));
      FW_UNROLLED
      for (int m = 0; m < M; ++m) sums[r][m] = multiply_add(sums[r][m], ws, xs[m]);
    }
  };
  int64_t k = 0;
  for (; k + kCodes <= n; k += kCodes) step(k, load<I8>);
  // x is padded with zeros to a whole vector.
  if (k < n) step(k, [&](const int8_t* from) { return load_codes(from, n - k); });
  FW_UNROLLED
  for (int r = 0; r < R; ++r) {
    FW_UNROLLED
    for (int m = 0; m < M; ++m) out[m][r] = int32_t(sum(U32(sums[r][m])));
  }
}

// Rows row, row + apart, …
template <int R, int M>
void block(const fw_matrix& w, int64_t row, int64_t apart, const int8_t* x, int64_t x_stride,
           const float* scales, const int32_t* sums, float* tile, int64_t tile_stride) {
  int32_t dots[M][R];
  const int8_t* codes = static_cast<const int8_t*>(w.data) + row * w.columns;
  dot<R, M>(codes, apart * w.columns, x, x_stride, w.columns, dots);
  FW_UNROLLED
  for (int m = 0; m < M; ++m) {
    FW_UNROLLED
    for (int r = 0; r < R; ++r) {
      // The offset in unsigned arithmetic: the sum may have wrapped, and wraps back here.
      const int32_t exact = int32_t(uint32_t(dots[m][r]) - uint32_t(kOffset) * uint32_t(sums[m]));
      const float scale = w.absmax[row + r * apart] * (1 / 127.0f);
      tile[m * tile_stride + r * apart] = float(exact) * scales[m] * scale;
    }
  }
}

template <int M>
void rows_times(const fw_matrix& w, int64_t begin, int64_t end, const int8_t* x, int64_t x_stride,
                const float* scales, const int32_t* sums, float* tile, int64_t tile_stride) {
  const auto rows = [&](auto count, int64_t row, int64_t apart) {
    block<count.value, M>(w, row, apart, x, x_stride, scales, sums, tile + (row - begin),
                          tile_stride);
  };
  in_streams<kStreams<M>>(begin, end, rows);
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
