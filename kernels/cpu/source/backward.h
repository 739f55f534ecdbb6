// The backward pass; included by attention.h, inside its namespace.
//
//     p_ij = exp(s_ij - m_i - log l_i)       ds_ij = p_ij (f_ij do_i . v_j - D_i)
//     dv_j = sum_i p_ij f_ij do_i            dq_i = sum_j ds_ij k_j, dk_j = sum_i ds_ij q_i
//
// An item is a key head and a stretch of tiles of keys. It visits the tiles in order and, for each of
// them, the tiles of queries of every query head that reads it. dk and dv are complete after a tile.
// Each stretch sums its dq in float32; these are then summed over the stretches, in order.

// Queries of one head and their cotangents, as rows, and as panels of rows for products onto keys.
struct PackedQueries {
  float *query, *query_panels, *cotangent, *cotangent_panels;
};

// p and ds of one tile; a thread works on one tile at a time.
class BackwardTile {
 public:
  BackwardTile(const Call& call)
      : width(call.block_k + PANEL),
        call_(call),
        memory_(2 * call.block_q * width + width),
        scores_(call, call.block_k),
        visible_(ROWS * width),
        first_(width / PANEL),
        last_(width / PANEL) {
    p = memory_.data, ds = p + call.block_q * width;
  }

  const int64_t width;
  float *p, *ds;

