// Codes of the elements of weights that a shard has, and all scales, given the magnitudes of all ranks.
//
//   scales   a thread each, of whole weights
//   codes    tiles as values in shared memory, a factor for each of their blocks; both forms from one read
#include <algorithm>
#include <string>

#include "cc/device/quantize/weight_shards.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kQuads = kShardTile / 4;

struct Form {
  uint8_t* values;  // null: not wanted
  void* scales;
  float* group_scales;
  ScalePlace place;
  int64_t lines;  // of one member
  int64_t pitch;  // bytes from one line of codes to the next
};

struct Problem {
  ShardProblem shards;
  Form forms[2];
  StoreRule rule;
  const float* scale;
  const int32_t* skip;
  bool wide_scales;
};

__device__ GroupScale group_scale_of(const Problem& p, int64_t member) {
  const uint32_t amax = p.shards.amax[member * p.shards.slots.count];
  if (p.scale) return delayed_group_scale(p.rule, p.scale[member], amax);
  return group_scale(p.rule, p.shards.slots.block == 0, amax);
}

template <class T>
__global__ void __launch_bounds__(kShardThreads) put_scales(const __grid_constant__ Problem p) {
  if (p.skip && *p.skip != 0) return;
  const ShardSlots& slots = p.shards.slots;
  const int64_t all = p.shards.groups * slots.count, step = int64_t{gridDim.x} * kShardThreads;
  for (int64_t item = int64_t{blockIdx.x} * kShardThreads + threadIdx.x; item < all; item += step) {
    const int64_t member = item / slots.count, along = slots.tall * slots.wide;
    if (p.shards.table[p.shards.groups + member] < 0) continue;
    const GroupScale group = group_scale_of(p, member);
    int64_t slot = item % slots.count;
    if (slot-- == 0) {
      for (const Form& form : p.forms) {
        if (form.group_scales) form.group_scales[member] = group.scale_inv;
      }
      continue;
    }
    const uint32_t stored = block_scale<T>(p.rule, p.shards.amax[item], group).scale_inv;
    const bool first = slot < along;
    const int64_t a = first ? slot / slots.wide : (slot - along) % slots.cross_tall;
    const int64_t b = first ? slot % slots.wide : (slot - along) / slots.cross_tall;
    for (int cross = 0; cross < 2; ++cross) {
      const Form& form = p.forms[cross];
      if (form.values && (slots.square() || first == !cross)) {
        put_scale(form.scales, p.wide_scales, form.place.at(member, a, b), stored);
      }
    }
  }
}

