// Calls of the CPU kernels without XLA, on random problems, compared with loops in float64.
//
//     native_driver KERNELS CASES SEED THREADS CALLERS
//
// KERNELS is wide, avx2 or plain; several concurrent CALLERS share a pool of THREADS. For sanitizers
// and other processors: `python -m tests.kernels.sanitize` builds and runs it.
#include <cstdio>
#include <deque>
#include <random>
#include <string>
#include <thread>

#include "call.h"
#include "threads.h"
#define LANES 4
#define NAMESPACE conversions
#include "vectors.h"
#include "matmul.h"

namespace {

// A thread pool like XLA's: a queue of tasks, and threads that take them.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int t = 0; t < threads; t++) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      ends_ = true;
    }
    there_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  int64_t num_threads() const { return threads_; }
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      tasks_.push_back(std::move(task));
    }
    there_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> hold(lock_);
      there_.wait(hold, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      hold.unlock();
      task();
    }
  }
  const int threads_;
  std::mutex lock_;
  std::condition_variable there_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> workers_;
  bool ends_ = false;
};

// Numbers of one of the three types, in the format of the kernels.
struct Numbers {
  Dtype dtype = Dtype::float32;
  std::vector<float> wide;
  std::vector<uint16_t> narrow;

  Numbers() = default;
  Numbers(Dtype type, size_t count) : dtype(type) {
    if (type == Dtype::float32) wide.resize(count);
    else narrow.resize(count);
  }
  size_t size() const { return wide.size() + narrow.size(); }
  void* data() { return dtype == Dtype::float32 ? (void*)wide.data() : (void*)narrow.data(); }

  static double half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
  }
  double at(size_t i) const {
    if (dtype == Dtype::float32) return wide[i];
    if (dtype == Dtype::float16) return half(narrow[i]);
    const uint32_t bits = (uint32_t)narrow[i] << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  void put(size_t i, float x) {  // truncated to the type's bits, so that reading is exact
    if (dtype == Dtype::float32) {
      wide[i] = x;
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == Dtype::bfloat16) {
      narrow[i] = bits >> 16 | (x != x);
      return;
    }
    const uint16_t sign = bits >> 16 & 0x8000;
    const double size = std::fabs((double)x);
    if (!(size < 65504)) narrow[i] = sign | 0x7c00 | (x != x);
    else if (size < 6.2e-5) narrow[i] = sign;
    else {
      int exponent;
      const double fraction = std::frexp(size, &exponent);
      narrow[i] = sign | (exponent + 14) << 10 | ((int)std::ldexp(fraction, 11) & 1023);
    }
  }
};

