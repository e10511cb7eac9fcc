// Attention of a few bfloat16 rows over pages of 8 bits by products of bytes, heads of a multiple of 64 numbers.
//
// Queries and weights become whole numbers of 16 bits times a scale, within 2^-16 of a row's largest, and these two
// digits of 8 bits with a sign: 256 * high + low. The instruction multiplies 4 unsigned by 4 signed bytes and adds them to an
// int32, so codes are shifted by 128, and 128 times the sum of the other side is taken off. To widen each code instead
// took twice the instructions, and those, not memory, were the limit.
#pragma once

#include "attention/few.h"

namespace penstock::attention {

#ifdef __AVX512VNNI__
#define HAS_BYTES

constexpr int64_t BYTES = 64;  // of a vector
constexpr int64_t MOST_BYTES = 512;  // of a row, or 32 bits would be too few for what is taken off

// What numbers are: scale * (256 * high + low).
struct Digits {
  float scale;
  int32_t sum;  // of 256 * high + low
};

template <class T>
inline Digits split(const T* x, int64_t size, Code* high, Code* low) {
  constexpr float MOST = 127 * 256 + 127;
  Vec most(1e-30f);
  for (int64_t i = 0; i < size; i += LANES) most = Vec::max(most, Vec(_mm512_abs_ps(Vec::load(x + i).v)));
  const float largest = most.largest();
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += LANES) {
    const __m512i whole = _mm512_cvtps_epi32((Vec::load(x + i) * Vec(MOST / largest)).v);
    const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(above));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole, _mm512_slli_epi32(above, 8))));
    sum = _mm512_add_epi32(sum, whole);
  }
  return {largest / MOST, _mm512_reduce_add_epi32(sum)};
}

// Codes as unsigned bytes.
inline __m512i shifted(const Code* codes) { return _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(-128)); }

template <int64_t SIZE>
inline __m512i byte_products(const Code* key, const Code* high, const Code* low, int64_t size) {
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int64_t i = 0; i < (SIZE ? SIZE : size); i += BYTES) sum = _mm512_dpbusd_epi32(sum, shifted(key + i), _mm512_loadu_si512(high + i));
  sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 2
  for (int64_t i = 0; i < (SIZE ? SIZE : size); i += BYTES) sum = _mm512_dpbusd_epi32(sum, shifted(key + i), _mm512_loadu_si512(low + i));
  return sum;
}

inline __m512i whole_sums_of(const Vec (&x)[LANES]) {
  return _mm512_castps_si512(added_up(x, [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }));
}

template <int ROWS, int64_t SIZE>
void code_scores_of(const Runs<bf16, Code>& runs, const bf16* const* q_rows, Scratch& own) {
  const int64_t size = runs.task.dim, count = runs.count();
  Digits digits[TILE_ROWS];
  Code* const bytes = reinterpret_cast<Code*>(room(own.cells_q, runs.tile.num_heads * ROWS * 2 * size / sizeof(float)));
  for (int64_t row = 0; row < runs.tile.num_heads * ROWS; ++row)
    digits[row] = split(q_rows[row], size, bytes + 2 * row * size, bytes + (2 * row + 1) * size);
  for (int64_t n = 0; n < count; ++n) {
    const Run<Code> keys = runs.at(own.keys, n), soon = runs.after_key(own, n);
    const Vec scales = keys.scales();
    fetch(soon.scale(0), LANES * SCALE_SIZE);
    for (int64_t row = keys.head * ROWS; row < (keys.head + 1) * ROWS; ++row) {
      const Code *high = bytes + 2 * row * size, *low = high + size;
      Vec parts[LANES];  // whose lanes are int32
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        if (row == keys.head * ROWS) fetch(soon.at(i), size);
        parts[i] = Vec(_mm512_castsi512_ps(byte_products<SIZE>(keys.at(i), high, low, size)));
      }
      const __m512i whole = _mm512_sub_epi32(whole_sums_of(parts), _mm512_set1_epi32(128 * digits[row].sum));
      (Vec(_mm512_cvtepi32_ps(whole)) * (scales * Vec(digits[row].scale))).store(own.scores.data() + row * PART + keys.first);
    }
  }
}

