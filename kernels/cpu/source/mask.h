// Interpreter of a mask's program: integers per query and per key, and operations on them.
//
// Registers are numbered: the query vectors, the key vectors, the integer of the pair if there is one,
// constants, then the result of each operation. The last register is the mask, 0 or 1. A register has
// one integer for a row of a tile, or one for each of its keys.
#pragma once

namespace NAMESPACE {

enum Operation : int32_t {
  ADD, SUB, MUL, AND, OR, XOR, MIN, MAX, EQ, NE, LT, LE, GT, GE, SHIFT_LEFT, SHIFT_RIGHT,
  SELECT,  // x ? z : y, as lax.select_n
  DIVIDE, REMAINDER,
};

template <class X, class Y>
static inline auto applied(int32_t operation, X x, Y y) -> decltype(x + y) {
  switch (operation) {
    case ADD: return x + y;
    case SUB: return x - y;
    case MUL: return x * y;
    case AND: return x & y;
    case OR: return x | y;
    case XOR: return x ^ y;
    case MIN: return x < y ? x : y;
    case MAX: return x > y ? x : y;
    case EQ: return (x == y) & 1;
    case NE: return (x != y) & 1;
    case LT: return (x < y) & 1;
    case LE: return (x <= y) & 1;
    case GT: return (x > y) & 1;
    case GE: return (x >= y) & 1;
    case SHIFT_LEFT: return x << y;
    default: return x >> y;
  }
}

// 32-bit integers wrap around, as in XLA.
static inline int32_t applied_once(int32_t operation, int32_t x, int32_t y) {
  switch (operation) {
    case ADD: return (int32_t)((uint32_t)x + (uint32_t)y);
    case SUB: return (int32_t)((uint32_t)x - (uint32_t)y);
    case MUL: return (int32_t)((uint32_t)x * (uint32_t)y);
    case SHIFT_LEFT: return (uint32_t)y > 31 ? 0 : (int32_t)((uint32_t)x << y);
    case SHIFT_RIGHT: return x >> ((uint32_t)y > 31 ? 31 : y);
    case DIVIDE: return y == 0 ? -1 : y == -1 ? (int32_t)(0u - (uint32_t)x) : x / y;
    case REMAINDER: return y == 0 ? x : y == -1 ? 0 : x % y;
    default: return applied(operation, x, y);
  }
}

class Mask {
 public:
  Mask(const Call& call, int64_t width)
      : call_(call), width_((width + PANEL - 1) / PANEL * PANEL) {
    const int64_t inputs = call.num_q + call.num_k + (call.pairs != nullptr) + call.num_constants;
    registers_.resize(inputs + call.num_operations);
    numbers_.resize(registers_.size() * width_);
    for (size_t r = 0; r < registers_.size(); r++) registers_[r].keys = nullptr;
    const int64_t first = inputs - call.num_constants;
    for (int64_t c = 0; c < call.num_constants; c++) registers_[first + c].row = call.constants[c];
  }

  // Select the keys j0 .. j0 + count of a batch row; evaluate operations that depend only on keys.
  void take_keys(int64_t b, int64_t n, int64_t j0, int64_t count) {
    b_ = b, n_ = n, j0_ = j0, count_ = count;
    active_ = (count + PANEL - 1) / PANEL * PANEL;
    for (int64_t v = 0; v < call_.num_k; v++) {
      int32_t* to = own(call_.num_q + v);
      const int64_t lead = call_.lead_k == 1 ? 0 : b;
      const int32_t* from = call_.k_vectors + (v * call_.lead_k + lead) * call_.S + j0;
      for (int64_t j = 0; j < count; j++) to[j] = from[j];
      for (int64_t j = count; j < active_; j++) to[j] = v == 0 ? -1 : 0;
      registers_[call_.num_q + v].keys = to;
    }
    if (call_.pairs) {
      Register& pairs = registers_[call_.num_q + call_.num_k];
      pairs.keys = own(call_.num_q + call_.num_k), pairs.of_row = true;
    }
    evaluate(false);
  }

