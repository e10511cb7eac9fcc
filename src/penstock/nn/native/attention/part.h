// Attention of a few or many queries over one part of a sequence's pages.
//
// Few rows read keys and values where they lie (few.h). Many rows first lay a part out as a matrix
// product wants it (tile.h), so that it is paid once for all of them.
#pragma once

#include "attention/codes.h"

namespace penstock::attention {

// ---- many rows: two matrix products

template <class Cell>
Cell* cells(std::vector<float>& buffer, int64_t size) {
  return reinterpret_cast<Cell*>(room(buffer, size));  // a cell is as large as a float
}

// Rows of pages as rows of numbers of the tokens' type; until it is called again.
template <class T, class P>
const void* const* in_type_of_tokens(const Task<T, P>& task, const void* const* rows, int64_t count, Scratch& own) {
  if constexpr (!is_coded<P>) {
    return rows;
  } else {
    T* out = reinterpret_cast<T*>(room(own.widened, PART * task.dim));
    for (int64_t i = 0; i < count; ++i, out += task.dim) {
      fetch(rows[std::min(i + AHEAD, count - 1)], task.dim);
      widen_row(static_cast<const P*>(rows[i]), task.dim, out);
      own.widened_rows[i] = out;
    }
    return own.widened_rows;
  }
}

// Multiply the scores, or the weights, of each key by the scale of its row.
template <class T, class P>
void scale_columns(const Task<T, P>&, const Rows& keys, int64_t rows, int64_t width, Scratch& own) {
  if constexpr (is_coded<P>) {
    float scales[PART];
    for (int64_t i = 0; i < width; ++i) scales[i] = scale_at(keys.scales[i]);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = row * PART; i < row * PART + width; i += LANES)
        (Vec::load(&own.scores[i]) * Vec::load(scales + i - row * PART)).store(&own.scores[i]);
  }
}

// The keys as the right side of scores: [depth, PART].
template <class Cell, class T, class P>
void lay_keys(const Task<T, P>& task, const void* const* rows, Scratch& own, int64_t num_keys, Cell* out, int64_t depth) {
  const int64_t bytes = task.dim * sizeof(P);
  for (int64_t first = 0; first < num_keys; first += LANES) {
    for (int64_t key = first; key < std::min(first + LANES, num_keys); ++key) {
      fetch(rows[std::min(key + AHEAD, num_keys - 1)], bytes);
      fetch(own.values.rows[key], bytes);
    }
    lay_columns<Cell, T>(rows + first, task.dim, out + first, depth, PART);
  }
}

// The weights as the left side; as float32 they are it already.
template <class Cell>
const Cell* lay_weights(const float* scores, int64_t rows, int64_t width, Scratch& own) {
  if constexpr (Product<Cell>::DEPTH == 1) {
    return scores;
  } else {
    Cell* out = cells<Cell>(own.cells_p, rows * PART / 2);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < width; i += LANES)
        Vec::load(scores + row * PART + i).store(reinterpret_cast<bf16*>(out) + row * PART + i);
    return out;
  }
}

// ---- one part

// cap * tanh(scale * score / cap); tanh by Cephes' polynomial near 0, where 1 - 2 / (e^2x + 1) loses digits.
inline void cap_scores(float* scores, int64_t width, float scale, float cap) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec x = Vec::load(scores + i) * Vec(scale / cap), z = x * x;
    Vec p(-5.70498872745e-3f);
    for (const float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) p = Vec::fma(p, z, Vec(c));
    const Vec small = Vec::fma(p * z, x, x), large = Vec(1.0f) - Vec(2.0f) / (exp(x + x) + Vec(1.0f));
    (Vec(x.magnitude().v < Vec(0.625f).v ? small.v : large.v) * Vec(cap)).store(scores + i);
  }
}

