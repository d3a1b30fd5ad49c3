// Calls all of the C interface on every instruction set that runs here, to be watched by
// AddressSanitizer and UBSan. Buffers are exactly as long as the interface says; results are
// compared with plain loops in double.
#include <stdio.h>

#include <algorithm>

#include "decoder.h"
#include "numbers.h"
#include "weight.h"

// Memory is handed out full of NaN: what a kernel reads and nobody wrote shows in the results.
extern "C" const char* __asan_default_options() {
  return "max_malloc_fill_size=1073741824:malloc_fill_byte=255:detect_stack_use_after_return=1";
}

namespace {

int failures = 0;

void expect(bool holds, const char* what, const fw_matrix& w, int64_t m, int type, double found,
            double expected) {
  if (holds || ++failures > 20) return;
  printf("%s, %s: format %d [%lld, %lld], blocksize %lld, %s; %lld rows of type %d: %g, not %g\n",
         fw_isa_name(fw_isa_active()), what, w.format, (long long)w.rows, (long long)w.columns,
         (long long)w.blocksize, w.absmax_codes ? "nested" : "not nested", (long long)m, type,
         found, expected);
}

// [m, columns]: eighths, now and then an outlier, a row of zeros, what is not finite.
Numbers any_rows(int64_t m, int64_t columns) {
  Numbers x(size_t(m * columns));
  for (double& number : x) number = double(between(-100, 100)) / 8;
  if (x.empty()) return x;
  const auto any = [&]() -> double& { return x[size_t(between(0, m * columns - 1))]; };
  if (one_in(2)) any() = 64;
  if (one_in(4)) std::fill_n(x.begin() + between(0, m - 1) * columns, columns, 0);
  if (one_in(6)) any() = one_in(2) ? NAN : INFINITY;
  return x;
}

// A sum of products and what it may be off: roundings of float32, and of the result.
struct Sum {
  double exact = 0, terms = 0;
  void add(double product) {
    exact += product;
    terms += fabs(product);
  }
  bool holds(double found, int type, double more = 0) const {
    if (!std::isfinite(exact)) return !std::isfinite(found);
    return fabs(found - exact) <= 1e-5 * terms + kEpsilon[type] * fabs(exact) + more;
  }
};

void check_linear(const Weight& weight, int64_t m, int type, int threads) {
  const fw_matrix& w = weight.matrix;
  const Numbers x = any_rows(m, w.columns);
  const Array given(type, x);
  Array out(type, size_t(m * w.rows));
  std::vector<float> bias(size_t(one_in(2) ? w.rows : 0));
  for (float& number : bias) number = float(between(-9, 9));
  const float threshold = one_in(2) ? 0 : one_in(4) ? 0.5f : 20.0f;
  const int flags = (one_in(3) ? FW_EXACT : 0) | (one_in(3) ? FW_PER_BATCH : 0);
  const int failed = fw_linear(&w, given.data(), out.data(), bias.empty() ? nullptr : bias.data(),
                               m, type, threshold, flags, threads);
  expect(!failed, "fw_linear fails", w, m, type, failed, 0);
  const bool rounds = w.format == FW_I8 || (w.format == FW_4BIT && !(flags & FW_EXACT));
  for (int64_t i = 0; i < m; ++i) {
    const double* row = x.data() + i * w.columns;
    double largest = 0, total = 0;
    for (int64_t k = 0; k < w.columns; ++k) {
      const bool outlier = w.format == FW_I8 && threshold > 0 && fabs(row[k]) >= threshold;
      if (!outlier) largest = std::max(largest, fabs(row[k]));
      total += fabs(row[k]);
    }
    for (int64_t n = 0; n < w.rows; ++n) {
      const double* values = weight.values.data() + n * w.columns;
      double weights = 0;
      Sum sum;
      if (!bias.empty()) sum.add(bias[size_t(n)]);
      for (int64_t k = 0; k < w.columns; ++k) {
        sum.add(row[k] * values[k]);
        weights += fabs(values[k]);
      }
      // Half a step of every activation, and what the table of the codebook is off.
      const double steps = 1.01 * (largest / 254 * weights + weight.table_error * total);
      const double found = out[size_t(i * w.rows + n)];
      expect(sum.holds(found, type, rounds ? steps : 0), "fw_linear", w, m, type, found, sum.exact);
    }
  }
}

// Rows that are codes already, with some columns in float32 beside them.
void check_linear_codes(const Weight& weight, int64_t m, int type, int threads) {
  const fw_matrix& w = weight.matrix;
  std::vector<int8_t> codes(size_t(m * w.columns));
  for (int8_t& code : codes) code = int8_t(between(-127, 127));
  if (one_in(2) && !codes.empty()) codes[size_t(between(0, m * w.columns - 1))] = -128;
  std::vector<float> absmax(static_cast<size_t>(m)), bias(size_t(one_in(2) ? w.rows : 0));
  for (float& scale : absmax) scale = one_in(9) ? 0 : float(between(1, 100)) / 50;
  for (float& number : bias) number = float(between(-9, 9));
  const int64_t count = w.columns && one_in(2) ? between(1, 70) : 0;
  std::vector<int64_t> columns(static_cast<size_t>(count));
  for (int64_t& column : columns) column = between(0, w.columns - 1);
  std::vector<float> outliers(size_t(m * count));
  for (float& number : outliers) number = float(between(-100, 100)) / 8;
  Array out(type, size_t(m * w.rows));
  const int failed = fw_linear_codes(
      &w, codes.data(), absmax.data(), count ? columns.data() : nullptr,
      count ? outliers.data() : nullptr, count, out.data(), bias.empty() ? nullptr : bias.data(), m,
      type, threads);
  expect(!failed, "fw_linear_codes fails", w, m, type, failed, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t n = 0; n < w.rows; ++n) {
      const double* values = weight.values.data() + n * w.columns;
      Sum sum;
      if (!bias.empty()) sum.add(bias[size_t(n)]);
      for (int64_t k = 0; k < w.columns; ++k) {
        sum.add(codes[size_t(i * w.columns + k)] * double(absmax[size_t(i)]) / 127 * values[k]);
      }
      for (int64_t c = 0; c < count; ++c) {
        sum.add(double(outliers[size_t(i * count + c)]) * values[columns[size_t(c)]]);
      }
      const double found = out[size_t(i * w.rows + n)];
      expect(sum.holds(found, type), "fw_linear_codes", w, m, type, found, sum.exact);
    }
  }
}

