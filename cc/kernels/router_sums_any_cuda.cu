// Sums over the tokens of sequences, of which a router's losses are made, in the order that cc/math/routing.h gives.
//
//   sum_runs       a block per run of 8 tokens, a warp per token
//     logits --lane i: experts i, i + 32, ...--> max, exp, sum over the warp --> probs, logsumexp, entropy
//                                                                                |
//                                                 [8 tokens, E + 3] in shared memory
//                                                                                |
//                     a thread per column adds the tokens in order, and stores where a sequence or the run ends
//                                                                                --> workspace, row w + s
//     further blocks, 256 tokens each: experts --> counters in shared memory, of the sequence of the first token;
//                                      slots of others count in the result
//   add_partials   32 columns of up to 32 sequences per block of 32 warps
//     at most 32 runs   a warp per sequence: a register per run, then the tree
//     more              the block together, one sequence after the other: warp j is lane j of `lane_sum`, and after a
//                       transpose in shared memory warp c adds the tree of column c
//
// The counts are cleared first; on Hopper the second launch begins beside the first one. Of more than 32 sequences a
// scan of their sizes comes before both.
//
// Nothing is spilled. sum_runs, 32 bytes of shared memory per expert and a few more:
//   experts up to             32   64  128  256  512  1024
//   registers (sm_90)         28   28   38   56   80   162
//   warps per multiprocessor  64   64   48   32   24     8
// add_partials: 54 registers, 4.6 KiB, one block of 1024 threads per multiprocessor.
// T = 8192, E = 128, S = 1 on an H200: 8.1 and 4.3 us. A warp per run, with its tokens one after the other, took 13.1.
#include <algorithm>
#include <string>

#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/refusals.h"
#include "cc/device/common/token_sequences.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kRunThreads = 32 * kTokensARun;
constexpr int kCountedTokens = kRunThreads;  // of a block that counts slots
constexpr int kMostPerBlock = 32;            // sequences of one block of add_partials
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
  unsigned runs;
  int count, slots;       // E, k
  int stride, columns;    // of partial sums; E + kTokenStats of them are used
  int column_blocks;      // blocks of 32 columns
  int sequences_a_block;  // of add_partials
};

// What a token gives to the columns: probabilities, then stats. `values` holds its logits, and is free afterwards.
template <int kPer>
__device__ void store_token(Score score, int count, float (&values)[kPer], float* columns) {
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
  for_experts<kPer>(count, [&](int i, int expert) { columns[expert] = values[i]; });
  const int lane = lane_id();
  if (lane < kTokenStats) columns[count + lane] = lane == 0 ? fl_mul(log_sum, log_sum) : lane == 1 ? -sum : 1.0f;
}

__device__ bool counts(const Problem& p, int64_t token) { return !p.mask || p.mask[token] != 0; }

// Counts the slots of the tokens from `first` on, one per thread.
__device__ void count_slots(const Problem& p, int64_t first, int* own_counts) {
  const int64_t all = tokens_of_all(p.sequences, p.tokens), token = first + threadIdx.x;
  const int own = sequence_of(p.sequences, first), sequence = sequence_of_lane(p.sequences, token);
  for (int e = threadIdx.x; e < p.count; e += kRunThreads) own_counts[e] = 0;
  __syncthreads();
  if (token < all && counts(p, token)) {
    int* to = sequence == own ? own_counts : p.counts + static_cast<int64_t>(sequence) * p.count;
    const int32_t* experts = p.experts + token * p.slots;
    for (int j = 0; j < p.slots; ++j) {
      const int expert = experts[j];
      if (expert >= 0 && expert < p.count) atomicAdd(to + expert, 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.count; e += kRunThreads) {
    if (own_counts[e] > 0) atomicAdd(p.counts + static_cast<int64_t>(own) * p.count + e, own_counts[e]);
  }
}

constexpr int run_blocks(int per_lane) {
  return per_lane <= 1 ? 8 : per_lane <= 4 ? 6 : per_lane <= 8 ? 4 : per_lane <= 16 ? 2 : 1;
}

template <int kPer>
__global__ void __launch_bounds__(kRunThreads, run_blocks(kPer)) sum_runs(const __grid_constant__ Problem p) {
  __shared__ float columns[kTokensARun][32 * kPer + kTokenStats];
  __shared__ int sequences[kTokensARun];  // -1 behind the last token
  __shared__ bool counted[kTokensARun];
  let_next_launch_begin();
  if (blockIdx.x >= p.runs) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - p.runs) * kCountedTokens;
    return count_slots(p, first, reinterpret_cast<int*>(columns));
  }
  const int64_t run = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int64_t token = run * kTokensARun + warp;
  const bool inside = token < tokens_of_all(p.sequences, p.tokens), taken = inside && counts(p, token);
  const int sequence = sequence_of(p.sequences, token);
  if (taken) {
    float values[kPer];
    load_experts(p.logits + token * p.count, p.count, values);
    store_token(p.score, p.count, values, columns[warp]);
  }
  if (lane_id() == 0) {
    sequences[warp] = inside ? sequence : -1;
    counted[warp] = taken;
  }
  __syncthreads();
  if (sequences[0] < 0) return;
  for (int column = threadIdx.x; column < p.columns; column += kRunThreads) {
    int own = sequences[0];
    float sum = 0.0f;
    for (int i = 0; i < kTokensARun && sequences[i] >= 0; ++i) {
      if (sequences[i] != own) {
        p.partials[(run + own) * p.stride + column] = sum;
        own = sequences[i];
        sum = 0.0f;
      }
      if (counted[i]) sum = fl_add(sum, columns[i][column]);
    }
    p.partials[(run + own) * p.stride + column] = sum;
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
  wait_for_launch_before();
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
                     static_cast<unsigned>(token_runs(tokens)),
                     static_cast<int>(call.logits.dims[1]),
                     static_cast<int>(call.experts.dims[1]),
                     static_cast<int>(stride_of(call)),
                     static_cast<int>(columns),
                     static_cast<int>(column_blocks),
                     static_cast<int>(per_block)};
  if (tokens > 0) {
    const int64_t blocks = token_runs(tokens) + (tokens + kCountedTokens - 1) / kCountedTokens;
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

const Kernel<RouterSums> router_sums_any_cuda = {
    "router_sums_any_cuda", Arch::cuda, Kind::reference, takes_any, workspace, launch};

}  // namespace grouped
