// Tensors as the pointers and sizes of which the loops know: this file, and the units that include it, alone know torch.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

#include "attention/attention.h"
#include "matrix.h"
#include "attention/page_rows.h"
#include "product.h"

namespace penstock {

using Optional = std::optional<at::Tensor>;

template <class T>
constexpr at::ScalarType type_of = at::kFloat;
template <>
constexpr at::ScalarType type_of<bf16> = at::kBFloat16;
template <>
constexpr at::ScalarType type_of<Code> = at::kChar;

template <class T>
const T* data(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == type_of<T>, "numbers of ", type_of<T>, " are needed, not ", x.scalar_type());
  return static_cast<const T*>(x.const_data_ptr());
}

template <class T>
T* writable(const at::Tensor& x) {
  data<T>(x);
  return static_cast<T*>(x.mutable_data_ptr());
}

// Call body with a zero of the tensor's type, float or bfloat16.
template <class Body>
void dispatch(const at::Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) return body(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "float32 or bfloat16 is needed, not ", x.scalar_type());
  body(bf16{});
}

// Call body with zeros of the tokens' type and of the pages'.
template <class Body>
void dispatch_pages(const at::Tensor& tokens, const at::Tensor& pages, const Body& body) {
  dispatch(tokens, [&](auto zero) {
    if (pages.scalar_type() == at::kChar) return body(zero, Code{});
    TORCH_CHECK(pages.scalar_type() == tokens.scalar_type(), "pages of ", pages.scalar_type(), " for tokens of ",
                tokens.scalar_type(), "; they have the tokens' type or int8");
    body(zero, zero);
  });
}

inline int64_t dim_of(const at::Tensor& pages) { return pages.size(-1) - (pages.scalar_type() == at::kChar ? SCALE_SIZE : 0); }

// Refuse what is not one index of [0, most) per token; `what` names them.
inline void check_indexes(const at::Tensor& indexes, int64_t tokens, int64_t most, const char* what) {
  TORCH_CHECK(indexes.scalar_type() == at::kLong && indexes.is_contiguous() && indexes.numel() == tokens,
              "a ", what, " of int64 is needed for each of ", tokens, " tokens, not ", indexes.sizes());
  const int64_t* index = indexes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens; ++i)
    TORCH_CHECK(index[i] >= 0 && index[i] < most, "there is no ", what, " ", index[i], " of ", most);
}

// Refuse what is not the operands of a layer for tokens of this type.
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
  TORCH_CHECK(is_float == !scales && (!is_float || !offsets), "linear: scales or offsets for panels of ", type);
  if (type == at::kChar)
    TORCH_CHECK(scales->scalar_type() == at::kFloat && scales->numel() == count * 32 &&
                (!offsets || (offsets->scalar_type() == at::kInt && offsets->numel() == count * 32)), "linear: its matrix of int8");
  if (type == at::kByte)
    TORCH_CHECK(scales->scalar_type() == at::kBFloat16 && scales->numel() == count * 32 * ((inputs + GROUP - 1) / GROUP) &&
                (!offsets || offsets->scalar_type() == at::kInt), "linear: its matrix of int4");
  TORCH_CHECK(!offsets || multiplies_integers(), "linear: this CPU does not multiply integers, so tokens are not rounded");
  const Numbers numbers = type == at::kFloat      ? Numbers::FLOAT
                          : type == at::kBFloat16 ? Numbers::BFLOAT16
                          : type == at::kChar     ? Numbers::INT8
                                                  : Numbers::INT4;
  return {numbers, panels.const_data_ptr(), scales ? scales->const_data_ptr() : nullptr,
          offsets ? offsets->const_data_ptr<int32_t>() : nullptr, bias ? bias->const_data_ptr() : nullptr, inputs, outputs};
}

namespace attention {

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

}  // namespace attention

}  // namespace penstock
