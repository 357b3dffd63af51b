// Threads that CPU kernels share.
#pragma once

#include <functional>

namespace grouped {

// Threads of another owner: XLA's pool under JAX, our own elsewhere. A task may start late or, on a busy pool, only
// after the caller has done all the work itself; `parallel_for` (cc/cpu/parallel.h) never waits for an unstarted one.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int threads() const = 0;  // how many tasks may run at once, the caller's own thread included
  virtual void schedule(std::function<void()> task) = 0;
};

}  // namespace grouped
