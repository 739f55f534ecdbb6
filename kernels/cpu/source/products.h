// Products of few rows with a matrix of weights, which is read once, in the layout in which it lies.
//
// y = x W and y = x W^T. The work is cut by sizes alone, and what two items add to one result is
// added in one order: results do not depend on the threads.
#pragma once

namespace NAMESPACE {

// W weights as float32, and one. GCC 12 takes apart what it widens from a vector of bytes: hence the
// instructions by name.
static inline vf weights_at(const float* p) { return load(p); }
#if LANES == 16
static inline vf weights_at(const bfloat16* p) {
  return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
}
static inline vf weights_at(const int8_t* p) {
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif LANES == 8 && defined(__x86_64__)
static inline vf weights_at(const bfloat16* p) {
  return (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
}
static inline vf weights_at(const int8_t* p) {
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#else
static inline vf weights_at(const bfloat16* p) {
  vu bits;
  for (int i = 0; i < W; i++) bits[i] = p[i].bits;
  return (vf)(bits << 16);
}
static inline vf weights_at(const int8_t* p) {
  vi whole;
  for (int i = 0; i < W; i++) whole[i] = p[i];
  return __builtin_convertvector(whole, vf);
}
#endif
static inline float weight_at(const float* p) { return *p; }
static inline float weight_at(const bfloat16* p) { return widened(*p); }
static inline float weight_at(const int8_t* p) { return *p; }

constexpr int LINE = 64;  // bytes of a cache's line
constexpr int AHEAD = 256;  // bytes of a row
constexpr int64_t TOGETHER = 4;  // rows of W^T that stay in the first cache for all rows of x
constexpr int DEPTH = 8;  // rows of weights that are read side by side

// What is fetched while R rows are read, some columns after the others. Where rows follow each other
// in memory, it is the next R rows in that order, into the second cache: the processor foresees them
// in no other. Else it is the same rows, some lines on.
template <int R>
struct Ahead {
  const char* from;
  int64_t step;  // 0: in the order of memory
  template <class T>
  Ahead(const T* w, int64_t ldw, int64_t j, int64_t width) {
    constexpr int64_t LATER = AHEAD / (int64_t)sizeof(T);
    step = width == ldw ? 0 : ldw * sizeof(T);
    from = (const char*)(w + (step == 0             ? R * (ldw + j)
                              : j + LATER < width ? j + LATER
                                                  : j + LATER - width + R * ldw));
  }
  void fetch(int r, int at, int bytes) const {
    if (step)
      __builtin_prefetch(from + r * step + at);
    else
      __builtin_prefetch(from + r * bytes + at, 0, 2);
  }
};

// Add x[M][R] W[R][width] to y[M][width], U registers of outputs at a time: each number of x is
// then read for U products.
template <class T, int M, int R, int U>
static inline int64_t add_columns(const float* x, int64_t ldx, const T* w, int64_t ldw, int64_t j,
                                  int64_t width, float* y, int64_t ldy) {
  for (; j + U * W <= width; j += U * W) {
    const Ahead<R> ahead(w, ldw, j, width);
    vf sum[M][U];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) sum[m][u] = load(y + m * ldy + j + u * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf weights[U];
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) weights[u] = weights_at(w + r * ldw + j + u * W);
#pragma GCC unroll 4
      for (int at = 0; at < U * W * (int)sizeof(T); at += LINE)
        if (R > 1) ahead.fetch(r, at, U * W * (int)sizeof(T));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const vf factor = all(x[m * ldx + r]);
#pragma GCC unroll 4
        for (int u = 0; u < U; u++) sum[m][u] += weights[u] * factor;
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) store(y + m * ldy + j + u * W, sum[m][u]);
  }
  return j;
}

template <class T, int M, int R>
static void add_rows(const float* x, int64_t ldx, const T* w, int64_t ldw, int64_t width, float* y,
                     int64_t ldy) {
  constexpr int U = M < 4 ? 4 : LANES == 16 || M < 8 ? 2 : 1;
  int64_t j = add_columns<T, M, R, U>(x, ldx, w, ldw, 0, width, y, ldy);
  if constexpr (U > 1) j = add_columns<T, M, R, 1>(x, ldx, w, ldw, j, width, y, ldy);
  for (; j < width; j++)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++) y[m * ldy + j] += weight_at(w + r * ldw + j) * x[m * ldx + r];
}

template <class T, int R, int M = 8>
static inline void add_rows_of(int64_t rows, const float* x, int64_t ldx, const T* w, int64_t ldw,
                               int64_t width, float* y, int64_t ldy) {
  for (; rows >= M; rows -= M, x += M * ldx, y += M * ldy)
    add_rows<T, M, R>(x, ldx, w, ldw, width, y, ldy);
  if constexpr (M > 1) {
    if (rows) add_rows_of<T, R, M / 2>(rows, x, ldx, w, ldw, width, y, ldy);
  }
}

// y[M][count] = x[M][depth] (w[count][depth])^T. One row of w is read after the other, as the processor
// foresees it; of one row of x, several parts of it are added side by side.
template <class T, int M>
static void dot_rows(const float* x, int64_t depth, const T* w, int64_t count, float* y, int64_t ldy) {
  constexpr int U = M < 2 ? 4 : M < 4 ? 2 : 1;
  for (int64_t r = 0; r < count; r++, w += depth) {
    vf sums[M][U];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) sums[m][u] = vf{};
    int64_t k = 0;
    for (; k + U * W <= depth; k += U * W)
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) {
        const vf weights = weights_at(w + k + u * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[m][u] += weights * load(x + m * depth + k + u * W);
      }
    for (; k + W <= depth; k += W) {
      const vf weights = weights_at(w + k);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m][0] += weights * load(x + m * depth + k);
    }
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int u = 1; u < U; u++) sums[m][0] += sums[m][u];
      float total = sum(sums[m][0]);
      for (int64_t at = k; at < depth; at++) total += weight_at(w + at) * x[m * depth + at];
      y[m * ldy + r] = total;
    }
  }
}

