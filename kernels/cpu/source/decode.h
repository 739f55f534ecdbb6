// Few queries over many keys, as in decoding; included by attention.h, inside its namespace.
//
// The time of such a call is that of reading its keys and values. So they are read once, in place,
// [S][K][H] in their own dtype, and converted in registers. An item is a batch row, some adjacent key
// heads, and a chunk of keys; its rows are the queries of each head. It stores m_i, l_i and
// sum_j p_ij v_j of every row, and these are merged in the order of chunks. The division of a call
// does not depend on the threads.
//
// An item visits blocks of keys. One or two rows per head are multiplied in the order of memory, over
// all heads, which is the fastest order for the prefetcher. More rows need the registers head by head;
// their block is first touched in order.
//
// The mask's program runs over all keys, without tile lists: it reads one number per key, compared
// with K (H + Hv) numbers of the key itself. Blocks that no query sees are not read.
//
// Nonfinite keys and values are detected in scores and sums. An item with such keys starts over on
// copies of its blocks, with zeros for rows that are not finite, and records which queries see them.

constexpr int64_t ROW_BYTES = 4096;        // per key, for an item's heads
constexpr int64_t BLOCK_BYTES = 96 << 10;  // of the keys whose scores are computed at a time
constexpr int64_t ITEM_BYTES = 512 << 10;  // of an item's keys and values
constexpr int64_t LEAST = 32;              // minimum keys per block: whole registers

// The division of a call.
struct FewSizes {
  int64_t rows;                  // queries per key head
  int64_t heads, groups;         // key heads per item, and number of such groups
  int64_t block, chunk, chunks;  // keys per block and per item (whole blocks), and number of chunks
  int64_t parts, value_parts;    // registers per row
  int64_t record;                // floats that an item stores per row
  template <class T>
  static FewSizes of(const Call& call) {
    FewSizes s;
    s.rows = call.T * (call.N / call.K);
    s.heads = std::max<int64_t>(1, std::min<int64_t>(call.K, ROW_BYTES / (call.H * sizeof(T))));
    s.groups = (call.K + s.heads - 1) / s.heads;
    const int64_t key_bytes = s.heads * call.H * sizeof(T);
    const int64_t both = s.heads * (call.H + call.Hv) * sizeof(T);
    s.block = round_up(std::min(std::max(BLOCK_BYTES / key_bytes, LEAST), call.S), LEAST);
    s.chunk = round_up(std::max(ITEM_BYTES / both, s.block), s.block);
    s.chunks = (call.S + s.chunk - 1) / s.chunk;
    s.parts = (call.H + W - 1) / W, s.value_parts = (call.Hv + W - 1) / W;
    s.record = (s.value_parts + 1) * W;
    return s;
  }
};

// Start of register `part` of a row: the last register ends with the row, so it may overlap the
// previous one.
static inline int64_t part_at(int64_t part, int64_t width) {
  return std::min<int64_t>(part * W, width - W);
}

// Read rows in the order of memory, so that the hardware prefetches them; it would not prefetch head
// by head.
static inline void touch(const void* rows, int64_t count, int64_t bytes, int64_t step) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = 0; at < bytes; at += 64)
      (void)*((const volatile char*)rows + i * step + at);
}

// The sums of W registers, in one register.
template <int D>
__attribute__((always_inline)) static inline vf sums_of(vf* x) {
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < D; i++) {
      exchange_blocks<D>(x + i, x + i + D, std::make_integer_sequence<int, W>());
      x[i] += x[i + D];
    }
    return sums_of<D / 2>(x);
  }
  return x[0];
}

// Products of R queries, [R][parts][W], and `count` keys, [count][width] with `step` between rows.
template <int R, class T>
static inline void multiply_keys(const float* queries, int64_t parts, const T* keys, int64_t step,
                                 int count, int64_t width, float* to, int64_t to_step) {
  constexpr int J = W / R;
  for (int j = 0; j < count; j += J) {
    const T* at[J];
    for (int i = 0; i < J; i++) at[i] = keys + std::min(j + i, count - 1) * step;
    vf sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sums[i] = vf{};
    for (int64_t part = 0; part < parts; part++) {
      const int64_t h = part_at(part, width);
      vf query[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) query[r] = load(queries + (r * parts + part) * W);
#pragma GCC unroll 16
      for (int i = 0; i < J; i++) {
        const vf key = load(at[i] + h);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r * J + i] += key * query[r];
      }
    }
    float found[W];
    store(found, sums_of<W / 2>(sums));
    for (int r = 0; r < R; r++) std::memcpy(to + r * to_step + j, found + r * J, 4 * J);
  }
}

