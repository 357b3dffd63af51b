// CHECK with words: a broken invariant of our own, never a user's mistake (those are caught in Python, at trace time).
#pragma once

#include <stdexcept>
#include <string>

namespace grouped {

struct InternalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw InternalError(std::string("INTERNAL ") + file + ":" + std::to_string(line) + ": " + what);
}

}  // namespace grouped

#define GROUPED_CHECK(condition, words)                           \
  do {                                                            \
    if (!(condition)) ::grouped::fail(__FILE__, __LINE__, words); \
  } while (0)