template <int ROWS>
void code_scores(const Runs<bf16, Code>& runs, const bf16* const* q_rows, Scratch& own) {
  if (runs.task.dim == 64) return code_scores_of<ROWS, 64>(runs, q_rows, own);
  if (runs.task.dim == 128) return code_scores_of<ROWS, 128>(runs, q_rows, own);
  code_scores_of<ROWS, 0>(runs, q_rows, own);
}

// sums += weights times values of a run, of 64 columns in the order that `reorder` takes: the bytes of 4 keys are laid
// beside each other, within each quarter of a vector.
inline void add_codes(const Run<Code>& values, const Run<Code>& soon, int64_t column, const Code* high, const Code* low, Digits digits, float* sums) {
  __m512i of_high[4] = {}, of_low[4] = {};
#pragma GCC unroll 4
  for (int key = 0; key < LANES; key += 4) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) {
      fetch(soon.at(key + i) + column, BYTES);
      rows[i] = shifted(values.at(key + i) + column);
    }
    const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpackhi_epi8(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi8(rows[2], rows[3]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
    const __m512i beside[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d),
                               _mm512_unpackhi_epi16(b, d)};
    int32_t four_high, four_low;
    std::memcpy(&four_high, high + key, 4), std::memcpy(&four_low, low + key, 4);
    for (int j = 0; j < 4; ++j) {
      of_high[j] = _mm512_dpbusd_epi32(of_high[j], beside[j], _mm512_set1_epi32(four_high));
      of_low[j] = _mm512_dpbusd_epi32(of_low[j], beside[j], _mm512_set1_epi32(four_low));
    }
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(of_high[j], 8), of_low[j]);
    const Vec whole(_mm512_cvtepi32_ps(_mm512_sub_epi32(both, _mm512_set1_epi32(128 * digits.sum))));
    Vec::fma(whole, Vec(digits.scale), Vec::load(sums + j * LANES)).store(sums + j * LANES);
  }
}

// Quarter L of vector j becomes quarter j of vector L.
inline void reorder(float* sums) {
  __m512 in[4], half[4];
  for (int j = 0; j < 4; ++j) in[j] = _mm512_loadu_ps(sums + j * LANES);
  for (int j = 0; j < 2; ++j) {
    half[j] = _mm512_shuffle_f32x4(in[2 * j], in[2 * j + 1], 0x88);
    half[2 + j] = _mm512_shuffle_f32x4(in[2 * j], in[2 * j + 1], 0xdd);
  }
  for (int j = 0; j < 2; ++j) {
    _mm512_storeu_ps(sums + j * LANES, _mm512_shuffle_f32x4(half[2 * j], half[2 * j + 1], 0x88));
    _mm512_storeu_ps(sums + (2 + j) * LANES, _mm512_shuffle_f32x4(half[2 * j], half[2 * j + 1], 0xdd));
  }
}

template <int ROWS>
void code_sums(const Runs<bf16, Code>& runs, Scratch& own) {
  const int64_t dim = runs.task.dim, count = runs.count(), rows = runs.tile.num_heads * ROWS;
  std::fill_n(own.sums.data(), rows * dim, 0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const Run<Code> values = runs.at(own.values, n), soon = runs.at(own.values, std::min(n + runs.ahead(), count - 1));
    const Vec scales = values.scales();
    fetch(soon.scale(0), LANES * SCALE_SIZE);
    for (int64_t row = values.head * ROWS; row < (values.head + 1) * ROWS; ++row) {
      float weights[LANES];
      Code high[LANES], low[LANES];
      (Vec::load(own.scores.data() + row * PART + values.first) * scales).store(weights);
      const Digits digits = split(weights, LANES, high, low);
      for (int64_t column = 0; column < dim; column += BYTES)
        add_codes(values, soon, column, high, low, digits, own.sums.data() + row * dim + column);
    }
  }
  for (int64_t i = 0; i < rows * dim; i += BYTES) reorder(own.sums.data() + i);
}

#endif

}  // namespace penstock::attention
