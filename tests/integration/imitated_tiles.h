// The instructions of Intel's matrix tiles in plain C++, for CPUs without them: what tests compile the operators with.
//
// Results and limits are those of Intel's manual, volume 2. What hardware answers with a fault - a tile without a
// shape, shapes that do not fit - ends the process with a message. Numbers below 2^-126 are not made 0.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace imitated {

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t at[16][64] = {};
};
inline thread_local bool is_configured = false;
inline thread_local Tile tiles[8];

inline void need(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "imitated tiles: %s\n", what), std::abort();
}

inline Tile& in_use(int tile) {
  need(is_configured, "no shapes were loaded");
  need(tiles[tile].rows > 0, "a tile without a shape");
  return tiles[tile];
}

inline void load_config(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, 64);
  need(bytes[0] == 1, "palette 1 has eight tiles");
  for (int i = 2; i < 16; ++i) need(bytes[i] == 0, "reserved bytes are 0");
  for (int i = 0; i < 16; ++i) {
    uint16_t of_row;
    std::memcpy(&of_row, bytes + 16 + 2 * i, 2);
    const int rows = bytes[48 + i];
    need((rows == 0) == (of_row == 0), "rows without bytes, or bytes without rows");
    need(i < 8 || rows == 0, "there are eight tiles");
    need(rows <= 16 && of_row <= 64, "a tile has up to 16 rows of 64 bytes");
    if (i < 8) tiles[i] = Tile{rows, of_row};
  }
  is_configured = true;
}

inline void release() {
  is_configured = false;
  for (Tile& tile : tiles) tile = Tile{};
}

inline void load(int to, const void* from, int64_t stride) {
  Tile& tile = in_use(to);
  std::memset(tile.at, 0, sizeof tile.at);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.at[row], static_cast<const char*>(from) + row * stride, tile.bytes);
}

inline void store(int from, void* to, int64_t stride) {
  const Tile& tile = in_use(from);
  for (int row = 0; row < tile.rows; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tile.at[row], tile.bytes);
}

inline void zero(int tile) { std::memset(in_use(tile).at, 0, sizeof tiles[tile].at); }

inline void check_product(const Tile& c, const Tile& a, const Tile& b) {
  need(&c != &a && &c != &b && &a != &b, "three different tiles");
  need(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows && c.bytes % 4 == 0, "shapes that do not fit");
}

template <class T>
T number(const Tile& tile, int row, int i) {
  T value;
  std::memcpy(&value, tile.at[row] + i * sizeof(T), sizeof(T));
  return value;
}

inline float of_bfloat16(const Tile& tile, int row, int i) {
  const uint32_t bits = uint32_t{number<uint16_t>(tile, row, i)} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// c += a b; even and odd numbers are added up apart, then together, then to c.
inline void add_pairs(int to, int left, int right) {
  Tile& c = in_use(to);
  const Tile &a = in_use(left), &b = in_use(right);
  check_product(c, a, b);
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < a.bytes / 4; ++k) {
        even = std::fma(of_bfloat16(a, m, 2 * k), of_bfloat16(b, k, 2 * n), even);
        odd = std::fma(of_bfloat16(a, m, 2 * k + 1), of_bfloat16(b, k, 2 * n + 1), odd);
      }
      const float sum = number<float>(c, m, n) + (even + odd);
      std::memcpy(c.at[m] + 4 * n, &sum, 4);
    }
  std::memset(c.at[c.rows], 0, sizeof c.at - 64 * c.rows);
}

// c += a b; a is unsigned, b signed, and sums that do not fit wrap around.
inline void add_bytes(int to, int left, int right) {
  Tile& c = in_use(to);
  const Tile &a = in_use(left), &b = in_use(right);
  check_product(c, a, b);
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      uint32_t sum = number<uint32_t>(c, m, n);
      for (int i = 0; i < a.bytes; ++i) sum += uint32_t(int{a.at[m][i]} * int{number<int8_t>(b, i / 4, 4 * n + i % 4)});
      std::memcpy(c.at[m] + 4 * n, &sum, 4);
    }
}

}  // namespace imitated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig imitated::load_config
#define _tile_release imitated::release
#define _tile_loadd imitated::load
#define _tile_stored imitated::store
#define _tile_zero imitated::zero
#define _tile_dpbf16ps imitated::add_pairs
#define _tile_dpbusd imitated::add_bytes
