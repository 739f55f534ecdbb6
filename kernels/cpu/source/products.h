// Products of few rows with a weight matrix, which is read once, in its own layout.
//
// y = x W and y = x W^T. The division of the work depends only on sizes, and the sums of items are
// added in a fixed order, so results do not depend on the threads.
#pragma once

namespace NAMESPACE {

// Numbers k .. k + W of a row; zeros past its end.
static inline vf numbers(const float* x, int64_t k, int64_t width) {
  if (k + W <= width) return load(x + k);
#if LANES == 16
  return (vf)_mm512_maskz_loadu_ps((1u << (width - k)) - 1, x + k);
#else
  float rest[W] = {};
  std::copy(x + k, x + width, rest);
  return load(rest);
#endif
}
// Write them, up to the row's end.
static inline void put(float* y, int64_t k, int64_t width, vf x) {
  if (k + W <= width) return store(y + k, x);
  float rest[W];
  store(rest, x);
  std::copy(rest, rest + width - k, y + k);
}

constexpr int LINE = 64;  // bytes of a cache line
constexpr int DEPTH = 8;  // rows of W that are read together
constexpr int TOGETHER = 4;  // rows of W^T that are read together
// For so few rows of x, reading W takes longer than the products, and several streams are read up to
// twice as fast as one (Zen 2). Not measured with AVX-512.
constexpr int64_t STREAMED = LANES == 16 ? 0 : 2;

// Prefetch a part of a row of weights into the L2 cache. The hardware prefetches too little if several
// rows are read together.
template <int BYTES>
static inline void fetch(const void* p) {
#pragma GCC unroll 4
  for (int at = 0; at < BYTES; at += LINE) __builtin_prefetch((const char*)p + at, 0, 2);
}

// Add x[M][R] W[R][width] to y[M][width], U registers of outputs at a time, so that each number of x
// is read for U products. The R rows of W are `apart` rows from each other. If they are adjacent, the
// next R rows are prefetched at the same time; rows that are far apart are streams of their own, which
// the hardware prefetches.
template <class T, int M, int R, int U, bool FAR>
static inline int64_t add_columns(const float* x, int64_t ldx, int64_t apart, const T* w, int64_t ldw,
                                  int64_t j, int64_t width, float* y, int64_t ldy) {
  for (; j + U * W <= width; j += U * W) {
    vf sum[M][U];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) sum[m][u] = load(y + m * ldy + j + u * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf weights[U];
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) weights[u] = weights_at(w + r * apart * ldw + j + u * W);
      if (R > 1 && !FAR) fetch<U * W * (int)sizeof(T)>(w + (R + r) * ldw + j);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const vf factor = all(x[m * ldx + r * apart]);
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

template <class T, int M, int R, bool FAR>
static void add_rows(const float* x, int64_t ldx, int64_t apart, const T* w, int64_t ldw,
                     int64_t width, float* y, int64_t ldy) {
  constexpr int U = M < 4 ? 4 : LANES == 16 || M < 8 ? 2 : 1;
  int64_t j = add_columns<T, M, R, U, FAR>(x, ldx, apart, w, ldw, 0, width, y, ldy);
  if constexpr (U > 1) j = add_columns<T, M, R, 1, FAR>(x, ldx, apart, w, ldw, j, width, y, ldy);
  for (; j < width; j++)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++)
        y[m * ldy + j] += weight_at(w + r * apart * ldw + j) * x[m * ldx + r * apart];
}

template <class T, int R, int M = 8>
static inline void add_rows_of(int64_t rows, const float* x, int64_t ldx, const T* w, int64_t ldw,
                               int64_t width, float* y, int64_t ldy) {
  for (; rows >= M; rows -= M, x += M * ldx, y += M * ldy)
    add_rows<T, M, R, false>(x, ldx, 1, w, ldw, width, y, ldy);
  if constexpr (M > 1) {
    if (rows) add_rows_of<T, R, M / 2>(rows, x, ldx, w, ldw, width, y, ldy);
  }
}

// Add x[M][depth] (w[R][depth])^T to y[M][R], U registers of a row at a time, so that each number of x
// is read for R products. The rows of w, and the outputs, are `apart` from each other. Rows `from` to
// `to` of the next R rows of weights are prefetched.
template <class T, int M, int R, int U>
static void dot_tile(const float* x, int64_t ldx, int64_t apart, const T* w, int64_t ldw,
                     int64_t depth, int64_t from, int64_t to, float* y, int64_t ldy) {
  vf sums[M][R][U];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int i = 0; i < R * U; i++) sums[m][i / U][i % U] = vf{};
  int64_t k = 0;
  for (; k + U * W <= depth; k += U * W)
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
      vf weights[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) weights[r] = weights_at(w + r * apart * ldw + k + u * W);
      for (int64_t r = from; r < to; r++) fetch<LINE>(w + (R + r) * ldw + k + u * W);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vf one = load(x + m * ldx + k + u * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[m][r][u] += weights[r] * one;
      }
    }
  for (; k + W <= depth; k += W)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        sums[m][r][0] += weights_at(w + r * apart * ldw + k) * load(x + m * ldx + k);
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int u = 1; u < U; u++) sums[m][r][0] += sums[m][r][u];
      float total = sum(sums[m][r][0]);
      for (int64_t at = k; at < depth; at++)
        total += weight_at(w + r * apart * ldw + at) * x[m * ldx + at];
      y[m * ldy + r * apart] += total;
    }
}