  // Compute p after dropout and ds for rows i0 .. i0 + rows and keys j0 .. j0 + count, zeros for
  // hidden pairs. `slopes`, f32[count], receives the sums of -ds |q - k|. `before_cap` omits the
  // derivative of the softcap, because the gradient of a bias is ds.
  void compute(const Packed& packed, const float* query, const float* cotangent, int64_t b,
               int64_t n, int64_t i0, int64_t rows, int64_t j0, int64_t count, bool partial,
               float* slopes, bool before_cap) {
    const int64_t H = call_.H, Hv = call_.Hv, padded = round_up(count, PANEL);
    scores_.take_tile(b, n, j0, count, partial);
    std::fill(first_.begin(), first_.end(), rows);
    std::fill(last_.begin(), last_.end(), 0);
    groups_.clear();
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int group = std::min<int64_t>(ROWS, rows - r);
      int64_t begin = 0, end = count;
      if (partial) {
        begin = count, end = 0;
        for (int i = 0; i < group; i++) {
          int64_t first, last;
          const int32_t* seen = scores_.visible(i0 + r + i, &first, &last);
          if (first < last) begin = std::min(begin, first), end = std::max(end, last);
          std::copy(seen, seen + padded, visible_.data() + i * width);
        }
      }
      const Range keys{begin < end ? begin / PANEL * PANEL : padded,
                       begin < end ? round_up(end, PANEL) : padded};
      groups_.push_back(keys);
      for (int i = 0; i < group; i++)
        for (float* row : {p + (r + i) * width, ds + (r + i) * width}) {
          std::fill(row, row + keys.begin, 0.0f);
          std::fill(row + keys.end, row + padded, 0.0f);
        }
      for (int64_t j = keys.begin; j < keys.end; j += PANEL) {
        first_[j / PANEL] = std::min(first_[j / PANEL], r);
        last_[j / PANEL] = r + group;
        multiply<false, false>(group, query + (i0 + r) * H, H, packed.keys_turned + (j0 + j) * H,
                               H, p + r * width + j, width);
        multiply<false, false>(group, cotangent + (i0 + r) * Hv, Hv,
                               packed.values_turned + (j0 + j) * Hv, Hv, ds + r * width + j,
                               width);
      }
      if (keys.begin < keys.end)
        for (int i = 0; i < group; i++)
          finish_row(b, n, i0 + r + i, r + i, keys, count,
                     partial ? visible_.data() + i * width : nullptr, slopes, before_cap);
    }
  }

  // Add ds k to dq [rows, H]; rows of `to` have a `stride`, and keys are panels.
  void add_queries(const Packed& packed, int64_t rows, int64_t j0, int64_t count, int64_t columns,
                   float* to, int64_t stride) const {
    for (int64_t h = 0; h < stride; h += PANEL)
      for (int64_t r = 0; r < rows; r += ROWS) {
        const Range keys = groups_[r / ROWS];
        const int64_t end = std::min(keys.end, count);
        if (keys.begin < end)
          multiply<false, true>(std::min<int64_t>(ROWS, rows - r), ds + r * width + keys.begin,
                                width, packed.keys + h * columns + (j0 + keys.begin) * PANEL,
                                end - keys.begin, to + r * stride + h, stride);
      }
  }

  // Add the product of `weights` (p or ds, transposed) and panels of queries to rows of keys
  // [count, width].
  void add_keys(const float* weights, const float* panels, int64_t panel_stride, int64_t count,
                float* to, int64_t stride) const {
    for (int64_t h = 0; h < stride; h += PANEL)
      for (int64_t j = 0; j < count; j += ROWS) {
        const int64_t keys = std::min<int64_t>(ROWS, count - j), last = (j + keys - 1) / PANEL;
        int64_t begin = first_[j / PANEL], end = last_[j / PANEL];
        if (last != j / PANEL)
          begin = std::min(begin, first_[last]), end = std::max(end, last_[last]);
        if (begin < end)
          multiply<true, true>(keys, weights + begin * width + j, width,
                               panels + h / PANEL * panel_stride + begin * PANEL, end - begin,
                               to + j * stride + h, stride);
      }
  }

 private:
  void finish_row(int64_t b, int64_t n, int64_t i, int64_t r, Range keys, int64_t count,
                  const int32_t* seen, float* slopes, bool before_cap) {
    float *row = p + r * width, *dp = ds + r * width, *tanhs = memory_.data;
    tanhs += 2 * call_.block_q * width;
    const int64_t at = (b * call_.N + n) * call_.T + i;
    const float most = call_.saved_max[at], log_sum = call_.saved_sum[at], D = call_.D[at];
    if (most == INF) {  // a row without a gradient
      std::fill(row + keys.begin, row + keys.end, 0.0f);
      std::fill(dp + keys.begin, dp + keys.end, 0.0f);
      return;
    }
    const bool capped = call_.softcap > 0;
    if (capped || scores_.has_bias())
      cap_and_bias(call_, row, keys, scores_.has_bias() ? scores_.bias(i) : nullptr, tanhs);
    for (int64_t j = keys.begin; j < keys.end; j += W) {
      vf x = exp((load(row + j) - most) - log_sum), y = load(dp + j);
      if (call_.dropout) {
        const vf kept = scores_.kept(i, j);
        y = x * (y * kept - D);
        x *= kept;
      } else {
        y = x * (y - D);
      }
      const vi here = seen ? load(seen + j) != 0 : lane() + (int32_t)j < (int32_t)count;
      x = here ? x : vf{}, y = here ? y : vf{};
      if (slopes) store(slopes + j, load(slopes + j) + y * scores_.nearness(i, j));
      if (capped && !before_cap) {
        const vf t = load(tanhs + j);
        y *= 1.0f - t * t;
        y = here ? y : vf{};
      }
      store(row + j, x);
      store(dp + j, y);
    }
  }

  const Call& call_;
  Scratch memory_;
  Scores scores_;
  std::vector<int32_t> visible_;
  std::vector<int64_t> first_, last_;  // for each panel of keys: the rows that see any of its keys
  std::vector<Range> groups_;          // for each group of rows: the panels of keys that it sees
};

