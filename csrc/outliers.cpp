// Activations become codes, and those that would spoil the scale of a row are kept apart.
#include <math.h>

#include "linear.h"

namespace fw {

const Table& int8_table(const float* code) {
  static thread_local struct {
    float code[16];
    Table table;
  } last = {};
  if (!memcmp(last.code, code, sizeof last.code) && last.table.step != 0) return last.table;
  memcpy(last.code, code, sizeof last.code);
  last.table = {{}, NAN};  // stays so for a codebook with NaN: results are NaN too
  double most = 0, least_error = INFINITY;
  for (int i = 0; i < 16; ++i) most = fmax(most, fabs(double(code[i])));
  for (int largest = 127; largest >= 64; --largest) {
    const double step = most > 0 ? most / largest : 1;
    double error = 0, codes[16];
    for (int i = 0; i < 16; ++i) {
      codes[i] = nearbyint(code[i] / step);
      const double difference = code[i] - codes[i] * step;
      error += difference * difference;
    }
    if (!(error < least_error - 1e-12)) continue;  // less is the rounding of the codebook itself
    least_error = error;
    last.table.step = float(step);
    for (int i = 0; i < 16; ++i) last.table.codes[i] = int8_t(codes[i]);
  }
  return last.table;
}

bool Outliers::find(const Call& call, Scratch& scratch) {
  if (call.codes) {
    columns_ = call.outlier_columns;
    count_ = call.outlier_count;
    if (count_) values_ = scratch.take<float>(call.m * count_);
    if (values_) memcpy(values_, call.outliers, size_t(call.m * count_) * sizeof *values_);
    return !count_ || values_;
  }
  if (call.weight.format != FW_I8 || !call.integer || !(call.threshold > 0)) return true;
  const int64_t columns = call.weight.columns;
  threshold_ = call.threshold;
  per_batch_ = call.flags & FW_PER_BATCH;
  int64_t* numbers = scratch.take<int64_t>(columns);
  uint8_t* found = scratch.take<uint8_t>(columns);
  if (!numbers || !found) return false;
  memset(found, 0, size_t(columns));
  bool failed = false;
  parallel_ranges(call.m, 8, call.threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* buffer = scratch.take<float>(columns);
    if (!buffer) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t m = begin; m < end; ++m) {
      const float* x = floats(call, m, buffer);
      int any = 0;
      for (int64_t k = 0; k < columns; ++k) any |= fabsf(x[k]) >= threshold_;
      for (int64_t k = 0; any && k < columns; ++k) {
        if (fabsf(x[k]) >= threshold_) __atomic_store_n(&found[k], uint8_t(1), __ATOMIC_RELAXED);
      }
    }
  });
  for (int64_t k = 0; k < columns; ++k) {
    if (found[k]) numbers[count_++] = k;
  }
  columns_ = numbers;
  if (count_) values_ = scratch.take<float>(call.m * count_);
  return !failed && (!count_ || values_);
}

void Outliers::take(int64_t m, float* x) {
  float* values = values_ + m * count_;
  for (int64_t i = 0; i < count_; ++i) {
    float& number = x[columns_[i]];
    const bool is_outlier = fabsf(number) >= threshold_;
    values[i] = is_outlier || per_batch_ ? number : 0;
    if (is_outlier) number = 0;
  }
}

void Outliers::clear(int8_t* codes) const {
  for (int64_t i = 0; per_batch_ && i < count_; ++i) codes[columns_[i]] = 0;
}

void Outliers::add(const Call& call, int64_t first, int64_t m, int64_t row, int64_t rows,
                   float* tile, int64_t stride) const {
  constexpr int64_t kColumns = 32, kRows = 32;
  const int8_t* codes = static_cast<const int8_t*>(call.weight.data);
  float weights[kColumns][kRows];
  for (int64_t column = 0; column < count_; column += kColumns) {
    const int64_t columns = count_ - column < kColumns ? count_ - column : kColumns;
    for (int64_t begin = 0; begin < rows; begin += kRows) {
      const int64_t count = rows - begin < kRows ? rows - begin : kRows;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = row + begin + r;
        const float scale = call.weight.absmax[at] * (1 / 127.0f);
        for (int64_t c = 0; c < columns; ++c) {
          weights[c][r] = float(codes[at * call.weight.columns + columns_[column + c]]) * scale;
        }
      }
      for (int64_t i = 0; i < m; ++i) {
        const float* values = values_ + (first + i) * count_ + column;
        float* out = tile + i * stride + begin;
        for (int64_t c = 0; c < columns; ++c) {
          if (values[c] == 0) continue;
          for (int64_t r = 0; r < count; ++r) out[r] += values[c] * weights[c][r];
        }
      }
    }
  }
}

const float* floats(const Call& call, int64_t m, float* buffer) {
  const int64_t n = call.weight.columns;
  if (call.type == FW_F32) return static_cast<const float*>(call.x) + m * n;
  call.kernels.widen(call.x, call.type, m * n, n, buffer);
  return buffer;
}

void quantize_row(const Call& call, Outliers& outliers, int64_t m, float* x, int8_t* codes,
                  float* scales) {
  const int64_t columns = call.weight.columns, padded = call.padded();
  if (call.codes) {
    memcpy(codes, call.codes + m * columns, size_t(columns));
    scales[0] = call.absmax[m];
  } else {
    const float* row = floats(call, m, x);
    if (outliers.any()) {
      if (row != x) memcpy(x, row, size_t(columns) * sizeof *x);
      outliers.take(m, x);
      row = x;
    }
    call.kernels.quantize_codes(row, columns, call.block, codes, scales);
    outliers.clear(codes);
  }
  memset(codes + columns, 0, size_t(padded - columns));
  const float step = call.weight.format == FW_4BIT ? int8_table(call.weight.code).step : 1;
  for (int64_t b = 0; b < call.blocks(); ++b) scales[b] *= (1 / 127.0f) * step;
}

void add_rest(const Call& call, const Outliers& outliers, int64_t first, int64_t m, int64_t row,
              int64_t rows, float* tile, int64_t stride) {
  outliers.add(call, first, m, row, rows, tile, stride);
  for (int64_t i = 0; call.bias && i < m; ++i) {
    for (int64_t r = 0; r < rows; ++r) tile[i * stride + r] += call.bias[row + r];
  }
}

void finish(const Call& call, const Outliers& outliers, int64_t first, int64_t m, int64_t row,
            int64_t rows, float* tile, int64_t stride) {
  add_rest(call, outliers, first, m, row, rows, tile, stride);
  for (int64_t i = 0; i < m; ++i) {
    call.kernels.narrow(tile + i * stride, rows, call.type, call.out,
                        (first + i) * call.weight.rows + row);
  }
}

}  // namespace fw
