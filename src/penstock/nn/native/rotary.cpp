// What attention reads, from the merged projection, as an operator; see rotary.h.

#include "rotary.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::rotary {

inline void check(const at::Tensor& qkv, const at::Tensor& cosines, const at::Tensor& sines, const at::Tensor& slots,
                  const at::Tensor& keys, const at::Tensor& values) {
  const int64_t tokens = qkv.size(0), dim = dim_of(keys), num_slots = keys.size(0) * keys.size(2);
  TORCH_CHECK(dim > 0 && qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) % dim == 0 && qkv.size(1) / dim > 2 * keys.size(1),
              "rotate_and_store: a projection ", qkv.sizes(), " does not fit pages ", keys.sizes());
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && values.sizes() == keys.sizes() &&
                  values.scalar_type() == keys.scalar_type(),
              "rotate_and_store: pages must be contiguous, of one type");
  for (const at::Tensor& t : {cosines, sines})
    TORCH_CHECK(t.is_contiguous() && t.numel() == tokens * dim, "rotate_and_store: angles ", t.sizes());
  for (const at::Tensor& t : {cosines, sines})
    TORCH_CHECK(t.scalar_type() == qkv.scalar_type(), "rotate_and_store: types differ");
  check_indexes(slots, tokens, num_slots, "slot");
}

template <class T>
const T* weight_of(const std::optional<at::Tensor>& norm, int64_t size) {
  if (!norm) return nullptr;
  TORCH_CHECK(norm->numel() == size && norm->is_contiguous(), "rotate_and_store: a norm of ", norm->sizes());
  return data<T>(*norm);
}

at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& cosines, const at::Tensor& sines,
                            const at::Tensor& slots, at::Tensor keys, at::Tensor values,
                            const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                            double eps, double shift, bool norms_rotated, const std::optional<at::Tensor>& q_scales) {
  check(qkv, cosines, sines, slots, keys, values);
  const int64_t tokens = qkv.size(0), block_size = keys.size(2), dim = dim_of(keys);
  const int64_t kv_heads = keys.size(1), heads = qkv.size(1) / dim - 2 * kv_heads;
  const bool is_whole = !norms_rotated && q_norm && q_norm->numel() == heads * dim;  // with one head this is the norm of that head
  at::Tensor q = at::empty({tokens, heads, dim}, qkv.options());
  at::Tensor means = at::empty({tokens, 2}, qkv.options().dtype(at::kFloat));
  dispatch_pages(qkv, keys, [&](auto zero, auto page_zero) {
    using T = decltype(zero);
    using P = decltype(page_zero);
    Heads<T> of{data<T>(cosines), data<T>(sines), nullptr, weight_of<T>(q_norm, is_whole ? heads * dim : dim),
                weight_of<T>(k_norm, is_whole ? kv_heads * dim : dim), static_cast<float>(eps), static_cast<float>(shift),
                heads, kv_heads, dim, nullptr, norms_rotated, weight_of<T>(q_scales, tokens)};
    Regions threads;
    if (is_whole) {
      measure(threads, of, data<T>(qkv), tokens, writable<float>(means));
      of.means = data<float>(means);
    }
    take_tokens(threads, of, data<T>(qkv), slots.const_data_ptr<int64_t>(), tokens, block_size,
                writable<T>(q), writable<P>(keys), writable<P>(values));
  });
  return q;
}

}  // namespace penstock::rotary

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("rotate_and_store(Tensor qkv, Tensor cosines, Tensor sines, Tensor slots, Tensor(a!) keys, "
        "Tensor(b!) values, Tensor? q_norm, Tensor? k_norm, float eps, float shift=0, "
        "bool norms_rotated=False, Tensor? q_scales=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("rotate_and_store", penstock::rotary::rotate_and_store); }
