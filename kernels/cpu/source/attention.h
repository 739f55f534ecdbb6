// Attention kernels for CPUs: forward, backward, and the gradient of an array bias.
//
// A call is divided into items, which threads take one by one. Each item computes one tile of queries
// of one head (forward) or one key head (backward), in a fixed order, so that results do not depend
// on the threads. First, keys and values are packed into panels, once for all tiles of queries.
#pragma once

namespace NAMESPACE {

constexpr float INF = std::numeric_limits<float>::infinity();

static inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The terms of a tile's scores other than q . k, for rows of one head.
class Scores {
 public:
  Scores(const Call& call, int64_t width)
      : call_(call), mask_(call, width), bias_(round_up(width, PANEL)), keys_(bias_.size()) {}

  void take_tile(int64_t b, int64_t n, int64_t j0, int64_t count, bool partial) {
    b_ = b, n_ = n, j0_ = j0, count_ = count, partial_ = partial;
    if (partial) mask_.take_keys(b, n, j0, count);
    if (call_.dropout) {
      const int64_t at = b * call_.N + n;
      word_a_ = call_.dropout[at], word_b_ = call_.dropout[call_.B * call_.N + at];
    }
    if (call_.slopes) {
      slope_ = call_.slopes[(call_.slopes_b == 1 ? 0 : b) * call_.N + n];
      const int64_t lead = call_.lead_k == 1 ? 0 : b;
      const int32_t* positions = call_.k_vectors + lead * call_.S + j0;
      for (int64_t j = 0; j < (int64_t)keys_.size(); j++)
        keys_[j] = j < count ? positions[j] : 0;
    }
  }

  bool has_bias() const { return call_.bias || call_.slopes; }

  // -|q - k| for a query and the W keys from j on.
  vf nearness(int64_t i, int64_t j) const {
    const int64_t lead = call_.lead_q == 1 ? 0 : b_;
    const vi away = call_.q_vectors[lead * call_.T + i] - load(keys_.data() + j);
    return __builtin_convertvector(away < 0 ? away : -away, vf);
  }

  // The bias of a row, f32[count], with zeros past its end.
  const float* bias(int64_t i) {
    if (call_.slopes) {
      for (int64_t j = 0; j < (int64_t)bias_.size(); j += W)
        store(bias_.data() + j, nearness(i, j) * slope_);
      return bias_.data();
    }
    const int64_t* shape = call_.bias_shape;
    const int64_t b = shape[0] == 1 ? 0 : b_, n = shape[1] == 1 ? 0 : n_;
    const int64_t start = ((b * shape[1] + n) * shape[2] + (shape[2] == 1 ? 0 : i)) * shape[3];
    if (call_.bias_is_wide) return read_bias((const float*)call_.bias + start);
    if (call_.dtype == Dtype::bfloat16) return read_bias((const bfloat16*)call_.bias + start);
    return read_bias((const float16*)call_.bias + start);
  }

  // The keys of the tile that a row sees, and their beginning and end.
  const int32_t* visible(int64_t i, int64_t* begin, int64_t* end) {
    return mask_.row(i, begin, end);
  }

  // The dropout factors of the weights of W keys.
  vf kept(int64_t i, int64_t j) const {
    const uint32_t a = mix(word_a_ ^ (uint32_t)i), b = mix(word_b_ + a);
    const vu key = (vu)(lane() + (int32_t)(j0_ + j));
    const vu bits = mix((mix(key) ^ a) + b);
    return (vf)((vi)(bits >= call_.threshold) & (vi)all(call_.kept));
  }

  bool partial() const { return partial_; }

 private:
  template <class T>
  const float* read_bias(const T* from) {
    if (call_.bias_shape[3] == 1) {
      std::fill(bias_.begin(), bias_.begin() + count_, widened(from[0]));
    } else {
      if constexpr (sizeof(T) == 4)
        if (count_ % PANEL == 0) return from + j0_;
      int64_t j = 0;
      for (; j + W <= count_; j += W) store(bias_.data() + j, load(from + j0_ + j));
      for (; j < count_; j++) bias_[j] = widened(from[j0_ + j]);
    }
    std::fill(bias_.begin() + count_, bias_.end(), 0.0f);
    return bias_.data();
  }

