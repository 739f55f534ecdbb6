// Arguments of an attention call for all instruction sets: arrays, sizes and the mask's program.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct bfloat16 {
  uint16_t bits;
};

// Use the compiler's float16 if there is one: g++ 12 or later on x86-64, any version on aarch64.
#if defined(__aarch64__)
typedef __fp16 float16;
#elif defined(__FLT16_MANT_DIG__) && !defined(FLOAT16_IN_SOFTWARE)
typedef _Float16 float16;
#else
#undef FLOAT16_IN_SOFTWARE
#define FLOAT16_IN_SOFTWARE
struct float16 {
  uint16_t bits;
};
#endif

enum class Dtype { float32, bfloat16, float16 };

// Arrays of a call; a pointer is null if the array is absent. Leading axes that may be 1 have an
// explicit length.
struct Call {
  int64_t B, T, S, N, K, H, Hv;
  int64_t threads;
  Dtype dtype;
  bool fixed;  // sums in the order of keys and queries, whatever the tiles and the threads
  const void *query, *key, *value;
  float scale, softcap;  // softcap 0: none

  // the mask: vectors i32[n][lead][T or S], and a program over them
  const int32_t *q_vectors, *k_vectors;
  int64_t num_q, num_k, lead_q, lead_k;
  const int8_t* pairs;  // [pairs_b][pairs_n][T][S]
  int64_t pairs_b, pairs_n;
  const int32_t* program;  // (operation, x, y, z) for each operation
  int64_t num_operations;
  const int32_t* constants;
  int64_t num_constants;

  const void* bias;
  bool bias_is_wide;  // float32, otherwise `dtype`
  int64_t bias_shape[4];
  const float* slopes;  // [lead][N]
  int64_t slopes_b;
  const float* sinks;  // [lead][N]
  int64_t sinks_b;
  const uint32_t* dropout;  // [2][B][N]
  uint32_t threshold;
  float kept;  // the factor of kept weights

  // tiles: [lead][lead][rows][columns]
  int64_t block_q, block_k;
  const int32_t *order, *full, *seen;
  int64_t tiles_b, tiles_n, tile_rows, tile_columns;

  // forward
  void* out;
  bool out_is_wide;  // float32, otherwise `dtype`
  float *row_max, *log_sum;  // [B][N][T]

  // backward
  const void* do_;
  const float *saved_max, *saved_sum, *D;  // [B][N][T]
  void *dq, *dk, *dv;
  float *slope_rows;  // [B][N][S], or null
  float* dbias;       // in the bias's shape
};

enum class Weights { float32, bfloat16, int8, int4 };

// y = x W, or x W^T, times a scale per output, plus a bias; null pointers mean none.
struct Product {
  int64_t rows, inputs, outputs;
  int64_t threads;
  const float* x;  // [rows][inputs]; x_turned, which needs `fixed`: [inputs][rows]
  bool x_turned;
  bool fixed;  // sums in the order of inputs
  Weights dtype;
  bool turned;
  const void* weights;  // [inputs][outputs], turned [outputs][inputs]
  const float *scale, *bias;  // [outputs]
  // for int4, which has words of 8 inputs, [inputs / 8, rounded up][outputs]: float32 or float16
  // scales [groups][outputs], with one group or groups of a multiple of 32 inputs
  const void* group_scale;
  int64_t groups;
  bool half;
  float* y;  // [rows][outputs]
};

// y = (x - mean) / sqrt(mean (x - mean)^2 + eps), times a scale, plus a bias; null means none.
struct Norm {
  int64_t rows, width;
  const float* x;  // [rows][width]
  bool centred;    // otherwise the mean is 0
  float eps;
  const float *scale, *bias;  // [width]
  float* y;                   // [rows][width]
};

// Runs `work(item)` exactly once for every item, on several threads.
using Parallel = std::function<void(int64_t items, const std::function<void(int64_t)>& work)>;

struct Kernels {
  void (*forward)(const Call&, const Parallel&);
  void (*few_queries)(const Call&, const Parallel&);  // forward, without tile lists
  void (*backward)(const Call&, const Parallel&);
  void (*backward_bias)(const Call&, const Parallel&);
  void (*product)(const Product&, const Parallel&);
  void (*norm)(const Norm&);
};
extern const Kernels KERNELS_WIDE, KERNELS_AVX2, KERNELS_PLAIN;

// Scratch memory of a call, kept for later calls.
struct Scratch {
  explicit Scratch(size_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  float* data;
  size_t size;
};
