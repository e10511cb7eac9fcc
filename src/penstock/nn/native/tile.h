// A small matrix product in registers, and how its right side is laid out: what attention over many
// queries is made of. All float32, or pairs of bfloat16 where the CPU multiplies those faster.
//
//   c[rows, columns] = a[rows, depth] b[depth, columns]
//
// `Cell` is what one lane of b holds: a float, or two bfloat16 of consecutive depth. a is rows of
// cells, so one cell is broadcast; b is [depth cells, columns], so LANES columns are one vector. The CPU's matrix tiles,
// where it has them, read pairs as they lie (tiles.h).
#pragma once

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

namespace penstock::tile {

#ifdef __AVX512BF16__
struct Pair {
  bf16 first, second;
};
#endif

template <class Cell>
struct Product;

template <>
struct Product<float> {
  static constexpr int64_t DEPTH = 1;  // numbers of depth in a cell
  using Lane = Vec;
  static Lane load(const float* b) { return Vec::load(b); }
  static Lane broadcast(const float* a) { return Vec(*a); }
  static Vec add(Lane a, Lane b, Vec c) { return Vec::fma(a, b, c); }
};

#ifdef __AVX512BF16__
template <>
struct Product<Pair> {
  static constexpr int64_t DEPTH = 2;
  using Lane = __m512i;
  static Lane load(const Pair* b) { return _mm512_loadu_si512(b); }
  static Lane broadcast(const Pair* a) {
    int32_t bits;
    std::memcpy(&bits, a, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static Vec add(Lane a, Lane b, Vec c) {
    return _mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// Whether vectors multiply bfloat16 as pairs; tests set it. Intel's cores since Sapphire Rapids, whose tiles are for pairs,
// take two cycles for a vector of pairs, in which they multiply four of float32. So they multiply float32 wherever no tiles
// do (ADR 72).
inline bool& uses_pairs() {
#ifdef __AVX512BF16__
  static bool are_faster = !__builtin_cpu_is("intel") || __builtin_cpu_is("cooperlake");
#else
  static bool are_faster = false;
#endif
  return are_faster;
}

// ROWS x WIDE vectors of c at once: 6 x 4 of 32 registers and 4 more for b, or 6 x 2 of 16 and 2 more.
template <int ROWS, int WIDE, class Cell>
inline void multiply_block(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, float* c,
                           int64_t c_stride, int64_t depth) {
  Vec sums[ROWS][WIDE];
  for (int64_t k = 0; k < depth; ++k) {
    typename Product<Cell>::Lane right[WIDE];
    for (int j = 0; j < WIDE; ++j) right[j] = Product<Cell>::load(b + k * b_stride + j * LANES);
    for (int i = 0; i < ROWS; ++i) {
      const auto left = Product<Cell>::broadcast(a + i * a_stride + k);
      for (int j = 0; j < WIDE; ++j) sums[i][j] = Product<Cell>::add(left, right[j], sums[i][j]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < WIDE; ++j) sums[i][j].store(c + i * c_stride + j * LANES);
}

template <int WIDE, class Cell>
inline void multiply_columns(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, float* c,
                             int64_t c_stride, int64_t rows, int64_t depth) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6)
    multiply_block<6, WIDE>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth);
  for (; i + 2 <= rows; i += 2)
    multiply_block<2, WIDE>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth);
  for (; i < rows; ++i)
    multiply_block<1, WIDE>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth);
}

// Whether `multiply` takes pairs: by tiles or by vectors.
inline bool multiplies_pairs() {
#ifdef HAS_TILES
  if (tiles::usable()) return true;
#endif
  return uses_pairs();
}

// columns is a multiple of LANES; strides count cells, and floats for c.
template <class Cell>
void multiply(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, float* c, int64_t c_stride,
              int64_t rows, int64_t columns, int64_t depth) {
#ifdef HAS_TILES
  if constexpr (Product<Cell>::DEPTH == 2) {
    constexpr int64_t SIZE = sizeof(Cell);
    tiles::Unit unit;
    const tiles::Task task{a, b, c, a_stride * SIZE, b_stride * SIZE, c_stride * SIZE, rows, columns, depth};
    if (tiles::usable()) return unit.multiply<tiles::PAIRS>(task);
  }
#endif
  constexpr int WIDE = REGISTERS / 8;
  int64_t j = 0;
  for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
    multiply_columns<WIDE>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
  for (; j < columns; j += LANES)
    multiply_columns<1>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth);
}

// ---- how rows in memory become cells

// Return body(cell), with a cell of what numbers of type T are multiplied as: pairs, where they can be, or float32.
template <class T, class Body>
auto with_cell(bool is_paired, const Body& body) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, bf16>)
    if (is_paired) return body(Pair{});
#endif
  (void)is_paired;
  return body(0.0f);
}

template <class Cell, class T>
inline Cell cell_of(T first, T second) {
  if constexpr (Product<Cell>::DEPTH == 1)
    return static_cast<float>(first);
  else
    return {first, second};
}

// The left side: each row `depth` cells, filled up with 0.
template <class Cell, class T>
void lay_rows(const T* const* rows, int64_t num_rows, int64_t size, Cell* out, int64_t depth) {
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t k = 0, i = 0; k < depth; ++k, i += Product<Cell>::DEPTH)
      out[row * depth + k] = cell_of<Cell>(rows[row][i], i + 1 < size ? rows[row][i + 1] : T(0));
}

#ifdef __AVX512F__
// 16 rows of 16 cells, row(i) each, into 16 columns: four rounds, each exchanging halves of ever larger pieces.
template <class Row>
inline void transpose16(const Row& row, void* out, int64_t stride_bytes) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = row(i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    _mm512_storeu_si512(static_cast<char*>(out) + j * stride_bytes, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
    _mm512_storeu_si512(static_cast<char*>(out) + (j + 8) * stride_bytes, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
  }
}
#endif

// LANES columns of the right side, one row of memory each: [depth cells, stride].
template <class Cell, class T>
void lay_columns(const void* const* rows, int64_t size, Cell* out, int64_t depth, int64_t stride) {
  constexpr int64_t D = Product<Cell>::DEPTH;
  int64_t k = 0;
#ifdef __AVX512F__
  const auto cells = [&](int64_t row) -> __m512i {
    const T* numbers = static_cast<const T*>(rows[row]) + k * D;
    if constexpr (sizeof(T) * D == sizeof(Cell)) return _mm512_loadu_si512(numbers);
    else return (__m512i)Vec::load(numbers).v;
  };
  for (; (k + LANES) * D <= size; k += LANES) transpose16(cells, out + k * stride, stride * sizeof(Cell));
#endif
  for (; k < depth; ++k)
    for (int64_t row = 0; row < LANES; ++row) {
      const T* numbers = static_cast<const T*>(rows[row]) + k * D;
      out[k * stride + row] = cell_of<Cell>(numbers[0], k * D + 1 < size ? numbers[1] : T(0));
    }
}

// The right side, rows of memory one below the other: [cells of rows, stride], filled up with 0.
template <class Cell, class T>
void lay_below(const void* const* rows, int64_t num_rows, int64_t size, Cell* out, int64_t stride) {
  for (int64_t row = 0; row < num_rows; row += Product<Cell>::DEPTH, out += stride) {
    const T *one = static_cast<const T*>(rows[row]), *two = static_cast<const T*>(rows[std::min(row + 1, num_rows - 1)]);
    for (int64_t i = 0; i < size; ++i) out[i] = cell_of<Cell>(one[i], two[i]);
    for (int64_t i = size; i < stride; ++i) out[i] = Cell{};
  }
}

}  // namespace penstock::tile
