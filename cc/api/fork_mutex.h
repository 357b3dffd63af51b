// Locks that a forked child finds free, whatever the other threads of its parent were doing.
#pragma once

#include <pthread.h>

#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

namespace grouped {

// Held by the thread that forks until the fork is over. NOTE: never destroyed, and no thread takes another one while it
// holds one, as fork takes them in the order in which they were made.
class ForkMutex : public std::shared_mutex {
 public:
  ForkMutex() {
    Every& every = all();
    const std::lock_guard<std::mutex> lock(every.mutex);
    every.members.push_back(this);
  }

 private:
  struct Every {
    std::mutex mutex;
    std::vector<ForkMutex*> members;
  };

  // One for the whole module; a fork while it is made finds nothing to hold.
  static Every& all() {
    static Every* every = [] {
      pthread_atfork(before, in_parent, in_child);
      return new Every;
    }();
    return *every;
  }
  static void before() {
    all().mutex.lock();
    for (ForkMutex* each : all().members) each->lock();
  }
  static void in_parent() {
    for (ForkMutex* each : all().members) each->unlock();
    all().mutex.unlock();
  }
  // Made again: threads that were waiting count as readers, and a child does not have them.
  static void in_child() {
    for (ForkMutex* each : all().members) new (static_cast<std::shared_mutex*>(each)) std::shared_mutex;
    new (&all().mutex) std::mutex;
  }
};

}  // namespace grouped
