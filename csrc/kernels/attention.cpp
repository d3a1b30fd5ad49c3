// Softmax, and how keys are laid out for it.
#include <math.h>

#include "kernels.h"
#include "math.h"

namespace fw::FW_ISA {

float softmax(float* x, const uint8_t* seen, int64_t begin, int64_t end, int64_t n, float scaling) {
  for (int64_t i = begin; seen && i < end; ++i) {
    if (!seen[i]) x[i] = -INFINITY;
  }
  const float most = largest(x + begin, end - begin);
  memset(x, 0, size_t(begin) * sizeof *x);
  memset(x + end, 0, size_t(n - end) * sizeof *x);
  if (most == -INFINITY) {  // nothing to see: nothing is what it gets
    memset(x + begin, 0, size_t(end - begin) * sizeof *x);
    return 0;
  }
  float total = exponentials(x + begin, end - begin, most, scaling);
  for (int64_t i = begin; seen && i < end; ++i) {
    if (seen[i]) continue;
    total -= x[i];
    x[i] = 0;
  }
  return 1.0f / total;
}

void pack_keys(const float* keys, int64_t dim, int64_t count, int64_t panel, float* out) {
  for (int64_t j = 0; j < panel; ++j) {
    for (int64_t d = 0; d < dim; ++d) out[d * panel + j] = j < count ? keys[j * dim + d] : 0;
  }
}

}  // namespace fw::FW_ISA
