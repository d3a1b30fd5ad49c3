// The list of kernels: each is a body in kernels/, compiled once per ISA, and one line here.
//
// A kernel runs on one thread and computes the range it is given; api.cpp shares out ranges.
// Kernels live in a namespace named after their ISA. Keep inline functions that they share inside
// it too: the linker merges equal names, and would let a wide body run on a narrow CPU.
#pragma once

#include <stdint.h>

// result, name, parameters
#define FW_KERNELS(KERNEL)                                                                        \
  KERNEL(uint64_t, sum_words, (const uint8_t* data, int64_t nbytes))                              \
  KERNEL(void, dot_i8,                                                                            \
         (const int8_t* w, const int32_t* row_sums, const int8_t* x, int32_t* out, int64_t rows,  \
          int64_t n))                                                                             \
  KERNEL(void, dot_f32, (const float* w, const float* x, float* out, int64_t rows, int64_t n))    \
  /* Multiply-adds in registers; *sink keeps them alive. Returns the operations done. */          \
  KERNEL(int64_t, multiply_add_f32, (int64_t rounds, float* sink))

namespace fw {

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