// The same for several rows of x, in `tiles` tiles, which divide the prefetching.
template <class T, int R, int M>
static void dot_rows(int64_t rows, const float* x, int64_t ldx, const T* w, int64_t ldw,
                     int64_t depth, float* y, int64_t ldy, int64_t tile, int64_t tiles) {
  constexpr int U = M == 1 && R == 1 ? 4 : 1;
  constexpr int FETCHED = R > 1 ? R : 0;
  for (; rows >= M; rows -= M, x += M * ldx, y += M * ldy, tile++)
    dot_tile<T, M, R, U>(x, ldx, 1, w, ldw, depth, FETCHED * tile / tiles,
                         FETCHED * (tile + 1) / tiles, y, ldy);
  if constexpr (M > 1) {
    if (rows) dot_rows<T, R, M / 2>(rows, x, ldx, w, ldw, depth, y, ldy, tile, tiles);
  }
}

static inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

// In integer products, a row of x is split into three digits: x = u (65536 a + 256 b + c) with a, b, c
// in -128..127 and u = max |x| / MOST, so that the rounding error is at most 2^-24 of the row's
// largest number.
constexpr float MOST = 8355584;  // 127 * 65793, minus the possible rounding error

// Whether every row can be split: its largest number and its inverse are well within float32.
static inline bool can_be_cut(const float* x, int64_t rows, int64_t width) {
  for (int64_t m = 0; m < rows; m++) {
    vf most{};
    vi wrong = vi{};
    for (int64_t k = 0; k < width; k += W) {
      const vf size = (vf)((vi)numbers(x + m * width, k, width) & INT32_MAX);
      wrong |= ~(size <= 1e30f);  // also true for NaN
      most = larger(most, size);
    }
    const float size = largest(most);
    if (any(wrong) || (size && size < 1e-30f)) return false;
  }
  return true;
}

}  // namespace NAMESPACE

#if LANES == 16
#include "bytes.h"
#endif
#include "nibbles.h"

namespace NAMESPACE {

constexpr int64_t ITEM = 128 << 10;   // minimum bytes of weights per item
constexpr int64_t MOST_ITEMS = 32;    // for one row of x
constexpr int64_t MOST_ITEMS_OF_ROWS = 8;  // for several rows, whose sums take longer to add
constexpr int64_t KEPT = 12 << 10;    // bytes of x that stay in the L1 cache
constexpr int64_t SUMS = 24 << 10;    // bytes of sums that stay in the L1 cache
constexpr int64_t NARROWEST = 256;    // minimum outputs per item

// Accumulation of rows of weights: in float32, or in integers with x split into digits.
template <class T>
struct Sums {
  static constexpr int64_t STEP = DEPTH;
  const Product& p;
  explicit Sums(const Product& p) : p(p) {}

