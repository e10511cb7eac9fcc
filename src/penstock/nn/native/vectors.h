// Rows of float, bfloat16 or bytes as vectors of float32 lanes, as many as a register of the CPU holds: 16 with AVX-512,
// 8 with AVX, 4 elsewhere. Arithmetic is float32 whatever is stored.
//
// One implementation for all CPUs, by the compilers' vector extensions. Intrinsics are for what compilers do not find.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace penstock {

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
  bf16() = default;
  bf16(float x) {  // round to nearest even; NaN stays NaN
    const uint32_t whole = std::bit_cast<uint32_t>(x);
    bits = x == x ? static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16) : 0x7fc0;
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class V, class T>
[[gnu::always_inline]] inline V load_as(const T* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Numbers of 32 bits from fewer bits and back; compilers take lanes one by one.
[[gnu::always_inline]] inline Ints widened(Halves x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Ints);
#endif
}

[[gnu::always_inline]] inline Ints widened(Bytes x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
  return __builtin_convertvector(x, Ints);
#endif
}

// The last byte of each.
[[gnu::always_inline]] inline Bytes narrowed(Ints x) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1,
                                         -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, first);
  return (Bytes)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// Byte k of each, as the highest of its number; the others are 0.
template <int k>
[[gnu::always_inline]] inline Ints as_top_byte(Ints x) {
  if constexpr (k == 3) return x & static_cast<int32_t>(0xff000000);
#if defined(__AVX512BW__)
  return (Ints)_mm512_shuffle_epi8((__m512i)x, _mm512_set4_epi32(static_cast<int>(0x0c808080 + (k << 24)), static_cast<int>(0x08808080 + (k << 24)),
                                                                 static_cast<int>(0x04808080 + (k << 24)), static_cast<int>(0x00808080 + (k << 24))));
#elif defined(__AVX2__)
  return (Ints)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(_mm_set_epi32(0x0c808080 + (k << 24), 0x08808080 + (k << 24),
                                                                                         0x04808080 + (k << 24), 0x00808080 + (k << 24))));
#else
  return (x << (24 - 8 * k)) & static_cast<int32_t>(0xff000000);
#endif
}

struct Vec {
  Floats v;
  Vec() : v{} {}
  Vec(Floats x) : v(x) {}
  explicit Vec(float x) : v(x - Floats{}) {}
  static Vec load(const float* p) { return load_as<Floats>(p); }
  static Vec load(const bf16* p) { return (Floats)(widened(load_as<Halves>(p)) << 16); }
  static Vec load(const int8_t* p) { return of(widened(load_as<Bytes>(p))); }
  static Vec of(Ints x) { return __builtin_convertvector(x, Floats); }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  void store(bf16* p) const {  // round to nearest even; NaN stays NaN
#ifdef __AVX512BF16__
    const __m256bh half = _mm512_cvtneps_pbh(v);
#else
    const Ints bits = (Ints)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves half = __builtin_convertvector(v == v ? rounded : Ints{} + 0x7fc0, Halves);
#endif
    std::memcpy(static_cast<void*>(p), &half, sizeof half);
  }
  void store(int8_t* p) const {  // round to nearest even
    const Bytes bytes = narrowed(whole());
    std::memcpy(p, &bytes, sizeof bytes);
  }
  Vec operator+(Vec o) const { return v + o.v; }
  Vec operator-(Vec o) const { return v - o.v; }
  Vec operator*(Vec o) const { return v * o.v; }
  Vec operator/(Vec o) const { return v / o.v; }
  static Vec fma(Vec a, Vec b, Vec c) { return a.v * b.v + c.v; }
  static Vec max(Vec a, Vec b) { return a.v > b.v ? a.v : b.v; }
  static Vec min(Vec a, Vec b) { return a.v < b.v ? a.v : b.v; }
  Vec magnitude() const { return (Floats)((Ints)v & 0x7fffffff); }
  // The nearest whole number, even of two. Not by adding 1.5 * 2^23: compilers may add a product there without rounding it.
  Ints whole() const {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32(v);
#elif defined(__AVX__)
    return (Ints)_mm256_cvtps_epi32(v);
#else
    Ints out;
    for (int i = 0; i < LANES; ++i) out[i] = static_cast<int32_t>(std::nearbyint(v[i]));
    return out;
#endif
  }
  Vec nearest() const { return of(whole()); }
#ifdef __AVX512F__
  float sum() const { return _mm512_reduce_add_ps(v); }
  float largest() const { return _mm512_reduce_max_ps(v); }
#else
  float sum() const {
    return folded([](float a, float b) { return a + b; });
  }
  float largest() const {
    return folded([](float a, float b) { return a > b ? a : b; });
  }

 private:
  // Halves of the lanes with one another, until one is left.
  template <class F>
  float folded(F f) const {
    float lanes[LANES];
    store(lanes);
    for (int n = LANES / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) lanes[i] = f(lanes[i], lanes[i + n]);
    return lanes[0];
  }
#endif
};

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

// The sums of as many vectors as one has lanes.
inline Vec sums_of(const Vec (&x)[LANES]) {
#if defined(__AVX512F__)
  return added_up(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
#elif defined(__AVX__)
  __m256 quarters[2];
  for (int i = 0; i < 2; ++i)
    quarters[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[4 * i].v, x[4 * i + 1].v), _mm256_hadd_ps(x[4 * i + 2].v, x[4 * i + 3].v));
  return _mm256_add_ps(_mm256_permute2f128_ps(quarters[0], quarters[1], 0x20), _mm256_permute2f128_ps(quarters[0], quarters[1], 0x31));
#else
  Vec out;
  for (int i = 0; i < LANES; ++i) out.v[i] = x[i].sum();
  return out;
#endif
}

// e^x within 2 units in the last place for x <= 88, infinite from 89 on; 0 below -87.3, so that -inf gives 0.
// Cephes' reduction: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial for e^r, n into the exponent.
inline Vec exp(Vec x) {
  const Floats most = Vec(89.0f).v, least = Vec(-87.3f).v, seen = x.v < most ? x.v : most;
  const Ints whole = Vec(seen * 1.44269504f).whole();
  const Floats n = Vec::of(whole).v;
  const Floats r = (seen - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = Vec(1.9875691500e-4f).v;
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  p = p * (r * r) + (r + 1.0f);
  const Floats scale = (Floats)((whole + 127) << 23);
  return x.v >= least ? p * scale : Floats{};
}

}  // namespace penstock
