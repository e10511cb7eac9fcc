// Rows of float or bfloat16 as runs of 16 float32 lanes: AVX-512 where the CPU has it, else loops of
// 16 that compilers turn into what it has (AVX2, NEON). Arithmetic is float32 whatever is stored.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace penstock {

using bf16 = c10::BFloat16;
constexpr int LANES = 16;

#ifdef __AVX512F__

struct Vec {
  __m512 v;
  Vec() : v(_mm512_setzero_ps()) {}
  Vec(__m512 x) : v(x) {}
  explicit Vec(float x) : v(_mm512_set1_ps(x)) {}
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {  // round to nearest even; NaN stays NaN
#ifdef __AVX512BF16__
    const __m256bh half = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &half, sizeof half);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i out = _mm512_mask_blend_epi32(nan, up, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16)));
#endif
  }
  void store(int8_t* p) const {  // round to nearest even
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  Vec operator+(Vec o) const { return _mm512_add_ps(v, o.v); }
  Vec operator-(Vec o) const { return _mm512_sub_ps(v, o.v); }
  Vec operator*(Vec o) const { return _mm512_mul_ps(v, o.v); }
  Vec operator/(Vec o) const { return _mm512_div_ps(v, o.v); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }  // a * b + c
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float largest() const { return _mm512_reduce_max_ps(v); }
};

#else

struct Vec {
  float v[LANES];
  Vec() : v{} {}
  explicit Vec(float x) { for (float& lane : v) lane = x; }
  template <class T>
  static Vec load(const T* p) {
    Vec out;
    for (int i = 0; i < LANES; ++i) out.v[i] = static_cast<float>(p[i]);
    return out;
  }
  template <class T>
  void store(T* p) const {
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<T>(v[i]);
  }
  void store(int8_t* p) const {
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(std::nearbyint(v[i]));
  }
  template <class F>
  static Vec each(Vec a, Vec b, F f) {
    for (int i = 0; i < LANES; ++i) a.v[i] = f(a.v[i], b.v[i]);
    return a;
  }
  Vec operator+(Vec o) const { return each(*this, o, [](float a, float b) { return a + b; }); }
  Vec operator-(Vec o) const { return each(*this, o, [](float a, float b) { return a - b; }); }
  Vec operator*(Vec o) const { return each(*this, o, [](float a, float b) { return a * b; }); }
  Vec operator/(Vec o) const { return each(*this, o, [](float a, float b) { return a / b; }); }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec max(Vec a, Vec b) { return each(a, b, [](float x, float y) { return x > y ? x : y; }); }
  float sum() const {
    float total = 0;
    for (float lane : v) total += lane;
    return total;
  }
  float largest() const {
    float most = v[0];
    for (float lane : v) most = lane > most ? lane : most;
    return most;
  }
};

#endif

#ifdef __AVX512F__
// What each of 16 vectors adds up to, halves of all at once: one by one would take three times as many instructions.
template <class Add>
inline __m512 added_up(const Vec (&x)[LANES], const Add& add) {
  __m512 halves[8], quarters[4], pairs[2];
  for (int i = 0; i < 8; ++i)
    halves[i] = add(_mm512_shuffle_f32x4(x[i].v, x[i + 8].v, 0x44), _mm512_shuffle_f32x4(x[i].v, x[i + 8].v, 0xee));
  for (int i = 0; i < 4; ++i)
    quarters[i] = add(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88), _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    pairs[i] = add(_mm512_shuffle_ps(quarters[i], quarters[i + 2], 0x44), _mm512_shuffle_ps(quarters[i], quarters[i + 2], 0xee));
  const __m512 all = add(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), all);
}
#endif

// The sums of 16 vectors, each added up in the order of `sum`.
inline Vec sums_of(const Vec (&x)[LANES]) {
#ifdef __AVX512F__
  return added_up(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
#else
  Vec out;
  for (int i = 0; i < LANES; ++i) out.v[i] = x[i].sum();
  return out;
#endif
}

// e^x within 2 units in the last place for x <= 88; 0 below -87.3, so that -inf gives 0.
// Cephes' reduction: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial for e^r, n into the exponent.
inline Vec exp(Vec x) {
#ifdef __AVX512F__
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x.v);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __mmask16 seen = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.3f), _CMP_GE_OQ);
  return _mm512_maskz_scalef_ps(seen, p, n);
#else
  for (float& lane : x.v) lane = lane < -87.3f ? 0.0f : std::exp(lane);
  return x;
#endif
}

}  // namespace penstock
