// Rows of pages, a key or a value each: of the tokens' type, or of 8 bits.
//
// A page of 8 bits holds the rows of all its positions, `dim` codes from -127 to 127 each, and behind the last row the
// scale of each, a float32 (nn/kernels/pages.py): one piece of memory, read in one stream. A row stands for codes times
// scale. Codes are whole numbers that bfloat16 holds exactly, so kernels multiply
// codes in the tokens' type, or as bytes (codes.h), and put a key's scale to its scores and a value's to its
// weights.
#pragma once

#include <type_traits>

#include "rows.h"

namespace penstock {

using Code = int8_t;
constexpr int64_t SCALE_SIZE = sizeof(float);

template <class P>
constexpr bool is_coded = std::is_same_v<P, Code>;

// What a position takes in a page; what `pages` has in its last dim.
template <class P>
constexpr int64_t page_width(int64_t dim) { return is_coded<P> ? dim + SCALE_SIZE : dim; }

// Where a page of 8 bits has the scale of a position.
template <class P>
P* scale_in(P* page, int64_t block_size, int64_t dim, int64_t offset) {
  return page + block_size * dim + offset * SCALE_SIZE;
}

inline float scale_at(const Code* scale) {
  float out;
  std::memcpy(&out, scale, sizeof out);
  return out;
}

template <class T>
void write_row(const T* x, int64_t dim, T* out) { std::copy_n(x, dim, out); }

// As `to_int8` of nn/linear/rounding.py, to the same bits.
template <class T>
void write_row(const T* x, int64_t dim, Code* out, Code* scale_out) {
  Vec most(1e-30f);
  each_lane(dim, [&](int64_t i, auto at) { most = Vec::max(most, at.load(x + i).magnitude()); });
  const Vec factor(127.0f / most.largest());
  each_lane(dim, [&](int64_t i, auto at) { at.store(out + i, at.load(x + i) * factor); });
  const float scale = most.largest() / 127.0f;
  std::memcpy(scale_out, &scale, sizeof scale);
}

// The codes in the tokens' type.
template <class T>
void widen_row(const Code* row, int64_t dim, T* out) {
  int64_t done = 0;
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2)  // whole vectors are read again soon, and must have been written whole
    for (; done + 32 <= dim; done += 32) {
      const __m512bh both = _mm512_cvtne2ps_pbh(Vec::load(row + done + LANES).v, Vec::load(row + done).v);
      std::memcpy(out + done, &both, sizeof both);
    }
#endif
  each_lane(dim - done, [&](int64_t i, auto at) { at.store(out + done + i, at.load(row + done + i)); });
}

}  // namespace penstock
