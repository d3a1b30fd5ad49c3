// Softmax, and attention of a few queries over keys and values as they are cached.
#include <math.h>

#include "kernels.h"
#include "math.h"

namespace fw::FW_ISA {
namespace {

constexpr int64_t kKeys = 64;  // whose scores are held at a time

// exp(x − most) of the first n scores in place, those beyond up to a whole vector 0; their sum.
inline float exponentials(float* x, int64_t n, float most) {
  F32 sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 v = exponential(load<F32>(x + i) - most);
    store(x + i, v);
    sums += v;
  }
  float total = sum(sums);
  if (i < n) {
    const F32 v = exponential(load_part(x + i, n - i, -INFINITY) - most);
    store_part(x + i, v, n - i);
    for (int64_t lane = 0; lane < n - i; ++lane) total += v[lane];
  }
  return total;
}

}  // namespace

void softmax(float* x, const uint8_t* seen, int64_t begin, int64_t end, int64_t n, float scaling) {
  float most = -INFINITY;
  for (int64_t i = begin; i < end; ++i) {
    const bool hidden = seen && !seen[i];
    x[i] = hidden ? -INFINITY : x[i] * scaling;
    most = x[i] > most ? x[i] : most;
  }
  memset(x, 0, size_t(begin) * sizeof *x);
  memset(x + end, 0, size_t(n - end) * sizeof *x);
  if (most == -INFINITY) {  // nothing to see: nothing is what it gets
    memset(x + begin, 0, size_t(end - begin) * sizeof *x);
    return;
  }
  float total = exponentials(x + begin, end - begin, most);
  for (int64_t i = begin; seen && i < end; ++i) {
    if (seen[i]) continue;
    total -= x[i];
    x[i] = 0;
  }
  const float scale = 1.0f / total;
  for (int64_t i = begin; i < end; ++i) x[i] *= scale;
}

void attend(const float* const* queries, int rows, const float* keys, const float* values,
            const uint8_t* seen, int64_t n, int64_t dim, float scaling, float* most, float* total,
            float* out) {
  for (int r = 0; r < rows; ++r) {
    most[r] = -INFINITY;
    total[r] = 0;
  }
  memset(out, 0, size_t(rows * dim) * sizeof *out);
  float scores[kFewQueries][kKeys];
  for (int64_t begin = 0; begin < n; begin += kKeys) {
    const int64_t count = n - begin < kKeys ? n - begin : kKeys;
    for (int64_t j = 0; j < count; ++j) {
      const float* key = keys + (begin + j) * dim;
      prefetch(key + 8 * dim);
      for (int r = 0; r < rows; ++r) {
        F32 sums = {};
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) sums += load<F32>(queries[r] + d) * load<F32>(key + d);
        float score = sum(sums);
        for (; d < dim; ++d) score += queries[r][d] * key[d];
        scores[r][j] = seen && !seen[begin + j] ? -INFINITY : score * scaling;
      }
    }
    for (int r = 0; r < rows; ++r) {
      float here = most[r];
      for (int64_t j = 0; j < count; ++j) here = scores[r][j] > here ? scores[r][j] : here;
      if (here == -INFINITY) {
        memset(scores[r], 0, sizeof scores[r]);
        continue;
      }
      const float shrink = most[r] == -INFINITY ? 0 : expf(most[r] - here);
      most[r] = here;
      float* sums = out + r * dim;
      if (shrink != 1) {
        for (int64_t d = 0; d < dim; ++d) sums[d] *= shrink;
      }
      float added = exponentials(scores[r], count, here);
      for (int64_t j = 0; seen && j < count; ++j) {
        if (seen[begin + j]) continue;
        added -= scores[r][j];
        scores[r][j] = 0;
      }
      total[r] = total[r] * shrink + added;
    }
    for (int64_t j = 0; j < count; ++j) {
      const float* value = values + (begin + j) * dim;
      prefetch(value + 8 * dim);
      for (int r = 0; r < rows; ++r) {
        float* sums = out + r * dim;
        const F32 p = splat(scores[r][j]);
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) {
          store(sums + d, load<F32>(sums + d) + p * load<F32>(value + d));
        }
        for (; d < dim; ++d) sums[d] += scores[r][j] * value[d];
      }
    }
  }
}

void pack_keys(const float* keys, int64_t dim, int64_t count, int64_t panel, float* out) {
  for (int64_t j = 0; j < panel; ++j) {
    for (int64_t d = 0; d < dim; ++d) out[d * panel + j] = j < count ? keys[j * dim + d] : 0;
  }
}

}  // namespace fw::FW_ISA
