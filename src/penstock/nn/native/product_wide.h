// Products of tokens with panels of any numbers. What tokens and a panel hold is widened to what the CPU multiplies, a
// `Cell` (tile.h): a float32, or two bfloat16 where tokens are bfloat16 and the CPU multiplies pairs faster.
//
//   up to FEW tokens    cells are widened in registers, and multiplied at once: the time is that of reading memory
//   more tokens         a block of a panel is widened once for up to MOST_TOKENS, and multiplied from the first cache
//
// Each tile prefetches its share of the next block, at least half of it in all. A tile's sums are stored as soon as they are
// complete, while other tiles are still multiplied.
//
// Codes are exact as float32 and as bfloat16, and sums are float32: those of int4 over one group of inputs at a time. Scales
// are applied to sums. So fewer bits read less memory, and cost little more arithmetic: int4 one instruction in sixteen or in
// thirty-two. An output's sum runs over its inputs in one order whatever the number of tokens: a token's result does not
// depend on its neighbours.
#pragma once

#include "matrix.h"
#include "panels.h"
#include "tile.h"

namespace penstock {

template <class Cell>
using LaneOf = typename tile::Product<Cell>::Lane;

template <class Cell>
constexpr int64_t DEPTH = tile::Product<Cell>::DEPTH;  // inputs of a cell

constexpr int64_t LEAST_OF_RUN = 144, MOST_TOKENS = 264;  // per run: a widened block is multiplied with one run at a time
constexpr int64_t RUN_BYTES = 1 << 20;                    // most of a run longer than LEAST_OF_RUN: it fits the L2 cache along with some panels
constexpr int64_t CHUNK = 16;                             // cells of a token that lie together in packed tokens: 64 bytes
constexpr int64_t FEW = REGISTERS == 32 ? 4 : 2;
using Tiles = std::conditional_t<REGISTERS == 32, Sizes<12, 8, 4, 2, 1>, Sizes<6, 4, 2, 1>>;
using GroupTiles = Sizes<6, 4, 2, 1>;
using FewTiles = std::conditional_t<REGISTERS == 32, Sizes<4, 3, 2, 1>, Sizes<2, 1>>;

template <Numbers type>
constexpr int64_t INPUTS = type == Numbers::FLOAT ? 1 : type == Numbers::BFLOAT16 ? 2 : 4;  // of a unit
template <Numbers type>
constexpr int64_t BYTES = type == Numbers::INT4 ? 2 * PANEL : 4 * PANEL;  // of a unit of all outputs of a panel
template <class Cell>
constexpr int64_t BLOCK = 128 * DEPTH<Cell>;  // inputs: 16 KiB of cells
constexpr float UNIT_8 = 0x1p-24f;         // of the codes of 8 bits, which are widened as the highest byte

template <Numbers type>
const char* panel_of(const Matrix& matrix, int64_t panel) {
  return static_cast<const char*>(matrix.panels) + panel * (matrix.inputs / INPUTS<type>) * BYTES<type>;
}

#ifdef __AVX512BF16__
// bfloat16 of codes 0 to 15, which stand for -8 to 7, four inputs of 16 outputs: pairs of the first two, and of the last.
[[gnu::always_inline]] inline void to_pairs(__m512i codes, __m512i& first, __m512i& last) {
  const __m512i low = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -32, -64, -96, -128, 64, 0, -128, 0, -128, 0, 64, -128, -96, -64, -32));
  const __m512i high = _mm512_broadcast_i32x4(_mm_setr_epi8(-63, -64, -64, -64, -64, -64, -64, -65, 0, 63, 64, 64, 64, 64, 64, 64));
  const __m512i of_low = _mm512_shuffle_epi8(low, codes), of_high = _mm512_shuffle_epi8(high, codes);
  first = _mm512_unpacklo_epi8(of_low, of_high), last = _mm512_unpackhi_epi8(of_low, of_high);
}
#endif

