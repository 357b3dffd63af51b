// CHECK with words: a broken invariant of our own, never a user's mistake (those are caught in Python, at trace time).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace grouped {

struct InternalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A source file's path from the project's root on. What precedes it is of the machine that built the module, and
// is not even part of it: the compiler copies the rest.
template <size_t kSize>
struct SourcePath {
  char text[kSize] = {};

  constexpr explicit SourcePath(const char (&path)[kSize]) {
    size_t root = 0;
    for (size_t i = 0; i + 3 < kSize; ++i) {
      const bool starts = i == 0 || path[i - 1] == '/';
      if (starts && path[i] == 'c' && path[i + 1] == 'c' && path[i + 2] == '/') root = i;
    }
    for (size_t i = root; i < kSize; ++i) text[i - root] = path[i];
  }
};

[[noreturn]] void fail(const char* file, int line, const std::string& what);

}  // namespace grouped

#define GROUPED_CHECK(condition, words)                             \
  do {                                                              \
    if (!(condition)) {                                             \
      static constexpr ::grouped::SourcePath source_path(__FILE__); \
      ::grouped::fail(source_path.text, __LINE__, words);           \
    }                                                               \
  } while (0)
