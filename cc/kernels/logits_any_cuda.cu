// Logits changed before a choice: random factors, and Sinkhorn's balance of rows and columns.
//
// jitter     a thread has four columns of a token, which share one draw of the random stream
//
// sinkhorn   C = exp(logits - the row's largest) --> result; tokens that count --> workspace (an integer sum)
//            per iteration   block of 64 tokens   a[t] from the row's sum, a warp per token
//                                                 sums of a[t] C[t, e], a thread per column --> workspace
//                            a thread per column  b[e] from the blocks' sums, in order
//            result = a C b, in place
//
// 18 to 46 registers (sm_90); 256 bytes of shared memory. C is read twice per iteration, the second time from the L1
// cache.
#include <string>

#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockTokens = 64;

unsigned blocks_of(int64_t items, int64_t a_block) { return static_cast<unsigned>((items + a_block - 1) / a_block); }

// ---- Jitter

__global__ void __launch_bounds__(kThreads)
    shake(const float* logits, const uint32_t* key, int64_t tokens, int experts, float eps, float* result) {
  const int quads = (experts + 3) / 4;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= tokens * quads) return;
  const int64_t token = item / quads;
  const int first = static_cast<int>(item % quads) * 4;
  const uint64_t seed = static_cast<uint64_t>(key[1]) << 32 | key[0];
  const Words4 words = random_words(seed, static_cast<uint32_t>(first), static_cast<uint32_t>(token), 0, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = token * experts + first + i;
    if (first + i < experts) result[at] = fl_mul(logits[at], jitter_factor(words.word[i], eps));
  }
}

void launch_jitter(const Jitter& call, const Context& context) {
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1];
  if (tokens == 0) return;
  shake<<<blocks_of(tokens * ((experts + 3) / 4), kThreads), kThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(
      call.logits.as<const float>(), call.key.as<const uint32_t>(), tokens, static_cast<int>(experts), call.eps,
      call.result.as<float>());
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- Sinkhorn

struct Balance {
  const float* logits;
  const uint8_t* mask;  // null: absent
  float* result;
  float* a;         // [T]
  float* b;         // [E]
  float* partials;  // [blocks, E]
  int* counted;     // tokens that count
  int64_t tokens, blocks;
  int experts;

  static int64_t blocks_for(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }
  static size_t bytes(int64_t tokens, int64_t experts) {
    return align_up(sizeof(int)) + align_up(sizeof(float) * tokens) + align_up(sizeof(float) * experts) +
           align_up(sizeof(float) * blocks_for(tokens) * experts);
  }
  void place(void* workspace) {
    char* next = static_cast<char*>(workspace);
    const auto take = [&](size_t bytes) {
      char* at = next;
      next += align_up(bytes);
      return static_cast<void*>(at);
    };
    counted = static_cast<int*>(take(sizeof(int)));
    a = static_cast<float*>(take(sizeof(float) * tokens));
    b = static_cast<float*>(take(sizeof(float) * experts));
    partials = static_cast<float*>(take(sizeof(float) * blocks * experts));
  }
  __device__ bool counts(int64_t token) const { return !mask || mask[token] != 0; }
};

__global__ void __launch_bounds__(kThreads) start_balance(const __grid_constant__ Balance p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const bool counts = token < p.tokens && p.counts(token);
  const int counted = __syncthreads_count(counts && lane_id() == 0);
  if (threadIdx.x == 0) atomicAdd(p.counted, counted);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < p.experts; e += kThreads) p.b[e] = 1.0f;
  }
  if (token >= p.tokens) return;
  if (lane_id() == 0) p.a[token] = 1.0f;
  const float* logits = p.logits + token * p.experts;
  float* result = p.result + token * p.experts;
  if (!counts) {
    for (int e = lane_id(); e < p.experts; e += 32) result[e] = 0.0f;
    return;
  }
  float most = kBelowAll;
  for (int e = lane_id(); e < p.experts; e += 32) most = larger(most, logits[e]);
  most = warp_max(most);
  for (int e = lane_id(); e < p.experts; e += 32) result[e] = exp_below(logits[e], most);
}