void check_backward(const Weight& weight, int64_t m, int type, int threads) {
  const fw_matrix& w = weight.matrix;
  const Numbers grad = any_rows(m, w.rows);
  const Array given(type, grad);
  Array out(type, size_t(m * w.columns));
  const int failed = fw_linear_backward(&w, given.data(), out.data(), m, type, threads);
  expect(!failed, "fw_linear_backward fails", w, m, type, failed, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < w.columns; ++k) {
      Sum sum;
      for (int64_t n = 0; n < w.rows; ++n) {
        sum.add(grad[size_t(i * w.rows + n)] * weight.values[size_t(n * w.columns + k)]);
      }
      const double found = out[size_t(i * w.columns + k)];
      expect(sum.holds(found, type), "fw_linear_backward", w, m, type, found, sum.exact);
    }
  }
}

void check_decode(const Weight& weight, int type, int threads) {
  const fw_matrix& w = weight.matrix;
  Array out(type, weight.values.size());
  fw_decode(&w, out.data(), type, threads);
  for (size_t i = 0; i < weight.values.size(); ++i) {
    const double exact = weight.values[i], error = fabs(out[i] - exact);
    expect(error <= kEpsilon[type] * fabs(exact) + 1e-6, "fw_decode", w, 0, type, out[i], exact);
  }
}