  const Call& call_;
  Mask mask_;
  std::vector<float> bias_;
  std::vector<int32_t> keys_;
  int64_t b_ = 0, n_ = 0, j0_ = 0, count_ = 0;
  bool partial_ = false;
  uint32_t word_a_ = 0, word_b_ = 0;
  float slope_ = 0;
};

template <class T>
static const T* rows_of(const void* array, const Call& call, int64_t length, int64_t heads,
                        int64_t width, int64_t b, int64_t head) {
  (void)call;
  return (const T*)array + (b * length * heads + head) * width;
}

// Keys and values of one head, as panels, and flags of those that are not finite.
struct Packed {
  int64_t columns;  // S, in whole panels
  float *keys_turned, *values, *keys, *values_turned;
  uint8_t* broken;
  bool any_broken;
};

struct Sizes {
  int64_t columns, key_panels, value_panels;
  explicit Sizes(const Call& call)
      : columns(round_up(call.S, PANEL)),
        key_panels(round_up(call.H, PANEL)),
        value_panels(round_up(call.Hv, PANEL)) {}
  size_t forward() const { return columns * value_panels; }
};

// Pack `count` keys and values from j0 on; `turned` is a panel of columns [H][PANEL].
template <class T>
static void pack_keys(const Call& call, const Sizes& sizes, Packed& to, int64_t b, int64_t k,
                      bool backward, float* row) {
  const T* keys = rows_of<T>(call.key, call, call.S, call.K, call.H, b, k);
  const T* values = rows_of<T>(call.value, call, call.S, call.K, call.Hv, b, k);
  const int64_t step = call.K * call.H, value_step = call.K * call.Hv;
  const int H = call.H, Hv = call.Hv;
  float* value_rows = row + PANEL * H;
  to.any_broken = false;
  for (int64_t j = 0; j < sizes.columns; j += PANEL) {
    const int count = std::max<int64_t>(0, std::min<int64_t>(PANEL, call.S - j));
    for (int i = 0; i < count; i++) {
      float *key = row + i * H, *value = value_rows + i * Hv;
      const bool finite = copy_row(keys + (j + i) * step, H, call.scale, key) &
                          copy_row(values + (j + i) * value_step, Hv, 1.0f, value);
      to.broken[j + i] = !finite;
      if (!finite) {
        to.any_broken = true;
        std::fill(key, key + H, 0.0f);
        std::fill(value, value + Hv, 0.0f);
      }
    }
    std::fill(row + count * H, row + PANEL * H, 0.0f);
    std::fill(value_rows + count * Hv, value_rows + PANEL * Hv, 0.0f);
    for (int i = count; i < PANEL; i++) to.broken[j + i] = 0;
    pack_columns(row, H, PANEL, H, to.keys_turned + j * H);
    if (backward) {
      pack_columns(value_rows, Hv, PANEL, Hv, to.values_turned + j * Hv);
      pack_rows(row, H, PANEL, H, to.keys + j * PANEL, sizes.columns * PANEL);
    } else {
      pack_rows(value_rows, Hv, PANEL, Hv, to.values + j * PANEL, sizes.columns * PANEL);
    }
  }
}

// Copy rows of queries, or of their cotangents, as float32, and flag those that are not finite.
template <class T>
static void copy_queries(const void* array, const Call& call, int64_t width, int64_t b, int64_t n,
                         int64_t i0, int64_t count, float* to, uint8_t* broken) {
  const T* from = rows_of<T>(array, call, call.T, call.N, width, b, n);
  for (int64_t i = 0; i < count; i++) {
    const bool finite =
        copy_row(from + (i0 + i) * call.N * width, width, 1.0f, to + i * width);
    if (broken) {
      broken[i] = !finite;
      if (!finite) std::fill(to + i * width, to + (i + 1) * width, 0.0f);
    }
  }
}

// The tiles of a row of the lists, which name first the `full` ones, then the partial ones.
struct Tile {
  int64_t at;
  bool partial;
};
static std::vector<Tile> tiles_of(const Call& call, int64_t b, int64_t n, int64_t row) {
  const int64_t lead = (call.tiles_b == 1 ? 0 : b) * call.tiles_n + (call.tiles_n == 1 ? 0 : n);
  const int64_t list = lead * call.tile_rows + row, seen = call.seen[list];
  // without a mask all tiles are full, including the last
  const int64_t full = call.num_operations ? call.full[list] : seen;
  std::vector<Tile> tiles(seen);
  for (int64_t t = 0; t < seen; t++)
    tiles[t] = {call.order[list * call.tile_columns + t], t >= full};
  // in order, because which tiles are full depends on the other rows of a tile
  std::sort(tiles.begin(), tiles.end(), [](const Tile& x, const Tile& y) { return x.at < y.at; });
  return tiles;
}

struct Range {
  int64_t begin, end;
};

// Convert products to scores in place, for keys begin .. end, in whole registers.
// If `slopes` is not null, it receives the tanh of capped scores.
static inline void cap_and_bias(const Call& call, float* row, Range keys, const float* bias,
                                float* tanhs) {
  if (call.softcap > 0) {
    const float inverse = 1 / call.softcap;
    for (int64_t j = keys.begin; j < keys.end; j += W) {
      const vf t = tanh(load(row + j) * inverse);
      if (tanhs) store(tanhs + j, t);
      store(row + j, t * call.softcap);
    }
  }
  if (bias)
    for (int64_t j = keys.begin; j < keys.end; j += W) store(row + j, load(row + j) + load(bias + j));
}

// Write the results of a row from its sum of p v, its maximum and the sum of p, with the sink.
template <class T>
static void finish_row(const Call& call, int64_t b, int64_t n, int64_t i, float* row, float m,
                       float l, bool lost) {
  const bool masked = m == -INF;
  float factor = 1;
  if (call.sinks && !masked) {
    const float sink = call.sinks[(call.sinks_b == 1 ? 0 : b) * call.N + n];
    const float now = std::max(m, sink);
    factor = std::exp(m - now);
    l = l * factor + std::exp(sink - now);
    m = now;
  }
  const bool nan = !masked && (lost || !(m < INF) || l != l);
  const int64_t start = ((b * call.T + i) * call.N + n) * call.Hv;
  if (nan) std::fill(row, row + call.Hv, NAN);
  factor = nan ? 1.0f : masked ? 0.0f : factor / l;
  if (call.out_is_wide)
    write_row(row, call.Hv, factor, (float*)call.out + start);
  else
    write_row(row, call.Hv, factor, (T*)call.out + start);
  const int64_t at = (b * call.N + n) * call.T + i;
  call.row_max[at] = nan ? NAN : m;
  call.log_sum[at] = nan ? NAN : masked ? 0.0f : std::log(l);
}

// Add numbers begin .. end of each row to its total, one after the other.
template <int M = ROWS>
static inline void add_in_order(int rows, const float* x, int64_t ldx, Range keys, float* totals) {
  if (rows == M) {
    float sums[M];
    std::copy(totals, totals + M, sums);
    for (int64_t j = keys.begin; j < keys.end; j++)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) sums[i] += x[i * ldx + j];
    std::copy(sums, sums + M, totals);
    return;
  }
  if constexpr (M > 1) add_in_order<M - 1>(rows, x, ldx, keys, totals);
}

