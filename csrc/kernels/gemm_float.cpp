// Many rows of float32 activations times a panel of weights decoded to float32.
//
// Activations come in strips of kStripRows rows, interleaved column by column; weights in panels
// of kPanel outputs, interleaved by the index that is summed over. A strip and a panel meet in
// registers, as in every GEMM since Goto (doi 10.1145/1356052.1356053).
#include "kernels.h"
#include "panel.h"

namespace fw::FW_ISA {

GemmShape gemm_shape() { return {kPanel, kStripRows, kStep, kBackwardColumns}; }

void pack_strip_float(const float* rows, int64_t stride, int count, int64_t n, float* strip) {
  int64_t done = 0;
  if constexpr (kStripRows >= 8) {  // the first eight rows, and the last eight
    const float* last = rows + (kStripRows - 8) * stride;
    for (; count == kStripRows && done + 8 <= n; done += 8) {
      float* out = strip + done * kStripRows;
      transpose_8x8(rows + done, stride * 4, out, kStripRows * 4);
      transpose_8x8(last + done, stride * 4, out + kStripRows - 8, kStripRows * 4);
    }
  }
  for (int m = 0; m < kStripRows; ++m) {
    for (int64_t k = done; k < n; ++k) {
      strip[k * kStripRows + m] = m < count ? rows[m * stride + k] : 0;
    }
  }
}

void pack_panel_rows(const fw_matrix& w, int64_t row, int64_t column, int64_t n, float* panel) {
  constexpr int64_t kChunk = 256;
  alignas(64) float decoded[kPanel][kChunk];
  const int64_t rows = w.rows - row < kPanel ? w.rows - row : kPanel;
  if (rows < kPanel) memset(decoded, 0, sizeof decoded);
  for (int64_t chunk = 0; chunk < n; chunk += kChunk) {
    const int64_t left = n - chunk, columns = left < kChunk ? left : kChunk;
    for (int64_t r = 0; r < rows; ++r) decode(w, row + r, column + chunk, columns, decoded[r]);
    float* out = panel + chunk * kPanel;
    int64_t k = 0;
    for (; k + 8 <= columns; k += 8) {
      for (int r = 0; r < kPanel; r += 8) {
        transpose_8x8(decoded[r] + k, kChunk * 4, out + k * kPanel + r, kPanel * 4);
      }
    }
    for (; k < columns; ++k) {
      for (int r = 0; r < kPanel; ++r) out[k * kPanel + r] = decoded[r][k];
    }
  }
}

void pack_panels_columns(const fw_matrix& w, int64_t row, int64_t n, int64_t column,
                         int64_t columns, float* panels) {
  alignas(64) float decoded[kBackwardColumns];
  memset(decoded, 0, sizeof decoded);
  for (int64_t r = 0; r < n; ++r) {
    decode(w, row + r, column, columns, decoded);
    for (int64_t k = 0; k < columns; k += kPanel) {
      memcpy(panels + k * n + r * kPanel, decoded + k, kPanel * sizeof(float));
    }
  }
}

void gemm_float(const float* panel, const float* strip, int64_t n, float* tile, int64_t stride) {
  F32 sums[kStripRows][2];
  for (int m = 0; m < kStripRows; ++m) {
    for (int half = 0; half < 2; ++half) {
      sums[m][half] = load<F32>(tile + m * stride + half * kLanes);
    }
  }
  for (int64_t k = 0; k < n; ++k) {
    const F32 first = load<F32>(panel + k * kPanel), second = load<F32>(panel + k * kPanel + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kStripRows; ++m) {
      const F32 x = splat(strip[k * kStripRows + m]);
      sums[m][0] += x * first;
      sums[m][1] += x * second;
    }
  }
  for (int m = 0; m < kStripRows; ++m) {
    for (int half = 0; half < 2; ++half) {
      store(tile + m * stride + half * kLanes, sums[m][half]);
    }
  }
}

}  // namespace fw::FW_ISA