// Add p v of R rows of p and `count` values to parts first .. first + V of [R][record].
template <int R, int V, class T>
static inline void add_parts(const float* p, int64_t p_step, const T* values, int64_t step, int count,
                             int64_t width, int64_t first, float* to, int64_t record) {
  vf sums[R][V];
  int64_t at[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) at[v] = part_at(first + v, width);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[r][v] = load(to + r * record + (first + v) * W);
  for (int j = 0; j < count; j++) {
    vf value[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) value[v] = load(values + j * step + at[v]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] += p[r * p_step + j] * value[v];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(to + r * record + (first + v) * W, sums[r][v]);
}

template <int R, class T>
static inline void add_values(const float* p, int64_t p_step, const T* values, int64_t step, int count,
                              int64_t width, int64_t parts, float* to, int64_t record) {
  constexpr int V = R == 4 && W < 16 ? 2 : 4;
  int64_t part = 0;
  for (; part + V <= parts; part += V)
    add_parts<R, V>(p, p_step, values, step, count, width, part, to, record);
  for (; part < parts; part++)
    add_parts<R, 1>(p, p_step, values, step, count, width, part, to, record);
}

// One item: its inputs other than the call, and its results.
template <class T>
class FewQueries {
 public:
  FewQueries(const Call& call, const FewSizes& sizes, const float* queries, int64_t b, int64_t k,
             int64_t j0, float* records)
      : call_(call), sizes_(sizes), queries_(queries), b_(b), k_(k), j0_(j0),
        keys_(std::min(sizes.chunk, call.S - j0)),
        heads_(std::min(sizes.heads, call.K - k)),
        masked_heads_(call.pairs && call.pairs_n > 1 ? heads_ * (call.N / call.K) : 1),
        records_(records), scores_(call, sizes.block), p_(std::max<int64_t>(heads_ * sizes.rows, 4) * sizes.block),
        sums_(sizes.rows > 2 ? 0 : heads_ * sizes.rows * sizes.block * W) {}

  void run() {
    if (call_.num_operations) find_visible();
    if (call_.H >= W && call_.Hv >= W && visit<false>()) return;
    const int64_t widths = std::max<int64_t>(W, call_.H) + std::max<int64_t>(W, call_.Hv);
    copies_.resize(sizes_.block * heads_ * widths);
    broken_.resize(sizes_.block * heads_);
    visit<true>();
  }

 private:
  // Evaluate the mask: 0 or 1 for each query (or each query of each head) and each key.
  void find_visible() {
    const int64_t first_head = k_ * (call_.N / call_.K);
    visible_.resize(masked_heads_ * call_.T * sizes_.chunk);
    Mask mask(call_, sizes_.chunk);
    for (int64_t n = 0; n < masked_heads_; n++) {
      mask.take_keys(b_, first_head + n, j0_, keys_);
      for (int64_t i = 0; i < call_.T; i++) {
        int64_t begin, end;
        const int32_t* row = mask.row(i, &begin, &end);
        int32_t* to = visible_.data() + (n * call_.T + i) * sizes_.chunk;
        std::copy(row, row + keys_, to);
        std::fill(to + keys_, to + sizes_.chunk, 0);
      }
    }
  }

  // The keys of the block at j that query i of a head sees; null without a mask.
  const int32_t* visible(int64_t n, int64_t i, int64_t j) const {
    if (visible_.empty()) return nullptr;
    const int64_t head = masked_heads_ == 1 ? 0 : n - k_ * (call_.N / call_.K);
    return visible_.data() + (head * call_.T + i) * sizes_.chunk + j;
  }

  // The keys of a block, in whole registers, that any query sees.
  Range seen_of(int64_t j) const {
    const int64_t count = std::min(sizes_.block, keys_ - j);
    if (visible_.empty()) return {0, count};
    Range seen{count, 0};
    for (int64_t at = 0; at < count; at += W) {
      vi found = vi{};
      for (int64_t row = 0; row < masked_heads_ * call_.T; row++)
        found |= load(visible_.data() + row * sizes_.chunk + j + at);
      if (any(found)) seen = {std::min(seen.begin, at), std::min<int64_t>(at + W, count)};
    }
    return seen;
  }

  // Visit the blocks; return false if a value is not finite, unless COPIES handles it.
  template <bool COPIES>
  bool visit() {
    lost_.assign(heads_ * sizes_.rows, 0);
    for (int64_t row = 0; row < heads_ * sizes_.rows; row++) {
      float* record = records_ + row * sizes_.record;
      std::fill(record, record + sizes_.record, 0.0f);
      record[sizes_.record - W] = -INF;
    }
    for (int64_t j = 0; j < keys_; j += sizes_.block) {
      const Range seen = seen_of(j);
      if (seen.begin >= seen.end) continue;
      const int64_t first = (b_ * call_.S + j0_ + j + seen.begin) * call_.K + k_;
      const T* keys = (const T*)call_.key + first * call_.H;
      const T* values = (const T*)call_.value + first * call_.Hv;
      const int64_t step = call_.K * call_.H, value_step = call_.K * call_.Hv;
      const int count = seen.end - seen.begin;
      if constexpr (COPIES) {
        const int64_t width = std::max<int64_t>(W, call_.H);
        const int64_t value_width = std::max<int64_t>(W, call_.Hv);
        float *own_keys = copies_.data(), *own_values = own_keys + sizes_.block * heads_ * width;
        for (int64_t i = 0; i < count; i++)
          for (int64_t k = 0; k < heads_; k++) {
            float* key = own_keys + (i * heads_ + k) * width;
            float* value = own_values + (i * heads_ + k) * value_width;
            const bool finite =
                copy_row(keys + i * step + k * call_.H, call_.H, 1.0f, key) &
                copy_row(values + i * value_step + k * call_.Hv, call_.Hv, 1.0f, value);
            broken_[k * sizes_.block + i] = !finite;
            if (!finite) {
              std::fill(key, key + width, 0.0f);
              std::fill(value, value + value_width, 0.0f);
            }
          }
        block(j + seen.begin, count, own_keys, heads_ * width, width, own_values,
              heads_ * value_width, value_width);
      } else {
        if (!block(j + seen.begin, count, keys, step, call_.H, values, value_step, call_.Hv))
          return false;
      }
    }
    bool finite = true;
    for (int64_t row = 0; row < heads_ * sizes_.rows; row++) {
      float* record = records_ + row * sizes_.record;
      record[sizes_.record - W + 2] = lost_[row];
      vf zeros = vf{};
      for (int64_t part = 0; part < sizes_.value_parts; part++)
        zeros += load(record + part * W) * 0.0f;
      finite &= sum(zeros) == 0;
    }
    return finite;
  }

  // One block of all heads; return whether all products are finite.
  template <class X>
  bool block(int64_t j, int count, const X* keys, int64_t step, int64_t width, const X* values,
             int64_t value_step, int64_t value_width) {
    if (sizes_.rows == 1)
      return in_order<1>(j, count, keys, step, width, values, value_step, value_width);
    if (sizes_.rows == 2)
      return in_order<2>(j, count, keys, step, width, values, value_step, value_width);
    touch(keys, count, heads_ * width * sizeof(X), step * sizeof(X));
    touch(values, count, heads_ * value_width * sizeof(X), value_step * sizeof(X));
    bool finite = true;
    for (int64_t k = 0; k < heads_; k++)
      finite &= head(k, j, keys + k * width, step, width, values + k * value_width, value_step,
                     value_width, count);
    return finite;
  }

  // A block with R rows per head: keys and values are read in the order of memory.
  template <int R, class X>
  bool in_order(int64_t j, int count, const X* keys, int64_t step, int64_t width, const X* values,
                int64_t value_step, int64_t value_width) {
    const int64_t parts = sizes_.parts, value_parts = sizes_.value_parts, block = sizes_.block;
    float *p = p_.data(), *sums = sums_.data();  // [heads R][block], and W of each
    for (int i = 0; i < count; i++)
      for (int64_t k = 0; k < heads_; k++) {
        const float* queries = queries_ + k * R * parts * W;
        vf sum[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[r] = vf{};
        for (int64_t part = 0; part < parts; part++) {
          const vf key = load(keys + i * step + k * width + part_at(part, width));
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) sum[r] += key * load(queries + (r * parts + part) * W);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store(sums + ((k * R + r) * block + i) * W, sum[r]);
      }
    bool finite = true;
    for (int64_t row = 0; row < heads_ * R; row++) {
      for (int i = 0; i < count; i += W) {
        vf rows[W];
#pragma GCC unroll 16
        for (int c = 0; c < W; c++) rows[c] = load(sums + (row * block + i + c) * W);
        store(p + row * block + i, sums_of<W / 2>(rows));
      }
      finite &= weights(k_ + row / R, row % R, j, count, p + row * block,
                        records_ + row * sizes_.record);
    }
    for (int i = 0; i < count; i++)
      for (int64_t k = 0; k < heads_; k++) {
        float* to = records_ + k * R * sizes_.record;
        vf weight[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) weight[r] = all(p[(k * R + r) * block + i]);
        for (int64_t part = 0; part < value_parts; part++) {
          const vf value = load(values + i * value_step + k * value_width +
                                part_at(part, value_width));
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            float* own = to + r * sizes_.record + part * W;
            store(own, load(own) + weight[r] * value);
          }
        }
      }
    return finite;
  }

  // One block of one head.
  template <class X>
  bool head(int64_t k, int64_t j, const X* keys, int64_t step, int64_t width, const X* values,
            int64_t value_step, int64_t value_width, int count) {
    float* p = p_.data();
    const int64_t block = sizes_.block;
    bool finite = true;
    for (int64_t row = 0; row < sizes_.rows;) {
      const float* queries = queries_ + (k * sizes_.rows + row) * sizes_.parts * W;
      float* records = records_ + (k * sizes_.rows + row) * sizes_.record;
      const int64_t left = sizes_.rows - row;
      const auto finish = [&](int rows) {
        for (int r = 0; r < rows; r++)
          finite &= weights(k_ + k, row + r, j, count, p + r * block, records + r * sizes_.record);
      };
#define GROUP(R)                                                                           \
  multiply_keys<R>(queries, sizes_.parts, keys, step, count, width, p, block);             \
  finish(R);                                                                               \
  add_values<R>(p, block, values, value_step, count, value_width, sizes_.value_parts,      \
                records, sizes_.record);                                                   \
  row += R
      if (left >= 4) {
        GROUP(4);
      } else if (left >= 2) {
        GROUP(2);
      } else {
        GROUP(1);
      }
#undef GROUP
    }
    return finite;
  }

  // Convert a row's products to p, and rescale its sum.
  bool weights(int64_t k, int64_t row, int64_t j, int count, float* p, float* record) {
    const int64_t i = row % call_.T, n = k * (call_.N / call_.K) + row / call_.T;
    float *most = record + sizes_.record - W, *total = most + 1;
    uint8_t& lost = lost_[(k - k_) * sizes_.rows + row];
    const int32_t* seen = visible(n, i, j);
    const int64_t padded = round_up(count, W);
    vi infinite = vi{};
    for (int64_t at = 0; at < padded; at += W) {
      const vf s = load(p + at) * call_.scale;
      infinite |= (s - s) != 0.0f;
      store(p + at, s);
    }
    if (call_.softcap > 0 || scores_.has_bias()) {
      if (scores_.has_bias() || call_.dropout) scores_.take_tile(b_, n, j0_ + j, count, false);
      cap_and_bias(call_, p, {0, padded}, scores_.has_bias() ? scores_.bias(i) : nullptr, nullptr);
    } else if (call_.dropout) {
      scores_.take_tile(b_, n, j0_ + j, count, false);
    }
    if (!broken_.empty()) {
      const uint8_t* broken = broken_.data() + (k - k_) * sizes_.block;
      for (int at = 0; at < count; at++) lost |= broken[at] & (!seen || seen[at]);
    }
    vf peak = all(-INF);
    vi unordered = vi{};
    for (int64_t at = 0; at < padded; at += W) {
      vf s = load(p + at);
      if (seen)
        s = load(seen + at) != 0 ? s : all(-INF);
      else
        s = lane() + (int32_t)at < count ? s : all(-INF);
      store(p + at, s);
      peak = larger(s, peak);
      unordered |= s != s;
    }
    if (any(unordered)) lost = 1;
    const float now = std::max(*most, largest(peak));
    if (now == -INF) {
      std::fill(p, p + padded, 0.0f);
      return !any(infinite);
    }
    if (now == INF) lost = 1;
    const float factor = now == *most ? 1.0f : *most == -INF ? 0.0f : std::exp(*most - now);
    *most = now;
    vf sums = vf{};
    for (int64_t at = 0; at < padded; at += W) {
      vf x = exp(load(p + at) - now);
      sums += x;
      if (call_.dropout) x *= scores_.kept(i, at);
      store(p + at, x);
    }
    *total = *total * factor + sum(sums);
    if (factor != 1.0f)
      for (int64_t at = 0; at < sizes_.value_parts * W; at += W)
        store(record + at, load(record + at) * factor);
    return !any(infinite);
  }

  const Call& call_;
  const FewSizes& sizes_;
  const float* queries_;  // [heads][rows][parts][W]
  const int64_t b_, k_, j0_, keys_, heads_, masked_heads_;
  float* records_;  // [heads][rows][record]: sum of p v, m, l, nonfinite flag
  Scores scores_;
  std::vector<float> p_, sums_;  // for a block
  std::vector<int32_t> visible_;
  std::vector<float> copies_;
  std::vector<uint8_t> lost_;
  std::vector<uint8_t> broken_;
};

// Pack the queries into registers [B][K][rows][parts][W]. A last register that overlaps the previous
// one has zeros there. Rows that are not finite become zeros and are marked.
template <class T>
static void copy_few(const Call& call, const FewSizes& sizes, float* to, uint8_t* broken) {
  const int64_t H = call.H, last = (sizes.parts - 1) * W;
  const int64_t overlap = H < W ? 0 : last - part_at(sizes.parts - 1, H);
  for (int64_t head = 0; head < call.B * call.N; head++)
    for (int64_t i = 0; i < call.T; i++, to += sizes.parts * W, broken++) {
      const int64_t b = head / call.N, n = head % call.N;
      const T* from = (const T*)call.query + ((b * call.T + i) * call.N + n) * H;
      *broken = !copy_row(from, H, 1.0f, to);
      std::fill(to + (*broken ? 0 : H), to + sizes.parts * W, 0.0f);
      if (H >= W && overlap) {
        std::copy_backward(to + last, to + H, to + last + W);
        std::fill(to + last, to + last + overlap, 0.0f);
      }
    }
}

template <class T>
static void fixed_queries_of(const Call& call, const Parallel& parallel);

template <class T>
static void few_queries_of(const Call& call, const Parallel& parallel) {
  if (call.fixed) return fixed_queries_of<T>(call, parallel);
  const FewSizes sizes = FewSizes::of<T>(call);
  const int64_t rows = sizes.rows, all_rows = call.K * rows;
  const int64_t query_size = all_rows * sizes.parts * W, record_size = all_rows * sizes.record;
  Scratch queries(call.B * query_size);
  std::vector<uint8_t> broken(call.B * all_rows);
  copy_few<T>(call, sizes, queries.data, broken.data());
  Scratch records(call.B * sizes.chunks * record_size);  // [B][chunks][K][rows][record]
  parallel(call.B * sizes.groups * sizes.chunks, [&](int64_t item) {
    const int64_t chunk = item % sizes.chunks, of = item / sizes.chunks;
    const int64_t b = of / sizes.groups, k = of % sizes.groups * sizes.heads;
    FewQueries<T>(call, sizes, queries.data + b * query_size + k * rows * sizes.parts * W, b, k,
                  chunk * sizes.chunk,
                  records.data + (b * sizes.chunks + chunk) * record_size + k * rows * sizes.record)
        .run();
  });
  parallel(call.B, [&](int64_t b) {
    std::vector<float> sums(sizes.value_parts * W);
    for (int64_t row = 0; row < all_rows; row++) {
      const float* first = records.data + b * sizes.chunks * record_size + row * sizes.record;
      float most = -INF, total = 0;
      bool lost = broken[b * all_rows + row];
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t c = 0; c < sizes.chunks; c++)
        most = std::max(most, first[c * record_size + sizes.record - W]);
      for (int64_t c = 0; c < sizes.chunks; c++) {
        const float *record = first + c * record_size, *own = record + sizes.record - W;
        if (own[2] != 0) lost = true;
        if (own[0] == -INF) continue;
        const float factor = own[0] == most ? 1.0f : std::exp(own[0] - most);
        total += own[1] * factor;
        for (int64_t h = 0; h < sizes.value_parts * W; h += W)
          store(sums.data() + h, load(sums.data() + h) + load(record + h) * factor);
      }
      // the last register ends with the row
      const int64_t last = (sizes.value_parts - 1) * W;
      if (call.Hv > W && call.Hv % W)
        std::copy(sums.begin() + last, sums.end(), sums.begin() + call.Hv - W);
      finish_row<T>(call, b, row / call.T, row % call.T, sums.data(), most, total, lost);
    }
  });
}

