// Prints the processors that quotas pay for and those that are usable, below the root that it is given.
#include <cstdio>

#include "cc/cpu/processors.h"

int main(int, char** arguments) {
  std::printf("%g %d\n", grouped::quota_processors(arguments[1]), grouped::usable_processors(arguments[1]));
  return 0;
}