// The number, in units of UNIT_FLOAT_4, that the i-th 4 bits of each stand for.
#ifdef __AVX512F__
constexpr float UNIT_FLOAT_4 = 1.0f;
template <int i>
[[gnu::always_inline]] inline Vec of_code(Ints codes) {
  const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)codes, 4 * i), numbers);
}
#else
constexpr float UNIT_FLOAT_4 = 0x1p-28f;
template <int i>
[[gnu::always_inline]] inline Vec of_code(Ints codes) {
  const Ints top = as_top_byte<i / 2>(codes ^ static_cast<int32_t>(0x88888888));  // of two's complement
  return Vec::of(i % 2 ? top & static_cast<int32_t>(0xf0000000) : top << 4);
}
#endif

// The scales of a group of a panel of int4, of codes as they are widened.
template <class Cell>
struct GroupScales {
  alignas(64) float of[PANEL];
  GroupScales() = default;
  GroupScales(const Matrix& matrix, int64_t panel, int64_t group) {
    const auto* from = static_cast<const bf16*>(matrix.scales) + (panel * matrix.groups() + group) * PANEL;
    for (int64_t n = 0; n < PANEL; n += LANES) (Vec::load(from + n) * Vec(DEPTH<Cell> == 1 ? UNIT_FLOAT_4 : 1.0f)).store(of + n);
  }
  Vec part(int part) const { return Vec::load(of + part * LANES); }
};

// Call body(cell, part of the panel, its lane) for one unit, the cells of a part in their order.
template <Numbers type, class Cell, class Body>
[[gnu::always_inline]] inline void each_cell(const char* unit, const Body& body) {
  // of four numbers, whose lower halves are 0 where they make pairs
  const auto give = [&](int part, Ints a, Ints b, Ints c, Ints d) __attribute__((always_inline)) {
    if constexpr (DEPTH<Cell> == 1) {
      body(0, part, Vec::of(a)), body(1, part, Vec::of(b)), body(2, part, Vec::of(c)), body(3, part, Vec::of(d));
    } else {
      const auto pair = [](Ints low, Ints high) __attribute__((always_inline)) {
        return (LaneOf<Cell>)(((Unsigned)Vec::of(low).v >> 16) | (Unsigned)Vec::of(high).v);
      };
      body(0, part, pair(a, b)), body(1, part, pair(c, d));
    }
  };
  if constexpr (type == Numbers::FLOAT) {
    for (int part = 0; part < PARTS; ++part) body(0, part, Vec::load(reinterpret_cast<const float*>(unit) + part * LANES));
  } else if constexpr (type == Numbers::BFLOAT16) {
    for (int part = 0; part < PARTS; ++part) {
      const Ints both = load_as<Ints>(unit + part * sizeof(Ints));
      if constexpr (DEPTH<Cell> == 2) {
        body(0, part, (LaneOf<Cell>)both);
      } else {
        body(0, part, Vec((Floats)(both << 16)));
        body(1, part, Vec((Floats)(both & ~0xffff)));
      }
    }
  } else if constexpr (type == Numbers::INT8) {
    for (int part = 0; part < PARTS; ++part) {
      const Ints codes = load_as<Ints>(unit + part * sizeof(Ints));
      give(part, as_top_byte<0>(codes), as_top_byte<1>(codes), as_top_byte<2>(codes), as_top_byte<3>(codes));
    }
  } else if constexpr (DEPTH<Cell> == 2) {
#ifdef __AVX512BF16__
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i half = _mm512_set1_epi8(15), both = _mm512_shuffle_epi8(_mm512_loadu_si512(unit), order);
    __m512i first, last;
    to_pairs(_mm512_and_si512(both, half), first, last);
    body(0, 0, first), body(1, 0, last);
    to_pairs(_mm512_and_si512(_mm512_srli_epi16(both, 4), half), first, last);
    body(0, 1, first), body(1, 1, last);
#endif
  } else {
    for (int part = 0; part < PARTS / 2; ++part) {
      const Ints codes = load_as<Ints>(unit + part * sizeof(Ints));
      body(0, part, of_code<0>(codes)), body(1, part, of_code<2>(codes));
      body(2, part, of_code<4>(codes)), body(3, part, of_code<6>(codes));
      body(0, part + PARTS / 2, of_code<1>(codes)), body(1, part + PARTS / 2, of_code<3>(codes));
      body(2, part + PARTS / 2, of_code<5>(codes)), body(3, part + PARTS / 2, of_code<7>(codes));
    }
  }
}