// Queries of all heads and their cotangents, as rows, and as panels of rows.
template <class T>
struct Queries {
  Queries(const Call& call, const Parallel& parallel, bool with_panels)
      : H(call.H), Hv(call.Hv), wide(round_up(H, PANEL)), wide_v(round_up(Hv, PANEL)), T_(call.T),
        each(T_ * (H + Hv + (with_panels ? wide + wide_v : 0))),
        memory_(call.B * call.N * each) {
    parallel(call.B * call.N, [&](int64_t head) {
      const int64_t b = head / call.N, n = head % call.N;
      std::vector<uint8_t> broken(T_);
      float *q = query(head), *c = cotangent(head);
      copy_queries<T>(call.query, call, H, b, n, 0, T_, q, broken.data());
      copy_queries<T>(call.do_, call, Hv, b, n, 0, T_, c, nullptr);
      for (int64_t i = 0; i < T_; i++)
        if (call.saved_max[head * T_ + i] == INF) std::fill(c + i * Hv, c + (i + 1) * Hv, 0.0f);
      if (with_panels) {
        pack_rows(q, H, T_, H, query_panels(head), T_ * PANEL);
        pack_rows(c, Hv, T_, Hv, cotangent_panels(head), T_ * PANEL);
      }
    });
  }
  float* query(int64_t head) const { return memory_.data + head * each; }
  float* cotangent(int64_t head) const { return query(head) + T_ * H; }
  float* query_panels(int64_t head) const { return cotangent(head) + T_ * Hv; }
  float* cotangent_panels(int64_t head) const { return query_panels(head) + T_ * wide; }
  const int64_t H, Hv, wide, wide_v;

 private:
  const int64_t T_, each;
  Scratch memory_;
};

// Keys and values of all heads, in the layout for the products of the backward pass.
template <class T>
struct Keys {
  Keys(const Call& call, const Sizes& sizes, const Parallel& parallel)
      : packed(call.B * call.K),
        each(sizes.columns * (call.H + call.Hv + sizes.key_panels)),
        memory_(call.B * call.K * each),
        broken_(call.B * call.K * sizes.columns) {
    parallel(call.B * call.K, [&](int64_t head) {
      Packed& to = packed[head];
      to.keys_turned = memory_.data + head * each;
      to.values_turned = to.keys_turned + sizes.columns * call.H;
      to.keys = to.values_turned + sizes.columns * call.Hv;
      to.broken = broken_.data() + head * sizes.columns;
      Scratch row(PANEL * (call.H + call.Hv));
      pack_keys<T>(call, sizes, to, head / call.K, head % call.K, true, row.data);
    });
  }
  std::vector<Packed> packed;

 private:
  const int64_t each;
  Scratch memory_;
  std::vector<uint8_t> broken_;
};

template <class T>
static void backward_of(const Call& call, const Parallel& parallel) {
  const Sizes sizes(call);
  const int64_t heads = call.B * call.K, group = call.N / call.K;
  const int64_t H = call.H, Hv = call.Hv, wide = sizes.key_panels, wide_v = sizes.value_panels;
  const int64_t BQ = call.block_q, BK = call.block_k, key_tiles = (call.S + BK - 1) / BK;
  // stretches sum dq in another order
  const int64_t stretches =
      call.fixed ? 1 : std::max<int64_t>(1, std::min(key_tiles, (2 * call.threads - 1) / heads));
  const Queries<T> queries(call, parallel, true);
  const Keys<T> keys(call, sizes, parallel);
  // dq [stretches][B N][T][wide]
  const int64_t each = call.T * wide, all_heads = call.B * call.N;
  Scratch sums(stretches * all_heads * each);
  if (call.slope_rows) std::fill(call.slope_rows, call.slope_rows + all_heads * call.S, 0.0f);
  parallel(heads * stretches, [&](int64_t item) {
    const int64_t head = item / stretches, stretch = item % stretches;
    const int64_t b = head / call.K, k = head % call.K;
    float* dq = sums.data + (stretch * all_heads + b * call.N + k * group) * each;
    std::fill(dq, dq + group * each, 0.0f);
    BackwardTile tile(call);
    Scratch memory(BK * (wide + wide_v) + BK + PANEL);
    float *dk = memory.data, *dv = dk + BK * wide, *slopes = dv + BK * wide_v;
    // every stretch has tiles from all parts of the sequence, because causal tiles differ in work
    for (int64_t column = stretch; column < key_tiles; column += stretches) {
      const int64_t j0 = column * BK, count = std::min(BK, call.S - j0);
      std::fill(dk, slopes, 0.0f);
      for (int64_t g = 0; g < group; g++) {
        const int64_t n = k * group + g, own = b * call.N + n;
        std::fill(slopes, slopes + BK + PANEL, 0.0f);
        for (const Tile& of : tiles_of(call, b, n, column)) {
          const int64_t i0 = of.at * BQ, rows = std::min(BQ, call.T - i0);
          if (rows <= 0) continue;
          tile.compute(keys.packed[head], queries.query(own), queries.cotangent(own), b, n, i0,
                       rows, j0, count, of.partial, call.slope_rows ? slopes : nullptr, false);
          tile.add_queries(keys.packed[head], rows, j0, count, sizes.columns,
                           dq + g * each + i0 * wide, wide);
          tile.add_keys(tile.p, queries.cotangent_panels(own) + i0 * PANEL, call.T * PANEL, count,
                        dv, wide_v);
          tile.add_keys(tile.ds, queries.query_panels(own) + i0 * PANEL, call.T * PANEL, count, dk,
                        wide);
        }
        if (call.slope_rows) std::copy(slopes, slopes + count, call.slope_rows + own * call.S + j0);
      }
      for (int64_t j = 0; j < count; j++) {
        const int64_t at = (b * call.S + j0 + j) * call.K + k;
        write_row(dk + j * wide, H, call.scale, (T*)call.dk + at * H);
        write_row(dv + j * wide_v, Hv, 1.0f, (T*)call.dv + at * Hv);
      }
    }
  });
  parallel(all_heads, [&](int64_t head) {
    const int64_t b = head / call.N, n = head % call.N;
    for (int64_t i = 0; i < call.T; i++) {
      float* row = sums.data + head * each + i * wide;
      for (int64_t s = 1; s < stretches; s++)
        for (int64_t h = 0; h < H; h++) row[h] += row[s * all_heads * each + h];
      write_row(row, H, 1.0f, (T*)call.dq + ((b * call.T + i) * call.N + n) * H);
    }
  });
}

