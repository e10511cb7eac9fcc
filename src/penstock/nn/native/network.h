// One step of a whole decoder over pages, as every thread of a region runs it.
//
// The phases are those of the operators (norm.h, product.h, rotary.h, attention.h, gate.h), to the same bits;
// threads meet after each. Waking them for each phase, nine times a block, took a third of a step's time of a
// small model, and so did what Python did between blocks.
//
// Adapters come after each product (adapted.h).
//
// Many tokens go through the blocks in chunks instead, each in the hands of one thread at a time (chunks.h).
//
// Of the last block only what somebody asks for is computed: all tokens give their keys and values, and those
// from the first asked-for token of each share on are attended and go through the feed-forward layer.
//
// Where the network is one rank's part (engine/model_runner/tensor_parallel.py), its threads write their summands straight to the
// board that the ranks share, and one of them meets the other ranks.
#pragma once

#include <map>

#include "adapted.h"
#include "attention/attention.h"
#include "exchange.h"
#include "gate.h"
#include "norm.h"
#include "product.h"
#include "rotary.h"
#include "threads.h"

namespace penstock::network {

struct Layer {
  Matrix query_key_value, output, gate_up, down;
  const void *attention_norm, *mlp_norm, *query_norm, *key_norm, *attention_out_norm, *mlp_out_norm;  // each may be null
  const float* sinks;  // of this rank's heads; may be null
  int64_t window, rope, group, row;  // rope: which of the tables of angles; group: of the cache; row: in its blocks
};

struct Model {
  std::vector<Layer> layers;
  Matrix head;
  int64_t ropes;  // tables of angles
  const void *embedding, *norm, *added = nullptr;
  int64_t num_added = 0;            // rows of the embedding after the vocabulary, all of them on each rank: of adapters
  std::vector<int64_t> vocabulary;  // first token of each rank's rows of embedding and head, and the number of all
  exchange::Board* board;           // null: there is one rank
  int64_t hidden, heads, kv_heads, dim;
  float eps, scale, residual_multiplier, embedding_multiplier, shift, softcap;  // the shift is added to the weights of norms
  gate::Activation activation;
  bool is_gated, has_whole_norms, norms_rotated;  // norms of queries and keys: over all heads of all ranks; after rotation
  int64_t rank() const { return board ? board->rank() : 0; }
  // Of one token, on the rank that has most of the vocabulary.
  int64_t logits_bytes(int64_t item) const { return item * (vocabulary.back() / (std::ssize(vocabulary) - 1) + 1); }
};

// Memory for a step's tokens, one array behind the other.
class Space {
 public:
  explicit Space(char* memory) : begin_(memory), next_(memory) {}
  template <class T>
  T* take(int64_t count) {
    char* taken = next_;
    next_ += attention::up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(taken);
  }
  int64_t used() const { return next_ - begin_; }

 private:
  char *const begin_, *next_;
};

template <class T>
struct Activations {
  T *x, *normed, *qkv, *q, *mixed, *delta, *gate_up, *gated;
  T *gathered, *low;  // of tokens with adapters
  float* means;       // of tokens' queries and keys
  char* rounded;      // tokens as products take them

  Activations(const Model& model, int64_t tokens, const Adapted& adapted, Space& space) {
    const int64_t width = model.heads * model.dim, num_adapted = adapted.tokens.size();
    int64_t inner = 0, bytes = 0;
    for (const Layer& layer : model.layers) {
      inner = std::max(inner, layer.down.inputs);
      for (const Matrix* matrix : {&layer.query_key_value, &layer.output, &layer.gate_up, &layer.down})
        bytes = std::max(bytes, product_bytes<T>(*matrix, tokens));
    }
    for (T** one : {&x, &normed, &delta}) *one = space.take<T>(tokens * model.hidden);
    for (T** one : {&q, &mixed}) *one = space.take<T>(tokens * width);
    qkv = space.take<T>(tokens * (width + 2 * model.kv_heads * model.dim));
    gate_up = space.take<T>(tokens * 2 * inner), gated = space.take<T>(tokens * inner);
    gathered = space.take<T>(num_adapted * std::max({model.hidden, width, inner}));
    low = space.take<T>(num_adapted * adapted.widest());
    means = space.take<float>(2 * tokens);
    rounded = space.take<char>(bytes);
  }
};

// The states whose logits are asked for, and those as their product takes them.
template <class T>
struct Asked {
  T* states;
  char* rounded;

  Asked(const Model& model, int64_t rows, Space& space)
      : states(space.take<T>(rows * model.hidden)), rounded(space.take<char>(product_bytes<T>(model.head, rows))) {}
};

// Which tokens of the last block are computed whole.
struct Kept {
  std::vector<int64_t> tokens;  // ascending
  std::vector<int32_t> starts;  // of each share among them
  std::vector<int64_t> rows;    // of the tokens whose logits are asked for
};

// How attention is cut into units: once for the layers of a window, and once for the last layer.
template <class T, class P>
struct Cuts {
  std::map<int64_t, attention::Plan> of_window;
  attention::Plan last;
  attention::Partials partials;
  std::vector<std::atomic<int64_t>> next;  // of each layer

