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

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

#include "attention_part.h"
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

template <class T, class P>
void write(const Task<T, P>& task, const Tile& tile, const Joined& joined) {
  const int64_t rows = tile.rows(task), wide = up(task.dim, LANES);
  for (int64_t row = 0; row < rows; ++row) {
    const Vec share(1.0f / joined.total[row]);
    const float* sums = joined.sums + row * wide;
    T* out = task.out + ((tile.first_token + tile.token(row, task.group())) * task.heads + tile.head(task, row)) * task.dim;
    each_lane(task.dim, [&](int64_t i, auto at) { at.store(out + i, Vec::load(sums + i) * share); });
  }
}

template <class T, class P>
void compute(const Task<T, P>& task, const Unit& unit, Partials& partials) {
  static thread_local Scratch own;
  const int64_t rows = unit.tile.rows(task), wide = up(task.dim, LANES);
  Joined joined = unit.unfinished < 0
                      ? Joined{room(own.joined, rows * wide), own.joined_most, own.joined_total}
                      : partials.at(unit.unfinished);
  clear(joined, rows, wide);
  for (int64_t key = unit.first_key; key < unit.past_key; key = up(key + 1, PART))
    attend_part(task, unit.tile, key, std::min(up(key + 1, PART), unit.past_key), own, joined);
  if (unit.unfinished < 0) write(task, unit.tile, joined);
}

// Write the tiles whose parts are unfinished; the parts of a tile follow each other.
template <class T, class P>
void finish(const Task<T, P>& task, const Plan& plan, Partials& partials) {
  const int64_t num_units = static_cast<int64_t>(plan.units.size());
  for (int64_t i = 0; i < num_units; ++i) {
    const Unit& first = plan.units[i];
    if (first.unfinished < 0) continue;
    Joined all = partials.at(first.unfinished);
    for (; i + 1 < num_units && plan.units[i + 1].unfinished >= 0 && plan.units[i + 1].tile.share == first.tile.share &&
           plan.units[i + 1].tile.kv_head == first.tile.kv_head; ++i) {
      const Joined part = partials.at(plan.units[i + 1].unfinished);
      join(all, part.sums, part.most, part.total, first.tile.rows(task), partials.wide);
    }
    write(task, first.tile, all);
  }
}

// next: 0 before; units differ in length, so threads take them as they come free.
template <class T, class P>
void attend(Threads& threads, const Task<T, P>& task, const Plan& plan, Partials& partials, std::atomic<int64_t>& next) {
  const int64_t num_units = static_cast<int64_t>(plan.units.size());
  threads.all(num_units, [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_units;)
      compute(task, plan.units[i], partials);
  });
  if (plan.num_partials) threads.once([&] { finish(task, plan, partials); });
}

// Refuse what would read outside the pages; a few thousand comparisons a step.
inline void check_shares(int64_t tokens, int64_t num_blocks, int64_t block_size, const at::Tensor& starts,
                         const at::Tensor& lengths, const at::Tensor& tables) {
  for (const at::Tensor& t : {starts, lengths, tables})
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), "paged_attention: indexes are int32, contiguous");
  const int64_t shares = lengths.numel(), width = tables.dim() == 2 ? tables.size(1) : 0;
  TORCH_CHECK(starts.numel() == shares + 1 && tables.numel() == shares * width, "paged_attention: shares differ in number");
  const int32_t *from = starts.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  TORCH_CHECK(from[0] == 0 && from[shares] <= tokens, "paged_attention: shares of ", from[shares], " tokens");
  for (int64_t i = 0; i < shares; ++i) {
    TORCH_CHECK(from[i] <= from[i + 1] && length[i] >= from[i + 1] - from[i] && length[i] <= width * block_size,
                "paged_attention: share ", i, " of length ", length[i]);
    const int32_t* table = tables.const_data_ptr<int32_t>() + i * width;
    for (int64_t j = 0; j < up(length[i], block_size) / block_size; ++j)
      TORCH_CHECK(table[j] >= 0 && table[j] < num_blocks, "paged_attention: there is no block ", table[j]);
  }
}

}  // namespace penstock::attention
