// The C interface of the native library: pointers, sizes, and nothing of Python or torch.
//
// Every pointer is to memory that the caller owns and keeps alive for the call. Matrices are
// row-major and dense. `threads` is the most threads a call may use (at least 1). Nothing here
// allocates, throws or prints. Callers keep each call under 200 ms (an interrupt waits for it).
#pragma once

#include <stdint.h>

#define FW_API extern "C" __attribute__((visibility("default")))

// What was built, and by what.
FW_API const char* fw_compiler(void);  // name, version and flags, for people to read
FW_API int fw_has_openmp(void);        // 0: every call is serial

// Instruction sets, numbered from 0 (baseline) upwards in order of preference.
FW_API int fw_isa_count(void);
FW_API const char* fw_isa_name(int isa);
FW_API int fw_isa_built(int isa);     // 1: this library holds kernels for it
FW_API int fw_isa_detected(int isa);  // 1: this CPU and its operating system run it
FW_API int fw_isa_active(void);       // the one in use
// Uses another one from now on. Returns 0, or -1 and changes nothing unless built and detected.
FW_API int fw_isa_use(int isa);

// Sum, modulo 2^64, of the native 64-bit words of data[nbytes]; missing bytes of the last are 0.
FW_API uint64_t fw_sum_words(const uint8_t* data, int64_t nbytes, int threads);

// out[rows] = w[rows, n] · x[n], exactly. row_sums[rows] holds the sum of each row of w.
// Weights may be any int8; x must lie in -127…127; n ≤ 131072, so that int32 holds the sum.
FW_API void fw_dot_i8(const int8_t* w, const int32_t* row_sums, const int8_t* x, int32_t* out,
                      int64_t rows, int64_t n, int threads);

// out[rows] = w[rows, n] · x[n], accumulated in fp32 in an order that depends on the ISA.
FW_API void fw_dot_f32(const float* w, const float* x, float* out, int64_t rows, int64_t n,
                       int threads);

// Arithmetic out of registers and L1: every thread does `rounds` rounds. Return the operations
// done by all of them together, a multiply and an add counted as two.
FW_API int64_t fw_probe_f32(int64_t rounds, int threads);
FW_API int64_t fw_probe_i8(int64_t rounds, int threads);
