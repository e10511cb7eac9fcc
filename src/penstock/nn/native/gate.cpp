// silu(gate) * up of the merged projection, in one pass.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"
#include "rows.h"

namespace penstock::gate {

template <class T>
void gate_row(const T* gate, const T* up, T* out, int64_t size) {
  each_lane(size, [&](int64_t i, auto at) {
    const Vec x = at.load(gate + i);
    at.store(out + i, x / (Vec(1.0f) + exp(Vec() - x)) * at.load(up + i));
  });
}

at::Tensor silu_and_multiply(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.is_contiguous() && gate_up.size(-1) % 2 == 0, "silu_and_multiply: shape ", gate_up.sizes());
  std::vector<int64_t> shape = gate_up.sizes().vec();
  const int64_t size = shape.back() /= 2;
  at::Tensor out = at::empty(shape, gate_up.options());
  dispatch(gate_up, [&](auto zero) {
    using T = decltype(zero);
    const T* in = gate_up.const_data_ptr<T>();
    T* outs = out.mutable_data_ptr<T>();
    parallel(size ? out.numel() / size : 0, grain_of(4 * size), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) gate_row(in + 2 * i * size, in + (2 * i + 1) * size, outs + i * size, size);
    });
  });
  return out;
}

}  // namespace penstock::gate

TORCH_LIBRARY_FRAGMENT(penstock, m) { m.def("silu_and_multiply(Tensor gate_up) -> Tensor"); }

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("silu_and_multiply", penstock::gate::silu_and_multiply); }