// sums [tokens][PANEL] = tokens x panel, of up to FEW; x has `stride` cells per token.
template <Numbers type, int tokens, class Cell>
void multiply_few(const Matrix& matrix, int64_t panel, const Cell* x, int64_t stride, float* sums) {
  constexpr int64_t CELLS = INPUTS<type> / DEPTH<Cell>;
  constexpr bool HAS_GROUPS = type == Numbers::INT4;
  const int64_t units = matrix.inputs / INPUTS<type>, of_run = HAS_GROUPS ? GROUP / INPUTS<type> : units;
  const char* unit = panel_of<type>(matrix, panel);
  Vec total[tokens][PARTS], own[tokens][PARTS];
  for (int64_t run = 0, u = 0; u < units; ++run) {
    for (const int64_t end = std::min(units, u + of_run); u < end; ++u, unit += BYTES<type>) {
      for (int64_t line = 0; line < BYTES<type>; line += 64) prefetch<true>(unit + AHEAD + line);
      each_cell<type, Cell>(unit, [&](int k, int part, auto lane) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int t = 0; t < tokens; ++t)
          own[t][part] = tile::Product<Cell>::add(tile::Product<Cell>::broadcast(x + t * stride + u * CELLS + k), lane, own[t][part]);
      });
    }
    if constexpr (HAS_GROUPS) {
      const GroupScales<Cell> scales(matrix, panel, run);
      for (int t = 0; t < tokens; ++t)
        for (int part = 0; part < PARTS; ++part)
          total[t][part] = Vec::fma(own[t][part], scales.part(part), total[t][part]), own[t][part] = Vec();
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int part = 0; part < PARTS; ++part)
      (HAS_GROUPS ? total : own)[t][part].store(sums + t * PANEL + part * LANES);
}

// Memory that a tile prefetches while it multiplies a block: `step` bytes for each cell of depth.
struct Ahead {
  const char* from;
  int64_t step;
};

// Whether numbers are cells as they lie.
template <class T, class Cell>
constexpr bool ARE_CELLS = sizeof(T) * DEPTH<Cell> == sizeof(Cell);

// Whether many tokens are copied in the order in which tiles read them: bfloat16 becomes float32 anyway. Copying
// float32 tokens pays only with int4. Pairs are never copied.
template <class T, Numbers type, class Cell>
constexpr bool ARE_PACKED = DEPTH<Cell> == 1 && (type == Numbers::INT4 || !ARE_CELLS<T, Cell>);

// sums [tokens][PANEL] += tokens x a widened block; each sum is in one register meanwhile. Tokens are packed, or rows that
// are `row` cells apart.
template <int tokens, bool are_packed, class Cell>
void add_block(const Cell* block, const Cell* x, int64_t row, int64_t depth, Ahead ahead, float* sums) {
  using Product = tile::Product<Cell>;
  constexpr int WIDE = tokens <= 3 ? std::min(PARTS, 4) : 2;
  const int64_t stride = are_packed ? CHUNK : row;
  for (int begin = 0; begin < PANEL; begin += WIDE * LANES) {
    Vec own[tokens][WIDE];
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) own[t][j] = Vec::load(sums + t * PANEL + begin + j * LANES);
    const Cell* cells = x;
    for (int64_t k = 0; k < depth; cells += (tokens - 1) * CHUNK)
      for (const int64_t end = are_packed ? std::min(depth, k + CHUNK) : depth; k < end; ++k, ++cells) {
        prefetch<false>(ahead.from + k * ahead.step + begin * ahead.step / PANEL);
        LaneOf<Cell> right[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < WIDE; ++j) right[j] = Product::load(block + k * PANEL + begin + j * LANES);
#pragma GCC unroll 12
        for (int t = 0; t < tokens; ++t) {
          const auto left = Product::broadcast(cells + t * stride);
#pragma GCC unroll 4
          for (int j = 0; j < WIDE; ++j) own[t][j] = Product::add(left, right[j], own[t][j]);
        }
      }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) own[t][j].store(sums + t * PANEL + begin + j * LANES);
  }
}