  // Evaluate a query's row: 0 or 1 for each key, and the range of visible keys.
  const int32_t* row(int64_t i, int64_t* begin, int64_t* end) {
    for (int64_t v = 0; v < call_.num_q; v++) {
      const int64_t lead = call_.lead_q == 1 ? 0 : b_;
      registers_[v].row = call_.q_vectors[(v * call_.lead_q + lead) * call_.T + i];
      registers_[v].of_row = true;
    }
    if (call_.pairs) {
      const int64_t b = call_.pairs_b == 1 ? 0 : b_, n = call_.pairs_n == 1 ? 0 : n_;
      const int8_t* from = call_.pairs + ((b * call_.pairs_n + n) * call_.T + i) * call_.S + j0_;
      int32_t* to = own(call_.num_q + call_.num_k);
      for (int64_t j = 0; j < count_; j++) to[j] = from[j];
      for (int64_t j = count_; j < active_; j++) to[j] = 0;
    }
    evaluate(true);
    const Register& result = registers_.back();
    int32_t* to = own(registers_.size() - 1);
    if (!result.keys)
      for (int64_t j = 0; j < active_; j++) to[j] = j < count_ ? result.row : 0;
    else
      for (int64_t j = count_; j < active_; j++) to[j] = 0;
    int64_t first = 0, last = active_;
    while (first < last && !any(load(to + first))) first += W;
    while (last > first && !any(load(to + last - W))) last -= W;
    while (first < last && !to[first]) ++first;
    while (last > first && !to[last - 1]) --last;
    *begin = first, *end = last;
    return to;
  }

 private:
  struct Register {
    int32_t row = 0;
    int32_t* keys = nullptr;
    bool of_row = false;  // whether it depends on the query
  };

  int32_t* own(int64_t r) { return numbers_.data() + r * width_; }

  // Run the operations that depend on the query, or the others.
  void evaluate(bool of_row) {
    const int64_t first = registers_.size() - call_.num_operations;
    for (int64_t o = 0; o < call_.num_operations; o++) {
      const int32_t* code = call_.program + 4 * o;
      Register &x = registers_[code[1]], &y = registers_[code[2]], &z = registers_[code[3]];
      Register& to = registers_[first + o];
      const bool select = code[0] == SELECT;
      const bool depends = x.of_row || y.of_row || (select && z.of_row) || code[1] < call_.num_q ||
                           code[2] < call_.num_q || (select && code[3] < call_.num_q);
      to.of_row = depends;
      if (depends != of_row) continue;
      if (!x.keys && !y.keys && !(select && z.keys)) {
        to.keys = nullptr;
        to.row = select ? (x.row ? z.row : y.row) : applied_once(code[0], x.row, y.row);
        continue;
      }
      to.keys = own(first + o);
      if (select) {
        for (int64_t j = 0; j < active_; j++)
          to.keys[j] = at(x, j) ? at(z, j) : at(y, j);
      } else if (code[0] >= SHIFT_LEFT) {
        for (int64_t j = 0; j < active_; j++)
          to.keys[j] = applied_once(code[0], at(x, j), at(y, j));
      } else if (x.keys && y.keys) {
        run(code[0], [&](int64_t j) { return load(x.keys + j); },
            [&](int64_t j) { return load(y.keys + j); }, to.keys);
      } else if (x.keys) {
        const vi row = all(y.row);
        run(code[0], [&](int64_t j) { return load(x.keys + j); }, [&](int64_t) { return row; },
            to.keys);
      } else {
        const vi row = all(x.row);
        run(code[0], [&](int64_t) { return row; }, [&](int64_t j) { return load(y.keys + j); },
            to.keys);
      }
    }
  }

  static int32_t at(const Register& x, int64_t j) { return x.keys ? x.keys[j] : x.row; }

  template <class X, class Y>
  void run(int32_t operation, X x, Y y, int32_t* to) {
#define CASE(name, expression)                           \
  case name:                                             \
    for (int64_t j = 0; j < active_; j += W) {            \
      const vi a = x(j), b = y(j);                       \
      *reinterpret_cast<vi_at*>(to + j) = (expression);  \
    }                                                    \
    break
    switch (operation) {
      CASE(ADD, (vi)((vu)a + (vu)b));
      CASE(SUB, (vi)((vu)a - (vu)b));
      CASE(MUL, (vi)((vu)a * (vu)b));
      CASE(AND, a & b);
      CASE(OR, a | b);
      CASE(XOR, a ^ b);
      CASE(MIN, a < b ? a : b);
      CASE(MAX, a > b ? a : b);
      CASE(EQ, (a == b) & 1);
      CASE(NE, (a != b) & 1);
      CASE(LT, (a < b) & 1);
      CASE(LE, (a <= b) & 1);
      CASE(GT, (a > b) & 1);
      CASE(GE, (a >= b) & 1);
    }
#undef CASE
  }

  const Call& call_;
  int64_t width_, active_ = 0, b_ = 0, n_ = 0, j0_ = 0, count_ = 0;
  std::vector<Register> registers_;
  std::vector<int32_t> numbers_;
};

}  // namespace NAMESPACE
