// Causal attention of a step's shares over keys and values that lie in pages.
//
// Layout and meaning of the arguments: nn/kernels/paged.py, whose plain PyTorch is the reference.
//
// The keys of a sequence are cut at fixed positions, PART apart. A part's scores are computed for all
// rows (a row is one query of one head), then its softmax, then its sum of values; parts are joined by
// their maxima and sums as in flash decoding (Dao et al., 2023). The cuts depend on positions only, and a
// row's sums on its keys and on whether its tile has few rows or many, which add in another order. So no
// result depends on the number of threads, and its last bit alone on how a sequence is cut into steps.
// A single token's parts go to different threads; many tokens are cut into tiles instead.
#pragma once

#include <atomic>
#include <vector>

#include "attention/task.h"
#include "threads.h"

namespace penstock::attention {

// What one thread takes at a time: a tile and keys, and where to put an unfinished result.
struct Unit {
  Tile tile;
  int64_t first_key, past_key;
  int64_t unfinished;  // index of the partial result; -1: the tile's result is complete with this unit
};

// Partial results of single tokens whose keys are several parts, one per part and key-value head.
struct Partials {
  int64_t rows, wide;
  std::vector<float> sums, most, total;
  Joined at(int64_t i) { return {&sums[i * rows * wide], &most[i * rows], &total[i * rows]}; }
  void resize(int64_t n) { sums.resize(n * rows * wide), most.resize(n * rows), total.resize(n * rows); }
};

// The units of a step: the same for all layers that have one window.
struct Plan {
  std::vector<Unit> units;
  int64_t num_partials = 0;
};

// How many key-value heads of a few rows each are one unit: many are read from the pages in one stream, and few
// leave work for all threads where there are few shares.
template <class T, class P>
int64_t heads_together(const Task<T, P>& task, int64_t num_shares, int64_t rows) {
  const int64_t most = std::clamp<int64_t>(num_shares * task.kv_heads / (2 * num_threads()), 1, TILE_ROWS / rows);
  const int64_t units = (task.kv_heads + most - 1) / most;
  return (task.kv_heads + units - 1) / units;
}

template <class T, class P>
int64_t tokens_per_tile(const Task<T, P>& task) {
  return std::max<int64_t>(1, TILE_ROWS / task.group());
}

// kept: starts of the shares among those of their last tokens that are attended; null: all are. A tile that is
// attended in part is computed as it would be whole, so that no result depends on what else is attended.
template <class T, class P>
Plan cut(const Task<T, P>& task, int64_t num_shares, const int32_t* kept = nullptr) {
  Plan plan;
  const int64_t most = tokens_per_tile(task);
  const int32_t* rows = kept ? kept : task.starts;  // where the shares are among the queries
  for (int64_t share = 0; share < num_shares; ++share) {
    const int64_t first = task.starts[share], past = task.starts[share + 1], length = task.lengths[share];
    const int64_t wanted = past - (rows[share + 1] - rows[share]);
    for (int64_t token = first; token < past; token += most) {
      const int64_t end = std::min(token + most, past), begin = std::max(token, wanted);
      if (begin >= end) continue;
      const int64_t position = length - (past - begin), until = length - (past - end);
      const int64_t since = task.window ? std::max<int64_t>(0, length - (past - token) + 1 - task.window) : 0;
      const bool is_split = past - first == 1 && since / PART != (until - 1) / PART;
      const bool is_few = (end - token) * task.group() <= FEW_ROWS;
      const int64_t together = is_few ? heads_together(task, num_shares, (end - token) * task.group()) : 1;
      for (int64_t head = 0; head < task.kv_heads; head += together) {
        const int64_t num_heads = std::min(together, task.kv_heads - head);
        const Tile tile{share, head, num_heads, rows[share + 1] - (past - begin), end - begin, position, is_few};
        if (!is_split) {
          plan.units.push_back({tile, since, until, -1});
          continue;
        }
        for (int64_t key = since; key < until; key = up(key + 1, PART), plan.num_partials += num_heads)
          plan.units.push_back({tile, key, std::min(up(key + 1, PART), until), plan.num_partials});
      }
    }
  }
  return plan;
}

// next: 0 before; units differ in length, so threads take them as they come free. Compiled for each type of tokens on
// its own (float.cpp, bfloat16.cpp).
template <class T, class P>
void attend(Threads& threads, const Task<T, P>& task, const Plan& plan, Partials& partials, std::atomic<int64_t>& next);

}  // namespace penstock::attention
