// Integer products of few rows with int8 weights, for processors with VNNI: one instruction multiplies
// four weights by four digits per lane.
//
// Sums of digits times weights are exact: they become float32 after 16 inputs, or after a row. One operand of the instruction is unsigned: weights enter as w + 128, and sums start
// at minus 128 times the sum of the digits.
#pragma once

namespace NAMESPACE {

#define VNNI __attribute__((target("avx512vnni")))

static bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
}

constexpr int64_t GROUP = 16;  // inputs whose products are summed in integers
constexpr int64_t LOAD = 64;   // bytes of a register

// Rows of x as digits, and the initial values of sums.
struct Digits {
  int64_t rows, inputs;  // inputs: rounded up to a multiple of LOAD
  Scratch memory;
  float* units;     // [rows]
  int32_t* groups;  // [rows][inputs / GROUP][4]: -128 times the sums of each digit; the 4th is unused
  int32_t* lanes;   // [rows][3][W]: the same for all inputs in a lane of a register
  int8_t* digits;   // [rows][3][inputs]

  Digits(const float* x, int64_t rows, int64_t width)
      : rows(rows), inputs(round_up(width, LOAD)),
        memory(rows * (W + inputs / GROUP * 4 + 3 * W + 3 * inputs / 4)) {
    lanes = (int32_t*)memory.data;
    digits = (int8_t*)(lanes + rows * 3 * W);
    groups = (int32_t*)(digits + rows * 3 * inputs);
    units = (float*)(groups + rows * inputs / GROUP * 4);
    for (int64_t m = 0; m < rows; m++) cut(x + m * width, width, m);
  }

  const int8_t* of(int64_t m, int digit) const { return digits + (m * 3 + digit) * inputs; }

  VNNI void cut(const float* x, int64_t width, int64_t m) {
    vf most{};
    for (int64_t k = 0; k < width; k += W) most = larger(most, (vf)((vi)part(x, k, width) & INT32_MAX));
    const float size = largest(most);
    units[m] = size / MOST;
    const vf factor = all(size ? MOST / size : 0.0f);
    const __m512i sign = _mm512_set1_epi8((char)128);
    __m512i starts[3] = {};
    for (int64_t k = 0; k < inputs; k += GROUP) {
      const vi whole = (vi)_mm512_cvtps_epi32(part(x, k, width) * factor);
      const vi c = whole << 24 >> 24, more = (whole - c) >> 8, b = more << 24 >> 24;
      const vi cut[3] = {(more - b) >> 8, b, c};
      int32_t* start = groups + (m * inputs + k) / GROUP * 4;
      for (int d = 0; d < 3; d++) {
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)cut[d]);
        _mm_storeu_si128((__m128i*)(of(m, d) + k), bytes);
        start[d] = -128 * _mm512_reduce_add_epi32((__m512i)cut[d]);
      }
    }
    for (int d = 0; d < 3; d++) {
      for (int64_t k = 0; k < inputs; k += LOAD)
        starts[d] = _mm512_dpbusd_epi32(starts[d], sign, _mm512_loadu_si512(of(m, d) + k));
      _mm512_storeu_si512(lanes + (m * 3 + d) * W, _mm512_sub_epi32(__m512i{}, starts[d]));
    }
  }

 private:
  static vf part(const float* x, int64_t k, int64_t width) {
    const int64_t left = width - k;
    if (left >= W) return load(x + k);
    return left <= 0 ? vf{} : (vf)_mm512_maskz_loadu_ps((1u << left) - 1, x + k);
  }
};

