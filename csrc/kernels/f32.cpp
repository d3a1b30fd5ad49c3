// Single precision: rows of weights times one vector, and multiply-adds in registers alone.
#include "kernels.h"
#include "simd.h"

namespace fw::FW_ISA {
namespace {

constexpr int kBlock = 8;

// R rows share each load of x, and hide the latency of one another's sums.
template <int R>
void dot(const float* w, const float* x, float* out, int64_t n) {
  F32 sums[R] = {};
  int64_t k = 0;
  for (; k + kLanesF32 <= n; k += kLanesF32) {
    const F32 xs = load<F32>(x + k);
    for (int r = 0; r < R; ++r) sums[r] += load<F32>(w + r * n + k) * xs;
  }
  for (int r = 0; r < R; ++r) {
    float total = sum(sums[r]);
    for (int64_t tail = k; tail < n; ++tail) total += w[r * n + tail] * x[tail];
    out[r] = total;
  }
}

}  // namespace

void dot_f32(const float* w, const float* x, float* out, int64_t rows, int64_t n) {
  int64_t row = 0;
  for (; row + kBlock <= rows; row += kBlock) dot<kBlock>(w + row * n, x, out + row, n);
  for (; row < rows; ++row) dot<1>(w + row * n, x, out + row, n);
}

int64_t multiply_add_f32(int64_t rounds, float* sink) {
  constexpr int kChains = 12;  // covers two units of 4 cycles, and fits 16 registers
  F32 chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = F32{} + *sink + float(i);
  const F32 scale = F32{} + 0.5f, offset = F32{} + 1.0f;  // tends to 2: never huge, never denormal
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * scale + offset;
  }
  for (int i = 0; i < kChains; ++i) *sink += sum(chains[i]);
  return rounds * kChains * kLanesF32 * 2;
}

}  // namespace fw::FW_ISA
