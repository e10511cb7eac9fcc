// Products, compiled once for each type of tokens.
#include "product.h"

#include "product_rounded.h"
#include "product_tiles.h"
#include "product_wide.h"

namespace penstock {

bool multiplies_integers() {
#ifdef HAS_INTEGERS
  return true;
#else
  return false;
#endif
}

bool use_pairs(bool use) {
#ifdef __AVX512BF16__
  return std::exchange(tile::uses_pairs(), use);
#else
  (void)use;
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

// Whether tiles multiply tokens of type T, which stay as they are.
template <class T>
bool takes_tiles(const Matrix& matrix) {
  return std::is_same_v<T, bf16> && is_tiled(matrix.type);
}

template <class T>
int64_t product_bytes(const Matrix& matrix, int64_t tokens) {
#ifdef HAS_INTEGERS
  if (matrix.offsets) return Tokens::bytes(tokens, matrix.inputs);
#endif
  return takes_tiles<T>(matrix) ? 0 : cell_bytes<T>(tokens, matrix.inputs);
}

template <class T>
void product(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory) {
#ifdef HAS_INTEGERS
  if (matrix.offsets) {
    const Tokens codes(tokens, matrix.inputs, memory);
    round_rows(threads, matrix, x, codes);
    return matrix.type == Numbers::INT8 ? multiply_rounded8(threads, matrix, codes, out) : multiply_rounded4(threads, matrix, codes, out);
  }
#endif
  constexpr Numbers same = std::is_same_v<T, float> ? Numbers::FLOAT : Numbers::BFLOAT16;
#ifdef HAS_TILES
  if constexpr (same == Numbers::BFLOAT16) {
    if (takes_tiles<T>(matrix))
      return matrix.type == Numbers::INT8 ? multiply_tiled<Numbers::INT8>(threads, matrix, x, tokens, out)
                                          : multiply_tiled<same>(threads, matrix, x, tokens, out);
  }
#endif
  if (matrix.type == Numbers::INT8) return multiply_wide<Numbers::INT8>(threads, matrix, x, tokens, out, memory);
  if (matrix.type == Numbers::INT4) return multiply_wide<Numbers::INT4>(threads, matrix, x, tokens, out, memory);
  multiply_wide<same>(threads, matrix, x, tokens, out, memory);
}

template <class T>
void multiply_panel(const void* panel, const T* x, int64_t stride, int64_t inputs, int64_t tokens, float* sums) {
  constexpr Numbers type = std::is_same_v<T, float> ? Numbers::FLOAT : Numbers::BFLOAT16;
  const Matrix matrix{type, panel, nullptr, nullptr, nullptr, inputs, PANEL};
  constexpr bool AS_PAIRS = true;  // to widen or to pack so few tokens takes longer than it saves
  tile::with_cell<T>(AS_PAIRS, [&](auto cell) {
    using Cell = decltype(cell);
    const auto done = [](int64_t, int64_t, int64_t, const float*) {};
    const int64_t depth = inputs / DEPTH<Cell>;
    if constexpr (ARE_CELLS<T, Cell>) {
      multiply<type, false>(matrix, 0, 1, reinterpret_cast<const Cell*>(x), stride / DEPTH<Cell>, tokens, sums, done);
    } else {
      std::vector<Cell> cells(tokens * whole_chunks(depth));
      for (int64_t first = 0; first < depth; first += CELLS) pack_block<Tiles>(x, stride, tokens, depth, first, cells.data());
      multiply<type, true>(matrix, 0, 1, static_cast<const Cell*>(cells.data()), depth, tokens, sums, done);
    }
  });
}

#define OF(T)                                                                   \
  template int64_t product_bytes<T>(const Matrix&, int64_t);                    \
  template void product(Threads&, const Matrix&, const T*, int64_t, T*, char*); \
  template void multiply_panel(const void*, const T*, int64_t, int64_t, int64_t, float*);
OF(float)
OF(bf16)
#undef OF

}  // namespace penstock