// Forward: one tile of queries of one head.
//
// In `fixed` order, a first pass finds the maximum of each row, unless there is only one tile, and the
// second one sums p and p v key by key. Tiles, hidden keys and padding do not change the bits of a row:
// they add zeros.
template <class T>
static void forward_tile(const Call& call, const Sizes& sizes, const Packed& packed, int64_t b,
                         int64_t n, int64_t tile) {
  const int64_t i0 = tile * call.block_q, rows = std::min(call.block_q, call.T - i0);
  const int64_t H = call.H, padded = sizes.value_panels, BK = call.block_k;
  Scratch memory(rows * (H + padded + 2) + (ROWS + 1) * (BK + PANEL) + 64);
  float *query = memory.data, *out = query + rows * H, *most = out + rows * padded,
        *total = most + rows, *scores = total + rows;
  std::vector<uint8_t> broken(rows), lost(rows);
  copy_queries<T>(call.query, call, H, b, n, i0, rows, query, broken.data());
  std::fill(out, out + rows * padded, 0.0f);
  std::fill(most, most + rows, -INF);
  std::fill(total, total + rows, 0.0f);
  Scores bias(call, BK);
  const std::vector<Tile> tiles = tiles_of(call, b, n, tile);
  const int64_t visits = tiles.size(), passes = call.fixed && visits > 1 ? 2 : 1;
  std::vector<int32_t> visible(ROWS * (BK + PANEL));
  for (int64_t t = 0; t < passes * visits; t++) {
    const bool finds_most = t + visits < passes * visits, partial = tiles[t % visits].partial;
    const int64_t j0 = tiles[t % visits].at * BK, count = std::min(BK, call.S - j0);
    if (count <= 0) continue;
    // a full tile may end after the last key; nothing past that key is visible
    const bool ends = count % PANEL != 0;
    bias.take_tile(b, n, j0, count, partial);
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int group = std::min<int64_t>(ROWS, rows - r);
      int64_t begin = 0, end = count;
      if (partial) {
        begin = count, end = 0;
        for (int i = 0; i < group; i++) {
          int64_t first, last;
          const int32_t* seen = bias.visible(i0 + r + i, &first, &last);
          if (first < last) begin = std::min(begin, first), end = std::max(end, last);
          std::copy(seen, seen + round_up(count, PANEL), visible.data() + i * (BK + PANEL));
        }
        if (begin >= end) continue;
      }
      const Range keys{begin / PANEL * PANEL, round_up(end, PANEL)};
      for (int64_t j = keys.begin; j < keys.end; j += PANEL)
        multiply<false, false>(group, query + r * H, H, packed.keys_turned + (j0 + j) * H, H,
                               scores + j, BK + PANEL);
      float factors[ROWS];
      for (int i = 0; i < group; i++) {
        float* row = scores + i * (BK + PANEL);
        const int64_t at = r + i;
        if (call.softcap > 0 || bias.has_bias())
          cap_and_bias(call, row, keys, bias.has_bias() ? bias.bias(i0 + at) : nullptr, nullptr);
        if (partial) {
          const int32_t* seen = visible.data() + i * (BK + PANEL);
          for (int64_t j = keys.begin; j < keys.end; j += W)
            store(row + j, load(seen + j) != 0 ? load(row + j) : all(-INF));
          if (packed.any_broken)
            for (int64_t j = keys.begin; j < std::min(keys.end, count); j++)
              lost[at] |= seen[j] & packed.broken[j0 + j];
        } else {
          if (ends)
            for (int64_t j = count; j < keys.end; j++) row[j] = -INF;
          if (packed.any_broken)
            for (int64_t j = 0; j < count; j++) lost[at] |= packed.broken[j0 + j];
        }
        vf peak = all(-INF);
        vi unordered = vi{};
        for (int64_t j = keys.begin; j < keys.end; j += W) {
          const vf s = load(row + j);
          peak = larger(s, peak);
          unordered |= s != s;
        }
        if (any(unordered)) lost[at] = 1;
        const float before = most[at], now = std::max(before, largest(peak));
        most[at] = now;
        if (now == INF) lost[at] = 1;
        factors[i] = now == before ? 1.0f : before == -INF ? 0.0f : std::exp(before - now);
        if (finds_most) continue;
        if (now == -INF) {
          std::fill(row + keys.begin, row + keys.end, 0.0f);
          continue;
        }
        vf sums = vf{};
        for (int64_t j = keys.begin; j < keys.end; j += W) {
          const vf p = exp(load(row + j) - now);
          sums += p;
          store(row + j, p);
        }
        if (!call.fixed) total[at] = total[at] * factors[i] + sum(sums);
      }
      if (finds_most) continue;
      if (call.fixed) add_in_order(group, scores, BK + PANEL, keys, total + r);
      if (call.dropout)
        for (int i = 0; i < group; i++) {
          float* row = scores + i * (BK + PANEL);
          for (int64_t j = keys.begin; j < keys.end; j += W)
            store(row + j, load(row + j) * bias.kept(i0 + r + i, j));
        }
      for (int i = 0; i < group; i++)
        if (factors[i] != 1.0f) {
          float* row = out + (r + i) * padded;
          for (int64_t h = 0; h < padded; h += W) store(row + h, load(row + h) * factors[i]);
        }
      const int64_t from = partial ? begin : 0, to = partial ? end : count;
      for (int64_t h = 0; h < padded; h += PANEL)
        multiply<false, true>(group, scores + from, BK + PANEL,
                              packed.values + h * sizes.columns + (j0 + from) * PANEL, to - from,
                              out + r * padded + h, padded);
    }
  }
  for (int64_t i = 0; i < rows; i++)
    finish_row<T>(call, b, n, i0 + i, out + i * padded, most[i], total[i], lost[i] || broken[i]);
}

