// Products of tokens with panels of any numbers in float32, for CPUs that multiply no smaller ones: panels are widened a
// block of inputs at a time, once for up to 48 tokens, and multiplied from the first cache.
//
// Of bfloat16 that is exact, and tokens stay as they are whatever the matrix: codes of 8 and 4 bits are widened likewise. So
// fewer bits read less memory, and cost no more arithmetic than float32 where tokens are many. An output's sum runs over its
// inputs in one order, in one register, whatever the number of tokens: the result of a token does not depend on its
// neighbours.
#pragma once

#include "matrix.h"
#include "panels.h"

namespace penstock {

constexpr int64_t BLOCK = 64;         // inputs: 8 KiB of a widened panel
constexpr int64_t WIDE_TOKENS = 48;   // of a widened block
constexpr int PARTS = PANEL / LANES;  // vectors of an input of a panel
constexpr int TILE_TOKENS = REGISTERS == 32 ? 12 : 6;

static_assert(BLOCK % GROUP == 0);

[[gnu::always_inline]] inline Vec lower(Ints x) { return (Floats)(x << 16); }
[[gnu::always_inline]] inline Vec upper(Ints x) { return (Floats)(x & ~0xffff); }

// Inputs [first, first + count) of a panel as float32, [count][PANEL]; where they lie, or in `room`.
template <Numbers type>
const float* widen(const Matrix& matrix, int64_t panel, int64_t first, int64_t count, float* room) {
  if constexpr (type == Numbers::FLOAT) {
    return static_cast<const float*>(matrix.panels) + (panel * matrix.inputs + first) * PANEL;
  } else if constexpr (type == Numbers::BFLOAT16) {
    const auto* from = static_cast<const int32_t*>(matrix.panels) + (panel * matrix.inputs + first) / 2 * PANEL;
    for (int64_t i = 0; i < count; i += 2, from += PANEL)
      for (int j = 0; j < PANEL; j += LANES) {
        const Ints both = load_as<Ints>(from + j);
        lower(both).store(room + i * PANEL + j);
        upper(both).store(room + (i + 1) * PANEL + j);
      }
  } else if constexpr (type == Numbers::INT8) {
    const auto* from = static_cast<const int32_t*>(matrix.panels) + (panel * matrix.inputs + first) / 4 * PANEL;
    for (int64_t i = 0; i < count; i += 4, from += PANEL)
      for (int j = 0; j < PANEL; j += LANES) {
        const Ints four = load_as<Ints>(from + j);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) Vec::of((four << (24 - 8 * k)) >> 24).store(room + (i + k) * PANEL + j);
      }
  } else {  // four inputs of outputs r and r + 16 in 4 bytes
    const auto* from = static_cast<const int32_t*>(matrix.panels) + (panel * matrix.inputs + first) / 8 * PANEL;
    const auto* scales = static_cast<const bf16*>(matrix.scales) + (panel * matrix.inputs + first) / GROUP * PANEL;
    for (int64_t i = 0; i < count; i += 4, from += PANEL / 2) {
      const bf16* scale = scales + i / GROUP * PANEL;
      for (int j = 0; j < PANEL / 2; j += LANES) {
        const Ints eight = load_as<Ints>(from + j);
        const Vec low = Vec::load(scale + j), high = Vec::load(scale + PANEL / 2 + j);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          float* to = room + (i + k) * PANEL + j;
          (Vec::of(((eight >> 8 * k) & 15) - 8) * low).store(to);
          (Vec::of(((eight >> (8 * k + 4)) & 15) - 8) * high).store(to + PANEL / 2);
        }
      }
    }
  }
  return room;
}

// sums [tokens][PANEL] += tokens x a widened block; each sum is in one register meanwhile.
template <int tokens>
void add_block(const float* panel, const float* x, int64_t stride, int64_t inputs, float* sums) {
  constexpr int WIDE = tokens <= TILE_TOKENS / 2 ? std::min(PARTS, 4) : 2;
  for (int part = 0; part < PANEL; part += WIDE * LANES) {
    Vec own[tokens][WIDE];
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) own[t][j] = Vec::load(sums + t * PANEL + part + j * LANES);
    for (int64_t i = 0; i < inputs; ++i) {
      Vec right[WIDE];
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) right[j] = Vec::load(panel + i * PANEL + part + j * LANES);
#pragma GCC unroll 12
      for (int t = 0; t < tokens; ++t) {
        const Vec left(x[t * stride + i]);
#pragma GCC unroll 4
        for (int j = 0; j < WIDE; ++j) own[t][j] = Vec::fma(left, right[j], own[t][j]);
      }
    }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) own[t][j].store(sums + t * PANEL + part + j * LANES);
  }
}

// sums [tokens][PANEL] = tokens x panel, of up to WIDE_TOKENS; x has `stride` numbers per token.
template <Numbers type, class T>
void multiply_widened(const Matrix& matrix, int64_t panel, const T* x, int64_t stride, int64_t tokens, float* sums) {
  alignas(64) float right[BLOCK * PANEL], left[WIDE_TOKENS * BLOCK];
  std::fill_n(sums, tokens * PANEL, 0.0f);
  for (int64_t first = 0; first < matrix.inputs; first += BLOCK) {
    const int64_t count = std::min(BLOCK, matrix.inputs - first);
    const float* block = widen<type>(matrix, panel, first, count, right);
    for (int64_t t = 0; t < tokens; ++t)
      each_lane(count, [&](int64_t i, auto at) { at.store(left + t * BLOCK + i, at.load(x + t * stride + first + i)); });
    for (int64_t t = 0; t < tokens; t += TILE_TOKENS)
      with_constant<TILE_TOKENS>(std::min<int64_t>(tokens - t, TILE_TOKENS), [&](auto number) {
        add_block<number>(block, left + t * BLOCK, BLOCK, count, sums + t * PANEL);
      });
  }
}

// Store a tile: value(token of the tile, output) + bias.
template <class T, class Value>
void store_tile(const Matrix& matrix, int64_t panel, int64_t first, int64_t count, T* out, const Value& value) {
  const auto* bias = static_cast<const T*>(matrix.bias);
  for (int64_t n = panel * PANEL; n < std::min((panel + 1) * PANEL, matrix.outputs); n += LANES) {
    const Lanes at = lanes(n, matrix.outputs);
    const Vec added = bias ? at.load(bias + n) : Vec();
    for (int64_t t = 0; t < count; ++t) at.store(out + (first + t) * matrix.outputs + n, value(t, n) + added);
  }
}

// out = x matrix + bias.
template <Numbers type, class T>
void multiply_wide(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out) {
  each_tile(threads, WIDE_TOKENS, tokens, matrix.outputs, matrix.inputs, [&](int64_t panel, int64_t first, int64_t count) {
    alignas(64) float sums[WIDE_TOKENS * PANEL];
    multiply_widened<type>(matrix, panel, x + first * matrix.inputs, matrix.inputs, count, sums);
    store_tile(matrix, panel, first, count, out, [&](int64_t t, int64_t n) {
      const Vec sum = Vec::load(sums + t * PANEL + n % PANEL);
      return type == Numbers::INT8 ? sum * Vec::load(static_cast<const float*>(matrix.scales) + n) : sum;
    });
  });
}

}  // namespace penstock
