// A linear layer's operands, checked once and then plain pointers.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "rows.h"

namespace penstock {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GROUP = 32;  // inputs that share a scale in a matrix of 4 bits

struct Matrix {
  at::ScalarType type;      // of the panels: float32, bfloat16, int8; a byte has two numbers of 4 bits
  const void* panels;
  const void* scales;       // int8: float32 of the outputs; int4: bfloat16 of [panel, group, output]
  const int32_t* offsets;   // int8: 128 times the sum of an output's weights
  const void* bias;         // of the tokens' type, or null
  int64_t inputs, outputs;
};

// Refuses what is not the operands of a layer for tokens of this type.
inline Matrix matrix_of(at::ScalarType tokens, const at::Tensor& panels, const Optional& scales, const Optional& offsets,
                        const Optional& bias, int64_t outputs) {
  const at::ScalarType type = panels.scalar_type();
  const bool is_float = type == tokens && (type == at::kFloat || type == at::kBFloat16);
  TORCH_CHECK(is_float || type == at::kChar || type == at::kByte, "linear: tokens of ", tokens, " with panels of ", type);
  const int64_t count = panels.size(0), of_unit = is_float ? panels.size(-1) : 4, inputs = panels.size(1) * of_unit;
  TORCH_CHECK(panels.is_contiguous() && count == (outputs + 31) / 32, "linear: panels ", panels.sizes(), " for ", outputs,
              " outputs");
  TORCH_CHECK(!bias || (bias->scalar_type() == tokens && bias->numel() == outputs && bias->is_contiguous()),
              "linear: a bias of other outputs or another type");
  if (type == at::kChar)
    TORCH_CHECK(scales && offsets && scales->scalar_type() == at::kFloat && scales->numel() == count * 32 &&
                offsets->scalar_type() == at::kInt && offsets->numel() == count * 32, "linear_int8: its matrix");
  if (type == at::kByte)
    TORCH_CHECK(scales && scales->scalar_type() == at::kBFloat16 && inputs % GROUP == 0 &&
                scales->numel() == count * inputs, "linear_int4: its matrix");
  return {type, panels.const_data_ptr(), scales ? scales->const_data_ptr() : nullptr,
          offsets ? offsets->const_data_ptr<int32_t>() : nullptr, bias ? bias->const_data_ptr() : nullptr, inputs, outputs};
}

}  // namespace penstock
