// Work shared among threads. Tasks split outputs, never sums, so results do not depend on how many threads there are.
#pragma once

#include <cstdint>
#include <functional>

#include "cc/api/pool.h"

namespace grouped {

// Clears flush-to-zero and denormals-are-zero for its lifetime and rounds to nearest, then restores what it found:
// XLA:CPU calls handlers with both set (numerics 8).
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint64_t saved_;
};

// Calls body(i) once for every i in [0, tasks), each inside a FloatEnvironment. The caller takes tasks itself and
// returns when all are done; it waits for tasks that run, never for ones that the pool has not started. The first
// exception a body throws is rethrown here.
void parallel_for(Pool* pool, int64_t tasks, const std::function<void(int64_t)>& body);

// The pool of callers that bring none (PyTorch, NumPy): made at first use, as many threads as this process may run on.
Pool& own_pool();

}  // namespace grouped
