// The units of attention, one after the other: their parts, and what becomes of partial results.
#pragma once

#include "attention/attention.h"
#include "attention/part.h"

namespace penstock::attention {

// What the sum of a row's weighted values is multiplied by. A sink adds its weight to the sum of the weights.
inline float share_of(float most, float total, const float* sink) {
  if (!sink) return 1.0f / total;
  const float top = std::max(most, *sink), own = std::exp(most - top);
  return own / (total * own + std::exp(*sink - top));
}

template <class T, class P>
void write(const Task<T, P>& task, const Tile& tile, const Joined& joined) {
  const int64_t rows = tile.rows(task), wide = up(task.dim, LANES);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = tile.head(task, row);
    const Vec share(share_of(joined.most[row], joined.total[row], task.sinks ? task.sinks + head : nullptr));
    const float* sums = joined.sums + row * wide;
    T* out = task.out + ((tile.first_token + tile.token(row, task.group())) * task.heads + head) * task.dim;
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

template <class T, class P>
void attend(Threads& threads, const Task<T, P>& task, const Plan& plan, Partials& partials, std::atomic<int64_t>& next) {
  const int64_t num_units = static_cast<int64_t>(plan.units.size());
  threads.all(num_units, [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_units;)
      compute(task, plan.units[i], partials);
  });
  if (plan.num_partials) threads.once([&] { finish(task, plan, partials); });
}

}  // namespace penstock::attention
