// Products of tokens with panels of any numbers. What tokens and a panel hold is widened to what the CPU multiplies, a
// `Cell` (tile.h): a float32, or two bfloat16 where tokens are bfloat16 and the CPU multiplies pairs faster.
//
//   up to FEW tokens    cells are widened in registers, and multiplied at once: the time is that of reading memory
//   more tokens         a block of a panel is widened once for a run of up to MOST_TOKENS, and multiplied from the first cache
//
// A run is multiplied in parts of its inputs. All panels of a group take one part before the next, so a part and the group's
// sums stay in the second cache, however long the tokens are. Each tile prefetches its share of the next block, at least half of
// it in all. A tile's sums are stored as soon as they are complete, while other tiles are still multiplied.
//
// Codes are exact as float32 and as bfloat16, and sums are float32: those of int4 over one group of inputs at a time. Scales
// are applied to sums. So fewer bits read less memory, and cost little more arithmetic: int4 one instruction in sixteen or in
// thirty-two. An output's sum runs over its inputs in one order whatever the number of tokens: a token's result does not
// depend on its neighbours.
#pragma once

#include <vector>

#include "matrix.h"
#include "panels.h"
#include "tile.h"

namespace penstock {

template <class Cell>
using LaneOf = typename tile::Product<Cell>::Lane;

template <class Cell>
constexpr int64_t DEPTH = tile::Product<Cell>::DEPTH;  // inputs of a cell

constexpr int64_t CELLS = 128;              // of a block, for each output: 16 KiB
constexpr int64_t CHUNK = 16;               // cells of a token that lie together in packed tokens: 64 bytes
constexpr int64_t MOST_TOKENS = 264;        // of a run
constexpr int64_t GROUPED = 24;             // panels of a group
constexpr int64_t CACHE_BYTES = 944 << 10;  // for a part and a group's sums, which fit together in a second cache of 1 MiB
static_assert(MOST_TOKENS * (GROUPED * PANEL + CELLS) * 4 <= CACHE_BYTES);  // a part has at least one block
constexpr int64_t FEW = REGISTERS == 32 ? 4 : 2;
using Tiles = std::conditional_t<REGISTERS == 32, Sizes<12, 8, 4, 2, 1>, Sizes<6, 4, 2, 1>>;
using GroupTiles = Sizes<6, 4, 2, 1>;
using FewTiles = std::conditional_t<REGISTERS == 32, Sizes<4, 3, 2, 1>, Sizes<2, 1>>;

template <Numbers type>
constexpr int64_t INPUTS = type == Numbers::FLOAT ? 1 : type == Numbers::BFLOAT16 ? 2 : 4;  // of a unit
template <Numbers type>
constexpr int64_t BYTES = type == Numbers::INT4 ? 2 * PANEL : 4 * PANEL;  // of a unit of all outputs of a panel
template <class Cell>
constexpr int64_t BLOCK = CELLS * DEPTH<Cell>;  // inputs
template <Numbers type, class Cell>
constexpr int64_t STEP = BYTES<type> * DEPTH<Cell> / INPUTS<type>;  // bytes of a cell of all outputs of a panel
constexpr float UNIT_8 = 0x1p-24f;  // of the codes of 8 bits, which are widened as the highest byte

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
  constexpr int64_t OF_UNIT = INPUTS<type> / DEPTH<Cell>;
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
          own[t][part] = tile::Product<Cell>::add(tile::Product<Cell>::broadcast(x + t * stride + u * OF_UNIT + k), lane, own[t][part]);
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
    const auto add_cell = [&](int64_t k, const Cell* cell) __attribute__((always_inline)) {
      asm volatile("" ::: "memory");  // stops the compiler from grouping the prefetches of a chunk
      prefetch<false>(ahead.from + k * ahead.step + begin * ahead.step / PANEL);
      LaneOf<Cell> right[WIDE];
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) right[j] = Product::load(block + k * PANEL + begin + j * LANES);
#pragma GCC unroll 12
      for (int t = 0; t < tokens; ++t) {
        const auto left = Product::broadcast(cell + t * stride);
#pragma GCC unroll 4
        for (int j = 0; j < WIDE; ++j) own[t][j] = Product::add(left, right[j], own[t][j]);
      }
    };
    const Cell* cells = x;
    int64_t k = 0;
    if constexpr (are_packed)  // whole chunks, unrolled
      for (; k + CHUNK <= depth; k += CHUNK, cells += tokens * CHUNK)
#pragma GCC unroll 16
        for (int i = 0; i < CHUNK; ++i) add_cell(k + i, cells + i);
    for (; k < depth; ++k, ++cells) add_cell(k, cells);
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) own[t][j].store(sums + t * PANEL + begin + j * LANES);
  }
}

