// What is found once per set of facts and kept by the bytes of all of them, so that equal bytes want equal values.
#pragma once

#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "cc/api/fork_mutex.h"

namespace grouped {

// For any number of threads; all values are dropped when there are kMost. NOTE: never destroyed, as calls may reach it
// at exit, and a fork whenever it happens.
template <class Value, size_t kMost>
class Kept {
 public:
  template <class Make>
  Value get(const std::string& facts, Make make) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = values_.find(facts); found != values_.end()) return found->second;
    }
    Value made = make();
    const std::unique_lock lock(mutex_);
    if (values_.size() >= kMost) values_.clear();
    return values_.try_emplace(facts, std::move(made)).first->second;
  }

 private:
  ForkMutex mutex_;
  std::unordered_map<std::string, Value> values_;
};

}  // namespace grouped
