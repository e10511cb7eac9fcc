// Many tokens of a step in chunks, each of which one thread takes through one block at a time.
//
// Threads that meet after every product are as fast as the one that another program keeps from its core: a core that is
// shared half and half halved the whole step. Chunks of different sequences need nothing of each other, and
// of one sequence a later chunk needs the keys and values of the one before it, block by block. So there are no
// meetings: a free thread takes the chunk that is furthest behind, and one that is late is late with one block of
// one chunk. All chunks are within a few blocks of each other, so that a block's matrices come from memory once and
// then from the cache.
//
// Matrix tiles compute so fast that most of a product's time is reading its matrix: with them chunks are larger, and a step
// of fewer tokens than some such chunks is computed by all threads together.
//
// No token's result depends on what is computed beside it, so neither the cut nor who computes what changes a bit.
#pragma once

#include <deque>
#include <optional>

#include "network.h"

namespace penstock::network {

constexpr int64_t MOST_CHUNK = 128, MOST_TILED_CHUNK = 256;  // tokens: more leave threads idle
constexpr int64_t CHUNKS_PER_THREAD = 4, TILED_CHUNKS_PER_THREAD = 2;
constexpr int64_t CACHED = 16 << 20;  // bytes of a block's matrices that chunks find in the last cache

// Consecutive tokens of a step.
struct Span {
  int64_t first_share, past_share, first, past;  // tokens; the first share may have begun in the span before
};

// Tokens of a chunk; 0: there are too few of them to give every thread two. Fewer would read matrices too often.
inline int64_t chunk_size(int64_t tokens, int64_t threads, int64_t block_bytes, bool is_tiled) {
  const int64_t least = is_tiled ? 128 : block_bytes <= CACHED ? 16 : 64;
  if (threads < 2 || tokens < 2 * threads * least) return 0;
  if (is_tiled) return std::clamp(tokens / (TILED_CHUNKS_PER_THREAD * threads), least, MOST_TILED_CHUNK);
  return std::clamp(tokens / (CHUNKS_PER_THREAD * threads), least, MOST_CHUNK);
}

// Shares longer than a chunk are cut where attention cuts them into tiles, so that it computes the same ones.
inline std::vector<Span> spans_of(const int32_t* starts, int64_t num_shares, int64_t size, int64_t tile) {
  std::vector<Span> spans;
  Span open{0, 0, 0, 0};
  const auto close = [&](int64_t next_share) {
    if (open.past > open.first) spans.push_back(open);
    open = {next_share, next_share, open.past, open.past};
  };
  const int64_t piece = (size + tile - 1) / tile * tile;
  for (int64_t share = 0; share < num_shares; ++share) {
    const int64_t first = starts[share], past = starts[share + 1];
    if (past - open.first > size) close(share);
    int64_t begin = first;
    for (; past - begin > piece + 1; begin += piece) {  // a single token would be attended in another way
      open.past_share = share + 1, open.past = begin + piece;
      close(share);
    }
    open.past_share = share + 1, open.past = past;
  }
  close(num_shares);
  return spans;
}

// The tokens of a span among those that the step keeps.
inline Kept kept_of(const Kept& all, const Span& span, const std::vector<int32_t>& starts) {
  const auto begin = std::lower_bound(all.tokens.begin(), all.tokens.end(), span.first);
  const auto end = std::lower_bound(begin, all.tokens.end(), span.past);
  const int64_t first = begin - all.tokens.begin(), past = end - all.tokens.begin();
  Kept kept{{}, {}, {}};
  for (auto token = begin; token != end; ++token) kept.tokens.push_back(*token - span.first);
  for (const int32_t start : starts)
    kept.starts.push_back(std::lower_bound(kept.tokens.begin(), kept.tokens.end(), start) - kept.tokens.begin());
  for (const int64_t row : all.rows)
    if (row >= first && row < past) kept.rows.push_back(row - first);
  return kept;
}

template <class T, class P>
struct Chunk {
  const std::vector<int32_t> starts, lengths;  // of its shares
  const Kept kept;
  const Adapted adapted, adapted_kept;
  Cuts<T, P> cuts;
  const Step<T, P> step;
  const Chunk* const before;          // has earlier tokens of the first share; null: none has
  std::optional<Pass<T, P>> pass;
  T* asked = nullptr;                 // where its first state belongs
  std::atomic<int64_t> done{0};       // blocks
  std::atomic<bool> is_taken{false};  // by a thread

  // of_token: the adapters of the step's tokens.
  Chunk(const Step<T, P>& of, const Span& span, const std::vector<const Adapter*>& of_token, const Chunk* before)
      : starts(starts_of(of.task, span)), lengths(lengths_of(of.task, span)), kept(kept_of(of.kept, span, starts)),
        adapted(of.adapted.cuts, {of_token.begin() + span.first, of_token.begin() + span.past}),
        adapted_kept(of.adapted.cuts, only({of_token.begin() + span.first, of_token.begin() + span.past}, kept.tokens)),
        cuts(of.model, task_of(of.task, span), lengths.size(), kept), step(step_of(of, span)),
        before(before) {}

