// The sums of products of tokens with panels, by the CPU's matrix tiles where it has them, or else by its vectors.
//
// With tiles all of bfloat16 goes by them, single tokens too, whose time is that of reading memory either way: sums of
// vectors run in another order, and a token's result may not depend on how many come with it. Sums of integers are
// exact in any order, so there few tokens are left to vectors, which do with fewer instructions.
#pragma once

#include "panels.h"
#include "tiles.h"

namespace penstock {

#ifdef HAS_PANELS
#ifdef HAS_TILES

constexpr int64_t TILED_TOKENS = 2 * tiles::ROWS;  // that a panel is multiplied by at a time
constexpr int64_t FEW_TOKENS = 3;                  // of int8, that vectors multiply as fast

template <class Of>
bool is_tiled(int64_t tokens) {
  if constexpr (std::is_same_v<Of, OfBFloat16>) return tiles::usable();
#ifdef HAS_INTEGERS
  if constexpr (std::is_same_v<Of, OfInt8>) return tokens > FEW_TOKENS && tiles::usable();
#endif
  return false;
}

template <class Of, class Store>
void each_by_tiles(Threads& threads, const int32_t* panels, const int32_t* x, int64_t tokens, int64_t outputs, int64_t units,
                   const Store& store) {
  constexpr auto kind = std::is_same_v<Of, OfBFloat16> ? tiles::PAIRS : tiles::BYTES;
  constexpr int64_t UNIT = sizeof(int32_t), STRIDE = PANEL * UNIT;
  const int64_t runs = (tokens + TILED_TOKENS - 1) / TILED_TOKENS, num_panels = (outputs + PANEL - 1) / PANEL;
  const int64_t grain = std::max<int64_t>(1, 1024 / units);
  threads.each(num_panels * runs, grain, [&](int64_t begin, int64_t end) {
    tiles::Unit unit;
    typename Of::Sum sums[TILED_TOKENS][2];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t panel = item / runs, first = item % runs * TILED_TOKENS, count = std::min(tokens - first, TILED_TOKENS);
      unit.multiply<kind>({x + first * units, panels + panel * units * PANEL, sums, units * UNIT, STRIDE, STRIDE, count, PANEL,
                           units, first ? 0 : AHEAD});
      for (int64_t t = 0; t < count; t += MAX_TOKENS)
        with_constant<MAX_TOKENS>(std::min(count - t, MAX_TOKENS), [&](auto part) { store(panel, first + t, part, sums + t); });
    }
  });
}

#endif

// Call store(panel, first token, number of tokens as a constant, sums [tokens][2]) for everything once; those of one panel
// follow each other. x has `units` units per token.
template <class Of, class Store>
void each_product(Threads& threads, const int32_t* panels, const int32_t* x, int64_t tokens, int64_t outputs, int64_t units,
                  const Store& store) {
#ifdef HAS_TILES
  if (is_tiled<Of>(tokens)) return each_by_tiles<Of>(threads, panels, x, tokens, outputs, units, store);
#endif
  each_tile<MAX_TOKENS>(threads, tokens, outputs, units, [&](int64_t panel, int64_t first, auto count) {
    typename Of::Sum sums[count][2];
    multiply<Of, count>(panels + panel * units * PANEL, x + first * units, units, units, sums);
    store(panel, first, count, sums);
  });
}

#endif

}  // namespace penstock
