// From the merged projection of a step to attention's inputs: norms of heads (where a family has them)
// and rotation of queries and keys, keys and values into their pages. One pass over the projection.
//
// Rotation is in the half-split layout of nn/rope.py, which is the reference.
#pragma once

#include <vector>

#include "attention/page_rows.h"
#include "threads.h"

namespace penstock::rotary {

template <class T>
struct Heads {
  const T *cosines, *sines;  // [tokens, dim], or of all positions
  const int64_t* positions;  // of the tokens; null: one row of angles per token
  const T *q_norm, *k_norm;  // [dim], or [heads, dim] and [kv_heads, dim] with means, or null
  float eps, shift;
  int64_t heads, kv_heads, dim;
  const float* means = nullptr;  // [tokens, 2]: mean squares of all queries and of all keys; null: heads have norms of their own
  bool norms_rotated = false;      // norms come after the rotation
  const T* q_scales = nullptr;     // factors on the rotated queries, [tokens], or of all positions; or null
};

// means = the mean squares of a token's queries and of its keys, each over all heads.
template <class T>
void measure(Threads& threads, const Heads<T>& of, const T* qkv, int64_t tokens, float* means) {
  const int64_t queries = of.heads * of.dim, keys = of.kv_heads * of.dim, width = queries + 2 * keys;
  threads.each(tokens, grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      means[2 * token] = mean_square(qkv + token * width, queries);
      means[2 * token + 1] = mean_square(qkv + token * width + queries, keys);
    }
  });
}

// out = rotated(normalised(x)), or normalised(rotated(x)); the norm is rounded to the stored type, as the plain network does.
// mean: the mean square that the norm divides by; null: that of x.
template <class T>
void rotate(const T* x, const T* norm, const float* mean, const Heads<T>& of, int64_t token, T* out) {
  const int64_t half = of.dim / 2;
  const int64_t angles = (of.positions ? of.positions[token] : token) * of.dim;
  const T *cosines = of.cosines + angles, *sines = of.sines + angles;
  static thread_local std::vector<T> normed;
  if (norm && !of.norms_rotated) {
    normed.resize(of.dim);
    scale_row(x, mean ? *mean : mean_square(x, of.dim), norm, of.eps, of.shift, normed.data(), of.dim);
    x = normed.data();
  }
  each_lane(half, [&](int64_t i, auto at) {
    const Vec first = at.load(x + i), second = at.load(x + half + i);
    at.store(out + i, first * at.load(cosines + i) - second * at.load(sines + i));
    at.store(out + half + i, Vec::fma(first, at.load(sines + half + i), second * at.load(cosines + half + i)));
  });
  if (norm && of.norms_rotated) scale_row(out, mean_square(out, of.dim), norm, of.eps, of.shift, out, of.dim);
}

// As `rotate`, for queries, whose factor is of their position; it is a product of its own, as in the plain network.
template <class T>
void rotate_query(const T* x, const T* norm, const float* mean, const Heads<T>& of, int64_t token, T* out) {
  rotate(x, norm, mean, of, token, out);
  if (!of.q_scales) return;
  const Vec factor(static_cast<float>(of.q_scales[of.positions ? of.positions[token] : token]));
  each_lane(of.dim, [&](int64_t i, auto at) { at.store(out + i, at.load(out + i) * factor); });
}

constexpr int64_t AHEAD = 8;  // heads: pages lie anywhere, and a line must be read before it is written to

// qkv: [tokens, (heads + 2 kv_heads) * dim]; q: [tokens, heads * dim]; slots: of the tokens.
template <class T, class P>
void take_tokens(Threads& threads, const Heads<T>& of, const T* qkv, const int64_t* slots, int64_t tokens,
                 int64_t block_size, T* q, P* keys, P* values) {
  const int64_t group = of.heads / of.kv_heads, width = (of.heads + 2 * of.kv_heads) * of.dim;
  const int64_t page_size = block_size * page_width<P>(of.dim);
  const auto page = [&](int64_t item) {  // where it begins
    return (slots[item / of.kv_heads] / block_size * of.kv_heads + item % of.kv_heads) * page_size;
  };
  const auto place = [&](int64_t item) { return page(item) + slots[item / of.kv_heads] % block_size * of.dim; };
  const auto take = [&](int64_t item) {  // a key-value head of a token, and its queries
    const int64_t token = item / of.kv_heads, head = item % of.kv_heads;
    const T *in = qkv + token * width, *key = in + (of.heads + head) * of.dim, *value = key + of.kv_heads * of.dim;
    const int64_t stride = of.means ? of.dim : 0;  // from the weights of a head to those of the next
    const float *q_mean = of.means ? of.means + 2 * token : nullptr, *k_mean = of.means ? q_mean + 1 : nullptr;
    const T* k_norm = of.k_norm ? of.k_norm + head * stride : nullptr;
    for (int64_t i = head * group; i < (head + 1) * group; ++i)
      rotate_query(in + i * of.dim, of.q_norm ? of.q_norm + i * stride : nullptr, q_mean, of, token, q + (token * of.heads + i) * of.dim);
    if constexpr (is_coded<P>) {
      static thread_local std::vector<T> rotated;
      rotated.resize(of.dim);
      rotate(key, k_norm, k_mean, of, token, rotated.data());
      const int64_t scale = scale_in(keys + page(item), block_size, of.dim, slots[token] % block_size) - keys;
      write_row(rotated.data(), of.dim, keys + place(item), keys + scale);
      write_row(value, of.dim, values + place(item), values + scale);
    } else {
      rotate(key, k_norm, k_mean, of, token, keys + place(item));
      write_row(value, of.dim, values + place(item));
    }
  };
  threads.each(tokens * of.kv_heads, grain_of((group + 2) * of.dim), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t soon = place(std::min(item + AHEAD, end - 1));
      for (int64_t i = 0; i < of.dim; i += 64 / sizeof(P)) __builtin_prefetch(keys + soon + i, 1), __builtin_prefetch(values + soon + i, 1);
      take(item);
    }
  });
}

}  // namespace penstock::rotary
