// A linear layer's operands.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int64_t GROUP = 32;  // inputs that share a scale in a matrix of 4 bits; the last of an output may be fewer

enum class Numbers { FLOAT, BFLOAT16, INT8, INT4 };

struct Matrix {
  Numbers type;            // of the panels
  const void* panels;
  const void* scales;      // int8: float32 of the outputs; int4: bfloat16 of [panel, group, output]
  const int32_t* offsets;  // null: tokens stay. Tokens are rounded to 8 bits: of int8 128 times the sum of an output's codes
  const void* bias;        // of the tokens' type, or null
  int64_t inputs, outputs;
  int64_t groups() const { return (inputs + GROUP - 1) / GROUP; }
};

}  // namespace penstock