// Turn a row's scores of keys [low, high) into weights, 0 elsewhere; note their maximum and sum.
inline void soften(float* scores, int64_t low, int64_t high, int64_t width, float scale, float& most, float& total) {
  std::fill(scores, scores + low, NEVER);
  std::fill(scores + high, scores + width, NEVER);
  Vec top(NEVER), sum;
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec scaled = Vec::load(scores + i) * Vec(scale);
    scaled.store(scores + i);
    top = Vec::max(top, scaled);
  }
  most = top.largest();
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec weight = exp(Vec::load(scores + i) - Vec(most));
    weight.store(scores + i);
    sum = sum + weight;
  }
  total = sum.sum();
}

inline void join(Joined into, const float* sums, const float* most, const float* total, int64_t rows, int64_t wide) {
  for (int64_t row = 0; row < rows; ++row) {
    if (total[row] == 0) continue;  // the row sees nothing of this part
    const float top = std::max(into.most[row], most[row]);
    const float old = into.total[row] == 0 ? 0 : std::exp(into.most[row] - top), add = std::exp(most[row] - top);
    for (int64_t i = row * wide; i < (row + 1) * wide; i += LANES)
      Vec::fma(Vec::load(into.sums + i), Vec(old), Vec::load(sums + i) * Vec(add)).store(into.sums + i);
    into.most[row] = top;
    into.total[row] = into.total[row] * old + total[row] * add;
  }
}

inline void clear(Joined joined, int64_t rows, int64_t wide) {
  std::fill(joined.sums, joined.sums + rows * wide, 0.0f);
  std::fill(joined.most, joined.most + rows, NEVER);
  std::fill(joined.total, joined.total + rows, 0.0f);
}

// Note the rows [i, past) of a part, which a page has from `offset` on.
template <class T, class P>
void find_rows_of_page(const Task<T, P>& task, const P* page, int64_t offset, int64_t i, int64_t past, Rows& out) {
  for (; i < past; ++i, ++offset) {
    out.rows[i] = page + offset * task.dim;
    if constexpr (is_coded<P>) out.scales[i] = scale_in(page, task.block_size, task.dim, offset);
  }
}

// Note where each key and value of the tile's first head lies; the lists are filled up to whole vectors with the last.
template <class T, class P>
void find_rows(const Task<T, P>& task, const Tile& tile, int64_t first_key, int64_t num_keys, Scratch& own) {
  const int32_t* table = task.tables + tile.share * task.table_width;
  int64_t offset = first_key % task.block_size, page = first_key / task.block_size;
  for (int64_t i = 0; i < num_keys; offset = 0, ++page) {
    const int64_t begin = (table[page] * task.kv_heads + tile.kv_head) * task.page_size();
    const int64_t past = std::min(i + task.block_size - offset, num_keys);
    find_rows_of_page(task, task.keys + begin, offset, i, past, own.keys);
    find_rows_of_page(task, task.values + begin, offset, i, past, own.values);
    i = past;
  }
  for (Rows* rows : {&own.keys, &own.values})
    for (int64_t i = num_keys; i < up(num_keys, LANES); ++i) {
      rows->rows[i] = rows->rows[num_keys - 1];
      if constexpr (is_coded<P>) rows->scales[i] = rows->scales[num_keys - 1];
    }
}

// Turn all scores into weights; a row sees the keys up to its own position, of the window's last ones.
template <class T, class P>
void soften_rows(const Task<T, P>& task, const Tile& tile, int64_t first_key, int64_t num_keys, Scratch& own) {
  const int64_t rows = tile.rows(task), width = up(num_keys, LANES);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t past = tile.first_position + tile.token(row, task.group()) + 1;
    const int64_t since = task.window ? past - task.window : 0;
    const int64_t low = std::clamp<int64_t>(since - first_key, 0, num_keys);
    const int64_t high = std::clamp<int64_t>(past - first_key, 0, num_keys);
    float* scores = own.scores.data() + row * PART;
    if (low < high) {
      if (task.softcap) cap_scores(scores, width, task.scale, task.softcap);
      soften(scores, low, high, width, task.softcap ? 1.0f : task.scale, own.most[row], own.total[row]);
    } else {
      std::fill(scores, scores + width, 0.0f);
      own.most[row] = NEVER, own.total[row] = 0;
    }
  }
}

