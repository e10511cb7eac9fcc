// Linear layers whose products are of integers: tokens are rounded to 8 bits as they come, each with its own
// scale, and the matrix has 8 bits with a scale per output, or 4 bits with a scale per 32 inputs of an output.
//
// The instruction multiplies 4 unsigned by 4 signed bytes and adds them to an int32. With an int8 matrix the
// tokens are shifted by 128 to be unsigned, and what that adds to a sum - 128 times the sum of the output's
// weights - is known when a model opens. With an int4 matrix its numbers, 0 to 15 for -8 to 7, are the unsigned
// ones, and 8 times the sum of a token's group is taken off. Sums of integers are exact: every machine, number
// of tokens and threads gives the same result.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "panels.h"
#include "parallel.h"
#include "rows.h"

namespace penstock {

#ifdef HAS_INTEGERS

constexpr int64_t GROUP = 32;         // inputs that share a scale in a matrix of 4 bits
constexpr int64_t GROUP_UNITS = GROUP / 4;
constexpr int64_t MAX_TOKENS_4 = 6;  // a tile keeps sums of a group and of all groups in registers

// Tokens as codes [tokens, inputs], and a scale for each.
struct Tokens {
  const int64_t count, units;
  const at::Tensor codes, scales;
  const int32_t* const rows;  // asked of torch once: asking for each token of each tile took a twentieth of it all
  const float* const scale;

  Tokens(const at::Tensor& x, int shift)
      : count(x.numel() / x.size(-1)),
        units(x.size(-1) / 4),
        codes(at::empty({count, x.size(-1)}, x.options().dtype(at::kByte))),
        scales(at::empty({count}, x.options().dtype(at::kFloat))),
        rows(static_cast<const int32_t*>(codes.const_data_ptr())),
        scale(scales.const_data_ptr<float>()) {
    const int64_t inputs = codes.size(1);
    dispatch(x, [&](auto zero) {
      const auto* xs = x.const_data_ptr<decltype(zero)>();
      auto* bytes = codes.mutable_data_ptr<uint8_t>();
      auto* factors = scales.mutable_data_ptr<float>();
      parallel(count, grain_of(inputs), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          factors[t] = round_row(xs + t * inputs, inputs, shift, bytes + t * inputs);
      });
    });
  }
  const int32_t* row(int64_t t) const { return rows + t * units; }
};

// What a tile of float32 sums becomes: sums * scale of the token + bias.
template <class T, int tokens>
void store_tile(const Vec (&sums)[tokens][2], const Tokens& x, int64_t first, int64_t panel, const T* bias, T* out,
                int64_t outputs) {
  for (int half = 0; half < 2; ++half) {
    const int64_t n = panel * PANEL + half * LANES;
    const Lanes at = lanes(n, outputs);
    const Vec added = bias ? at.load(bias + n) : Vec();
    for (int t = 0; t < tokens; ++t)
      at.store(out + (first + t) * outputs + n, Vec::fma(sums[t][half], Vec(x.scale[first + t]), added));
  }
}

struct Int8Matrix {
  const int32_t* panels;
  const float* scales;     // of the outputs
  const int32_t* offsets;  // 128 times the sum of an output's weights
};

template <class T>
void multiply_int8(const Tokens& x, const Int8Matrix& w, const T* bias, at::Tensor& out) {
  const int64_t units = x.units, outputs = out.size(-1);
  T* outs = out.mutable_data_ptr<T>();
  auto tile = [&](int64_t panel, int64_t first, auto count) {
    __m512i sums[count][2];
    multiply<OfInt8, count>(w.panels + panel * units * PANEL, x.row(first), units, sums);
    Vec scaled[count][2];
    for (int half = 0; half < 2; ++half) {
      const int64_t n = panel * PANEL + half * LANES;
      const __m512i offset = _mm512_loadu_si512(w.offsets + n);
      for (int t = 0; t < count; ++t)
        scaled[t][half] = Vec(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[t][half], offset))) * Vec::load(w.scales + n);
    }
    store_tile<T, count>(scaled, x, first, panel, bias, outs, outputs);
  };
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  parallel(num_tiles<MAX_TOKENS>(x.count, panels), grain_of_tiles(units, x.count),
           [&](int64_t begin, int64_t end) { each_tile<MAX_TOKENS>(begin, end, x.count, tile); });
}

struct Int4Matrix {
  const uint8_t* panels;  // a unit of 32 outputs is 64 bytes: outputs 0 to 15 in the lower halves of the bytes
  const bf16* scales;     // [panel, group, output]
};

// What a group's sums begin with, [tokens, groups]: 8 times the sum of the group's codes is taken off.
inline at::Tensor beginnings(const Tokens& x) {
  const int64_t groups = x.units / GROUP_UNITS;
  at::Tensor out = at::empty({x.count, groups}, x.codes.options().dtype(at::kInt));
  const auto* codes = static_cast<const int8_t*>(x.codes.const_data_ptr());
  auto* begins = out.mutable_data_ptr<int32_t>();
  parallel(x.count * groups, grain_of(GROUP), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      int32_t sum = 0;
      for (int64_t i = 0; i < GROUP; ++i) sum += codes[group * GROUP + i];
      begins[group] = -8 * sum;
    }
  });
  return out;
}

