// Products of tokens with a matrix of 8 or 4 bits: tokens are rounded to 8 bits as they come, each with its own
// scale, and the matrix has 8 bits with a scale per output, or 4 bits with a scale per 32 inputs of an output.
//
// The instruction multiplies 4 unsigned by 4 signed bytes and adds them to an int32. With an int8 matrix the
// tokens are shifted by 128 to be unsigned, and what that adds to a sum - 128 times the sum of the output's
// weights - is known when a model opens. With an int4 matrix its numbers, 0 to 15 for -8 to 7, are the unsigned
// ones, and 8 times the sum of a token's group is taken off. Sums of integers are exact: every machine, number
// of tokens and threads gives the same result.
#pragma once

#include "matrix.h"
#include "product_sums.h"
#include "product_wide.h"

namespace penstock {

#ifdef HAS_INTEGERS

constexpr int64_t GROUP_UNITS = GROUP / 4;
constexpr int64_t MAX_TOKENS_4 = 6;  // a tile keeps sums of a group and of all groups in registers

// Tokens as codes, [count, inputs], in memory that the caller has.
struct Tokens {
  int64_t count, inputs;
  int32_t* begins;  // what a group's sums begin with, [count, groups]: 8 times its codes' sum is taken off
  float* scale;     // of each token
  uint8_t* codes;

  static int64_t bytes(int64_t count, int64_t inputs) { return count * (inputs / GROUP * 4 + 4 + inputs) + 64; }
  Tokens(int64_t count, int64_t inputs, char* memory)
      : count(count),
        inputs(inputs),
        begins(reinterpret_cast<int32_t*>(memory)),
        scale(reinterpret_cast<float*>(begins + count * (inputs / GROUP))),
        codes(reinterpret_cast<uint8_t*>(scale + count)) {}
  const int32_t* row(int64_t t) const { return reinterpret_cast<const int32_t*>(codes + t * inputs); }
};

// Round rows of numbers to codes, for a matrix of 8 bits or of 4.
template <class T>
void round_rows(Threads& threads, const T* x, const Tokens& to, bool for_int4) {
  const int64_t inputs = to.inputs, groups = inputs / GROUP;
  threads.each(to.count, grain_of(inputs), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* codes = to.codes + t * inputs;
      to.scale[t] = round_row(x + t * inputs, inputs, for_int4 ? 0 : 128, codes);
      for (int64_t group = 0; for_int4 && group < groups; ++group) {
        int32_t sum = 0;
        for (int64_t i = 0; i < GROUP; ++i) sum += static_cast<int8_t>(codes[group * GROUP + i]);
        to.begins[t * groups + group] = -8 * sum;
      }
    }
  });
}

template <class T>
void multiply_int8(Threads& threads, const Matrix& matrix, const Tokens& x, T* out) {
  const int64_t units = x.inputs / 4, outputs = matrix.outputs;
  const auto* panels = static_cast<const int32_t*>(matrix.panels);
  const auto* scales = static_cast<const float*>(matrix.scales);
  each_product<OfInt8>(threads, panels, x.row(0), x.count, outputs, units, [&](int64_t panel, int64_t first, int64_t count, const int32_t* sums) {
    store_tile<T>(matrix, panel, first, count, out, [&](int64_t t, int64_t n) {
      const Ints whole = load_as<Ints>(sums + t * PANEL + n % PANEL) - load_as<Ints>(matrix.offsets + n);
      return Vec::of(whole) * Vec::load(scales + n) * Vec(x.scale[first + t]);
    });
  });
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
    prefetch<tokens>(reinterpret_cast<const char*>(panel) + AHEAD);
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
void multiply_int4(Threads& threads, const Matrix& matrix, const Tokens& x, T* out) {
  const int64_t units = x.inputs / 4, groups = units / GROUP_UNITS, outputs = matrix.outputs;
  const auto* panels = static_cast<const uint8_t*>(matrix.panels);
  const auto* scales = static_cast<const bf16*>(matrix.scales);
  each_tile(threads, MAX_TOKENS_4, x.count, outputs, units, [&](int64_t panel, int64_t first, int64_t tokens) {
    float sums[MAX_TOKENS_4 * PANEL];
    with_constant<MAX_TOKENS_4>(tokens, [&](auto count) {
      Vec own[count][2];
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = panel * groups + g;
        add_group<count>(panels + at * GROUP_UNITS * 64, scales + at * PANEL, x.row(first) + g * GROUP_UNITS,
                         x.begins + first * groups + g, groups, own);
      }
      for (int t = 0; t < count; ++t)
        for (int half = 0; half < 2; ++half) own[t][half].store(sums + t * PANEL + half * LANES);
    });
    store_tile<T>(matrix, panel, first, tokens, out, [&](int64_t t, int64_t n) {
      return Vec::load(sums + t * PANEL + n % PANEL) * Vec(x.scale[first + t]);
    });
  });
}

#endif

}  // namespace penstock