// A prompt at once, in pieces and token by token comes out the same.
void check_decoder(int threads) {
  Decoder decoder;
  const fw_decoder& d = decoder.sizes;
  const int64_t batch = between(1, 3), length = between(1, one_in(4) ? 300 : 50);
  std::vector<float> x(size_t(batch * length * d.hidden));
  for (float& number : x) number = float(between(-100, 100)) / 64;
  std::vector<float> angles(size_t(length * (d.rotary_dim / 2)));
  for (float& angle : angles) angle = float(between(-314, 314)) / 100;
  std::vector<uint8_t> seen(size_t(batch * length), 1);
  for (int64_t i = between(0, length); i > 0; --i) seen[size_t(between(0, batch * length - 1))] = 0;
  const auto whole = decoder.run(batch, length, length, x, angles, seen, threads);
  for (const int64_t step : {int64_t(1), between(1, length)}) {
    const auto parts = decoder.run(batch, length, step, x, angles, seen, threads);
    expect(parts.size() == x.size() && whole.size() == x.size(), "fw_decoder_layers fails",
           decoder.layers[0].q.weight, length, FW_F32, 0, 0);
    for (size_t i = 0; i < parts.size() && i < whole.size(); ++i) {
      // The last norm is of the last call alone: only its tokens have the same form.
      const int64_t t = int64_t(i) / d.hidden % length;
      if (t < (length - 1) / step * step) continue;
      const double found = parts[i], expected = whole[i];
      // Sums in another order may round what is cached the other way.
      const double tolerance = d.cache == FW_F32 ? 1e-3 : d.cache == FW_F16 ? 1e-2 : 0.1;
      expect(fabs(found - expected) <= tolerance * (1 + fabs(expected)), "fw_decoder_layers",
             decoder.layers[0].q.weight, length, FW_F32, found, expected);
    }
  }
}

void check_quantize_rows(int64_t rows, int64_t columns, int type, int threads) {
  fw_matrix w{};
  w.rows = rows;
  w.columns = columns;
  const Numbers x = any_rows(rows, columns);
  const Array given(type, x);
  std::vector<int8_t> codes(x.size(), -1);
  std::vector<float> absmax(size_t(rows), -1);
  const float threshold = one_in(2) ? 0 : 8;
  std::vector<uint8_t> apart(size_t(columns), 0);
  const int failed = fw_quantize_rows(given.data(), type, rows, columns, threshold, codes.data(),
                                      absmax.data(), apart.data(), threads);
  expect(!failed, "fw_quantize_rows fails", w, rows, type, failed, 0);
  for (size_t i = 0; i < x.size(); ++i) {
    const double scale = double(absmax[i / size_t(columns)]) / 127, found = codes[i] * scale;
    const bool outlier = threshold > 0 && fabs(x[i]) >= threshold;
    bool holds = fabs(found - x[i]) <= 0.501 * scale;
    if (outlier) holds = apart[i % size_t(columns)];
    if (outlier || std::isnan(scale)) holds = (holds || !outlier) && codes[i] == 0;
    expect(holds, "fw_quantize_rows", w, rows, type, found, x[i]);
  }
}

void check_quantize_4bit(int64_t n, int type, int threads) {
  fw_matrix w{};
  w.rows = 1;
  w.columns = n;
  w.blocksize = 32 << between(0, 7);
  Numbers x = any_rows(1, n);
  const bool refused = !std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
  const Array given(type, x);
  std::vector<float> levels(16), midpoints(15), absmax(size_t((n + w.blocksize - 1) / w.blocksize));
  std::vector<uint8_t> order(16), codes(size_t((n + 1) / 2), 0xff);
  for (float& level : levels) level = float(between(-1000, 1000)) / 1000;
  std::sort(levels.begin(), levels.end());
  for (size_t i = 0; i < 15; ++i) midpoints[i] = (levels[i] + levels[i + 1]) / 2;
  for (size_t i = 0; i < 16; ++i) order[i] = uint8_t((i * 7 + 3) % 16);  // any permutation
  const int failed = fw_quantize_4bit(given.data(), type, n, w.blocksize, midpoints.data(),
                                      order.data(), codes.data(), absmax.data(), threads);
  expect(failed == -refused, "fw_quantize_4bit refuses", w, 0, type, failed, -refused);
  for (size_t i = 0; i < x.size() && !refused; ++i) {
    const int code = i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
    const double scale = absmax[i / size_t(w.blocksize)];
    double least = INFINITY, found = NAN;
    for (size_t level = 0; level < 16; ++level) {
      const double distance = fabs(levels[level] * scale - x[i]);
      least = std::min(least, distance);
      if (order[level] == code) found = distance;
    }
    expect(found <= least + 1e-5, "fw_quantize_4bit", w, 0, type, found, least);
  }
}

