// A product of a few activation rows: memory-bound, weights are read once, as they are stored.
#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kTileRows = 256;       // of the weight: their results stay in L1
constexpr int64_t kSerialBytes = 32768;  // below, waking other threads costs more than it saves

int64_t weight_bytes(const fw_matrix& w) {
  constexpr int kBits[] = {32, 16, 16, 8, 4};
  return w.rows * w.columns * kBits[w.format] / 8;
}

// multiply(begin, end, tile): rows begin … end of the weight with all activations.
template <class Multiply>
int share_out(const Call& call, const Outliers& outliers, const Multiply& multiply) {
  int failed = 0;
  const int threads = weight_bytes(call.weight) < kSerialBytes ? 1 : call.threads;
  parallel_ranges(call.weight.rows, 16, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* tile = scratch.take<float>(call.m * kTileRows);
    if (!tile) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t row = begin; row < end; row += kTileRows) {
      const int64_t stop = row + kTileRows < end ? row + kTileRows : end;
      multiply(row, stop, tile);
      finish(call, outliers, 0, call.m, row, stop - row, tile, kTileRows);
    }
  });
  return failed;
}

}  // namespace

int few_rows(const Call& call) {
  const fw_matrix& w = call.weight;
  const Kernels& kernels = call.kernels;
  Scratch scratch(Scratch::kCall);
  Outliers outliers;
  if (!outliers.find(call, scratch)) return -1;
  const int64_t m = call.m, padded = call.padded(), blocks = call.blocks();
  if (!call.integer) {
    const float* x = static_cast<const float*>(call.x);
    if (call.type != FW_F32) {
      float* wide = scratch.take<float>(m * w.columns);
      if (!wide) return -1;
      kernels.widen(call.x, call.type, 0, m * w.columns, wide);
      x = wide;
    }
    return share_out(call, outliers, [&](int64_t begin, int64_t end, float* tile) {
      kernels.gemv_float(w, begin, end, x, w.columns, int(m), tile, kTileRows);
    });
  }
  float* x = scratch.take<float>(w.columns);
  int8_t* codes = scratch.take<int8_t>(m * padded);
  float* scales = scratch.take<float>(m * blocks);
  int8_t* arranged = scratch.take<int8_t>(m * padded * 2);
  if (!x || !codes || !scales || !arranged) return -1;
  int32_t sums[kFewRows] = {};
  for (int64_t i = 0; i < m; ++i) {
    quantize_row(call, outliers, i, x, codes + i * padded, scales + i * blocks);
    if (w.format == FW_4BIT) {
      kernels.arrange_4bit(codes + i * padded, padded, arranged + i * padded * 2);
    } else {
      for (int64_t k = 0; k < w.columns; ++k) sums[i] += codes[i * padded + k];
    }
  }
  if (w.format == FW_I8) {
    return share_out(call, outliers, [&](int64_t begin, int64_t end, float* tile) {
      kernels.gemv_i8(w, begin, end, codes, padded, scales, sums, int(m), tile, kTileRows);
    });
  }
  const Table& table = int8_table(w.code);
  return share_out(call, outliers, [&](int64_t begin, int64_t end, float* tile) {
    kernels.gemv_4bit(w, table.codes, call.block, begin, end, arranged, padded * 2, scales, blocks,
                      int(m), tile, kTileRows);
  });
}

}  // namespace fw
