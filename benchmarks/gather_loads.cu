// How long does it take to bring gathered rows into the swizzled shared memory that wgmma reads, and nothing else?
//
//   nvcc -arch=sm_90a -O3 -std=c++17 -I. benchmarks/gather_loads.cu -o build/gather_loads && build/gather_loads
//
// Pairs of CTAs with five stages load blocks of 128 rows x 64 columns of 16 bits, of 8192 tokens at random; a warpgroup
// waits for each block and releases it. With weights, each stage also takes 192 columns of them, half loaded by either
// CTA and multicast, as the products do. Cycles are a mean over all CTAs, per stage.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "benchmarks/gpu_tools.cuh"
#include "cc/device/sm90/ptx.cuh"

using namespace grouped;

namespace {

constexpr int kStages = 5, kRows = 128, kRowBytes = kRows * 128, kStageBytes = kRowBytes + 192 * 128;
constexpr int kShared = kStages * kStageBytes + 1024, kTokens = 8192, kCtas = 132, kTiles = 8 * kCtas;

enum How { kBoxes, kRowCopies, kRowCopiesMulticast, kOneWarp, kFourWarps };
const char* const kNames[] = {"boxes of 64 neighbouring rows", "a tensor copy per row", "the same, multicast",
                              "cp.async, one warp", "cp.async, four warps"};

struct Params {
  CUtensorMap row, box, weights;
  const int* index;  // [kTiles * kRows]
  const char* x;     // [kTokens, width] of 16 bits
  int width, how;
  bool with_weights;
  long long* cycles;         // [kCtas]
  unsigned long long* sums;  // of what arrived, weighted by place; null: not read
};

__device__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}

__device__ void load_rows(const Params& p, int tile, int k, const int (&token)[4], uint32_t rank, uint32_t stage,
                          uint32_t full) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto copy_four_rows = [&](int first, int of_lane) {  // 8 lanes per row
    const int row = first + lane / 8, chunk = lane % 8;
    const int from = __shfl_sync(~0u, of_lane, row % 32);
    copy_16(stage + 128 * row + 16 * (chunk ^ (row & 7)), p.x + (size_t(from) * p.width + k) * 2 + 16 * chunk);
  };
  if (p.how == kBoxes) {
    for (int half = 0; half < 2 && lane == 0; ++half) {
      ptx::tensor_load(stage + 64 * 128 * half, &p.box, {{k, (tile * kRows + 64 * half) % kTokens, 0, 0}}, full);
    }
  } else if (p.how == kRowCopies) {
    for (int i = 0; i < 4; ++i) ptx::tensor_load(stage + 128 * (lane + 32 * i), &p.row, {{k, token[i], 0, 0}}, full);
  } else if (p.how == kRowCopiesMulticast) {
    for (uint32_t i = 2 * rank; i < 2 * rank + 2; ++i) {
      ptx::tensor_load_multicast(stage + 128 * (lane + 32 * i), &p.row, {{k, token[i], 0, 0}}, full, 3);
    }
  } else {
    const int rows = p.how == kOneWarp ? kRows : kRows / 4, start = p.how == kOneWarp ? 0 : rows * warp;
    for (int i = 0; i < rows; i += 4) copy_four_rows(start + i, token[(start + i) / 32]);
    ptx::barrier_arrive_copies(full);
  }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1) load_all(const __grid_constant__ Params p) {
  extern __shared__ uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u, bars = shared_address(barriers);
  const uint32_t rank = ptx::cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool copies = p.how == kOneWarp || p.how == kFourWarps;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(bars + 8 * s, 1 + (p.how == kOneWarp ? 32 : p.how == kFourWarps ? 128 : 0));
      ptx::barrier_init(bars + 8 * (kStages + s), 2 * 4);
    }
    ptx::barrier_init_fence();
  }
  __syncwarp();
  ptx::cluster_barrier();
  const long long begin = clock64();
  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++slot == kStages) slot = 0, parity ^= 1;
  };
  unsigned long long sum = 0;
  for (int tile = blockIdx.x; tile < kTiles; tile += kCtas) {
    const int shared_tile = p.how == kRowCopiesMulticast ? tile / 2 : tile;  // of the pair
    int token[4];
    for (int i = 0; i < 4; ++i) token[i] = p.index[shared_tile * kRows + lane + 32 * i];
    for (int k = 0; k < p.width; k += 64, advance()) {
      const uint32_t full = bars + 8 * slot, empty = bars + 8 * (kStages + slot), stage = base + slot * kStageBytes;
      if (warp >= 4) {
        ptx::barrier_wait(full, parity);
        for (int i = 0; i < 16 && p.sums != nullptr; ++i) {
          const int word = 16 * (threadIdx.x - 128) + i;
          sum += ptx::load_shared(stage + 8 * word) * (word + 1ull);
        }
        __syncwarp();
        if (lane < 2) ptx::barrier_arrive_peer(empty, lane);
      } else if (warp == 0 || p.how == kFourWarps) {
        ptx::barrier_wait(empty, parity ^ 1);
        if (threadIdx.x == 0) {
          ptx::barrier_arrive_expect(full, (copies ? 0 : kRowBytes) + (p.with_weights ? 192 * 128 : 0));
        }
        __syncwarp();
        load_rows(p, shared_tile, k, token, rank, stage, full);
        for (int i = 0; i < 3 && p.with_weights && threadIdx.x == 0; ++i) {
          const int column = 64 * i + 32 * int(rank);
          ptx::tensor_load_multicast(stage + kRowBytes + 128 * column, &p.weights, {{k, column + tile % 8 * 192, 0, 0}},
                                     full, 3);
        }
      }
    }
  }
  if (p.sums != nullptr && warp >= 4) atomicAdd(p.sums, sum);
  __syncthreads();
  if (threadIdx.x == 0) p.cycles[blockIdx.x] = clock64() - begin;
  ptx::cluster_barrier();
}

