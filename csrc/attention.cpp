// Attention over a cache: who computes what. Memory is linear in the number of keys.
#include <math.h>

#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kSplit = 32;          // keys, at least, that one share of a query's keys has
constexpr int64_t kSerialWork = 16384;  // products below which other threads are left asleep

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t at_most(int64_t limit, int64_t n) { return n < limit ? n : limit; }

struct Attention {
  const Kernels& kernels;
  const fw_decoder& decoder;
  const fw_layer& layer;
  const fw_chunk& chunk;
  const Heads& q;
  float* out;
  int threads;

  int64_t dim() const { return decoder.head_dim; }
  int64_t group() const { return decoder.heads / decoder.kv_heads; }
  int64_t length() const { return chunk.past + chunk.tokens; }
  // Keys [first, end) that token t may see.
  int64_t end(int64_t t) const { return chunk.past + t + 1; }
  int64_t first(int64_t t) const {
    return layer.window && end(t) > layer.window ? end(t) - layer.window : 0;
  }
  const float* query(int64_t batch, int64_t t, int64_t head) const {
    return q.at(batch * chunk.tokens + t, head);
  }
  float* result(int64_t batch, int64_t t, int64_t head) const {
    return out + ((batch * chunk.tokens + t) * decoder.heads + head) * dim();
  }
  CachedHead cached(int64_t batch, int64_t kv_head, int64_t key) const {
    constexpr int kBytes[] = {4, 2, 2, 1};
    const int64_t row = (batch * decoder.kv_heads + kv_head) * layer.capacity + key;
    const int64_t at = row * dim() * kBytes[decoder.cache];
    const auto absmax = [&](const float* of) { return of ? of + row : nullptr; };
    return {static_cast<const char*>(layer.keys) + at, static_cast<const char*>(layer.values) + at,
            absmax(layer.key_absmax), absmax(layer.value_absmax), decoder.cache};
  }
  // Rows of a cache as float32: out[n, dim].
  void widen(const void* from, const float* absmax, int64_t n, float* out) const {
    kernels.widen(from, decoder.cache, 0, n * dim(), out);
    for (int64_t row = 0; decoder.cache == FW_I8 && row < n; ++row) {
      const float scale = absmax[row] * (1 / 127.0f);
      for (int64_t i = 0; i < dim(); ++i) out[row * dim() + i] *= scale;
    }
  }
  const uint8_t* seen(int64_t batch) const {
    return chunk.seen ? chunk.seen + batch * length() : nullptr;
  }

  int one_token() const;
  int many_tokens() const;
  int many_tokens_of(int64_t batch, int64_t kv_head, float* keys, float* values) const;
};

// One token a sequence: keys and values are read once for all heads that share them, and the keys
// of a head are split where there are fewer heads than threads.
int Attention::one_token() const {
  const int64_t first_key = first(0), n = end(0) - first_key, d = dim();
  const int64_t rows = group(), bunches = ceil_div(rows, kFewQueries);
  const int64_t whole = chunk.batch * decoder.kv_heads * bunches;
  int64_t splits = whole < 4 * threads ? ceil_div(4 * threads, whole) : 1;
  if (splits > n / kSplit) splits = n / kSplit > 0 ? n / kSplit : 1;
  const int64_t part = (n + splits - 1) / splits, heads = chunk.batch * decoder.heads;
  Scratch scratch(Scratch::kCall);
  float* sums = scratch.take<float>(splits * heads * d);
  float* most = scratch.take<float>(splits * heads);
  float* total = scratch.take<float>(splits * heads);
  if (!sums || !most || !total) return -1;
  const int team = heads * n * d < kSerialWork ? 1 : threads;
  parallel_ranges(whole * splits, 1, team, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t split = task % splits, bunch = task / splits % bunches;
      const int64_t kv_head = task / splits / bunches % decoder.kv_heads;
      const int64_t batch = task / splits / bunches / decoder.kv_heads;
      const int64_t head = kv_head * rows + bunch * kFewQueries;
      const int count = int(at_most(kFewQueries, rows - bunch * kFewQueries));
      const int64_t from = first_key + split * part, here = at_most(part, n - split * part);
      const float* queries[kFewQueries];
      for (int r = 0; r < count; ++r) queries[r] = query(batch, 0, head + r);
      const int64_t target = split * heads + batch * decoder.heads + head;
      const uint8_t* mask = seen(batch);
      kernels.attend(queries, count, cached(batch, kv_head, from), mask ? mask + from : nullptr,
                     here > 0 ? here : 0, d, layer.scaling, most + target, total + target,
                     sums + target * d);
    }
  });
  for (int64_t head = 0; head < heads; ++head) {
    float top = -INFINITY, all = 0;
    for (int64_t s = 0; s < splits; ++s) {
      top = most[s * heads + head] > top ? most[s * heads + head] : top;
    }
    float* target = out + head * d;
    memset(target, 0, size_t(d) * sizeof *target);
    for (int64_t s = 0; top > -INFINITY && s < splits; ++s) {
      const int64_t from = s * heads + head;
      const float scale = expf(most[from] - top);
      all += total[from] * scale;
      for (int64_t i = 0; i < d; ++i) target[i] += sums[from * d + i] * scale;
    }
    const float scale = all > 0 ? 1 / all : 0;
    for (int64_t i = 0; i < d; ++i) target[i] *= scale;
  }
  return 0;
}

