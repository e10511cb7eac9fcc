// A decoder as an object that computes whole steps; it holds its operands and the memory for activations.

#include "chunks.h"
#include "tensors.h"

namespace penstock::network {

using Operands = c10::List<std::optional<at::Tensor>>;

constexpr int64_t OF_LINEAR = 4, OF_UPDATE = 3, NORMS = 6;  // operands of a linear layer and of an update; norms of a block
constexpr int64_t OF_BLOCK = OF_LINEAR * LINEARS + NORMS + 1;  // the last are its sinks

inline const void* pointer_of(const Optional& tensor, at::ScalarType type, int64_t size) {
  if (!tensor) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == type && tensor->is_contiguous() && tensor->numel() == size,
              "Network: a tensor ", tensor->sizes(), " of ", tensor->scalar_type(), " where ", size, " numbers belong");
  return tensor->const_data_ptr();
}

// From the first asked-for token of each share on; `rows` and `others` are ascending.
inline Kept keep(const at::Tensor& starts, int64_t tokens, const at::Tensor& rows, const at::Tensor& others) {
  std::vector<bool> is_asked(tokens);
  for (const at::Tensor& some : {rows, others})
    for (int64_t i = 0; i < some.numel(); ++i) is_asked[some.const_data_ptr<int64_t>()[i]] = true;
  Kept kept{{}, {0}, {}};
  std::vector<int64_t> place(tokens);
  for (int64_t share = 0; share + 1 < starts.numel(); ++share) {
    bool is_kept = false;
    for (int64_t token = starts.const_data_ptr<int32_t>()[share]; token < starts.const_data_ptr<int32_t>()[share + 1]; ++token) {
      if (!(is_kept |= is_asked[token])) continue;
      place[token] = kept.tokens.size();
      kept.tokens.push_back(token);
    }
    kept.starts.push_back(static_cast<int32_t>(kept.tokens.size()));
  }
  for (int64_t i = 0; i < rows.numel(); ++i) kept.rows.push_back(place[rows.const_data_ptr<int64_t>()[i]]);
  return kept;
}

// The numbers of some tokens.
template <class T>
std::vector<T> only(const std::vector<T>& all, const std::vector<int64_t>& tokens) {
  std::vector<T> some;
  for (const int64_t token : tokens) some.push_back(all[token]);
  return some;
}

struct Held {
  Operands operands;  // hold what the adapter points to
  Adapter adapter;
};

class Network : public torch::CustomClassHolder {
 public:
  // blocks: of each, OF_BLOCK operands: linears and norms in the order of `decoder_block`, and sinks; ends: embedding, last norm, operands of the
  // output matrix; outputs: of each linear layer, the output matrix last; numbers: eps, scale, multipliers of
  // residual sums and of the embedding, shift of norms, softcap of scores; options: activation, is_gated, has_whole_norms, norms_rotated; vocabulary: first
  // token of each rank's rows, and the number of all; ropes: of each block, its table of angles; places: of each block,
  // its cache group, and its row in the pages; pages: [rows, 2, pages, heads, positions, dim], or of codes and scales;
  // board: of the ranks, if there are several.
  Network(Operands blocks, Operands ends, std::vector<int64_t> outputs, std::vector<int64_t> windows,
          std::vector<int64_t> ropes, std::vector<int64_t> places, std::vector<double> numbers,
          std::vector<int64_t> options, std::vector<int64_t> vocabulary, at::Tensor pages,
          std::optional<c10::intrusive_ptr<exchange::Board>> board)
      : blocks_(std::move(blocks)), ends_(std::move(ends)), pages_(std::move(pages)), board_(std::move(board)),
        type_(ends_.get(0).value().scalar_type()) {
    const size_t count = windows.size();
    TORCH_CHECK(blocks_.size() == count * OF_BLOCK && ends_.size() == 2 + OF_LINEAR && numbers.size() == 6 && options.size() == 4 && count > 0 &&
                outputs.size() == count * LINEARS + 1 && ropes.size() == count && pages_.dim() == 6 && pages_.is_contiguous() &&
                places.size() == 2 * count, "Network: operands of ", count, " blocks, pages ", pages_.sizes());
    const at::Tensor embedding = ends_.get(0).value();
    model_.kv_heads = pages_.size(3), model_.dim = dim_of(pages_);
    model_.hidden = embedding.size(1);
    model_.board = board_ ? board_->get() : nullptr;
    model_.vocabulary = std::move(vocabulary);
    TORCH_CHECK(model_.vocabulary.size() == static_cast<size_t>(model_.board ? model_.board->ranks() : 1) + 1 &&
                std::is_sorted(model_.vocabulary.begin(), model_.vocabulary.end()) && model_.vocabulary[0] == 0 &&
                own_vocabulary() == embedding.size(0) && own_vocabulary() == outputs.back(),
                "Network: ", embedding.size(0), " rows of an embedding, ", outputs.back(), " of a head, for ", model_.vocabulary);
    TORCH_CHECK(!board_ || model_.logits_bytes(embedding.element_size()) <= model_.board->room(),
                "Network: slots of ", model_.board->room(), " bytes for logits of ", model_.vocabulary.back(), " tokens");
    model_.embedding = pointer_of(embedding, type_, embedding.numel());
    model_.norm = pointer_of(ends_.get(1), type_, model_.hidden);
    model_.head = linear(ends_, 2, model_.hidden, outputs.back());
    model_.eps = numbers[0], model_.scale = numbers[1];
    model_.residual_multiplier = numbers[2], model_.embedding_multiplier = numbers[3], model_.shift = numbers[4];
    model_.softcap = numbers[5];
    TORCH_CHECK(options[0] >= 0 && options[0] < gate::ACTIVATIONS, "Network: no activation ", options[0]);
    model_.activation = gate::Activation(options[0]), model_.is_gated = options[1], model_.has_whole_norms = options[2];
    model_.norms_rotated = options[3];
    for (size_t i = 0; i < count; ++i) add_block(i * OF_BLOCK, &outputs[i * LINEARS], windows[i], ropes[i], &places[2 * i]);
    TORCH_CHECK(*std::min_element(ropes.begin(), ropes.end()) >= 0, "Network: tables of angles ", ropes);
    model_.ropes = *std::max_element(ropes.begin(), ropes.end()) + 1;
    const int64_t of_queries = model_.heads * model_.dim, of_keys = model_.kv_heads * model_.dim;
    const int64_t inner = model_.layers[0].down.inputs;
    layer_cuts_ = {Cut{of_queries, of_keys, of_keys}, Cut{model_.hidden}, model_.is_gated ? Cut{inner, inner} : Cut{inner},
                   Cut{model_.hidden}};
  }

