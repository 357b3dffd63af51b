// How fast can a chip multiply by mma.sync in long runs, where its power is the limit?
//
//   nvcc -arch=native -O3 -std=c++17 -I. benchmarks/mma_power.cu -o build/mma_power && build/mma_power
//
// Two blocks of four warps per multiprocessor, as grouped_matmul_any_cuda has them; a warp owns 64 x 64 sums and
// multiplies fragments of normal values in bf16. Each line adds one of the things that a product needs: the
// multiplications alone, on fragments that stay in registers; fragments read from shared memory for each step of 16;
// and shared memory filled by `cp.async` from a buffer in the L2 cache. There are no barriers, no address arithmetic
// and no results, so a product takes longer than the last line.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "benchmarks/gpu_tools.cuh"
#include "cc/device/common/mma_sm80.cuh"

using namespace grouped::device;

namespace {

constexpr int kThreads = 128, kStageBytes = 16 << 10, kStages = 3, kShared = kStages * kStageBytes;
constexpr int kSteps = 1 << 16;            // of 16, in one launch
constexpr size_t kBufferBytes = 24 << 20;  // stays in the L2 cache
constexpr double kSeconds = 2;

enum What { kMultiply, kAndFragments, kAndFewerCopies, kAndCopies };
const char* const kNames[] = {"multiplications alone", "and fragments from shared memory",
                              "and copies, for a tile of 256 x 128", "and copies, for a tile of 128 x 128"};

// Normal values in bf16.
__global__ void fill(__nv_bfloat16* values, size_t count) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = uint32_t(i) * 2654435761u;
    float draws[2];
    for (float& draw : draws) {
      h = scrambled(h);
      draw = (h >> 8) * 0x1p-24f + 0x1p-25f;
    }
    values[i] = __float2bfloat16(sqrtf(-2 * logf(draws[0])) * cospif(2 * draws[1]));
  }
}

struct Fragments {
  uint32_t a[4][4], b[4][4];
};

__device__ void load(uint32_t stage, int step, Fragments* f) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {  // 512 bytes in a row: no bank conflicts
    load_matrices<false>(stage + (warp / 2 * 8 + step % 2 * 4 + i) * 512 + lane * 16, f->a[i]);
    load_matrices<false>(stage + kStageBytes / 2 + (warp % 2 * 8 + step % 2 * 4 + i) * 512 + lane * 16, f->b[i]);
  }
}

__device__ void multiply(const Fragments& f, float (&sums)[4][8][4]) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 8; ++j) {
      multiply_add<__nv_bfloat16>(sums[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Fills a stage, or the part of it that is this block's where two of them share a tile, from the next 16 KiB of the
// buffer.
template <What kWhat>
__device__ void copy(uint32_t stage, const char* buffer, size_t at) {
  const char* from = buffer + at % kBufferBytes + threadIdx.x * 16;
  for (int i = 0; i < kStageBytes / 16 / kThreads * (kWhat == kAndFewerCopies ? 3 : 4) / 4; ++i) {
    copy_async<16>(stage + (i * kThreads + threadIdx.x) * 16, from + i * kThreads * 16);
  }
  commit_copies();
}

template <What kWhat>
__global__ void __launch_bounds__(kThreads, 2) run(const char* buffer, float* result, long long* cycles) {
  extern __shared__ __align__(128) char ring[];
  const uint32_t stages = shared_address(ring);
  size_t at = size_t(blockIdx.x) * kStageBytes;
  for (int s = 0; s < kStages; ++s, at += size_t(gridDim.x) * kStageBytes)
    copy<kAndCopies>(stages + s * kStageBytes, buffer, at);
  wait_copies<0>();
  __syncthreads();
  float sums[4][8][4] = {};
  Fragments even, odd;
  load(stages, 0, &even);
  load(stages, 1, &odd);
  const long long start = clock64();
  uint32_t stage = stages;
#pragma unroll 1
  for (int step = 0; step < kSteps; step += 2) {
    multiply(even, sums);
    if (kWhat >= kAndFragments) load(stage, 0, &even);
    if (kWhat >= kAndFewerCopies) {
      wait_copies<kStages - 2>();
      copy<kWhat>(stage == stages ? stages + (kStages - 1) * kStageBytes : stage - kStageBytes, buffer, at);
      at += size_t(gridDim.x) * kStageBytes;
    }
    multiply(odd, sums);
    if (kWhat >= kAndFragments) load(stage, 1, &odd);
    stage = stage == stages + (kStages - 1) * kStageBytes ? stages : stage + kStageBytes;
  }
  wait_copies<0>();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  float sum = 0;
  for (auto& slab : sums) {
    for (auto& block : slab) sum += block[0] + block[1] + block[2] + block[3];
  }
  result[blockIdx.x * kThreads + threadIdx.x] = sum;  // keeps the products
}

template <What kWhat>
void measure(const char* buffer, float* result, long long* cycles, int blocks) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  const auto launch = [&] { run<kWhat><<<blocks, kThreads, kShared>>>(buffer, result, cycles); };
  launch();
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaEventRecord(start));
  for (int i = 0; i < 8; ++i) launch();
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start, end));
  const int turns = int(kSeconds * 1e3 / (ms / 8));
  CHECK(cudaEventRecord(start));
  for (int i = 0; i < turns; ++i) launch();
  CHECK(cudaEventRecord(end));
  std::this_thread::sleep_for(std::chrono::duration<double>(kSeconds / 2));
  const double watts = board_watts();
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaEventElapsedTime(&ms, start, end));
  // One block of a multiprocessor goes before the other: the last to end has all of the time.
  std::vector<long long> all(blocks);
  CHECK(cudaMemcpy(all.data(), cycles, sizeof(long long) * blocks, cudaMemcpyDeviceToHost));
  const long long taken = *std::max_element(all.begin(), all.end());
  const double seconds = ms / 1e3 / turns, products = double(blocks) * (kThreads / 32) * kSteps * 32;
  std::printf("%-36s %5.0f TFLOP/s  %5.0f MHz  %4.0f W  %5.2f cycles per mma and scheduler\n", kNames[kWhat],
              products * 4096 / seconds / 1e12, taken / seconds / 1e6, watts, double(taken) / (2.0 * kSteps * 32));
}

}  // namespace

int main() {
  cudaDeviceProp chip;
  CHECK(cudaGetDeviceProperties(&chip, 0));
  const int blocks = 2 * chip.multiProcessorCount;
  char* buffer;
  float* result;
  long long* cycles;
  CHECK(cudaMalloc(&buffer, kBufferBytes));
  CHECK(cudaMalloc(&result, sizeof(float) * blocks * kThreads));
  CHECK(cudaMalloc(&cycles, sizeof(long long) * blocks));
  fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(buffer), kBufferBytes / 2);
  CHECK(cudaGetLastError());
  measure<kMultiply>(buffer, result, cycles, blocks);
  measure<kAndFragments>(buffer, result, cycles, blocks);
  measure<kAndFewerCopies>(buffer, result, cycles, blocks);
  measure<kAndCopies>(buffer, result, cycles, blocks);
}
