// The C interface of the native library: pointers, sizes, and nothing of Python or torch.
//
// Every pointer is to memory that the caller owns and keeps alive for the call. Matrices are
// row-major and dense. `threads` is the most threads a call may use (at least 1). Nothing here
// throws or prints. Functions that need scratch memory return 0, or -1 where there is none.
// Callers cut long work into calls of less than 200 ms (an interrupt waits for one).
#pragma once

#include <stdint.h>

#define FW_API extern "C" __attribute__((visibility("default")))

// What was built, and by what.
FW_API const char* fw_compiler(void);  // name, version and flags, for people to read
FW_API int fw_has_openmp(void);        // 0: every call is serial

// Instruction sets, numbered from 0 (baseline) upwards in order of preference.
FW_API int fw_isa_count(void);
FW_API const char* fw_isa_name(int isa);
FW_API int fw_isa_built(int isa);     // 1: this library holds kernels for it
FW_API int fw_isa_detected(int isa);  // 1: this CPU and its operating system run it
FW_API int fw_isa_active(void);       // the one in use
// Uses another one from now on. Returns 0, or -1 and changes nothing unless built and detected.
FW_API int fw_isa_use(int isa);

// Sum, modulo 2^64, of the native 64-bit words of data[nbytes]; missing bytes of the last are 0.
FW_API uint64_t fw_sum_words(const uint8_t* data, int64_t nbytes, int threads);

// Arithmetic out of registers: every thread does `rounds` rounds. Return the operations
// done by all of them together, a multiply and an add counted as two.
FW_API int64_t fw_probe_f32(int64_t rounds, int threads);
FW_API int64_t fw_probe_i8(int64_t rounds, int threads);

// Element types, and formats of weights.
enum { FW_F32 = 0, FW_BF16 = 1, FW_F16 = 2, FW_I8 = 3, FW_4BIT = 4 };

// A weight matrix [rows, columns].
//   FW_F32, FW_BF16, FW_F16   data: the numbers
//   FW_I8    data: int8 codes; absmax: fp32 [rows]; weight = code · absmax / 127
//   FW_4BIT  data: two codes a byte, the first in the high nibble, rows without gaps between them;
//            weight i (counted through the whole matrix) = code[nibble i] · scale[i / blocksize],
//            scale = absmax, or nested: nested_code[absmax_codes] · absmax[block / 256] + offset
typedef struct fw_matrix {
  const void* data;
  const float* absmax;
  const float* code;            // [16]
  const uint8_t* absmax_codes;  // [blocks], or null: not nested
  const float* nested_code;     // [256]
  int64_t rows, columns, blocksize;
  float nested_offset;
  int32_t format;
} fw_matrix;

// How fw_linear treats activations.
enum {
  FW_EXACT = 1,      // 4-bit weights times float activations, not int8 ones
  FW_PER_BATCH = 2,  // a column with one outlier is an outlier column for all rows
};

// out[m, rows] = x[m, columns] · weightᵀ + bias. x and out have element type `type`; bias is
// fp32 [rows] or null. With int8 weights, activations of magnitude ≥ threshold > 0 are multiplied
// in fp32 (LLM.int8(), arXiv 2208.07339). A row of x that is not finite gives NaN.
FW_API int fw_linear(const fw_matrix* weight, const void* x, void* out, const float* bias,
                     int64_t m, int type, float threshold, int flags, int threads);

// The same product for an int8 weight of fewer than 131072 columns and rows that are int8 codes
// already, x = code · absmax / 127: codes[m, columns], absmax[m]. What was taken out of the rows is
// multiplied in fp32: columns outlier_columns[outlier_count], values outliers[m, outlier_count].
FW_API int fw_linear_codes(const fw_matrix* weight, const int8_t* codes, const float* absmax,
                           const int64_t* outlier_columns, const float* outliers,
                           int64_t outlier_count, void* out, const float* bias, int64_t m,
                           int type, int threads);

// out[m, columns] = grad[m, rows] · weight, in fp32, the weight decoded tile by tile.
FW_API int fw_linear_backward(const fw_matrix* weight, const void* grad, void* out, int64_t m,
                              int type, int threads);

