// fw_decoder_layers on decoders of any shape: a prompt at once, and token by token on its cache.
#pragma once

#include <math.h>

#include <vector>

#include "featherweight.h"
#include "numbers.h"

// Numbers that are exactly as long as what is read, so that reading on shows.
struct Decoder {
  fw_decoder sizes{};
  std::vector<std::vector<float>> kept;
  std::vector<fw_layer> layers;
  fw_norm last{};

  const float* numbers(int64_t n, float about) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = about + float(between(-64, 64)) / 256;
    kept.push_back(std::move(values));
    return kept.back().data();
  }

  fw_projection projection(int64_t rows, int64_t columns) {
    fw_projection made{};
    made.weight.data = numbers(rows * columns, 0);
    made.weight.rows = rows;
    made.weight.columns = columns;
    made.weight.format = FW_F32;
    if (one_in(2)) made.bias = numbers(rows, 0);
    return made;
  }

  fw_norm norm(int64_t n, bool there) {
    fw_norm made{};
    made.eps = 1e-5f;
    made.center = int(between(0, 1));
    if (there) made.weight = numbers(n, 1);
    if (there && one_in(2)) made.bias = numbers(n, 0);
    return made;
  }

  Decoder() {
    fw_decoder& d = sizes;
    const bool by_head = one_in(3);
    d.qkv = by_head ? FW_BY_HEAD : int(between(0, 1));
    d.kv_heads = between(1, 3);
    d.heads = by_head ? d.kv_heads : d.kv_heads * between(1, one_in(4) ? 10 : 3);
    d.head_dim = 2 * between(1, 40);
    d.rotary_dim = 2 * between(0, d.head_dim / 2);
    d.hidden = between(1, 70);
    d.intermediate = between(1, 90);
    d.activation = int(between(0, 3));
    d.parallel = int(between(0, 1));
    d.gate_with_up = one_in(3);
    d.cache = int(between(FW_F32, FW_I8));
    const int64_t own = d.heads * d.head_dim, shared = d.kv_heads * d.head_dim;
    for (int64_t i = between(1, 2); i > 0; --i) {
      fw_layer layer{};
      layer.attention_norm = norm(d.hidden, true);
      layer.mlp_norm = norm(d.hidden, true);
      layer.after_attention = norm(d.hidden, one_in(4));
      layer.after_mlp = norm(d.hidden, one_in(4));
      layer.q_norm = norm(d.head_dim, one_in(4));
      layer.k_norm = norm(d.head_dim, one_in(4));
      layer.q = projection(d.qkv == FW_SEPARATE ? own : own + 2 * shared, d.hidden);
      if (d.qkv == FW_SEPARATE) {
        layer.k = projection(shared, d.hidden);
        layer.v = projection(shared, d.hidden);
      }
      layer.o = projection(d.hidden, own);
      if (!d.gate_with_up && one_in(2)) layer.gate = projection(d.intermediate, d.hidden);
      layer.up = projection(d.intermediate * (d.gate_with_up ? 2 : 1), d.hidden);
      layer.down = projection(d.hidden, d.intermediate);
      layer.window = one_in(2) ? between(1, 40) : 0;
      layer.scaling = 1 / sqrtf(float(d.head_dim));
      layers.push_back(layer);
    }
    last = norm(d.hidden, true);
  }

  // x [batch, length, hidden] after all layers, `step` tokens a call.
  std::vector<float> run(int64_t batch, int64_t length, int64_t step, std::vector<float> x,
                         const std::vector<float>& angles, const std::vector<uint8_t>& seen,
                         int threads) {
    const fw_decoder& d = sizes;
    const int64_t half = d.rotary_dim / 2;
    std::vector<fw_layer> placed = layers;
    std::vector<std::vector<uint8_t>> caches;
    const auto room = [&](int64_t bytes) {  // of NaN, in every float type
      caches.emplace_back(size_t(batch * d.kv_heads * length * bytes), uint8_t(255));
      return static_cast<void*>(caches.back().data());
    };
    constexpr int kBytes[] = {4, 2, 2, 1};
    for (fw_layer& layer : placed) {
      layer.capacity = length;
      layer.keys = room(d.head_dim * kBytes[d.cache]);
      layer.values = room(d.head_dim * kBytes[d.cache]);
      if (d.cache != FW_I8) continue;
      layer.key_absmax = static_cast<float*>(room(4));
      layer.value_absmax = static_cast<float*>(room(4));
    }
    for (int64_t past = 0; past < length; past += step) {
      const int64_t tokens = past + step < length ? step : length - past;
      std::vector<float> part, cos, sin;
      std::vector<uint8_t> keys;
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t t = past; t < past + tokens; ++t) {
          const float* from = x.data() + (b * length + t) * d.hidden;
          part.insert(part.end(), from, from + d.hidden);
          for (int64_t i = 0; i < half; ++i) {
            cos.push_back(cosf(angles[size_t(t * half + i)]));
            sin.push_back(sinf(angles[size_t(t * half + i)]));
          }
        }
        const auto row = seen.begin() + b * length;
        keys.insert(keys.end(), row, row + past + tokens);
      }
      fw_chunk chunk{batch, tokens, past, half ? cos.data() : nullptr, half ? sin.data() : nullptr,
                     keys.data(), past + tokens == length ? &last : nullptr};
      if (fw_decoder_layers(&d, placed.data(), int64_t(placed.size()), &chunk, part.data(),
                            threads)) {
        return {};
      }
      for (int64_t b = 0; b < batch; ++b) {
        memcpy(x.data() + (b * length + past) * d.hidden, part.data() + b * tokens * d.hidden,
               size_t(tokens * d.hidden) * sizeof(float));
      }
    }
    return x;
  }
};
