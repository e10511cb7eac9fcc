// Linear layers over panels as operators.

#include "product.h"
#include "tensors.h"
#include "threads.h"

namespace penstock {

at::Tensor apply(const at::Tensor& given, const Matrix& matrix) {
  const at::Tensor x = given.contiguous();
  TORCH_CHECK(x.size(-1) == matrix.inputs, "linear: tokens ", x.sizes(), " with ", matrix.inputs, " inputs");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = matrix.outputs;
  at::Tensor out = at::empty(sizes, x.options());
  const int64_t tokens = matrix.inputs ? x.numel() / matrix.inputs : 0;
  const at::Tensor memory = at::empty({product_bytes(matrix, tokens)}, x.options().dtype(at::kByte));
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    Regions threads;
    product(threads, matrix, data<T>(x), tokens, writable<T>(out),
            static_cast<char*>(memory.mutable_data_ptr()));
  });
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, const Optional& bias, int64_t outputs) {
  TORCH_CHECK(panels.dim() == 4 && panels.scalar_type() == x.scalar_type(), "linear: tokens of ", x.scalar_type(),
              " with panels ", panels.sizes(), " of ", panels.scalar_type());
  return apply(x, matrix_of(x.scalar_type(), panels, std::nullopt, std::nullopt, bias, outputs));
}

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& panels, const at::Tensor& scales, const at::Tensor& offsets,
                       const Optional& bias, int64_t outputs) {
  TORCH_CHECK(panels.scalar_type() == at::kChar, "linear_int8: panels of ", panels.scalar_type());
  return apply(x, matrix_of(x.scalar_type(), panels, scales, offsets, bias, outputs));
}

at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& panels, const at::Tensor& scales, const Optional& bias,
                       int64_t outputs) {
  TORCH_CHECK(panels.scalar_type() == at::kByte, "linear_int4: panels of ", panels.scalar_type());
  return apply(x, matrix_of(x.scalar_type(), panels, scales, std::nullopt, bias, outputs));
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("rounds_tokens() -> bool", &penstock::rounds_tokens);
  m.def("linear(Tensor x, Tensor panels, Tensor? bias, int outputs) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor panels, Tensor scales, Tensor offsets, Tensor? bias, int outputs) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor panels, Tensor scales, Tensor? bias, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear", &penstock::linear);
  m.impl("linear_int8", &penstock::linear_int8);
  m.impl("linear_int4", &penstock::linear_int4);
}