// The gradient of an array bias, in float32 and in its shape; an item sums one part of it.
template <class T>
static void bias_of(const Call& call, const Parallel& parallel) {
  const Sizes sizes(call);
  const int64_t group = call.N / call.K, BQ = call.block_q, BK = call.block_k;
  const int64_t* shape = call.bias_shape;
  const int64_t tiles_q = (call.T + BQ - 1) / BQ, parts = shape[2] == 1 ? 1 : tiles_q;
  const Queries<T> queries(call, parallel, false);
  const Keys<T> keys(call, sizes, parallel);
  std::fill(call.dbias, call.dbias + shape[0] * shape[1] * shape[2] * shape[3], 0.0f);
  parallel(shape[0] * shape[1] * parts, [&](int64_t item) {
    const int64_t part = item % parts, lead = item / parts;
    float* to = call.dbias + lead * shape[2] * shape[3];
    BackwardTile tile(call);
    const int64_t of_b = lead / shape[1], of_n = lead % shape[1];
    for (int64_t b = shape[0] == 1 ? 0 : of_b; b < (shape[0] == 1 ? call.B : of_b + 1); b++)
      for (int64_t n = shape[1] == 1 ? 0 : of_n; n < (shape[1] == 1 ? call.N : of_n + 1); n++)
        for (int64_t q = parts == 1 ? 0 : part; q < (parts == 1 ? tiles_q : part + 1); q++) {
          const int64_t i0 = q * BQ, rows = std::min(BQ, call.T - i0), own = b * call.N + n;
          for (const Tile& of : tiles_of(call, b, n, q)) {
            const int64_t j0 = of.at * BK, count = std::min(BK, call.S - j0);
            if (count <= 0) continue;
            tile.compute(keys.packed[b * call.K + n / group], queries.query(own),
                         queries.cotangent(own), b, n, i0, rows, j0, count, of.partial, nullptr,
                         true);
            for (int64_t i = 0; i < rows; i++) {
              float* row = to + (shape[2] == 1 ? 0 : i0 + i) * shape[3];
              const float* from = tile.ds + i * tile.width;
              if (shape[3] == 1) {
                float total = 0;
                for (int64_t j = 0; j < count; j++) total += from[j];
                row[0] += total;
              } else {
                for (int64_t j = 0; j < count; j++) row[j0 + j] += from[j];
              }
            }
          }
        }
  });
}
