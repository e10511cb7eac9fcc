// RMSNorm, alone and after the residual sum: one pass over a row while it is in the first cache.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "parallel.h"
#include "rows.h"

namespace penstock {

// x += scale * delta in the stored type, as the plain network does; then out = norm(x) * weight.
template <class T>
void add_and_norm_row(T* x, const T* delta, float scale, const T* weight, float eps, T* out, int64_t size) {
  if (delta) {
    each_lane(size, [&](int64_t i, auto at) {
      at.store(x + i, Vec::fma(at.load(delta + i), Vec(scale), at.load(x + i)));
    });
  }
  normalise_row(x, weight, eps, out, size);
}

at::Tensor rms_norm(at::Tensor x, const std::optional<at::Tensor>& delta, double scale, const at::Tensor& weight,
                    double eps) {
  const int64_t size = x.size(-1), rows = x.numel() / size;
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == size, "rms_norm: rows of ", size);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "rms_norm: x and weight differ in type");
  TORCH_CHECK(!delta || (delta->is_contiguous() && delta->sizes() == x.sizes() &&
                         delta->scalar_type() == x.scalar_type()), "rms_norm: delta is not like x");
  at::Tensor out = at::empty_like(x);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    T *xs = x.mutable_data_ptr<T>(), *outs = out.mutable_data_ptr<T>();
    const T *deltas = delta ? delta->const_data_ptr<T>() : nullptr, *weights = weight.const_data_ptr<T>();
    parallel(rows, grain_of(size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * size; row < end * size; row += size)
        add_and_norm_row(xs + row, deltas ? deltas + row : nullptr, static_cast<float>(scale), weights,
                         static_cast<float>(eps), outs + row, size);
    });
  });
  return out;
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, float scale, Tensor weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("rms_norm", [](const at::Tensor& x, const at::Tensor& weight, double eps) {
    return penstock::rms_norm(x, std::nullopt, 1.0, weight, eps);
  });
  m.impl("add_rms_norm", [](at::Tensor x, const at::Tensor& delta, double scale, const at::Tensor& weight,
                            double eps) { return penstock::rms_norm(x, delta, scale, weight, eps); });
}
