// Weights of E4M3 or E2M1 codes, streamed through the chip once, times few bf16 rows. Weights are the operand that
// wgmma takes from registers, so a code is read from shared memory once and its value never written; rows are the
// other operand, read from shared memory by the tensor cores themselves, once for 64 weight rows.
//
//   producers: a stage is 128 k of 256 weight rows (a tensor copy), of the item's blocks of rows (a bulk copy) and of
//            |  the weights' scales (2 warps, by words); the scales of the next item are asked into L2 before
//            v  ring, 4 to 6 stages
//   consumers, 4 warpgroups of 64 weight rows: codes --bits, * scale--> fragments; wgmma, kN columns for kN rows. While
//            |  it multiplies one part of 32 k, the next one is widened
//            v  through shared memory, so that 8 columns of a row leave together
//   result
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/device/codes.cuh"
#include "cc/device/factor.cuh"
#include "cc/device/few_rows.cuh"
#include "cc/device/ptx.cuh"
#include "cc/device/ptx_register.cuh"
#include "cc/device/ring.cuh"
#include "cc/device/scale_copies.cuh"
#include "cc/device/values.cuh"

namespace grouped::sm90 {

template <bool kNibbles_, Scale kScale_, int kWarps_>
struct StreamShape {
  static constexpr bool kNibbles = kNibbles_;
  static constexpr Scale kScale = kScale_;
  using C = Codes<kNibbles>;
  static constexpr bool kApart = kScale == Scale::f32;  // scales multiply sums of a stage, not codes
  static constexpr int kWarps = kWarps_;                // that multiply, 16 weight rows each
  static constexpr int kTileCols = 16 * kWarps;
  // Blocks of a row tile, as many as there are registers for; with scales that multiply sums there are two sets of
  // these.
  static constexpr int kBlocks = kWarps == 16 ? (kApart ? 4 : 6) : (kApart ? 8 : 12);
  static constexpr int kThreads = 32 * (kWarps + 4);  // registers are handed over by warpgroups
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = kWarps == 16 ? 112 : 160;
  static constexpr int kStagedStride = 16 + 4;  // floats: rows 4 apart in banks
  static constexpr int kStagedBytes = kWarps * kBlockRows * kStagedStride * 4;
  static constexpr int kCodeBytes = kTileCols * C::kRowBytes;
  static constexpr int kScalesAt = kCodeBytes + kBlocks * kRowBlockBytes;  // of a stage: codes, rows, scales
  static constexpr int kStageBytes = (kScalesAt + kTileCols * 4 * scale_words(kScale) + 1023) / 1024 * 1024;
  static constexpr int kFixedBytes = 256 + kTableBytes + kStagedBytes;  // barriers, too
  // Words of scales come from lines of 256 rows: with 4-bit codes enough stages fit beside a first cache that holds
  // them.
  static constexpr int kSharedBytes = (kNibbles && kWarps == 16 ? 195 : 227) * 1024;
  static constexpr int kFitting = (kSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kStages >= 3, "copies run ahead");
};

__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Asks for the scales of an item's columns, which lie together, whole 16 bytes of them.
template <class S>
__device__ void prefetch_scales(const FewRowsParams& p, const Item& item) {
  if constexpr (S::kScale != Scale::none) {
    const int first = scale_line(p, item.col), end = scale_line(p, item.col + S::kTileCols - 1) + 1;
    const uintptr_t lines = scales_of_group(p, item.group);
    const uintptr_t from = (lines + int64_t{first} * p.scale_line_bytes + 15) & ~uintptr_t{15};
    const uintptr_t to = (lines + int64_t{end} * p.scale_line_bytes) & ~uintptr_t{15};
    if (from < to) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(uint32_t(to - from)) : "memory");
    }
  }
}