// sums += one group of 32 inputs of one panel; `begins` has `groups` numbers per token.
template <int tokens>
[[gnu::always_inline]] inline void add_group(const uint8_t* panel, const bf16* scales, const int32_t* x,
                                             const int32_t* begins, int64_t groups, Vec (&sums)[tokens][2]) {
  const __m512i low_half = _mm512_set1_epi8(15);
  __m512i whole[tokens][2];
#pragma GCC unroll 6
  for (int t = 0; t < tokens; ++t) whole[t][0] = whole[t][1] = _mm512_set1_epi32(begins[t * groups]);
#pragma GCC unroll 8
  for (int u = 0; u < GROUP_UNITS; ++u, panel += 64) {
    const __m512i both = _mm512_loadu_si512(panel);
    _mm_prefetch(reinterpret_cast<const char*>(panel) + AHEAD, _MM_HINT_T0);
    const __m512i low = _mm512_and_si512(both, low_half);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t) {
      const __m512i unit = _mm512_set1_epi32(x[t * groups * GROUP_UNITS + u]);
      whole[t][0] = _mm512_dpbusd_epi32(whole[t][0], low, unit);
      whole[t][1] = _mm512_dpbusd_epi32(whole[t][1], high, unit);
    }
  }
  for (int half = 0; half < 2; ++half) {
    const Vec scale = Vec::load(scales + half * LANES);
#pragma GCC unroll 6
    for (int t = 0; t < tokens; ++t)
      sums[t][half] = Vec::fma(Vec(_mm512_cvtepi32_ps(whole[t][half])), scale, sums[t][half]);
  }
}

template <class T>
void multiply_int4(const Tokens& x, const Int4Matrix& w, const T* bias, at::Tensor& out) {
  const int64_t units = x.units, groups = units / GROUP_UNITS, outputs = out.size(-1);
  T* outs = out.mutable_data_ptr<T>();
  const at::Tensor begins = beginnings(x);
  const auto* all_begins = begins.const_data_ptr<int32_t>();
  auto tile = [&](int64_t panel, int64_t first, auto count) {
    Vec sums[count][2];
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = panel * groups + g;
      add_group<count>(w.panels + at * GROUP_UNITS * 64, w.scales + at * PANEL, x.row(first) + g * GROUP_UNITS,
                       all_begins + first * groups + g, groups, sums);
    }
    store_tile<T, count>(sums, x, first, panel, bias, outs, outputs);
  };
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  parallel(num_tiles<MAX_TOKENS_4>(x.count, panels), grain_of_tiles(units, x.count),
           [&](int64_t begin, int64_t end) { each_tile<MAX_TOKENS_4>(begin, end, x.count, tile); });
}

#endif

using Bias = std::optional<at::Tensor>;

void check(const at::Tensor& x, const Bias& bias, const at::Tensor& panels, int64_t inputs, int64_t outputs) {
  TORCH_CHECK(x.size(-1) == inputs && panels.is_contiguous() && panels.size(0) == (outputs + 31) / 32,
              "linear of integers: ", x.sizes(), " with panels ", panels.sizes(), " for ", outputs, " outputs");
  TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == outputs), "linear: bias");
#ifndef HAS_INTEGERS
  TORCH_CHECK(false, "linear of integers: this CPU has no AVX-512 VNNI");
#endif
}

at::Tensor linear_int8(const at::Tensor& given, const at::Tensor& panels, const at::Tensor& scales,
                       const at::Tensor& offsets, const Bias& bias, int64_t outputs) {
  const at::Tensor x = given.contiguous();
  check(x, bias, panels, panels.size(1) * 4, outputs);
  TORCH_CHECK(panels.scalar_type() == at::kChar && scales.numel() == panels.size(0) * 32 &&
              offsets.numel() == scales.numel() && offsets.scalar_type() == at::kInt, "linear_int8: its matrix");
  at::Tensor out = outputs_of(x, outputs, x.scalar_type());
#ifdef HAS_INTEGERS
  const Tokens tokens(x, 128);
  const Int8Matrix matrix{static_cast<const int32_t*>(panels.const_data_ptr()), scales.const_data_ptr<float>(),
                          offsets.const_data_ptr<int32_t>()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    multiply_int8<T>(tokens, matrix, bias ? bias->const_data_ptr<T>() : nullptr, out);
  });
#endif
  return out;
}

at::Tensor linear_int4(const at::Tensor& given, const at::Tensor& panels, const at::Tensor& scales, const Bias& bias,
                       int64_t outputs) {
  const at::Tensor x = given.contiguous();
  check(x, bias, panels, panels.size(1) * 4, outputs);
  TORCH_CHECK(panels.scalar_type() == at::kByte && scales.scalar_type() == at::kBFloat16 && x.size(-1) % 32 == 0 &&
              scales.numel() == panels.size(0) * panels.size(1) * 4, "linear_int4: its matrix");
  at::Tensor out = outputs_of(x, outputs, x.scalar_type());
#ifdef HAS_INTEGERS
  const Tokens tokens(x, 0);
  const Int4Matrix matrix{panels.const_data_ptr<uint8_t>(), scales.const_data_ptr<bf16>()};
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    multiply_int4<T>(tokens, matrix, bias ? bias->const_data_ptr<T>() : nullptr, out);
  });
#endif
  return out;
}

}  // namespace penstock

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("linear_int8(Tensor x, Tensor panels, Tensor scales, Tensor offsets, Tensor? bias, int outputs) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor panels, Tensor scales, Tensor? bias, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear_int8", &penstock::linear_int8);
  m.impl("linear_int4", &penstock::linear_int4);
}