// The same of int4, whose scales are applied to the sums of groups.
template <int tokens, class Cell>
void add_groups(const Cell* block, const Cell* x, int64_t depth, const GroupScales<Cell>* scales, Ahead ahead, float* sums) {
  using Product = tile::Product<Cell>;
  constexpr int WIDE = std::min(PARTS, 2);
  for (int part = 0; part < PARTS; part += WIDE) {
    Vec total[tokens][WIDE];
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t)
      for (int j = 0; j < WIDE; ++j) total[t][j] = Vec::load(sums + t * PANEL + (part + j) * LANES);
    const GroupScales<Cell>* scale = scales;
    const Cell* cells = x;
    for (int64_t k = 0; k < depth; ++scale) {
      Vec own[tokens][WIDE];
      for (const int64_t past = std::min(depth, k + GROUP / DEPTH<Cell>); k < past; cells += (tokens - 1) * CHUNK)
        for (const int64_t end = std::min(past, k + CHUNK); k < end; ++k, ++cells) {
          LaneOf<Cell> right[WIDE];
          for (int j = 0; j < WIDE; ++j) right[j] = Product::load(block + k * PANEL + (part + j) * LANES);
          prefetch<false>(ahead.from + k * ahead.step);
#pragma GCC unroll 6
          for (int t = 0; t < tokens; ++t) {
            const auto left = Product::broadcast(cells + t * CHUNK);
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

// Where a block begins.
struct Block {
  int64_t panel, cell;
};

// sums [tokens][PANEL] += tokens x a block of `depth` cells. Calls done(first token, count) after each tile.
template <Numbers type, bool are_packed, class Cell, class Done>
void multiply_block(const Matrix& matrix, Block block, int64_t depth, const Cell* x, int64_t stride, int64_t tokens, const char* next,
                    float* sums, const Done& done) {
  alignas(64) Cell room[CELLS * PANEL];
  const int64_t first = block.cell * DEPTH<Cell>, count = depth * DEPTH<Cell>;
  const Cell* cells = widen<type>(matrix, block.panel, first, count, room);
  const auto left = [&](int64_t t) {
    return are_packed ? x + block.cell * tokens + t * whole_chunks(depth) : x + t * stride + block.cell;
  };
  constexpr int64_t OF_CELL = STEP<type, Cell>;
  const auto ahead = [&](int64_t t, int64_t size) { return Ahead{next + depth * OF_CELL * t / tokens, OF_CELL * size / tokens}; };
  if constexpr (type == Numbers::INT4) {
    static_assert(are_packed);
    GroupScales<Cell> scales[BLOCK<Cell> / GROUP];
    for (int64_t i = 0; i < count; i += GROUP) scales[i / GROUP] = {matrix, block.panel, (first + i) / GROUP};
    GroupTiles::each(tokens, [&](int64_t t, auto size) {
      add_groups<size>(cells, left(t), depth, scales, ahead(t, size), sums + t * PANEL);
      done(t, size);
    });
  } else {
    Tiles::each(tokens, [&](int64_t t, auto size) {
      add_block<size, are_packed>(cells, left(t), stride, depth, ahead(t, size), sums + t * PANEL);
      done(t, size);
    });
  }
}

// sums [panels][tokens][PANEL] = tokens x panels, of up to MOST_TOKENS: rows of `stride` cells, or packed if more than FEW.
// Calls done(panel, first token, count, their sums) for each tile: the sums are in the first cache.
template <Numbers type, bool are_packed, class Cell>
void multiply(const Matrix& matrix, int64_t first, int64_t panels, const Cell* x, int64_t stride, int64_t tokens, float* sums,
              Ref<void(int64_t, int64_t, int64_t, const float*)> done) {
  const auto sums_of = [&](int64_t panel, int64_t t) { return sums + ((panel - first) * tokens + t) * PANEL; };
  if (tokens <= FEW) {
    for (int64_t panel = first; panel < first + panels; ++panel)
      FewTiles::each(tokens, [&](int64_t t, auto size) {
        multiply_few<type, size>(matrix, panel, x + t * stride, stride, sums_of(panel, t));
        done(panel, t, size, sums_of(panel, t));
      });
    return;
  }
  const int64_t cells = matrix.inputs / DEPTH<Cell>, end = first + panels;
  // bytes for a token's cells: its share of the cache less its sums
  const int64_t of_token = CACHE_BYTES / tokens - panels * PANEL * static_cast<int64_t>(sizeof(float));
  const int64_t of_part = std::max<int64_t>(1, of_token / static_cast<int64_t>(CELLS * sizeof(Cell))) * CELLS;
  const auto after = [&](Block block) -> Block {
    const int64_t begin = block.cell / of_part * of_part, past = std::min(begin + of_part, cells);
    if (block.cell + CELLS < past) return {block.panel, block.cell + CELLS};
    if (block.panel + 1 < end) return {block.panel + 1, begin};
    return past < cells ? Block{first, past} : Block{end, 0};  // the thread's next panel is not known here
  };
  for (Block block{first, 0}, next; block.panel < end; block = next) {
    next = after(block);
    const int64_t depth = std::min(CELLS, cells - block.cell);
    const char* ahead = panel_of<type>(matrix, next.panel) + next.cell * STEP<type, Cell>;
    float* own = sums_of(block.panel, 0);
    if (block.cell == 0) std::fill_n(own, tokens * PANEL, 0.0f);
    multiply_block<type, are_packed>(matrix, block, depth, x, stride, tokens, ahead, own, [&](int64_t t, int64_t size) {
      if (block.cell + depth == cells) done(block.panel, t, size, own + t * PANEL);
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

inline int64_t runs_of(int64_t tokens) { return (tokens + MOST_TOKENS - 1) / MOST_TOKENS; }

// Bytes of the tokens as cells; 0: they are cells as they lie.
template <class T>
int64_t cell_bytes(int64_t tokens, int64_t inputs) {
  return tile::with_cell<T>(tile::uses_pairs(), [&](auto cell) -> int64_t {
    using Cell = decltype(cell);
    return ARE_CELLS<T, Cell> && tokens <= FEW ? 0 : tokens * whole_chunks(inputs / DEPTH<Cell>) * sizeof cell;
  });
}

// Copy the cells [first, first + CELLS) of tokens, rows of `cells` cells that are `stride` numbers apart. Few tokens stay
// rows; others come in the order in which tiles read them: tile by tile, a chunk of each token. If 4 KiB divide their
// distance, the rows of a tile fall into one set of the first cache, and a set of eight ways, as AMD's, loses them before they
// are read again.
template <class TileSizes, class Cell, class T>
void pack_block(const T* x, int64_t stride, int64_t tokens, int64_t cells, int64_t first, Cell* to) {
  const int64_t past = std::min(first + CELLS, cells);
  const auto copy = [&](int64_t row, int64_t begin, int64_t end, Cell* out) {
    const T* from = x + row * stride + begin * DEPTH<Cell>;
    if constexpr (ARE_CELLS<T, Cell>)
      std::copy_n(reinterpret_cast<const Cell*>(from), end - begin, out);
    else
      each_lane(end - begin, [&](int64_t i, auto at) { at.store(out + i, at.load(from + i)); });
  };
  if (tokens <= FEW) {
    for (int64_t row = 0; row < tokens; ++row) copy(row, first, past, to + row * cells + first);
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
  if (ARE_CELLS<T, Cell> && tokens <= FEW) return reinterpret_cast<const Cell*>(x);
  using TileSizes = std::conditional_t<type == Numbers::INT4, GroupTiles, Tiles>;
  const int64_t runs = runs_of(tokens);
  const int64_t cells = inputs / DEPTH<Cell>, blocks = (cells + CELLS - 1) / CELLS;
  threads.each(runs * blocks, grain_of(CELLS * std::clamp<int64_t>(tokens, 1, MOST_TOKENS)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t run = item / blocks, first = tokens * run / runs, count = tokens * (run + 1) / runs - first;
      Cell* to = reinterpret_cast<Cell*>(memory) + first * whole_chunks(cells);
      pack_block<TileSizes>(x + first * inputs, inputs, count, cells, item % blocks * CELLS, to);
    }
  });
  return reinterpret_cast<const Cell*>(memory);
}

// Memory of this thread for so many sums.
inline float* room_for(int64_t sums) {
  struct alignas(64) Line {
    float of[16];
  };
  thread_local std::vector<Line> room;
  room.resize(std::max<size_t>(room.size(), (sums + 15) / 16));
  return room.data()->of;
}

// out = x matrix + bias; memory has `cell_bytes`.
template <Numbers type, class T>
void multiply_wide(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory) {
  tile::with_cell<T>(tile::uses_pairs(), [&](auto cell) {
    using Cell = decltype(cell);
    const Cell* cells = cells_of<type, Cell>(threads, x, tokens, matrix.inputs, memory);
    const int64_t depth = matrix.inputs / DEPTH<Cell>, stride = tokens > FEW ? whole_chunks(depth) : depth;
    const int64_t runs = runs_of(tokens), panels = (matrix.outputs + PANEL - 1) / PANEL;
    threads.each(panels * runs, grain_of_tiles(tokens, matrix.inputs), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin, count; item < end; item += count) {  // a group takes one run after the other
        const int64_t group = item / (GROUPED * runs) * GROUPED, grouped = std::min(GROUPED, panels - group), place = item - group * runs;
        const int64_t run = place / grouped, first = tokens * run / runs, size = tokens * (run + 1) / runs - first;
        count = std::min(end - item, grouped - place % grouped);
        const auto done = [&](int64_t panel, int64_t t, int64_t num, const float* sums) {
          store_sums<type>(matrix, panel, first + t, num, sums, out);
        };
        float* own = room_for(count * size * PANEL);
        multiply<type, true>(matrix, group + place % grouped, count, cells + first * stride, stride, size, own, done);
      }
    });
  });
}

}  // namespace penstock
