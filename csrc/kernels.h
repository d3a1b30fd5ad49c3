// The list of kernels: each is a body in kernels/, compiled once per ISA, and one line here.
//
// A kernel runs on one thread and computes the range it is given; api.cpp and linear.cpp share out
// ranges. Kernels live in a namespace named after their ISA. Keep inline functions that they share
// inside it too: the linker merges equal names, and would let a wide body run on a narrow CPU.
#pragma once

#include <stdint.h>

#include "featherweight.h"

// result, name, parameters
#define FW_KERNELS(KERNEL)                                                                        \
  /* Numbers (or codes) of an element type from `index` on, as float32; numbers back. */          \
  KERNEL(void, widen, (const void* source, int type, int64_t index, int64_t n, float* out))       \
  KERNEL(void, narrow, (const float* source, int64_t n, int type, void* out, int64_t index))      \
                                                                                                  \
  /* int8 codes of x[n] and the absmax of each block; absmax NaN and codes 0 if not finite. */    \
  KERNEL(void, quantize_codes,                                                                    \
         (const float* x, int64_t n, int64_t block, int8_t* codes, float* absmax))                \
  /* One block of at most blocksize numbers. -1: not finite. */                                   \
  KERNEL(int, quantize_4bit,                                                                      \
         (const float* x, int64_t n, bool whole, const float* midpoints, const uint8_t* order,    \
          uint8_t* codes, float* absmax))                                                         \
  KERNEL(void, decode,                                                                            \
         (const fw_matrix& w, int64_t row, int64_t column, int64_t n, float* out))                \
                                                                                                  \
  /* Few rows: tile[m][row − begin] = x[m] · w[row], for rows begin … end of the weight.          \
     Activation codes are padded with zeros to multiples of kPadding. */                          \
  KERNEL(void, gemv_float,                                                                        \
         (const fw_matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_stride,       \
          int m, float* tile, int64_t tile_stride))                                               \
  KERNEL(void, gemv_i8,                                                                           \
         (const fw_matrix& w, int64_t begin, int64_t end, const int8_t* x, int64_t x_stride,      \
          const float* scales, const int32_t* sums, int m, float* tile, int64_t tile_stride))     \
  /* `arranged` takes 2 · padded bytes a row. */                                                  \
  KERNEL(void, arrange_4bit, (const int8_t* codes, int64_t padded, int8_t* arranged))             \
  KERNEL(void, gemv_4bit,                                                                         \
         (const fw_matrix& w, const int8_t* table, int64_t block, int64_t begin, int64_t end,     \
          const int8_t* arranged, int64_t x_stride, const float* scales, int64_t scale_stride,    \
          int m, float* tile, int64_t tile_stride))                                               \
                                                                                                  \
  /* Many rows: strips of activations times panels of weights, into tile[strip_rows][panel]. */   \
  KERNEL(fw::GemmShape, gemm_shape, ())                                                           \
  KERNEL(void, pack_strip_float,                                                                  \
         (const float* rows, int64_t stride, int count, int64_t n, float* strip))                 \
  KERNEL(void, pack_panel_rows, /* panel[n][panel]: columns of the weight are summed over */      \
         (const fw_matrix& w, int64_t row, int64_t column, int64_t n, float* panel))              \
  KERNEL(void, pack_panels_columns, /* panels[..][n][panel]: rows are summed over */              \
         (const fw_matrix& w, int64_t row, int64_t n, int64_t column, int64_t columns,            \
          float* panels))                                                                         \
  KERNEL(void, gemm_float, /* adds to the tile */                                                 \
         (const float* panel, const float* strip, int64_t n, float* tile, int64_t stride))        \
  KERNEL(void, pack_strip_codes,                                                                  \
         (const int8_t* rows, int64_t stride, int count, int64_t padded, int32_t* strip))         \
  KERNEL(void, pack_panel_codes,                                                                  \
         (const fw_matrix& w, const int8_t* table, int64_t row, int64_t padded, int64_t block,    \
          int32_t* panel, float* scales, int32_t* starts))                                        \
  KERNEL(void, gemm_codes,                                                                        \
         (const int32_t* panel, const float* scales, const int32_t* starts, const int32_t* strip, \
          const float* strip_scales, int64_t words_per_block, int64_t blocks, float* tile,        \
          int64_t stride))                                                                        \
                                                                                                  \
  /* Between products: rows of a decoder. */                                                      \
  KERNEL(void, normalise,                                                                         \
         (const float* x, int64_t n, const float* weight, const float* bias, float eps,           \
          int center, float* out))                                                                \
  KERNEL(void, activate, /* out = f(gate) · up; up may be null */                                 \
         (const float* gate, const float* up, int64_t n, int activation, float* out))             \
  KERNEL(void, rotate, /* pairs (i, half + i) of x by angles */                                   \
         (float* x, int64_t half, const float* cos, const float* sin))                            \
  KERNEL(void, add, (float* x, const float* y, int64_t n))                                        \
                                                                                                  \
  /* e^(scaling · (x − its maximum)) of x[begin … end) where seen (null: everywhere), 0 elsewhere \
     up to n; 1 / their sum, or 0 where nothing is seen. */                                       \
  KERNEL(float, softmax,                                                                          \
         (float* x, const uint8_t* seen, int64_t begin, int64_t end, int64_t n, float scaling))   \
  /* Unnormalised attention of at most kFewQueries rows over n keys: out[rows, dim] divided by    \
     total[rows] is the result, e^most[rows] the scale that was taken out. */                     \
  KERNEL(void, attend,                                                                            \
         (const float* const* queries, int rows, const fw::CachedHead& cached,                    \
          const uint8_t* seen, int64_t n, int64_t dim, float scaling, float* most, float* total,  \
          float* out))                                                                            \
  KERNEL(void, pack_keys, /* keys[count, dim] → out[dim, panel] */                                \
         (const float* keys, int64_t dim, int64_t count, int64_t panel, float* out))              \
                                                                                                  \
  /* Probes. Sinks keep the work alive; results are the operations done. */                       \
  KERNEL(uint64_t, sum_words, (const uint8_t* data, int64_t nbytes))                              \
  KERNEL(int64_t, multiply_add_f32, (int64_t rounds, float* sink))                                \
  KERNEL(int64_t, multiply_add_i8, (int64_t rounds, const int8_t* codes, int32_t* sink))

namespace fw {

constexpr int kFewQueries = 8;    // rows that `attend` takes at once
constexpr int64_t kPadding = 128;  // activation codes in two of the widest vectors

struct GemmShape {
  int64_t panel;             // outputs in a panel
  int64_t strip_rows;        // activation rows in a strip
  int64_t step;              // codes in a 32-bit word
  int64_t backward_columns;  // of the weight, decoded at a time going backward
};

// Keys and values of one head from some key on: [n, head_dim] of type FW_F32 … FW_I8.
struct CachedHead {
  const void *keys, *values;
  const float *key_absmax, *value_absmax;  // [n], of codes
  int type;
};

struct Kernels {
#define FW_FIELD(result, name, parameters) result(*name) parameters;
  FW_KERNELS(FW_FIELD)
#undef FW_FIELD
};

#ifdef FW_ISA
namespace FW_ISA {
#define FW_DECLARE(result, name, parameters) result name parameters;
FW_KERNELS(FW_DECLARE)
#undef FW_DECLARE
}  // namespace FW_ISA
#endif

}  // namespace fw
