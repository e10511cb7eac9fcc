// Products of tokens with a matrix that lies in memory in the order in which they read it.
//
// The matrix is cut into panels of 32 outputs. A panel holds, input after input, one unit of 4 bytes for
// each of its outputs: one float32, two bfloat16 or four int8. With AVX-512 two loads bring a unit of all 32 outputs,
// one broadcast brings the same unit of a token, and one instruction per 16 outputs multiplies and adds; other CPUs
// widen panels first (product_wide.h).
// So every byte of the matrix is read once, in one stream, for up to 14 tokens, whose sums stay in
// registers: 28 of the 32, beside two of the matrix and one of the token.
//
// With one token the time is that of reading memory, with 64 that of multiplying; the same loop reaches
// both on the machine it was written on (ADR 0028). The sum of an output runs over its inputs in the same
// order whatever the number of tokens: the result of a token does not depend on its neighbours.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_PANELS
#ifdef __AVX512VNNI__
#define HAS_INTEGERS
#endif
#endif

#include <algorithm>
#include <cstdint>
#include <utility>

#include "rows.h"
#include "threads.h"

namespace penstock {

constexpr int64_t PANEL = 32;       // outputs of a panel
constexpr int64_t MAX_TOKENS = 14;  // tokens of a tile

// The outputs of a register, from `first`, that the matrix has: its last panel is filled up.
inline Lanes lanes(int64_t first, int64_t outputs) {
  return Lanes{static_cast<int>(std::clamp<int64_t>(outputs - first, 0, LANES))};
}

// Call body with a count from 1 to `most` as a constant: the compiler makes a body for each.
template <int most, class Body>
void with_constant(int64_t count, const Body& body) {
  [&]<int... n>(std::integer_sequence<int, n...>) {
    (void)((count == n + 1 && (body(std::integral_constant<int, n + 1>{}), true)) || ...);
  }(std::make_integer_sequence<int, most>{});
}

// Call tile(panel, first token, number of tokens) for all tiles. Those of one panel follow each other, so that it is
// read from memory once. A thread that has to be woken gets tiles of at least half a microsecond's work in sum: waking it
// costs about as much. units: of four bytes, of a token.
template <class Tile>
void each_tile(Threads& threads, int64_t most, int64_t tokens, int64_t outputs, int64_t units, const Tile& tile) {
  const int64_t runs = (tokens + most - 1) / most, panels = (outputs + PANEL - 1) / PANEL;
  const int64_t grain = std::max<int64_t>(1, 8192 / (units * std::clamp<int64_t>(tokens, 1, MAX_TOKENS)));
  threads.each(panels * runs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t panel = item / runs, run = item % runs, first = tokens * run / runs;
      tile(panel, first, tokens * (run + 1) / runs - first);
    }
  });
}

#ifdef HAS_PANELS

constexpr int AHEAD = 8192;  // bytes: far enough to hide memory, near enough to stay in the first cache

struct OfFloat {
  using Number = float;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i w, __m512i x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
  }
};

struct OfBFloat16 {
  using Number = float;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i w, __m512i x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#else  // bfloat16 is the upper half of float32
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    sum = OfFloat::add(sum, _mm512_slli_epi32(w, 16), _mm512_slli_epi32(x, 16));
    return OfFloat::add(sum, _mm512_and_si512(w, upper), _mm512_and_si512(x, upper));
#endif
  }
};

#ifdef HAS_INTEGERS
struct OfInt8 {  // tokens from 0 to 255, the matrix from -127 to 127
  using Number = int32_t;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, x, w); }
};
#endif

// Fetch a line ahead. On AMD a line that is read once passes the second cache by, so that it does not drive out what the
// step needs besides the matrix. On Intel that hint halves the speed of reading: all matrices of a 134M model, one token,
// 18.0 ms with it and 8.6 without (Emerald Rapids, two cores, 2026-11-23).
#if defined(__znver4__) || defined(__znver5__)
constexpr bool BYPASSES_CACHE = true;
#else
constexpr bool BYPASSES_CACHE = false;
#endif

template <int tokens>
[[gnu::always_inline]] inline void prefetch(const char* line) {
  if constexpr (BYPASSES_CACHE && tokens <= MAX_TOKENS / 2)
    _mm_prefetch(line, _MM_HINT_NTA);
  else
    _mm_prefetch(line, _MM_HINT_T0);
}

// Two registers of sums for each token.
template <class Of, int tokens>
using Sums = typename Of::Sum[tokens][2];

// sums = tokens x panel, [tokens][PANEL]; x has `units` units per token, and the next token's `stride` units on.
template <class Of, int tokens>
void multiply(const int32_t* panel, const int32_t* x, int64_t units, int64_t stride, typename Of::Number* sums) {
  Sums<Of, tokens> own;
#pragma GCC unroll 14
  for (int t = 0; t < tokens; ++t) own[t][0] = own[t][1] = Of::zero();
  for (int64_t u = 0; u < units; ++u, panel += PANEL) {
    const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + 16);
    prefetch<tokens>(reinterpret_cast<const char*>(panel) + AHEAD);
    prefetch<tokens>(reinterpret_cast<const char*>(panel + 16) + AHEAD);
#pragma GCC unroll 14
    for (int t = 0; t < tokens; ++t) {
      const __m512i unit = _mm512_set1_epi32(x[t * stride + u]);
      own[t][0] = Of::add(own[t][0], low, unit);
      own[t][1] = Of::add(own[t][1], high, unit);
    }
  }
#pragma GCC unroll 14
  for (int t = 0; t < tokens; ++t)
    for (int half = 0; half < 2; ++half) _mm512_storeu_si512(sums + t * PANEL + half * LANES, (__m512i)own[t][half]);
}

#endif

}  // namespace penstock
