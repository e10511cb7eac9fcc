// A whole decoder block over pages in one call: the other operators one after the other.
//
// Computes nothing of its own. A step of one token spends microseconds in each operator, and as many in
// Python between them: ten calls a block were a third of a millisecond a step of 12 blocks.

#include "operators.h"

namespace penstock::block {

constexpr int64_t OPERANDS = 4;  // of a linear layer: panels, scales, offsets, bias

using Tensors = c10::List<std::optional<at::Tensor>>;

// The i-th linear layer, of whatever type its matrix is.
at::Tensor apply_linear(const at::Tensor& x, const Tensors& linears, int64_t i, int64_t outputs) {
  const int64_t first = i * OPERANDS;
  return linear(x, linears.get(first).value(), linears.get(first + 1), linears.get(first + 2), linears.get(first + 3), outputs);
}

// linears: query_key_value, output, gate_up, down; outputs: of each; norms: before attention and MLP, of queries and
// keys, after attention and MLP, each or none.
void decoder_block(at::Tensor x, const at::Tensor& cosines, const at::Tensor& sines, const at::Tensor& slots,
                   const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables, at::Tensor keys,
                   at::Tensor values, const Tensors& linears, at::IntArrayRef outputs, const Tensors& norms,
                   double eps, double shift, double scale, double multiplier, int64_t window, int64_t activation,
                   bool is_gated, bool norms_rotated, const Optional& q_scales, const Optional& sinks, double softcap) {
  TORCH_CHECK(linears.size() == 4 * OPERANDS && outputs.size() == 4 && norms.size() == 6,
              "decoder_block: ", linears.size(), " operands, ", outputs.size(), " sizes, ", norms.size(), " norms");
  const auto normed = [&](const at::Tensor& of, int64_t i) {
    const Optional weight = norms.get(i);
    return weight ? rms_norm(of, std::nullopt, 1.0, *weight, eps, shift) : of;
  };
  const at::Tensor q = rotary::rotate_and_store(apply_linear(normed(x, 0), linears, 0, outputs[0]), cosines, sines, slots,
                                                keys, values, norms.get(2), norms.get(3), eps, shift, norms_rotated,
                                                q_scales);
  const at::Tensor mixed = attention::paged_attention(q, keys, values, starts, lengths, tables, scale, window, sinks, softcap);
  const at::Tensor attended = normed(apply_linear(mixed.view({x.size(0), -1}), linears, 1, outputs[1]), 4);
  const Optional mlp_norm = norms.get(1);
  const at::Tensor summed = mlp_norm ? rms_norm(x, attended, multiplier, *mlp_norm, eps, shift) : x.add_(attended, multiplier);
  const at::Tensor inner = gate::activate(apply_linear(summed, linears, 2, outputs[2]), activation, is_gated);
  x.add_(normed(apply_linear(inner, linears, 3, outputs[3]), 5), multiplier);
}

}  // namespace penstock::block

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("decoder_block(Tensor(a!) x, Tensor cosines, Tensor sines, Tensor slots, Tensor query_starts, "
        "Tensor lengths, Tensor block_tables, Tensor(b!) keys, Tensor(c!) values, Tensor?[] linears, int[] outputs, "
        "Tensor?[] norms, float eps, float shift, float scale, float multiplier, int window, int activation, "
        "bool is_gated, bool norms_rotated=False, Tensor? q_scales=None, Tensor? sinks=None, float softcap=0.0) -> ()");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("decoder_block", penstock::block::decoder_block); }