// The same in the order of `forward_tile` with `fixed`. An item is a batch row and some adjacent key
// heads; it computes the scores of all keys, then their maximum, and then the sums, key by key. Return
// false if the results may not be finite.
template <class T>
static bool fixed_queries(const Call& call, int64_t b, int64_t k, int64_t heads) {
  const int64_t H = call.H, Hv = call.Hv, group = call.N / call.K, each = call.T * group;
  const int64_t rows = heads * each, columns = round_up(call.S, PANEL), parts = (Hv + W - 1) / W;
  const int64_t record = parts * W, bytes = heads * std::max(H, Hv) * sizeof(T);
  const int64_t block = round_up(std::min(std::max(BLOCK_BYTES / bytes, LEAST), call.S), PANEL);
  const int64_t masked_heads = call.pairs && call.pairs_n > 1 ? heads * group : 1;
  Scratch memory(rows * (H + columns + record + 2) + 2 * PANEL * H);
  float *query = memory.data, *scores = query + rows * H, *sums = scores + rows * columns;
  float *most = sums + rows * record, *total = most + rows, *own = total + rows;
  float* turned = own + PANEL * H;
  std::fill(sums, most, 0.0f);
  std::fill(most, total, -INF);
  std::fill(total, own, 0.0f);
  for (int64_t row = 0; row < rows; row++) {  // [heads][group][T]
    const int64_t n = k * group + row / call.T, i = row % call.T;
    copy_row((const T*)call.query + ((b * call.T + i) * call.N + n) * H, H, 1.0f, query + row * H);
  }
  Scores terms(call, block);
  Mask mask(call, block);
  std::vector<int32_t> visible(call.num_operations ? masked_heads * call.T * block : 0);
  std::vector<Range> ranges;  // of keys that any row sees
  vi infinite = vi{};
  for (int64_t j0 = 0; j0 < call.S; j0 += block) {
    const int64_t count = std::min(block, call.S - j0);
    Range seen{0, count};
    if (call.num_operations) {
      seen = {count, 0};
      for (int64_t n = 0; n < masked_heads; n++) {
        mask.take_keys(b, k * group + n, j0, count);
        for (int64_t i = 0; i < call.T; i++) {
          int64_t begin, end;
          const int32_t* from = mask.row(i, &begin, &end);
          std::copy(from, from + round_up(count, PANEL), visible.data() + (n * call.T + i) * block);
          if (begin < end) seen = {std::min(seen.begin, begin), std::max(seen.end, end)};
        }
      }
    }
    if (seen.begin >= seen.end) continue;
    const Range keys{seen.begin / PANEL * PANEL, round_up(seen.end, PANEL)};
    ranges.push_back({j0 + keys.begin, std::min(j0 + keys.end, call.S)});
    const int64_t step = call.K * H;
    const T* first = (const T*)call.key + (b * call.S + j0) * step + k * H;
    touch(first + keys.begin * step, std::min(keys.end, count) - keys.begin, heads * H * sizeof(T),
          step * sizeof(T));
    for (int64_t head = 0; head < heads; head++)
      for (int64_t j = keys.begin; j < keys.end; j += PANEL) {
        const int64_t there = std::min<int64_t>(PANEL, count - j);
        for (int64_t i = 0; i < there; i++)
          copy_row(first + (j + i) * step + head * H, H, call.scale, own + i * H);
        std::fill(own + there * H, own + PANEL * H, 0.0f);
        pack_columns(own, H, PANEL, H, turned);
        for (int64_t row = head * each, left = each; left > 0; row += ROWS, left -= ROWS)
          multiply<false, false>(std::min<int64_t>(ROWS, left), query + row * H, H, turned, H,
                                 scores + row * columns + j0 + j, columns);
      }
    for (int64_t row = 0; row < rows; row++) {
      const int64_t n = row / call.T, i = row % call.T;
      float* score = scores + row * columns + j0;
      for (int64_t j = keys.begin; j < keys.end; j += W) {
        const vf s = load(score + j);
        infinite |= (s - s) != 0.0f;
      }
      if (call.softcap > 0 || terms.has_bias()) {
        if (terms.has_bias()) terms.take_tile(b, k * group + n, j0, count, false);
        cap_and_bias(call, score, keys, terms.has_bias() ? terms.bias(i) : nullptr, nullptr);
      }
      const int32_t* here = visible.data() + ((masked_heads == 1 ? 0 : n) * call.T + i) * block;
      vf peak = all(-INF);
      for (int64_t j = keys.begin; j < keys.end; j += W) {
        vf s = load(score + j);
        if (call.num_operations)
          s = load(here + j) != 0 ? s : all(-INF);
        else
          s = lane() + (int32_t)j < (int32_t)count ? s : all(-INF);
        store(score + j, s);
        peak = larger(s, peak);
        infinite |= s != s;
      }
      most[row] = std::max(most[row], largest(peak));
    }
    if (any(infinite)) return false;
  }
  for (int64_t row = 0; row < rows; row += ROWS) {
    const int some = std::min<int64_t>(ROWS, rows - row);
    for (const Range& keys : ranges) {
      for (int64_t at = row; at < row + some; at++)
        for (int64_t j = keys.begin; j < keys.end; j += W) {
          float* score = scores + at * columns + j;
          store(score, most[at] == -INF ? vf{} : exp(load(score) - most[at]));
        }
      add_in_order(some, scores + row * columns, columns, keys, total + row);
    }
  }
  const int64_t step = call.K * Hv;
  for (const Range& keys : ranges)
    for (int64_t j = keys.begin; j < keys.end; j += block) {
      const int count = std::min(block, keys.end - j);
      const T* values = (const T*)call.value + (b * call.S + j) * step + k * Hv;
      touch(values, count, heads * Hv * sizeof(T), step * sizeof(T));
      for (int64_t head = 0; head < heads; head++, values += Hv)
        for (int64_t row = head * each, left = each, R; left > 0; row += R, left -= R) {
          const float* p = scores + row * columns + j;
          float* to = sums + row * record;
          R = left >= 4 ? 4 : left >= 2 ? 2 : 1;
          if (R == 4)
            add_values<4>(p, columns, values, step, count, Hv, parts, to, record);
          else if (R == 2)
            add_values<2>(p, columns, values, step, count, Hv, parts, to, record);
          else
            add_values<1>(p, columns, values, step, count, Hv, parts, to, record);
        }
    }
  vf zeros = vf{};
  for (int64_t at = 0; at < rows * record; at += W) zeros += load(sums + at) * 0.0f;
  if (!(sum(zeros) == 0)) return false;
  for (int64_t row = 0; row < rows; row++) {
    float* own_sums = sums + row * record;  // the last register ends with the row
    if (Hv > W && Hv % W)
      std::copy(own_sums + record - W, own_sums + record, own_sums + Hv - W);
    const int64_t n = k * group + row / call.T;
    finish_row<T>(call, b, n, row % call.T, own_sums, most[row], total[row], false);
  }
  return true;
}