uint32_t mixed(uint32_t x) {  // lowbias32, as in kernels/dropout.py
  x = (x ^ x >> 16) * 0x7feb352d;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

// One operation of a mask's program, in 64 bits truncated to 32.
int32_t evaluated(int32_t operation, int64_t x, int64_t y, int64_t z) {
  const auto cut = [](int64_t wide) { return (int32_t)(uint32_t)(uint64_t)wide; };
  switch (operation) {
    case 0: return cut(x + y);
    case 1: return cut(x - y);
    case 2: return cut(x * y);
    case 3: return cut(x & y);
    case 4: return cut(x | y);
    case 5: return cut(x ^ y);
    case 6: return cut(std::min(x, y));
    case 7: return cut(std::max(x, y));
    case 8: return x == y;
    case 9: return x != y;
    case 10: return x < y;
    case 11: return x <= y;
    case 12: return x > y;
    case 13: return x >= y;
    case 14: return y < 0 || y > 31 ? 0 : cut((int64_t)((uint64_t)x << y));
    case 15: return cut(x >> (y < 0 || y > 31 ? 31 : y));
    case 16: return cut(x ? z : y);
    case 17: return cut(y == 0 ? -1 : x / y);
    default: return cut(y == 0 ? x : x % y);
  }
}

class Case {
 public:
  Case(uint64_t seed, int64_t threads) : random_(seed) {
    sizes(threads);
    arrays();
    mask();
    extras();
    reference();
  }

  // Run forward, backward and the gradient of a bias; return the largest error relative to its tolerance.
  double run(const Kernels& kernels, const Parallel& parallel) {
    worst_ = 0, worst_name_ = "";
    const int64_t rows = c.B * c.N * c.T;
    Numbers out(c.dtype, rows * c.Hv);
    std::vector<float> row_max(rows), log_sum(rows);
    Tiles tiles = tiled(c.block_q, c.block_k, false);
    tiles.give(c);
    c.out = out.data(), c.row_max = row_max.data(), c.log_sum = log_sum.data();
    kernels.forward(c, parallel);
    compare("out", out, out_, c.dtype, 1);
    Numbers lse(Dtype::float32, rows);
    for (int64_t r = 0; r < rows; r++) lse.wide[r] = row_max[r] + log_sum[r];
    compare("lse", lse, lse_, Dtype::float32, 1);

    Call again = c;
    Numbers second(c.dtype, rows * c.Hv);
    std::vector<float> second_max(rows), second_sum(rows);
    again.out = second.data(), again.row_max = second_max.data();
    again.log_sum = second_sum.data();
    Tiles others;
    if (c.fixed) others = use_other_tiles(again, false);
    kernels.forward(again, parallel);
    const bool same_rows = same(row_max, second_max) && same(log_sum, second_sum);
    if (!same(out, second) || !same_rows) note("the bits of a second call", INFINITY);

    if (c.T * (c.N / c.K) <= 16) {  // the condition of kernels/cpu/__init__.py
      Numbers few(c.dtype, rows * c.Hv);
      std::vector<float> few_max(rows), few_sum(rows);
      again.out = few.data(), again.row_max = few_max.data(), again.log_sum = few_sum.data();
      again.order = again.full = again.seen = nullptr;
      kernels.few_queries(again, parallel);
      compare("out of few queries", few, out_, c.dtype, 1);
      for (int64_t r = 0; r < rows; r++) lse.wide[r] = few_max[r] + few_sum[r];
      compare("lse of few queries", lse, lse_, Dtype::float32, 1);
      const bool same_few = same(few_max, row_max) && same(few_sum, log_sum);
      if (c.fixed && (!same(few, out) || !same_few)) note("the bits of few queries", INFINITY);
    }

    // the computation of kernels/gradient.py
    std::vector<float> saved_max(rows), saved_sum(rows), D(rows);
    for (int64_t r = 0; r < rows; r++) {
      const bool lost = row_max[r] == -INFINITY || log_sum[r] != log_sum[r];
      saved_max[r] = lost ? INFINITY : row_max[r];
      saved_sum[r] = lost ? 0 : log_sum[r];
      D[r] = lost ? 0 : D_[r];
    }
    c.saved_max = saved_max.data(), c.saved_sum = saved_sum.data(), c.D = D.data();
    c.do_ = cotangent.data();
    Numbers dq(c.dtype, query.size()), dk(c.dtype, key.size()), dv(c.dtype, value.size());
    Numbers slopes(Dtype::float32, c.slopes && chance(0.7) ? c.B * c.N * c.S : 0);
    c.dq = dq.data(), c.dk = dk.data(), c.dv = dv.data();
    c.slope_rows = slopes.size() ? slopes.wide.data() : nullptr;
    tiles = tiled(c.block_q, c.block_k, true);
    tiles.give(c);
    kernels.backward(c, parallel);
    compare("dq", dq, dq_, c.dtype, 5);
    compare("dk", dk, dk_, c.dtype, 5);
    compare("dv", dv, dv_, c.dtype, 5);
    if (slopes.size()) compare("slopes", slopes, slopes_, Dtype::float32, 5);
    if (c.fixed) {
      Numbers second_dq(c.dtype, dq.size()), second_dk(c.dtype, dk.size());
      Numbers second_dv(c.dtype, dv.size()), second_slopes(Dtype::float32, slopes.size());
      again = c, again.threads = 7;
      again.dq = second_dq.data(), again.dk = second_dk.data(), again.dv = second_dv.data();
      again.slope_rows = slopes.size() ? second_slopes.wide.data() : nullptr;
      others = use_other_tiles(again, true);
      kernels.backward(again, parallel);
      if (!same(dq, second_dq) || !same(dk, second_dk) || !same(dv, second_dv) ||
          !same(slopes, second_slopes))
        note("the bits of gradients with other tiles", INFINITY);
    }
    if (c.bias) {
      Numbers dbias(Dtype::float32, bias.size());
      c.dbias = dbias.wide.data();
      tiles = tiled(c.block_q, c.block_k, false);
      tiles.give(c);
      kernels.backward_bias(c, parallel);
      compare("dbias", dbias, dbias_, Dtype::float32, 5);
    }
    return worst_;
  }

  std::string say() const {
    char line[300];
    const char* names[] = {"float32", "bfloat16", "float16"};
    std::snprintf(line, sizeof line,
                  "%s, error %.3g of what is allowed: B %d T %d S %d N %d K %d H %d Hv %d, %s, tiles "
                  "%d x %d, mask of %d operations%s%s%s%s%s%s%s, %d threads",
                  worst_name_, worst_, (int)c.B, (int)c.T, (int)c.S, (int)c.N, (int)c.K, (int)c.H,
                  (int)c.Hv, names[(int)c.dtype], (int)c.block_q, (int)c.block_k,
                  (int)c.num_operations, c.pairs ? ", pairs" : "", c.bias ? ", bias" : "",
                  c.slopes ? ", slopes" : "", c.sinks ? ", sinks" : "",
                  c.softcap > 0 ? ", softcap" : "", c.dropout ? ", dropout" : "",
                  broken_ ? ", nonfinite rows" : "", (int)c.threads);
    return line;
  }

 private:
  struct Tiles {
    std::vector<int32_t> order, full, seen;
    int64_t b, n, rows, columns;
    void give(Call& call) const {
      call.order = order.data(), call.full = full.data(), call.seen = seen.data();
      call.tiles_b = b, call.tiles_n = n, call.tile_rows = rows, call.tile_columns = columns;
    }
  };

  // Divide a call, which is `fixed`, into other tiles.
  Tiles use_other_tiles(Call& call, bool turned) {
    call.block_q = one_of({12, 36, 48}), call.block_k = one_of({32, 96, 160});
    Tiles found = tiled(call.block_q, call.block_k, turned);
    found.give(call);
    return found;
  }

  static bool same(const std::vector<float>& x, const std::vector<float>& y) {
    return !x.size() || !std::memcmp(x.data(), y.data(), 4 * x.size());
  }
  static bool same(const Numbers& x, const Numbers& y) {
    return same(x.wide, y.wide) &&
           (!x.narrow.size() || !std::memcmp(x.narrow.data(), y.narrow.data(), 2 * x.narrow.size()));
  }

  double uniform() { return std::uniform_real_distribution<double>()(random_); }
  bool chance(double of) { return uniform() < of; }
  int64_t between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  int64_t one_of(std::initializer_list<int64_t> from) {
    return from.begin()[between(0, from.size() - 1)];
  }
  float normal() { return std::normal_distribution<float>()(random_); }

  void sizes(int64_t threads) {
    c = Call{};
    do {
      c.B = between(1, 3), c.K = between(1, 3), c.N = c.K * between(1, 3);
      c.T = chance(0.3) ? 1 : chance(0.5) ? between(1, 20) : one_of({31, 47, 48, 95, 96, 97, 150});
      c.S = chance(0.5) ? between(1, 40) : one_of({31, 32, 33, 64, 127, 128, 130, 257, 300});
      c.H = chance(0.7) ? between(1, 40) : one_of({32, 48, 64, 65, 96});
      c.Hv = chance(0.7) ? between(1, 40) : one_of({32, 48, 64, 65, 96});
    } while (c.B * c.N * c.T * c.S * (c.H + c.Hv) > 3000000);
    c.block_q = one_of({12, 24, 96}), c.block_k = one_of({32, 64, 128, 256});
    c.threads = threads;
    c.dtype = chance(0.5) ? Dtype::float32 : chance(0.5) ? Dtype::bfloat16 : Dtype::float16;
    c.scale = 1 / std::sqrt((float)c.H);
    c.softcap = chance(0.25) ? 1.5f : 0.0f;
    c.fixed = chance(0.4);
  }

  Numbers drawn(size_t count, int64_t width) {
    Numbers found(c.dtype, count);
    for (size_t i = 0; i < count; i++) found.put(i, normal());
    if (broken_)
      for (size_t row = 0; row < count / width; row++)
        if (chance(0.02)) found.put(row * width + between(0, width - 1), chance(0.5) ? NAN : INFINITY);
    return found;
  }

  void arrays() {
    broken_ = chance(0.15);
    query = drawn(c.B * c.T * c.N * c.H, c.H);
    key = drawn(c.B * c.S * c.K * c.H, c.H);
    value = drawn(c.B * c.S * c.K * c.Hv, c.Hv);
    const bool keep = broken_;
    broken_ = false;
    cotangent = drawn(c.B * c.T * c.N * c.Hv, c.Hv);
    broken_ = keep;
    c.query = query.data(), c.key = key.data(), c.value = value.data();
  }

  // A mask: positions and two more vectors on each side, and a program that reads them.
  void mask() {
    c.lead_q = chance(0.5) ? 1 : c.B, c.lead_k = chance(0.5) ? 1 : c.B;
    c.num_q = between(1, 3), c.num_k = between(1, 3);
    q_vectors.resize(c.num_q * c.lead_q * c.T), k_vectors.resize(c.num_k * c.lead_k * c.S);
    const int64_t offset = chance(0.5) ? 0 : between(0, c.S);
    for (int64_t i = 0; i < (int64_t)q_vectors.size(); i++)
      q_vectors[i] = i < c.lead_q * c.T ? i % c.T + offset : between(0, 3);
    for (int64_t i = 0; i < (int64_t)k_vectors.size(); i++)
      k_vectors[i] = i < c.lead_k * c.S ? i % c.S : between(0, 3);
    c.q_vectors = q_vectors.data(), c.k_vectors = k_vectors.data();
    const bool program = chance(0.8);
    if (program && chance(0.25)) {
      c.pairs_b = chance(0.5) ? 1 : c.B, c.pairs_n = chance(0.5) ? 1 : c.N;
      pairs.resize(c.pairs_b * c.pairs_n * c.T * c.S);
      for (auto& pair : pairs) pair = chance(0.3);
      c.pairs = pairs.data();
    } else {
      c.pairs_b = c.pairs_n = 0;
    }
    if (program) write_program();
    c.program = code.data(), c.num_operations = code.size() / 4;
    c.constants = constants.data(), c.num_constants = constants.size();
    visible_.assign(c.B * c.N * c.T * c.S, 1);
    for (int64_t at = 0; program && at < (int64_t)visible_.size(); at++) visible_[at] = sees(at);
  }

  void write_program() {
    const int32_t q = 0, k = c.num_q, pair = c.num_q + c.num_k, first = pair + (c.pairs != nullptr);
    constants = {0, (int32_t)between(-40, 40), (int32_t)between(-3, 40), INT32_MIN};
    const int32_t start = first + 4;
    const auto emit = [&](int32_t operation, int32_t x, int32_t y, int32_t z = 0) {
      code.insert(code.end(), {operation, x, y, z});
      return start + (int32_t)code.size() / 4 - 1;
    };
    const int64_t kind = between(0, 3);
    int32_t found = emit(11, k, q);  // causal
    if (kind == 1) {                 // a window, or the first keys
      const int32_t near = emit(10, emit(1, q, k), first + 1);
      found = emit(4, emit(3, found, near), emit(10, k, first + 2));
    } else if (kind == 2) {  // the same document
      found = emit(chance(0.5) ? 3 : 4, found, emit(8, c.num_q - 1, c.num_q + c.num_k - 1));
    } else if (kind == 3) {  // anything
      const int64_t operations = between(1, 8);
      for (int64_t o = 0; o < operations; o++) {
        const int32_t most = start + (int32_t)code.size() / 4 - 1;
        found = emit(between(0, 18), between(0, most), between(0, most), between(0, most));
      }
      found = emit(3, found, first + 2);
    }
    if (c.pairs) found = emit(chance(0.7) ? 3 : 4, found, pair);
    emit(9, found, first);
  }

  bool sees(int64_t at) const {
    const int64_t j = at % c.S, i = at / c.S % c.T, n = at / c.S / c.T % c.N, b = at / c.S / c.T / c.N;
    std::vector<int32_t> registers;
    for (int64_t v = 0; v < c.num_q; v++)
      registers.push_back(q_vectors[(v * c.lead_q + (c.lead_q == 1 ? 0 : b)) * c.T + i]);
    for (int64_t v = 0; v < c.num_k; v++)
      registers.push_back(k_vectors[(v * c.lead_k + (c.lead_k == 1 ? 0 : b)) * c.S + j]);
    if (c.pairs) {
      const int64_t lead = (c.pairs_b == 1 ? 0 : b) * c.pairs_n + (c.pairs_n == 1 ? 0 : n);
      registers.push_back(pairs[(lead * c.T + i) * c.S + j]);
    }
    registers.insert(registers.end(), constants.begin(), constants.end());
    for (size_t o = 0; o < code.size(); o += 4)
      registers.push_back(evaluated(code[o], registers[code[o + 1]], registers[code[o + 2]],
                                    registers[code[o + 3]]));
    return registers.back() != 0;
  }

  void extras() {
    if (chance(0.3)) {
      const int64_t full[] = {c.B, c.N, c.T, c.S};
      for (int axis = 0; axis < 4; axis++) c.bias_shape[axis] = chance(0.5) ? 1 : full[axis];
      c.bias_is_wide = chance(0.5);
      const int64_t* s = c.bias_shape;
      bias = Numbers(c.bias_is_wide ? Dtype::float32 : c.dtype, s[0] * s[1] * s[2] * s[3]);
      c.bias_is_wide |= c.dtype == Dtype::float32;
      for (size_t i = 0; i < bias.size(); i++) bias.put(i, normal());
      c.bias = bias.data();
    } else if (chance(0.3)) {
      c.slopes_b = chance(0.5) ? 1 : c.B;
      for (int64_t i = 0; i < c.slopes_b * c.N; i++) slopes.push_back(std::abs(normal()) / 8);
      c.slopes = slopes.data();
    }
    if (chance(0.3)) {
      c.sinks_b = chance(0.5) ? 1 : c.B;
      for (int64_t i = 0; i < c.sinks_b * c.N; i++) sinks.push_back(normal());
      c.sinks = sinks.data();
    }
    if (chance(0.3)) {
      words.resize(2 * c.B * c.N);
      for (auto& word : words) word = random_();
      c.dropout = words.data(), c.threshold = 0x40000000, c.kept = 1 / 0.75f;
    }
  }

  // Tile lists: most tiles that may be skipped are skipped, and most full tiles are listed as full.
  Tiles tiled(int64_t block_q, int64_t block_k, bool by_keys) {
    const int64_t rows = (c.T + block_q - 1) / block_q, columns = (c.S + block_k - 1) / block_k;
    Tiles found;
    found.b = chance(0.5) ? 1 : c.B, found.n = chance(0.5) ? 1 : c.N;
    found.rows = by_keys ? columns : rows, found.columns = by_keys ? rows : columns;
    const double lazy = chance(0.5) ? 0 : 0.3;
    for (int64_t lead = 0; lead < found.b * found.n; lead++)
      for (int64_t row = 0; row < found.rows; row++) {
        std::vector<int32_t> full, partial;
        for (int64_t column = 0; column < found.columns; column++) {
          const int64_t q = by_keys ? column : row, k = by_keys ? row : column;
          bool any = false, all = true;
          for (int64_t b = 0; b < c.B; b++)
            for (int64_t n = 0; n < c.N; n++) {
              if ((found.b > 1 && b != lead / found.n) || (found.n > 1 && n != lead % found.n)) continue;
              for (int64_t i = q * block_q; i < std::min(c.T, (q + 1) * block_q); i++)
                for (int64_t j = k * block_k; j < std::min(c.S, (k + 1) * block_k); j++) {
                  const bool here = visible_[((b * c.N + n) * c.T + i) * c.S + j];
                  any |= here, all &= here;
                }
            }
          if (c.num_operations == 0 || (all && !chance(lazy))) full.push_back(column);
          else if (any || chance(lazy)) partial.push_back(column);
        }
        found.full.push_back(full.size()), found.seen.push_back(full.size() + partial.size());
        full.insert(full.end(), partial.begin(), partial.end());
        full.resize(found.columns, full.empty() ? 0 : full.back());
        found.order.insert(found.order.end(), full.begin(), full.end());
      }
    return found;
  }

  bool finite(const Numbers& numbers, int64_t start, int64_t width) const {
    for (int64_t h = 0; h < width; h++)
      if (!std::isfinite(numbers.at(start + h))) return false;
    return true;
  }

  struct Expected {  // and the sum of the absolute values of the terms
    std::vector<double> is, size;
    explicit Expected(size_t count = 0) : is(count), size(count) {}
    void add(size_t i, double x, double most) { is[i] += x, size[i] += std::fabs(most); }
  };

  void reference() {
    out_ = Expected(c.B * c.T * c.N * c.Hv), lse_ = Expected(c.B * c.N * c.T);
    D_.assign(c.B * c.N * c.T, 0);
    dq_ = Expected(query.size()), dk_ = Expected(key.size()), dv_ = Expected(value.size());
    dbias_ = Expected(bias.size()), slopes_ = Expected(c.B * c.N * c.S);
    std::vector<double> s(c.S), cap(c.S), keep(c.S), away(c.S);
    for (int64_t b = 0; b < c.B; b++)
      for (int64_t n = 0; n < c.N; n++)
        for (int64_t i = 0; i < c.T; i++) {
          const int64_t row = (b * c.N + n) * c.T + i, g = n / (c.N / c.K);
          const int64_t q = ((b * c.T + i) * c.N + n) * c.H, o = ((b * c.T + i) * c.N + n) * c.Hv;
          const auto k = [&](int64_t j) { return ((b * c.S + j) * c.K + g) * c.H; };
          const auto v = [&](int64_t j) { return ((b * c.S + j) * c.K + g) * c.Hv; };
          const auto bias_at = [&](int64_t j) {
            const int64_t at[] = {b, n, i, j};
            int64_t found = 0;
            for (int axis = 0; axis < 4; axis++)
              found = found * c.bias_shape[axis] + (c.bias_shape[axis] == 1 ? 0 : at[axis]);
            return found;
          };
          const uint8_t* seen = visible_.data() + row * c.S;
          double top = -INFINITY;
          bool lost = !finite(query, q, c.H);
          for (int64_t j = 0; j < c.S; j++) {
            if (!seen[j]) continue;
            lost |= !finite(key, k(j), c.H) || !finite(value, v(j), c.Hv);
            s[j] = 0, cap[j] = 1, keep[j] = 1;
            for (int64_t h = 0; h < c.H; h++) s[j] += query.at(q + h) * key.at(k(j) + h) * c.scale;
            if (c.softcap > 0) {
              const double t = std::tanh(s[j] / c.softcap);
              s[j] = c.softcap * t, cap[j] = 1 - t * t;
            }
            away[j] = -std::fabs((double)q_vectors[(c.lead_q == 1 ? 0 : b) * c.T + i] -
                                 k_vectors[(c.lead_k == 1 ? 0 : b) * c.S + j]);
            if (c.bias) s[j] += bias.at(bias_at(j));
            if (c.slopes) s[j] += slopes[(c.slopes_b == 1 ? 0 : b) * c.N + n] * away[j];
            if (c.dropout) {
              const uint32_t word = mixed(words[b * c.N + n] ^ (uint32_t)i);
              const uint32_t bits = mixed((mixed((uint32_t)j) ^ word) +
                                          mixed(words[c.B * c.N + b * c.N + n] + word));
              keep[j] = bits >= c.threshold ? c.kept : 0;
            }
            top = std::max(top, s[j]);
          }
          lse_.is[row] = -INFINITY;
          bool any = false;
          for (int64_t j = 0; j < c.S; j++) any |= seen[j];
          if (!any) continue;
          if (lost) {
            lse_.is[row] = NAN;
            for (int64_t h = 0; h < c.Hv; h++) out_.is[o + h] = NAN;
            continue;
          }
          if (c.sinks) top = std::max(top, (double)sinks[(c.sinks_b == 1 ? 0 : b) * c.N + n]);
          double total = c.sinks ? std::exp(sinks[(c.sinks_b == 1 ? 0 : b) * c.N + n] - top) : 0;
          for (int64_t j = 0; j < c.S; j++)
            if (seen[j]) total += std::exp(s[j] - top);
          lse_.is[row] = top + std::log(total), lse_.size[row] = std::fabs(top) + 1;
          double D = normal(), largest_D = std::fabs(D);  // the cotangent of lse
          for (int64_t j = 0; j < c.S; j++) {
            if (!seen[j]) continue;
            s[j] = std::exp(s[j] - top) / total;
            for (int64_t h = 0; h < c.Hv; h++) {
              const double x = s[j] * keep[j] * value.at(v(j) + h);
              out_.add(o + h, x, x);
              D += x * cotangent.at(o + h), largest_D += std::fabs(x * cotangent.at(o + h));
            }
          }
          D_[row] = D;
          for (int64_t j = 0; j < c.S; j++) {
            if (!seen[j]) continue;
            double dp = 0, most = 0;
            for (int64_t h = 0; h < c.Hv; h++) {
              const double x = cotangent.at(o + h) * value.at(v(j) + h);
              dp += x, most += std::fabs(x);
              const double p = s[j] * keep[j] * cotangent.at(o + h);
              dv_.add(v(j) + h, p, p);
            }
            const double ds = s[j] * (dp * keep[j] - D), size = s[j] * (most * keep[j] + largest_D);
            if (c.bias) dbias_.add(bias_at(j), ds, size);
            slopes_.add((b * c.N + n) * c.S + j, ds * away[j], size * away[j]);
            for (int64_t h = 0; h < c.H; h++) {
              const double kx = key.at(k(j) + h) * c.scale, qx = query.at(q + h) * c.scale;
              dq_.add(q + h, ds * cap[j] * kx, size * kx), dk_.add(k(j) + h, ds * cap[j] * qx, size * qx);
            }
          }
        }
  }

  void note(const char* name, double error) {
    if (!(error <= worst_)) worst_ = error, worst_name_ = name;
  }

  // The largest difference relative to the rounding errors of the largest sum.
  void compare(const char* name, const Numbers& found, const Expected& wanted, Dtype dtype,
               double factor) {
    const double unit = dtype == Dtype::float32 ? 0 : dtype == Dtype::float16 ? 0x1p-11 : 0x1p-8;
    double largest = 1e-6, wrong = 0;
    for (size_t i = 0; i < wanted.is.size(); i++) largest = std::max(largest, wanted.size[i]);
    for (size_t i = 0; i < wanted.is.size(); i++) {
      const double x = found.at(i), y = wanted.is[i];
      if (std::isnan(y) || std::isinf(y)) {
        if (!(x == y || (std::isnan(x) && std::isnan(y)))) wrong = INFINITY;
      } else {
        const double error = std::fabs(x - y) / (unit * std::fabs(y) + factor * 1e-6 * largest +
                                                 (dtype == Dtype::float16 ? 0x1p-25 : 0));
        if (!(error <= wrong)) wrong = std::isnan(error) ? INFINITY : error;
      }
    }
    note(name, wrong);
  }

  std::mt19937_64 random_;
  Call c;
  Numbers query, key, value, cotangent, bias;
  std::vector<int32_t> q_vectors, k_vectors, code, constants;
  std::vector<int8_t> pairs;
  std::vector<float> slopes, sinks;
  std::vector<uint32_t> words;
  std::vector<uint8_t> visible_;
  bool broken_ = false;
  Expected out_, lse_, dq_, dk_, dv_, dbias_, slopes_;
  std::vector<double> D_;
  double worst_ = 0;
  const char* worst_name_ = "";
};

// Random products with weights; return the largest error relative to the rounding of the largest sum.
double run_product(const Kernels& kernels, const Parallel& parallel, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto between = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  std::normal_distribution<float> normal;
  Product p{};
  p.fixed = between(0, 1), p.x_turned = p.fixed && between(0, 1), p.threads = 2;
  p.rows = between(1, p.fixed ? 40 : 16), p.outputs = between(1, 700);
  p.inputs = between(0, 15) ? between(1, 400) : 0;
  const auto at_x = [&](int64_t row, int64_t input) {
    return p.x_turned ? input * p.rows + row : row * p.inputs + input;
  };
  p.dtype = (Weights)between(0, p.fixed ? 2 : 3);
  const bool packed = p.dtype == Weights::int4, integers = packed || p.dtype == Weights::int8;
  p.turned = !packed && between(0, 1);
  p.groups = packed && between(0, 1) ? between(1, 12) : 1;
  if (p.groups > 1) p.inputs = 32 * p.groups;
  const int64_t count = p.inputs * p.outputs;
  Numbers weights(p.dtype == Weights::bfloat16 ? Dtype::bfloat16 : Dtype::float32,
                  integers ? 0 : count);
  std::vector<int8_t> bytes(integers ? count : 0);
  for (size_t i = 0; i < weights.size(); i++) weights.put(i, normal(random));
  for (auto& byte : bytes) byte = packed ? between(-8, 7) : between(-127, 127);
  p.weights = bytes.size() ? (void*)bytes.data() : weights.data();
  std::vector<uint32_t> words(packed ? (p.inputs + 7) / 8 * p.outputs : 0);
  for (int64_t i = 0; packed && i < count; i++) {
    const int64_t input = i / p.outputs, place = input % 8;
    words[input / 8 * p.outputs + i % p.outputs] |= (uint32_t)(bytes[i] + 8)
                                                    << (8 * (place % 4) + place / 4 * 4);
  }
  if (packed) p.weights = words.data();
  p.half = packed && between(0, 1);
  Numbers group_scale(p.half ? Dtype::float16 : Dtype::float32, packed ? p.groups * p.outputs : 0);
  for (size_t i = 0; i < group_scale.size(); i++) group_scale.put(i, normal(random));
  p.group_scale = group_scale.data();
  const auto weight = [&](int64_t at) -> double {
    if (!packed) return bytes.size() ? bytes[at] : weights.at(at);
    const int64_t group = at / p.outputs / (p.inputs / p.groups);
    return bytes[at] * (double)group_scale.at(group * p.outputs + at % p.outputs);
  };
  std::vector<float> x(p.rows * p.inputs), scale(p.outputs), bias(p.outputs), y(p.rows * p.outputs);
  for (auto* each : {&x, &scale, &bias})
    for (auto& number : *each) number = normal(random);
  if (bytes.size() && !between(0, 3)) x[between(0, x.size() - 1)] *= 1e4f;
  if (packed && !between(0, 3))
    for (auto& number : x) number *= 1e33f;  // too large to be split into integers
  if (!between(0, 7))
    for (int64_t i = 0; i < p.inputs; i++) x[at_x(0, i)] = 0;
  const bool broken = p.inputs && !between(0, 7);  // a single row is NaN
  if (broken) x[at_x(0, between(0, p.inputs - 1))] = NAN;
  p.x = x.data(), p.y = y.data();
  p.scale = !packed && between(0, 1) ? scale.data() : nullptr;
  p.bias = between(0, 1) ? bias.data() : nullptr;
  kernels.product(p, parallel);
  std::vector<double> most(p.rows);  // per row: with weights in integers, x is rounded to 2^-24 of it
  for (int64_t r = 0; r < p.rows; r++)
    for (int64_t i = 0; i < p.inputs; i++)
      most[r] = std::max<double>(most[r], std::fabs(x[at_x(r, i)]));
  double wrong = 0, largest = 1e-6;
  for (int64_t r = 0; r < p.rows; r++)
    for (int64_t o = 0; o < p.outputs; o++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < p.inputs; i++) {
        const int64_t at = p.turned ? o * p.inputs + i : i * p.outputs + o;
        const double one = weight(at) * x[at_x(r, i)];
        sum += one, size += std::fabs(one);
        if (bytes.size()) size += std::ldexp(1e6, -24) * most[r] * std::fabs(weight(at));
      }
      if (broken && !r) {
        if (y[o] == y[o]) return INFINITY;
        continue;
      }
      const double factor = p.scale ? scale[o] : 1, more = p.bias ? bias[o] : 0;
      const double error = std::fabs(sum * factor + more - y[r * p.outputs + o]);
      wrong = error <= wrong ? wrong : std::isnan(error) ? INFINITY : error;
      largest = std::max(largest, size * std::fabs(factor) + std::fabs(more));
    }
  return wrong / (1e-6 * largest);
}