template <class T>
static void forward_of(const Call& call, const Parallel& parallel) {
  const Sizes sizes(call);
  const size_t keys = sizes.columns * call.H, values = sizes.columns * sizes.value_panels;
  const int64_t heads = call.B * call.K, group = call.N / call.K;
  Scratch memory(heads * (keys + values));
  std::vector<Packed> packed(heads);
  std::vector<uint8_t> broken(heads * sizes.columns);
  parallel(heads, [&](int64_t item) {
    Packed& to = packed[item];
    to.keys_turned = memory.data + item * (keys + values);
    to.values = to.keys_turned + keys;
    to.broken = broken.data() + item * sizes.columns;
    Scratch row(PANEL * (call.H + call.Hv));
    pack_keys<T>(call, sizes, to, item / call.K, item % call.K, false, row.data);
  });
  const int64_t tiles = (call.T + call.block_q - 1) / call.block_q;
  parallel(call.B * call.N * tiles, [&](int64_t item) {
    const int64_t tile = tiles - 1 - item % tiles, head = item / tiles;  // causal: longest first
    const int64_t b = head / call.N, n = head % call.N;
    forward_tile<T>(call, sizes, packed[b * call.K + n / group], b, n, tile);
  });
}

#include "backward.h"
#include "decode.h"

