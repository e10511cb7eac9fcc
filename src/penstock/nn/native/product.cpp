// Products, compiled once for each type of tokens.
#include "product.h"

#include "product_int.h"
#include "product_wide.h"

namespace penstock {

bool rounds_tokens() {
#ifdef HAS_INTEGERS
  return true;
#else
  return false;
#endif
}

bool is_tiled(Numbers type) {
#ifdef HAS_TILES
  return (type == Numbers::BFLOAT16 || type == Numbers::INT8) && tiles::usable();
#else
  (void)type;
  return false;
#endif
}

int64_t product_bytes(const Matrix& matrix, int64_t tokens) {
#ifdef HAS_INTEGERS
  if (matrix.type == Numbers::INT8 || matrix.type == Numbers::INT4) return Tokens::bytes(tokens, matrix.inputs);
#endif
  (void)matrix, (void)tokens;
  return 0;
}

template <class T>
void product(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory) {
#ifdef HAS_INTEGERS
  if (matrix.type == Numbers::INT8 || matrix.type == Numbers::INT4) {
    const Tokens codes(tokens, matrix.inputs, memory);
    round_rows(threads, x, codes, matrix.type == Numbers::INT4);
    if (matrix.type == Numbers::INT8) return multiply_int8<T>(threads, matrix, codes, out);
    return multiply_int4<T>(threads, matrix, codes, out);
  }
#else
  if (matrix.type == Numbers::INT8) return multiply_wide<Numbers::INT8>(threads, matrix, x, tokens, out);
  if (matrix.type == Numbers::INT4) return multiply_wide<Numbers::INT4>(threads, matrix, x, tokens, out);
#endif
#ifdef HAS_PANELS
  using Of = std::conditional_t<std::is_same_v<T, float>, OfFloat, OfBFloat16>;
  const auto* panels = static_cast<const int32_t*>(matrix.panels);
  const int64_t units = matrix.inputs * sizeof(T) / 4;
  each_product<Of>(threads, panels, reinterpret_cast<const int32_t*>(x), tokens, matrix.outputs, units,
                   [&](int64_t panel, int64_t first, int64_t count, const float* sums) {
                     store_tile(matrix, panel, first, count, out,
                                [&](int64_t t, int64_t n) { return Vec::load(sums + t * PANEL + n % PANEL); });
                   });
#else
  (void)memory;
  multiply_wide<std::is_same_v<T, float> ? Numbers::FLOAT : Numbers::BFLOAT16>(threads, matrix, x, tokens, out);
#endif
}

template <class T>
void multiply_panel(const void* panel, const T* x, int64_t stride, int64_t inputs, int64_t tokens, float* sums) {
#ifdef HAS_PANELS
  using Of = std::conditional_t<std::is_same_v<T, float>, OfFloat, OfBFloat16>;
  const int64_t of_unit = 4 / sizeof(T);
  multiply_some<Of>(static_cast<const int32_t*>(panel), reinterpret_cast<const int32_t*>(x), inputs / of_unit, stride / of_unit, tokens, sums);
#else
  constexpr Numbers type = std::is_same_v<T, float> ? Numbers::FLOAT : Numbers::BFLOAT16;
  multiply_widened<type>(Matrix{type, panel, nullptr, nullptr, nullptr, inputs, PANEL}, 0, x, stride, tokens, sums);
#endif
}

#define OF(T)                                                                          \
  template void product(Threads&, const Matrix&, const T*, int64_t, T*, char*);        \
  template void multiply_panel(const void*, const T*, int64_t, int64_t, int64_t, float*);
OF(float)
OF(bf16)
#undef OF

}  // namespace penstock
