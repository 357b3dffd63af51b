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

namespace device {

// A thread's vector of a row, and its first row; the next ones are `step` apart.
struct SpreadPlace {
  int64_t vector;
  int64_t row;
  int step;

  __device__ explicit SpreadPlace(const Spread& s) {
    step = kSpreadThreads >> s.across_bits;
    const unsigned block_row = blockIdx.x / s.parts, part = blockIdx.x - block_row * s.parts;
    vector = (static_cast<int64_t>(part) << s.across_bits) + (threadIdx.x & ((1u << s.across_bits) - 1));
    row = static_cast<int64_t>(block_row) * (step * s.rows_a_thread) + (threadIdx.x >> s.across_bits);
  }
};

}  // namespace device
}  // namespace grouped