template <class T, int M>
static inline void dot_rows_of(int64_t rows, const float* x, int64_t depth, const T* w,
                               int64_t count, float* y, int64_t ldy) {
  for (; rows >= M; rows -= M, x += M * depth, y += M * ldy)
    dot_rows<T, M>(x, depth, w, count, y, ldy);
  if constexpr (M > 1) {
    if (rows) dot_rows_of<T, M / 2>(rows, x, depth, w, count, y, ldy);
  }
}

}  // namespace NAMESPACE

#if LANES == 16
#include "bytes.h"
#endif

namespace NAMESPACE {

// How a product adds up rows of weights: in float32; or in integers, where x is cut into digits.
template <class T>
struct Sums {
  static constexpr int64_t STEP = DEPTH;
  const Product& p;
  explicit Sums(const Product& p) : p(p) {}

  // Add x[rows][k..end] W[k..end][o..o + count] to `to`.
  void add(int64_t k, int64_t end, int64_t o, int64_t count, float* to, int64_t ldy) const {
    const T* w = (const T*)p.weights + o;
    for (; p.rows > 1 && k + DEPTH <= end; k += DEPTH)  // one row: the processor foresees it all
      add_rows_of<T, DEPTH>(p.rows, p.x + k, p.inputs, w + k * p.outputs, p.outputs, count, to, ldy);
    for (; k < end; k++)
      add_rows_of<T, 1>(p.rows, p.x + k, p.inputs, w + k * p.outputs, p.outputs, count, to, ldy);
  }
  // Write the sums of `count` outputs of a turned product, from `o` on.
  void dot(int64_t o, int64_t count) const {
    const T* w = (const T*)p.weights + o * p.inputs;
    dot_rows_of<T, LANES == 16 ? 4 : 2>(p.rows, p.x, p.inputs, w, count, p.y + o, p.outputs);
  }
};

#if LANES == 16
struct SumsOfBytes {
  static constexpr int64_t STEP = GROUP;
  const Product& p;
  const Digits digits;
  explicit SumsOfBytes(const Product& p) : p(p), digits(p.x, p.rows, p.inputs) {}

