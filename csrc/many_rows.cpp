// Products of many activation rows: bound by arithmetic. Weights are laid out in panels, a panel
// at a time, and each panel meets all rows.
#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kSummed = 256;  // float32 summed over at a time: a panel of them stays in L1
constexpr int64_t kBeside = 4;    // panels that a strip meets while it is in L1 …
constexpr int64_t kBesideBytes = 256 << 10;  // … if so many stay in L2

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t at_most(int64_t limit, int64_t n) { return n < limit ? n : limit; }

// Activation rows in strips. words: numbers or packed codes of one strip.
struct Strips {
  int64_t count;
  int64_t words;
  int64_t laid_out;  // codes of a row, zeros at the end included
  int64_t blocks;    // of a row, that have one scale
  int32_t* data;
  float* scales;  // [count, blocks, strip_rows]

  // `summed` columns of a strip of float32.
  float* floats(const GemmShape& shape, int64_t strip, int64_t column, int64_t summed) const {
    const int64_t at = (column * count + strip * summed) * shape.strip_rows;
    return reinterpret_cast<float*>(data + at);
  }
};

// Panels, some beside each other, and strips in as many groups as give every thread something.
struct Shares {
  int64_t count, groups, strips_in_group;

  Shares(int64_t panels, int64_t strips, int threads) {
    const int64_t wanted = threads > 1 ? ceil_div(4 * threads, panels) : 1;
    strips_in_group = ceil_div(strips, wanted < strips ? wanted : strips);
    groups = ceil_div(strips, strips_in_group);
    count = panels * groups;
  }
};

int pack_codes(const Call& call, const GemmShape& shape, Outliers& outliers, Strips& strips) {
  const int64_t padded = call.padded(), blocks = strips.blocks;
  int failed = 0;
  parallel_ranges(strips.count, 1, call.threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* x = scratch.take<float>(call.weight.columns);
    int8_t* codes = scratch.take<int8_t>(shape.strip_rows * padded);
    float* scales = scratch.take<float>(blocks);
    if (!x || !codes || !scales) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t first = strip * shape.strip_rows;
      const int64_t rows = at_most(shape.strip_rows, call.m - first);
      float* out = strips.scales + strip * blocks * shape.strip_rows;
      memset(out, 0, size_t(blocks * shape.strip_rows) * sizeof *out);
      for (int64_t i = 0; i < rows; ++i) {
        quantize_row(call, outliers, first + i, x, codes + i * padded, scales);
        for (int64_t b = 0; b < call.blocks(); ++b) out[b * shape.strip_rows + i] = scales[b];
      }
      call.kernels.pack_strip_codes(codes, padded, int(rows), strips.laid_out,
                                    strips.data + strip * strips.words);
    }
  });
  return failed;
}

// Rows of n numbers as float32 strips, kSummed columns after kSummed columns, so that what is met
// together is read in order.
int pack_floats(const Kernels& kernels, const GemmShape& shape, const void* x, int type, int64_t m,
                int64_t n, int threads, Strips& strips) {
  int failed = 0;
  parallel_ranges(strips.count, 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* wide = scratch.take<float>(shape.strip_rows * n);
    if (!wide) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t first = strip * shape.strip_rows;
      const int64_t rows = at_most(shape.strip_rows, m - first);
      kernels.widen(x, type, first * n, rows * n, wide);
      for (int64_t column = 0; column < n; column += kSummed) {
        const int64_t summed = at_most(kSummed, n - column);
        kernels.pack_strip_float(wide + column, n, int(rows), summed,
                                 strips.floats(shape, strip, column, summed));
      }
    }
  });
  return failed;
}

}  // namespace