static void forward(const Call& call, const Parallel& parallel) {
  switch (call.dtype) {
    case Dtype::float32: return forward_of<float>(call, parallel);
    case Dtype::bfloat16: return forward_of<bfloat16>(call, parallel);
    case Dtype::float16: return forward_of<float16>(call, parallel);
  }
}
static void few_queries(const Call& call, const Parallel& parallel) {
  switch (call.dtype) {
    case Dtype::float32: return few_queries_of<float>(call, parallel);
    case Dtype::bfloat16: return few_queries_of<bfloat16>(call, parallel);
    case Dtype::float16: return few_queries_of<float16>(call, parallel);
  }
}
static void backward(const Call& call, const Parallel& parallel) {
  switch (call.dtype) {
    case Dtype::float32: return backward_of<float>(call, parallel);
    case Dtype::bfloat16: return backward_of<bfloat16>(call, parallel);
    case Dtype::float16: return backward_of<float16>(call, parallel);
  }
}
static void backward_bias(const Call& call, const Parallel& parallel) {
  switch (call.dtype) {
    case Dtype::float32: return bias_of<float>(call, parallel);
    case Dtype::bfloat16: return bias_of<bfloat16>(call, parallel);
    case Dtype::float16: return bias_of<float16>(call, parallel);
  }
}

}  // namespace NAMESPACE
