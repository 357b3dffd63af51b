// Largest magnitudes among the elements of weights that a shard has: a tile's into shared memory, those of its blocks
// by atomicMax on the bits, which no order changes. Bound by reading the elements once.
#include <string>

#include "cc/device/quantize/weight_shards.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

__device__ void raise(uint32_t* slot, uint32_t amax) {
  if (amax) atomicMax(slot, amax);
}

__global__ void __launch_bounds__(kShardThreads) measure_shards(const __grid_constant__ ShardProblem p) {
  __shared__ float values[kShardTile * kShardPitch];
  __shared__ uint32_t lines[kShardTile * kShardBlocks];
  const ShardPart part = ShardPart::mine(p);
  if (!part.any()) return;
  part.load(p.source_type, values);
  const ShardSlots& slots = p.slots;
  uint32_t* amax = p.amax + part.member * slots.count;
  uint32_t whole = 0;
  for (int item = threadIdx.x; item < kShardTile * kShardTile; item += kShardThreads) {
    whole = amax_with(whole, values[item / kShardTile * kShardPitch + item % kShardTile]);
  }
  raise_amax(amax, whole);
  if (slots.block == 0) return;
  const int length = block_in_tile(slots), blocks = kShardTile / length;
  for (int cross = 0; cross < (slots.square() ? 1 : 2); ++cross) {
    const int along = cross ? kShardPitch : 1, across = cross ? 1 : kShardPitch;
    for (int item = threadIdx.x; item < kShardTile * blocks; item += kShardThreads) {
      const int line = item % kShardTile, block = item / kShardTile;
      const float* x = values + line * across + block * length * along;
      uint32_t found = 0;
      for (int i = 0; i < length; ++i) found = amax_with(found, x[i * along]);
      if (slots.square()) {
        lines[item] = found;
      } else if (found) {  // so that the block exists
        const int64_t a = part.row + (cross ? block * length : line), b = part.column + (cross ? line : block * length);
        raise(amax + (cross ? slots.cross_at(a, b) : slots.at(a, b)), found);
      }
    }
  }
  if (!slots.square()) return;
  __syncthreads();
  for (int item = threadIdx.x; item < blocks * blocks; item += kShardThreads) {
    const int tall = item / blocks, wide = item % blocks;
    uint32_t found = 0;
    for (int i = 0; i < length; ++i) found = max(found, lines[wide * kShardTile + tall * length + i]);
    if (found) raise(amax + slots.at(part.row + tall * length, part.column + wide * length), found);
  }
}

std::string refuses(const ShardAmax& call, const Target&) { return refuses_shards(call); }

void launch(const ShardAmax& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const size_t bytes = static_cast<size_t>(call.amax.elements()) * sizeof(uint32_t);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(call.amax.as<char>(), 0, bytes, stream));
  const ShardProblem p = ShardProblem::of(call);
  if (call.source.elements() == 0) return;
  measure_shards<<<p.grid(), kShardThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ShardAmax> shard_amax_any_cuda = {"shard_amax_any_cuda", Arch::cuda, Kind::reference, refuses,
                                               no_workspace,          launch};

}  // namespace grouped