template <class T>
static void fixed_queries_of(const Call& call, const Parallel& parallel) {
  std::atomic<bool> finite{!call.dropout && call.Hv >= W};
  if (finite) {
    const int64_t most = ROW_BYTES / (call.H * sizeof(T)), wanted = call.B * call.K / (2 * call.threads);
    const int64_t heads = std::max<int64_t>(1, std::min({call.K, most, wanted}));
    const int64_t groups = (call.K + heads - 1) / heads;
    parallel(call.B * groups, [&](int64_t item) {
      const int64_t k = item % groups * heads;
      if (!fixed_queries<T>(call, item / groups, k, std::min(heads, call.K - k))) finite = false;
    });
  }
  if (finite) return;
  // `forward_tile` knows which rows are lost; it visits all tiles, in lists of its own
  Call again = call;
  again.tiles_b = again.tiles_n = 1;
  again.tile_rows = (call.T + call.block_q - 1) / call.block_q;
  again.tile_columns = (call.S + call.block_k - 1) / call.block_k;
  std::vector<int32_t> order(again.tile_rows * again.tile_columns), full(again.tile_rows);
  const std::vector<int32_t> seen(again.tile_rows, again.tile_columns);
  for (size_t at = 0; at < order.size(); at++) order[at] = at % again.tile_columns;
  again.order = order.data(), again.full = full.data(), again.seen = seen.data();
  forward_of<T>(again, parallel);
}
