// Loops over torch's own threads: a parallel region for each loop, or one region for many loops.
//
// torch's C interface, not at::parallel_for: that one is a header of OpenMP pragmas, which would make
// this library link the compiler's OpenMP beside the one inside torch's wheel, and two pools of
// spinning threads on the same cores cost milliseconds a step.
//
// What computes is written once, for any `Threads`: `Regions` wakes threads for every loop; a `Member` is one
// thread of a region that lasts, does its own part of every loop and waits for the others; `Alone` is one thread
// that waits for nobody.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

// Of torch/csrc/stable/c/shim.h, whose types take the compiler a second.
extern "C" {
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
int32_t torch_get_num_threads(uint32_t* threads);
}

namespace penstock {

inline int64_t num_threads() {
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads)) throw std::runtime_error("the number of threads is not known");
  return threads;
}

// A function that the caller holds.
template <class Signature>
class Ref;

template <class... Values>
class Ref<void(Values...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, Ref>)
  Ref(F&& f)
      : held_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* held, Values... values) { (*static_cast<std::remove_reference_t<F>*>(held))(values...); }) {}
  void operator()(Values... values) const { call_(held_, values...); }

 private:
  void* held_;
  void (*call_)(void*, Values...);
};

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
  if (torch_parallel_for(0, size, grain, call, const_cast<Body*>(&body))) throw std::runtime_error("a parallel loop failed");
}

// All is done when a call returns. Not templates: every kernel would be compiled for each kind of threads.
class Threads {
 public:
  using Loop = Ref<void(int64_t begin, int64_t end)>;
  using Work = Ref<void()>;
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

class Alone final : public Threads {
 public:
  void each(int64_t size, int64_t, Loop loop) override {
    if (size > 0) loop(0, size);
  }
  void all(int64_t, Work work) override { work(); }
  void once(Work work) override { work(); }
};

// A counter whose changes threads wait for: spinning takes a tenth of a microsecond where sleeping takes ten. Who waits
// for long gives its core away, and then sleeps: a thread that another program keeps from its core is moved to a core
// that is idle, not to one that somebody spins on.
class Signal {
 public:
  int32_t value() const { return value_.load(std::memory_order_acquire); }
  void add(int32_t n) {
    value_.fetch_add(n, std::memory_order_acq_rel);
    value_.notify_all();  // a load where nobody sleeps
  }
  // Return once the value is no longer what was seen.
  void wait(int32_t seen) const {
    for (int spins = 0; value() == seen; ++spins) {
      if (spins >= SPINS + YIELDS) return value_.wait(seen, std::memory_order_acquire);
      if (spins >= SPINS) std::this_thread::yield();
#ifdef __x86_64__
      _mm_pause();
#endif
    }
  }

 private:
  static constexpr int SPINS = 2000;  // some 30 microseconds
  static constexpr int YIELDS = 200;  // as many again, where nobody else wants the core
  std::atomic<int32_t> value_{0};
};

// The places of a region, of which torch gives each thread one or, where it has fewer threads, several.
struct Team {
  const int64_t places;
  alignas(64) Signal arrived{};  // places, summed over all meetings
  alignas(64) std::atomic<int64_t> next[3] = {};  // part of a loop that is dealt out; loops take turns
};

class Member final : public Threads {
 public:
  Member(Team& team, int64_t begin, int64_t end) : team_(team), begin_(begin), end_(end) {}

  // From now on whoever is free takes the next of some parts of a loop, so that nobody waits for a late thread's share.
  // It costs short loops more than it saves.
  void deal() { is_dealt_ = true; }

  void each(int64_t size, int64_t grain, Loop loop) override {  // whatever the grain: nobody has to be woken
    if (is_dealt_) return each_dealt(size, std::clamp<int64_t>(size / std::max<int64_t>(grain, 1), 1, PARTS), loop);
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
  void each_dealt(int64_t size, int64_t parts, Loop loop) {
    std::atomic<int64_t>& next = team_.next[num_dealt_ % 3];
    // nobody has begun the next loop yet, and all have left the one before this
    if (begin_ == 0) team_.next[(num_dealt_ + 1) % 3].store(0, std::memory_order_relaxed);
    ++num_dealt_;
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      const int64_t begin = size * part / parts, end = size * (part + 1) / parts;
      if (begin < end) loop(begin, end);
    }
    meet();
  }

  // Return when all threads have come here.
  void meet() {
    met_ += team_.places;
    team_.arrived.add(static_cast<int32_t>(end_ - begin_));
    for (int32_t seen; (seen = team_.arrived.value()) - static_cast<int32_t>(met_) < 0;) team_.arrived.wait(seen);
  }

  Team& team_;
  const int64_t begin_, end_;
  static constexpr int64_t PARTS = 32;  // of a loop that is dealt out
  int64_t met_ = 0, num_dealt_ = 0;
  bool is_dealt_ = false;
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