  Cuts(const Model& model, attention::Task<T, P> task, int64_t num_shares, const Kept& kept)
      : partials{task.group(), attention::up(task.dim, LANES), {}, {}, {}}, next(model.layers.size()) {
    int64_t most = 0;
    for (const Layer& layer : model.layers) {
      task.window = layer.window;
      if (!of_window.contains(layer.window)) of_window[layer.window] = attention::cut(task, num_shares);
      most = std::max(most, of_window[layer.window].num_partials);
    }
    last = attention::cut(task, num_shares, kept.starts.data());
    partials.resize(std::max(most, last.num_partials));
  }
  const attention::Plan& of(size_t layer, int64_t window) const {
    return layer + 1 == next.size() ? last : of_window.at(window);
  }
};

// What is computed of a step, or of a chunk of its tokens.
template <class T, class P>
struct Step {
  const Model& model;
  int64_t num_tokens;
  const int64_t *ids, *slots;
  rotary::Heads<T> heads;
  int64_t angles;  // numbers of a table
  attention::Task<T, P> task;
  P* pages;
  int64_t half_layer;                 // numbers of a layer's keys
  int64_t group_slots, group_tables;  // numbers of a cache group's slots, and of its block tables
  Cuts<T, P>& cuts;
  const Kept& kept;
  const Adapted &adapted, &adapted_kept;  // the tokens, and those kept
  T *hidden, *logits;                     // [tokens, hidden] and [rows, vocabulary]
};

// out = the sum of what `write(part)` writes on all ranks, `count` numbers.
template <class T, class Write>
void summed(Threads& threads, exchange::Board* board, int64_t count, T* out, const Write& write) {
  if (!board) return write(out);
  write(reinterpret_cast<T*>(board->own()));
  threads.once([&] { board->meet(); });
  exchange::add_parts(threads, *board, count, out);
}

template <class T, class P>
void embed(Threads& threads, const Step<T, P>& step, T* x) {
  const Model& model = step.model;
  const int64_t size = model.hidden, first = model.vocabulary[model.rank()], past = model.vocabulary[model.rank() + 1];
  const Vec multiplier(model.embedding_multiplier);
  summed(threads, model.board, step.num_tokens * size, x, [&](T* part) {
    threads.each(step.num_tokens, grain_of(size), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t id = step.ids[token];
        const bool is_added = id >= model.vocabulary.back();
        const T* row = is_added ? static_cast<const T*>(model.added) + (id - model.vocabulary.back()) * size
                                : static_cast<const T*>(model.embedding) + (id - first) * size;
        const bool is_here = is_added ? model.rank() == 0 : id >= first && id < past;
        each_lane(size, [&](int64_t i, auto at) { at.store(part + token * size + i, is_here ? at.load(row + i) * multiplier : Vec()); });
      }
    });
  });
}

// The logits of the tokens that are asked for, on the first rank; as many at once as the board has room for.
template <class T, class P>
void project(Threads& threads, const Step<T, P>& step, const Asked<T>& asked) {
  const Model& model = step.model;
  const int64_t rows = static_cast<int64_t>(step.kept.rows.size());
  if (!model.board) return product(threads, model.head, asked.states, rows, step.logits, asked.rounded);
  const std::vector<int64_t>& starts = model.vocabulary;
  const int64_t at_once = model.board->room() / model.logits_bytes(sizeof(T));
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    product(threads, model.head, asked.states + first * model.hidden, count, reinterpret_cast<T*>(model.board->own()),
            asked.rounded);
    threads.once([&] { model.board->meet(); });
    if (model.rank() > 0) continue;
    threads.each(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t rank = 0; rank < model.board->ranks(); ++rank) {
          const int64_t size = starts[rank + 1] - starts[rank];
          const T* part = reinterpret_cast<const T*>(model.board->part(rank)) + row * size;
          std::copy_n(part, size, step.logits + (first + row) * starts.back() + starts[rank]);
        }
    });
  }
}

template <class T, class P>
void attend_layer(Threads& threads, const Step<T, P>& step, size_t i, const T* q, T* mixed) {
  const Layer& layer = step.model.layers[i];
  attention::Task<T, P> task = step.task;
  task.q = q, task.out = mixed;
  task.keys = step.pages + 2 * layer.row * step.half_layer, task.values = task.keys + step.half_layer;
  task.window = layer.window, task.sinks = layer.sinks, task.tables += layer.group * step.group_tables;
  attention::attend(threads, task, step.cuts.of(i, layer.window), step.cuts.partials, step.cuts.next[i]);
}

