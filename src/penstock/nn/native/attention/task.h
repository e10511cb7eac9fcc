// What attention of a step is asked for, and what its threads share and keep.
#pragma once

#include <limits>
#include <vector>

#include "attention/page_rows.h"

namespace penstock::attention {

constexpr int64_t PART = 256;      // keys
constexpr int64_t TILE_ROWS = 48;  // a multiple of the product's 6
constexpr int64_t FEW_ROWS = 4;
constexpr int64_t AHEAD = 16;      // keys
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// T: of queries and what comes out; P: of pages.
template <class T, class P>
struct Task {
  const T* q;
  const P *keys, *values;
  T* out;
  const int32_t *starts, *lengths, *tables;
  int64_t q_stride, heads, kv_heads, block_size, dim, table_width, window;
  float scale;
  const float* sinks = nullptr;  // of each head: a score of a key whose value is 0; null: there are none
  float softcap = 0;  // the cap on scaled scores; 0: none

  int64_t group() const { return heads / kv_heads; }
  int64_t page_size() const { return block_size * page_width<P>(dim); }  // of one head
};

// Rows of one tile: `tokens` queries of one share, each with the heads of the groups of `num_heads` key-value
// heads: head by head, then token by token.
struct Tile {
  int64_t share, kv_head, num_heads, first_token, tokens, first_position;
  bool is_few;  // whether its rows read keys and values where they lie

  template <class T, class P>
  int64_t rows(const Task<T, P>& task) const { return num_heads * tokens * task.group(); }
  int64_t token(int64_t row, int64_t group) const { return row / group % tokens; }
  // Of a row, its place among all heads of all queries.
  template <class T, class P>
  int64_t head(const Task<T, P>& task, int64_t row) const {
    const int64_t group = task.group();
    return (kv_head + row / (tokens * group)) * group + row % group;
  }
};

// The joined result of the parts seen so far: weighted sums of values, largest score, sum of weights.
struct Joined {
  float *sums, *most, *total;
};

// Where the keys or values of a part lie, of a tile's first key-value head.
struct Rows {
  const void* rows[PART];
  const Code* scales[PART];  // of rows of 8 bits
};

// Buffers of one thread, kept between steps.
struct Scratch {
  std::vector<float> scores, sums, joined, cells_q, cells_k, cells_v, cells_p, widened;
  Rows keys, values;
  const void* widened_rows[PART];
  float most[TILE_ROWS], total[TILE_ROWS], joined_most[TILE_ROWS], joined_total[TILE_ROWS];
};

inline float* room(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// Ask memory for a row that is needed soon. Pages lie anywhere, so the CPU cannot guess the next one.
[[gnu::always_inline]] inline void fetch(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

}  // namespace penstock::attention