  void add(int64_t k, int64_t end, int64_t o, int64_t count, float* to, int64_t ldy) const {
    const int8_t* w = (const int8_t*)p.weights + o;
    for (; k < end; k += GROUP)
      add_group(digits, k, std::min(GROUP, end - k), w + k * p.outputs, p.outputs, count, to, ldy);
  }
  void dot(int64_t o, int64_t count) const {
    const int8_t* w = (const int8_t*)p.weights + o * p.inputs;
    if (count == TOGETHER) return dot_bytes<TOGETHER>(digits, p.inputs, w, p.y + o, p.outputs);
    for (int64_t r = 0; r < count; r++)
      dot_bytes<1>(digits, p.inputs, w + r * p.inputs, p.y + o + r, p.outputs);
  }
};
#endif

constexpr int64_t ITEM = 128 << 10;   // bytes of weights that are worth an item
constexpr int64_t MOST_ITEMS = 32;
constexpr int64_t SUMS = 16 << 10;    // bytes of sums that stay in a core's first cache
constexpr int64_t NARROWEST = 256;    // outputs of an item

static inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

// y = scale x W + bias: items are some inputs by some outputs, in the order of memory.
template <class S>
static void product_of(const S& how, int64_t itemsize, const Parallel& parallel) {
  const Product& p = how.p;
  const int64_t rows = p.rows, inputs = p.inputs, outputs = p.outputs;
  const int64_t wanted = std::max<int64_t>(1, std::min(MOST_ITEMS, inputs * outputs * itemsize / ITEM));
  // sums of parts are written and read: they must be few beside the weights
  const int64_t most_parts = std::max<int64_t>(1, inputs * itemsize / (rows * 32));
  int64_t columns = parts_of(4 * rows * outputs, SUMS);
  int64_t parts = std::min(most_parts, parts_of(wanted, columns));
  while (columns * parts < wanted && outputs / (2 * columns) >= NARROWEST) columns *= 2;
  const int64_t width = round_up(parts_of(outputs, columns), 64);
  columns = parts_of(outputs, width);
  const int64_t depth = round_up(parts_of(inputs, parts), S::STEP);
  parts = parts_of(inputs, depth);
  const int64_t padded = columns * width;
  Scratch sums(parts * rows * padded);
  parallel(parts * columns, [&](int64_t item) {
    const int64_t part = item % parts, o = item / parts * width;
    float* to = sums.data + part * rows * padded + o;
    for (int64_t m = 0; m < rows; m++) std::fill(to + m * padded, to + m * padded + width, 0.0f);
    how.add(part * depth, std::min(inputs, (part + 1) * depth), o, std::min(width, outputs - o), to,
            padded);
  });
  for (int64_t m = 0; m < rows; m++) {
    float *from = sums.data + m * padded, *y = p.y + m * outputs;
    for (int64_t part = 1; part < parts; part++) {
      const float* more = from + part * rows * padded;
      for (int64_t o = 0; o < outputs; o++) from[o] += more[o];
    }
    for (int64_t o = 0; o < outputs; o++)
      y[o] = from[o] * (p.scale ? p.scale[o] : 1.0f) + (p.bias ? p.bias[o] : 0.0f);
  }
}

// y = scale x W^T + bias, W [outputs][inputs]: items are some outputs.
template <class S>
static void turned_product_of(const S& how, int64_t itemsize, const Parallel& parallel) {
  const Product& p = how.p;
  const int64_t row = std::max<int64_t>(1, p.inputs * itemsize);
  const int64_t width = round_up(std::max<int64_t>(1, ITEM / row), TOGETHER);
  parallel(parts_of(p.outputs, width), [&](int64_t item) {
    const int64_t begin = item * width, end = std::min(p.outputs, begin + width);
    for (int64_t o = begin; o < end; o += TOGETHER) how.dot(o, std::min(TOGETHER, end - o));
    for (int64_t m = 0; m < p.rows; m++)
      for (int64_t i = begin; i < end; i++) {
        float& y = p.y[m * p.outputs + i];
        y = y * (p.scale ? p.scale[i] : 1.0f) + (p.bias ? p.bias[i] : 0.0f);
      }
  });
}

template <class S>
static void product_as(const S& how, int64_t itemsize, const Parallel& parallel) {
  how.p.turned ? turned_product_of(how, itemsize, parallel) : product_of(how, itemsize, parallel);
}

static void product(const Product& p, const Parallel& parallel) {
  switch (p.dtype) {
    case Weights::float32: return product_as(Sums<float>(p), 4, parallel);
    case Weights::bfloat16: return product_as(Sums<bfloat16>(p), 2, parallel);
    case Weights::int8: break;
  }
#if LANES == 16
  // sums of a whole row, of a turned product, stay below 2^31
  if (has_vnni() && p.inputs < 1 << 20 && can_be_cut(p.x, p.rows, p.inputs))
    return product_as(SumsOfBytes(p), 1, parallel);
#endif
  product_as(Sums<int8_t>(p), 1, parallel);
}

}  // namespace NAMESPACE