  // Add x[rows][k..end] W[k..end][o..o + count] to `to`.
  void add(int64_t k, int64_t end, int64_t o, int64_t count, float* to, int64_t ldy) const {
    const T* w = (const T*)p.weights + o;
    if (p.rows <= STREAMED && !p.fixed) {
      const int64_t apart = (end - k) / DEPTH;
      const auto add = p.rows == 1 ? add_rows<T, 1, DEPTH, true> : add_rows<T, 2, DEPTH, true>;
      for (int64_t i = k; i < k + apart; i++)
        add(p.x + i, p.inputs, apart, w + i * p.outputs, p.outputs, count, to, ldy);
      k += DEPTH * apart;
    }
    // one stream of whole rows is fully prefetched by the hardware
    for (; (p.rows > 1 || p.fixed) && k + DEPTH <= end; k += DEPTH)
      add_rows_of<T, DEPTH>(p.rows, p.x + k, p.inputs, w + k * p.outputs, p.outputs, count, to, ldy);
    for (; k < end; k++)
      add_rows_of<T, 1>(p.rows, p.x + k, p.inputs, w + k * p.outputs, p.outputs, count, to, ldy);
  }
  // Write the sums of outputs begin .. end of a transposed product. For several rows of x, the inputs
  // are processed in parts that stay in the L1 cache.
  void dot(int64_t begin, int64_t end) const {
    constexpr int M = LANES == 16 ? 4 : 2;
    const int64_t parts = p.rows == 1 ? 1 : std::max<int64_t>(1, parts_of(4 * p.rows * p.inputs, KEPT));
    const int64_t depth = round_up(parts_of(p.inputs, parts), W);
    const int64_t tiles = p.rows / M + (p.rows % M & 1) + (p.rows % M >> 1);
    for (int64_t m = 0; m < p.rows; m++)
      std::fill(p.y + m * p.outputs + begin, p.y + m * p.outputs + end, 0.0f);
    for (int64_t k = 0; k < p.inputs; k += depth) {
      const T* w = (const T*)p.weights + begin * p.inputs + k;
      float* y = p.y + begin;
      const int64_t count = std::min(depth, p.inputs - k);
      int64_t left = end - begin;
      if (p.rows == 1 && STREAMED) {
        const int64_t apart = left / TOGETHER;
        for (int64_t o = 0; o < apart; o++)
          dot_tile<T, 1, TOGETHER, 1>(p.x + k, p.inputs, apart, w + o * p.inputs, p.inputs, count, 0, 0,
                                      y + o, p.outputs);
        w += TOGETHER * apart * p.inputs, y += TOGETHER * apart, left -= TOGETHER * apart;
      }
      while (left > 0) {
        const int64_t R = p.rows > 1 && left >= TOGETHER ? TOGETHER : 1;
        if (R > 1)
          dot_rows<T, TOGETHER, M>(p.rows, p.x + k, p.inputs, w, p.inputs, count, y, p.outputs, 0, tiles);
        else
          dot_rows<T, 1, M>(p.rows, p.x + k, p.inputs, w, p.inputs, count, y, p.outputs, 0, tiles);
        w += R * p.inputs, y += R, left -= R;
      }
    }
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
  void dot(int64_t begin, int64_t end) const {
    for (int64_t o = begin, count; o < end; o += count) {
      const int8_t* w = (const int8_t*)p.weights + o * p.inputs;
      count = end - o >= TOGETHER ? TOGETHER : 1;
      if (count > 1)
        dot_bytes<TOGETHER>(digits, p.inputs, w, p.y + o, p.outputs);
      else
        dot_bytes<1>(digits, p.inputs, w, p.y + o, p.outputs);
    }
  }
};
#endif

// Sums of 4-bit weights; `integers` is true if x is split into digits.
template <class S, bool integers>
struct SumsOfNibbles {
  static constexpr int64_t STEP = RUN;
  const Product& p;
#ifdef INTEGERS
  const DigitsOfWords digits;
  explicit SumsOfNibbles(const Product& p) : p(p), digits(p.x, integers ? p.rows : 0, p.inputs) {}
#else
  explicit SumsOfNibbles(const Product& p) : p(p) {}
#endif