// Strips of queries times panels of keys, softmax, times panels of values: the kernels of a GEMM.
int Attention::many_tokens() const {
  const GemmShape shape = kernels.gemm_shape();
  const int64_t panel = shape.panel;
  Scratch scratch(Scratch::kCall);
  float* keys = scratch.take<float>(ceil_div(length(), panel) * panel * dim());
  float* values = scratch.take<float>(ceil_div(dim(), panel) * panel * length());
  if (!keys || !values) return -1;
  for (int64_t batch = 0; batch < chunk.batch; ++batch) {
    for (int64_t kv_head = 0; kv_head < decoder.kv_heads; ++kv_head) {
      if (many_tokens_of(batch, kv_head, keys, values)) return -1;
    }
  }
  return 0;
}

int Attention::many_tokens_of(int64_t batch, int64_t kv_head, float* keys, float* values) const {
  const GemmShape shape = kernels.gemm_shape();
  const int64_t n = length(), d = dim(), panel = shape.panel, rows = shape.strip_rows;
  const int64_t width = ceil_div(d, panel) * panel;
  int failed = 0;
  parallel_ranges(ceil_div(n, panel), 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* decoded = scratch.take<float>(panel * d);
    if (!decoded) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t p = begin; p < end; ++p) {
      const int64_t key = p * panel, count = at_most(panel, n - key);
      const CachedHead head = cached(batch, kv_head, key);
      widen(head.keys, head.key_absmax, count, decoded);
      kernels.pack_keys(decoded, d, count, panel, keys + key * d);
      widen(head.values, head.value_absmax, count, decoded);
      for (int64_t j = key; j < key + count; ++j) {
        for (int64_t i = 0; i < width; i += panel) {
          float* target = values + i * n + j * panel;
          const int64_t there = at_most(panel, d - i);
          memcpy(target, decoded + (j - key) * d + i, size_t(there) * sizeof(float));
          memset(target + there, 0, size_t(panel - there) * sizeof(float));
        }
      }
    }
  });
  if (failed) return failed;
  const int64_t strips = ceil_div(chunk.tokens, rows), tasks = strips * group();
  parallel_ranges(tasks, 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* strip = scratch.take<float>((n > d ? n : d) * rows);
    float* scores = scratch.take<float>(rows * (n + panel));
    float* tile = scratch.take<float>(rows * width);
    if (!strip || !scores || !tile) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t task = begin; task < end; ++task) {
      // From both ends in turns: later tokens see more keys, and shares are contiguous.
      const int64_t i = task / group();
      const int64_t t = (i % 2 ? strips - 1 - i / 2 : i / 2) * rows;
      const int64_t head = kv_head * group() + task % group();
      const int64_t count = at_most(rows, chunk.tokens - t);
      const int64_t low = first(t) / panel * panel, high = this->end(t + count - 1);
      const int64_t across = ceil_div(high - low, panel) * panel, summed = high - low;
      kernels.pack_strip_float(query(batch, t, head), q.row, int(count), d, strip);
      memset(scores, 0, size_t(rows * across) * sizeof *scores);
      for (int64_t key = 0; key < across; key += panel) {
        kernels.gemm_float(keys + (low + key) * d, strip, d, scores + key, across);
      }
      const uint8_t* mask = seen(batch);
      for (int64_t r = 0; r < count; ++r) {
        kernels.softmax(scores + r * across, mask ? mask + low : nullptr, first(t + r) - low,
                        this->end(t + r) - low, across, layer.scaling);
      }
      kernels.pack_strip_float(scores, across, int(count), summed, strip);
      memset(tile, 0, size_t(rows * width) * sizeof *tile);
      for (int64_t column = 0; column < width; column += panel) {
        kernels.gemm_float(values + column * n + low * panel, strip, summed, tile + column, width);
      }
      for (int64_t r = 0; r < count; ++r) {
        memcpy(result(batch, t + r, head), tile + r * width, size_t(d) * sizeof *out);
      }
    }
  });
  return failed;
}

}  // namespace

int attention(const Kernels& kernels, const fw_decoder& decoder, const fw_layer& layer,
              const fw_chunk& chunk, const Heads& q, float* out, int threads) {
  const Attention call{kernels, decoder, layer, chunk, q, out, threads};
  return chunk.tokens == 1 ? call.one_token() : call.many_tokens();
}

}  // namespace fw
