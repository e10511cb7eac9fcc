// RMSNorm as an operator, alone and after the residual sum.

#include "norm.h"
#include "tensors.h"
#include "threads.h"

namespace penstock {

at::Tensor rms_norm(at::Tensor x, const std::optional<at::Tensor>& delta, double scale, const at::Tensor& weight,
                    double eps, double shift) {
  const int64_t size = x.size(-1), rows = x.numel() / size;
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == size, "rms_norm: rows of ", size);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "rms_norm: x and weight differ in type");
  TORCH_CHECK(!delta || (delta->is_contiguous() && delta->sizes() == x.sizes() &&
                         delta->scalar_type() == x.scalar_type()), "rms_norm: delta is not like x");
  at::Tensor out = at::empty_like(x);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const Norm<T> norm{data<T>(weight), static_cast<float>(eps), static_cast<float>(shift), size};
    Regions threads;
    add_and_norm(threads, norm, writable<T>(x), delta ? data<T>(*delta) : nullptr,
                 static_cast<float>(scale), rows, writable<T>(out));
  });
  return out;
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float shift=0) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, float scale, Tensor weight, float eps, float shift=0) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("rms_norm", [](const at::Tensor& x, const at::Tensor& weight, double eps, double shift) {
    return penstock::rms_norm(x, std::nullopt, 1.0, weight, eps, shift);
  });
  m.impl("add_rms_norm", [](at::Tensor x, const at::Tensor& delta, double scale, const at::Tensor& weight,
                            double eps, double shift) { return penstock::rms_norm(x, delta, scale, weight, eps, shift); });
}