// All weights as numbers of element type `type`: out[rows, columns].
FW_API void fw_decode(const fw_matrix* weight, void* out, int type, int threads);

// Block by block: absmax[blocks], and for each weight · (1 / absmax) the number of midpoints
// between neighbours of the sorted codebook that lie below it, as a code. codes[(n + 1) / 2].
// Returns -1 for a weight that is not finite.
FW_API int fw_quantize_4bit(const void* weights, int type, int64_t n, int64_t blocksize,
                            const float* midpoints, const uint8_t* order, uint8_t* codes,
                            float* absmax, int threads);

// Row by row: codes[rows, columns] = round(x · (127 / absmax)), absmax[rows]. A row that is not
// finite gets codes 0 and absmax NaN. Numbers of magnitude ≥ threshold > 0 are left out: they get
// code 0, and outlier_columns[columns] is set to 1 where they stand.
FW_API int fw_quantize_rows(const void* x, int type, int64_t rows, int64_t columns,
                            float threshold, int8_t* codes, float* absmax,
                            uint8_t* outlier_columns, int threads);

// Decoders: all layers of a chunk of tokens in one call, in float32.

enum { FW_SILU = 0, FW_GELU_TANH = 1, FW_GELU = 2, FW_RELU = 3 };

typedef struct fw_norm {
  const float* weight;  // [n], or null: this norm does nothing
  const float* bias;    // [n], or null
  float eps;
  int32_t center;  // 1: LayerNorm, which subtracts the mean; 0: RMSNorm
} fw_norm;

typedef struct fw_projection {
  fw_matrix weight;   // weight.data null: there is none
  const float* bias;  // [rows], or null
  float threshold;    // as for fw_linear
  int32_t flags;
} fw_projection;

typedef struct fw_layer {
  fw_norm attention_norm, mlp_norm;          // of the residual stream, before each
  fw_norm after_attention, after_mlp;        // of what is added to it
  fw_norm q_norm, k_norm;                    // of each head
  fw_projection q, k, v, o, gate, up, down;  // without gate the MLP is plain
  void* keys;                                // [batch, kv_heads, capacity, head_dim]
  void* values;
  float* key_absmax;  // of FW_I8, [batch, kv_heads, capacity]: number = code · absmax / 127
  float* value_absmax;
  int64_t capacity;
  int64_t window;  // keys that a query sees at most, itself included; 0: all
  float scaling;   // of scores; above 0
} fw_layer;

// How q, k and v come: from three matrices, or all from fw_layer.q, one after the other or head
// by head (q, k, v of the first head, then of the second …).
enum { FW_SEPARATE = 0, FW_STACKED = 1, FW_BY_HEAD = 2 };

typedef struct fw_decoder {
  int64_t hidden, heads, kv_heads, head_dim, rotary_dim, intermediate;
  int32_t activation;
  int32_t parallel;      // 1: attention and MLP read the same residual stream
  int32_t qkv;           // FW_SEPARATE …
  int32_t gate_with_up;  // 1: fw_layer.up gives the gate, then up
  int32_t cache;         // type of keys and values: FW_F32, FW_BF16, FW_F16 or FW_I8
} fw_decoder;

// x is [batch, tokens, hidden]. The cache holds `past` keys before the call, past + tokens after.
typedef struct fw_chunk {
  int64_t batch, tokens, past;
  const float* cos;     // [batch, tokens, rotary_dim / 2], or null: nothing is rotated
  const float* sin;
  const uint8_t* seen;  // [batch, past + tokens]: keys that may be seen, or null: all
  const fw_norm* last;  // of the residual stream after the layers of this call, or null
} fw_chunk;

// Bytes of fw_decoder, fw_layer and fw_chunk together: what a caller's own definitions must have.
FW_API int64_t fw_decoder_bytes(void);

// Passes x through layers[count], in place, and writes keys and values into their caches.
FW_API int fw_decoder_layers(const fw_decoder* decoder, const fw_layer* layers, int64_t count,
                             const fw_chunk* chunk, float* x, int threads);