// Scores, weights and sums of a part whose rows are found already. ROWS, of each head, is a constant: with a number known
// only at run time the compiler's loops are twice as slow.
template <int ROWS, class T, class P>
void attend_few(const Task<T, P>& task, const Tile& tile, int64_t first_key, int64_t num_keys, const T* const* q_rows, Scratch& own) {
  const Runs<T, P> runs{task, tile, num_keys};
#ifdef HAS_BYTES
  if constexpr (std::is_same_v<T, bf16> && is_coded<P>) {
    if (task.dim % BYTES == 0 && task.dim <= MOST_BYTES) {
      code_scores<ROWS>(runs, q_rows, own);
      soften_rows(task, tile, first_key, num_keys, own);
      return code_sums<ROWS>(runs, own);
    }
  }
#endif
  few_scores<ROWS>(runs, q_rows, own);
  soften_rows(task, tile, first_key, num_keys, own);
  few_sums<ROWS>(runs, own);
}

template <class Cell, class T, class P>
void attend_many(const Task<T, P>& task, const Tile& tile, int64_t first_key, int64_t num_keys, const T* const* q_rows, Scratch& own) {
  constexpr int64_t D = Product<Cell>::DEPTH;
  const int64_t rows = tile.tokens * task.group(), wide = up(task.dim, LANES), width = up(num_keys, LANES);
  const int64_t depth = up(task.dim, D) / D, key_cells = up(num_keys, D) / D;
  Cell *q = cells<Cell>(own.cells_q, rows * depth), *k = cells<Cell>(own.cells_k, depth * PART);
  lay_rows(q_rows, rows, task.dim, q, depth);
  lay_keys<Cell>(task, in_type_of_tokens(task, own.keys.rows, width, own), own, num_keys, k, depth);
  multiply(q, depth, k, PART, own.scores.data(), PART, rows, width, depth);
  scale_columns(task, own.keys, rows, width, own);
  soften_rows(task, tile, first_key, num_keys, own);
  scale_columns(task, own.values, rows, width, own);
  Cell* v = cells<Cell>(own.cells_v, key_cells * wide);
  lay_below<Cell, T>(in_type_of_tokens(task, own.values.rows, num_keys, own), num_keys, task.dim, v, wide);
  const Cell* weights = lay_weights<Cell>(own.scores.data(), rows, width, own);
  multiply(weights, PART / D, v, wide, own.sums.data(), wide, rows, wide, key_cells);
}

// Attend the rows of a tile to the keys [first_key, past_key) of one part; join what comes out.
template <class T, class P>
void attend_part(const Task<T, P>& task, const Tile& tile, int64_t first_key, int64_t past_key, Scratch& own, Joined joined) {
  const int64_t rows = tile.rows(task), num_keys = past_key - first_key;
  const int64_t wide = up(task.dim, LANES);
  const T* q_rows[TILE_ROWS];
  for (int64_t row = 0; row < rows; ++row)
    q_rows[row] = task.q + (tile.first_token + tile.token(row, task.group())) * task.q_stride + tile.head(task, row) * task.dim;
  find_rows(task, tile, first_key, num_keys, own);
  room(own.scores, rows * PART), room(own.sums, rows * wide);
  switch (tile.is_few ? tile.tokens * task.group() : 0) {
    case 1: attend_few<1>(task, tile, first_key, num_keys, q_rows, own); break;
    case 2: attend_few<2>(task, tile, first_key, num_keys, q_rows, own); break;
    case 3: attend_few<3>(task, tile, first_key, num_keys, q_rows, own); break;
    case 4: attend_few<4>(task, tile, first_key, num_keys, q_rows, own); break;
    default:
      with_cell<T>(multiplies_pairs(), [&](auto cell) {
        attend_many<decltype(cell)>(task, tile, first_key, num_keys, q_rows, own);
      });
  }
  join(joined, own.sums.data(), own.most, own.total, rows, wide);
}

}  // namespace penstock::attention