__global__ void __launch_bounds__(kThreads) balance_rows(const __grid_constant__ Balance p) {
  __shared__ float scales[kBlockTokens];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockTokens;
  const int count = static_cast<int>(min(p.tokens - first, static_cast<int64_t>(kBlockTokens)));
  const float rows = static_cast<float>(max(*p.counted, 1));
  for (int i = threadIdx.x / 32; i < count; i += kWarps) {
    const float* c = p.result + (first + i) * p.experts;
    float sum = 0.0f;
    for (int e = lane_id(); e < p.experts; e += 32) sum = fl_add(sum, fl_mul(p.b[e], c[e]));
    const float scale = fl_div(1.0f, fl_mul(rows, fl_add(warp_sum(sum), kTinySum)));
    if (lane_id() == 0) {
      scales[i] = scale;
      p.a[first + i] = scale;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float value = fl_mul(scales[i], p.result[(first + i) * p.experts + e]);
      sum = p.counts(first + i) && !isnan(scales[i]) ? fl_add(sum, value) : sum;
    }
    p.partials[static_cast<int64_t>(blockIdx.x) * p.experts + e] = sum;
  }
}

__global__ void __launch_bounds__(32) balance_columns(const __grid_constant__ Balance p) {
  const int e = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (e >= p.experts) return;
  float sum = 0.0f;
#pragma unroll 16
  for (int64_t block = 0; block < p.blocks; ++block) sum = fl_add(sum, p.partials[block * p.experts + e]);
  p.b[e] = fl_div(1.0f, fl_mul(static_cast<float>(p.experts), fl_add(sum, kTinySum)));
}

__global__ void __launch_bounds__(kThreads) end_balance(const __grid_constant__ Balance p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= p.tokens || !p.counts(token)) return;
  float* c = p.result + token * p.experts;
  const float a = p.a[token];
  for (int e = lane_id(); e < p.experts; e += 32) c[e] = fl_mul(fl_mul(a, c[e]), p.b[e]);
}

size_t balance_bytes(const Sinkhorn& call, const Target&) {
  return Balance::bytes(call.logits.dims[0], call.logits.dims[1]);
}

void launch_sinkhorn(const Sinkhorn& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  Balance p = {};
  p.logits = call.logits.as<const float>();
  p.mask = data_or_null<const uint8_t>(call.mask);
  p.result = call.result.as<float>();
  p.tokens = call.logits.dims[0];
  p.blocks = Balance::blocks_for(p.tokens);
  p.experts = static_cast<int>(call.logits.dims[1]);
  p.place(context.workspace);
  if (p.tokens == 0) return;
  const unsigned token_blocks = blocks_of(p.tokens, kWarps);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(p.counted, 0, sizeof(int), stream));
  start_balance<<<token_blocks, kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  for (int64_t i = 0; i < call.iterations; ++i) {
    balance_rows<<<static_cast<unsigned>(p.blocks), kThreads, 0, stream>>>(p);
    GROUPED_CUDA_CHECK(cudaGetLastError());
    balance_columns<<<blocks_of(p.experts, 32), 32, 0, stream>>>(p);
    GROUPED_CUDA_CHECK(cudaGetLastError());
  }
  end_balance<<<token_blocks, kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<Jitter> jitter_any_cuda = {"jitter_any_cuda", Arch::cuda,   Kind::reference,
                                        takes_any,         no_workspace, launch_jitter};
const Kernel<Sinkhorn> sinkhorn_any_cuda = {"sinkhorn_any_cuda", Arch::cuda,    Kind::reference,
                                            takes_any,           balance_bytes, launch_sinkhorn};

}  // namespace grouped
