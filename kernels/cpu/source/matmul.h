// Products of small matrices: one micro-kernel, and how its right operand is laid out.
#pragma once

namespace NAMESPACE {

// A tile of the micro-kernel: ROWS x PANEL numbers stay in registers.
constexpr int ROWS = LANES == 16 ? 12 : 6;
constexpr int PANEL = 2 * W;

// C[M, PANEL] = A[M, depth] B[depth, PANEL], added to C factor where KEEPS. A(i, k) lies at
// A[i * lda + k], or at A[k * lda + i] where TURNED; B is a panel: rows of PANEL numbers.
template <int M, bool TURNED, bool KEEPS>
static inline void multiply_rows(const float* A, int64_t lda, const float* B, int depth, float* C,
                                 int64_t ldc) {
  vf c[M][2];
#pragma GCC unroll 12
  for (int i = 0; i < M; i++) {
    c[i][0] = KEEPS ? load(C + i * ldc) : vf{};
    c[i][1] = KEEPS ? load(C + i * ldc + W) : vf{};
  }
  for (int k = 0; k < depth; k++) {
    const vf b0 = load(B + (int64_t)k * PANEL), b1 = load(B + (int64_t)k * PANEL + W);
#pragma GCC unroll 12
    for (int i = 0; i < M; i++) {
      const vf a = all(TURNED ? A[k * lda + i] : A[i * lda + k]);
      c[i][0] += a * b0;
      c[i][1] += a * b1;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; i++) {
    store(C + i * ldc, c[i][0]);
    store(C + i * ldc + W, c[i][1]);
  }
}

// The same of `rows` <= ROWS rows.
template <bool TURNED, bool KEEPS, int M = ROWS>
static inline void multiply(int rows, const float* A, int64_t lda, const float* B, int depth,
                            float* C, int64_t ldc) {
  if (rows == M) return multiply_rows<M, TURNED, KEEPS>(A, lda, B, depth, C, ldc);
  if constexpr (M > 1) multiply<TURNED, KEEPS, M - 1>(rows, A, lda, B, depth, C, ldc);
}

static inline float widened(float x) { return x; }
static inline float widened(bfloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
static inline float widened(float16 x) { return (float)x; }
static inline void narrowed(float x, float* to) { *to = x; }
static inline void narrowed(float x, float16* to) { *to = (float16)x; }
static inline void narrowed(float x, bfloat16* to) {  // to the nearest, ties to even; NaN stays
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Copy a row of `count` numbers as float32 times a scale; return whether all of them are finite.
template <class T>
static inline bool copy_row(const T* from, int count, float scale, float* to) {
  float zero = 0;
  for (int i = 0; i < count; i++) {
    const float x = widened(from[i]);
    to[i] = x * scale;
    zero += x * 0.0f;
  }
  return zero == 0;
}

// Lay rows [count, width] out as panels [width / PANEL][count][PANEL], zeros after the width.
static inline void pack_rows(const float* from, int64_t stride, int count, int width, float* to,
                             int64_t panel_stride) {
  for (int h = 0; h < width; h += PANEL) {
    float* panel = to + h / PANEL * panel_stride;
    const int there = std::min(PANEL, width - h);
    for (int i = 0; i < count; i++) {
      for (int j = 0; j < there; j++) panel[i * PANEL + j] = from[i * stride + h + j];
      for (int j = there; j < PANEL; j++) panel[i * PANEL + j] = 0;
    }
  }
}

// Lay `count` <= PANEL rows [count, width] out as a panel of columns [width][PANEL].
static inline void pack_columns(const float* from, int64_t stride, int count, int width,
                                float* to) {
  int h = 0;
  if (count == PANEL)
    for (; h + W <= width; h += W)
      for (int half = 0; half < 2; half++) {
        vf rows[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) rows[i] = load(from + (half * W + i) * stride + h);
        exchange<W / 2>(rows);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + (h + i) * PANEL + half * W, rows[i]);
      }
  for (; h < width; h++)
    for (int i = 0; i < PANEL; i++) to[h * PANEL + i] = i < count ? from[i * stride + h] : 0;
}

}  // namespace NAMESPACE
