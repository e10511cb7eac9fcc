// What ranks of one machine exchange, through memory that they share.
//
// Each rank has a line of the board, with the number of the last exchange that it has written, and two
// slots that take turns. It writes its numbers, then its line, then waits for all other lines, then
// reads all slots. Two slots are enough: who writes exchange n + 2 has seen all lines at n + 1, so all
// ranks have read what was written for n. All ranks add in the order of ranks, so they get the same bits.
//
// A rank waits 40 us with its core, because the others compute the same at the same time, then asleep
// (a futex in the line), because where cores are few the one it waits for needs this one. Every 0.1 s it looks
// who is still there: each holds a lock on a byte of the file, and the kernel lets go of it when a process ends.
//
// Exchanges happen inside of steps, whose threads cannot throw. So one that fails is the last: those after it
// return at once, the step ends with numbers that mean nothing, and `check` throws.
#pragma once


#include <atomic>
#include <chrono>
#include <string>

#include "rows.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::exchange {

using Clock = std::chrono::steady_clock;

// The first line is the board's: `value` is 1 once it has ended.
struct alignas(64) Line {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // who wait for the value to change
};
static_assert(sizeof(Line) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// The board as one rank sees it; for one thread at a time, `end` excepted.
class Board : public torch::CustomClassHolder {
 public:
  // lines: [ranks + 1, 64 bytes]; slots: [ranks, 2, room] bytes; file: on whose bytes the ranks hold locks.
  Board(at::Tensor lines, at::Tensor slots, int64_t rank, int64_t file, double timeout_s);

  int64_t rank() const { return rank_; }
  int64_t ranks() const { return slots_.size(0); }
  int64_t room() const { return room_; }
  // Where this rank writes its part of the next exchange.
  char* own() const { return slot(rank_, number_ + 1); }
  // What a rank has written for the last exchange; it stays until this rank meets for the next.
  const char* part(int64_t rank) const { return slot(rank, number_); }
  // Say that the own part is written; return when all are.
  void meet();
  // Throw why the ranks no longer meet, if so.
  void check() const { TORCH_CHECK(why_.empty(), why_); }
  // No rank waits any more, now or later. From any thread.
  void end();

  // x = the sum of all ranks' x.
  void sum(at::Tensor x);
  // out[r] = rank r's x; an empty out receives nothing.
  void gather(const at::Tensor& x, at::Tensor out);

 private:
  Line& line(int64_t rank) const { return static_cast<Line*>(lines_.mutable_data_ptr())[1 + rank]; }
  bool has_ended() const { return line(-1).value.load() != 0; }
  // Whether a rank whose line has this value has written its part of the exchange.
  bool is_written(uint32_t value) const { return static_cast<int32_t>(value - number_) >= 0; }
  char* slot(int64_t rank, uint32_t number) const { return first_slot_ + (2 * rank + number % 2) * room_; }
  void write(const at::Tensor& x);
  std::string wait_for(int64_t rank);
  bool is_gone(int64_t rank) const;

  const at::Tensor lines_, slots_;  // hold the memory
  char* const first_slot_;
  const int64_t room_, rank_, file_;
  const double timeout_s_;
  uint32_t number_ = 0;  // of exchanges so far
  std::string why_;      // they no longer meet
};

// out = the sum of all ranks' parts of the last exchange.
template <class T>
void add_parts(Threads& threads, const Board& board, int64_t count, T* out) {
  threads.each((count + LANES - 1) / LANES, 1024, [&](int64_t begin, int64_t end) {
    begin *= LANES, end = std::min(end * LANES, count);
    each_lane(end - begin, [&](int64_t i, auto at) {
      Vec sum = at.load(reinterpret_cast<const T*>(board.part(0)) + begin + i);
      for (int64_t r = 1; r < board.ranks(); ++r) sum = sum + at.load(reinterpret_cast<const T*>(board.part(r)) + begin + i);
      at.store(out + begin + i, sum);
    });
  });
}

}  // namespace penstock::exchange