void check_sum_words(int64_t nbytes, int threads) {
  std::vector<uint8_t> data(size_t(nbytes), 0);
  uint64_t total = 0;
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = uint8_t(between(0, 255));
    total += uint64_t(data[i]) << i % 8 * 8;
  }
  const uint64_t found = fw_sum_words(data.data(), nbytes, threads);
  expect(found == total, "fw_sum_words", {}, nbytes, 0, double(found), double(total));
}

void check_shape(int format, int64_t rows, int64_t columns, int64_t m) {
  const Weight weight(format, rows, columns);
  const int type = kTypes[between(0, 2)], threads = int(between(1, 2));
  check_linear(weight, m, type, threads);
  if (format == FW_I8 && columns < 131072) check_linear_codes(weight, m, type, threads);
  check_backward(weight, m, type, threads);
  check_decode(weight, type, threads);
}

int64_t any_columns() {
  if (one_in(60)) return between(1, 3) * 4096 + between(-3, 3) * 32;
  return one_in(3) ? 32 * between(1, 12) : between(1, 300);
}

void check_all() {
  const int formats[] = {FW_F32, FW_BF16, FW_F16, FW_I8, FW_4BIT, FW_4BIT};
  for (int round = 0; round < 120; ++round) {
    for (const int format : formats) {
      const int64_t columns = any_columns(), rows = columns > 4000 ? between(1, 20) : between(1, 70);
      check_shape(format, rows, columns, one_in(2) ? between(1, 8) : between(0, 40));
    }
    const int type = kTypes[between(0, 2)], threads = int(between(1, 2));
    check_quantize_rows(between(0, 20), between(0, 300), type, threads);
    check_quantize_4bit(one_in(2) ? between(0, 300) : between(1, 20000), type, threads);
    check_sum_words(between(0, 20000), threads);
    check_decoder(threads);
  }
  for (const int format : formats) {
    // Past the sizes at which loops begin anew, and several threads have something to do.
    check_shape(format, 1100, 64, 3);
    check_shape(format, 530, 96, 14);
    for (const int64_t m : {1, 12}) {
      check_shape(format, 5, 0, m);
      check_shape(format, 0, 5, m);
    }
  }
  check_shape(FW_I8, 3, 131072, 2);  // the longest rows whose products int32 holds
  check_shape(FW_I8, 2, 131073, 9);
  for (const int threads : {1, 2}) {
    expect(fw_probe_f32(3, threads) == threads * fw_probe_f32(3, 1), "fw_probe_f32", {}, 0, 0, 0, 0);
    expect(fw_probe_i8(3, threads) == threads * fw_probe_i8(3, 1), "fw_probe_i8", {}, 0, 0, 0, 0);
  }
}

}  // namespace

int main() {
  printf("%s, %s OpenMP\n", fw_compiler(), fw_has_openmp() ? "with" : "without");
  for (int isa = 0; isa < fw_isa_count(); ++isa) {
    const char* name = fw_isa_name(isa);
    if (fw_isa_use(isa)) {
      printf("%s: %s\n", name, fw_isa_built(isa) ? "not run by this CPU" : "not built");
      continue;
    }
    const int before = failures;
    generator.seed(unsigned(isa));
    check_all();
    printf("%s: %d wrong results\n", name, failures - before);
    fflush(stdout);
  }
  return failures != 0;
}
