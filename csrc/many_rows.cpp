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

// How the panels of a weight and the strips are shared out: `beside` panels with a group of strips
// each time. The longest of the threads' shares decides, which lays out its panels too.
struct Shares {
  int64_t beside = 1, across = 1, groups = 1, strips_in_group = 1;

  Shares(int64_t panels, int64_t most_beside, int64_t strips, int threads) {
    constexpr int64_t kLayingOut = 4;  // strips that a panel could have met meanwhile
    int64_t least = INT64_MAX;
    for (int64_t wanted = 1; wanted <= at_most(strips, 2 * threads); ++wanted) {
      const int64_t in_group = ceil_div(strips, wanted), there = ceil_div(strips, in_group);
      for (int64_t width = most_beside; width > 0; --width) {
        const int64_t sets = ceil_div(panels, width);
        const int64_t cost = ceil_div(sets * there, threads) * width * (in_group + kLayingOut);
        if (cost >= least) continue;
        least = cost;
        beside = width, across = sets, groups = there, strips_in_group = in_group;
      }
    }
  }
  int64_t count() const { return across * groups; }
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

// A product of strips and the panels of one weight, for one thread.
struct Product {
  const Call& call;
  const GemmShape& shape;
  const Outliers& outliers;
  const Strips& strips;
  int64_t block;   // codes that share a scale
  int64_t width;   // outputs of the panels that are beside each other
  int64_t summed;  // words of a panel
  float* tiles;    // [strips, strip_rows, width]
  int32_t* panels;
  float* scales;
  int32_t* starts;

  void codes(int64_t first, int64_t count, int64_t row, int64_t rows) const;
  void floats(int64_t first, int64_t count, int64_t row, int64_t rows) const;
  void lay_out_codes(int64_t row, int64_t rows) const {
    const fw_matrix& w = call.weight;
    const int8_t* table = w.format == FW_4BIT ? int8_table(w.code).codes : nullptr;
    for (int64_t r = 0; r < rows; r += shape.panel) {
      call.kernels.pack_panel_codes(w, table, row + r, strips.laid_out, block, panels + r * summed,
                                    scales + r * strips.blocks, starts + r * strips.blocks);
    }
  }
};

// Whole strips of float32 results are written where they belong, others by way of a tile.
void Product::codes(int64_t first, int64_t count, int64_t row, int64_t rows) const {
  const int64_t blocks = strips.blocks, strip_rows = shape.strip_rows, n = call.weight.rows;
  const bool in_place = call.type == FW_F32 && rows % shape.panel == 0;
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t x_row = i * strip_rows, there = at_most(strip_rows, call.m - x_row);
    const bool direct = in_place && there == strip_rows;
    float* out = static_cast<float*>(call.out) + x_row * n + row;
    float* to = direct ? out : tiles + (i - first) * strip_rows * width;
    for (int64_t r = 0; r < rows; r += shape.panel) {
      call.kernels.gemm_codes(panels + r * summed, scales + r * blocks, starts + r * blocks,
                              strips.data + i * strips.words,
                              strips.scales + i * blocks * strip_rows, block / shape.step, blocks,
                              to + r, direct ? n : width);
    }
    for (int64_t m = 0; in_place && !direct && m < there; ++m) {
      memcpy(out + m * n, to + m * width, size_t(rows) * sizeof *out);
    }
  }
  const int64_t x_row = first * strip_rows, m = at_most(count * strip_rows, call.m - x_row);
  if (in_place) {
    add_rest(call, outliers, x_row, m, row, rows, static_cast<float*>(call.out) + x_row * n + row,
             n);
  } else {
    finish(call, outliers, x_row, m, row, rows, tiles, width);
  }
}

