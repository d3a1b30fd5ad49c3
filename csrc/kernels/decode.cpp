// Weights of any format as float32: the way into every product with float activations.
#include "elements.h"
#include "kernels.h"
#include "scales.h"

namespace fw::FW_ISA {
namespace {

float decode_4bit1(const fw_matrix& w, int64_t index) {
  const uint8_t byte = static_cast<const uint8_t*>(w.data)[index / 2];
  const int code = index % 2 ? byte & 15 : byte >> 4;
  return w.code[code] * block_scale(w, index / w.blocksize);
}

#if defined(__AVX512F__)

struct Lookup {
  __m512 code;
  explicit Lookup(const float* code) : code(_mm512_loadu_ps(code)) {}
  F32 operator()(const uint8_t* bytes) const {  // 8 bytes: 16 weights
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(
        _mm_srli_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)), 4),
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
    return F32(_mm512_permutexvar_ps(pairs, code));  // reads the low four bits of each lane
  }
};

#elif defined(__AVX2__)

struct Lookup {
  __m256 low, high;
  explicit Lookup(const float* code) : low(_mm256_loadu_ps(code)), high(_mm256_loadu_ps(code + 8)) {}
  F32 operator()(const uint8_t* bytes) const {  // 4 bytes: 8 weights
    const __m256i shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(load<int32_t>(bytes)), shifts);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // bit 3 as the sign
    return F32(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes),  // reads three bits
                                _mm256_permutevar8x32_ps(high, codes), upper));
  }
};

#else

struct Lookup {
  const float* code;
  explicit Lookup(const float* code) : code(code) {}
  F32 operator()(const uint8_t* bytes) const {
    F32 values;
    for (int lane = 0; lane < kLanes; ++lane) {
      values[lane] = code[lane % 2 ? bytes[lane / 2] & 15 : bytes[lane / 2] >> 4];
    }
    return values;
  }
};

#endif

void decode_4bit(const fw_matrix& w, int64_t index, int64_t n, float* out) {
  const Lookup lookup(w.code);
  const int64_t end = index + n;
  while (index < end) {
    const int64_t block = index / w.blocksize, next = (block + 1) * w.blocksize;
    const int64_t stop = next < end ? next : end;
    if (index % 2) *out++ = decode_4bit1(w, index++);
    const F32 scale = splat(block_scale(w, block));
    for (; index + kLanes <= stop; index += kLanes, out += kLanes) {
      store(out, lookup(static_cast<const uint8_t*>(w.data) + index / 2) * scale);
    }
    for (; index < stop; ++index) *out++ = decode_4bit1(w, index);
  }
}

void decode_i8(const fw_matrix& w, int64_t row, int64_t column, int64_t n, float* out) {
  const int8_t* codes = static_cast<const int8_t*>(w.data) + row * w.columns + column;
  const float scale = w.absmax[row] * (1 / 127.0f);
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    store(out + k, to_float(widen(load<NarrowI8>(codes + k))) * scale);
  }
  for (; k < n; ++k) out[k] = float(codes[k]) * scale;
}

}  // namespace

void decode(const fw_matrix& w, int64_t row, int64_t column, int64_t n, float* out) {
  switch (w.format) {
    case FW_I8: return decode_i8(w, row, column, n, out);
    case FW_4BIT: return decode_4bit(w, row * w.columns + column, n, out);
    default: return widen(w.data, w.format, row * w.columns + column, n, out);
  }
}

}  // namespace fw::FW_ISA
