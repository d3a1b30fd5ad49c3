// A random weight matrix of any format, and the numbers that it stands for.
#pragma once

#include "numbers.h"

class Weight {
 public:
  fw_matrix matrix{};
  Numbers values;
  double table_error = 0;  // how far the int8 form of a 4-bit weight may be off

  Weight(int format, int64_t rows, int64_t columns)
      : values(size_t(rows * columns)), floats_(format <= FW_F16 ? format : FW_F32, Numbers()) {
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.format = format;
    if (format == FW_I8) {
      make_int8();
    } else if (format == FW_4BIT) {
      make_4bit();
    } else {
      for (double& value : values) value = double(between(-127, 127)) / 64;
      floats_ = Array(format, values);
    }
    matrix.data = format <= FW_F16 ? floats_.data() : codes_.data();
    matrix.absmax = absmax_.data();
    matrix.code = code_.data();
    matrix.absmax_codes = absmax_codes_.empty() ? nullptr : absmax_codes_.data();
    matrix.nested_code = nested_code_.data();
  }
  Weight(const Weight&) = delete;

 private:
  static float fraction() { return float(between(-1000, 1000)) / 1000; }

  void make_int8() {
    absmax_.resize(size_t(matrix.rows));
    for (float& scale : absmax_) scale = one_in(9) ? 0 : float(between(1, 100)) / 50;
    codes_.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const int8_t code = int8_t(one_in(5) ? -128 : between(-127, 127));
      codes_[i] = uint8_t(code);
      values[i] = double(code) * double(absmax_[i / size_t(matrix.columns)]) / 127;
    }
  }

  void make_4bit() {
    const int64_t n = matrix.rows * matrix.columns;
    matrix.blocksize = 32 << between(0, 7);
    const size_t blocks = size_t((n + matrix.blocksize - 1) / matrix.blocksize);
    code_.resize(16);
    for (float& number : code_) number = fraction();
    code_[size_t(between(0, 15))] = one_in(2) ? 1 : -1;
    Numbers scales(blocks);
    if (blocks && one_in(2)) {
      matrix.nested_offset = 1.5f;
      nested_code_.resize(256);
      for (float& number : nested_code_) number = fraction();
      absmax_.resize((blocks + 255) / 256);
      for (float& scale : absmax_) scale = float(between(1, 50)) / 50;
      absmax_codes_.resize(blocks);
      for (size_t b = 0; b < blocks; ++b) {
        absmax_codes_[b] = uint8_t(between(0, 255));
        scales[b] = nested_code_[absmax_codes_[b]] * double(absmax_[b / 256]) + 1.5;
      }
    } else {
      absmax_.resize(blocks);
      for (float& scale : absmax_) scale = one_in(9) ? 0 : float(between(1, 100)) / 50;
      scales.assign(absmax_.begin(), absmax_.end());
    }
    codes_.resize(size_t((n + 1) / 2));
    for (uint8_t& byte : codes_) byte = uint8_t(between(0, 255));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint8_t byte = codes_[i / 2];
      values[i] = code_[i % 2 ? byte & 15 : byte >> 4] * scales[i / size_t(matrix.blocksize)];
    }
    table_error = 2.5 / 128;  // half of the coarsest step, 1 / 64, times the largest scale
  }

  Array floats_;
  std::vector<uint8_t> codes_, absmax_codes_;
  std::vector<float> absmax_, code_, nested_code_;
};
