// One product of activations and a weight matrix, and what its two ways of running share.
#pragma once

#include <string.h>

#include "featherweight.h"
#include "isa.h"
#include "scratch.h"
#include "threads.h"

namespace fw {

constexpr int64_t kFewRows = 8;

struct Call {
  const Kernels& kernels;
  const fw_matrix& weight;
  const void* x;
  void* out;
  const float* bias;
  int64_t m;
  int type;
  float threshold;
  int flags;
  int threads;
  bool integer;  // int8 activations
  int64_t block;  // weights and activations that share one scale, on the integer way

  // Where x is codes already: fw_linear_codes.
  const int8_t* codes = nullptr;
  const float* absmax = nullptr;
  const int64_t* outlier_columns = nullptr;
  const float* outliers = nullptr;
  int64_t outlier_count = 0;

  int64_t padded() const { return (weight.columns + kPadding - 1) / kPadding * kPadding; }
  int64_t blocks() const { return weight.format == FW_I8 ? 1 : weight.columns / block; }
};

// A 16-entry codebook as int8: code ≈ codes · step.
struct Table {
  int8_t codes[16];
  float step;
};
const Table& int8_table(const float* code);

// Activations of magnitude ≥ threshold (LLM.int8()), by column. They are multiplied in float32.
class Outliers {
 public:
  // Finds the columns, or takes those that were given; false where memory is short.
  bool find(const Call& call, Scratch& scratch);
  bool any() const { return count_ > 0; }
  // Moves the outliers of row m out of x[columns].
  void take(int64_t m, float* x);
  // With FW_PER_BATCH, what is left in outlier columns is multiplied in float32 too.
  void clear(int8_t* codes) const;
  // Adds their products with `rows` weight rows from `row` on to tile[m][row − …].
  void add(const Call& call, int64_t first, int64_t m, int64_t row, int64_t rows, float* tile,
           int64_t stride) const;

 private:
  const int64_t* columns_ = nullptr;  // [count_]
  float* values_ = nullptr;           // [m, count_]
  int64_t count_ = 0;
  float threshold_ = 0;
  bool per_batch_ = false;
};

// Codes of row m, padded with zeros, and the scale of each block (step included).
void quantize_row(const Call& call, Outliers& outliers, int64_t m, float* x, int8_t* codes,
                  float* scales);

// A row of activations: where it is, or in `buffer`.
const float* floats(const Call& call, int64_t m, float* buffer);

// Adds outliers and bias to tile[m][rows] …
void add_rest(const Call& call, const Outliers& outliers, int64_t first, int64_t m, int64_t row,
              int64_t rows, float* tile, int64_t stride);
// … and writes it as rows first … of out.
void finish(const Call& call, const Outliers& outliers, int64_t first, int64_t m, int64_t row,
            int64_t rows, float* tile, int64_t stride);

// How a product is run, given what fw_linear is given.
Call make_call(const fw_matrix& weight, const void* x, void* out, const float* bias, int64_t m,
               int type, float threshold, int flags, int threads);

// Products of the same activations: what is made of these for one call serves the other.
bool alike(const Call& a, const Call& b);

// Calls that are alike. At most kFewRows: weights as they are stored.
int few_rows(const Call* calls, int count);
int many_rows(const Call* calls, int count);  // weights laid out in panels, tile by tile

// Where the heads of a row of queries (or keys, or values) are.
struct Heads {
  float* data;
  int64_t row, head;  // from one to the next, in numbers
  float* at(int64_t m, int64_t h) const { return data + m * row + h * head; }
};

// Softmax(scaling · q kᵀ) v of a chunk that is in the cache already; out [m, heads, head_dim].
int attention(const Kernels& kernels, const fw_decoder& decoder, const fw_layer& layer,
              const fw_chunk& chunk, const Heads& q, float* out, int threads);

}  // namespace fw
