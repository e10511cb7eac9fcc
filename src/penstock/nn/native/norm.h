// RMSNorm of rows, alone or after the residual sum: one pass over a row while it is in the first cache.
#pragma once

#include "rows.h"
#include "threads.h"

namespace penstock {

template <class T>
struct Norm {
  const T* weight;  // null: rows are not normalised
  float eps, shift;  // the shift is added to the weight
  int64_t size;
};

// x += scale * delta in the stored type, as the plain network does, unless delta is null; then out = norm(x), unless
// there is no weight. out may be x.
template <class T>
void add_and_norm(Threads& threads, const Norm<T>& norm, T* x, const T* delta, float scale, int64_t rows, T* out) {
  threads.each(rows, grain_of(norm.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * norm.size; row < end * norm.size; row += norm.size) {
      if (delta)
        each_lane(norm.size, [&](int64_t i, auto at) {
          at.store(x + row + i, Vec::fma(at.load(delta + row + i), Vec(scale), at.load(x + row + i)));
        });
      if (norm.weight)
        scale_row(x + row, mean_square(x + row, norm.size), norm.weight, norm.eps, norm.shift, out + row, norm.size);
    }
  });
}

}  // namespace penstock
