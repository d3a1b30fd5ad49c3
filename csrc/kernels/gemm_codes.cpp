// Many rows of int8 activations times a panel of int8 weights, in blocks that share a scale.
//
// Panel: for every kStep summed weights, one 32-bit word for each of kPanel outputs. Strip: the
// same words for each of kStripRows rows of activations. Sums are exact within a block.
#include "codes.h"
#include "kernels.h"
#include "panel.h"
#include "scales.h"

namespace fw::FW_ISA {
namespace {

constexpr int64_t kChunk = 64;  // weights of a row that are laid out together

// The kChunk codes of a row from `column` on: where they are, or copied with zeros at the end.
const int8_t* codes_of(const fw_matrix& w, const int8_t* table, int64_t row, int64_t column,
                       int8_t* buffer) {
  const int64_t left = w.columns - column, n = left < kChunk ? left : kChunk;
  if (w.format == FW_I8) {
    const int8_t* codes = static_cast<const int8_t*>(w.data) + row * w.columns + column;
    if (n == kChunk) return codes;
    memset(buffer, 0, kChunk);
    memcpy(buffer, codes, size_t(n));
    return buffer;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + (row * w.columns + column) / 2;
#if defined(__AVX2__)
  if (n == kChunk) {
    const __m256i both = load<__m256i>(bytes), fifteen = _mm256_set1_epi8(15);
    const __m256i codes = _mm256_broadcastsi128_si256(load<__m128i>(table));
    const __m256i even =
        _mm256_shuffle_epi8(codes, _mm256_and_si256(_mm256_srli_epi16(both, 4), fifteen));
    const __m256i odd = _mm256_shuffle_epi8(codes, _mm256_and_si256(both, fifteen));
    const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
    store(buffer, _mm256_permute2x128_si256(low, high, 0x20));
    store(buffer + 32, _mm256_permute2x128_si256(low, high, 0x31));
    return buffer;
  }
#endif
  memset(buffer, 0, kChunk);
  for (int64_t k = 0; k < n; k += 2) {
    buffer[k] = table[bytes[k / 2] >> 4];
    buffer[k + 1] = table[bytes[k / 2] & 15];
  }
  return buffer;
}

// Words of one row for a strip or a panel: kChunk codes as they are, or widened to int16.
constexpr int kWords = kChunk / kStep;
inline void to_words(const int8_t* codes, int32_t* words) {
  if constexpr (kStep == 4) {
    memcpy(words, codes, kChunk);
  } else {
    int16_t wide[kChunk];
    for (int k = 0; k < kChunk; ++k) wide[k] = codes[k];
    memcpy(words, wide, sizeof wide);
  }
}

// The words of an activation and of a weight multiplied lane by lane and added to the sums.
inline I32 multiply_words(I32 sums, I32 x, I32 w) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return multiply_add(sums, I8(x), I8(w));  // strips hold x + kOffset
#elif defined(__AVX2__)
  return sums + I32(_mm256_madd_epi16(__m256i(x), __m256i(w)));
#else
  return sums + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
}

}  // namespace

void pack_strip_codes(const int8_t* rows, int64_t stride, int count, int64_t padded,
                      int32_t* strip) {
  for (int m = 0; m < kStripRows; ++m) {
    for (int64_t k = 0; k < padded; k += kChunk) {
      int8_t codes[kChunk] = {};
      if (m < count) memcpy(codes, rows + m * stride + k, kChunk);
      if constexpr (kOffset) {
        for (int8_t& code : codes) code ^= int8_t(-128);
      }
      int32_t words[kWords];
      to_words(codes, words);
      int32_t* out = strip + k / kStep * kStripRows + m;
      for (int word = 0; word < kWords; ++word) out[word * kStripRows] = words[word];
    }
  }
}

void pack_panel_codes(const fw_matrix& w, const int8_t* table, int64_t row, int64_t padded,
                      int64_t block, int32_t* panel, float* scales, int32_t* starts) {
  const int64_t rows = w.rows - row < kPanel ? w.rows - row : kPanel;
  alignas(64) int32_t words[kPanel][kWords] = {};
  for (int64_t k = 0; k < padded; k += kChunk) {
    for (int64_t r = 0; r < rows; ++r) {
      int8_t buffer[kChunk];
      to_words(codes_of(w, table, row + r, k, buffer), words[r]);
    }
    int32_t* out = panel + k / kStep * kPanel;
    for (int word = 0; word < kWords; word += 8) {
      for (int r = 0; r < kPanel; r += 8) {
        transpose_8x8(words[r] + word, sizeof words[r], out + word * kPanel + r, kPanel * 4);
      }
    }
  }
  const int64_t blocks = padded / block;
  for (int64_t b = 0; b < blocks; ++b) {
    if constexpr (kOffset) {  // sums start at −kOffset · Σw, what the strips' offset adds
      for (int half = 0; half < 2; ++half) {
        I32 total = {};
        for (int64_t word = 0; word < block / kStep; ++word) {
          const int64_t at = (b * block / kStep + word) * kPanel + half * kLanes;
          total = multiply_words(total, splat(int32_t(0x80808080)), load<I32>(panel + at));
        }
        store(starts + b * kPanel + half * kLanes, -total);
      }
    }
  }
  for (int r = 0; r < kPanel; ++r) {
    if (w.format == FW_I8) {
      scales[r] = r < rows ? w.absmax[row + r] * (1 / 127.0f) : 0;
      continue;
    }
    for (int64_t b = 0; b < blocks; b += kChunk) {
      float buffer[kChunk];
      const int64_t left = r < rows ? w.columns / block - b : 0, n = left < kChunk ? left : kChunk;
      const float* of_row = block_scales(w, (row + r) * w.columns + b * block, block, n, buffer);
      for (int64_t i = 0; i < kChunk && b + i < blocks; ++i) {
        scales[(b + i) * kPanel + r] = i < n ? of_row[i] : 0;
      }
    }
  }
}

void gemm_codes(const int32_t* panel, const float* scales, const int32_t* starts,
                const int32_t* strip, const float* strip_scales, int64_t words_per_block,
                int64_t blocks, float* tile, int64_t stride) {
  F32 totals[kStripRows][2] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    I32 sums[kStripRows][2];
    for (int half = 0; half < 2; ++half) {
      I32 start = {};
      if constexpr (kOffset) start = load<I32>(starts + b * kPanel + half * kLanes);
      for (int m = 0; m < kStripRows; ++m) sums[m][half] = start;
    }
    for (int64_t word = 0; word < words_per_block; ++word, panel += kPanel, strip += kStripRows) {
      const I32 first = load<I32>(panel), second = load<I32>(panel + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kStripRows; ++m) {
        const I32 x = splat(strip[m]);
        sums[m][0] = multiply_words(sums[m][0], x, first);
        sums[m][1] = multiply_words(sums[m][1], x, second);
      }
    }
    const F32 first = load<F32>(scales + b * kPanel), second = load<F32>(scales + b * kPanel + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kStripRows; ++m) {
      const F32 scale = splat(strip_scales[b * kStripRows + m]);
      totals[m][0] += to_float(sums[m][0]) * (first * scale);
      totals[m][1] += to_float(sums[m][1]) * (second * scale);
    }
  }
  for (int m = 0; m < kStripRows; ++m) {
    for (int half = 0; half < 2; ++half) {
      store(tile + m * stride + half * kLanes, totals[m][half]);
    }
  }
}

}  // namespace fw::FW_ISA
