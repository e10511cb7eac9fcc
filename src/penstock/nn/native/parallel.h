// Loops over torch's own threads.
//
// torch's C interface, not at::parallel_for: that one is a header of OpenMP pragmas, which would make
// this library link the compiler's OpenMP beside the one inside torch's wheel, and two pools of
// spinning threads on the same cores cost milliseconds a step.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

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

}  // namespace penstock
