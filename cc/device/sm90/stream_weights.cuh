// Weights of E4M3 or E2M1 codes, streamed through the chip once, times few bf16 rows. Weights are the operand that
// wgmma takes from registers, so a code is read from shared memory once and its value never written; rows are the
// other operand, read from shared memory by the tensor cores themselves, once for 64 weight rows.
//
//   producers: a slab is 128 k of 256 weight rows (a tensor copy) and of the item's blocks of rows (a bulk copy); a
//            |  stage is one or two of them and the weights' scales (a tensor copy, or 2 warps by words). The next item
//            is |  looked up and its scales are asked into L2 while this one is multiplied v  ring, 3 to 6 stages
//   consumers, 4 warpgroups of 64 weight rows: codes --bits, * scale--> fragments; wgmma, kN columns for kN rows. While
//            |  it multiplies one part of 32 k, or two, the next ones are widened
//            v  through shared memory, so that 8 columns of a row leave together
//   result
//
// A shape with 12 consuming warps has 192 weight rows and 3 warpgroups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cc/device/common/copy_async.cuh"
#include "cc/device/common/elements.cuh"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/few_rows.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/ptx_register.cuh"
#include "cc/device/sm90/ring.cuh"
#include "cc/device/sm90/scale_copies.cuh"
#include "cc/device/sm90/weight_codes.cuh"