  // Take an adapter of this rank. operands: of each linear layer the panels of A and of B, and its factors and shifts
  // [2, outputs], null for LoRA; or three nulls.
  void hold(int64_t index, Operands operands, int64_t rank) {
    TORCH_CHECK(rank > 0 && operands.size() == OF_UPDATE * LINEARS * model_.layers.size(), "Network: an adapter of rank ", rank,
                " with ", operands.size(), " operands");
    Adapter adapter{rank, {}};
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& layer = model_.layers[i];
      const Matrix* matrices[LINEARS] = {&layer.query_key_value, &layer.output, &layer.gate_up, &layer.down};
      auto& block = adapter.blocks.emplace_back();
      for (size_t of = 0; of < LINEARS; ++of) {
        const Cut& cut = layer_cuts_[of];
        const int64_t first = OF_UPDATE * (i * LINEARS + of), panels = cut.pieces.size(), outputs = matrices[of]->outputs;
        const auto* factors = static_cast<const float*>(pointer_of(operands.get(first + 2), at::kFloat, 2 * outputs));
        block[of] = {pointer_of(operands.get(first), type_, cut.low_width(rank) * matrices[of]->inputs),
                     pointer_of(operands.get(first + 1), type_, panels * PANEL * rank), factors,
                     factors ? factors + outputs : nullptr};
      }
    }
    held_.insert_or_assign(index, Held{std::move(operands), std::move(adapter)});
  }

  void release(int64_t index) { held_.erase(index); }

  // Take the rows of the embedding for token ids after the vocabulary, instead of earlier ones; null: none.
  void extend(std::optional<at::Tensor> rows) {
    const int64_t count = rows ? rows->size(0) : 0;
    model_.added = rows ? pointer_of(rows, type_, count * model_.hidden) : nullptr;
    model_.num_added = count;
    added_ = std::move(rows);
  }

  // cosines, sines: [tables of angles, positions, 1, dim]; q_scales: factors on queries, [positions], or none.
  // Returns the normalised stream of all tokens, right where rows or others ask for it, and the logits of rows.
  std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& cosines,
                                         const at::Tensor& sines, const std::optional<at::Tensor>& q_scales, const at::Tensor& slots, const at::Tensor& starts,
                                         const at::Tensor& lengths, const at::Tensor& tables, const at::Tensor& rows,
                                         const at::Tensor& others, const at::Tensor& adapters) {
    const int64_t tokens = ids.numel(), num_blocks = pages_.size(2), block_size = pages_.size(4);
    check_indexes(ids, tokens, model_.vocabulary.back() + model_.num_added, "token");
    check_indexes(slots, num_groups_ * tokens, num_blocks * block_size, "slot");
    const int64_t angles = cosines.numel() / model_.ropes;
    check_indexes(positions, tokens, angles / model_.dim, "position");
    check_indexes(rows, rows.numel(), tokens, "row");
    check_indexes(others, others.numel(), tokens, "row");
    TORCH_CHECK(tables.dim() == 3 && tables.size(0) == num_groups_, "Network: ", num_groups_, " groups, tables ", tables.sizes());
    for (int64_t group = 0; group < num_groups_; ++group)
      attention::check_shares(tokens, num_blocks, block_size, starts, lengths, tables[group]);
    for (const at::Tensor& t : {cosines, sines}) pointer_of(t, type_, cosines.numel());
    const at::TensorOptions numbers = pages_.options().dtype(type_);
    at::Tensor hidden = at::empty({tokens, model_.hidden}, numbers);
    at::Tensor logits = at::empty({rows.numel(), model_.rank() ? 0 : model_.vocabulary.back()}, numbers);
    TORCH_CHECK(!model_.board || static_cast<int64_t>(hidden.nbytes()) <= model_.board->room(), "Network: ", tokens,
                " tokens for slots of ", model_.board->room(), " bytes");
    const Kept kept = keep(starts, tokens, rows, others);
    const std::vector<const Adapter*> of_token = adapters_of(starts, adapters, tokens);
    const Adapted adapted(layer_cuts_, of_token), adapted_kept(layer_cuts_, only(of_token, kept.tokens));
    dispatch_pages(hidden, pages_, [&](auto zero, auto page_zero) {
      using T = decltype(zero);
      using P = decltype(page_zero);
      const attention::Task<T, P> task{nullptr, nullptr, nullptr, nullptr, starts.const_data_ptr<int32_t>(),
                                    lengths.const_data_ptr<int32_t>(), tables.const_data_ptr<int32_t>(),
                                    model_.heads * model_.dim, model_.heads, model_.kv_heads, block_size, model_.dim,
                                    tables.size(2), 0, model_.scale, nullptr, model_.softcap};
      const rotary::Heads<T> heads{data<T>(cosines), data<T>(sines), positions.const_data_ptr<int64_t>(),
                                   nullptr, nullptr, model_.eps, model_.shift, model_.heads, model_.kv_heads, model_.dim,
                                   nullptr, model_.norms_rotated,
                                   static_cast<const T*>(pointer_of(q_scales, type_, angles / model_.dim))};
      const int64_t size = model_.board ? 0 : chunk_size(tokens, num_threads(), block_bytes(), is_tiled(model_.layers.front().gate_up.type));
      Cuts<T, P> cuts(model_, task, size ? 0 : lengths.numel(), kept);
      Step<T, P> step{model_, tokens, ids.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), heads, angles, task,
                   writable<P>(pages_), pages_.stride(1), tokens, tables.size(1) * tables.size(2), cuts, kept, adapted, adapted_kept,
                   writable<T>(hidden), writable<T>(logits)};
      std::optional<Chunks<T, P>> chunks;
      if (size) chunks.emplace(step, spans_of(task.starts, lengths.numel(), size, attention::tokens_per_tile(task)), of_token);
      const auto lay_out = [&](Space space) {
        const Asked<T> asked(model_, rows.numel(), space);
        std::optional<Activations<T>> at;
        if (chunks)
          chunks->lay_out(space, asked.states);
        else
          at.emplace(model_, tokens, adapted, space);
        return std::tuple(asked, at, space.used());
      };
      const auto [asked, at, _] = lay_out(Space(room(std::get<2>(lay_out(Space(nullptr))))));
      together([&, &asked = asked, &at = at](Member& member) {
        if (chunks) {
          member.all(num_threads(), [&] { chunks->work(); });
          member.deal();
        } else {
          Pass<T, P> pass(step, *at);
          pass.embed(member);
          for (size_t i = 0; i < model_.layers.size(); ++i) pass.block(member, i);
          pass.finish(member, asked.states);
        }
        project(member, step, asked);
      });
    });
    if (model_.board) model_.board->check();
    return {hidden, logits};
  }

 private:
  int64_t own_vocabulary() const { return model_.vocabulary[model_.rank() + 1] - model_.vocabulary[model_.rank()]; }

  Matrix linear(const Operands& from, int64_t first, int64_t inputs, int64_t outputs) const {
    const at::Tensor panels = from.get(first).value();
    const Matrix matrix = matrix_of(type_, panels, from.get(first + 1), from.get(first + 2), from.get(first + 3), outputs);
    TORCH_CHECK(matrix.inputs == inputs, "Network: a linear layer of ", matrix.inputs, " inputs where ", inputs, " come");
    return matrix;
  }

  void add_block(int64_t first, const int64_t* outputs, int64_t window, int64_t rope, const int64_t* place) {
    const int64_t hidden = model_.hidden, dim = model_.dim, heads = outputs[0] / dim - 2 * model_.kv_heads;
    model_.heads = model_.layers.empty() ? heads : model_.heads;
    TORCH_CHECK(heads > 0 && heads == model_.heads && outputs[0] % dim == 0 && heads % model_.kv_heads == 0 &&
                heads / model_.kv_heads <= attention::TILE_ROWS && outputs[1] == hidden &&
                (!model_.is_gated || outputs[2] % 2 == 0) && outputs[3] == hidden, "Network: a block of ", heads, " heads over ", model_.kv_heads);
    const auto norm = [&](int64_t i, int64_t size) {
      return pointer_of(blocks_.get(first + OF_LINEAR * LINEARS + i), type_, size);
    };
    model_.layers.push_back({linear(blocks_, first, hidden, outputs[0]), linear(blocks_, first + 4, heads * dim, hidden),
                             linear(blocks_, first + 8, hidden, outputs[2]),
                             linear(blocks_, first + 12, model_.is_gated ? outputs[2] / 2 : outputs[2], hidden),
                             norm(0, hidden), norm(1, hidden), norm(2, model_.has_whole_norms ? heads * dim : dim),
                             norm(3, model_.has_whole_norms ? model_.kv_heads * dim : dim), norm(4, hidden), norm(5, hidden),
                             static_cast<const float*>(pointer_of(blocks_.get(first + OF_BLOCK - 1), at::kFloat, heads)),
                             window, rope, place[0], place[1]});
    TORCH_CHECK(place[0] >= 0 && place[1] >= 0 && place[1] < pages_.size(0), "Network: row ", place[1], " of ", pages_.sizes());
    num_groups_ = std::max(num_groups_, place[0] + 1);
    TORCH_CHECK(!model_.has_whole_norms || (model_.layers.back().query_norm && model_.layers.back().key_norm),
                "Network: a block without norms of queries and keys");
  }

  std::vector<const Adapter*> adapters_of(const at::Tensor& starts, const at::Tensor& indexes, int64_t tokens) const {
    TORCH_CHECK(indexes.scalar_type() == at::kInt && indexes.is_contiguous() && indexes.numel() + 1 == starts.numel(),
                "an adapter of int32 is needed for each share, not ", indexes.sizes());
    std::vector<const Adapter*> of_token(tokens);
    for (int64_t share = 0; share < indexes.numel(); ++share) {
      const int32_t index = indexes.const_data_ptr<int32_t>()[share], *bounds = starts.const_data_ptr<int32_t>() + share;
      if (index < 0) continue;
      const auto found = held_.find(index);
      TORCH_CHECK(found != held_.end(), "there is no adapter ", index);
      std::fill(of_token.begin() + bounds[0], of_token.begin() + bounds[1], &found->second.adapter);
    }
    return of_token;
  }

  // Of the matrices of one block.
  int64_t block_bytes() const {
    int64_t bytes = 0;
    for (int64_t i = 0; i < LINEARS; ++i) bytes += blocks_.get(i * OF_LINEAR).value().nbytes();
    return bytes;
  }

  // Kept from step to step and only ever larger: what is written anew each time is in no page of memory yet.
  char* room(int64_t bytes) {
    if (!memory_.defined() || memory_.numel() < bytes) memory_ = at::empty({bytes}, pages_.options().dtype(at::kByte));
    return static_cast<char*>(memory_.mutable_data_ptr());
  }

  Operands blocks_, ends_;  // hold what the model points to
  at::Tensor pages_, memory_;
  std::optional<c10::intrusive_ptr<exchange::Board>> board_;
  at::ScalarType type_;
  Model model_{};
  int64_t num_groups_ = 0;  // of the cache
  LayerCuts layer_cuts_;
  std::map<int64_t, Held> held_;  // adapters
  std::optional<at::Tensor> added_;
};

}  // namespace penstock::network

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  using penstock::network::Network;
  using penstock::network::Operands;
  m.class_<Network>("Network")
      .def(torch::init<Operands, Operands, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>,
                       std::vector<double>,
                       std::vector<int64_t>, std::vector<int64_t>, at::Tensor,
                       std::optional<c10::intrusive_ptr<penstock::exchange::Board>>>())
      .def("hold", &Network::hold)
      .def("release", &Network::release)
      .def("extend", &Network::extend)
      .def("run", &Network::run);
}
