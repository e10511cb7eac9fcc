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

// Of up to MAX_TOKENS.
template <class Of>
void multiply_some(const int32_t* panel, const int32_t* x, int64_t units, int64_t stride, int64_t tokens, typename Of::Number* sums) {
  with_constant<MAX_TOKENS>(tokens, [&](auto count) { multiply<Of, count>(panel, x, units, stride, sums); });
}

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
    alignas(64) typename Of::Number sums[TILED_TOKENS * PANEL];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t panel = item / runs, first = item % runs * TILED_TOKENS, count = std::min(tokens - first, TILED_TOKENS);
      unit.multiply<kind>({x + first * units, panels + panel * units * PANEL, sums, units * UNIT, STRIDE, STRIDE, count, PANEL,
                           units, first ? 0 : AHEAD});
      store(panel, first, count, sums);
    }
  });
}

#endif

// Call store(panel, first token, number of tokens, sums [tokens][PANEL]) for everything once; those of one panel follow
// each other. x has `units` units per token.
template <class Of, class Store>
void each_product(Threads& threads, const int32_t* panels, const int32_t* x, int64_t tokens, int64_t outputs, int64_t units,
                  const Store& store) {
#ifdef HAS_TILES
  if (is_tiled<Of>(tokens)) return each_by_tiles<Of>(threads, panels, x, tokens, outputs, units, store);
#endif
  each_tile(threads, MAX_TOKENS, tokens, outputs, units, [&](int64_t panel, int64_t first, int64_t count) {
    alignas(64) typename Of::Number sums[MAX_TOKENS * PANEL];
    multiply_some<Of>(panels + panel * units * PANEL, x + first * units, units, units, count, sums);
    store(panel, first, count, sums);
  });
}

#endif

}  // namespace penstock