int many_rows(const Call& call) {
  const fw_matrix& w = call.weight;
  const Kernels& kernels = call.kernels;
  const GemmShape shape = kernels.gemm_shape();
  // Panels and strips are laid out 64 codes at a time.
  const int64_t laid_out = (w.columns + 63) / 64 * 64;
  const int64_t block = w.format == FW_I8 ? laid_out : call.block;
  const int64_t blocks = call.integer ? laid_out / block : 1;
  Scratch scratch(Scratch::kCall);
  Outliers outliers;
  if (!outliers.find(call, scratch)) return -1;

  Strips strips;
  strips.count = ceil_div(call.m, shape.strip_rows);
  strips.words = shape.strip_rows * (call.integer ? laid_out / shape.step : w.columns);
  strips.laid_out = laid_out;
  strips.blocks = blocks;
  strips.data = scratch.take<int32_t>(strips.count * strips.words);
  strips.scales = scratch.take<float>(call.integer ? strips.count * blocks * shape.strip_rows : 1);
  if (!strips.data || !strips.scales) return -1;
  int failed = call.integer ? pack_codes(call, shape, outliers, strips)
                            : pack_floats(kernels, shape, call.x, call.type, call.m, w.columns,
                                          call.threads, strips);
  if (failed) return failed;

  const int64_t summed = call.integer ? laid_out / shape.step : kSummed;  // words of a panel
  const int64_t fit = kBesideBytes / (summed * shape.panel * 4);
  const int64_t beside = fit < 1 ? 1 : fit < kBeside ? fit : kBeside;
  const int64_t width = beside * shape.panel;
  const Shares shares(ceil_div(w.rows, width), strips.count, call.threads);
  const int8_t* table = w.format == FW_4BIT ? int8_table(w.code).codes : nullptr;
  parallel_ranges(shares.count, 1, call.threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* tiles = scratch.take<float>(shares.strips_in_group * shape.strip_rows * width);
    int32_t* panels = scratch.take<int32_t>(width * summed);
    float* scales = scratch.take<float>(width * blocks);
    int32_t* starts = scratch.take<int32_t>(width * blocks);
    if (!tiles || !panels || !scales || !starts) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    int64_t packed = -1;
    for (int64_t share = begin; share < end; ++share) {
      const int64_t row = share / shares.groups * width;
      const int64_t rows = at_most(width, w.rows - row);
      const int64_t first = share % shares.groups * shares.strips_in_group;
      const int64_t count = at_most(shares.strips_in_group, strips.count - first);
      if (call.integer) {
        for (int64_t r = 0; packed != row && r < rows; r += shape.panel) {
          kernels.pack_panel_codes(w, table, row + r, laid_out, block, panels + r * summed,
                                   scales + r * blocks, starts + r * blocks);
        }
        packed = row;
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t r = 0; r < rows; r += shape.panel) {
            kernels.gemm_codes(panels + r * summed, scales + r * blocks, starts + r * blocks,
                               strips.data + (first + i) * strips.words,
                               strips.scales + (first + i) * blocks * shape.strip_rows,
                               block / shape.step, blocks,
                               tiles + i * shape.strip_rows * width + r, width);
          }
        }
      } else {
        memset(tiles, 0, size_t(count * shape.strip_rows * width) * sizeof *tiles);
        for (int64_t column = 0; column < w.columns; column += kSummed) {
          const int64_t n = at_most(kSummed, w.columns - column);
          float* decoded = reinterpret_cast<float*>(panels);
          for (int64_t r = 0; r < rows; r += shape.panel) {
            kernels.pack_panel_rows(w, row + r, column, n, decoded + r * n);
          }
          for (int64_t i = 0; i < count; ++i) {
            const float* strip = strips.floats(shape, first + i, column, n);
            for (int64_t r = 0; r < rows; r += shape.panel) {
              kernels.gemm_float(decoded + r * n, strip, n,
                                 tiles + i * shape.strip_rows * width + r, width);
            }
          }
        }
      }
      const int64_t x_row = first * shape.strip_rows;
      finish(call, outliers, x_row, at_most(count * shape.strip_rows, call.m - x_row), row, rows,
             tiles, width);
    }
  });
  return failed;
}

}  // namespace fw

int fw_linear_backward(const fw_matrix* weight, const void* grad, void* out, int64_t m, int type,
                       int threads) {
  using namespace fw;
  const fw_matrix& w = *weight;
  const Kernels& kernels = fw::kernels();
  const GemmShape shape = kernels.gemm_shape();
  if (m <= 0 || w.columns <= 0) return 0;
  Scratch scratch(Scratch::kCall);
  Strips strips;
  strips.count = ceil_div(m, shape.strip_rows);
  strips.words = shape.strip_rows * w.rows;
  strips.data = scratch.take<int32_t>(strips.count * strips.words);
  if (!strips.data) return -1;
  int failed = pack_floats(kernels, shape, grad, type, m, w.rows, threads, strips);
  if (failed) return failed;
  const int64_t width = shape.backward_columns, padded_m = strips.count * shape.strip_rows;
  parallel_ranges(ceil_div(w.columns, width), 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* tiles = scratch.take<float>(padded_m * width);
    float* panels = scratch.take<float>(kSummed * width);  // [width / panel, summed, panel]
    if (!tiles || !panels) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t column = begin * width; column < end * width; column += width) {
      const int64_t columns = at_most(width, w.columns - column);
      memset(tiles, 0, size_t(padded_m * width) * sizeof *tiles);
      for (int64_t row = 0; row < w.rows; row += kSummed) {
        const int64_t n = at_most(kSummed, w.rows - row);
        kernels.pack_panels_columns(w, row, n, column, columns, panels);
        for (int64_t i = 0; i < strips.count; ++i) {
          const float* strip = strips.floats(shape, i, row, n);
          for (int64_t k = 0; k < columns; k += shape.panel) {
            kernels.gemm_float(panels + k * n, strip, n,
                               tiles + i * shape.strip_rows * width + k, width);
          }
        }
      }
      for (int64_t i = 0; i < m; ++i) {
        kernels.narrow(tiles + i * width, columns, type, out, i * w.columns + column);
      }
    }
  });
  return failed;
}
