// What the small operators do to one row, and what share of the rows a thread takes.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace penstock {

// Loads and stores all lanes, or the `count` that are left at a row's end; the rest reads as 0.
struct Lanes {
  int count = LANES;
  template <class T>
  Vec load(const T* p) const {
    if (count == LANES) return Vec::load(p);
    T padded[LANES] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return Vec::load(padded);
  }
  template <class T>
  void store(T* p, Vec x) const {
    if (count == LANES) return x.store(p);
    T padded[LANES];
    x.store(padded);
    for (int i = 0; i < count; ++i) p[i] = padded[i];
  }
};

// Call body(i, lanes) for each vector of a row; the last may be shorter.
template <class Body>
void each_lane(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) body(i, Lanes{});
  if (i < size) body(i, Lanes{static_cast<int>(size - i)});
}

template <class T>
float mean_square(const T* x, int64_t size) {
  Vec squares;
  each_lane(size, [&](int64_t i, auto at) {
    const Vec v = at.load(x + i);
    squares = Vec::fma(v, v, squares);
  });
  return squares.sum() / static_cast<float>(size);
}

// out = x / sqrt(mean + eps) * (shift + weight); out may be x.
template <class T>
void scale_row(const T* x, float mean, const T* weight, float eps, float shift, T* out, int64_t size) {
  const Vec factor(1.0f / std::sqrt(mean + eps)), more(shift);
  each_lane(size, [&](int64_t i, auto at) { at.store(out + i, at.load(x + i) * factor * (more + at.load(weight + i))); });
}

// Rows a thread takes at least: waking another costs about a microsecond, or 16,000 numbers.
inline int64_t grain_of(int64_t size) { return std::max<int64_t>(1, 16384 / size); }

// codes = round(x * 127 / largest) + shift; returns the scale. A row of zeros has a scale too.
template <class T>
float round_row(const T* x, int64_t size, int shift, uint8_t* codes) {
  Vec most(1e-30f);
  each_lane(size, [&](int64_t i, auto at) { most = Vec::max(most, at.load(x + i).magnitude()); });
  const Vec factor(127.0f / most.largest());
  each_lane(size, [&](int64_t i, auto at) {
    const Bytes bytes = narrowed((at.load(x + i) * factor).whole() + shift);
    std::memcpy(codes + i, &bytes, at.count);
  });
  return most.largest() / 127.0f;
}

}  // namespace penstock
