// The entry points: share the work out, and call the kernels of the ISA in use.
#include "featherweight.h"

#include <math.h>

#include "linear.h"

#ifdef __clang__
#define FW_COMPILER "clang "
#else
#define FW_COMPILER "gcc "
#endif

const char* fw_compiler(void) { return FW_COMPILER __VERSION__ " " FW_FLAGS; }

int fw_has_openmp(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

int fw_isa_count(void) { return fw::kIsaCount; }
const char* fw_isa_name(int isa) { return fw::isa(isa).name; }
int fw_isa_built(int isa) { return fw::isa(isa).kernels != nullptr; }
int fw_isa_detected(int isa) { return fw::isa(isa).detected; }
int fw_isa_active(void) { return fw::active_isa(); }
int fw_isa_use(int isa) { return fw::use_isa(isa) ? 0 : -1; }

uint64_t fw_sum_words(const uint8_t* data, int64_t nbytes, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  uint64_t total = 0;
  fw::parallel_ranges(nbytes, 4096, threads, [&](int64_t begin, int64_t end) {
    const uint64_t part = kernels.sum_words(data + begin, end - begin);
    __atomic_fetch_add(&total, part, __ATOMIC_RELAXED);
  });
  return total;
}

int64_t fw_probe_f32(int64_t rounds, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  int64_t total = 0;
  fw::parallel_ranges(threads, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float sink = 0;
      __atomic_fetch_add(&total, kernels.multiply_add_f32(rounds, &sink), __ATOMIC_RELAXED);
    }
  });
  return total;
}

int64_t fw_probe_i8(int64_t rounds, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  int64_t total = 0;
  fw::parallel_ranges(threads, 1, threads, [&](int64_t begin, int64_t end) {
    int8_t codes[128];
    for (int i = 0; i < 128; ++i) codes[i] = int8_t(i % 121 - 60);
    for (int64_t i = begin; i < end; ++i) {
      int32_t sink = 0;
      __atomic_fetch_add(&total, kernels.multiply_add_i8(rounds, codes, &sink), __ATOMIC_RELAXED);
    }
  });
  return total;
}

fw::Call fw::make_call(const fw_matrix& w, const void* x, void* out, const float* bias, int64_t m,
                       int type, float threshold, int flags, int threads) {
  constexpr int64_t kMostSummed = 131072;  // int8 products that int32 holds: 2^31 / (128 · 127)
  bool integer = false;
  int64_t block = 32;
  if (w.format == FW_I8) {
    block = w.columns;
    integer = w.columns > 0 && w.columns <= kMostSummed;
  } else if (w.format == FW_4BIT) {
    integer = w.columns > 0 && w.columns % 32 == 0 && !(flags & FW_EXACT);
    if (w.columns % 64 == 0 && w.blocksize % 64 == 0) block = 64;
  }
  return {kernels(), w, x, out, bias, m, type, threshold, flags, threads, integer, block};
}

int fw_linear(const fw_matrix* weight, const void* x, void* out, const float* bias, int64_t m,
              int type, float threshold, int flags, int threads) {
  if (m <= 0 || weight->rows <= 0) return 0;
  const auto call = fw::make_call(*weight, x, out, bias, m, type, threshold, flags, threads);
  return m <= fw::kFewRows ? fw::few_rows(&call, 1) : fw::many_rows(&call, 1);
}

int fw_linear_codes(const fw_matrix* weight, const int8_t* codes, const float* absmax,
                    const int64_t* outlier_columns, const float* outliers, int64_t outlier_count,
                    void* out, const float* bias, int64_t m, int type, int threads) {
  const fw_matrix& w = *weight;
  if (m <= 0 || w.rows <= 0) return 0;
  fw::Call call{fw::kernels(), w, nullptr, out,     bias,          m,
                type,          0, 0,       threads, w.columns > 0, w.columns};
  call.codes = codes;
  call.absmax = absmax;
  call.outlier_columns = outlier_columns;
  call.outliers = outliers;
  call.outlier_count = outlier_count;
  // The kernels for few rows rely on −127 … 127, all that quantising gives; −128 is for the others.
  const bool few = m <= fw::kFewRows;
  const bool extreme = few && w.columns > 0 && memchr(codes, 0x80, size_t(m * w.columns));
  return few && !extreme ? fw::few_rows(&call, 1) : fw::many_rows(&call, 1);
}

void fw_decode(const fw_matrix* weight, void* out, int type, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  const fw_matrix& w = *weight;
  fw::parallel_ranges(w.rows, 1, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 1024;
    float chunk[kChunk];
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = 0; column < w.columns; column += kChunk) {
        const int64_t left = w.columns - column, n = left < kChunk ? left : kChunk;
        kernels.decode(w, row, column, n, chunk);
        kernels.narrow(chunk, n, type, out, row * w.columns + column);
      }
    }
  });
}

int fw_quantize_4bit(const void* weights, int type, int64_t n, int64_t blocksize,
                     const float* midpoints, const uint8_t* order, uint8_t* codes, float* absmax,
                     int threads) {
  constexpr int64_t kMostInBlock = 4096;
  const fw::Kernels& kernels = fw::kernels();
  int failed = blocksize > kMostInBlock ? -1 : 0;
  const int64_t blocks = (n + blocksize - 1) / blocksize;
  fw::parallel_ranges(failed ? 0 : blocks, 64, threads, [&](int64_t begin, int64_t end) {
    float block[kMostInBlock];
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * blocksize, left = n - first;
      const int64_t count = left < blocksize ? left : blocksize;
      kernels.widen(weights, type, first, count, block);
      if (kernels.quantize_4bit(block, count, count == blocksize, midpoints, order,
                                codes + first / 2, absmax + b)) {
        __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      }
    }
  });
  return failed;
}

int fw_quantize_rows(const void* x, int type, int64_t rows, int64_t columns, float threshold,
                     int8_t* codes, float* absmax, uint8_t* outlier_columns, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  int failed = 0;
  fw::parallel_ranges(rows, 1, threads, [&](int64_t begin, int64_t end) {
    fw::Scratch scratch(fw::Scratch::kLoop);
    float* row = scratch.take<float>(columns);
    if (!row) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t r = begin; r < end; ++r) {
      kernels.widen(x, type, r * columns, columns, row);
      int any = 0;
      for (int64_t k = 0; threshold > 0 && k < columns; ++k) any |= fabsf(row[k]) >= threshold;
      for (int64_t k = 0; any && k < columns; ++k) {
        if (!(fabsf(row[k]) >= threshold)) continue;
        row[k] = 0;
        __atomic_store_n(&outlier_columns[k], uint8_t(1), __ATOMIC_RELAXED);
      }
      kernels.quantize_codes(row, columns, columns, codes + r * columns, absmax + r);
    }
  });
  return failed;
}
