// From the merged projection of a step to attention's inputs: norms of heads (where a family has them)
// and rotation of queries and keys, keys and values into their pages. One pass over the projection.
//
// Rotation is in the half-split layout of nn/rope.py, which is the reference.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "parallel.h"
#include "rows.h"

namespace penstock::rotary {

template <class T>
struct Heads {
  const T *cosines, *sines;  // [tokens, dim]
  const T *q_norm, *k_norm;  // [dim] or null
  float eps;
  int64_t heads, kv_heads, dim;
};

// out = rotated(normalised(x)); the norm is rounded to the stored type, as the plain network does.
template <class T>
void rotate(const T* x, const T* norm, const Heads<T>& of, int64_t token, T* out) {
  const int64_t half = of.dim / 2;
  const T *cosines = of.cosines + token * of.dim, *sines = of.sines + token * of.dim;
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

inline void check(const at::Tensor& qkv, const at::Tensor& cosines, const at::Tensor& sines, const at::Tensor& slots,
                  const at::Tensor& keys, const at::Tensor& values) {
  const int64_t tokens = qkv.size(0), dim = keys.size(3), num_slots = keys.size(0) * keys.size(2);
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) % dim == 0 && qkv.size(1) / dim > 2 * keys.size(1),
              "rotate_and_store: a projection ", qkv.sizes(), " does not fit pages ", keys.sizes());
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && values.sizes() == keys.sizes(),
              "rotate_and_store: pages must be contiguous");
  for (const at::Tensor& t : {cosines, sines})
    TORCH_CHECK(t.is_contiguous() && t.numel() == tokens * dim, "rotate_and_store: angles ", t.sizes());
  for (const at::Tensor& t : {cosines, sines, keys, values})
    TORCH_CHECK(t.scalar_type() == qkv.scalar_type(), "rotate_and_store: types differ");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.numel() == tokens,
              "rotate_and_store: slots are int64, one per token");
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(slots.const_data_ptr<int64_t>()[i] >= 0 && slots.const_data_ptr<int64_t>()[i] < num_slots,
                "rotate_and_store: there is no slot ", slots.const_data_ptr<int64_t>()[i]);
}

template <class T>
const T* weight_of(const std::optional<at::Tensor>& norm, int64_t dim) {
  if (!norm) return nullptr;
  TORCH_CHECK(norm->numel() == dim && norm->is_contiguous(), "rotate_and_store: a norm of ", norm->sizes());
  return norm->const_data_ptr<T>();
}

at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& cosines, const at::Tensor& sines,
                            const at::Tensor& slots, at::Tensor keys, at::Tensor values,
                            const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                            double eps) {
  check(qkv, cosines, sines, slots, keys, values);
  const int64_t tokens = qkv.size(0), width = qkv.size(1), block_size = keys.size(2), dim = keys.size(3);
  const int64_t kv_heads = keys.size(1), heads = width / dim - 2 * kv_heads;
  at::Tensor q = at::empty({tokens, heads, dim}, qkv.options());
  dispatch(qkv, [&](auto zero) {
    using T = decltype(zero);
    const Heads<T> of{cosines.const_data_ptr<T>(), sines.const_data_ptr<T>(), weight_of<T>(q_norm, dim),
                      weight_of<T>(k_norm, dim), static_cast<float>(eps), heads, kv_heads, dim};
    const T* in = qkv.const_data_ptr<T>();
    const int64_t* slot = slots.const_data_ptr<int64_t>();
    T *outs = q.mutable_data_ptr<T>(), *k = keys.mutable_data_ptr<T>(), *v = values.mutable_data_ptr<T>();
    parallel(tokens, grain_of(width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        take_token(in + i * width, of, i, slot[i], block_size, outs + i * heads * dim, k, v);
    });
  });
  return q;
}

}  // namespace penstock::rotary

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("rotate_and_store(Tensor qkv, Tensor cosines, Tensor sines, Tensor slots, Tensor(a!) keys, "
        "Tensor(b!) values, Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("rotate_and_store", penstock::rotary::rotate_and_store); }