// Random norms; return the largest error relative to the rounding error.
double run_norm(const Kernels& kernels, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto between = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  std::normal_distribution<float> normal;
  Norm n{};
  n.rows = between(1, 4), n.width = between(1, 900), n.centred = between(0, 1), n.eps = 1e-5f;
  std::vector<float> x(n.rows * n.width), y(x.size()), scale(n.width), bias(n.width);
  for (auto* each : {&x, &scale, &bias})
    for (auto& number : *each) number = normal(random);
  for (auto& number : x) number += 2;
  n.x = x.data(), n.y = y.data();
  n.scale = between(0, 1) ? scale.data() : nullptr, n.bias = between(0, 1) ? bias.data() : nullptr;
  kernels.norm(n);
  double wrong = 0;
  for (int64_t r = 0; r < n.rows; r++) {
    const float* row = x.data() + r * n.width;
    double mean = 0, squares = 0;
    for (int64_t k = 0; k < n.width; k++) mean += n.centred ? row[k] / (double)n.width : 0;
    for (int64_t k = 0; k < n.width; k++) squares += (row[k] - mean) * (row[k] - mean) / n.width;
    const double factor = 1 / std::sqrt(squares + n.eps);
    for (int64_t k = 0; k < n.width; k++) {
      const double by = n.scale ? scale[k] : 1, more = n.bias ? bias[k] : 0;
      const double size = (std::fabs(row[k]) + std::fabs(mean)) * factor * std::fabs(by);
      const double error = std::fabs((row[k] - mean) * factor * by + more - y[r * n.width + k]);
      const double share = error / (1e-6 * (size + std::fabs(more)) + 1e-30);
      wrong = share <= wrong ? wrong : std::isnan(share) ? INFINITY : share;
    }
  }
  return wrong;
}

