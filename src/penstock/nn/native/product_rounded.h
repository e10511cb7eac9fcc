// Products that round tokens to 8 bits as they come, each with its own scale, for CPUs that multiply bytes: chosen by
// `activations = "int8"`, of a matrix of 8 bits with a scale per output, or of 4 bits with a scale per group.
//
// The instruction multiplies 4 unsigned by 4 signed bytes and adds them to an int32; nothing overflows on the way. With an
// int8 matrix the tokens are shifted by 128 to be unsigned, and what that adds to a sum - 128 times the sum of the output's
// codes - is known when a model opens. With an int4 matrix its numbers, 0 to 15 for -8 to 7, are the unsigned ones, and 8
// times the sum of a token's group is taken off. Sums of integers are exact: every machine, number of tokens and threads gives
// the same result.
#pragma once

#include "product_tiles.h"
#include "product_wide.h"

#if (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)) || (!defined(__AVX512F__) && defined(__AVXVNNI__))
#define HAS_INTEGERS
#endif

#ifdef HAS_INTEGERS

namespace penstock {

constexpr int64_t GROUP_UNITS = GROUP / 4;
using RoundedTiles = std::conditional_t<REGISTERS == 32, Sizes<12, 6, 3, 2, 1>, Sizes<3, 2, 1>>;
using RoundedTiles4 = std::conditional_t<REGISTERS == 32, Sizes<6, 4, 2, 1>, Sizes<1>>;  // with sums of a group and of all groups

// sums + a b: a from 0 to 255, b from -128 to 127.
[[gnu::always_inline]] inline Ints add_products(Ints sums, Ints a, Ints b) {
#ifdef __AVX512F__
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#endif
}

// Tokens as codes, [count, inputs], in memory that the caller has.
struct Tokens {
  int64_t count, inputs;
  int32_t* begins;  // what a group's sums begin with, [count, groups]: 8 times its codes' sum is taken off
  float* scale;     // of each token
  uint8_t* codes;

  static int64_t bytes(int64_t count, int64_t inputs) { return count * ((inputs / GROUP + 1) * 4 + 4 + inputs) + 64; }
  Tokens(int64_t count, int64_t inputs, char* memory)
      : count(count),
        inputs(inputs),
        begins(reinterpret_cast<int32_t*>(memory)),
        scale(reinterpret_cast<float*>(begins + count * (inputs / GROUP + 1))),
        codes(reinterpret_cast<uint8_t*>(scale + count)) {}
  const int32_t* row(int64_t t) const { return reinterpret_cast<const int32_t*>(codes + t * inputs); }
};

// Round rows of numbers to codes.
template <class T>
void round_rows(Threads& threads, const Matrix& matrix, const T* x, const Tokens& to) {
  const int64_t inputs = to.inputs, groups = matrix.groups();
  const bool is_int4 = matrix.type == Numbers::INT4;
  threads.each(to.count, grain_of(inputs), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* codes = to.codes + t * inputs;
      to.scale[t] = round_row(x + t * inputs, inputs, is_int4 ? 0 : 128, codes);
      for (int64_t group = 0; is_int4 && group < groups; ++group) {
        int32_t sum = 0;
        for (int64_t i = group * GROUP; i < std::min((group + 1) * GROUP, inputs); ++i) sum += static_cast<int8_t>(codes[i]);
        to.begins[t * groups + group] = -8 * sum;
      }
    }
  });
}

// sums [tokens][PANEL] = tokens x a panel of int8.
template <int tokens>
void multiply_codes(const char* panel, const int32_t* x, int64_t units, int32_t* sums) {
  Ints own[tokens][PARTS] = {};
  for (int64_t u = 0; u < units; ++u, panel += BYTES<Numbers::INT8>) {
    Ints right[PARTS];
    for (int part = 0; part < PARTS; ++part) {
      right[part] = load_as<Ints>(panel + part * sizeof(Ints));
      if (part * sizeof(Ints) % 64 == 0) prefetch<tokens <= 6>(panel + AHEAD + part * sizeof(Ints));
    }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; ++t)
      for (int part = 0; part < PARTS; ++part) own[t][part] = add_products(own[t][part], x[t * units + u] - Ints{}, right[part]);
  }
#pragma GCC unroll 12
  for (int t = 0; t < tokens; ++t)
    for (int part = 0; part < PARTS; ++part) std::memcpy(sums + t * PANEL + part * LANES, &own[t][part], sizeof(Ints));
}