template <class S>
__device__ void produce(const FewRowsParams& p, const int32_t* tables, uint32_t shared, uint32_t barriers) {
  const int stages = stages_of(p);
  Ring<S::kStages> ring;
  Item item, next;
  const auto load_codes = [&](int stage, uint32_t slot) {
    const uint32_t full = barriers + 16 * slot;
    ptx::barrier_arrive_expect(full, S::kCodeBytes + item.blocks() * kRowBlockBytes);
    ptx::tensor_load(shared + slot * S::kStageBytes, &p.codes, {{stage * S::C::kRowBytes, item.col, item.group, 0}},
                     full);
  };
  int under_way = 0;  // stages of the first item, whose codes come while rows are still being arranged
  if (find_item(p, tables, blockIdx.x, &item)) {
    prefetch_scales<S>(p, item);
#pragma unroll 1
    for (; under_way < min(stages, S::kStages); ++under_way) load_codes(under_way, under_way);
  }
  ptx::wait_for_grid_before();
  for (int index = blockIdx.x; find_item(p, tables, index, &item); index += gridDim.x, under_way = 0) {
    if (find_item(p, tables, index + gridDim.x, &next)) prefetch_scales<S>(p, next);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      if (stage >= under_way) {
        ptx::barrier_wait(barriers + 16 * ring.slot + 8, ring.parity ^ 1);
        load_codes(stage, ring.slot);
      }
      bulk_load(shared + ring.slot * S::kStageBytes + S::kCodeBytes,
                p.arranged + (int64_t{stage} * p.most_blocks + item.first_block) * kRowBlockBytes,
                item.blocks() * kRowBlockBytes, barriers + 16 * ring.slot);
      ring.advance();
    }
  }
}

template <class S>
__device__ void produce_scales(const FewRowsParams& p, const int32_t* tables, uint32_t shared, uint32_t barriers) {
  const int stages = stages_of(p);
  Ring<S::kStages> ring;
  ScaleCopies<S::kScale, S::kTileCols / kScaleLanes> copies;
  Item item;
  for (int index = blockIdx.x; find_item(p, tables, index, &item); index += gridDim.x) {
    copies.begin(p, item);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t full = barriers + 16 * ring.slot;
      ptx::barrier_wait(full + 8, ring.parity ^ 1);
      copies.copy(p, shared + ring.slot * S::kStageBytes + S::kScalesAt);
      ptx::barrier_arrive_copies(full);
      ring.advance();
    }
  }
}

template <class S>
class Consumer {
 public:
  __device__ Consumer(const FewRowsParams& p, const int32_t* tables, uint32_t shared, uint32_t barriers, float* staged)
      : p_(p), tables_(tables), shared_(shared), barriers_(barriers), staged_(staged) {
    const int lane = threadIdx.x % 32;
    place_ = C::place(threadIdx.x / 32 * 16 + lane / 4, lane % 4);
  }

  __device__ void run() {
    Item item;
    for (int index = blockIdx.x; find_item(p_, tables_, index, &item); index += gridDim.x) {
      const int blocks = item.blocks();
      if constexpr (S::kWarps == 16) {
        if (blocks <= 1) {
          work<8>(item);
        } else if (blocks <= 2) {
          work<16>(item);
        } else if (blocks <= 3) {
          work<24>(item);
        } else {
          work<8 * S::kBlocks>(item);
        }
      } else {
        if (blocks <= 4) {
          work<32>(item);
        } else if (S::kBlocks == 8 || blocks <= 8) {
          work<64>(item);
        } else if constexpr (S::kBlocks > 8) {
          if (blocks <= 10) {
            work<80>(item);
          } else {
            work<8 * S::kBlocks>(item);
          }
        }
      }
    }
  }

 private:
  using C = typename S::C;
  using F = Factors<S::kScale, C::kBias>;
  static constexpr bool kApart = S::kApart;
  static constexpr int kPartsALoad = 4 / C::kLoads;

  template <int kN>
  __device__ void work(const Item& item) {
    float sums[kN / 2];
    uint32_t nan[2] = {};
    multiply<kN>(item, sums, nan);
    finish<kN>(item, sums, nan);
  }