// The same of int4, whose scales are applied to the sums of groups.
template <int tokens, class Cell>
void add_groups(const Cell* block, const Cell* x, int64_t row, int64_t depth, const GroupScales<Cell>* scales, Ahead ahead, float* sums) {
  using Product = tile::Product<Cell>;
  constexpr bool are_packed = DEPTH<Cell> == 1;
  constexpr int64_t OF_CHUNK = are_packed ? CHUNK : GROUP, SKIPPED = are_packed ? (tokens - 1) * CHUNK : 0;
  constexpr int WIDE = std::min(PARTS, 2);
  const int64_t stride = are_packed ? CHUNK : row;
  for (int part = 0; part < PARTS; part += WIDE) {
    Vec total[tokens][WIDE];
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t)
      for (int j = 0; j < WIDE; ++j) total[t][j] = Vec::load(sums + t * PANEL + (part + j) * LANES);
    const GroupScales<Cell>* scale = scales;
    const Cell* cells = x;
    for (int64_t k = 0; k < depth; ++scale) {
      Vec own[tokens][WIDE];
      for (const int64_t past = std::min(depth, k + GROUP / DEPTH<Cell>); k < past; cells += SKIPPED)
        for (const int64_t end = std::min(past, k + OF_CHUNK); k < end; ++k, ++cells) {
          LaneOf<Cell> right[WIDE];
          for (int j = 0; j < WIDE; ++j) right[j] = Product::load(block + k * PANEL + (part + j) * LANES);
          prefetch<false>(ahead.from + k * ahead.step);
#pragma GCC unroll 6
          for (int t = 0; t < tokens; ++t) {
            const auto left = Product::broadcast(cells + t * stride);
            for (int j = 0; j < WIDE; ++j) own[t][j] = Product::add(left, right[j], own[t][j]);
          }
        }
#pragma GCC unroll 6
      for (int t = 0; t < tokens; ++t)
        for (int j = 0; j < WIDE; ++j) total[t][j] = Vec::fma(own[t][j], scale->part(part + j), total[t][j]);
    }
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t)
      for (int j = 0; j < WIDE; ++j) total[t][j].store(sums + t * PANEL + (part + j) * LANES);
  }
}

// Inputs [first, first + count) of a panel as cells, [count][PANEL]; where they lie, or in `room`.
template <Numbers type, class Cell>
const Cell* widen(const Matrix& matrix, int64_t panel, int64_t first, int64_t count, Cell* room) {
  const char* unit = panel_of<type>(matrix, panel) + first / INPUTS<type> * BYTES<type>;
  const int64_t units = count / INPUTS<type>;
  if constexpr (INPUTS<type> == DEPTH<Cell>) return reinterpret_cast<const Cell*>(unit);
  Cell* to = room;
  for (int64_t u = 0; u < units; ++u, unit += BYTES<type>, to += INPUTS<type> / DEPTH<Cell> * PANEL) {
    each_cell<type, Cell>(unit, [&](int k, int part, auto lane) __attribute__((always_inline)) {
      std::memcpy(to + k * PANEL + part * LANES, &lane, sizeof lane);
    });
  }
  return room;
}