  bool is_ready(int64_t block) const { return !before || before->done.load(std::memory_order_acquire) > block; }

  void compute(int64_t block, int64_t num_blocks) {
    Alone alone;
    if (block == 0) pass->embed(alone);
    pass->block(alone, block);
    if (block + 1 == num_blocks) pass->finish(alone, asked);
  }

 private:
  static std::vector<const Adapter*> only(const std::vector<const Adapter*>& all, const std::vector<int64_t>& tokens) {
    std::vector<const Adapter*> some;
    for (const int64_t token : tokens) some.push_back(all[token]);
    return some;
  }
  static std::vector<int32_t> starts_of(const attention::Task<T, P>& task, const Span& span) {
    std::vector<int32_t> starts{0};
    for (int64_t share = span.first_share; share < span.past_share; ++share)
      starts.push_back(std::min<int64_t>(task.starts[share + 1], span.past) - span.first);
    return starts;
  }
  static std::vector<int32_t> lengths_of(const attention::Task<T, P>& task, const Span& span) {
    std::vector<int32_t> lengths;
    for (int64_t share = span.first_share; share < span.past_share; ++share)
      lengths.push_back(task.lengths[share] - std::max<int64_t>(0, task.starts[share + 1] - span.past));
    return lengths;
  }
  attention::Task<T, P> task_of(attention::Task<T, P> task, const Span& span) const {
    task.starts = starts.data(), task.lengths = lengths.data(), task.tables += span.first_share * task.table_width;
    return task;
  }
  Step<T, P> step_of(const Step<T, P>& of, const Span& span) {
    rotary::Heads<T> heads = of.heads;
    heads.positions += span.first;
    return {of.model, span.past - span.first, of.ids + span.first, of.slots + span.first, heads, of.angles, task_of(of.task, span),
            of.pages, of.half_layer, of.group_slots, of.group_tables, cuts, kept, adapted, adapted_kept, of.hidden + span.first * of.model.hidden, nullptr};
  }
};

template <class T, class P>
class Chunks {
 public:
  Chunks(const Step<T, P>& step, const std::vector<Span>& spans, const std::vector<const Adapter*>& of_token)
      : num_blocks_(step.model.layers.size()) {
    for (const Span& span : spans) {
      const bool is_begun = span.first > step.task.starts[span.first_share];
      all_.emplace_back(step, span, of_token, is_begun ? &all_.back() : nullptr);
    }
  }

  // Give each its memory; asked: that of the states whose logits are asked for.
  void lay_out(Space& space, T* asked) {
    for (Chunk<T, P>& chunk : all_) {
      const Model& model = chunk.step.model;
      chunk.pass.emplace(chunk.step, Activations<T>(model, chunk.step.num_tokens, chunk.adapted, space));
      chunk.asked = asked;
      asked += chunk.kept.rows.size() * model.hidden;
    }
  }

  // Compute until nothing is left; of every thread.
  void work() {
    for (;;) {
      const int32_t seen = changed_.value();
      bool is_done = true;
      if (Chunk<T, P>* chunk = take(is_done)) {
        const int64_t block = chunk->done.load(std::memory_order_relaxed);
        chunk->compute(block, num_blocks_);
        chunk->done.store(block + 1, std::memory_order_release);
        chunk->is_taken.store(false, std::memory_order_release);
        changed_.add(1);
      } else if (is_done) {
        return;
      } else {
        changed_.wait(seen);
      }
    }
  }

 private:
  // The chunk that is furthest behind of those that can go on; null: there is none now, or `is_done`.
  Chunk<T, P>* take(bool& is_done) {
    for (;;) {
      Chunk<T, P>* found = nullptr;
      int64_t least = num_blocks_;
      is_done = true;
      for (Chunk<T, P>& chunk : all_) {
        const int64_t done = chunk.done.load(std::memory_order_acquire);
        is_done = is_done && done == num_blocks_;
        if (done < least && !chunk.is_taken.load(std::memory_order_relaxed) && chunk.is_ready(done)) found = &chunk, least = done;
      }
      if (!found) return nullptr;
      if (found->is_taken.exchange(true, std::memory_order_acquire)) continue;
      if (found->done.load(std::memory_order_acquire) == least) return found;
      found->is_taken.store(false, std::memory_order_release);  // others took it, and are done with that block
    }
  }

  std::deque<Chunk<T, P>> all_;  // which do not move
  const int64_t num_blocks_;
  Signal changed_;
};

}  // namespace penstock::network
