// Products of few rows with 4-bit weights, which have a scale per output and group of inputs.
//
// A word contains 8 inputs of one output, and a row of words 8 inputs of all outputs: byte i has
// input i in its lower half and input i + 4 in its upper half, each plus 8. With AVX-512 VNNI and
// AVX2, products are sums of integers: a row of x is split into three digits of 8 bits, as in
// bytes.h, and the halves of a register of words are unsigned bytes, as the instructions need them.
// Sums of 32 inputs are exact; they start at minus 8 times the sum of the digits.
#pragma once

namespace NAMESPACE {

typedef uint32_t vu_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr int64_t WORD = 8;    // inputs per word
constexpr int64_t RUN = 32;    // inputs that are summed before they are scaled
constexpr int WORDS = RUN / WORD;

// Words and scales j .. j + W of a row; zeros past its end.
static inline vu words(const uint32_t* p, int64_t j, int64_t width) {
  if (j + W <= width) return *reinterpret_cast<const vu_at*>(p + j);
#if LANES == 16
  return (vu)_mm512_maskz_loadu_epi32((1u << (width - j)) - 1, p + j);
#endif
  uint32_t rest[W] = {};
  std::copy(p + j, p + width, rest);
  return *reinterpret_cast<const vu_at*>(rest);
}
static inline vf scales(const float* p, int64_t j, int64_t width) { return numbers(p, j, width); }
static inline vf scales(const float16* p, int64_t j, int64_t width) {
  if (j + W <= width) return load(p + j);
  float16 rest[W] = {};
  std::copy(p + j, p + width, rest);
  return load(rest);
}

// Add x[M][count] W[count][width], count <= RUN, to y[M][width], with weights in float32. y may be
// written up to a multiple of W.
template <class S, int M>
static void add_nibbles(const float* x, int64_t ldx, int64_t count, const uint32_t* w, int64_t ldw,
                        const S* scale, int64_t width, float* y, int64_t ldy) {
  for (int64_t j = 0; j < width; j += W) {
    const vf unit = scales(scale, j, width);
    vf sum[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sum[m] = load(y + m * ldy + j);
    for (int64_t k = 0; k < count; k += WORD) {
      vu word = words(w + k / WORD * ldw, j, width);
      for (int64_t i = 0; i < WORD && k + i < count; i++) {
        const vi value = (vi)(word >> (uint32_t)(8 * (i % 4) + i / 4 * 4) & 15) - 8;
        const vf weight = __builtin_convertvector(value, vf) * unit;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sum[m] += weight * all(x[m * ldx + k + i]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) store(y + m * ldy + j, sum[m]);
  }
}
template <class S, int M = 8>
static inline void add_nibbles_of(int64_t rows, const float* x, int64_t ldx, int64_t count,
                                  const uint32_t* w, int64_t ldw, const S* scale, int64_t width,
                                  float* y, int64_t ldy) {
  for (; rows >= M; rows -= M, x += M * ldx, y += M * ldy)
    add_nibbles<S, M>(x, ldx, count, w, ldw, scale, width, y, ldy);
  if constexpr (M > 1) {
    if (rows) add_nibbles_of<S, M / 2>(rows, x, ldx, count, w, ldw, scale, width, y, ldy);
  }
}

#if LANES >= 8 && defined(__x86_64__)

#if LANES == 16
#define INTEGERS VNNI
static bool has_integers() { return has_vnni(); }
// Add four products of bytes to each lane.
INTEGERS static inline vi dot(const vi* weights, const int32_t* digits, int32_t start) {
  __m512i total = _mm512_set1_epi32(start);
#pragma GCC unroll 8
  for (int q = 0; q < 2 * WORDS; q++)
    total = _mm512_dpbusd_epi32(total, (__m512i)weights[q], _mm512_set1_epi32(digits[4 * q]));
  return (vi)total;
}
#else
#define INTEGERS
static bool has_integers() { return true; }
INTEGERS static inline vi dot(const vi* weights, const int32_t* digits, int32_t start) {
  __m256i total = __m256i{};  // of 16 bits: at most 8 * 2 * 15 * 128 = 30720
#pragma GCC unroll 8
  for (int q = 0; q < 2 * WORDS; q++)
    total = _mm256_add_epi16(total, _mm256_maddubs_epi16((__m256i)weights[q], _mm256_set1_epi32(digits[4 * q])));
  return (vi)_mm256_madd_epi16(total, _mm256_set1_epi16(1)) + start;
}
#endif

// Rows of x as digits: x = u (65536 a + 256 b + c), see bytes.h.
struct DigitsOfWords {
  static constexpr float MOST = 8355584;
  int64_t rows, inputs;  // inputs: rounded up to a multiple of RUN
  Scratch memory;
  int32_t* digits;  // [rows][inputs / 4][4]: c, b, a of four inputs, a byte each; the 4th is unused
  int32_t* starts;  // [rows][inputs / RUN][4]: -8 times the sums of c, b, a
  float* units;     // [rows]

  DigitsOfWords(const float* x, int64_t rows, int64_t width)
      : rows(rows), inputs(round_up(width, RUN)), memory(rows * (inputs + inputs / WORD + 1)) {
    digits = (int32_t*)memory.data;
    starts = digits + rows * inputs;
    units = (float*)(starts + rows * inputs / WORD);
    for (int64_t m = 0; m < rows; m++) cut(x + m * width, width, m);
  }

  void cut(const float* x, int64_t width, int64_t m) {
    vf most{};
    for (int64_t k = 0; k < width; k += W)
      most = larger(most, (vf)((vi)numbers(x, k, width) & INT32_MAX));
    const float size = largest(most);
    units[m] = size / MOST;
    const __m256 factor = _mm256_set1_ps(size ? MOST / size : 0.0f);
    const __m256i middle = _mm256_set1_epi32(0x808080);  // makes bytes of 0..255 of the digits
    // four numbers' first bytes, then their second, and so on
    const __m256i by_digit = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t k = 0; k < inputs; k += RUN) {
      __m256i sums{};  // of 16 bits: at most 4 * 2 * 8 * 128
#pragma GCC unroll 4
      for (int64_t at = k; at < k + RUN; at += 8) {
        float rest[8] = {};
        if (at + 8 > width) std::copy(x + std::min(at, width), x + width, rest);
        const __m256 eight = _mm256_loadu_ps(at + 8 > width ? rest : x + at);
        __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(eight, factor));
        whole = _mm256_xor_si256(_mm256_add_epi32(whole, middle), middle);
        whole = _mm256_shuffle_epi8(whole, by_digit);
        _mm256_storeu_si256((__m256i*)(digits + m * inputs + at), whole);
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(_mm256_set1_epi8(8), whole));
      }
      sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(-1));
      const __m128i start =
          _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
      _mm_storeu_si128((__m128i*)(starts + (m * inputs + k) / WORD), start);
    }
  }
};

