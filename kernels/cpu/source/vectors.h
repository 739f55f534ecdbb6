// The vector type, as wide as the registers of the instruction set that a file is compiled for.
//
// LANES and NAMESPACE must be defined before this file is included, after all headers of the standard
// library: code for one instruction set must not be merged with code for another.
#pragma once

namespace NAMESPACE {

constexpr int W = LANES;  // numbers per register

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vf_at*>(p); }
static inline vi load(const int32_t* p) { return *reinterpret_cast<const vi_at*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_at*>(p) = x; }
static inline vf all(float x) { return x - vf{}; }
static inline vi all(int32_t x) { return x - vi{}; }
static inline vf larger(vf x, vf y) { return x > y ? x : y; }

static inline vi lane() {
  vi x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

// x rotated by D lanes.
template <int D>
static inline vf turned_by(vf x) {
  vi from;
  for (int i = 0; i < W; i++) from[i] = (i + D) % W;
  return __builtin_shuffle(x, from);
}

template <int D = W / 2>
static inline float sum(vf x) {
  x += turned_by<D>(x);
  if constexpr (D > 1) return sum<D / 2>(x);
  return x[0];
}

static inline float largest(vf x) {
  float found[W];
  store(found, x);
  for (int d = W / 2; d > 0; d /= 2)
    for (int i = 0; i < d; i++) found[i] = found[i] > found[i + d] ? found[i] : found[i + d];
  return found[0];
}

static inline bool any(vi x) {
  typedef int64_t halves __attribute__((vector_size(4 * LANES)));
  const halves wide = (halves)x;
  int64_t found = 0;
  for (int i = 0; i < W / 2; i++) found |= wide[i];
  return found != 0;
}

// 2^y for -127 <= y < 128; `less_one` omits the constant 1 of the polynomial.
// 2^y = 2^n 2^f with n the nearest integer: n + 1.5 * 2^23 has n in its low bits, which are shifted
// into the exponent of a polynomial in f, minimax in relative error: 1.1e-7.
static inline vf exp2(vf y) {
  const vf shifted = y + 12582912.0f;
  const vf f = y - (shifted - 12582912.0f);
  vf power = all(0.0013264727f);
  power = power * f + 0.009671513f;
  power = power * f + 0.055507336f;
  power = power * f + 0.24022242f;
  power = power * f + 0.693147f;
  power = power * f + 1.0f;
  return (vf)((vi)power + ((vi)shifted << 23));
}

constexpr float LOG2E = 1.4426950408889634f;

// e^x for x < 88, and 0 at -inf.
static inline vf exp(vf x) { return exp2(larger(x * LOG2E, all(-127.0f))); }

// tanh x = e / (e + 2) with e = e^2x - 1, for |x|; near 0 an odd polynomial.
static inline vf tanh(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff);
  const vf e = exp2((size < 15.0f ? size : all(15.0f)) * (2 * LOG2E)) - 1.0f;
  const vf wide = e / (e + 2.0f);
  const vf square = x * x;
  vf near = all(-0.0088632355f);  // 62/2835, with the sign of the series' next term, fitted
  near = near * square + 0.021869488f;
  near = near * square + -0.053968254f;
  near = near * square + 0.13333333f;
  near = near * square + -0.33333333f;
  near = x + x * square * near;
  const vf signed_wide = (vf)((vi)wide | ((vi)x & (int32_t)0x80000000));
  return size < 0.25f ? near : signed_wide;
}

// The hash of kernels/dropout.py.
static inline vu mix(vu x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
static inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Swap the blocks of D numbers between two rows that belong to the other row.
template <int D, int... J>
static inline void exchange_blocks(vf* first, vf* second, std::integer_sequence<int, J...>) {
  const vf x = *first, y = *second;
#if defined(__clang__)
  *first = __builtin_shufflevector(x, y, (J & D ? W + J - D : J)...);
  *second = __builtin_shufflevector(x, y, (J & D ? W + J : J + D)...);
#else
  *first = __builtin_shuffle(x, y, vi{(J & D ? W + J - D : J)...});
  *second = __builtin_shuffle(x, y, vi{(J & D ? W + J : J + D)...});
#endif
}

// Transpose W rows of W numbers: each step swaps blocks of D numbers.
template <int D>
static inline void exchange(vf* rows) {
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      if (!(i & D))
        exchange_blocks<D>(rows + i, rows + i + D, std::make_integer_sequence<int, W>());
    exchange<D / 2>(rows);
  }
}

}  // namespace NAMESPACE