  __device__ uint32_t arrival() const {
    ptx::barrier_wait(barriers_ + 16 * ring_.slot, ring_.parity);
    return shared_ + ring_.slot * S::kStageBytes;
  }
  __device__ void release(uint32_t slot) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barriers_ + 16 * slot + 8);
  }
  // One load of both rows' codes.
  __device__ void load_codes(uint32_t tile, int load, uint32_t (&words)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) ptx::load_shared_v4((tile + place_ + r * 8 * C::kRowBytes) ^ (16 * load), words[r]);
  }

  // Sums of all stages. Slots are released once no wgmma reads them; codes are loaded a part ahead, also across stages.
  template <int kN>
  __device__ void multiply(const Item& item, float (&sums)[kN / 2], uint32_t (&nan)[2]) {
    const int stages = stages_of(p_), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const ScaleReader<S::kScale> scales(p_, item.group, item.col + row, row);
    const uint64_t first_rows = rows_descriptor(shared_ + S::kCodeBytes);
#pragma unroll
    for (float& s : sums) s = 0.0f;
    uint32_t words[2][4], fragments[2][2][4], before = 0;
    uint32_t tile = arrival();
    load_codes(tile, 0, words);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t slot = ring_.slot;
      const uint64_t rows = first_rows + slot * (S::kStageBytes >> 4);
      int more = stage + 1 < stages;
      asm volatile("" : "+r"(more));     // else the last stage is compiled apart, and its wgmmas are serialised
      uint32_t codes[2], factors[2][2];  // of scales
      bool rare = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        codes[r] = S::kScale == Scale::none ? 0 : scales.read(tile + S::kScalesAt, r);
        F::make(codes[r], factors[r]);
        if constexpr (F::kRare) rare = rare || F::is_rare(codes[r]);
      }
      if constexpr (F::kRare) rare = __any_sync(~0u, rare);
      float apart[kApart ? kN / 2 : 1];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        uint32_t (&a)[2][4] = fragments[part % 2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t pairs[4];
          C::pairs(words[r], part % kPartsALoad, pairs);
          if (part % kPartsALoad == 0) C::find_nan(words[r], nan[r]);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i / 2][r + 2 * (i % 2)] = times(pairs[i], factors[r][part / 2]);
        }
        if constexpr (F::kRare) {
          if (rare) second_factors(a, codes);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint64_t at = rows + (2 * part + step) * kRowStep;
          if constexpr (!kApart) {
            ptx::wgmma_register<kN, false>(sums, a[step], at);
          } else if (part == 0 && step == 0) {
            ptx::wgmma_register<kN, true>(apart, a[step], at);
          } else {
            ptx::wgmma_register<kN, false>(apart, a[step], at);
          }
        }
        ptx::wgmma_commit();
        if (part == 3) {  // behind the last stage there is none: that one is read again, for nothing
          ring_.advance(more);
          tile = arrival();
        }
        if (part % kPartsALoad == kPartsALoad - 1) load_codes(tile, (part + 1) % 4 / kPartsALoad, words);
        ptx::wgmma_wait<1>();
        if (!kApart && part == 0 && stage != 0) release(before);
      }
      if constexpr (kApart) {
        ptx::wgmma_wait<0>();
        release(slot);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          sums[i] = __fmaf_rn(apart[i], __uint_as_float(codes[i / 2 % 2]), sums[i]);
        }
      }
      before = slot;
    }
    ring_.advance();
    if constexpr (!kApart) {
      ptx::wgmma_wait<0>();
      release(before);
    }
  }

  __device__ void second_factors(uint32_t (&a)[2][4], const uint32_t (&codes)[2]) const {
    if constexpr (F::kRare) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t second = F::second(codes[r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i / 2][r + 2 * (i % 2)] = times(a[i / 2][r + 2 * (i % 2)], second);
      }
    }
  }

  template <int kN>
  __device__ void finish(const Item& item, float (&sums)[kN / 2], const uint32_t (&nan)[2]) {
    using namespace device;
    const int lane = threadIdx.x % 32, col = item.col + threadIdx.x / 32 * 16;
    constexpr int kStride = S::kStagedStride;
    float* staged = staged_ + threadIdx.x / 32 * (kBlockRows * kStride);
    Finish f = {};
    f.factor = group_factor(nullptr, p_.factors, item.group) *
               (S::kScale == Scale::e4m3 ? static_cast<float>(1 << kE4M3Shift) : 1.0f);
    f.result_stride = p_.cols;
    f.result_type = p_.result_type;
    f.bias_type = p_.bias_type;
    f.scale_bias = p_.scale_bias;
    f.vectors = true;
    f.cols = p_.cols - col;
    const uint8_t* bias = p_.bias_table ? reinterpret_cast<const uint8_t*>(p_.bias_table[item.group])
                          : p_.bias     ? p_.bias + int64_t{item.group} * p_.cols * bytes_of(p_.bias_type)
                                        : nullptr;
    if (bias) bias += int64_t{col} * bytes_of(p_.bias_type);
    f.bias = bias;
    const bool vectors = reinterpret_cast<uintptr_t>(bias) % 16 == 0;
    if constexpr (!S::kNibbles) {  // a NaN among a weight row's codes is one in all of its sums
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t found = nan[r];
        found |= __shfl_xor_sync(~0u, found, 1);
        found |= __shfl_xor_sync(~0u, found, 2);
        if (!C::is_nan(found)) continue;
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          if (i / 2 % 2 == r) sums[i] = __uint_as_float(0x7fffffffu);
        }
      }
    }
