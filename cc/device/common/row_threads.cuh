// How the vectors of many rows are spread over threads: a power of two of neighbours share a row, so that narrow rows
// waste no lanes and wide ones no divisions. Blocks run along a row first, then down.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace grouped {

constexpr int kSpreadThreads = 256;

struct Spread {
  int64_t vectors;  // of a row
  int64_t rows;
  unsigned parts;   // blocks side by side on a row
  int across_bits;  // 2^across_bits threads side by side
  int rows_a_thread;

  // The most neighbours of which at least 7 in 8 have a vector, else those that waste the least.
  static Spread plan(int64_t vectors, int64_t rows, int rows_a_thread) {
    int best = 0;
    double most = 0;
    for (int bits = 8; bits >= 0; --bits) {
      const int64_t across = int64_t{1} << bits;
      const double used = static_cast<double>(vectors) / static_cast<double>((vectors + across - 1) / across * across);
      if (used > most) best = bits, most = used;
      if (most >= 0.875) break;
    }
    const int64_t across = int64_t{1} << best;
    return {vectors, rows, static_cast<unsigned>((vectors + across - 1) / across), best, rows_a_thread};
  }
  unsigned blocks() const {
    const int64_t rows_a_block = static_cast<int64_t>(kSpreadThreads >> across_bits) * rows_a_thread;
    return static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block * parts);
  }
};

// Division of numbers below 2^31 by one of them, as a product: m = ceil(2^(31 + L) / divisor) with 2^L >= divisor is
// too large by less than 2^L / divisor, so that n m is too large by less than 2^(31 + L) / divisor, and the quotient is
// exact.
struct Divisor {
  uint32_t multiplier;
  int shift;

  explicit Divisor(uint32_t divisor) {
    int bits = 0;
    while ((uint64_t{1} << bits) < divisor) ++bits;
    shift = 31 + bits;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  __host__ __device__ uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> shift);
  }
};

namespace device {

// A thread's vector of a row, and its first row; the next ones are `step` apart, as long as `left` has not come to 0.
struct SpreadPlace {
  int64_t vector;
  int64_t row;
  int step;
  int left;  // rows from the first on, or more than a thread has

  __device__ explicit SpreadPlace(const Spread& s) {
    step = kSpreadThreads >> s.across_bits;
    const unsigned block_row = blockIdx.x / s.parts, part = blockIdx.x - block_row * s.parts;
    vector = (static_cast<int64_t>(part) << s.across_bits) + (threadIdx.x & ((1u << s.across_bits) - 1));
    row = static_cast<int64_t>(block_row) * (step * s.rows_a_thread) + (threadIdx.x >> s.across_bits);
    left = static_cast<int>(min(s.rows - row, static_cast<int64_t>(kSpreadThreads) * s.rows_a_thread));
  }
};

}  // namespace device
}  // namespace grouped
