// The operators that a block in one call is made of (block.cpp): norm.cpp, linear.cpp, attention/paged.cpp, gate.cpp
// and rotary.cpp define them.
#pragma once


#include "tensors.h"

namespace penstock {

at::Tensor rms_norm(at::Tensor x, const Optional& delta, double scale, const at::Tensor& weight, double eps,
                    double shift);
at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, const Optional& scales, const Optional& offsets,
                  const Optional& bias, int64_t outputs);

namespace attention {
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables, double scale,
                           int64_t window, const Optional& sinks, double softcap);
}
namespace gate {
at::Tensor activate(const at::Tensor& gate_up, int64_t activation, bool is_gated);
}
namespace rotary {
at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& cosines, const at::Tensor& sines,
                            const at::Tensor& slots, at::Tensor keys, at::Tensor values, const Optional& q_norm,
                            const Optional& k_norm, double eps, double shift, bool norms_rotated,
                            const Optional& q_scales);
}

}  // namespace penstock
