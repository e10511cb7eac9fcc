// What adapters make of the products of a step, with the A and B of each token's adapter:
//
//   LoRA: y += (x A^T) B^T        DoRA: y = (y + (x A^T) B^T) factors + shifts
//
// Tokens that have an adapter are gathered, those of one beside each other, so that its matrices are read once for
// up to 14 of them. Then come two products over panels (panels.h), down to the rank and up to the outputs; sums are
// float32, and a token's do not depend on the others.
//
// A layer may be several that read the same input (query, key, value). The A of these parts lie below one another,
// [parts x rank, inputs]; of B no panel has outputs of two parts.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "matrix.h"
#include "panels.h"
#include "product.h"

namespace penstock::network {

enum Linear { QUERY_KEY_VALUE, OUTPUT, GATE_UP, DOWN, LINEARS };  // of a block

// What an adapter makes of one layer; null: nothing.
struct Update {
  const void *down, *up;          // panels of A and of B
  const float *factors, *shifts;  // of the outputs; null: LoRA
};

struct Adapter {
  int64_t rank;  // filled up to whole units
  std::vector<std::array<Update, LINEARS>> blocks;
};

// The outputs of one panel of B, all of one part.
struct Piece {
  int64_t part, first, past;
};

// How one layer's outputs are cut.
struct Cut {
  int64_t parts = 0;
  std::vector<Piece> pieces;

  Cut(std::initializer_list<int64_t> sizes = {}) {
    int64_t begin = 0;
    for (const int64_t size : sizes) {
      for (int64_t first = 0; first < size; first += PANEL)
        pieces.push_back({parts, begin + first, begin + std::min(first + PANEL, size)});
      begin += size, ++parts;
    }
  }
  // Rows of the A of all parts, in whole panels.
  int64_t low_width(int64_t rank) const { return (parts * rank + PANEL - 1) / PANEL * PANEL; }
};

using LayerCuts = std::array<Cut, LINEARS>;  // alike in all blocks

// Tokens that have an adapter, those of one beside each other, and how they are cut into tiles.
struct Adapted {
  struct Run {
    const Adapter* adapter;
    int64_t first, count;  // among `tokens`
  };
  const LayerCuts& cuts;
  std::vector<int64_t> tokens;
  std::vector<Run> runs;
  int64_t rank = 0;  // the largest

  // of_token: null where a token has none.
  Adapted(const LayerCuts& cuts, const std::vector<const Adapter*>& of_token) : cuts(cuts) {
    std::map<const Adapter*, std::vector<int64_t>> found;
    for (size_t token = 0; token < of_token.size(); ++token)
      if (of_token[token]) found[of_token[token]].push_back(token);
    for (const auto& [adapter, own] : found) {
      rank = std::max(rank, adapter->rank);
      const int64_t begin = tokens.size(), size = own.size(), parts = (size + MAX_TOKENS - 1) / MAX_TOKENS;
      for (int64_t part = 0; part < parts; ++part) {  // of about one size, for the threads' sake
        const int64_t first = size * part / parts;
        runs.push_back({adapter, begin + first, size * (part + 1) / parts - first});
      }
      tokens.insert(tokens.end(), own.begin(), own.end());
    }
  }
  int64_t widest() const {
    int64_t width = 0;
    for (const Cut& cut : cuts) width = std::max(width, cut.low_width(rank));
    return width;
  }
};

// to[i] = from[rows[i]].
template <class T>
void gather(Threads& threads, const T* from, const std::vector<int64_t>& rows, int64_t size, T* to) {
  threads.each(static_cast<int64_t>(rows.size()), grain_of(size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + rows[i] * size, size, to + i * size);
  });
}

// Applies the adapters of a step to the outputs of layers.
template <class T>
struct Adding {
  const Adapted* adapted;
  T *gathered, *low;  // of each adapted token: what a layer reads, and its product with A

  void add(Threads& threads, size_t block, Linear layer, const Matrix& matrix, const T* x, T* out) const {
    if (adapted->runs.empty()) return;
    gather(threads, x, adapted->tokens, matrix.inputs, gathered);
    go_down(threads, block, layer, matrix.inputs);
    go_up(threads, block, layer, matrix.outputs, out);
  }

 private:
  // low = gathered A^T
  void go_down(Threads& threads, size_t block, Linear layer, int64_t inputs) const {
    const Cut& cut = adapted->cuts[layer];
    const int64_t width = cut.low_width(adapted->rank);
    each_run(threads, width / PANEL, [&](int64_t panel, const Adapted::Run& run) {
      const auto* matrix = static_cast<const T*>(run.adapter->blocks[block][layer].down);
      if (!matrix || panel * PANEL >= cut.low_width(run.adapter->rank)) return;
      float sums[MAX_TOKENS * PANEL];
      multiply_panel(matrix + panel * inputs * PANEL, gathered + run.first * inputs, inputs, inputs, run.count, sums);
      for (int64_t t = 0; t < run.count; ++t)
        for (int64_t n = 0; n < PANEL; n += LANES)
          Vec::load(sums + t * PANEL + n).store(low + (run.first + t) * width + panel * PANEL + n);
    });
  }

  // out[token] += low B^T, then DoRA's factors and shifts.
  void go_up(Threads& threads, size_t block, Linear layer, int64_t outputs, T* out) const {
    const Cut& cut = adapted->cuts[layer];
    const int64_t width = cut.low_width(adapted->rank);
    each_run(threads, cut.pieces.size(), [&](int64_t panel, const Adapted::Run& run) {
      const Update& update = run.adapter->blocks[block][layer];
      const auto* matrix = static_cast<const T*>(update.up);
      if (!matrix) return;
      const Piece& piece = cut.pieces[panel];
      const int64_t rank = run.adapter->rank;
      const T* rows = low + run.first * width + piece.part * rank;
      float sums[MAX_TOKENS * PANEL];
      multiply_panel(matrix + panel * rank * PANEL, rows, width, rank, run.count, sums);
      for (int64_t t = 0; t < run.count; ++t)
        for (int64_t n = piece.first; n < piece.past; n += LANES) {
          T* to = out + adapted->tokens[run.first + t] * outputs + n;
          const Lanes at = lanes(n, piece.past);
          const Vec sum = at.load(to) + Vec::load(sums + t * PANEL + n - piece.first);
          at.store(to, update.factors ? Vec::fma(sum, at.load(update.factors + n), at.load(update.shifts + n)) : sum);
        }
    });
  }

  // Runs of one panel follow each other, so that of one adapter it is read from memory once.
  template <class Body>
  void each_run(Threads& threads, int64_t panels, const Body& body) const {
    const int64_t runs = adapted->runs.size();
    threads.each(panels * runs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) body(item / runs, adapted->runs[item % runs]);
    });
  }
};

}  // namespace penstock::network
