// Attention of a few rows of each key-value head over one part of a sequence's pages: keys and values are read
// where they lie, which is all the memory traffic there is.
//
// A page holds the positions of one head after those of another, and heads are read in that order: a vector of keys of one,
// the same keys of the next, and when the page ends the next page. Head after head over all pages was a piece of
// 2 KiB here and one there, where the CPU cannot guess on, and took 1.4 to 2 times as long.
#pragma once

#include "attention/task.h"
#include "tile.h"

namespace penstock::attention {

using namespace tile;

// What adds up to the product of two rows. SIZE is that of a usual head, and its loop is unrolled; or 0, and
// `size` counts.
template <int64_t SIZE, class T>
inline Vec products(const T* a, const T* b, int64_t size) {
  Vec sum;
#ifdef __AVX512BF16__
  if constexpr (SIZE > 0 && sizeof(T) == 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < SIZE; i += 32)
      sum = Product<Pair>::add(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i), sum);
    return sum;
  }
#endif
  if constexpr (SIZE > 0) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < SIZE; i += LANES) sum = Vec::fma(Vec::load(a + i), Vec::load(b + i), sum);
  } else {
    each_lane(size, [&](int64_t i, auto at) { sum = Vec::fma(at.load(a + i), at.load(b + i), sum); });
  }
  return sum;
}

// A head's keys or values of as many positions as a vector has lanes; behind the last the list of rows repeats it.
template <class P>
struct Run {
  const Rows& of;
  int64_t first, head, offset;
  const P* at(int64_t i) const { return static_cast<const P*>(of.rows[first + i]) + offset; }
  const Code* scale(int64_t i) const { return of.scales[first + i] + offset; }
  Vec scales() const {
    float of_rows[LANES];
    for (int i = 0; i < LANES; ++i) of_rows[i] = scale_at(scale(i));
    return Vec::load(of_rows);
  }
};

// The runs of some keys or values, in the order in which they lie.
template <class T, class P>
struct Runs {
  const Task<T, P>& task;
  const Tile& tile;
  int64_t num_keys;

  int64_t count() const { return up(num_keys, LANES) / LANES * tile.num_heads; }
  // How many runs before it is needed memory is asked for one: 8 KiB, so that it stays in the first cache. Asked
  // for beside the same key of another run: all at once would wait for each other.
  int64_t ahead() const { return std::max<int64_t>(1, 8192 / (LANES * page_width<P>(task.dim) * sizeof(P))); }
  // What is read soon when a run of keys is.
  Run<P> after_key(const Scratch& own, int64_t i) const {
    const int64_t later = i + ahead();
    return later < count() ? at(own.keys, later) : at(own.values, std::min(later, 2 * count() - 1) - count());
  }
  Run<P> at(const Rows& rows, int64_t i) const {
    const int64_t first = i / tile.num_heads * LANES, head = i % tile.num_heads;
    return {rows, first, head, head * task.page_size()};
  }
};

template <int ROWS, int64_t SIZE, class T, class P>
void few_scores_of(const Runs<T, P>& runs, const T* const* q_rows, Scratch& own) {
  const int64_t size = SIZE ? SIZE : runs.task.dim, count = runs.count();
  T* const widened = reinterpret_cast<T*>(room(own.widened, is_coded<P> ? LANES * size : 0));
  for (int64_t n = 0; n < count; ++n) {
    const Run<P> keys = runs.at(own.keys, n), soon = runs.after_key(own, n);
    const auto key = [&](int i) -> const T* {
      if constexpr (is_coded<P>) return widened + i * size;
      else return keys.at(i);
    };
    Vec scales;
    if constexpr (is_coded<P>) {
      scales = keys.scales();
      fetch(soon.scale(0), LANES * SCALE_SIZE);
      for (int i = 0; i < LANES; ++i) {
        fetch(soon.at(i), size);
        widen_row(keys.at(i), size, widened + i * size);
      }
    }
    for (int64_t row = keys.head * ROWS; row < (keys.head + 1) * ROWS; ++row) {
      Vec parts[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        if (!is_coded<P> && row == keys.head * ROWS) fetch(soon.at(i), size * sizeof(T));
        parts[i] = products<SIZE>(q_rows[row], key(i), size);
      }
      const Vec scores = is_coded<P> ? sums_of(parts) * scales : sums_of(parts);
      scores.store(own.scores.data() + row * PART + keys.first);
    }
  }
}

