// Attention of a few queries over keys and values as they are cached, in any of their formats.
// Queries that share keys are multiplied together: what is read is converted once for them.
#include <type_traits>
#include <utility>

#include "elements.h"
#include "kernels.h"
#include "math.h"

namespace fw::FW_ISA {
namespace {

constexpr int64_t kKeys = 64;  // whose scores are held at a time
constexpr int kVectors = FW_VECTOR_BYTES == 64 ? 4 : 2;  // of values, that leave room for sums

// body(Q, first) for runs of Q queries: 4, then 2 or 1.
template <class Body>
inline void by_fours(int rows, const Body& body) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) body(std::integral_constant<int, 4>{}, r);
  for (; r + 2 <= rows; r += 2) body(std::integral_constant<int, 2>{}, r);
  if (r < rows) body(std::integral_constant<int, 1>{}, r);
}

// Lanes of a, then of b, by number.
template <int... I>
inline F32 pick(F32 a, F32 b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, I32{I...});
#endif
}

// a's sums of lanes that differ in bit S where that bit is 0, b's where it is 1.
template <int S, int... I>
inline F32 add_pairs(F32 a, F32 b, std::integer_sequence<int, I...>) {
  return pick<(I & S ? kLanes + I : I)...>(a, b) +
         pick<((I & S ? kLanes : 0) + (I ^ S))...>(a, b);
}

// Lane i: the sum of the lanes of vectors[i].
template <int S = 1>
inline F32 sum_each(F32 (&vectors)[kLanes]) {
  if constexpr (S == kLanes) {
    return vectors[0];
  } else {
    FW_UNROLLED
    for (int i = 0; i < kLanes / (2 * S); ++i) {
      vectors[i] = add_pairs<S>(vectors[2 * i], vectors[2 * i + 1],
                                std::make_integer_sequence<int, kLanes>{});
    }
    return sum_each<2 * S>(vectors);
  }
}

// What queries fetch ahead, into L2 as it is much: bytes [begin, end) of each row that lies `ahead`
// of the one they read.
struct Ahead {
  int64_t ahead, begin, end;

  void fetch(const void* row) const {
    const char* next = static_cast<const char*>(row) + ahead;
    for (int64_t byte = begin; byte < end; byte += 64) prefetch_l2(next + byte);
  }
};

// scores[r][j] = queries[r] · keys[j] for Q queries and `count` keys, kLanes products at a time.
template <int Q, class E>
void dots(E type, const float* const* queries, const typename E::Stored* keys, int64_t count,
          int64_t dim, const Ahead& next, float (*scores)[kKeys]) {
  constexpr int K = kLanes / Q;
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t j = 0; j < count && count >= K; j += K) {
    const int64_t first = j + K <= count ? j : count - K;  // the last ones may be done again
    F32 sums[kLanes] = {};
    for (int i = 0; i < K; ++i) next.fetch(keys + (first + i) * dim);
    for (int64_t d = 0; d < whole; d += kLanes) {
      F32 query[Q];
      FW_UNROLLED
      for (int r = 0; r < Q; ++r) query[r] = load<F32>(queries[r] + d);
      FW_UNROLLED
      for (int i = 0; i < K; ++i) {
        const F32 key = type.get(keys + (first + i) * dim + d);
        FW_UNROLLED
        for (int r = 0; r < Q; ++r) sums[r * K + i] += query[r] * key;
      }
    }
    float found[kLanes];
    store(found, sum_each(sums));
    for (int r = 0; r < Q; ++r) memcpy(scores[r] + first, found + r * K, K * sizeof(float));
  }
  for (int64_t j = 0; j < count && count < K; ++j) {
    for (int r = 0; r < Q; ++r) {
      F32 sums = {};
      for (int64_t d = 0; d < whole; d += kLanes) {
        sums += load<F32>(queries[r] + d) * type.get(keys + j * dim + d);
      }
      scores[r][j] = sum(sums);
    }
  }
  for (int64_t j = 0; j < count && whole < dim; ++j) {
    for (int r = 0; r < Q; ++r) {
      for (int64_t d = whole; d < dim; ++d) {
        scores[r][j] += queries[r][d] * type.get1(keys + j * dim + d);
      }
    }
  }
}