  void add(int64_t k, int64_t end, int64_t o, int64_t count, float* to, int64_t ldy) const {
    const int64_t group = p.inputs / p.groups;  // a multiple of RUN if there are several
    for (; k < end; k += RUN) {
      const uint32_t* w = (const uint32_t*)p.weights + k / WORD * p.outputs + o;
      const S* scale = (const S*)p.group_scale + k / group * p.outputs + o;
      const int64_t inputs = std::min(RUN, end - k);
#ifdef INTEGERS
      if constexpr (integers) {
        add_integers(digits, k, inputs, w, p.outputs, scale, count, to, ldy);
        continue;
      }
#endif
      add_nibbles_of(p.rows, p.x + k, p.inputs, inputs, w, p.outputs, scale, count, to, ldy);
    }
  }
};

// Write outputs o .. o + count of row m: the sums of all parts in order, scale and bias. The sums of
// consecutive parts are `size` apart, and padded to a multiple of W.
static void add_up(const Product& p, float* sums, int64_t parts, int64_t size, int64_t m, int64_t o,
                   int64_t count) {
  for (int64_t part = 1; part < parts; part++)
    for (int64_t j = 0; j < count; j += W) store(sums + j, load(sums + j) + load(sums + part * size + j));
  for (int64_t j = 0; j < count; j += W) {
    vf total = load(sums + j);
    if (p.scale) total *= numbers(p.scale + o, j, count);
    if (p.bias) total += numbers(p.bias + o, j, count);
    put(p.y + m * p.outputs + o, j, count, total);
  }
}

// y = scale x W + bias: an item is a block of inputs by outputs, in the order of memory.
template <class S>
static void product_of(const S& how, int64_t bits, const Parallel& parallel) {
  const Product& p = how.p;
  const int64_t rows = p.rows, inputs = p.inputs, outputs = p.outputs;
  // sums in the order of inputs are not divided into parts
  const int64_t most = rows == 1 ? MOST_ITEMS : MOST_ITEMS_OF_ROWS;
  const int64_t wanted =
      p.fixed ? 2 * p.threads : std::max<int64_t>(1, std::min(most, inputs * outputs * bits / 8 / ITEM));
  // sums of parts are written and read, so they must be few compared with the weights
  const int64_t most_parts =
      p.fixed ? 1 : std::max<int64_t>(1, inputs * bits / (rows * 256));
  int64_t columns = parts_of(4 * rows * outputs, SUMS);
  int64_t parts = std::min(most_parts, parts_of(wanted, columns));
  const int64_t narrowest = p.fixed ? 64 : NARROWEST;
  while (columns * parts < wanted && outputs / (2 * columns) >= narrowest) columns *= 2;
  const int64_t width = round_up(parts_of(outputs, columns), 64);
  columns = parts_of(outputs, width);
  const int64_t depth = round_up(std::max<int64_t>(1, parts_of(inputs, parts)), S::STEP);
  parts = std::max<int64_t>(1, parts_of(inputs, depth));  // without inputs, y is the bias
  const int64_t line = width + W;  // rows at power-of-two distances would conflict in the cache
  Scratch sums(columns * parts * rows * line);
  std::vector<std::atomic<int64_t>> left(columns);  // unfinished parts
  for (auto& one : left) one = parts;
  parallel(columns * parts, [&](int64_t item) {
    const int64_t part = item % parts, column = item / parts, o = column * width;
    const int64_t count = std::min(width, outputs - o);
    float* to = sums.data + item * rows * line;
    std::fill(to, to + rows * line, 0.0f);
    how.add(part * depth, std::min(inputs, (part + 1) * depth), o, count, to, line);
    if (--left[column] > 0) return;
    float* first = sums.data + column * parts * rows * line;
    for (int64_t m = 0; m < rows; m++)
      add_up(p, first + m * line, parts, rows * line, m, o, count);
  });
}

// y = scale x W^T + bias, W [outputs][inputs]: an item is a range of outputs.
template <class S>
static void turned_product_of(const S& how, int64_t itemsize, const Parallel& parallel) {
  const Product& p = how.p;
  const int64_t row = std::max<int64_t>(1, p.inputs * itemsize);
  const int64_t width = round_up(std::max<int64_t>(1, ITEM / row), TOGETHER);
  parallel(parts_of(p.outputs, width), [&](int64_t item) {
    const int64_t begin = item * width, end = std::min(p.outputs, begin + width);
    how.dot(begin, end);
    for (int64_t m = 0; m < p.rows; m++)
      for (int64_t i = begin; i < end; i++) {
        float& y = p.y[m * p.outputs + i];
        y = y * (p.scale ? p.scale[i] : 1.0f) + (p.bias ? p.bias[i] : 0.0f);
      }
  });
}

// The same products with sums in the order of inputs: each is fma(x_k, w_k, sum) for k = 0, 1, ...
// So a row of y has the same bits whatever the other rows are and however the work is divided, and
// rows of zeros change nothing if the inputs are rows of a batch. An item is a block of rows by
// outputs; it packs the weights, a step of inputs at a time.
constexpr int64_t STEP_OF_INPUTS = 4096 / PANEL;  // a panel of weights fills half of the L1 cache
constexpr int64_t TALLEST = 32 * ROWS;            // maximum rows per item
constexpr int64_t WIDEST = 256 / PANEL * PANEL;   // maximum outputs per item

template <class T, bool X_TURNED>
static void fixed_item(const Product& p, int64_t m, int64_t rows, int64_t o, int64_t count) {
  const int64_t panels = parts_of(count, PANEL), line = panels * PANEL;
  const int64_t step = STEP_OF_INPUTS;
  Scratch packed(panels * PANEL * step), sums(rows * line);
  const T* w = (const T*)p.weights;
  if (!p.inputs) std::fill(sums.data, sums.data + rows * line, 0.0f);
  for (int64_t k = 0; k < p.inputs; k += step) {
    const int depth = std::min(step, p.inputs - k);
    const int64_t size = PANEL * depth;
    if (p.turned)
      for (int64_t j = 0; j < count; j += PANEL)
        pack_columns(w + (o + j) * p.inputs + k, p.inputs, std::min<int64_t>(PANEL, count - j),
                     depth, packed.data + j / PANEL * size);
    else
      pack_rows(w + k * p.outputs + o, p.outputs, depth, count, packed.data, size);
    for (int64_t panel = 0; panel < panels; panel++)
      for (int64_t i = 0; i < rows; i += ROWS) {
        const int64_t lda = X_TURNED ? p.rows : p.inputs;
        const float* x = X_TURNED ? p.x + k * lda + m + i : p.x + (m + i) * lda + k;
        const float* b = packed.data + panel * size;
        float* to = sums.data + i * line + panel * PANEL;
        const int there = std::min<int64_t>(ROWS, rows - i);
        k ? multiply<X_TURNED, true>(there, x, lda, b, depth, to, line)
          : multiply<X_TURNED, false>(there, x, lda, b, depth, to, line);
      }
  }
  for (int64_t i = 0; i < rows; i++) add_up(p, sums.data + i * line, 1, 0, m + i, o, count);
}

// W outputs of rows m .. m + M, with equal sums: the weights are transposed in registers. The weights
// of the next W outputs are prefetched by the first rows.
template <class T, int M>
static inline void fixed_tile(const Product& p, int64_t m, int64_t o) {
  const T* w = (const T*)p.weights + o * p.inputs;
  const float* x = p.x + m * p.inputs;
  vf sums[M];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) sums[i] = vf{};
  int64_t k = 0;
  for (; k + W <= p.inputs; k += W) {
    vf weights[W];
#pragma GCC unroll 16
    for (int c = 0; c < W; c++) weights[c] = weights_at(w + c * p.inputs + k);
    if (m == 0)
      for (int c = 0; c < W; c++) fetch<LINE>(w + (W + c) * p.inputs + k);
    exchange<W / 2>(weights);
#pragma GCC unroll 16
    for (int c = 0; c < W; c++)
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sums[i] += weights[c] * all(x[i * p.inputs + k + c]);
  }
  for (; k < p.inputs; k++) {
    float column[W];
    for (int c = 0; c < W; c++) column[c] = weight_at(w + c * p.inputs + k);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) sums[i] += load(column) * all(x[i * p.inputs + k]);
  }
  for (int i = 0; i < M; i++) {
    float own[W];
    store(own, sums[i]);
    add_up(p, own, 1, 0, m + i, o, W);
  }
}
template <class T, int M = LANES == 16 ? 8 : 4>
static void fixed_tiles(const Product& p, int64_t m, int64_t o) {
  for (; m + M <= p.rows; m += M) fixed_tile<T, M>(p, m, o);
  if constexpr (M > 1) {
    if (m < p.rows) fixed_tiles<T, M / 2>(p, m, o);
  }
}

