// Sums and gathers among processes of one machine: how a rank waits, and the board as an object.
#ifdef __linux__
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "exchange.h"

namespace penstock::exchange {

using namespace std::chrono_literals;

constexpr auto AWAKE = 40us;
constexpr auto SLICE = 100ms;

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

Board::Board(at::Tensor lines, at::Tensor slots, int64_t rank, int64_t file, double timeout_s)
    : lines_(std::move(lines)), slots_(std::move(slots)), first_slot_(static_cast<char*>(slots_.mutable_data_ptr())),
      room_(slots_.size(-1)), rank_(rank), file_(file), timeout_s_(timeout_s) {
  TORCH_CHECK(lines_.is_contiguous() && lines_.dim() == 2 && lines_.size(1) * lines_.element_size() == sizeof(Line) &&
              slots_.is_contiguous() && slots_.scalar_type() == at::kByte && slots_.dim() == 3 && slots_.size(1) == 2 &&
              slots_.size(0) + 1 == lines_.size(0) && rank_ >= 0 && rank_ < slots_.size(0),
              "Board: lines [ranks + 1, 64 bytes] and slots [ranks, 2, room] are needed, not ", lines_.sizes(), " and ",
              slots_.sizes());
}

void Board::meet() {
  ++number_;
  if (!why_.empty()) return;
  line(rank_).value.store(number_);
  wake(line(rank_));
  for (int64_t other = 0; other < ranks() && why_.empty(); ++other)
    if (other != rank_) why_ = wait_for(other);
}

// Return once the rank has written its part, or why it will not; the wording is gloo's.
std::string Board::wait_for(int64_t rank) {
  Line& other = line(rank);
  const auto begin = Clock::now(), until = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  auto look_at = begin + SLICE;
  for (;;) {
    const uint32_t seen = other.value.load();
    if (is_written(seen)) return "";
    const auto now = Clock::now();
    const bool is_gone_now = now >= look_at && is_gone(rank);
    const bool has_ended_now = has_ended();  // asked last: its file is closed then
    // A rank may write its part and leave after `seen` was read: what it has written counts.
    if ((is_gone_now || has_ended_now) && is_written(other.value.load())) return "";
    if (has_ended_now) return "The ranks' board was closed: Connection closed by peer";
    if (is_gone_now) return c10::str("Rank ", rank, " is gone: Connection closed by peer");
    if (now >= until) return c10::str("Timed out after ", timeout_s_, " s of waiting for another rank");
    if (now >= look_at) look_at = now + SLICE;
    if (now < begin + AWAKE)
      stay_awake();
    else
      sleep(other, seen, std::min(look_at, until) - now);
  }
}

// Whether a rank's process has ended: nobody holds its lock.
bool Board::is_gone(int64_t rank) const {
#ifdef __linux__
  struct flock lock = {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
  return fcntl(static_cast<int>(file_), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
#else
  return false;
#endif
}

void Board::end() {
  line(-1).value.store(1);
  for (int64_t rank = 0; rank < ranks(); ++rank) wake(line(rank));
}

void Board::write(const at::Tensor& x) {
  TORCH_CHECK(x.is_contiguous(), "Board: numbers must be contiguous");
  TORCH_CHECK(static_cast<int64_t>(x.nbytes()) <= room_, "Board: ", x.nbytes(), " bytes for slots of ", room_);
  std::memcpy(own(), x.const_data_ptr(), x.nbytes());
}

void Board::sum(at::Tensor x) {
  write(x);
  meet();
  check();
  dispatch(x, [&](auto zero) {
    Regions threads;
    add_parts(threads, *this, x.numel(), writable<decltype(zero)>(x));
  });
}

void Board::gather(const at::Tensor& x, at::Tensor out) {
  TORCH_CHECK(out.is_contiguous() && (!out.numel() || out.nbytes() == ranks() * x.nbytes()),
              "Board: ", out.sizes(), " has no room for all ranks' ", x.sizes());
  write(x);
  meet();
  check();
  for (int64_t r = 0; out.numel() && r < ranks(); ++r)
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + r * x.nbytes(), part(r), x.nbytes());
}

}  // namespace penstock::exchange

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  using penstock::exchange::Board;
  m.class_<Board>("Board")
      .def(torch::init<at::Tensor, at::Tensor, int64_t, int64_t, double>())
      .def("sum", &Board::sum)
      .def("gather", &Board::gather)
      .def("end", &Board::end);
}