constexpr int64_t whole_chunks(int64_t cells) { return (cells + CHUNK - 1) / CHUNK * CHUNK; }

// sums [tokens][PANEL] = tokens x panel, of up to MOST_TOKENS. Calls done(first token, count) for each tile: its sums are
// in the first cache.
template <class T, Numbers type, class Cell>
void multiply(const Matrix& matrix, int64_t panel, const Cell* x, int64_t stride, int64_t tokens, float* sums, Ref<void(int64_t, int64_t)> done) {
  if (tokens <= FEW)
    return FewTiles::each(tokens, [&](int64_t t, auto size) {
      multiply_few<type, size>(matrix, panel, x + t * stride, stride, sums + t * PANEL);
      done(t, size);
    });
  constexpr int64_t SIZE = BLOCK<Cell>;
  alignas(64) Cell room[SIZE / DEPTH<Cell> * PANEL];
  std::fill_n(sums, tokens * PANEL, 0.0f);
  for (int64_t first = 0; first < matrix.inputs; first += SIZE) {
    const int64_t count = std::min(SIZE, matrix.inputs - first), cell = first / DEPTH<Cell>, depth = count / DEPTH<Cell>;
    const bool is_last = first + count == matrix.inputs;
    const Cell* block = widen<type>(matrix, panel, first, count, room);
    constexpr int64_t STEP = BYTES<type> * DEPTH<Cell> / INPUTS<type>;
    const char* from = panel_of<type>(matrix, panel) + cell * STEP + std::max(AHEAD, SIZE / DEPTH<Cell> * STEP);
    constexpr bool PACKED = ARE_PACKED<T, type, Cell>;
    const auto left = [&](int64_t t) { return PACKED ? x + cell * tokens + t * whole_chunks(depth) : x + t * stride + cell; };
    const auto ahead = [&](int64_t t, int64_t size) { return Ahead{from + depth * STEP * t / tokens, STEP * size / tokens}; };
    if constexpr (type == Numbers::INT4) {
      GroupScales<Cell> scales[SIZE / GROUP];
      for (int64_t i = 0; i < count; i += GROUP) scales[i / GROUP] = {matrix, panel, (first + i) / GROUP};
      GroupTiles::each(tokens, [&](int64_t t, auto size) {
        add_groups<size>(block, left(t), stride, depth, scales, ahead(t, size), sums + t * PANEL);
        if (is_last) done(t, size);
      });
    } else {
      Tiles::each(tokens, [&](int64_t t, auto size) {
        add_block<size, PACKED>(block, left(t), stride, depth, ahead(t, size), sums + t * PANEL);
        if (is_last) done(t, size);
      });
    }
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

// Store a tile of sums of widened numbers.
template <Numbers type, class T>
void store_sums(const Matrix& matrix, int64_t panel, int64_t first, int64_t count, const float* sums, T* out) {
  store_tile(matrix, panel, first, count, out, [&](int64_t t, int64_t n) {
    const Vec sum = Vec::load(sums + t * PANEL + n % PANEL);
    if constexpr (type == Numbers::INT8)
      return sum * (Vec::load(static_cast<const float*>(matrix.scales) + n) * Vec(UNIT_8));
    return sum;
  });
}

// Tokens of a run of many: fewer where a token is long, so that a run stays in the second cache for several panels.
inline int64_t tokens_of_run(int64_t inputs) {
  return std::clamp<int64_t>(RUN_BYTES / (4 * std::max<int64_t>(inputs, 1)) / 12 * 12, LEAST_OF_RUN, MOST_TOKENS);
}

// Bytes of the tokens as cells; 0: they are cells as they lie.
template <class T>
int64_t cell_bytes(Numbers type, int64_t tokens, int64_t inputs) {
  return tile::with_cell<T>(tile::uses_pairs(), [&](auto cell) -> int64_t {
    using Cell = decltype(cell);
    const bool as_they_lie = type != Numbers::INT4 || DEPTH<Cell> == 2 || tokens <= FEW;
    return ARE_CELLS<T, Cell> && as_they_lie ? 0 : tokens * whole_chunks(inputs) * sizeof cell;
  });
}

// Copy tokens of a run, rows that are `stride` numbers apart, as float32: the block that begins with input `first`. Few
// tokens stay rows; others come in the order in which tiles read them: tile by tile, a chunk of each token.
template <class TileSizes, class T>
void pack_block(const T* x, int64_t stride, int64_t tokens, int64_t inputs, int64_t first, float* to) {
  const int64_t past = std::min(first + BLOCK<float>, inputs);
  const auto copy = [&](int64_t row, int64_t begin, int64_t end, float* out) {
    each_lane(end - begin, [&](int64_t i, auto at) { at.store(out + i, at.load(x + row * stride + begin + i)); });
  };
  if (tokens <= FEW) {
    for (int64_t row = 0; row < tokens; ++row) copy(row, first, past, to + row * inputs + first);
    return;
  }
  to += first * tokens;
  TileSizes::each(tokens, [&](int64_t t, int64_t size) {
    for (int64_t begin = first; begin < past; begin += CHUNK)
      for (int64_t row = t; row < t + size; ++row, to += CHUNK) copy(row, begin, std::min(begin + CHUNK, past), to);
  });
}

// Tokens as cells: as they lie, or copied to `memory`.
template <Numbers type, class Cell, class T>
const Cell* cells_of(Threads& threads, const T* x, int64_t tokens, int64_t inputs, char* memory) {
  if constexpr (ARE_CELLS<T, Cell>)
    if (!ARE_PACKED<T, type, Cell> || tokens <= FEW) return reinterpret_cast<const Cell*>(x);
  if constexpr (ARE_PACKED<T, type, Cell>) {
    using TileSizes = std::conditional_t<type == Numbers::INT4, GroupTiles, Tiles>;
    const int64_t most = tokens_of_run(inputs), runs = (tokens + most - 1) / most, blocks = (inputs + BLOCK<Cell> - 1) / BLOCK<Cell>;
    threads.each(runs * blocks, grain_of(BLOCK<Cell> * std::clamp<int64_t>(tokens, 1, most)), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t run = item / blocks, first = tokens * run / runs, count = tokens * (run + 1) / runs - first;
        float* to = reinterpret_cast<float*>(memory) + first * whole_chunks(inputs);
        pack_block<TileSizes>(x + first * inputs, inputs, count, inputs, item % blocks * BLOCK<Cell>, to);
      }
    });
  }
  return reinterpret_cast<const Cell*>(memory);
}