void Product::floats(int64_t first, int64_t count, int64_t row, int64_t rows) const {
  const int64_t strip_rows = shape.strip_rows, columns = call.weight.columns;
  float* decoded = reinterpret_cast<float*>(panels);
  memset(tiles, 0, size_t(count * strip_rows * width) * sizeof *tiles);
  for (int64_t column = 0; column < columns; column += kSummed) {
    const int64_t n = at_most(kSummed, columns - column);
    for (int64_t r = 0; r < rows; r += shape.panel) {
      call.kernels.pack_panel_rows(call.weight, row + r, column, n, decoded + r * n);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* strip = strips.floats(shape, first + i, column, n);
      for (int64_t r = 0; r < rows; r += shape.panel) {
        call.kernels.gemm_float(decoded + r * n, strip, n, tiles + i * strip_rows * width + r,
                                width);
      }
    }
  }
  const int64_t x_row = first * strip_rows;
  finish(call, outliers, x_row, at_most(count * strip_rows, call.m - x_row), row, rows, tiles,
         width);
}

// What threads [begin, end) of call.threads have to do.
int multiply(const Call& call, const GemmShape& shape, const Outliers& outliers,
             const Strips& strips, int64_t block, int64_t begin, int64_t end) {
  const int64_t summed = call.integer ? strips.laid_out / shape.step : kSummed;
  const int64_t fit = kBesideBytes / (summed * shape.panel * 4), n = call.weight.rows;
  const Shares shares(ceil_div(n, shape.panel), fit < 1 ? 1 : at_most(kBeside, fit), strips.count,
                      call.threads);
  const int64_t width = shares.beside * shape.panel;
  Scratch scratch(Scratch::kLoop);
  float* tiles = scratch.take<float>(shares.strips_in_group * shape.strip_rows * width);
  int32_t* panels = scratch.take<int32_t>(width * summed);
  float* scales = scratch.take<float>(width * strips.blocks);
  int32_t* starts = scratch.take<int32_t>(width * strips.blocks);
  if (!tiles || !panels || !scales || !starts) return -1;
  const Product product{call,   shape, outliers, strips, block, width,
                        summed, tiles, panels,   scales, starts};
  int64_t packed = -1;
  const int64_t last = shares.count() * end / call.threads;
  for (int64_t share = shares.count() * begin / call.threads; share < last; ++share) {
    const int64_t row = share / shares.groups * width, rows = at_most(width, n - row);
    const int64_t first = share % shares.groups * shares.strips_in_group;
    const int64_t count = at_most(shares.strips_in_group, strips.count - first);
    if (!call.integer) {
      product.floats(first, count, row, rows);
      continue;
    }
    if (packed != row) product.lay_out_codes(row, rows);
    packed = row;
    product.codes(first, count, row, rows);
  }
  return 0;
}

}  // namespace

int many_rows(const Call* calls, int count) {
  const Call& first = calls[0];
  const GemmShape shape = first.kernels.gemm_shape();
  // Panels and strips are laid out 64 codes at a time.
  const int64_t columns = first.weight.columns, laid_out = (columns + 63) / 64 * 64;
  const int64_t block = first.weight.format == FW_I8 ? laid_out : first.block;
  Scratch scratch(Scratch::kCall);
  Outliers outliers;
  if (!outliers.find(first, scratch)) return -1;

  Strips strips;
  strips.count = ceil_div(first.m, shape.strip_rows);
  strips.words = shape.strip_rows * (first.integer ? laid_out / shape.step : columns);
  strips.laid_out = laid_out;
  strips.blocks = first.integer ? laid_out / block : 1;
  const int64_t scales = first.integer ? strips.count * strips.blocks * shape.strip_rows : 1;
  strips.data = scratch.take<int32_t>(strips.count * strips.words);
  strips.scales = scratch.take<float>(scales);
  if (!strips.data || !strips.scales) return -1;
  int failed = first.integer ? pack_codes(first, shape, outliers, strips)
                             : pack_floats(first.kernels, shape, first.x, first.type, first.m,
                                           columns, first.threads, strips);
  if (failed) return failed;
  parallel_ranges(first.threads, 1, first.threads, [&](int64_t begin, int64_t end) {
    for (int i = 0; i < count; ++i) {
      if (multiply(calls[i], shape, outliers, strips, block, begin, end)) {
        __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      }
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
