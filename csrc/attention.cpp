// Attention over a cache: who computes what. Memory is linear in the number of keys.
#include <math.h>

#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kSplit = 32;          // keys, at least, that one share of a query's keys has
constexpr int64_t kLaidOut = 1 << 20;   // numbers laid out at a time, or those of one head
constexpr int64_t kSerialWork = 16384;  // products below which other threads are left asleep

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t at_most(int64_t limit, int64_t n) { return n < limit ? n : limit; }

// Keys and values of some heads in panels.
struct LaidOut {
  float *keys, *values;
  int64_t of_keys, of_values;   // numbers of one head
  int64_t batch, first, heads;  // heads of keys: the first, and how many
};

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
  int lay_out(const LaidOut& to) const;
  int many_tokens_of(const LaidOut& from) const;
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
// As many heads of keys at a time as are laid out in little memory.
int Attention::many_tokens() const {
  const int64_t panel = kernels.gemm_shape().panel, n = length();
  const int64_t of_keys = ceil_div(n, panel) * panel * dim();
  const int64_t of_values = ceil_div(dim(), panel) * panel * n;
  const int64_t fit = kLaidOut / (of_keys + of_values);
  const int64_t heads = fit < 1 ? 1 : at_most(fit, decoder.kv_heads);
  Scratch scratch(Scratch::kCall);
  float* keys = scratch.take<float>(of_keys * heads);
  float* values = scratch.take<float>(of_values * heads);
  if (!keys || !values) return -1;
  for (int64_t batch = 0; batch < chunk.batch; ++batch) {
    for (int64_t head = 0; head < decoder.kv_heads; head += heads) {
      const LaidOut laid_out{keys,  values, of_keys, of_values,
                             batch, head,   at_most(heads, decoder.kv_heads - head)};
      if (lay_out(laid_out) || many_tokens_of(laid_out)) return -1;
    }
  }
  return 0;
}

int Attention::lay_out(const LaidOut& to) const {
  const int64_t n = length(), d = dim(), panel = kernels.gemm_shape().panel;
  const int64_t panels = ceil_div(n, panel), width = ceil_div(d, panel) * panel;
  int failed = 0;
  parallel_ranges(to.heads * panels, 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* decoded = scratch.take<float>(panel * d);
    if (!decoded) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t p = begin; p < end; ++p) {
      const int64_t key = p % panels * panel, count = at_most(panel, n - key);
      const CachedHead head = cached(to.batch, to.first + p / panels, key);
      float* values = to.values + p / panels * to.of_values;
      widen(head.keys, head.key_absmax, count, decoded);
      kernels.pack_keys(decoded, d, count, panel, to.keys + p / panels * to.of_keys + key * d);
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
  return failed;
}

int Attention::many_tokens_of(const LaidOut& from) const {
  const GemmShape shape = kernels.gemm_shape();
  const int64_t n = length(), d = dim(), panel = shape.panel, rows = shape.strip_rows;
  const int64_t width = ceil_div(d, panel) * panel, strips = ceil_div(chunk.tokens, rows);
  int failed = 0;
  parallel_ranges(from.heads * group() * strips, 1, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(Scratch::kLoop);
    float* strip = scratch.take<float>((n > d ? n : d) * rows);
    float* scores = scratch.take<float>(rows * (n + panel));
    float* tile = scratch.take<float>(rows * width);
    float* shares = scratch.take<float>(rows);
    if (!strip || !scores || !tile || !shares) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    const uint8_t* mask = seen(from.batch);
    for (int64_t task = begin; task < end; ++task) {
      // From both ends in turns: later tokens see more keys, and shares are contiguous.
      const int64_t i = task % strips, of_these = task / strips;
      const int64_t head = from.first * group() + of_these;
      const int64_t t = (i % 2 ? strips - 1 - i / 2 : i / 2) * rows;
      const float* keys = from.keys + of_these / group() * from.of_keys;
      const float* values = from.values + of_these / group() * from.of_values;
      const int64_t count = at_most(rows, chunk.tokens - t);
      const int64_t low = first(t) / panel * panel, high = this->end(t + count - 1);
      const int64_t across = ceil_div(high - low, panel) * panel, summed = high - low;
      kernels.pack_strip_float(query(from.batch, t, head), q.row, int(count), d, strip);
      memset(scores, 0, size_t(rows * across) * sizeof *scores);
      for (int64_t key = 0; key < across; key += panel) {
        kernels.gemm_float(keys + (low + key) * d, strip, d, scores + key, across);
      }
      for (int64_t r = 0; r < count; ++r) {
        shares[r] = kernels.softmax(scores + r * across, mask ? mask + low : nullptr,
                                    first(t + r) - low, this->end(t + r) - low, across,
                                    layer.scaling);
      }
      kernels.pack_strip_float(scores, across, int(count), summed, strip);
      memset(tile, 0, size_t(rows * width) * sizeof *tile);
      for (int64_t column = 0; column < width; column += panel) {
        kernels.gemm_float(values + column * n + low * panel, strip, summed, tile + column, width);
      }
      for (int64_t r = 0; r < count; ++r) {
        float* target = result(from.batch, t + r, head);
        for (int64_t k = 0; k < d; ++k) target[k] = tile[r * width + k] * shares[r];
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