// sums[r] = sums[r] · shrink[r] + Σ scores[r][j] · values[j] for Q queries and `count` keys.
template <int Q, class E>
void weigh(E type, const float (*scores)[kKeys], const typename E::Stored* values, int64_t count,
           int64_t dim, const Ahead& next, const float* shrink, float* sums) {
  const auto some = [&](auto vectors, int64_t d) {
    constexpr int V = vectors.value;
    F32 totals[Q][V];
    FW_UNROLLED
    for (int r = 0; r < Q; ++r) {
      FW_UNROLLED
      for (int i = 0; i < V; ++i) {
        totals[r][i] = load<F32>(sums + r * dim + d + i * kLanes) * shrink[r];
      }
    }
    for (int64_t j = 0; j < count; ++j) {
      if (d == 0) next.fetch(values + j * dim);
      F32 value[V];
      FW_UNROLLED
      for (int i = 0; i < V; ++i) value[i] = type.get(values + j * dim + d + i * kLanes);
      FW_UNROLLED
      for (int r = 0; r < Q; ++r) {
        const F32 p = splat(scores[r][j]);
        FW_UNROLLED
        for (int i = 0; i < V; ++i) totals[r][i] += p * value[i];
      }
    }
    FW_UNROLLED
    for (int r = 0; r < Q; ++r) {
      FW_UNROLLED
      for (int i = 0; i < V; ++i) store(sums + r * dim + d + i * kLanes, totals[r][i]);
    }
  };
  int64_t d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    some(std::integral_constant<int, kVectors>{}, d);
  }
  for (; d + kLanes <= dim; d += kLanes) some(std::integral_constant<int, 1>{}, d);
  for (; d < dim; ++d) {
    for (int r = 0; r < Q; ++r) {
      float total = sums[r * dim + d] * shrink[r];
      for (int64_t j = 0; j < count; ++j) total += scores[r][j] * type.get1(values + j * dim + d);
      sums[r * dim + d] = total;
    }
  }
}

// Scores become weights, given the highest score so far and the total of weights; what these
// weights have to be multiplied with for the new highest score.
float shrink_and_add(float* scores, const CachedHead& cached, const uint8_t* seen, int64_t begin,
                     int64_t count, float scaling, float& most, float& total) {
  float here = most;
  for (int64_t j = 0; j < count; ++j) {
    if (cached.type == FW_I8) scores[j] *= cached.key_absmax[begin + j] * (1 / 127.0f);
    scores[j] = seen && !seen[begin + j] ? -INFINITY : scores[j] * scaling;
  }
  const float highest = largest(scores, count);
  here = highest > here ? highest : here;
  if (here == -INFINITY) {  // nothing seen yet
    memset(scores, 0, size_t(count) * sizeof *scores);
    return 0;
  }
  const float shrink = most == -INFINITY ? 0 : expf(most - here);
  most = here;
  float added = exponentials(scores, count, here, 1);
  for (int64_t j = 0; seen && j < count; ++j) {
    if (seen[begin + j]) continue;
    added -= scores[j];
    scores[j] = 0;
  }
  total = total * shrink + added;
  for (int64_t j = 0; cached.type == FW_I8 && j < count; ++j) {
    if (scores[j] != 0) scores[j] *= cached.value_absmax[begin + j] * (1 / 127.0f);
  }
  return shrink;
}

template <class E>
void attend_to(E type, const float* const* queries, int rows, const CachedHead& cached,
               const uint8_t* seen, int64_t n, int64_t dim, float scaling, float* most,
               float* total, float* out) {
  float scores[kFewQueries][kKeys], shrink[kFewQueries];
  for (int64_t begin = 0; begin < n; begin += kKeys) {
    const int64_t count = n - begin < kKeys ? n - begin : kKeys;
    const auto* keys = elements(type, cached.keys, begin * dim);
    const auto* values = elements(type, cached.values, begin * dim);
    // Queries share the work of fetching the next block, as they wait for nothing else.
    const int64_t row = dim * int64_t(sizeof *keys);
    const auto next = [&](int r, int q) {
      const int64_t ahead = begin + kKeys < n ? kKeys * row : 0;
      return Ahead{ahead, row * r / rows, row * (r + q) / rows};
    };
    by_fours(rows, [&](auto q, int r) {
      dots<q.value>(type, queries + r, keys, count, dim, next(r, q.value), scores + r);
    });
    for (int r = 0; r < rows; ++r) {
      shrink[r] = shrink_and_add(scores[r], cached, seen, begin, count, scaling, most[r], total[r]);
    }
    by_fours(rows, [&](auto q, int r) {
      if (most[r] == -INFINITY) return;  // nothing seen yet, by any of them: whatever lies there
      weigh<q.value>(type, scores + r, values, count, dim, next(r, q.value), shrink + r,
                     out + r * dim);
    });
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

}  // namespace fw::FW_ISA
