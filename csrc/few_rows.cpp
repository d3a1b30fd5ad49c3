// A product of a few activation rows: memory-bound, weights are read once, as they are stored.
#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kTileRows = 1024;      // of the weight: their results stay in the cache
constexpr int64_t kAtOnce = 4;           // rows of activations for which a weight is read once …
constexpr int64_t kAgainBytes = 262144;  // … with more, so much of it at a time: it stays in L2
constexpr int64_t kSerialBytes = 32768;  // below, waking other threads costs more than it saves

int64_t row_bytes(const fw_matrix& w) {
  constexpr int kBits[] = {32, 16, 16, 8, 4};
  return w.columns * kBits[w.format] / 8;
}

int64_t tile_rows(const Call& call) {
  if (call.m <= kAtOnce) return kTileRows;
  const int64_t rows = kAgainBytes / (row_bytes(call.weight) + 1);
  return rows < 16 ? 16 : rows < kTileRows ? rows : kTileRows;
}

// Activations of a call, ready for the kernels; calls of the same activations share them.
struct Activations {
  Outliers outliers;
  const float* floats = nullptr;  // [m, columns]
  const int8_t* codes = nullptr;  // [m, padded], or as gemv_4bit wants them: [m, 2 · padded]
  const float* scales = nullptr;  // [m, blocks]
  int32_t sums[kFewRows] = {};    // of the codes of a row
  const int8_t* table = nullptr;  // what the nibbles of weights stand for

  bool prepare(const Call& call, Scratch& scratch);
};

bool Activations::prepare(const Call& call, Scratch& scratch) {
  const fw_matrix& w = call.weight;
  const int64_t m = call.m, padded = call.padded(), blocks = call.blocks();
  if (!outliers.find(call, scratch)) return false;
  if (!call.integer) {
    floats = static_cast<const float*>(call.x);
    if (call.type == FW_F32) return true;
    float* wide = scratch.take<float>(m * w.columns);
    if (wide) call.kernels.widen(call.x, call.type, 0, m * w.columns, wide);
    floats = wide;
    return wide;
  }
  float* x = scratch.take<float>(w.columns);
  int8_t* rows = scratch.take<int8_t>(m * padded);
  float* row_scales = scratch.take<float>(m * blocks);
  int8_t* arranged = scratch.take<int8_t>(w.format == FW_4BIT ? m * padded * 2 : 1);
  if (!x || !rows || !row_scales || !arranged) return false;
  for (int64_t i = 0; i < m; ++i) {
    quantize_row(call, outliers, i, x, rows + i * padded, row_scales + i * blocks);
    if (w.format == FW_4BIT) {
      call.kernels.arrange_4bit(rows + i * padded, padded, arranged + i * padded * 2);
    } else {
      for (int64_t k = 0; k < w.columns; ++k) sums[i] += rows[i * padded + k];
    }
  }
  if (w.format == FW_4BIT) table = int8_table(w.code).codes;
  codes = w.format == FW_4BIT ? arranged : rows;
  scales = row_scales;
  return true;
}

void multiply(const Call& call, const Activations& x, int64_t begin, int64_t end, float* tile) {
  const fw_matrix& w = call.weight;
  const int m = int(call.m);
  if (!call.integer) {
    call.kernels.gemv_float(w, begin, end, x.floats, w.columns, m, tile, kTileRows);
  } else if (w.format == FW_I8) {
    call.kernels.gemv_i8(w, begin, end, x.codes, call.padded(), x.scales, x.sums, m, tile,
                         kTileRows);
  } else {
    call.kernels.gemv_4bit(w, x.table, call.block, begin, end, x.codes,
                           call.padded() * 2, x.scales, call.blocks(), m, tile, kTileRows);
  }
  finish(call, x.outliers, 0, call.m, begin, end - begin, tile, kTileRows);
}

}  // namespace

bool alike(const Call& a, const Call& b) {
  const bool codes = a.integer && a.weight.format == FW_4BIT;
  return a.x == b.x && a.integer == b.integer && a.block == b.block &&
         a.threshold == b.threshold && a.flags == b.flags &&
         a.weight.columns == b.weight.columns &&
         (!a.integer || a.weight.format == b.weight.format) &&
         (!codes || !memcmp(a.weight.code, b.weight.code, 16 * sizeof(float)));
}

int few_rows(const Call* calls, int count) {
  const Call& first = calls[0];
  Scratch scratch(Scratch::kCall);
  Activations x;
  if (!x.prepare(first, scratch)) return -1;
  int64_t rows = 0, bytes = 0;
  for (int i = 0; i < count; ++i) {
    rows += (calls[i].weight.rows + 15) / 16 * 16;
    bytes += calls[i].weight.rows * row_bytes(calls[i].weight);
  }
  int failed = 0;
  parallel_ranges(rows, 16, bytes < kSerialBytes ? 1 : first.threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* tile = scratch.take<float>(first.m * kTileRows);
    if (!tile) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    int64_t start = 0;  // of this weight among all rows
    for (int i = 0; i < count; ++i) {
      const int64_t there = calls[i].weight.rows;
      const int64_t low = begin > start ? begin - start : 0;
      const int64_t high = end - start < there ? end - start : there;
      const int64_t most = tile_rows(calls[i]);
      const int64_t tiles = high > low ? (high - low + most - 1) / most : 0;
      for (int64_t t = 0; t < tiles; ++t) {
        multiply(calls[i], x, low + (high - low) * t / tiles, low + (high - low) * (t + 1) / tiles,
                 tile);
      }
      start += (there + 15) / 16 * 16;
    }
  });
  return failed;
}

}  // namespace fw
