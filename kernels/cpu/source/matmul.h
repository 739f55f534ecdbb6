// Products of small matrices: the micro-kernel, and the layout of its right operand.
#pragma once

namespace NAMESPACE {

// A tile of the micro-kernel: ROWS x ACROSS registers of sums, out of 32 with AVX-512 and NEON, out of
// 16 otherwise. On aarch64 all of b and a column of a are loaded first: with 6 rows g++ 12 spills.
#if defined(__aarch64__)
constexpr int ROWS = 5, ACROSS = 4;
#else
constexpr int ROWS = LANES == 16 ? 12 : 6, ACROSS = 2;
#endif
constexpr int PANEL = ACROSS * W;

// C[M, PANEL] = A[M, depth] B[depth, PANEL], added to C factor if KEEPS. A(i, k) is at A[i * lda + k],
// or at A[k * lda + i] if TURNED; B is a panel: rows of PANEL numbers.
template <int M, bool TURNED, bool KEEPS>
static inline void multiply_rows(const float* A, int64_t lda, const float* B, int depth, float* C,
                                 int64_t ldc) {
  vf c[M][ACROSS], b[ACROSS];
#pragma GCC unroll 12
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < ACROSS; j++) c[i][j] = KEEPS ? load(C + i * ldc + j * W) : vf{};
  for (int k = 0; k < depth; k++) {
#pragma GCC unroll 4
    for (int j = 0; j < ACROSS; j++) b[j] = load(B + (int64_t)k * PANEL + j * W);
#pragma GCC unroll 12
    for (int i = 0; i < M; i++) {
      const vf a = all(TURNED ? A[k * lda + i] : A[i * lda + k]);
#pragma GCC unroll 4
      for (int j = 0; j < ACROSS; j++) c[i][j] += a * b[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < ACROSS; j++) store(C + i * ldc + j * W, c[i][j]);
}

// The same for `rows` <= ROWS rows.
template <bool TURNED, bool KEEPS, int M = ROWS>
static inline void multiply(int rows, const float* A, int64_t lda, const float* B, int depth,
                            float* C, int64_t ldc) {
  if (rows == M) return multiply_rows<M, TURNED, KEEPS>(A, lda, B, depth, C, ldc);
  if constexpr (M > 1) multiply<TURNED, KEEPS, M - 1>(rows, A, lda, B, depth, C, ldc);
}

// Conversions from a dtype to float32 and back, of one number and of a register.
static inline float widened(float x) { return x; }
static inline float widened(bfloat16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
static inline void narrowed(float x, float* to) { *to = x; }
#ifdef FLOAT16_IN_SOFTWARE
static inline float widened(float16 x) {
  const uint32_t size = x.bits & 0x7fff, sign = (uint32_t)(x.bits & 0x8000) << 16;
  uint32_t bits = size << 13;
  float found;
  std::memcpy(&found, &bits, 4);
  found *= 0x1p112f;  // the difference of the exponents' biases; subnormal numbers become normal
  std::memcpy(&bits, &found, 4);
  bits |= sign | (size >= 0x7c00 ? 0x7f800000 : 0);
  std::memcpy(&found, &bits, 4);
  return found;
}
static inline void narrowed(float x, float16* to) {  // to the nearest, ties to even; NaN stays
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x47800000) {  // 2^16 and more, inf and NaN
    bits = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: the addition rounds to multiples of 2^-24
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    bits -= 0x3f000000;
  } else {
    bits = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  to->bits = sign | bits;
}
#else
static inline float widened(float16 x) { return (float)x; }
static inline void narrowed(float x, float16* to) { *to = (float16)x; }
#endif
static inline void narrowed(float x, bfloat16* to) {  // to the nearest, ties to even; NaN stays
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline vf load(const bfloat16* p) {
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh*>(p), vu) << 16);
}
static inline void store(bfloat16* p, vf x) {
  const vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *reinterpret_cast<vh*>(p) = __builtin_convertvector(x != x ? all(0x7fc0) : (vi)rounded, vh);
}
#if LANES == 16  // g++ 12 converts vectors of _Float16 element by element
static inline vf load(const float16* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline void store(float16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif LANES == 8
static inline vf load(const float16* p) {
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline void store(float16* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
static inline vf load(const float16* p) {
  vf x;
  for (int i = 0; i < W; i++) x[i] = widened(p[i]);
  return x;
}
static inline void store(float16* p, vf x) {
  for (int i = 0; i < W; i++) narrowed(x[i], p + i);
}
#endif

// Copy a row of `count` numbers as float32 times a scale; return whether all are finite.
template <class T>
static inline bool copy_row(const T* from, int count, float scale, float* to) {
  vf zeros = vf{};
  int i = 0;
  for (; i + W <= count; i += W) {
    const vf x = load(from + i);
    store(to + i, x * scale);
    zeros += x * 0.0f;
  }
  float zero = sum(zeros);
  for (; i < count; i++) {
    const float x = widened(from[i]);
    to[i] = x * scale;
    zero += x * 0.0f;
  }
  return zero == 0;
}

// Copy a row of float32 times a scale, converted to a dtype.
template <class T>
static inline void write_row(const float* from, int count, float scale, T* to) {
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, load(from + i) * scale);
  for (; i < count; i++) narrowed(from[i] * scale, to + i);
}

// Convert W weights, or one, to float32. GCC 12 splits conversions of byte vectors, hence the explicit
// instructions.
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

// Pack rows [count, width] into panels [width / PANEL][count][PANEL], with zeros past the width.
template <class T>
static inline void pack_rows(const T* from, int64_t stride, int count, int width, float* to,
                             int64_t panel_stride) {
  for (int h = 0; h < width; h += PANEL) {
    float* panel = to + h / PANEL * panel_stride;
    const int there = std::min(PANEL, width - h);
    if (there == PANEL) {
      for (int i = 0; i < count; i++)
        for (int j = 0; j < PANEL; j += W)
          store(panel + i * PANEL + j, weights_at(from + i * stride + h + j));
      continue;
    }
    for (int i = 0; i < count; i++) {
      for (int j = 0; j < there; j++) panel[i * PANEL + j] = weight_at(from + i * stride + h + j);
      for (int j = there; j < PANEL; j++) panel[i * PANEL + j] = 0;
    }
  }
}

// Pack `count` <= PANEL rows [count, width] into a panel of columns [width][PANEL].
template <class T>
static inline void pack_columns(const T* from, int64_t stride, int count, int width, float* to) {
  int h = 0;
  if (count == PANEL)
    for (; h + W <= width; h += W)
      for (int part = 0; part < ACROSS; part++) {
        vf rows[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) rows[i] = weights_at(from + (part * W + i) * stride + h);
        exchange<W / 2>(rows);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + (h + i) * PANEL + part * W, rows[i]);
      }
  for (; h < width; h++)
    for (int i = 0; i < PANEL; i++)
      to[h * PANEL + i] = i < count ? weight_at(from + i * stride + h) : 0;
}

}  // namespace NAMESPACE