template <int ROWS, class T, class P>
void few_scores(const Runs<T, P>& runs, const T* const* q_rows, Scratch& own) {
  if (runs.task.dim == 64) return few_scores_of<ROWS, 64>(runs, q_rows, own);
  if (runs.task.dim == 128) return few_scores_of<ROWS, 128>(runs, q_rows, own);
  few_scores_of<ROWS, 0>(runs, q_rows, own);
}

// sums[row] += weights[row] values, of some columns; ROWS rows at once, so that a value is widened once for all.
template <int ROWS, int WIDE, class P>
void add_values(const Run<P>& values, const Run<P>& soon, int64_t column, const float* weights, int64_t num_keys,
                float* sums, int64_t stride) {
  Vec own[ROWS][WIDE];
  for (int row = 0; row < ROWS; ++row)
    for (int j = 0; j < WIDE; ++j) own[row][j] = Vec::load(sums + row * stride + column + j * LANES);
  for (int64_t key = 0; key < num_keys; ++key) {
    fetch(soon.at(key) + column, WIDE * LANES * sizeof(P));
    Vec wide[WIDE];
    for (int j = 0; j < WIDE; ++j) wide[j] = Vec::load(values.at(key) + column + j * LANES);
    for (int row = 0; row < ROWS; ++row)
      for (int j = 0; j < WIDE; ++j) own[row][j] = Vec::fma(Vec(weights[row * PART + key]), wide[j], own[row][j]);
  }
  for (int row = 0; row < ROWS; ++row)
    for (int j = 0; j < WIDE; ++j) own[row][j].store(sums + row * stride + column + j * LANES);
}

template <int ROWS, class T, class P>
void few_sums(const Runs<T, P>& runs, Scratch& own) {
  const int64_t dim = runs.task.dim, wide = up(dim, LANES), count = runs.count();
  std::fill_n(own.sums.data(), runs.tile.num_heads * ROWS * wide, 0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const Run<P> values = runs.at(own.values, n), soon = runs.at(own.values, std::min(n + runs.ahead(), count - 1));
    const int64_t num_keys = std::min<int64_t>(LANES, runs.num_keys - values.first);
    float* weights = own.scores.data() + values.head * ROWS * PART + values.first;
    if constexpr (is_coded<P>) {
      const Vec scales = values.scales();
      fetch(soon.scale(0), LANES * SCALE_SIZE);
      for (int row = 0; row < ROWS; ++row) (Vec::load(weights + row * PART) * scales).store(weights + row * PART);
    }
    float* sums = own.sums.data() + values.head * ROWS * wide;
    constexpr int WIDE = REGISTERS / 8;
    int64_t column = 0;
    for (; column + WIDE * LANES <= dim; column += WIDE * LANES)
      add_values<ROWS, WIDE>(values, soon, column, weights, num_keys, sums, wide);
    for (; column + LANES <= dim; column += LANES)
      add_values<ROWS, 1>(values, soon, column, weights, num_keys, sums, wide);
    for (; column < dim; ++column)
      for (int row = 0; row < ROWS; ++row)
        for (int64_t key = 0; key < num_keys; ++key)
          sums[row * wide + column] = std::fma(weights[row * PART + key], static_cast<float>(values.at(key)[column]),
                                               sums[row * wide + column]);
  }
}

}  // namespace penstock::attention