template <class T>
static void fixed_product(const Product& p, const Parallel& parallel) {
  // the weights of few rows are read once, in the order of memory
  const bool few = !p.x_turned && p.rows <= 16;
  if (few && !p.turned) return product_of(Sums<T>(p), 8 * sizeof(T), parallel);
  if (few) {
    const int64_t bytes = std::max<int64_t>(1, W * p.inputs * sizeof(T));
    const int64_t width = W * std::max<int64_t>(1, ITEM / bytes);
    return parallel(parts_of(p.outputs, width), [&](int64_t item) {
      int64_t o = item * width;
      const int64_t end = std::min(p.outputs, o + width);
      for (; o + W <= end; o += W) fixed_tiles<T>(p, 0, o);
      if (o < end) fixed_item<T, false>(p, 0, p.rows, o, end - o);
    });
  }
  const int64_t wanted = 4 * p.threads;
  int64_t height = std::min(TALLEST, round_up(std::max<int64_t>(p.rows, 1), ROWS)), width = WIDEST;
  while (width > PANEL && parts_of(p.rows, height) * parts_of(p.outputs, width) < wanted)
    width = round_up(width / 2, PANEL);
  const int64_t columns = parts_of(p.outputs, width);
  parallel(parts_of(p.rows, height) * columns, [&](int64_t item) {
    const int64_t m = item / columns * height, o = item % columns * width;
    const int64_t rows = std::min(height, p.rows - m), count = std::min(width, p.outputs - o);
    p.x_turned ? fixed_item<T, true>(p, m, rows, o, count)
               : fixed_item<T, false>(p, m, rows, o, count);
  });
}

