// Products of many tokens by the CPU's matrix tiles, where it has them.
//
// All of bfloat16 goes by them, single tokens too, whose time is that of reading memory either way: sums of vectors run in
// another order, and a token's result may not depend on how many come with it. So does int8 with tokens of bfloat16, whose
// panels are widened whole. Sums of integers are exact in any order, so there few tokens are left to vectors.
#pragma once

#include <vector>

#include "product_wide.h"
#include "tiles.h"

#ifdef HAS_TILES

namespace penstock {

constexpr int64_t TILED_TOKENS = 2 * tiles::ROWS;  // that a panel is multiplied by at a time

// Call store(panel, first token, number of tokens, sums [tokens][PANEL]) for everything once; x has `units` units of 4 bytes per
// token; read(panel) returns where a panel's lie, and `ahead` is how far ahead they are asked of memory.
template <tiles::Kind kind, class Sum, class Read, class Store>
void each_by_tiles(Threads& threads, const void* x, int64_t tokens, int64_t outputs, int64_t units, int64_t ahead, const Read& read,
                   const Store& store) {
  constexpr int64_t UNIT = 4, STRIDE = PANEL * UNIT;
  const int64_t runs = (tokens + TILED_TOKENS - 1) / TILED_TOKENS, num_panels = (outputs + PANEL - 1) / PANEL;
  const int64_t grain = std::max<int64_t>(1, 1024 / units);
  threads.each(num_panels, std::max<int64_t>(1, grain / runs), [&](int64_t begin, int64_t end) {
    tiles::Unit unit;
    alignas(64) Sum sums[TILED_TOKENS * PANEL];
    for (int64_t panel = begin; panel < end; ++panel) {
      const void* right = read(panel);
      for (int64_t first = 0; first < tokens; first += TILED_TOKENS) {
        const int64_t count = std::min(tokens - first, TILED_TOKENS);
        unit.multiply<kind>({static_cast<const char*>(x) + first * units * UNIT, right, sums, units * UNIT, STRIDE, STRIDE, count,
                             PANEL, units, first ? 0 : ahead});
        store(panel, first, count, sums);
      }
    }
  });
}

// out = x matrix + bias, of tokens of bfloat16 and a matrix of bfloat16 or int8.
template <Numbers type>
void multiply_tiled(Threads& threads, const Matrix& matrix, const bf16* x, int64_t tokens, bf16* out) {
  const auto store = [&](int64_t panel, int64_t first, int64_t count, const float* sums) {
    store_sums<type>(matrix, panel, first, count, sums, out);
  };
  const int64_t units = matrix.inputs / 2;
  const auto read = [&](int64_t panel) -> const void* {
    if constexpr (type == Numbers::BFLOAT16) return panel_of<type>(matrix, panel);
    thread_local std::vector<tile::Pair> room;
    room.resize(units * PANEL);
    return widen<type>(matrix, panel, 0, matrix.inputs, room.data());
  };
  each_by_tiles<tiles::PAIRS, float>(threads, x, tokens, matrix.outputs, units, type == Numbers::BFLOAT16 ? AHEAD : 0, read, store);
}

}  // namespace penstock

#endif