// Add x[rows][count] W[count][width], count <= RUN, to y[rows][width]. y may be written up to a
// multiple of W. The next row of words is prefetched.
template <class S>
INTEGERS static void add_integers(const DigitsOfWords& x, int64_t k, int64_t count,
                                  const uint32_t* w, int64_t ldw, const S* scale, int64_t width,
                                  float* y, int64_t ldy) {
  const int64_t there = parts_of(count, WORD);
  for (int64_t j = 0; j < width; j += W) {
    vi weights[2 * WORDS];  // [4 inputs], a byte per input in each lane
#pragma GCC unroll 4
    for (int q = 0; q < WORDS; q++) {
      const vu word = q < there ? words(w + q * ldw, j, width) : vu{};
      weights[2 * q] = (vi)(word & 0x0f0f0f0f);
      weights[2 * q + 1] = (vi)(word >> 4 & 0x0f0f0f0f);
      fetch<4 * W>(w + (WORDS + q) * ldw + j);
    }
    const vf unit = scales(scale, j, width);
    for (int64_t m = 0; m < x.rows; m++) {
      const int32_t* digits = x.digits + m * x.inputs + k;
      const int32_t* start = x.starts + (m * x.inputs + k) / WORD;
      vf total[3];
#pragma GCC unroll 3
      for (int d = 0; d < 3; d++)
        total[d] = __builtin_convertvector(dot(weights, digits + d, start[d]), vf);
      const vf found = total[2] * 65536.0f + (total[1] * 256.0f + total[0]);
      float* to = y + m * ldy + j;
      store(to, load(to) + found * (unit * x.units[m]));
    }
  }
}
#endif

}  // namespace NAMESPACE
