// Sums and gathers among processes of one machine, through memory that they share.
//
// Each rank has a line of the board, with the number of the last exchange that it has written, and two
// slots that take turns. It writes its numbers, then its line, then waits for all other lines, then
// reads all slots. Two slots are enough: who writes exchange n + 2 has seen all lines at n + 1, so all
// ranks have read what was written for n. All ranks add in the order of ranks, so they get the same bits.
//
// A rank waits 40 us with its core, because the others compute the same at the same time, then asleep
// (a futex in the line), because where cores are few the one it waits for needs this one. It gives up after
// `slice_s`, so that the caller can see who is still there; the same call then goes on waiting.
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "threads.h"
#include "rows.h"

namespace penstock::exchange {

constexpr int64_t MET = 1, NOT_YET = 0, ENDED = -1;
constexpr auto AWAKE = std::chrono::microseconds(40);

using Clock = std::chrono::steady_clock;

// The first line is the board's: `value` is 1 once it has ended.
struct alignas(64) Line {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // who wait for the value to change
};
static_assert(sizeof(Line) == 64 && std::atomic<uint32_t>::is_always_lock_free);

struct Board {
  Line* lines;
  char* slots;
  int64_t ranks, room;
  Line& of(int64_t rank) const { return lines[1 + rank]; }
  char* slot(int64_t rank, int64_t number) const { return slots + (2 * rank + number % 2) * room; }
  bool has_ended() const { return lines->value.load(std::memory_order_relaxed) != 0; }
};

inline Board board_of(const at::Tensor& lines, const at::Tensor& slots, int64_t bytes) {
  TORCH_CHECK(lines.is_contiguous() && lines.dim() == 2 && lines.size(1) * lines.element_size() == sizeof(Line) &&
              slots.is_contiguous() && slots.scalar_type() == at::kByte && slots.dim() == 3 && slots.size(1) == 2 &&
              slots.size(0) + 1 == lines.size(0),
              "exchange: a board has lines [ranks + 1, 64 bytes] and slots [ranks, 2, room], not ", lines.sizes(), slots.sizes());
  TORCH_CHECK(bytes <= slots.size(2), "exchange: ", bytes, " bytes for slots of ", slots.size(2));
  return {static_cast<Line*>(lines.mutable_data_ptr()), static_cast<char*>(slots.mutable_data_ptr()), slots.size(0),
          slots.size(2)};
}

inline void wake(Line& line) {
#ifdef __linux__
  if (line.sleepers.load()) syscall(SYS_futex, &line.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Return when the line is woken, when `left` has passed, or at once if its value is not what was seen.
inline void sleep(Line& line, uint32_t seen, std::chrono::nanoseconds left) {
#ifdef __linux__
  const timespec patience{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
  line.sleepers.fetch_add(1);
  syscall(SYS_futex, &line.value, FUTEX_WAIT, seen, &patience, nullptr, 0);
  line.sleepers.fetch_sub(1);
#else
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, AWAKE));
#endif
}

inline void stay_awake() {
#ifdef __x86_64__
  for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
#endif
}

// Return once `line` is at `number`, the board has ended, or it is `until`.
inline int64_t wait(const Board& board, Line& line, uint32_t number, Clock::time_point until) {
  const auto awake_until = std::min(until, Clock::now() + AWAKE);
  for (;;) {
    const uint32_t seen = line.value.load();
    if (static_cast<int32_t>(seen - number) >= 0) return MET;
    if (board.has_ended()) return ENDED;
    const auto now = Clock::now();
    if (now >= until) return NOT_YET;
    if (now < awake_until)
      stay_awake();
    else
      sleep(line, seen, until - now);
  }
}

// Write x as this rank's part of an exchange, once; wait for all others' parts.
inline int64_t meet(const at::Tensor& x, const Board& board, int64_t rank, int64_t number, double slice_s) {
  TORCH_CHECK(x.is_contiguous(), "exchange: numbers must be contiguous");
  Line& own = board.of(rank);
  if (own.value.load(std::memory_order_relaxed) != static_cast<uint32_t>(number)) {
    std::memcpy(board.slot(rank, number), x.const_data_ptr(), x.nbytes());
    own.value.store(static_cast<uint32_t>(number));
    wake(own);
  }
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(slice_s));
  for (int64_t other = 0; other < board.ranks; ++other) {
    if (other == rank) continue;
    const int64_t met = wait(board, board.of(other), static_cast<uint32_t>(number), until);
    if (met != MET) return met;
  }
  return MET;
}

// x = the sum of all ranks' x.
int64_t sum_of_ranks(at::Tensor x, at::Tensor lines, at::Tensor slots, int64_t rank, int64_t number, double slice_s) {
  const Board board = board_of(lines, slots, x.nbytes());
  const int64_t met = meet(x, board, rank, number, slice_s);
  if (met != MET) return met;
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    T* out = x.mutable_data_ptr<T>();
    parallel(x.numel(), 16384, [&](int64_t begin, int64_t end) {
      each_lane(end - begin, [&](int64_t i, auto at) {
        Vec sum = at.load(reinterpret_cast<const T*>(board.slot(0, number)) + begin + i);
        for (int64_t r = 1; r < board.ranks; ++r)
          sum = sum + at.load(reinterpret_cast<const T*>(board.slot(r, number)) + begin + i);
        at.store(out + begin + i, sum);
      });
    });
  });
  return MET;
}

// out[r] = rank r's x; an empty out receives nothing.
int64_t gather_of_ranks(const at::Tensor& x, at::Tensor out, at::Tensor lines, at::Tensor slots, int64_t rank,
                        int64_t number, double slice_s) {
  const Board board = board_of(lines, slots, x.nbytes());
  TORCH_CHECK(out.is_contiguous() && (!out.numel() || out.nbytes() == board.ranks * x.nbytes()),
              "exchange: ", out.sizes(), " has no room for all ranks' ", x.sizes());
  const int64_t met = meet(x, board, rank, number, slice_s);
  if (met != MET) return met;
  for (int64_t r = 0; out.numel() && r < board.ranks; ++r)
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + r * x.nbytes(), board.slot(r, number), x.nbytes());
  return MET;
}

// No rank waits any more, now or later.
void end_exchanges(at::Tensor lines) {
  const auto board = static_cast<Line*>(lines.mutable_data_ptr());
  board->value.store(1);
  for (int64_t line = 1; line < lines.size(0); ++line) wake(board[line]);
}

}  // namespace penstock::exchange

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("sum_of_ranks(Tensor(a!) x, Tensor(b!) lines, Tensor(c!) slots, int rank, int number, float slice_s) -> int");
  m.def("gather_of_ranks(Tensor x, Tensor(a!) out, Tensor(b!) lines, Tensor(c!) slots, int rank, int number, "
        "float slice_s) -> int");
  m.def("end_exchanges(Tensor(a!) lines) -> ()");
}

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("sum_of_ranks", penstock::exchange::sum_of_ranks);
  m.impl("gather_of_ranks", penstock::exchange::gather_of_ranks);
  m.impl("end_exchanges", penstock::exchange::end_exchanges);
}