namespace grouped::sm90 {

constexpr int kMostSlabs = 2;  // of a stage

template <bool kNibbles_, Scale kScale_, int kWarps_, int kSlabs_ = 1>
struct StreamShape {
  static constexpr bool kNibbles = kNibbles_;
  static constexpr Scale kScale = kScale_;
  using C = Codes<kNibbles>;
  static constexpr bool kApart = kScale == Scale::f32;  // scales multiply sums of a stage, not codes
  static constexpr int kWarps = kWarps_;                // that multiply, 16 weight rows each
  static constexpr int kSlabs = kSlabs_;                // of 128 k, per stage
  static constexpr int kTileCols = 16 * kWarps;
  // Blocks of a row tile, as many as there are registers for; with scales that multiply sums there are two sets of
  // these. Stages of two slabs: as many as leave room for three stages.
  static constexpr int kBlocks = kSlabs == 2 ? 3 : kWarps == 16 ? (kApart ? 4 : 6) : (kApart ? 8 : 12);
  static constexpr int kPartsACommit = kSlabs;        // with few columns there are registers for more fragments
  static constexpr int kThreads = 32 * (kWarps + 4);  // registers are handed over by warpgroups
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = kWarps == 16 ? 112 : 160;
  static constexpr int kStagedStride = 16 + 4;          // floats: rows 4 apart in banks
  static constexpr int kStagedBlocks = kApart ? 1 : 2;  // at once; of float32 scales two would take a stage's room
  static constexpr int kStagedBytes = kWarps * kStagedBlocks * kBlockRows * kStagedStride * 4;
  using Stage = StageLayout<kNibbles, kScale, kTileCols, kBlocks, kSlabs>;
  static constexpr int kCodeBytes = Stage::kCodeBytes, kRowsBytes = Stage::kRowsBytes, kRowsAt = Stage::kRowsAt;
  static constexpr int kScalesAt = Stage::kScalesAt, kStageBytes = Stage::kBytes;
  static constexpr int kControlBytes = 512;
  static constexpr int kFixedBytes = kControlBytes + kTableBytes + kStagedBytes;
  // What a block leaves of 256 KiB is the first cache, through which words of scales come: lines of 256 rows. Those of
  // 16 codes each are so long that the cache is worth more than a stage. A block of arrange_rows fits beside 16 warps.
  static constexpr bool kWideCache = kNibbles && kScale == Scale::e4m3;
  static constexpr bool kScaleLines = in_lines(kScale), kMayBeLarge = is_e8m0(kScale);
  static constexpr bool kScaleWarps = kScale != Scale::none && kScale != Scale::e4m3_lines;
  static constexpr int kSharedBytes = (kWideCache ? 193 : kWarps == 12 ? 227 : 225) * 1024;
  static constexpr int kFitting = (kSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static constexpr int kBytes = kStages * kStageBytes + kFixedBytes;
  static_assert(kStages >= 3, "copies run ahead, and scales are looked at a stage behind them");
};

// What the warps of a block tell each other, at the end of its shared memory: for each stage barriers, whether it has
// large scales (a word for each warp that looks at them), and the item that begins with it.
struct Control {
  uint32_t base;
  __device__ uint32_t full(uint32_t slot) const { return base + 16 * slot; }
  __device__ uint32_t empty(uint32_t slot) const { return base + 16 * slot + 8; }
  __device__ uint32_t large(uint32_t slot) const { return base + 128 + 8 * slot; }
  __device__ uint32_t item(uint32_t slot) const { return base + 192 + 16 * slot; }
  __device__ uint32_t lines(uint32_t slot) const { return base + 352 + 8 * slot; }  // of scales, before they are shown
  __device__ uint32_t next_item() const { return base + 320; }
  // By all threads of both warps that look at scales.
  __device__ void show(uint32_t slot, bool found_large) const {
    const bool any = __any_sync(~0u, found_large);
    if (threadIdx.x % 32 == 0) ptx::store_shared(large(slot) + threadIdx.x / 32 % 2 * 4, any);
    ptx::barrier_arrive(full(slot));
  }
  // An item in 16 bytes, and in 4 more where its rows were arranged, which the threads that multiply do not ask for.
  __device__ void store_next(const Item& item) const {
    const uint32_t words[4] = {item.tag, uint32_t(item.first_row), uint32_t(item.rows), uint32_t(item.col)};
    ptx::store_shared_v4(next_item(), words);
    ptx::store_shared(next_item() + 16, item.first_block);
  }
  __device__ Item load_next() const {
    Item item = load(next_item());
    item.first_block = static_cast<int>(ptx::load_shared_word(next_item() + 16));
    return item;
  }
  __device__ void next_begins(uint32_t slot) const {
    uint32_t words[4];
    ptx::load_shared_v4(next_item(), words);
    ptx::store_shared_v4(item(slot), words);
  }
  static __device__ Item load(uint32_t from) {
    uint32_t words[4];
    ptx::load_shared_v4(from, words);
    return Item{words[0], int(words[1]), int(words[2]), int(words[3]), 0};
  }
};

__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Asks for the scales of an item's columns, which are together, whole 16 bytes of them.
template <class S>
__device__ void prefetch_scales(const FewRowsParams& p, const Item& item) {
  if constexpr (S::kScale != Scale::none) {
    const int first = scale_line(p, item.col), end = scale_line(p, item.col + S::kTileCols - 1) + 1;
    const uintptr_t lines = scales_of_group(p, item.group());
    const uintptr_t from = (lines + int64_t{first} * p.scale_line_bytes + 15) & ~uintptr_t{15};
    const uintptr_t to = (lines + int64_t{end} * p.scale_line_bytes) & ~uintptr_t{15};
    if (from < to) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(uint32_t(to - from)) : "memory");
    }
  }
}