template <class T>
void multiply_rounded8(Threads& threads, const Matrix& matrix, const Tokens& x, T* out) {
  const int64_t units = x.inputs / 4;
  const auto store = [&](int64_t panel, int64_t first, int64_t count, const int32_t* sums) {
    store_tile(matrix, panel, first, count, out, [&](int64_t t, int64_t n) {
      const Ints whole = load_as<Ints>(sums + t * PANEL + n % PANEL) - load_as<Ints>(matrix.offsets + n);
      return Vec::of(whole) * Vec::load(static_cast<const float*>(matrix.scales) + n) * Vec(x.scale[first + t]);
    });
  };
#ifdef HAS_TILES
  constexpr int64_t FEW_TOKENS = 3;  // that vectors multiply as fast
  if (x.count > FEW_TOKENS && tiles::usable())
    return each_by_tiles<tiles::BYTES, int32_t>(threads, x.codes, x.count, matrix.outputs, units, AHEAD,
                                                [&](int64_t panel) { return panel_of<Numbers::INT8>(matrix, panel); }, store);
#endif
  each_tile(threads, RoundedTiles::MOST, x.count, matrix.outputs, x.inputs, [&](int64_t panel, int64_t first, int64_t count) {
    alignas(64) int32_t sums[RoundedTiles::MOST * PANEL];
    RoundedTiles::each(count, [&](int64_t t, auto size) {
      multiply_codes<size>(panel_of<Numbers::INT8>(matrix, panel), x.row(first + t), units, sums + t * PANEL);
    });
    store(panel, first, count, sums);
  });
}

// sums [tokens][PANEL] = tokens x a panel of int4, but for the tokens' scales; `begins` has a number per group and token.
template <int tokens>
void multiply_codes4(const Matrix& matrix, int64_t panel, const int32_t* x, const int32_t* begins, float* sums) {
  const int64_t units = matrix.inputs / 4, groups = matrix.groups();
  const Ints half = Ints{} + 0x0f0f0f0f;
  const char* unit = panel_of<Numbers::INT4>(matrix, panel);
  Vec total[tokens][PARTS];
  for (int64_t group = 0; group < groups; ++group) {
    Ints whole[tokens][PARTS];
    for (int t = 0; t < tokens; ++t)
      for (int part = 0; part < PARTS; ++part) whole[t][part] = begins[t * groups + group] - Ints{};
    const int64_t end = std::min((group + 1) * GROUP_UNITS, units);
    for (int64_t u = group * GROUP_UNITS; u < end; ++u, unit += BYTES<Numbers::INT4>) {
      prefetch<true>(unit + AHEAD);
      for (int part = 0; part < PARTS / 2; ++part) {
        const Ints both = load_as<Ints>(unit + part * sizeof(Ints)), low = both & half, high = (both >> 4) & half;
#pragma GCC unroll 6
        for (int t = 0; t < tokens; ++t) {
          const Ints token = x[t * units + u] - Ints{};
          whole[t][part] = add_products(whole[t][part], low, token);
          whole[t][part + PARTS / 2] = add_products(whole[t][part + PARTS / 2], high, token);
        }
      }
    }
    const auto* scales = static_cast<const bf16*>(matrix.scales) + (panel * groups + group) * PANEL;
    for (int t = 0; t < tokens; ++t)
      for (int part = 0; part < PARTS; ++part)
        total[t][part] = Vec::fma(Vec::of(whole[t][part]), Vec::load(scales + part * LANES), total[t][part]);
  }
  for (int t = 0; t < tokens; ++t)
    for (int part = 0; part < PARTS; ++part) total[t][part].store(sums + t * PANEL + part * LANES);
}

template <class T>
void multiply_rounded4(Threads& threads, const Matrix& matrix, const Tokens& x, T* out) {
  each_tile(threads, RoundedTiles4::MOST, x.count, matrix.outputs, x.inputs, [&](int64_t panel, int64_t first, int64_t count) {
    alignas(64) float sums[RoundedTiles4::MOST * PANEL];
    RoundedTiles4::each(count, [&](int64_t t, auto size) {
      multiply_codes4<size>(matrix, panel, x.row(first + t), x.begins + (first + t) * matrix.groups(), sums + t * PANEL);
    });
    store_tile(matrix, panel, first, count, out,
               [&](int64_t t, int64_t n) { return Vec::load(sums + t * PANEL + n % PANEL) * Vec(x.scale[first + t]); });
  });
}

}  // namespace penstock

#endif