// out = x matrix + bias; memory has `cell_bytes`.
template <Numbers type, class T>
void multiply_wide(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory) {
  tile::with_cell<T>(tile::uses_pairs(), [&](auto cell) {
    using Cell = decltype(cell);
    const Cell* cells = cells_of<type, Cell>(threads, x, tokens, matrix.inputs, memory);
    const bool are_packed = ARE_PACKED<T, type, Cell> && tokens > FEW;
    const int64_t stride = are_packed ? whole_chunks(matrix.inputs) : matrix.inputs / DEPTH<Cell>;
    const int64_t panel_bytes = matrix.inputs / INPUTS<type> * BYTES<type>, grouped = std::max<int64_t>(1, GROUPED / panel_bytes);
    const int64_t most = tokens_of_run(matrix.inputs);
    each_tile(threads, {most, grouped}, tokens, matrix.outputs, matrix.inputs, [&](int64_t panel, int64_t first, int64_t count) {
      alignas(64) float sums[MOST_TOKENS * PANEL];
      multiply<T, type>(matrix, panel, cells + first * stride, stride, count, sums, [&](int64_t t, int64_t size) {
        store_sums<type>(matrix, panel, first + t, size, sums + t * PANEL, out);
      });
    });
  });
}

}  // namespace penstock