#pragma unroll 1
    for (int j = 0; j * kBlockRows < item.rows; ++j) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) staged[(lane % 4 * 2 + i % 2) * kStride + i / 2 * 8 + lane / 4] = sums[i];
#pragma unroll
      for (int i = 0; i + 4 < kN / 2; ++i) sums[i] = sums[i + 4];
      __syncwarp();
      const int64_t row = item.first_row + j * kBlockRows;
      f.rows = item.rows - j * kBlockRows;
      f.result = p_.result + (row * p_.cols + col) * bytes_of(p_.result_type);
      f.row_scale = p_.row_scale ? p_.row_scale + row : nullptr;
      const int out_row = lane / 2, out_col = lane % 2 * 8;
      if (out_row >= kBlockRows) continue;
      const float* at = staged + out_row * kStride + out_col;
      if (vectors) {
        float values[1][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[0][i] = at[i];
        finish_rows(f, out_row, kBlockRows, out_col, values);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          float value[1][1] = {{at[i]}};
          finish_rows(f, out_row, kBlockRows, out_col + i, value);
        }
      }
    }
  }

  const FewRowsParams& p_;
  const int32_t* tables_;
  uint32_t shared_, barriers_;
  float* staged_;
  uint32_t place_;  // of this lane's first codes in a tile
  Ring<S::kStages> ring_;
};

// Rows past the groups, zeroed by everybody together.
template <int kThreads>
__device__ void clear_tail(const FewRowsParams& p, const int32_t* tables) {
  const int64_t row_words = int64_t{p.cols} * device::bytes_of(p.result_type) / 16;
  const int64_t first = tables[p.groups] * row_words, end = p.rows * row_words;
  uint4* words = reinterpret_cast<uint4*>(p.result);
  for (int64_t i = first + blockIdx.x * int64_t{kThreads} + threadIdx.x; i < end; i += int64_t{gridDim.x} * kThreads) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) stream_weights(const __grid_constant__ FewRowsParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  int32_t* tables = reinterpret_cast<int32_t*>(memory + S::kStages * S::kStageBytes);
  float* staged = reinterpret_cast<float*>(memory + S::kStages * S::kStageBytes + kTableBytes);
  const uint32_t shared = ptx::shared_address(memory);
  const uint32_t barriers = shared + S::kBytes - 256;  // full and empty of each stage
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      ptx::barrier_init(barriers + 16 * s, S::kScale == Scale::none ? 1 : 1 + kScaleLanes);
      ptx::barrier_init(barriers + 16 * s + 8, S::kWarps);
    }
    ptx::barrier_init_fence();
  }
  if (threadIdx.x / 32 == 1) make_tables(p, tables);
  __syncthreads();
  if (p.clear_tail) clear_tail<S::kThreads>(p, tables);
  if (threadIdx.x / 32 >= S::kWarps) {
    ptx::set_max_registers_down<S::kProducerRegisters>();
    const int warp = threadIdx.x / 32 - S::kWarps;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) produce<S>(p, tables, shared, barriers);
    } else if (S::kScale != Scale::none && warp <= kScaleLanes / 32) {
      produce_scales<S>(p, tables, shared, barriers);
    }
    return;
  }
  ptx::set_max_registers_up<S::kConsumerRegisters>();
  Consumer<S>(p, tables, shared, barriers, staged).run();
}

}  // namespace grouped::sm90
