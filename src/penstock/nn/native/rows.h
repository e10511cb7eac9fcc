// What the small operators do to one row, and how a row's type and its share of a thread are chosen.
#pragma once

#include <ATen/core/Tensor.h>

#include "vectors.h"

namespace penstock {

// Loads and stores 16 lanes, or the `count` that are left at a row's end; the rest reads as 0.
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

// Call body(i, lanes) for each run of 16 of a row; the last may be shorter.
template <class Body>
void each_lane(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) body(i, Lanes{});
  if (i < size) body(i, Lanes{static_cast<int>(size - i)});
}

// out = x / rms(x) * weight; out may be x.
template <class T>
void normalise_row(const T* x, const T* weight, float eps, T* out, int64_t size) {
  Vec squares;
  each_lane(size, [&](int64_t i, auto at) {
    const Vec v = at.load(x + i);
    squares = Vec::fma(v, v, squares);
  });
  const Vec factor(1.0f / std::sqrt(squares.sum() / static_cast<float>(size) + eps));
  each_lane(size, [&](int64_t i, auto at) { at.store(out + i, at.load(x + i) * factor * at.load(weight + i)); });
}

// Rows a thread takes at least: waking another costs about a microsecond, or 16,000 numbers.
inline int64_t grain_of(int64_t size) { return std::max<int64_t>(1, 16384 / size); }

// Call body with a zero of the tensor's type, float or bfloat16.
template <class Body>
void dispatch(const at::Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) return body(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "float32 or bfloat16 is needed, not ", x.scalar_type());
  body(bf16{});
}

// Refuse what is not one index of [0, most) per token; `what` names them.
inline void check_indexes(const at::Tensor& indexes, int64_t tokens, int64_t most, const char* what) {
  TORCH_CHECK(indexes.scalar_type() == at::kLong && indexes.is_contiguous() && indexes.numel() == tokens,
              "a ", what, " of int64 is needed for each of ", tokens, " tokens, not ", indexes.sizes());
  const int64_t* index = indexes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(index[i] >= 0 && index[i] < most, "there is no ", what, " ", index[i], " of ", most);
}

}  // namespace penstock
