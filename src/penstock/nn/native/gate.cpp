// silu(gate) * up of the merged projection as an operator.

#include "gate.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::gate {

at::Tensor silu_and_multiply(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.is_contiguous() && gate_up.size(-1) % 2 == 0, "silu_and_multiply: shape ", gate_up.sizes());
  std::vector<int64_t> shape = gate_up.sizes().vec();
  const int64_t size = shape.back() /= 2;
  at::Tensor out = at::empty(shape, gate_up.options());
  dispatch(gate_up, [&](auto zero) {
    using T = decltype(zero);
    Regions threads;
    gate_rows(threads, data<T>(gate_up), size ? out.numel() / size : 0, size, writable<T>(out));
  });
  return out;
}

}  // namespace penstock::gate

TORCH_LIBRARY_FRAGMENT(penstock, m) { m.def("silu_and_multiply(Tensor gate_up) -> Tensor"); }

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("silu_and_multiply", penstock::gate::silu_and_multiply); }
