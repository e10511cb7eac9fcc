// From the merged projection of a step to attention's inputs: norms of heads (where a family has them)
// and rotation of queries and keys, keys and values into their pages. One pass over the projection.
//
// Rotation is in the half-split layout of nn/rope.py, which is the reference.
#pragma once

#include <vector>

#include "rows.h"
#include "threads.h"

namespace penstock::rotary {

template <class T>
struct Heads {
  const T *cosines, *sines;  // [tokens, dim], or of all positions
  const int64_t* positions;  // of the tokens; null: one row of angles per token
  const T *q_norm, *k_norm;  // [dim] or null
  float eps;
  int64_t heads, kv_heads, dim;
};

// out = rotated(normalised(x)); the norm is rounded to the stored type, as the plain network does.
template <class T>
void rotate(const T* x, const T* norm, const Heads<T>& of, int64_t token, T* out) {
  const int64_t half = of.dim / 2;
  const int64_t angles = (of.positions ? of.positions[token] : token) * of.dim;
  const T *cosines = of.cosines + angles, *sines = of.sines + angles;
  static thread_local std::vector<T> normed;
  if (norm) {
    normed.resize(of.dim);
    normalise_row(x, norm, of.eps, normed.data(), of.dim);
    x = normed.data();
  }
  each_lane(half, [&](int64_t i, auto at) {
    const Vec first = at.load(x + i), second = at.load(x + half + i);
    at.store(out + i, first * at.load(cosines + i) - second * at.load(sines + i));
    at.store(out + half + i, Vec::fma(first, at.load(sines + half + i), second * at.load(cosines + half + i)));
  });
}

template <class T>
void take_token(const T* in, const Heads<T>& of, int64_t token, int64_t slot, int64_t block_size, T* q, T* keys,
                T* values) {
  for (int64_t head = 0; head < of.heads; ++head, in += of.dim, q += of.dim) rotate(in, of.q_norm, of, token, q);
  const int64_t page = slot / block_size * of.kv_heads, offset = slot % block_size;
  for (int64_t head = 0; head < of.kv_heads; ++head, in += of.dim)
    rotate(in, of.k_norm, of, token, keys + ((page + head) * block_size + offset) * of.dim);
  for (int64_t head = 0; head < of.kv_heads; ++head, in += of.dim)
    std::copy(in, in + of.dim, values + ((page + head) * block_size + offset) * of.dim);
}

// qkv: [tokens, (heads + 2 kv_heads) * dim]; q: [tokens, heads * dim]; slots: of the tokens.
template <class T>
void take_tokens(Threads& threads, const Heads<T>& of, const T* qkv, const int64_t* slots, int64_t tokens,
                 int64_t block_size, T* q, T* keys, T* values) {
  const int64_t width = (of.heads + 2 * of.kv_heads) * of.dim;
  threads.each(tokens, grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      take_token(qkv + i * width, of, i, slots[i], block_size, q + i * of.heads * of.dim, keys, values);
  });
}

}  // namespace penstock::rotary