// Add x[rows][count] W[count][width], count <= GROUP, to y[rows][width]. y may be written up to a
// multiple of LOAD.
VNNI static inline void add_group(const Digits& x, int64_t k, int64_t count, const int8_t* w,
                                  int64_t ldw, int64_t width, float* y, int64_t ldy) {
  const __m512i sign = _mm512_set1_epi8((char)128);
  for (int64_t j = 0; j < width; j += LOAD) {
    const __mmask64 there = width - j >= LOAD ? ~0ull : (1ull << (width - j)) - 1;
    __m512i weights[16];  // [4 inputs][4 outputs of each 16], a byte per input in each lane
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      __m512i row[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        const int64_t at = 4 * q + r;
        row[r] = at < count ? _mm512_maskz_loadu_epi8(there, w + at * ldw + j) : __m512i{};
        row[r] = _mm512_xor_si512(row[r], sign);
        fetch<LINE>(w + (GROUP + at) * ldw + j);
      }
      const __m512i first[2] = {_mm512_unpacklo_epi8(row[0], row[1]), _mm512_unpackhi_epi8(row[0], row[1])};
      const __m512i second[2] = {_mm512_unpacklo_epi8(row[2], row[3]), _mm512_unpackhi_epi8(row[2], row[3])};
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        weights[4 * q + 2 * h] = _mm512_unpacklo_epi16(first[h], second[h]);
        weights[4 * q + 2 * h + 1] = _mm512_unpackhi_epi16(first[h], second[h]);
      }
    }
    for (int64_t m = 0; m < x.rows; m++) {
      const int32_t* start = x.groups + (m * x.inputs + k) / GROUP * 4;
      const float unit = x.units[m];
      __m512 found[4];
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) {
        __m512i total[3];
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++) {
          total[d] = _mm512_set1_epi32(start[d]);
#pragma GCC unroll 4
          for (int q = 0; q < 4; q++) {
            int32_t four;
            std::memcpy(&four, x.of(m, d) + k + 4 * q, 4);
            total[d] = _mm512_dpbusd_epi32(total[d], weights[4 * q + p], _mm512_set1_epi32(four));
          }
        }
        found[p] = _mm512_cvtepi32_ps(total[0]) * (65536 * unit) +
                   (_mm512_cvtepi32_ps(total[1]) * (256 * unit) + _mm512_cvtepi32_ps(total[2]) * unit);
      }
      // found[p] has outputs 16 L + 4 p + 0..3 in its L-th quarter: transpose the quarters
      const __m512 a = _mm512_shuffle_f32x4(found[0], found[1], 0x44);
      const __m512 b = _mm512_shuffle_f32x4(found[2], found[3], 0x44);
      const __m512 c = _mm512_shuffle_f32x4(found[0], found[1], 0xee);
      const __m512 e = _mm512_shuffle_f32x4(found[2], found[3], 0xee);
      const __m512 turned[4] = {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd),
                                _mm512_shuffle_f32x4(c, e, 0x88), _mm512_shuffle_f32x4(c, e, 0xdd)};
      float* to = y + m * ldy + j;
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) store(to + p * W, load(to + p * W) + turned[p]);
    }
  }
}

// y[rows][R] = x[rows][inputs] (w[R][inputs])^T. Rows of w are read in sequence, which the
// hardware prefetches.
template <int R>
VNNI static inline void dot_bytes(const Digits& x, int64_t inputs, const int8_t* w, float* y,
                                  int64_t ldy) {
  const __m512i sign = _mm512_set1_epi8((char)128);
  const int64_t whole = inputs / LOAD * LOAD;
  const __mmask64 rest = (1ull << (inputs - whole)) - 1;
  for (int64_t m = 0; m < x.rows; m++) {
    vf found[R];
#pragma GCC unroll 1
    for (int r = 0; r < R; r++) {
      __m512i total[3];
#pragma GCC unroll 3
      for (int d = 0; d < 3; d++) total[d] = _mm512_loadu_si512(x.lanes + (m * 3 + d) * W);
      int64_t k = 0;
      for (; k < whole; k += LOAD) {
        const __m512i weights = _mm512_xor_si512(_mm512_loadu_si512(w + r * inputs + k), sign);
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++)
          total[d] = _mm512_dpbusd_epi32(total[d], weights, _mm512_loadu_si512(x.of(m, d) + k));
      }
      if (rest) {
        const __m512i weights =
            _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, w + r * inputs + k), sign);
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++)
          total[d] = _mm512_dpbusd_epi32(total[d], weights, _mm512_loadu_si512(x.of(m, d) + k));
      }
      found[r] = _mm512_cvtepi32_ps(total[0]) * 65536.0f +
                 (_mm512_cvtepi32_ps(total[1]) * 256.0f + _mm512_cvtepi32_ps(total[2]));
    }
    for (int r = 0; r < R; r++) y[m * ldy + r] = x.units[m] * sum(found[r]);
  }
}

}  // namespace NAMESPACE
