#include "cc/cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cc/api/fork_mutex.h"
#include "cc/cpu/processors.h"

namespace grouped {
namespace {

#if defined(__x86_64__)
constexpr uint64_t kFlushAndRounding = 0x8000u | 0x6000u | 0x0040u;  // FTZ, rounding control, DAZ of MXCSR
uint64_t control_word() { return _mm_getcsr(); }
void set_control_word(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushAndRounding = (uint64_t{1} << 24) | (uint64_t{3} << 22);  // FZ, RMode of FPCR
uint64_t control_word() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
void set_control_word(uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
constexpr uint64_t kFlushAndRounding = ~uint64_t{0};  // where nothing flushes, the rounding mode is the whole word
uint64_t control_word() { return static_cast<uint64_t>(std::fegetround()); }
void set_control_word(uint64_t word) { std::fesetround(word ? static_cast<int>(word) : FE_TONEAREST); }
#endif

// What the caller and its helpers share. A helper may start after the caller has left, so it owns a reference to this
// and touches `body` only between a successful claim and `leave`.
class Loop {
 public:
  Loop(int64_t tasks, const std::function<void(int64_t)>& body) : tasks_(tasks), body_(body) {}

  // Takes tasks until none is left. `running_` rises before the first claim, so a caller that finds nothing to claim
  // sees every helper that still works.
  void work() {
    running_.fetch_add(1);
    int64_t task = next_.fetch_add(1);
    if (task < tasks_) {
      FloatEnvironment environment;
      for (; task < tasks_; task = next_.fetch_add(1)) {
        try {
          body_(task);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex_);
          if (!error_) error_ = std::current_exception();
          next_.store(tasks_);
        }
      }
    }
    if (running_.fetch_sub(1) == 1) {
      const std::lock_guard<std::mutex> lock(mutex_);
      idle_.notify_all();
    }
  }

  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return running_.load() == 0; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t tasks_;
  const std::function<void(int64_t)>& body_;
  std::atomic<int64_t> next_{0};
  std::atomic<int> running_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
  std::exception_ptr error_;
};

class OwnPool final : public Pool {
 public:
  // With as many of these threads as the system gives.
  explicit OwnPool(int threads) {
    try {
      for (; threads_ < threads; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // the others wait for tasks, so this object has to stay
    }
  }
  int threads() const override { return threads_; }
  void schedule(std::function<void()> task) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  [[noreturn]] void serve() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [this] { return !queue_.empty(); });
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      task();
    }
  }

  int threads_ = 1;  // that of the caller
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
};

// Never destroyed: its threads may outlive every static object. A forked child has none of them and makes a new pool.
std::atomic<OwnPool*> g_pool{nullptr};
[[maybe_unused]] const int g_registered = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });
ForkMutex* const g_making = new ForkMutex;

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(control_word()) { set_control_word(saved_ & ~kFlushAndRounding); }
FloatEnvironment::~FloatEnvironment() { set_control_word(saved_); }

void parallel_for(Pool* pool, int64_t tasks, const std::function<void(int64_t)>& body) {
  const int64_t threads = pool ? pool->threads() : 1;
  auto loop = std::make_shared<Loop>(tasks, body);
  try {
    for (int64_t helper = 1; helper < std::min(threads, tasks); ++helper) pool->schedule([loop] { loop->work(); });
  } catch (...) {  // helpers that were scheduled may be using `body`, and they are enough
  }
  loop->work();
  loop->finish();
}

Pool& own_pool() {
  OwnPool* pool = g_pool.load();
  if (pool) return *pool;
  const std::lock_guard<ForkMutex> lock(*g_making);
  if (!g_pool.load()) g_pool.store(new OwnPool(usable_processors()));
  return *g_pool.load();
}

}  // namespace grouped
