// Attention over pages as an operator; see attention.h.

#include "attention/attention.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::attention {

inline void check(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values) {
  TORCH_CHECK(keys.dim() == 4 && keys.is_contiguous() && values.is_contiguous() && values.sizes() == keys.sizes(),
              "paged_attention: pages are [blocks, heads, block_size, dim], contiguous, not ", keys.sizes());
  TORCH_CHECK(q.dim() == 3 && q.size(2) == dim_of(keys) && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)) &&
              q.size(1) % keys.size(1) == 0 && q.size(1) / keys.size(1) <= TILE_ROWS,
              "paged_attention: queries ", q.sizes(), " do not fit pages ", keys.sizes());
  TORCH_CHECK(keys.scalar_type() == values.scalar_type(), "paged_attention: keys and values differ in type");
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables,
                           double scale, int64_t window, const Optional& sinks, double softcap) {
  TORCH_CHECK(!sinks || sinks->numel() == q.size(1), "paged_attention: ", sinks->sizes(), " sinks of ", q.size(1), " heads");
  const at::Tensor of_heads = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  check(q, keys, values);
  check_shares(q.size(0), keys.size(0), keys.size(2), starts, lengths, tables);
  at::Tensor out = at::empty(q.sizes(), q.options());
  dispatch_pages(q, keys, [&](auto zero, auto page_zero) {
    using T = decltype(zero);
    using P = decltype(page_zero);
    const Task<T, P> task{data<T>(q), data<P>(keys), data<P>(values),
                       writable<T>(out), starts.const_data_ptr<int32_t>(), lengths.const_data_ptr<int32_t>(),
                       tables.const_data_ptr<int32_t>(), q.stride(0), q.size(1), keys.size(1), keys.size(2), q.size(2),
                       lengths.numel() ? tables.size(1) : 0, window, static_cast<float>(scale),
                       sinks ? of_heads.const_data_ptr<float>() : nullptr, static_cast<float>(softcap)};
    const Plan plan = cut(task, lengths.numel());
    Partials partials{task.group(), up(task.dim, LANES), {}, {}, {}};
    partials.resize(plan.num_partials);
    std::atomic<int64_t> next{0};
    Regions threads;
    attend(threads, task, plan, partials, next);
  });
  return out;
}

}  // namespace penstock::attention

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("paged_attention(Tensor q, Tensor keys, Tensor values, Tensor query_starts, Tensor lengths, "
        "Tensor block_tables, float scale, int window, Tensor? sinks=None, float softcap=0.0) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("paged_attention", penstock::attention::paged_attention); }
