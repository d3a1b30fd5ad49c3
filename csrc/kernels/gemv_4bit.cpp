// A few rows of int8 activations times rows of 4-bit weights, read as they are stored.
//
// A vector of code bytes holds twice as many weights: even ones in the high nibbles, odd ones in
// the low. Activations are arranged to match once per call, so nothing is shuffled per row: first
// all even ones, then all odd ones, then what the ISA's product needs besides.
#include <type_traits>

#include "codes.h"
#include "kernels.h"
#include "math.h"
#include "scales.h"
#include "streams.h"

namespace fw::FW_ISA {
namespace {

constexpr int kBytes = FW_VECTOR_BYTES;    // of codes in a step
constexpr int64_t kWeights = 2 * kBytes;   // in a step
constexpr int64_t kSegment = 4096;         // weights whose scales are looked up together

#if defined(__AVX2__)
typedef decltype(load_table(nullptr)) Table;
#else
typedef I8 Table;
#endif

// Integer dot products of one step, four even and four odd neighbours to a lane.
inline I32 step(I8 even, I8 odd, const int8_t* x, int64_t padded) {
  const I8 x_even = load<I8>(x), x_odd = load<I8>(x + padded / 2);
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  // The weights' offset of 128 is taken off by where the sums start.
  I32 sums = load<I32>(x + padded);
  return multiply_add(multiply_add(sums, even, x_even), odd, x_odd);
#elif defined(__AVX2__)
  const __m256i abs_even = load<__m256i>(x + padded), abs_odd = load<__m256i>(x + padded * 3 / 2);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i evens = _mm256_maddubs_epi16(abs_even, _mm256_sign_epi8(__m256i(even), __m256i(x_even)));
  const __m256i odds = _mm256_maddubs_epi16(abs_odd, _mm256_sign_epi8(__m256i(odd), __m256i(x_odd)));
  return I32(_mm256_add_epi32(_mm256_madd_epi16(evens, ones), _mm256_madd_epi16(odds, ones)));
#else
  return multiply_add(multiply_add(I32{}, even, x_even), odd, x_odd);
#endif
}

// The scale of each lane (8 weights) of a step, where every kBlock weights have one; `count` of the
// step's scales are there.
template <int kBlock>
inline F32 lane_scales(const float* scales, [[maybe_unused]] int64_t count) {
  if constexpr (kBlock >= kWeights) return splat(*scales);
#if defined(__AVX512F__)
  constexpr bool kTwo = kBlock == 64;
  const __m512i lanes = kTwo ? _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
                             : _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const __m512i some = count < kWeights / kBlock ? __m512i(load_part(scales, count, 0))
                       : kTwo ? _mm512_set1_epi64(load<int64_t>(scales))
                              : _mm512_broadcast_i32x4(load<__m128i>(scales));
  return F32(_mm512_permutexvar_epi32(lanes, some));
#elif defined(__AVX2__)
  const __m256 high = _mm256_set1_ps(count > 1 ? scales[1] : 0);
  return F32(_mm256_blend_ps(_mm256_set1_ps(scales[0]), high, 0xf0));
#endif
}

// R rows of weights, `apart` of one another, share each load of M of activations.
template <int kBlock, int R, int M>
inline void rows_dot(const fw_matrix& w, Table table, int64_t row, int64_t apart, const int8_t* x,
                     int64_t x_stride, const float* scales, int64_t scale_stride,
                     float out[R][M]) {
  constexpr int64_t kScales = kWeights / kBlock;  // of a step, a part of one counted as 1
  constexpr int64_t kStep = kScales > 1 ? kScales : 1;
  const int64_t padded = x_stride / 2, stride = apart * w.columns / 2;
  const bool plain = !w.absmax_codes && w.blocksize == kBlock;
  F32 sums[R][M] = {};
  for (int64_t segment = 0; segment < w.columns; segment += kSegment) {
    const int64_t left = w.columns - segment, weights = left < kSegment ? left : kSegment;
    float buffers[R][kSegment / kBlock];
    const float* of_weights[R];
    FW_UNROLLED
    for (int r = 0; r < R; ++r) {
      const int64_t from = (row + r * apart) * w.columns + segment;
      of_weights[r] = plain ? w.absmax + from / kBlock
                            : block_scales(w, from, kBlock, weights / kBlock, buffers[r]);
    }
    const float* of_x = scales + segment / kBlock;
    const uint8_t* codes = static_cast<const uint8_t*>(w.data) + (row * w.columns + segment) / 2;
    const int8_t* x_at = x + segment / 2;
    const auto step_at = [&](int64_t index, int64_t count, const auto& get) {
      const int64_t at = index * kWeights / kBlock;
      F32 x_scales[M];
      FW_UNROLLED
      for (int m = 0; m < M; ++m) {
        x_scales[m] = lane_scales<kBlock>(of_x + m * scale_stride + at, count);
      }
      FW_UNROLLED
      for (int r = 0; r < R; ++r) {
        fetch_ahead<M>(codes + r * stride + index * kBytes);
        const I8 both = get(codes + r * stride + index * kBytes);
        const I8 even = lookup(table, high_nibbles(both)), odd = lookup(table, low_nibbles(both));
        const F32 w_scales = lane_scales<kBlock>(of_weights[r] + at, count);
        FW_UNROLLED
        for (int m = 0; m < M; ++m) {
          const I32 dots = step(even, odd, x_at + m * x_stride + index * kBytes, padded);
          sums[r][m] += to_float(dots) * (w_scales * x_scales[m]);
        }
      }
    };
    const int64_t steps = weights / kWeights, rest = weights % kWeights;
    for (int64_t i = 0; i < steps; ++i) step_at(i, kStep, load<I8>);
    if (rest) {
      step_at(steps, rest / kBlock,
              [&](const uint8_t* from) { return load_codes(from, rest / 2); });
    }
  }
  FW_UNROLLED
  for (int r = 0; r < R; ++r) {
    FW_UNROLLED
    for (int m = 0; m < M; ++m) out[r][m] = sum(sums[r][m]);
  }
}

template <int kBlock, int M>
void rows_times(const fw_matrix& w, const int8_t* table, int64_t begin,
                int64_t end, const int8_t* x, int64_t x_stride, const float* scales,
                int64_t scale_stride, float* tile, int64_t tile_stride) {
  const Table loaded = load_table(table);
  constexpr int kRows = FW_VECTOR_BYTES == 64 ? 4 : M <= 2 ? 2 : 1;  // codes take registers too
  in_streams<kRows>(begin, end, [&](auto count, int64_t row, int64_t apart) {
    constexpr int R = count.value;
    float sums[R][M];
    rows_dot<kBlock, R, M>(w, loaded, row, apart, x, x_stride, scales, scale_stride, sums);
    FW_UNROLLED
    for (int m = 0; m < M; ++m) {
      FW_UNROLLED
      for (int r = 0; r < R; ++r) tile[m * tile_stride + row - begin + r * apart] = sums[r][m];
    }
  });
}

}  // namespace

void arrange_4bit(const int8_t* __restrict codes, int64_t padded, int8_t* __restrict out) {
  int8_t *even = out, *odd = out + padded / 2, *extra = out + padded;
  for (int64_t k = 0; k < padded / 2; ++k) {
    even[k] = codes[2 * k];
    odd[k] = codes[2 * k + 1];
  }
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  const I8 offset = I8{} + int8_t(kOffset);  // as an unsigned byte
  for (int64_t at = 0; at < padded / 2; at += kBytes) {
    const I32 sums = multiply_add(I32{}, offset, load<I8>(even + at));
    store(extra + at, -multiply_add(sums, offset, load<I8>(odd + at)));
  }
#else
  for (int64_t k = 0; k < padded; ++k) extra[k] = int8_t(out[k] < 0 ? -out[k] : out[k]);
#endif
}

void gemv_4bit(const fw_matrix& w, const int8_t* table, int64_t block,
               int64_t begin, int64_t end, const int8_t* x, int64_t x_stride, const float* scales,
               int64_t scale_stride, int m, float* tile, int64_t tile_stride) {
  int8_t operands[16];
  for (int i = 0; i < 16; ++i) operands[i] = int8_t(kOffset ? table[i] ^ -128 : table[i]);
  const auto call = [&](auto rows_times, int first) {
    rows_times(w, operands, begin, end, x + first * x_stride, x_stride,
               scales + first * scale_stride, scale_stride, tile + first * tile_stride,
               tile_stride);
  };
  const auto with_block = [&](auto b) {
    constexpr int kBlock = decltype(b)::value;
    int first = 0;
    for (; first + 4 <= m; first += 4) call(rows_times<kBlock, 4>, first);
    if (m - first == 3) call(rows_times<kBlock, 3>, first);
    if (m - first == 2) call(rows_times<kBlock, 2>, first);
    if (m - first == 1) call(rows_times<kBlock, 1>, first);
  };
  if (block == 64) {
    with_block(std::integral_constant<int, 64>{});
  } else {
    with_block(std::integral_constant<int, 32>{});
  }
}

}  // namespace fw::FW_ISA
