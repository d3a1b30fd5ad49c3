// Softmax, and attention of a few queries over keys and values as they are cached.
#include <math.h>

#include <type_traits>

#include "elements.h"
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

namespace {

// scores[j] = query · keys[j] for `count` keys: four at a time, whose sums hide one another's latency.
template <class E>
void dots(E type, const float* query, const typename E::Stored* keys, int64_t count, int64_t dim,
          float* scores) {
  const auto some = [&](auto keys_at_once, int64_t j) {
    constexpr int K = keys_at_once.value;
    const auto* from = keys + j * dim;
    F32 sums[K] = {};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      const F32 q = load<F32>(query + d);
      FW_UNROLLED
      for (int i = 0; i < K; ++i) sums[i] += q * type.get(from + i * dim + d);
    }
    FW_UNROLLED
    for (int i = 0; i < K; ++i) {
      float score = sum(sums[i]);
      for (int64_t rest = d; rest < dim; ++rest) {
        score += query[rest] * type.get1(from + i * dim + rest);
      }
      scores[j + i] = score;
    }
  };
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) some(std::integral_constant<int, 4>{}, j);
  for (; j < count; ++j) some(std::integral_constant<int, 1>{}, j);
}

// sums[d] = sums[d] · shrink + Σ scores[j] · values[j][d] for `count` keys, 4 vectors of d at a time.
template <class E>
void weigh(E type, const float* scores, const typename E::Stored* values, int64_t count,
           int64_t dim, float shrink, float* sums) {
  const auto some = [&](auto vectors, int64_t d) {
    constexpr int V = vectors.value;
    F32 totals[V];
    FW_UNROLLED
    for (int i = 0; i < V; ++i) totals[i] = load<F32>(sums + d + i * kLanes) * shrink;
    for (int64_t j = 0; j < count; ++j) {
      const F32 p = splat(scores[j]);
      FW_UNROLLED
      for (int i = 0; i < V; ++i) totals[i] += p * type.get(values + j * dim + d + i * kLanes);
    }
    FW_UNROLLED
    for (int i = 0; i < V; ++i) store(sums + d + i * kLanes, totals[i]);
  };
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) some(std::integral_constant<int, 4>{}, d);
  for (; d + kLanes <= dim; d += kLanes) some(std::integral_constant<int, 1>{}, d);
  for (; d < dim; ++d) {
    float total = sums[d] * shrink;
    for (int64_t j = 0; j < count; ++j) total += scores[j] * type.get1(values + j * dim + d);
    sums[d] = total;
  }
}

template <class E>
void attend_to(E type, const float* const* queries, int rows, const CachedHead& cached,
               const uint8_t* seen, int64_t n, int64_t dim, float scaling, float* most,
               float* total, float* out) {
  float scores[kKeys];
  for (int64_t begin = 0; begin < n; begin += kKeys) {
    const int64_t count = n - begin < kKeys ? n - begin : kKeys;
    const auto* keys = elements(type, cached.keys, begin * dim);
    const auto* values = elements(type, cached.values, begin * dim);
    for (int r = 0; r < rows; ++r) {
      dots(type, queries[r], keys, count, dim, scores);
      float here = most[r];
      for (int64_t j = 0; j < count; ++j) {
        if (cached.type == FW_I8) scores[j] *= cached.key_absmax[begin + j] * (1 / 127.0f);
        scores[j] = seen && !seen[begin + j] ? -INFINITY : scores[j] * scaling;
        here = scores[j] > here ? scores[j] : here;
      }
      if (here == -INFINITY) continue;
      const float shrink = most[r] == -INFINITY ? 0 : expf(most[r] - here);
      most[r] = here;
      float added = exponentials(scores, count, here);
      for (int64_t j = 0; seen && j < count; ++j) {
        if (seen[begin + j]) continue;
        added -= scores[j];
        scores[j] = 0;
      }
      total[r] = total[r] * shrink + added;
      for (int64_t j = 0; cached.type == FW_I8 && j < count; ++j) {
        if (scores[j] != 0) scores[j] *= cached.value_absmax[begin + j] * (1 / 127.0f);
      }
      weigh(type, scores, values, count, dim, shrink, out + r * dim);
    }
  }
}

}  // namespace

void attend(const float* const* queries, int rows, const CachedHead& cached, const uint8_t* seen,
            int64_t n, int64_t dim, float scaling, float* most, float* total, float* out) {
  for (int r = 0; r < rows; ++r) {
    most[r] = -INFINITY;
    total[r] = 0;
  }
  memset(out, 0, size_t(rows * dim) * sizeof *out);
  with_numbers(cached.type, [&](auto type) {
    attend_to(type, queries, rows, cached, seen, n, dim, scaling, most, total, out);
  });
}

void pack_keys(const float* keys, int64_t dim, int64_t count, int64_t panel, float* out) {
  for (int64_t j = 0; j < panel; ++j) {
    for (int64_t d = 0; d < dim; ++d) out[d * panel + j] = j < count ? keys[j * dim + d] : 0;
  }
}

}  // namespace fw::FW_ISA