// The way of some tokens through the network. What is written is shared by the threads; where it is, each knows.
template <class T, class P>
class Pass {
 public:
  Pass(const Step<T, P>& step, const Activations<T>& at)
      : step_(step), at_(at), tokens_(step.num_tokens), adapters_{&step.adapted, at.gathered, at.low} {}

  void embed(Threads& threads) { network::embed(threads, step_, at_.x); }

  void block(Threads& threads, size_t i) {
    const Model& model = step_.model;
    const Layer& layer = model.layers[i];
    add_and_norm(threads, norm(layer.attention_norm), at_.x, delta_, model.residual_multiplier, tokens_, at_.normed);
    linear(threads, i, QUERY_KEY_VALUE, layer.query_key_value, layer.attention_norm ? at_.normed : at_.x, at_.qkv);
    rotary::Heads<T> heads = step_.heads;
    heads.cosines += layer.rope * step_.angles, heads.sines += layer.rope * step_.angles;
    heads.q_norm = static_cast<const T*>(layer.query_norm), heads.k_norm = static_cast<const T*>(layer.key_norm);
    if (model.has_whole_norms) heads.means = measured(threads, heads);
    P* keys = step_.pages + 2 * layer.row * step_.half_layer;
    const int64_t* slots = step_.slots + layer.group * step_.group_slots;
    rotary::take_tokens(threads, heads, at_.qkv, slots, tokens_, step_.task.block_size, at_.q, keys, keys + step_.half_layer);
    if (i + 1 == model.layers.size() && step_.kept.tokens.size() < static_cast<size_t>(tokens_)) {
      tokens_ = step_.kept.tokens.size();
      gather(threads, at_.x, step_.kept.tokens, model.hidden, at_.normed);
      gather(threads, at_.q, step_.kept.tokens, model.heads * model.dim, at_.qkv);
      std::swap(at_.x, at_.normed), std::swap(at_.q, at_.qkv);
      adapters_.adapted = &step_.adapted_kept;
    }
    attend_layer(threads, step_, i, at_.q, at_.mixed);
    summed(threads, model.board, tokens_ * model.hidden, at_.delta,
           [&](T* part) { linear(threads, i, OUTPUT, layer.output, at_.mixed, part); });
    normalise(threads, layer.attention_out_norm, at_.delta);
    add_and_norm(threads, norm(layer.mlp_norm), at_.x, at_.delta, model.residual_multiplier, tokens_, at_.normed);
    linear(threads, i, GATE_UP, layer.gate_up, layer.mlp_norm ? at_.normed : at_.x, at_.gate_up);
    gate::activate_rows(threads, model.activation, at_.gate_up, tokens_, layer.down.inputs, model.is_gated, at_.gated);
    summed(threads, model.board, tokens_ * model.hidden, at_.delta,
           [&](T* part) { linear(threads, i, DOWN, layer.down, at_.gated, part); });
    normalise(threads, layer.mlp_out_norm, at_.delta);
    delta_ = at_.delta;
  }

  // Write the normalised stream, and to `asked` that of the tokens whose logits are asked for.
  void finish(Threads& threads, T* asked) {
    const Model& model = step_.model;
    add_and_norm(threads, norm(model.norm), at_.x, delta_, model.residual_multiplier, tokens_, at_.normed);
    threads.each(tokens_, grain_of(model.hidden), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::copy_n(at_.normed + row * model.hidden, model.hidden, step_.hidden + step_.kept.tokens[row] * model.hidden);
    });
    gather(threads, at_.normed, step_.kept.rows, model.hidden, asked);
  }

 private:
  Norm<T> norm(const void* weight) const {
    return {static_cast<const T*>(weight), step_.model.eps, step_.model.shift, step_.model.hidden};
  }
  void normalise(Threads& threads, const void* weight, T* x) {
    if (weight) add_and_norm<T>(threads, norm(weight), x, nullptr, 1.0f, tokens_, x);
  }
  // The mean squares of the tokens' queries and keys over the heads of all ranks, each of which has as many.
  const float* measured(Threads& threads, const rotary::Heads<T>& heads) {
    exchange::Board* board = step_.model.board;
    summed(threads, board, 2 * tokens_, at_.means, [&](float* part) { rotary::measure(threads, heads, at_.qkv, tokens_, part); });
    if (board)
      threads.each(2 * tokens_, grain_of(1), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) at_.means[i] /= static_cast<float>(board->ranks());
      });
    return at_.means;
  }
  void linear(Threads& threads, size_t i, Linear of, const Matrix& matrix, const T* x, T* out) {
    product(threads, matrix, x, tokens_, out, at_.rounded);
    adapters_.add(threads, i, of, matrix, x, out);
  }

  const Step<T, P>& step_;
  Activations<T> at_;
  int64_t tokens_;
  Adding<T> adapters_;
  const T* delta_ = nullptr;  // what is still to be added to the stream
};

}  // namespace penstock::network
