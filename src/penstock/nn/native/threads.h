// Loops over torch's own threads: a parallel region for each loop, or one region for many loops.
//
// torch's C interface, not at::parallel_for: that one is a header of OpenMP pragmas, which would make
// this library link the compiler's OpenMP beside the one inside torch's wheel, and two pools of
// spinning threads on the same cores cost milliseconds a step.
//
// What computes is written once, for any `Threads`: `Regions` wakes threads for every loop; a `Member` is one
// thread of a region that lasts, does its own part of every loop and waits for the others.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace penstock {

inline int64_t num_threads() {
  uint32_t threads = 1;
  TORCH_CHECK(!torch_get_num_threads(&threads), "the number of threads is not known");
  return threads;
}

// Call body(begin, end) on parts of [0, size), each of at least `grain` items.
template <class Body>
void parallel(int64_t size, int64_t grain, const Body& body) {
  if (size <= grain) {  // one part: no need to ask torch
    if (size > 0) body(int64_t{0}, size);
    return;
  }
  auto call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  const auto failed = torch_parallel_for(0, size, grain, call, const_cast<Body*>(&body));
  TORCH_CHECK(!failed, "a parallel loop failed");
}

// All is done when a call returns. Not templates: every kernel would be compiled for each kind of threads.
class Threads {
 public:
  using Loop = c10::function_ref<void(int64_t begin, int64_t end)>;
  using Work = c10::function_ref<void()>;
  virtual void each(int64_t size, int64_t grain, Loop loop) = 0;  // parts of [0, size), of at least `grain`
  virtual void all(int64_t most, Work work) = 0;                  // on up to so many threads at once
  virtual void once(Work work) = 0;

 protected:
  ~Threads() = default;
};

class Regions final : public Threads {
 public:
  void each(int64_t size, int64_t grain, Loop loop) override { parallel(size, grain, loop); }
  void all(int64_t most, Work work) override {
    parallel(std::min(most, num_threads()), 1, [&](int64_t, int64_t) { work(); });
  }
  void once(Work work) override { work(); }
};

// The places of a region, of which torch gives each thread one or, where it has fewer threads, several.
struct Team {
  const int64_t places;
  alignas(64) std::atomic<int64_t> arrived{0};  // places, summed over all meetings
};

class Member final : public Threads {
 public:
  Member(Team& team, int64_t begin, int64_t end) : team_(team), begin_(begin), end_(end) {}

  void each(int64_t size, int64_t, Loop loop) override {  // whatever the grain: nobody has to be woken
    const int64_t begin = size * begin_ / team_.places, end = size * end_ / team_.places;
    if (begin < end) loop(begin, end);
    meet();
  }
  void all(int64_t, Work work) override {
    work();
    meet();
  }
  void once(Work work) override {
    if (begin_ == 0) work();
    meet();
  }

 private:
  // Return when all threads have come here. Spinning takes a tenth of a microsecond where sleeping takes ten;
  // a thread that waits for long gives its core to whom it may be waiting for.
  void meet() {
    met_ += team_.places;
    team_.arrived.fetch_add(end_ - begin_, std::memory_order_acq_rel);
    for (int spins = 0; team_.arrived.load(std::memory_order_acquire) < met_; ++spins) {
      if (spins >= SPINS) std::this_thread::yield();
#ifdef __x86_64__
      _mm_pause();
#endif
    }
  }

  static constexpr int SPINS = 2000;  // some 30 microseconds
  Team& team_;
  const int64_t begin_, end_;
  int64_t met_ = 0;
};

// Call body(member) on all of torch's threads at once. It may not throw: the others would wait for ever.
template <class Body>
void together(const Body& body) {
  Team team{num_threads()};
  const auto member = [&](int64_t begin, int64_t end) noexcept {
    Member self(team, begin, end);
    body(self);
  };
  parallel(team.places, 1, member);
}

}  // namespace penstock
