// The activation of a feed-forward layer as an operator; see gate.h.

#include "gate.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::gate {

at::Tensor activate(const at::Tensor& gate_up, int64_t activation, bool is_gated) {
  TORCH_CHECK(gate_up.is_contiguous() && (!is_gated || gate_up.size(-1) % 2 == 0), "activate: shape ", gate_up.sizes());
  TORCH_CHECK(activation >= 0 && activation < ACTIVATIONS, "activate: no activation ", activation);
  std::vector<int64_t> shape = gate_up.sizes().vec();
  if (is_gated) shape.back() /= 2;
  const int64_t size = shape.back();
  at::Tensor out = at::empty(shape, gate_up.options());
  dispatch(gate_up, [&](auto zero) {
    using T = decltype(zero);
    Regions threads;
    activate_rows(threads, Activation(activation), data<T>(gate_up), size ? out.numel() / size : 0, size, is_gated, writable<T>(out));
  });
  return out;
}

}  // namespace penstock::gate

TORCH_LIBRARY_FRAGMENT(penstock, m) { m.def("activate(Tensor gate_up, int activation, bool is_gated) -> Tensor"); }

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("activate", penstock::gate::activate); }
