// Matrices become panels when a model opens: as they are, or rounded to 8 or 4 bits on the way.
//
// One pass over a matrix, a panel of 32 outputs at a time, so that what is read is written while it is in the
// cache. The rounding is that of `to_int8` and `to_int4` (nn/linear/quantized.py), which say why.

#include <vector>

#include "panels.h"
#include "tensors.h"
#include "threads.h"

namespace penstock {

// out[unit][row] = rows[row][unit], 16 units at a time: a line of the cache of each of the 32 rows.
inline void interleave(const int32_t* const (&rows)[32], int64_t units, int32_t* out) {
  for (int64_t begin = 0; begin < units; begin += 16)
    for (int64_t u = begin; u < std::min(units, begin + 16); ++u)
      for (int row = 0; row < 32; ++row) out[u * 32 + row] = rows[row] ? rows[row][u] : 0;
}

void pack(const at::Tensor& matrix, at::Tensor panels) {
  const int64_t outputs = matrix.size(0), units = panels.size(1);
  TORCH_CHECK(matrix.is_contiguous() && panels.is_contiguous() && panels.size(0) == (outputs + 31) / 32 &&
              matrix.nbytes() == static_cast<size_t>(outputs * units * 4), "pack: ", matrix.sizes(), " to ",
              panels.sizes());
  const auto* from = static_cast<const int32_t*>(matrix.const_data_ptr());
  auto* to = static_cast<int32_t*>(panels.mutable_data_ptr());
  parallel(panels.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int32_t* rows[32] = {};
      for (int64_t r = 0; r < 32 && panel * 32 + r < outputs; ++r) rows[r] = from + (panel * 32 + r) * units;
      interleave(rows, units, to + panel * units * 32);
    }
  });
}


void pack_int8(const at::Tensor& matrix, at::Tensor panels, at::Tensor scales, at::Tensor offsets) {
  const int64_t outputs = matrix.size(0), inputs = matrix.size(1), units = inputs / 4;
  TORCH_CHECK(matrix.is_contiguous() && panels.is_contiguous() && panels.size(1) == units &&
              scales.numel() == panels.size(0) * 32 && offsets.numel() == scales.numel(), "pack_int8: sizes");
  auto* to = static_cast<int32_t*>(panels.mutable_data_ptr());
  float* factors = scales.mutable_data_ptr<float>();
  int32_t* sums = offsets.mutable_data_ptr<int32_t>();
  dispatch(matrix, [&](auto zero) {
    const auto* from = data<decltype(zero)>(matrix);
    parallel(panels.size(0), 1, [&](int64_t begin, int64_t end) {
      std::vector<int8_t> codes(32 * inputs);
      for (int64_t panel = begin; panel < end; ++panel) {
        const int32_t* rows[32] = {};
        for (int64_t r = 0; r < 32 && panel * 32 + r < outputs; ++r) {
          const int64_t n = panel * 32 + r;
          int8_t* row = codes.data() + r * inputs;
          factors[n] = round_row(from + n * inputs, inputs, 0, reinterpret_cast<uint8_t*>(row));
          int32_t sum = 0;
          for (int64_t i = 0; i < inputs; ++i) sum += row[i];
          sums[n] = 128 * sum;
          rows[r] = reinterpret_cast<const int32_t*>(row);
        }
        interleave(rows, units, to + panel * units * 32);
      }
    });
  });
}

// Codes 0 to 15 of up to 32 numbers; returns the scale with the least squared error.
template <class T>
bf16 round_group(const T* x, int64_t size, uint8_t* codes) {
  Vec numbers[GROUP / LANES], most, least;  // what a short group lacks is 0
  each_lane(size, [&](int64_t i, auto at) { numbers[i / LANES] = at.load(x + i); });
  for (const Vec v : numbers) most = Vec::max(most, v), least = Vec::min(least, v);
  const float top = most.largest(), bottom = -(Vec() - least).largest();
  float extreme = -bottom > top ? bottom : top, smallest = INFINITY;
  if (std::abs(extreme) < 1e-30f) extreme = 1e-30f;
  bf16 best(0.0f);
  for (double share : {1.0, 0.95, 0.9, 0.85, 0.8}) {
    const bf16 scale(extreme * static_cast<float>(share / -8.0));
    const Vec factor(static_cast<float>(scale));
    Vec rounded[GROUP / LANES], squares;
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Vec v = numbers[i / LANES], code = Vec::min(Vec::max((v / factor).nearest(), Vec(-8)), Vec(7)), error = code * factor - v;
      rounded[i / LANES] = code, squares = Vec::fma(error, error, squares);
    }
    const float error = squares.sum();
    if (!(error < smallest)) continue;
    smallest = error, best = scale;
    each_lane(size, [&](int64_t i, auto at) {
      const Bytes bytes = narrowed(rounded[i / LANES].whole() + 8);
      std::memcpy(codes + i, &bytes, at.count);
    });
  }
  return best;
}

void pack_int4(const at::Tensor& matrix, at::Tensor panels, at::Tensor scales) {
  const int64_t outputs = matrix.size(0), inputs = matrix.size(1), groups = (inputs + GROUP - 1) / GROUP;
  TORCH_CHECK(matrix.is_contiguous() && panels.is_contiguous() && scales.is_contiguous() && inputs % 4 == 0 &&
              panels.size(1) * 4 == inputs && scales.numel() == panels.size(0) * groups * 32, "pack_int4: sizes");
  uint8_t* to = panels.mutable_data_ptr<uint8_t>();
  bf16* factors = writable<bf16>(scales);
  dispatch(matrix, [&](auto zero) {
    const auto* from = data<decltype(zero)>(matrix);
    parallel(panels.size(0), 1, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> codes(32 * inputs);
      for (int64_t panel = begin; panel < end; ++panel) {
        std::fill(codes.begin(), codes.end(), 8);
        for (int64_t r = 0; r < 32 && panel * 32 + r < outputs; ++r)
          for (int64_t g = 0; g < groups; ++g)
            factors[(panel * groups + g) * 32 + r] =
                round_group(from + (panel * 32 + r) * inputs + g * 32, std::min(GROUP, inputs - g * 32), codes.data() + r * inputs + g * 32);
        uint8_t* out = to + panel * inputs * 16;
        for (int64_t i = 0; i < inputs; ++i)  // a unit of 4 inputs is 64 bytes: 4 for each pair of rows
          for (int64_t r = 0; r < 16; ++r)
            out[i / 4 * 64 + r * 4 + i % 4] = codes[r * inputs + i] | codes[(r + 16) * inputs + i] << 4;
      }
    });
  });
}


}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("pack(Tensor matrix, Tensor(a!) panels) -> ()");
  m.def("pack_int8(Tensor matrix, Tensor(a!) panels, Tensor(b!) scales, Tensor(c!) offsets) -> ()");
  m.def("pack_int4(Tensor matrix, Tensor(a!) panels, Tensor(b!) scales) -> ()");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("pack", &penstock::pack);
  m.impl("pack_int8", &penstock::pack_int8);
  m.impl("pack_int4", &penstock::pack_int4);
}
