// The entry points: share the work out, and call the kernels of the ISA in use.
#include "featherweight.h"

#include "isa.h"
#include "threads.h"

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

void fw_dot_i8(const int8_t* w, const int32_t* row_sums, const int8_t* x, int32_t* out,
               int64_t rows, int64_t n, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  fw::parallel_ranges(rows, 16, threads, [&](int64_t begin, int64_t end) {
    kernels.dot_i8(w + begin * n, row_sums + begin, x, out + begin, end - begin, n);
  });
}

void fw_dot_f32(const float* w, const float* x, float* out, int64_t rows, int64_t n, int threads) {
  const fw::Kernels& kernels = fw::kernels();
  fw::parallel_ranges(rows, 16, threads, [&](int64_t begin, int64_t end) {
    kernels.dot_f32(w + begin * n, x, out + begin, end - begin, n);
  });
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
  constexpr int64_t kRows = 8, kColumns = 2048;  // 18 KiB: stays in L1
  const fw::Kernels& kernels = fw::kernels();
  fw::parallel_ranges(threads, 1, threads, [&](int64_t begin, int64_t end) {
    alignas(64) int8_t w[kRows * kColumns], x[kColumns];
    int32_t row_sums[kRows] = {}, out[kRows];
    for (int64_t i = 0; i < kRows * kColumns; ++i) w[i] = int8_t(i % 251 - 125);
    for (int64_t i = 0; i < kColumns; ++i) x[i] = int8_t(i % 241 - 120);
    for (int64_t i = begin * rounds; i < end * rounds; ++i) {
      kernels.dot_i8(w, row_sums, x, out, kRows, kColumns);
    }
  });
  return 2 * kRows * kColumns * rounds * threads;
}