template <class S>
__device__ void produce(const FewRowsParams& p, const int32_t* tables, uint32_t shared, Control control) {
  const int stages = p.slabs / S::kSlabs;
  Ring<S::kStages> ring;
  Item item;  // few of its words are kept in registers, of which there are few
  const auto find = [&](int index) {
    Item found;
    if (!find_item(p, tables, index, &found)) return false;
    control.store_next(found);
    prefetch_scales<S>(p, found);
    return true;
  };
  const auto load_codes = [&](int stage, uint32_t slot) {
    const uint32_t full = control.full(slot);
    if (stage == 0) control.next_begins(slot);
    constexpr uint32_t kLines = S::kScaleLines ? S::kTileCols * kScaleLineBytes : 0;
    const uint32_t lines = S::kMayBeLarge ? control.lines(slot) : full;
    ptx::barrier_arrive_expect(
        full, S::kSlabs * (S::kCodeBytes + item.blocks() * kRowBlockBytes) + (S::kMayBeLarge ? 0 : kLines));
    if constexpr (S::kScaleLines) {
      if constexpr (S::kMayBeLarge) ptx::barrier_arrive_expect(lines, kLines);
      const int line = stage * S::kSlabs * scale_bytes_of_slab(S::kScale) / kScaleLineBytes * kScaleLineBytes;
      ptx::tensor_load(shared + slot * S::kStageBytes + S::kScalesAt, &p.scale_boxes,
                       {{line, item.col, item.group(), 0}}, lines);
    }
#pragma unroll 1
    for (int i = 0; i < S::kSlabs; ++i) {
      ptx::tensor_load(shared + slot * S::kStageBytes + i * S::kCodeBytes, &p.codes,
                       {{(stage * S::kSlabs + i) * S::C::kRowBytes, item.col, item.group(), 0}}, full);
    }
  };
  if (!find(blockIdx.x)) return device::wait_for_launch_before();  // what follows this grid follows that one, too
  item = control.load_next();
  int under_way = 0;  // stages of the first item, whose codes come while rows are still being arranged
#pragma unroll 1
  for (; under_way < min(stages, S::kStages); ++under_way) load_codes(under_way, under_way);
  device::wait_for_launch_before();
#pragma unroll 1
  for (int index = blockIdx.x;; under_way = 0) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      if (stage >= under_way) {
        ptx::barrier_wait(control.empty(ring.slot), ring.parity ^ 1);
        load_codes(stage, ring.slot);
      }
#pragma unroll 1
      for (int i = 0; i < S::kSlabs; ++i) {
        bulk_load(shared + ring.slot * S::kStageBytes + S::kRowsAt + i * S::kRowsBytes,
                  p.arranged + (int64_t{stage * S::kSlabs + i} * p.most_blocks + item.first_block) * kRowBlockBytes,
                  item.blocks() * kRowBlockBytes, control.full(ring.slot));
      }
      ring.advance();
      if (stage == 0 && !item.last()) find(index += gridDim.x);  // while the stage is multiplied
    }
    if (item.last()) return;
    item = control.load_next();
  }
}

// By words. Where no large scale may go unseen, a stage is shown when the next one's copies have been started: by then
// it is there, and its bytes are looked at.
template <class S>
__device__ void produce_scales(const FewRowsParams& p, const int32_t* tables, uint32_t shared, Control control) {
  constexpr bool kLarge = S::kScale == Scale::e8m0;
  using Copies = ScaleCopies<S::kScale, S::kTileCols / kScaleLanes, S::kSlabs>;
  Ring<S::kStages> ring;
  Copies copies;
  Item item;
  const auto scales_at = [&](uint32_t slot) { return shared + slot * S::kStageBytes + S::kScalesAt; };
  const auto show = [&](uint32_t slot) { control.show(slot, Copies::any_large(p, scales_at(slot))); };
  int before = -1;
  for (int index = blockIdx.x; find_item(p, tables, index, &item); index += gridDim.x) {
    copies.begin(p, item);
#pragma unroll 1
    for (int slab = 0; slab < p.slabs; slab += S::kSlabs) {
      ptx::barrier_wait(control.empty(ring.slot), ring.parity ^ 1);
      copies.copy(p, scales_at(ring.slot));
      if constexpr (kLarge) {
        device::commit_copies();
        device::wait_copies<1>();
        if (before >= 0) show(before);
        before = ring.slot;
      } else {
        ptx::barrier_arrive_copies(control.full(ring.slot));
      }
      ring.advance();
    }
  }
  if constexpr (kLarge) {
    device::wait_copies<0>();
    if (before >= 0) show(before);
  }
}

// Scales that a tensor copy brings are shown once two warps have looked whether some are large.
template <class S>
__device__ void show_lines(const FewRowsParams& p, const int32_t* tables, uint32_t shared, Control control) {
  Ring<S::kStages> ring;
  Item item;
  for (int index = blockIdx.x; find_item(p, tables, index, &item); index += gridDim.x) {
#pragma unroll 1
    for (int slab = 0; slab < p.slabs; slab += S::kSlabs) {
      ptx::barrier_wait(control.lines(ring.slot), ring.parity);
      const uint32_t lines = shared + ring.slot * S::kStageBytes + S::kScalesAt;
      control.show(ring.slot, any_large_in_lines<S::kTileCols / kScaleLanes>(lines));
      ring.advance();
    }
  }
}

