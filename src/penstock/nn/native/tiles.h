// Products by the matrix tiles of a CPU (Intel's AMX): of each thread eight registers of 16 rows of 64 bytes.
//
//   c[rows, columns] = a[rows, depth] b[depth, columns]
//
// What is multiplied are cells of 4 bytes, numbers that follow each other in depth: two bfloat16 or four bytes. Tokens
// are rows of such cells, and so is a panel (panels.h) or what attention lays out (tile.h): nothing is packed anew.
// Two tiles of a by two of b are added to four of c, so that every load serves two products.
//
// Each sum runs over depth in one order, 16 cells at a time, whatever the number of rows: a token's result does not
// depend on its neighbours. Of bfloat16 it is another order than that of vectors, and numbers below 2^-126 are 0.
//
// Source: Intel's manual, volume 2, TDPBF16PS and TDPBUSD.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef HAS_TILES
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace penstock::tiles {

constexpr int64_t ROWS = 16, DEPTH = 16, ROW_BYTES = 4 * DEPTH;  // of a tile, which has 16 columns too

enum Kind {
  PAIRS,  // of bfloat16, added up in float32
  BYTES,  // of a from 0 to 255, of b from -128 to 127, added up in int32
};

struct Task {
  const void *a, *b;
  void* c;
  int64_t a_stride, b_stride, c_stride;  // bytes
  int64_t rows, columns, depth;          // columns: a multiple of 16; depth: cells
  int64_t ahead = 0;  // bytes of b, 32 columns that lie together, asked of memory before they are read; 0: b is near
};

// Whether this process may use tiles: Linux grants them to all its threads when it asks.
inline bool usable() {
  constexpr int ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  return is_granted;
}

// The tiles of a thread, which makes one for a range of work. Their shape is set by the first product, whatever
// another library left there, and given up in the end: a core whose tiles are in use does not sleep deeply.
class Unit {
 public:
  Unit() = default;
  Unit(const Unit&) = delete;
  ~Unit() {
    if (shape_.palette) _tile_release();
  }

  template <Kind kind>
  void multiply(const Task& task) {
    const int64_t whole = task.depth / DEPTH, rest = task.depth % DEPTH;
    for (int64_t row = 0; row < task.rows; row += 2 * ROWS) {
      const int64_t rows = std::min(task.rows - row, 2 * ROWS);
      take_shape(rows, DEPTH);
      add_columns<kind>(task, row, rows, Steps{0, whole});
      if (!rest) continue;
      take_shape(rows, rest);
      add_columns<kind>(task, row, rows, Steps{whole, 1, true});
    }
  }

 private:
  struct alignas(64) Shape {  // as the instruction reads it
    uint8_t palette = 0, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  struct Steps {
    int64_t first, count;
    bool is_begun = false;  // whether c has sums already
  };

  // Tiles 0 to 3 are c, the last two below the first; 4 and 5 are a, one below the other; 6 and 7 are b.
  void take_shape(int64_t rows, int64_t depth) {
    const int64_t upper = std::min(rows, ROWS), lower = rows - upper;
    if (shape_.palette && shape_.rows[0] == upper && shape_.rows[6] == depth && (!lower || shape_.rows[2] == lower)) return;
    const auto set = [&](int tile, int64_t num_rows, int64_t cells) {
      shape_.rows[tile] = num_rows;
      shape_.row_bytes[tile] = num_rows ? 4 * cells : 0;
    };
    for (const int right : {0, 1}) set(right, upper, DEPTH), set(2 + right, lower, DEPTH), set(6 + right, depth, DEPTH);
    set(4, upper, depth), set(5, lower, depth);
    shape_.palette = 1;
    asm volatile("" ::: "memory");  // GCC is not told that the instruction reads all of it
    _tile_loadconfig(&shape_);
  }

  template <Kind kind>
  static void add_columns(const Task& task, int64_t row, int64_t rows, const Steps& steps) {
    for (int64_t column = 0; column < task.columns; column += 2 * DEPTH) {
      const bool is_tall = rows > ROWS, is_wide = task.columns - column > DEPTH;
      if (is_tall && is_wide) add<kind, true, true>(task, row, column, steps);
      else if (is_tall) add<kind, true, false>(task, row, column, steps);
      else if (is_wide) add<kind, false, true>(task, row, column, steps);
      else add<kind, false, false>(task, row, column, steps);
    }
  }

#define ADD(c, a, b)           \
  if constexpr (kind == PAIRS) \
    _tile_dpbf16ps(c, a, b);   \
  else                         \
    _tile_dpbusd(c, a, b)

  // A corner of c, of two tiles or one each way.
  template <Kind kind, bool is_tall, bool is_wide>
  static void add(const Task& task, int64_t row, int64_t column, const Steps& steps) {
    const auto* a = static_cast<const char*>(task.a) + row * task.a_stride + steps.first * ROW_BYTES;
    const auto* b = static_cast<const char*>(task.b) + steps.first * DEPTH * task.b_stride + column * 4;
    auto* c = static_cast<char*>(task.c) + row * task.c_stride + column * 4;
    const int64_t a_below = ROWS * task.a_stride, c_below = ROWS * task.c_stride;
    asm volatile("" ::: "memory");  // GCC is not told that loads of tiles read memory
    if (steps.is_begun) {
      _tile_loadd(0, c, task.c_stride);
      if constexpr (is_wide) _tile_loadd(1, c + ROW_BYTES, task.c_stride);
      if constexpr (is_tall) _tile_loadd(2, c + c_below, task.c_stride);
      if constexpr (is_tall && is_wide) _tile_loadd(3, c + c_below + ROW_BYTES, task.c_stride);
    } else {
      _tile_zero(0);
      if constexpr (is_wide) _tile_zero(1);
      if constexpr (is_tall) _tile_zero(2);
      if constexpr (is_tall && is_wide) _tile_zero(3);
    }
    for (int64_t step = 0; step < steps.count; ++step, a += ROW_BYTES, b += DEPTH * task.b_stride) {
      if (task.ahead)
        for (int64_t line = 0; line < 2 * DEPTH * ROW_BYTES; line += 64) _mm_prefetch(b + task.ahead + line, _MM_HINT_T0);
      _tile_loadd(6, b, task.b_stride);
      _tile_loadd(4, a, task.a_stride);
      ADD(0, 4, 6);
      if constexpr (is_wide) {
        _tile_loadd(7, b + ROW_BYTES, task.b_stride);
        ADD(1, 4, 7);
      }
      if constexpr (is_tall) {
        _tile_loadd(5, a + a_below, task.a_stride);
        ADD(2, 5, 6);
      }
      if constexpr (is_tall && is_wide) {
        ADD(3, 5, 7);
      }
    }
    _tile_stored(0, c, task.c_stride);
    if constexpr (is_wide) _tile_stored(1, c + ROW_BYTES, task.c_stride);
    if constexpr (is_tall) _tile_stored(2, c + c_below, task.c_stride);
    if constexpr (is_tall && is_wide) _tile_stored(3, c + c_below + ROW_BYTES, task.c_stride);
  }

#undef ADD

  Shape shape_;
};

}  // namespace penstock::tiles

#endif
