// The product of tokens with a linear layer's matrix, of whatever type that is.
#pragma once

#include "product_int.h"

namespace penstock {

#ifdef HAS_PANELS

template <class Of, class T>
void multiply_float(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out) {
  const int64_t outputs = matrix.outputs, units = matrix.inputs * sizeof(T) / 4;
  const auto* xs = reinterpret_cast<const int32_t*>(x);
  const auto* panels = static_cast<const int32_t*>(matrix.panels);
  const auto* bias = static_cast<const T*>(matrix.bias);
  const auto store = [&](int64_t panel, int64_t first, auto count, const auto* sums) {
    for (int half = 0; half < 2; ++half) {
      const int64_t n = panel * PANEL + half * LANES;
      const Lanes at = lanes(n, outputs);
      const Vec added = bias ? at.load(bias + n) : Vec();
      for (int t = 0; t < count; ++t) at.store(out + (first + t) * outputs + n, added + sums[t][half]);
    }
  };
  each_product<Of>(threads, panels, xs, tokens, outputs, units, store);
}

#endif

// Bytes that a product needs to round its tokens in.
inline int64_t product_bytes(const Matrix& matrix, int64_t tokens) {
#ifdef HAS_INTEGERS
  if (matrix.type == at::kChar || matrix.type == at::kByte) return Tokens::bytes(tokens, matrix.inputs);
#endif
  return 0;
}

// out = x matrix + bias; x is [tokens, inputs], out [tokens, outputs], memory has `product_bytes`.
template <class T>
void product(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory) {
#ifdef HAS_INTEGERS
  if (matrix.type == at::kChar || matrix.type == at::kByte) {
    const Tokens codes(tokens, matrix.inputs, memory);
    round_rows(threads, x, codes, matrix.type == at::kByte);
    if (matrix.type == at::kChar) return multiply_int8<T>(threads, matrix, codes, out);
    return multiply_int4<T>(threads, matrix, codes, out);
  }
#endif
#ifdef HAS_PANELS
  using Of = std::conditional_t<std::is_same_v<T, float>, OfFloat, OfBFloat16>;
  multiply_float<Of>(threads, matrix, x, tokens, out);
#endif
}

}  // namespace penstock
