// Loops that get fewer helpers than they ask for: the system refuses threads of the own pool, or a pool throws. Prints
// the threads of the own pool, and how many tasks of 1000 ran once in either.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/cpu/parallel.h"
#include "cc/cpu/processors.h"

namespace grouped {

int usable_processors(const std::string&) { return 6; }

}  // namespace grouped

namespace {

int g_threads_left = 0;

// Takes so many tasks, and then throws.
class RefusingPool final : public grouped::Pool {
 public:
  explicit RefusingPool(int helpers) : left_(helpers) {}
  ~RefusingPool() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int threads() const override { return 4; }
  void schedule(std::function<void()> task) override {
    if (left_-- == 0) throw std::bad_alloc();
    threads_.emplace_back(std::move(task));
  }

 private:
  int left_;
  std::vector<std::thread> threads_;
};

// How many of `tasks` ran once.
int run(grouped::Pool* pool, int tasks) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
  grouped::parallel_for(pool, tasks, [&](int64_t task) { ++runs[static_cast<size_t>(task)]; });
  int once = 0;
  for (const std::atomic<int>& each : runs) once += each == 1;
  return once;
}

}  // namespace

// In front of the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*start)(void*), void* argument) {
  if (g_threads_left-- <= 0) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const Create next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, how, start, argument);
}

// Its argument: how many threads and helpers there are.
int main(int, char** arguments) {
  const int given = std::atoi(arguments[1]);
  g_threads_left = given;
  grouped::Pool& own = grouped::own_pool();
  std::printf("%d %d ", own.threads(), run(&own, 1000));
  g_threads_left = given;
  RefusingPool refusing(given);
  std::printf("%d\n", run(&refusing, 1000));
  std::fflush(stdout);
  return 0;
}
