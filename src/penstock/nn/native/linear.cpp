// Linear layers over panels, in float32 and bfloat16; where the CPU lacks AVX-512, no operator answers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "panels.h"
#include "parallel.h"
#include "rows.h"

namespace penstock {

// Which matrices this CPU multiplies by: float32 and bfloat16, int8, int4.
bool has_linear(int64_t bits) {
#ifdef HAS_INTEGERS
  return bits == 4 || bits == 8 || bits == 16 || bits == 32;
#elif defined(HAS_PANELS)
  return bits == 16 || bits == 32;
#else
  return false;
#endif
}

// [..., inputs] -> [..., outputs], uninitialised.
inline at::Tensor outputs_of(const at::Tensor& x, int64_t outputs, at::ScalarType type) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = outputs;
  return at::empty(sizes, x.options().dtype(type));
}

#ifdef HAS_PANELS

template <class Of, class T>
void multiply_all(const at::Tensor& x, const at::Tensor& panels, const T* bias, at::Tensor& out) {
  const int64_t units = panels.size(1), outputs = out.size(-1), tokens = x.numel() / x.size(-1);
  const auto* xs = static_cast<const int32_t*>(x.const_data_ptr());
  const auto* ws = static_cast<const int32_t*>(panels.const_data_ptr());
  T* outs = out.mutable_data_ptr<T>();
  auto tile = [&](int64_t panel, int64_t first, auto count) {
    typename Of::Sum sums[count][2];
    multiply<Of, count>(ws + panel * units * PANEL, xs + first * units, units, sums);
    for (int half = 0; half < 2; ++half) {
      const int64_t n = panel * PANEL + half * LANES;
      const Lanes at = lanes(n, outputs);
      const Vec added = bias ? at.load(bias + n) : Vec();
      for (int t = 0; t < count; ++t) at.store(outs + (first + t) * outputs + n, added + sums[t][half]);
    }
  };
  parallel(num_tiles<MAX_TOKENS>(tokens, panels.size(0)), grain_of_tiles(units, tokens),
           [&](int64_t begin, int64_t end) { each_tile<MAX_TOKENS>(begin, end, tokens, tile); });
}

#endif

at::Tensor linear(const at::Tensor& given, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                  int64_t outputs) {
  const at::Tensor x = given.contiguous();
  at::Tensor out = outputs_of(x, outputs, x.scalar_type());
  TORCH_CHECK(x.scalar_type() == panels.scalar_type() && panels.is_contiguous() && panels.dim() == 4 &&
                  x.size(-1) == panels.size(1) * panels.size(3) && panels.size(0) == (outputs + 31) / 32,
              "linear: ", x.sizes(), " with panels ", panels.sizes(), " for ", outputs, " outputs");
  TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == outputs), "linear: bias");
#ifdef HAS_PANELS
  if (x.scalar_type() == at::kFloat)
    multiply_all<OfFloat, float>(x, panels, bias ? bias->const_data_ptr<float>() : nullptr, out);
  else
    multiply_all<OfBFloat16, bf16>(x, panels, bias ? bias->const_data_ptr<bf16>() : nullptr, out);
#else
  TORCH_CHECK(false, "linear: this CPU has no AVX-512");
#endif
  return out;
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("has_linear(int bits) -> bool", &penstock::has_linear);
  m.def("linear(Tensor x, Tensor panels, Tensor? bias, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("linear", &penstock::linear); }
