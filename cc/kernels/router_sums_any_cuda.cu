// Sums over the tokens of sequences, of which a router's losses are made, in the order that cc/math/routing.h gives.
//
//   sum_runs       a warp a run of 8 tokens, the next token's logits on their way; a block has 8 runs
//     logits --lane i: experts i, i + 32, ...--> max, exp, sum over the warp --> probs --> logsumexp, entropy
//                                                                                |
//                     added in registers, stored where a sequence or the run ends --> workspace, row w + s
//     experts --> counters in shared memory, of the sequence of the block's first token; others count in the result
//   add_partials   32 columns of up to 32 sequences a block of 32 warps
//     at most 32 runs   a warp a sequence: a register a run, then the tree
//     more              the block together, one sequence after the other: warp j is lane j of `lane_sum`, and after a
//                       transpose in shared memory warp c adds the tree of column c
//
// The counts are cleared first; on Hopper the second launch begins beside the first one. Of more than 32 sequences a
// scan of their sizes comes before both.
//
// Nothing is spilled. sum_runs, 4 bytes of shared memory per expert and a few more:
//   experts up to           32   64  128  256  512  1024
//   registers (sm_90)       38   44   54   79  128   224
//   warps a multiprocessor  48   40   32   24   16     8
// add_partials: 55 registers, 4.6 KiB, one block of 1024 threads a multiprocessor.
// Predicted for T = 8192, E = 128, S = 1 on an H200: 128 blocks of 8 warps; sum_runs 4 us, 8 times some 650 cycles of
// shuffles, exponentials and quotients that wait for one another; add_partials 2 us, two rounds of 16 loads a thread
// and the tree; with the clear and what launches cost some 8 us.
#include <algorithm>
#include <string>

#include "cc/device/experts.cuh"
#include "cc/device/operand.h"
#include "cc/device/sequences.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kRunsABlock = 8;
constexpr int kRunThreads = 32 * kRunsABlock;
constexpr int kMostPerBlock = 32;  // sequences of one block of add_partials
constexpr int kAddThreads = 1024;
constexpr int64_t kWantedBlocks = 1024;

struct Problem {
  const float* logits;
  const int32_t* experts;
  const uint8_t* mask;  // null: absent
  float* prob_sums;
  int32_t* counts;
  float* stat_sums;
  float* partials;  // rows of `stride` floats: probabilities, then stats
  Sequences sequences;
  Score score;
  int64_t tokens;
  int count, slots;       // E, k
  int stride, columns;    // of partial sums; E + kTokenStats of them are used
  int column_blocks;      // blocks of 32 columns
  int sequences_a_block;  // of add_partials
};

// Hopper lets the second launch begin beside the first: it waits where it wants the partial sums.
__device__ void let_sums_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ void wait_for_partials() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sums over tokens, in the registers of a warp; `stats` in every lane.
template <int kPer>
struct Added {
  float probs[kPer];
  float stats[kTokenStats];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPer; ++i) probs[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kTokenStats; ++i) stats[i] = 0.0f;
  }

  // `values` holds the token's logits, and is free afterwards.
  __device__ void add(Score score, int count, float (&values)[kPer]) {
    const Softmax softmax = score_experts(score, values, count, true, values);
    if (score != Score::softmax) {  // whose scores are divided already
      const float divisor = divisor_of(score, values, count);
#pragma unroll
      for (int i = 0; i < kPer; ++i) values[i] = fl_div(values[i], divisor);
    }
    const float sum = sum_experts<kPer>(count, [&](int i) {
      const float term = fl_mul(values[i], logf(values[i]));
      return values[i] > 0.0f ? term : values[i];
    });
    const float log_sum = softmax.log_sum();
#pragma unroll
    for (int i = 0; i < kPer; ++i) probs[i] = fl_add(probs[i], values[i]);
    stats[0] = fl_add(stats[0], fl_mul(log_sum, log_sum));
    stats[1] = fl_add(stats[1], -sum);
    stats[2] = fl_add(stats[2], 1.0f);
  }

  __device__ void store(int count, float* row) const {
    for_experts<kPer>(count, [&](int i, int expert) { row[expert] = probs[i]; });
    const int lane = lane_id();
    if (lane < kTokenStats) row[count + lane] = lane == 0 ? stats[0] : lane == 1 ? stats[1] : stats[2];
  }
};

