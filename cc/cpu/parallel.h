// Work shared among threads. Tasks split outputs, never sums, so results do not depend on how many threads there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

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
// exception a body throws is rethrown here. One of the pool means fewer helpers.
void parallel_for(Pool* pool, int64_t tasks, const std::function<void(int64_t)>& body);

// The pool of callers that bring none (PyTorch, NumPy): made at first use, a thread for each processor that this
// process may keep busy (processors.h), or as many as the system gives.
Pool& own_pool();

// The same pool for a caller that wants no more than `threads` at once; 0: as many as there are.
class ThreadsOf final : public Pool {
 public:
  ThreadsOf(Pool& pool, int threads) : pool_(pool), threads_(threads) {}
  int threads() const override { return threads_ > 0 ? std::min(threads_, pool_.threads()) : pool_.threads(); }
  void schedule(std::function<void()> task) override { pool_.schedule(std::move(task)); }

 private:
  Pool& pool_;
  const int threads_;
};

}  // namespace grouped
