// How much power does it take to bring operands from the L2 cache to shared memory, alone or shared by a cluster?
//
//   nvcc -arch=sm_90a -O3 -std=c++17 -I. benchmarks/multicast_power.cu -o build/multicast_power &&
//   build/multicast_power
//
// 128 CTAs fill four stages of 16 KiB again and again, at a rate that is kept the same; each CTA of a cluster loads its
// share of a stage and multicasts it to all. The first line loads nothing. The power above it, over the bytes that
// arrive in shared memory, is what a byte costs.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "benchmarks/gpu_tools.cuh"
#include "cc/device/common/copy_async.cuh"
#include "cc/device/sm90/ptx.cuh"

using namespace grouped;

namespace {

constexpr int kStageBytes = 16 << 10, kStages = 4, kRingBytes = kStages * kStageBytes, kCtas = 128;
constexpr int kRounds = 20000;             // of filling all stages, in one launch
constexpr int kRoundCycles = 4000;         // that each of them takes at least
constexpr int kLaunches = 40;              // 1.6 s
constexpr size_t kBufferBytes = 24 << 20;  // stays in the L2 cache

__global__ void fill(uint32_t* words, size_t count) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    words[i] = scrambled(uint32_t(i) * 2654435761u);
  }
}

// Copies to the same place of every CTA of the cluster, each of whose barriers counts the bytes.
__device__ void copy(uint32_t to, const char* from, uint32_t bytes, uint32_t barrier, uint32_t ctas) {
  if (ctas == 1) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;\n" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t((1 << ctas) - 1))
        : "memory");
  }
}

__global__ void __launch_bounds__(32) run(const char* buffer, bool loads) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  const uint32_t rank = ptx::cluster_rank(), ctas = ptx::cluster_size(), part = kStageBytes / ctas;
  const uint32_t stages = device::shared_address(ring), full = device::shared_address(barriers);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) ptx::barrier_init(full + 8 * s, 1);
    ptx::barrier_init_fence();
  }
  size_t at = size_t(blockIdx.x / ctas) * kRingBytes;
  for (int round = 0; round < kRounds; ++round) {
    const long long start = clock64();
    if (loads && threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) ptx::barrier_arrive_expect(full + 8 * s, kStageBytes);
    }
    __syncwarp();
    ptx::cluster_barrier();  // every CTA's stages are free, and its barriers wait for bytes
    if (loads) {
      for (int s = 0; s < kStages && threadIdx.x == 0; ++s) {
        const uint32_t offset = s * kStageBytes + rank * part;
        copy(stages + offset, buffer + (at + offset) % kBufferBytes, part, full + 8 * s, ctas);
      }
      for (int s = 0; s < kStages; ++s) ptx::barrier_wait(full + 8 * s, round & 1);
      at += size_t(kCtas / ctas) * kRingBytes;
    }
    while (clock64() - start < kRoundCycles) __nanosleep(20);
  }
  __syncwarp();
  ptx::cluster_barrier();
}

double measure(const char* buffer, unsigned ctas, bool loads, double idle_watts) {
  cudaLaunchConfig_t config{};
  config.gridDim = kCtas;
  config.blockDim = 32;
  config.dynamicSmemBytes = kRingBytes;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(start));
  for (int i = 0; i < kLaunches; ++i) CHECK(cudaLaunchKernelEx(&config, run, buffer, loads));
  CHECK(cudaEventRecord(end));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  const double watts = board_watts();
  CHECK(cudaEventSynchronize(end));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start, end));
  if (!loads) {
    std::printf("no loads                 %4.0f W\n", watts);
  } else {
    const double rate = double(kCtas) * kRingBytes * kRounds * kLaunches / (ms / 1e3);
    std::printf("clusters of %u  %.2f TB/s  %4.0f W  %5.1f pJ per byte in shared memory\n", ctas, rate / 1e12, watts,
                (watts - idle_watts) / rate * 1e12);
  }
  return watts;
}

}  // namespace

int main() {
  char* buffer;
  CHECK(cudaMalloc(&buffer, kBufferBytes));
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(buffer), kBufferBytes / 4);
  CHECK(cudaGetLastError());
  CHECK(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
  const double idle = measure(buffer, 1, false, 0);
  for (const unsigned ctas : {1u, 2u, 4u}) measure(buffer, ctas, true, idle);
}