template <class S>
class Consumer {
 public:
  __device__ Consumer(const FewRowsParams& p, uint32_t shared, Control control, float* staged)
      : p_(p), shared_(shared), control_(control), staged_(staged) {
    const int lane = threadIdx.x % 32;
    place_ = C::place(threadIdx.x / 32 * 16 + lane / 4, lane % 4);
  }

  __device__ void run() {
    Item item;
    do {
      arrival();
      item = Control::load(control_.item(ring_.slot));
      const int blocks = item.blocks();
      if constexpr (S::kBlocks <= 6) {
        if (blocks <= 1) {
          work<8>(item);
        } else if (blocks <= 2) {
          work<16>(item);
        } else if (S::kBlocks == 3 || blocks <= 3) {
          work<24>(item);
        } else if constexpr (S::kBlocks > 3) {
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
    } while (!item.last());
  }

 private:
  using C = typename S::C;
  using F = Factors<S::kScale, C::kBias>;
  static constexpr bool kApart = S::kApart;
  static constexpr int kSlabs = S::kSlabs, kPartsALoad = 4 / C::kLoads, kParts = S::kPartsACommit;
  static constexpr bool kAllPlain = !F::kLarge;
  using Codes2 = uint32_t[kSlabs][2];  // scales of a lane's two rows

  template <int kN>
  __device__ void work(Item& item) {
    float sums[kN / 2];
    uint32_t nan[2] = {};
    const float factor = device::group_factor(nullptr, p_.factors, item.group());  // not waited for here
    multiply<kN>(item, sums, nan);
    asm volatile("" : "+r"(item.tag));  // one register across the product, not what is made of it as well
    finish<kN>(item, factor, sums, nan);
  }

  __device__ uint32_t arrival() const {
    ptx::barrier_wait(control_.full(ring_.slot), ring_.parity);
    return shared_ + ring_.slot * S::kStageBytes;
  }
  __device__ void release(uint32_t slot) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(control_.empty(slot));
  }
  // Whether the stage that has arrived has no large scale. All warps agree: wgmma is one instruction of a warpgroup.
  __device__ bool is_plain() const {
    uint32_t first, second;
    ptx::load_words_v2(control_.large(ring_.slot), first, second);
    return !__any_sync(~0u, (first | second) != 0);
  }
  // One load of both rows' codes of a slab.
  __device__ void load_codes(uint32_t codes, int load, uint32_t (&words)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) ptx::load_shared_v4((codes + place_ + r * 8 * C::kRowBytes) ^ (16 * load), words[r]);
  }
  // A part's codes as two steps' fragments.
  __device__ void widen(const uint32_t (&words)[2][4], int part, const uint32_t (&factors)[2][2], uint32_t (*a)[4],
                        uint32_t (&nan)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t pairs[4];
      C::pairs(words[r], part % kPartsALoad, pairs);
      if (part % kPartsALoad == 0) C::find_nan(words[r], nan[r]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i / 2][r + 2 * (i % 2)] = times(pairs[i], factors[r][part / 2]);
    }
  }

  // Sums of all stages.
  template <int kN>
  __device__ void multiply(const Item& item, float (&sums)[kN / 2], uint32_t (&nan)[2]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const ScaleReader<S::kScale, kSlabs> scales(p_, item.group(), item.col + row, row);
#pragma unroll
    for (float& s : sums) s = 0.0f;
    int left = p_.slabs / kSlabs;
    if constexpr (kAllPlain) {
      multiply_plain<kN>(scales, sums, nan, left);
    } else {
      while (left > 0) {
        if (is_plain()) {
          multiply_plain<kN>(scales, sums, nan, left);
        } else {
          multiply_any<kN>(scales, sums, nan, left);
        }
      }
    }
    ring_.advance();
  }

  // A run of plain stages, up to the first that is not; `left` stages are left then. Slots are released once no wgmma
  // reads them; codes are loaded one part ahead, also across stages.
  template <int kN>
  __device__ void multiply_plain(const ScaleReader<S::kScale, kSlabs>& scales, float (&sums)[kN / 2],
                                 uint32_t (&nan)[2], int& left) {
    uint32_t words[2][4], fragments[2][2 * kParts][4], before = 0;
    Codes2 codes;
    uint32_t tile = shared_ + ring_.slot * S::kStageBytes;
    load_codes(tile, 0, words);
    const uint64_t first_rows = rows_descriptor(shared_ + S::kRowsAt);
    bool first = true, plain;
#pragma unroll 1
    do {
      const uint32_t slot = ring_.slot;
      scales.read(tile + S::kScalesAt + scale_in_line(S::kScale, kSlabs, p_.slabs / kSlabs - left), codes);
      float apart[kApart ? kN / 2 : 1];
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const uint64_t rows = first_rows + slot * (S::kStageBytes >> 4) + slab * (S::kRowsBytes >> 4);
        const bool last = slab == kSlabs - 1;
        uint32_t factors[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) F::make(codes[slab][r], factors[r]);
#pragma unroll
        for (int part = 0; part < 4; part += kParts) {
          uint32_t (&a)[2 * kParts][4] = fragments[part / kParts % 2];
#pragma unroll
          for (int i = 0; i < kParts; ++i) widen(words, part + i, factors, a + 2 * i, nan);
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < 2 * kParts; ++i) {
            const uint64_t at = rows + (2 * part + i) * kRowStep;
            if constexpr (!kApart) {
              ptx::wgmma_register<kN, false>(sums, a[i], at);
            } else if (part == 0 && i == 0) {
              ptx::wgmma_register<kN, true>(apart, a[i], at);
            } else {
              ptx::wgmma_register<kN, false>(apart, a[i], at);
            }
          }
          ptx::wgmma_commit();
          const int behind = part + kParts;
          if (behind == 4 && last) {  // behind the last stage there is none: that one is read again, for nothing
            --left;
            int more = left > 0;
            asm volatile("" : "+r"(more));  // else the last stage is compiled apart, and its wgmmas are serialised
            ring_.advance(more);
            tile = arrival();
            plain = (kAllPlain || is_plain()) && more;
          }
          if (behind % kPartsALoad == 0) {
            const int of = behind < 4 ? slab : last ? 0 : slab + 1;
            load_codes(tile + of * S::kCodeBytes, behind % 4 / kPartsALoad, words);
          }
          ptx::wgmma_wait<1>();
          if (!kApart && part == 0 && slab == 0 && !first) release(before);
        }
      }
      if constexpr (kApart) {
        ptx::wgmma_wait<0>();
        release(slot);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          sums[i] = __fmaf_rn(apart[i], __uint_as_float(codes[0][i / 2 % 2]), sums[i]);
        }
      }
      before = slot;
      first = false;
    } while (plain);
    if constexpr (!kApart) {
      ptx::wgmma_wait<0>();
      release(before);
    }
  }

  // Any stage, out of the way of the others: one part after the other, whatever its scales are.
  template <int kN>
  __device__ void multiply_any(const ScaleReader<S::kScale, kSlabs>& scales, float (&sums)[kN / 2], uint32_t (&nan)[2],
                               int& left) {
    const uint32_t tile = shared_ + ring_.slot * S::kStageBytes;
    Codes2 codes;
    scales.read(tile + S::kScalesAt + scale_in_line(S::kScale, kSlabs, p_.slabs / kSlabs - left), codes);
#pragma unroll 1
    for (int slab = 0; slab < kSlabs; ++slab) {
      const uint64_t rows = rows_descriptor(tile + S::kRowsAt + slab * S::kRowsBytes);
      uint32_t words[2][4], factors[2][2], seconds[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t code = slab == 0 ? codes[0][r] : codes[kSlabs - 1][r];
        if constexpr (F::kLarge) {
          F::make_both(code, factors[r], seconds[r]);
        } else {
          F::make(code, factors[r]);
        }
      }
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        if (part % kPartsALoad == 0) load_codes(tile + slab * S::kCodeBytes, part / kPartsALoad, words);
        uint32_t a[2][4];
        widen(words, part, factors, a, nan);
        if constexpr (F::kLarge) {
#pragma unroll
          for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = times(a[i / 4][i % 4], seconds[i % 2]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::wgmma_register<kN, false>(sums, a[i], rows + (2 * part + i) * kRowStep);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      }
    }
    release(ring_.slot);
    if (--left > 0) {
      ring_.advance();
      arrival();
    }
  }

  template <int kN>
  __device__ void finish(const Item& item, float factor, float (&sums)[kN / 2], const uint32_t (&nan)[2]) {
    using namespace device;
    const int lane = threadIdx.x % 32, col = item.col + threadIdx.x / 32 * 16;
    constexpr int kStride = S::kStagedStride;
    float* staged = staged_ + threadIdx.x / 32 * (S::kStagedBlocks * kBlockRows * kStride);
    Finish f = {};
    f.factor = factor * (is_e4m3(S::kScale) ? static_cast<float>(1 << kE4M3Shift) : 1.0f);
    f.result_stride = p_.cols;
    f.result_type = p_.result_type;
    f.bias_type = p_.bias_type;
    f.scale_bias = p_.scale_bias;
    f.vectors = true;
    f.cols = p_.cols - col;
    const uint8_t* bias = p_.bias_table ? reinterpret_cast<const uint8_t*>(p_.bias_table[item.group()])
                          : p_.bias     ? p_.bias + int64_t{item.group()} * p_.cols * bytes_of(p_.bias_type)
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
    constexpr int kBlocks = kN > 8 ? S::kStagedBlocks : 1, kRows = kBlocks * kBlockRows;
#pragma unroll 1
    for (int first = 0; first < item.rows; first += kRows) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4 * kBlocks && i < kN / 2; ++i) {
        staged[(i / 4 * kBlockRows + lane % 4 * 2 + i % 2) * kStride + i / 2 % 2 * 8 + lane / 4] = sums[i];
      }
#pragma unroll
      for (int i = 0; i + 4 * kBlocks < kN / 2; ++i) sums[i] = sums[i + 4 * kBlocks];
      __syncwarp();
      const int64_t row = item.first_row + first;
      f.rows = item.rows - first;
      f.result = p_.result + (row * p_.cols + col) * bytes_of(p_.result_type);
      f.row_scale = p_.row_scale ? p_.row_scale + row : nullptr;
      const int out_row = lane / 2, out_col = lane % 2 * 8;
      if (out_row >= kRows) continue;
      const float* at = staged + out_row * kStride + out_col;
      if (vectors) {
        float values[1][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[0][i] = at[i];
        finish_rows(f, out_row, kRows, out_col, values);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          float value[1][1] = {{at[i]}};
          finish_rows(f, out_row, kRows, out_col + i, value);
        }
      }
    }
  }

  const FewRowsParams& p_;
  uint32_t shared_;
  Control control_;
  float* staged_;
  uint32_t place_;  // of this lane's first codes in a tile
  Ring<S::kStages> ring_;
};

