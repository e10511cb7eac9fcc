// silu(gate) * up of rows of the merged projection, in one pass.
#pragma once

#include "rows.h"
#include "threads.h"

namespace penstock::gate {

constexpr int64_t PIECE = 256;  // numbers of a row: a single row has work for several threads

// in: [rows, 2 * size], out: [rows, size].
template <class T>
void gate_rows(Threads& threads, const T* in, int64_t rows, int64_t size, T* out) {
  const int64_t pieces = (size + PIECE - 1) / PIECE;
  threads.each(rows * pieces, grain_of(4 * PIECE) / 4, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces, first = item % pieces * PIECE;
      const T *gate = in + 2 * row * size + first, *up = gate + size;
      T* gated = out + row * size + first;
      each_lane(std::min(PIECE, size - first), [&](int64_t i, auto at) {
        const Vec x = at.load(gate + i);
        at.store(gated + i, x / (Vec(1.0f) + exp(Vec() - x)) * at.load(up + i));
      });
    }
  });
}

}  // namespace penstock::gate
