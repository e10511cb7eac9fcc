// A matrix as it lies in memory: in the order in which products read it.
//
// It is cut into panels of 32 outputs. A panel holds, input after input, one unit for each of its outputs: one float32, two
// bfloat16 or four int8 in 4 bytes; of int4 four inputs of two outputs, r and r + 16. A run of tokens
// reads every byte once (product_wide.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "rows.h"
#include "threads.h"

namespace penstock {

constexpr int64_t PANEL = 32;         // outputs of a panel
constexpr int PARTS = PANEL / LANES;  // vectors of an input of a panel
constexpr int64_t MAX_TOKENS = 14;    // that an adapter's panel is multiplied by at a time
constexpr int64_t AHEAD = 8192;       // bytes: far enough to hide memory, near enough to stay in the first cache

// The outputs of a register, from `first`, that the matrix has: its last panel is filled up.
inline Lanes lanes(int64_t first, int64_t outputs) {
  return Lanes{static_cast<int>(std::clamp<int64_t>(outputs - first, 0, LANES))};
}

// Some sizes of tiles, in falling order, down to 1: a kernel is compiled for each.
template <int... sizes>
struct Sizes {
  static constexpr int64_t MOST = std::max({sizes...});

  // Call body(first, size) for tiles that make up `count`, the size as a constant.
  template <class Body>
  static void each(int64_t count, const Body& body) {
    for (int64_t first = 0; first < count;) {
      const int64_t left = count - first;
      (void)((left >= sizes && (body(first, std::integral_constant<int, sizes>{}), first += sizes, true)) || ...);
    }
  }
};

// A thread that has to be woken gets tiles of at least half a microsecond's work in sum: waking it costs about as much.
inline int64_t grain_of_tiles(int64_t tokens, int64_t inputs) {
  return std::max<int64_t>(1, 16384 / (inputs * std::clamp<int64_t>(tokens, 1, MAX_TOKENS)));
}

// Call tile(panel, first token, number of tokens) for all tiles of up to `most` tokens, those of a panel one after the other.
template <class Tile>
void each_tile(Threads& threads, int64_t most, int64_t tokens, int64_t outputs, int64_t inputs, const Tile& tile) {
  const int64_t runs = (tokens + most - 1) / most, panels = (outputs + PANEL - 1) / PANEL;
  threads.each(panels * runs, grain_of_tiles(tokens, inputs), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t run = item % runs, first = tokens * run / runs;
      tile(item / runs, first, tokens * (run + 1) / runs - first);
    }
  });
}

// Fetch a line ahead. On AMD a line that is read once passes the second cache by, so that it does not drive out what the
// step needs besides the matrix. On Intel that hint halves the speed of reading: all matrices of a 134M model, one token,
// 18.0 ms with it and 8.6 without (Emerald Rapids, two cores, 2026-11-23).
#if defined(__znver4__) || defined(__znver5__)
constexpr bool BYPASSES_CACHE = true;
#else
constexpr bool BYPASSES_CACHE = false;
#endif

template <bool is_read_once>
[[gnu::always_inline]] inline void prefetch(const void* line) {
  __builtin_prefetch(line, 0, BYPASSES_CACHE && is_read_once ? 0 : 3);
}

}  // namespace penstock
