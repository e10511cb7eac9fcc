// The activation of rows of the merged projection, times up where there is a gate, in one pass.
#pragma once

#include "rows.h"
#include "threads.h"

namespace penstock::gate {

enum Activation : int64_t { SILU, GELU_TANH, RELU2, ACTIVATIONS };

constexpr int64_t PIECE = 256;  // numbers of a row: a single row has work for several threads

// x / (1 + e^-x).
inline Vec silu(Vec x) { return x / (Vec(1.0f) + exp(Vec() - x)); }

// (1 + tanh u) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  const Vec twice = x * Vec(1.5957691216f) * Vec::fma(x * x, Vec(0.044715f), Vec(1.0f));
  return x / (Vec(1.0f) + exp(Vec() - twice));
}

inline Vec relu2(Vec x) {
  const Vec positive = Vec::max(x, Vec());
  return positive * positive;
}

template <class T, class F>
void apply(Threads& threads, const T* in, int64_t rows, int64_t size, bool is_gated, T* out, const F& f) {
  const int64_t pieces = (size + PIECE - 1) / PIECE, width = is_gated ? 2 * size : size;
  threads.each(rows * pieces, grain_of(4 * PIECE) / 4, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces, first = item % pieces * PIECE;
      const T *gate = in + width * row + first, *up = gate + size;
      T* inner = out + row * size + first;
      each_lane(std::min(PIECE, size - first), [&](int64_t i, auto at) {
        const Vec x = f(at.load(gate + i));
        at.store(inner + i, is_gated ? x * at.load(up + i) : x);
      });
    }
  });
}

// in: [rows, 2 * size], gate and up, or [rows, size] without a gate; out: [rows, size].
template <class T>
void activate_rows(Threads& threads, Activation activation, const T* in, int64_t rows, int64_t size, bool is_gated, T* out) {
  if (activation == SILU) return apply(threads, in, rows, size, is_gated, out, silu);
  if (activation == GELU_TANH) return apply(threads, in, rows, size, is_gated, out, gelu_tanh);
  apply(threads, in, rows, size, is_gated, out, relu2);
}

}  // namespace penstock::gate