constexpr int run_blocks(int per_lane) { return per_lane <= 4 ? 4 : per_lane <= 8 ? 3 : per_lane <= 16 ? 2 : 1; }

template <int kPer>
__global__ void __launch_bounds__(kRunThreads, run_blocks(kPer)) sum_runs(const __grid_constant__ Problem p) {
  __shared__ int own_counts[32 * kPer];
  __shared__ int own_sequence;
  let_sums_begin();
  const int lane = lane_id();
  const int64_t run = static_cast<int64_t>(blockIdx.x) * kRunsABlock + static_cast<int>(threadIdx.x / 32);
  const int64_t first = run * kTokensARun;
  const int64_t all = tokens_of_all(p.sequences, p.tokens);
  const int tokens = static_cast<int>(max(min(all - first, static_cast<int64_t>(kTokensARun)), int64_t{0}));
  const bool counts = lane < tokens && (!p.mask || p.mask[first + lane] != 0);
  const unsigned counting = __ballot_sync(~0u, counts);  // bit i: token first + i
  float next[kPer];
  if (counting & 1u) load_experts(p.logits + first * p.count, p.count, next);
  int sequence = tokens > 0 ? sequence_of(p.sequences, first) : -1;
  for (int e = threadIdx.x; e < p.count; e += kRunThreads) own_counts[e] = 0;
  if (threadIdx.x == 0) own_sequence = sequence;
  __syncthreads();
  const int own = own_sequence;

  if (tokens > 0) {
    int64_t end = tokens_of(p.sequences, sequence, p.tokens).end;
    Added<kPer> added;
    added.clear();
    for (int i = 0; i < tokens; ++i) {
      const int64_t token = first + i;
      if (token >= end) {
        added.store(p.count, p.partials + (run + sequence) * p.stride);
        added.clear();
        sequence = sequence_of(p.sequences, token);
        end = tokens_of(p.sequences, sequence, p.tokens).end;
      }
      float values[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) values[j] = next[j];
      if (counting >> (i + 1) & 1u) load_experts(p.logits + (token + 1) * p.count, p.count, next);
      if (!(counting >> i & 1u)) continue;
      const int expert = lane < p.slots ? p.experts[token * p.slots + lane] : -1;
      added.add(p.score, p.count, values);
      if (expert >= 0 && expert < p.count) {
        int* to = sequence == own ? own_counts : p.counts + static_cast<int64_t>(sequence) * p.count;
        atomicAdd(to + expert, 1);
      }
    }
    added.store(p.count, p.partials + (run + sequence) * p.stride);
  }

  __syncthreads();
  for (int e = threadIdx.x; e < p.count; e += kRunThreads) {
    if (own_counts[e] > 0) atomicAdd(p.counts + static_cast<int64_t>(own) * p.count + e, own_counts[e]);
  }
}

// ---- Sums of partial sums

__device__ void write_sum(const Problem& p, int sequence, int column, float sum) {
  if (column < p.count) {
    p.prob_sums[static_cast<int64_t>(sequence) * p.count + column] = sum;
  } else if (column < p.columns) {
    p.stat_sums[static_cast<int64_t>(sequence) * kTokenStats + column - p.count] = sum;
  }
}

struct PartialRows {
  int64_t first;
  int count;
};