// The codes of a word that the shard has, to `to`; bit i of `here` says whether code i does. Codes of four bits share
// bytes, and the other half of one may be another rank's.
template <class T>
__device__ void put_codes(uint8_t* to, uint32_t word, uint32_t here) {
  if constexpr (T::kBits == 8) {
    if (here == 15 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to) = word;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (here >> i & 1) to[i] = static_cast<uint8_t>(word >> 8 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t halves = here >> 2 * i & 3, mask = (halves & 1 ? 0x0Fu : 0u) | (halves & 2 ? 0xF0u : 0u);
      if (!mask) continue;
      const uint32_t kept = mask == 0xFF ? 0u : to[i] & ~mask;
      to[i] = static_cast<uint8_t>(kept | (word >> 8 * i & mask));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kShardThreads) put_shards(const __grid_constant__ Problem p) {
  __shared__ float values[kShardTile * kShardPitch];
  __shared__ float factors[kShardTile * kShardBlocks];
  if (p.skip && *p.skip != 0) return;
  const ShardPart part = ShardPart::mine(p.shards);
  if (!part.any()) return;
  const ShardSlots& slots = p.shards.slots;
  const GroupScale group = group_scale_of(p, part.member);
  const uint32_t* amax = p.shards.amax + part.member * slots.count;
  const int length = block_in_tile(slots), blocks = slots.block ? kShardTile / length : 0;
  part.load(p.shards.source_type, values);
  for (int cross = 0; cross < 2; ++cross) {
    const Form& form = p.forms[cross];
    if (!form.values) continue;
    for (int item = threadIdx.x; item < kShardTile * blocks; item += kShardThreads) {
      const int line = item % kShardTile, depth = item / kShardTile * length;
      const int64_t a = part.row + (cross ? depth : line), b = part.column + (cross ? line : depth);
      if (a >= part.rows || b >= part.width) continue;
      factors[item] = block_scale<T>(p.rule, amax[cross ? slots.cross_at(a, b) : slots.at(a, b)], group).scale;
    }
    __syncthreads();
    const int along = cross ? kShardPitch : 1, across = cross ? 1 : kShardPitch;
    const int64_t first_line = part.member * form.lines + (cross ? part.column : part.row);
    for (int item = threadIdx.x; item < kShardTile * kQuads; item += kShardThreads) {
      const int line = item / kQuads, first = item % kQuads * 4;
      const float factor = blocks ? factors[first / length * kShardTile + line] : group.scale;
      uint32_t word = 0, here = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!part.has(cross ? first + i : line, cross ? line : first + i)) continue;
        const float x = values[line * across + (first + i) * along];
        word |= static_cast<uint32_t>(encode<T>(fl_mul(x, factor))) << (i * T::kBits);
        here |= 1u << i;
      }
      const int64_t depth = (cross ? part.row : part.column) + first;
      const int64_t last = (cross ? part.rows : part.width) - 1 - depth;
      // Behind an odd end the other half of the byte is zero.
      if (T::kBits == 4 && last % 2 == 0 && last >= 0 && last < 4 && (here >> last & 1)) here |= 2u << last;
      if (here) put_codes<T>(form.values + (first_line + line) * form.pitch + depth * T::kBits / 8, word, here);
    }
    __syncthreads();
  }
}

template <class T>
void store(const Problem& p, cudaStream_t stream) {
  const int64_t all = p.shards.groups * p.shards.slots.count, most = int64_t{8} * multiprocessors();
  const int64_t blocks = std::min(divide_up(all, kShardThreads), most);
  put_scales<T><<<static_cast<unsigned>(blocks), kShardThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  put_shards<T><<<p.shards.grid(), kShardThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

std::string refuses(const ShardCast& call, const Target&) { return refuses_shards(call); }

void launch(const ShardCast& call, const Context& context) {
  if (call.source.elements() == 0) return;
  const int64_t a = call.source.dims[1], b = call.source.dims[2], outer = call.block_outer;
  const int64_t block = std::max<int64_t>(call.block, 1);
  const DType type = (call.values.present() ? call.values : call.cross_values).dtype;
  const auto form = [&](const TensorView& values, const TensorView& scales, const TensorView& group_scales,
                        bool cross) {
    const ScalePlace place =
        ScalePlace::of(scales, false, cross, divide_up(a, cross ? block : outer), divide_up(b, cross ? outer : block));
    return Form{
        data_of<uint8_t>(values),      data_of<uint8_t>(scales), data_of<float>(group_scales), place, cross ? b : a,
        row_bytes(type, cross ? a : b)};
  };
  const Problem p = {
      ShardProblem::of(call),
      {form(call.values, call.scales, call.group_scales, false),
       form(call.cross_values, call.cross_scales, call.cross_group_scales, true)},
      store_rule(whole_of(call), largest_value(type), call.source.dtype == DType::bf16),
      data_of<const float>(call.scale),
      data_of<const int32_t>(call.skip),
      (call.scales.present() ? call.scales : call.cross_scales).dtype == DType::f32,
  };
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  if (type == DType::e5m2) return store<E5M2>(p, stream);
  if (type == DType::e4m3fn) return store<E4M3>(p, stream);
  store<E2M1>(p, stream);
}

}  // namespace

const Kernel<ShardCast> shard_cast_any_cuda = {"shard_cast_any_cuda", Arch::cuda, Kind::reference, refuses,
                                               no_workspace,          launch};

}  // namespace grouped
