// Linear layers over panels as an operator.

#include "operators.h"
#include "product.h"
#include "threads.h"

namespace penstock {

at::Tensor linear(const at::Tensor& given, const at::Tensor& panels, const Optional& scales, const Optional& offsets,
                  const Optional& bias, int64_t outputs) {
  const Matrix matrix = matrix_of(given.scalar_type(), panels, scales, offsets, bias, outputs);
  const at::Tensor x = given.contiguous();
  TORCH_CHECK(x.size(-1) == matrix.inputs, "linear: tokens ", x.sizes(), " with ", matrix.inputs, " inputs");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = matrix.outputs;
  at::Tensor out = at::empty(sizes, x.options());
  const int64_t tokens = matrix.inputs ? x.numel() / matrix.inputs : 0;
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const at::Tensor memory = at::empty({product_bytes<T>(matrix, tokens)}, x.options().dtype(at::kByte));
    Regions threads;
    product(threads, matrix, data<T>(x), tokens, writable<T>(out), static_cast<char*>(memory.mutable_data_ptr()));
  });
  return out;
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("multiplies_integers() -> bool", &penstock::multiplies_integers);
  m.def("use_pairs(bool use) -> bool", &penstock::use_pairs);
  m.def("linear(Tensor x, Tensor panels, Tensor? scales, Tensor? offsets, Tensor? bias, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("linear", &penstock::linear); }