__global__ void __launch_bounds__(kAddThreads) add_partials(const __grid_constant__ Problem p) {
  __shared__ float lanes[kLaneCount][33];
  __shared__ PartialRows of_sequence[kMostPerBlock];
  const int lane = lane_id(), warp = static_cast<int>(threadIdx.x / 32);
  const int block = static_cast<int>(blockIdx.x);
  const int first_column = block % p.column_blocks * 32, column = first_column + lane;
  const int first = block / p.column_blocks * p.sequences_a_block;
  const int sequences = min(p.sequences_a_block, p.sequences.count - first);
  PartialRows rows = {0, 0};
  if (warp < sequences) {
    const TokenSpan span = tokens_of(p.sequences, first + warp, p.tokens);
    if (span.begin < span.end) {
      const int64_t run = span.begin / kTokensARun;
      rows = {run + first + warp, static_cast<int>((span.end - 1) / kTokensARun - run) + 1};
    }
    if (lane == 0) of_sequence[warp] = rows;
  }
  __syncthreads();
  wait_for_partials();
  const float* partials = p.partials + column;
  if (warp < sequences && rows.count <= kLaneCount) {
    float each[kLaneCount];
#pragma unroll
    for (int i = 0; i < kLaneCount; ++i) {
      const bool there = i < rows.count && column < p.columns;
      each[i] = there ? partials[(rows.first + i) * p.stride] : 0.0f;
    }
#pragma unroll
    for (int half = kLaneCount / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < kLaneCount / 2; ++i) {  // a constant bound, so that the array stays in registers
        if (i < half) each[i] = fl_add(each[i], each[i + half]);
      }
    }
    write_sum(p, first + warp, column, each[0]);
  }
  for (int s = 0; s < sequences; ++s) {
    const PartialRows shared = of_sequence[s];
    if (shared.count <= kLaneCount) continue;
    float sum = 0.0f;
    if (column < p.columns) {
#pragma unroll 16
      for (int i = warp; i < shared.count; i += kLaneCount) {
        sum = fl_add(sum, partials[(shared.first + i) * p.stride]);
      }
    }
    lanes[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(lanes[lane][warp]);
    if (lane == 0) write_sum(p, first + s, first_column + warp, sum);
    __syncthreads();
  }
}

// ---- The call

// Rows of whole sectors.
int64_t stride_of(const RouterSums& call) { return (call.logits.dims[1] + kTokenStats + 7) / 8 * 8; }

size_t partial_bytes(const RouterSums& call) {
  const int64_t rows = token_runs(call.logits.dims[0]) + call.sequence_sizes.dims[0];
  return align_up(sizeof(float) * static_cast<size_t>(rows * stride_of(call)));
}

std::string refuses(const RouterSums&, const Target& target) { return refuses_unless_cuda(target); }

size_t workspace(const RouterSums& call, const Target&) {
  return partial_bytes(call) + Sequences::bytes(call.sequence_sizes.dims[0]);
}

void launch(const RouterSums& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t tokens = call.logits.dims[0], sequences = call.sequence_sizes.dims[0];
  const int64_t columns = call.logits.dims[1] + kTokenStats, column_blocks = (columns + 31) / 32;
  const int64_t wanted = (sequences * column_blocks + kWantedBlocks - 1) / kWantedBlocks;
  const int64_t per_block = std::min<int64_t>(wanted, kMostPerBlock);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(call.counts.data, 0, static_cast<size_t>(call.counts.bytes()), stream));
  const Problem p = {call.logits.as<const float>(),
                     call.experts.as<const int32_t>(),
                     data_or_null<const uint8_t>(call.mask),
                     call.prob_sums.as<float>(),
                     call.counts.as<int32_t>(),
                     call.stat_sums.as<float>(),
                     static_cast<float*>(context.workspace),
                     Sequences::prepare(call.sequence_sizes.as<const int32_t>(), sequences, tokens,
                                        static_cast<char*>(context.workspace) + partial_bytes(call), stream),
                     score_named(call.score),
                     tokens,
                     static_cast<int>(call.logits.dims[1]),
                     static_cast<int>(call.experts.dims[1]),
                     static_cast<int>(stride_of(call)),
                     static_cast<int>(columns),
                     static_cast<int>(column_blocks),
                     static_cast<int>(per_block)};
  if (tokens > 0) {
    const int64_t blocks = (token_runs(tokens) + kRunsABlock - 1) / kRunsABlock;
    with_experts_per_lane(p.count, [&](auto per_lane) {
      sum_runs<decltype(per_lane)::value><<<static_cast<unsigned>(blocks), kRunThreads, 0, stream>>>(p);
    });
    GROUPED_CUDA_CHECK(cudaGetLastError());
  }
  const unsigned blocks = static_cast<unsigned>((sequences + per_block - 1) / per_block * column_blocks);
  if (tokens > 0 && context.target.sm >= 90) {
    launch_early(add_partials, blocks, kAddThreads, 0, stream, p);
    return;
  }
  add_partials<<<blocks, kAddThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<RouterSums> router_sums_any_cuda = {"router_sums_any_cuda", refuses, workspace, launch};

}  // namespace grouped