CUtensorMap map_of(decltype(&cuTensorMapEncodeTiled) encode, void* x, int width, int rows) {
  CUtensorMap map;
  const cuuint64_t pitch = cuuint64_t(width) * 2, dims[4] = {cuuint64_t(width), kTokens, 1, 1};
  const cuuint64_t pitches[3] = {pitch, pitch, pitch};
  const cuuint32_t box[4] = {64, cuuint32_t(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x, dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::printf("map: %d\n", int(result)), std::exit(1);
  return map;
}

}  // namespace

int main() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult query;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &query));
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  CHECK(cudaFuncSetAttribute(load_all, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  long long* cycles;
  unsigned long long* sums;
  int* index;
  CHECK(cudaMallocManaged(&cycles, kCtas * sizeof *cycles));
  CHECK(cudaMallocManaged(&sums, sizeof *sums));
  CHECK(cudaMallocManaged(&index, kTiles * kRows * sizeof *index));
  for (int i = 0; i < kTiles * kRows; ++i) index[i] = std::rand() % kTokens;
  for (const int width : {2048, 4096, 7168}) {
    std::vector<uint16_t> values(size_t(kTokens) * width);
    for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i * 2654435761u >> 13);
    char* x;
    CHECK(cudaMalloc(&x, 2 * values.size()));
    CHECK(cudaMemcpy(x, values.data(), 2 * values.size(), cudaMemcpyHostToDevice));
    Params p{map_of(encode, x, width, 1),
             map_of(encode, x, width, 64),
             map_of(encode, x, width, 32),
             index,
             x,
             width,
             0,
             false,
             cycles,
             nullptr};
    const auto run = [&] {
      load_all<<<kCtas, 256, kShared>>>(p);
      CHECK(cudaGetLastError());
      CHECK(cudaDeviceSynchronize());
    };
    // The three that gather the same rows bring the same bytes to the same places.
    unsigned long long found[3];
    p.sums = sums;
    for (int i = 0; i < 3; ++i) {
      p.how = i == 0 ? kRowCopies : i == 1 ? kOneWarp : kFourWarps;
      *sums = 0;
      run();
      found[i] = *sums;
    }
    p.sums = nullptr;
    if (found[0] != found[1] || found[0] != found[2]) std::printf("rows differ\n"), std::exit(1);
    for (p.how = kBoxes; p.how <= kFourWarps; ++p.how) {
      for (const bool with_weights : {false, true}) {
        p.with_weights = with_weights;
        for (int i = 0; i < 3; ++i) run();
        double mean = 0;
        for (int i = 0; i < kCtas; ++i) mean += double(cycles[i]) / kCtas;
        std::printf("H %d, %s%s: %.0f cycles\n", width, kNames[p.how], with_weights ? ", weights" : "",
                    mean / (double(kTiles) / kCtas * width / 64));
      }
    }
    CHECK(cudaFree(x));
  }
}