// Rows past the groups, zeroed by all threads of the grid together.
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
  const uint32_t shared = device::shared_address(memory);
  const Control control = {shared + S::kBytes - S::kControlBytes};
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      ptx::barrier_init(control.full(s), S::kScaleWarps ? 1 + kScaleLanes : 1);
      ptx::barrier_init(control.lines(s), 1);
      ptx::barrier_init(control.empty(s), S::kWarps);
    }
    ptx::barrier_init_fence();
  }
  if (threadIdx.x / 32 == 1) make_tables<S::kBlocks>(p, tables);
  __syncthreads();
  if (p.clear_tail) clear_tail<S::kThreads>(p, tables);
  if (threadIdx.x / 32 >= S::kWarps) {
    ptx::set_max_registers_down<S::kProducerRegisters>();
    const int warp = threadIdx.x / 32 - S::kWarps;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) produce<S>(p, tables, shared, control);
    } else if constexpr (S::kScaleWarps) {
      if (warp > kScaleLanes / 32) return;
      if constexpr (S::kScaleLines) {
        show_lines<S>(p, tables, shared, control);
      } else {
        produce_scales<S>(p, tables, shared, control);
      }
    }
    return;
  }
  ptx::set_max_registers_up<S::kConsumerRegisters>();
  Item first;
  if (find_item(p, tables, blockIdx.x, &first)) Consumer<S>(p, shared, control, staged).run();
}

}  // namespace grouped::sm90
