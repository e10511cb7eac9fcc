// Causal attention of a step's shares over keys and values that lie in pages.
//
// Layout and meaning of the arguments: nn/kernels/paged.py, whose plain PyTorch is the reference.
//
// The keys of a sequence are cut at fixed positions, PART apart. A part's scores are computed for all
// rows (a row is one query of one head of the group that shares a key-value head), then its softmax,
// then its sum of values; parts are joined by their maxima and sums as in flash decoding (Dao et al.,
// 2023). The cuts depend on positions only, so no result depends on a neighbour or on the number of
// threads. A single token's parts go to different threads; many tokens are cut into tiles instead.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <vector>

#include "attention_part.h"
#include "parallel.h"

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

template <class T>
std::vector<Unit> cut(const Task<T>& task, int64_t num_shares, int64_t& num_partials) {
  std::vector<Unit> units;
  const int64_t tokens_per_tile = std::max<int64_t>(1, TILE_ROWS / task.group());
  for (int64_t share = 0; share < num_shares; ++share) {
    const int64_t first = task.starts[share], past = task.starts[share + 1], length = task.lengths[share];
    for (int64_t token = first; token < past; token += tokens_per_tile) {
      const int64_t tokens = std::min(tokens_per_tile, past - token), position = length - (past - token);
      const int64_t since = task.window ? std::max<int64_t>(0, position + 1 - task.window) : 0;
      const int64_t until = position + tokens;
      const bool is_split = past - first == 1 && since / PART != (until - 1) / PART;
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        const Tile tile{share, head, token, tokens, position};
        if (!is_split) {
          units.push_back({tile, since, until, -1});
          continue;
        }
        for (int64_t key = since; key < until; key = up(key + 1, PART))
          units.push_back({tile, key, std::min(up(key + 1, PART), until), num_partials++});
      }
    }
  }
  return units;
}

template <class T>
void write(const Task<T>& task, const Tile& tile, const Joined& joined) {
  const int64_t group = task.group(), wide = up(task.dim, LANES);
  for (int64_t row = 0; row < tile.tokens * group; ++row) {
    const Vec share(1.0f / joined.total[row]);
    const float* sums = joined.sums + row * wide;
    T* out = task.out + ((tile.first_token + row / group) * task.heads + tile.kv_head * group + row % group) * task.dim;
    each_lane(task.dim, [&](int64_t i, auto at) { at.store(out + i, Vec::load(sums + i) * share); });
  }
}

template <class T>
void compute(const Task<T>& task, const Unit& unit, Partials& partials) {
  static thread_local Scratch own;
  const int64_t rows = unit.tile.tokens * task.group(), wide = up(task.dim, LANES);
  Joined joined = unit.unfinished < 0
                      ? Joined{room(own.joined, rows * wide), own.joined_most, own.joined_total}
                      : partials.at(unit.unfinished);
  clear(joined, rows, wide);
  for (int64_t key = unit.first_key; key < unit.past_key; key = up(key + 1, PART))
    attend_part(task, unit.tile, key, std::min(up(key + 1, PART), unit.past_key), own, joined);
  if (unit.unfinished < 0) write(task, unit.tile, joined);
}

template <class T>
void attend(const Task<T>& task, int64_t num_shares) {
  Partials partials{task.group(), up(task.dim, LANES), {}, {}, {}};
  int64_t num_partials = 0;
  const std::vector<Unit> units = cut(task, num_shares, num_partials);
  partials.resize(num_partials);
  std::atomic<int64_t> next{0};  // units differ in length, so threads take them as they come free
  const int64_t num_units = static_cast<int64_t>(units.size());
  parallel(std::min<int64_t>(num_units, num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) compute(task, units[i], partials);
  });
  for (int64_t i = 0; i < num_units; ++i) {  // the parts of a tile follow each other
    if (units[i].unfinished < 0) continue;
    Joined all = partials.at(units[i].unfinished);
    const Tile& tile = units[i].tile;
    for (; i + 1 < num_units && units[i + 1].unfinished >= 0 && units[i + 1].tile.share == tile.share &&
           units[i + 1].tile.kv_head == tile.kv_head; ++i) {
      const Joined part = partials.at(units[i + 1].unfinished);
      join(all, part.sums, part.most, part.total, partials.rows, partials.wide);
    }
    write(task, tile, all);
  }
}

// Refuse what would read outside the pages; a few thousand comparisons a step.
inline void check(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& starts,
                  const at::Tensor& lengths, const at::Tensor& tables) {
  TORCH_CHECK(keys.dim() == 4 && keys.is_contiguous() && values.is_contiguous() && values.sizes() == keys.sizes(),
              "paged_attention: pages are [blocks, heads, block_size, dim], contiguous, not ", keys.sizes());
  TORCH_CHECK(q.dim() == 3 && q.size(2) == keys.size(3) && q.stride(2) == 1 && (q.size(1) == 1 || q.stride(1) == q.size(2)) &&
              q.size(1) % keys.size(1) == 0 && q.size(1) / keys.size(1) <= TILE_ROWS,
              "paged_attention: queries ", q.sizes(), " do not fit pages ", keys.sizes());
  TORCH_CHECK(q.scalar_type() == keys.scalar_type() && q.scalar_type() == values.scalar_type(),
              "paged_attention: queries and pages differ in type");
  for (const at::Tensor& t : {starts, lengths, tables})
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), "paged_attention: indexes are int32, contiguous");
  const int64_t shares = lengths.numel(), width = tables.dim() == 2 ? tables.size(1) : 0, block_size = keys.size(2);
  TORCH_CHECK(starts.numel() == shares + 1 && tables.numel() == shares * width, "paged_attention: shares differ in number");
  const int32_t *from = starts.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  TORCH_CHECK(from[0] == 0 && from[shares] <= q.size(0), "paged_attention: shares of ", from[shares], " tokens");
  for (int64_t i = 0; i < shares; ++i) {
    TORCH_CHECK(from[i] <= from[i + 1] && length[i] >= from[i + 1] - from[i] && length[i] <= width * block_size,
                "paged_attention: share ", i, " of length ", length[i]);
    const int32_t* table = tables.const_data_ptr<int32_t>() + i * width;
    for (int64_t j = 0; j < up(length[i], block_size) / block_size; ++j)
      TORCH_CHECK(table[j] >= 0 && table[j] < keys.size(0), "paged_attention: there is no block ", table[j]);
  }
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables,
                           double scale, int64_t window) {
  check(q, keys, values, starts, lengths, tables);
  at::Tensor out = at::empty(q.sizes(), q.options());
  dispatch(q, [&](auto zero) {
    using T = decltype(zero);
    attend(Task<T>{q.const_data_ptr<T>(), keys.const_data_ptr<T>(), values.const_data_ptr<T>(),
                   out.mutable_data_ptr<T>(), starts.const_data_ptr<int32_t>(), lengths.const_data_ptr<int32_t>(),
                   tables.const_data_ptr<int32_t>(), q.stride(0), q.size(1), keys.size(1), keys.size(2), q.size(2),
                   lengths.numel() ? tables.size(1) : 0, window, static_cast<float>(scale)},
           lengths.numel());
  });
  return out;
}

}  // namespace penstock::attention

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("paged_attention(Tensor q, Tensor keys, Tensor values, Tensor query_starts, Tensor lengths, "
        "Tensor block_tables, float scale, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("paged_attention", penstock::attention::paged_attention); }