template <class S>
static void product_as(const S& how, int64_t itemsize, const Parallel& parallel) {
  how.p.turned ? turned_product_of(how, itemsize, parallel) : product_of(how, 8 * itemsize, parallel);
}

template <class S>
static void product_of_nibbles(const Product& p, const Parallel& parallel) {
#ifdef INTEGERS
  if (has_integers() && can_be_cut(p.x, p.rows, p.inputs))
    return product_of(SumsOfNibbles<S, true>(p), 4, parallel);
#endif
  product_of(SumsOfNibbles<S, false>(p), 4, parallel);
}

static void product(const Product& p, const Parallel& parallel) {
  if (!p.rows || !p.outputs) return;
  if (p.dtype == Weights::int4)
    return p.half ? product_of_nibbles<float16>(p, parallel) : product_of_nibbles<float>(p, parallel);
  // for a single row, transposing float32 weights in registers is also the fastest order
  const bool transposes = p.turned && p.rows == 1 && p.dtype == Weights::float32;
  if (p.fixed || transposes) switch (p.dtype) {
      case Weights::float32: return fixed_product<float>(p, parallel);
      case Weights::bfloat16: return fixed_product<bfloat16>(p, parallel);
      case Weights::int8: return fixed_product<int8_t>(p, parallel);
      case Weights::int4: break;
    }
  switch (p.dtype) {
    case Weights::float32: return product_as(Sums<float>(p), 4, parallel);
    case Weights::bfloat16: return product_as(Sums<bfloat16>(p), 2, parallel);
    case Weights::int8: case Weights::int4: break;
  }
#if LANES == 16
  // the sums of a whole row of a transposed product stay below 2^31
  if (has_vnni() && p.inputs < 1 << 20 && can_be_cut(p.x, p.rows, p.inputs))
    return product_as(SumsOfBytes(p), 1, parallel);
#endif
  product_as(Sums<int8_t>(p), 1, parallel);
}

}  // namespace NAMESPACE
