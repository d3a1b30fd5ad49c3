// All layers of a decoder for a chunk of tokens.
#include "linear.h"

namespace fw {
namespace {

constexpr int64_t kSerialNumbers = 32768;  // below, one thread is done before others are awake

struct Forward {
  const Kernels& kernels;
  const fw_decoder& decoder;
  const fw_chunk& chunk;
  float* x;  // the residual stream, [m, hidden]
  int threads;
  int64_t m;
  float *normed = nullptr, *mixed = nullptr, *gate = nullptr, *up = nullptr, *added = nullptr;
  Heads q{}, k{}, v{};

  bool take(Scratch& scratch);
  int layer(const fw_layer& layer);
  int attend(const fw_layer& layer);
  int feed_forward(const fw_layer& layer);
  void place(const fw_layer& layer);
  int products(const fw_projection* const* weights, float* const* outs, int count,
               const float* input);

  // body(row) for all rows, each of about n numbers.
  template <class Body>
  void rows(int64_t n, const Body& body) {
    parallel_ranges(m, 1, m * n < kSerialNumbers ? 1 : threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }
  void normalise(const fw_norm& norm, const float* from, int64_t n, float* to) {
    kernels.normalise(from, n, norm.weight, norm.bias, norm.eps, norm.center, to);
  }
};

bool Forward::take(Scratch& scratch) {
  const fw_decoder& d = decoder;
  const int64_t dim = d.head_dim, own = d.heads * dim, shared = d.kv_heads * dim;
  const int64_t all = own + 2 * shared;
  normed = scratch.take<float>(m * d.hidden);
  mixed = scratch.take<float>(m * own);
  gate = scratch.take<float>(m * d.intermediate * (d.gate_with_up ? 2 : 1));
  up = scratch.take<float>(m * d.intermediate);
  added = scratch.take<float>(m * d.hidden);
  float* heads = scratch.take<float>(m * all);
  if (!normed || !mixed || !gate || !up || !added || !heads) return false;
  switch (d.qkv) {
    case FW_SEPARATE:
      q = {heads, own, dim};
      k = {heads + m * own, shared, dim};
      v = {heads + m * (own + shared), shared, dim};
      break;
    case FW_STACKED:
      q = {heads, all, dim};
      k = {heads + own, all, dim};
      v = {heads + own + shared, all, dim};
      break;
    default:
      q = {heads, all, 3 * dim};
      k = {heads + dim, all, 3 * dim};
      v = {heads + 2 * dim, all, 3 * dim};
  }
  return true;
}

// Those that share what is made of the input run as one.
int Forward::products(const fw_projection* const* weights, float* const* outs, int count,
                      const float* input) {
  int begin = 0;
  while (begin < count) {
    const auto call = [&](int i) {
      const fw_projection& p = *weights[i];
      return make_call(p.weight, input, outs[i], p.bias, m, FW_F32, p.threshold, p.flags, threads);
    };
    const Call calls[] = {call(begin), call(begin + 1 < count ? begin + 1 : begin),
                          call(begin + 2 < count ? begin + 2 : begin)};
    int alike_calls = 1;
    while (begin + alike_calls < count && alike(calls[0], calls[alike_calls])) ++alike_calls;
    if ((m > kFewRows ? many_rows : few_rows)(calls, alike_calls)) return -1;
    begin += alike_calls;
  }
  return 0;
}

// Norms and angles of q and k, and k and v into the cache.
void Forward::place(const fw_layer& layer) {
  const fw_decoder& d = decoder;
  const int64_t half = d.rotary_dim / 2, dim = d.head_dim;
  rows((d.heads + 2 * d.kv_heads) * dim, [&](int64_t row) {
    const int64_t batch = row / chunk.tokens, t = row % chunk.tokens;
    const auto turn = [&](float* head, const fw_norm& norm) {
      if (norm.weight) normalise(norm, head, dim, head);
      if (chunk.cos) kernels.rotate(head, half, chunk.cos + row * half, chunk.sin + row * half);
    };
    const auto keep = [&](const float* head, int64_t to, void* cache, float* absmax) {
      if (d.cache != FW_I8) return kernels.narrow(head, dim, d.cache, cache, to * dim);
      kernels.quantize_codes(head, dim, dim, static_cast<int8_t*>(cache) + to * dim, absmax + to);
    };
    for (int64_t h = 0; h < d.heads; ++h) turn(q.at(row, h), layer.q_norm);
    for (int64_t h = 0; h < d.kv_heads; ++h) {
      const int64_t to = (batch * d.kv_heads + h) * layer.capacity + chunk.past + t;
      turn(k.at(row, h), layer.k_norm);
      keep(k.at(row, h), to, layer.keys, layer.key_absmax);
      keep(v.at(row, h), to, layer.values, layer.value_absmax);
    }
  });
}

int Forward::attend(const fw_layer& layer) {
  const fw_projection* weights[] = {&layer.q, &layer.k, &layer.v};
  float* outs[] = {q.data, k.data, v.data};
  if (products(weights, outs, decoder.qkv == FW_SEPARATE ? 3 : 1, normed)) return -1;
  place(layer);
  if (attention(kernels, decoder, layer, chunk, q, mixed, threads)) return -1;
  const fw_projection* weight = &layer.o;
  return products(&weight, &added, 1, mixed);
}

// Reads `normed`, and leaves its result there.
int Forward::feed_forward(const fw_layer& layer) {
  const int64_t n = decoder.intermediate;
  const bool gated = layer.gate.weight.data, both = decoder.gate_with_up;
  const fw_projection* weights[] = {&layer.up, &layer.gate};
  float* outs[] = {both ? gate : up, gate};
  if (products(weights, outs, gated ? 2 : 1, normed)) return -1;
  rows(n, [&](int64_t row) {
    float* at = up + row * n;
    const float* first = both ? gate + 2 * row * n : gated ? gate + row * n : at;
    const float* second = both ? first + n : gated ? at : nullptr;
    kernels.activate(first, second, n, decoder.activation, at);
  });
  const fw_projection* down = &layer.down;
  return products(&down, &normed, 1, up);
}

int Forward::layer(const fw_layer& layer) {
  const int64_t n = decoder.hidden;
  rows(n, [&](int64_t row) { normalise(layer.attention_norm, x + row * n, n, normed + row * n); });
  if (attend(layer)) return -1;
  rows(n, [&](int64_t row) {
    float* stream = x + row * n;
    float* change = added + row * n;
    if (layer.after_attention.weight) normalise(layer.after_attention, change, n, change);
    if (!decoder.parallel) kernels.add(stream, change, n);
    normalise(layer.mlp_norm, stream, n, normed + row * n);
  });
  if (feed_forward(layer)) return -1;
  rows(n, [&](int64_t row) {
    float* change = normed + row * n;
    if (layer.after_mlp.weight) normalise(layer.after_mlp, change, n, change);
    if (decoder.parallel) kernels.add(x + row * n, added + row * n, n);
    kernels.add(x + row * n, change, n);
  });
  return 0;
}

}  // namespace
}  // namespace fw

int64_t fw_decoder_bytes(void) {
  return sizeof(fw_decoder) + sizeof(fw_layer) + sizeof(fw_chunk);
}

int fw_decoder_layers(const fw_decoder* decoder, const fw_layer* layers, int64_t count,
                      const fw_chunk* chunk, float* x, int threads) {
  const int64_t m = chunk->batch * chunk->tokens;
  if (m <= 0) return 0;
  fw::Scratch scratch(fw::Scratch::kForward);
  fw::Forward forward{fw::kernels(), *decoder, *chunk, x, threads, m};
  if (!forward.take(scratch)) return -1;
  for (int64_t i = 0; i < count; ++i) {
    if (forward.layer(layers[i])) return -1;
  }
  const int64_t n = decoder->hidden;
  if (chunk->last) {
    forward.rows(n, [&](int64_t row) {
      forward.normalise(*chunk->last, x + row * n, n, x + row * n);
    });
  }
  return 0;
}