// Every float16 is read exactly, and numbers between two of them are rounded to the nearer one.
int wrong_conversions() {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    float16 x, back;
    std::memcpy(&x, &bits, 2);
    const float found = conversions::widened(x);
    const double wanted = Numbers::half(bits);
    wrong += !(found == wanted || (found != found && wanted != wanted));
    uint16_t again;
    conversions::narrowed(found, &back);
    std::memcpy(&again, &back, 2);
    wrong += found == found && again != bits;
    if ((bits & 0x7fff) >= 0x7bff) continue;
    const double next = Numbers::half(bits + 1);
    for (int eighth = 1; eighth < 8; eighth++) {
      const bool up = eighth > 4 || (eighth == 4 && bits & 1);
      conversions::narrowed((float)(wanted + (next - wanted) * eighth / 8), &back);
      std::memcpy(&again, &back, 2);
      wrong += again != bits + up;
    }
  }
  return wrong;
}

}  // namespace

int main(int count, char** given) {
  if (count != 6) return std::fprintf(stderr, "KERNELS CASES SEED THREADS CALLERS\n"), 2;
  const std::string name = given[1];
  const Kernels* kernels = name == "plain" ? &KERNELS_PLAIN : nullptr;
#if defined(__x86_64__)
  if (name == "wide") kernels = &KERNELS_WIDE;
  if (name == "avx2") kernels = &KERNELS_AVX2;
#endif
  if (!kernels) return std::fprintf(stderr, "no kernels %s here\n", given[1]), 2;
  const int64_t cases = std::atoll(given[2]), seed = std::atoll(given[3]);
  const int threads = std::atoi(given[4]), callers = std::atoi(given[5]);
  if (const int wrong = wrong_conversions())
    return std::printf("%d conversions of float16 are wrong\n", wrong), 1;

  Pool pool(threads);
  const Parallel parallel = [&](int64_t items, const std::function<void(int64_t)>& work) {
    run(pool, items, work, items % 2);
  };
  std::atomic<int64_t> next{0}, failed{0};
  std::mutex lock;
  double worst = 0;
  std::vector<std::thread> running;
  for (int caller = 0; caller < callers; caller++)
    running.emplace_back([&] {
      for (int64_t at; (at = next++) < cases;) {
        Case one(seed * 1000003 + at, threads);
        const double error = one.run(*kernels, parallel);
        const double of_product = run_product(*kernels, parallel, seed * 1000003 + at);
        const double of_norm = run_norm(*kernels, seed * 1000003 + at);
        std::lock_guard<std::mutex> hold(lock);
        worst = std::max({worst, error, of_product, of_norm});
        if (!(of_norm <= 1)) failed++, std::printf("norm %d: error %g\n", (int)at, of_norm);
        if (!(of_product <= 1)) failed++, std::printf("product %d: error %g\n", (int)at, of_product);
        if (!(error <= 1)) failed++, std::printf("case %d: %s\n", (int)at, one.say().c_str());
      }
    });
  for (auto& each : running) each.join();
  std::printf("%s: %d cases, products and norms, %d failed, largest error %.2f of what is allowed\n", given[1], (int)cases,
              (int)failed, worst);
  return failed != 0;
}
