// Grouped product on Hopper: 8-bit rows with 8-bit weights [G, C, N] that are contracted across their lines, scales of
// groups. One form of weights, which forward contracts along its lines, so serves dgrad as well.
//
//   loader: weight codes, 128 lines x 128, in two boxes; row codes by a ragged map in boxes of 64; multicast
//            |  ring of stages: weights of block b + 1, 128 x 128 bytes, and rows of block b, up to 192 x 128 bytes
//            v
//   2 consumer warpgroups, 64 columns each, operands swapped: weights by transposed loads into registers, turned by
//   byte permutations (fragments_fp8.cuh); a block's sums of R rows by four wgmma m64nRk32, while the registers of the
//   next block are loaded; added to fp32
//            |  * both scales of the group, + bias, * row scale, one rounding; all rows, or half of them in float32, in
//            v  shared memory
//   stores of 16 rows x 128 bytes, as far as the tile has rows, clipped at the group's last one
//
//   tile        accumulators         weights                    ring         slots        registers, 128 + 256 threads
//   192 x 128   96 + 96 per thread   16 in use, 8 on their way  4 x 40 KiB   2 x 24 KiB   40 / 232
#include "cc/device/sm90/fragments_fp8.cuh"
#include "cc/device/sm90/pipeline_even_fp8.cuh"
#include "cc/device/sm90/ptx_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

using Shape = EvenFp8Shape<kPromoting.stages, kPromoting.slots, 40, 232>;

// The weights of a tile, in front of its rows: two boxes of 64 lines x 128 codes. What the pair shares (not across) is
// loaded a box per CTA.
struct LinesOfCodes {
  static constexpr uint32_t kBytes = 2 * kBlockBytes, kBoxCols = 64, kBoxRows = 64;

  static __device__ void load(const CUtensorMap* map, ptx::Coords at, bool across, uint32_t rank, uint32_t to,
                              uint32_t barrier) {
    if (across) {
      ptx::tensor_load(to, map, at, barrier);
      at.c[1] += kBoxRows;
      ptx::tensor_load(to + kBlockBytes, map, at, barrier);
    } else {
      at.c[1] += kBoxRows * rank;
      ptx::tensor_load_multicast(to + kBlockBytes * rank, map, at, barrier, kBothCtas);
    }
  }
};

// Rounds and stores the sums of a warpgroup's 64 columns, from col0 on, as many rows at once as its slots hold.
template <class Out>
__device__ inline void store_turned(const Fp8RowsParams& p, const Work& work, int col0, int warp,
                                    const float (&sums)[kEvenRows / 2], EvenFp8Slots& slots) {
  // Pieces of 16 rows x 128 bytes, kWide of them side by side, each of which is filled by kSharing warps.
  constexpr int kWide = sizeof(Out) / 2, kSharing = 4 / kWide, kSetRows = kEvenRows / kWide, kPieces = kEvenRows / 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kEvenRows; first += kSetRows) {
    if (first >= work.valid_rows) break;
    const uint32_t set = slots.take(), mine = set + warp / kSharing * kSlotBytes;
#pragma unroll
    for (int j = 0; j < kSetRows / 8; ++j) {
      if (first + 8 * j >= work.valid_rows) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t to =
            mine + j / 2 * kWide * kSlotBytes + turned_result_at(warp % kSharing, lane, j % 2, e, 2 * sizeof(Out));
        const float* v = &sums[4 * (first / 8 + j) + e];
        if constexpr (sizeof(Out) == 2) {
          ptx::store_shared(to, pack2<Out>(v[0], v[2]));
        } else {
          ptx::store_shared_v2(to, v[0], v[2]);
        }
      }
    }
    slots.send([&] {
#pragma unroll
      for (int i = 0; i < kPieces; i += 4) {
        const int piece = i + warp, row = first + piece / kWide * 16, col = col0 + piece % kWide * (64 / kWide);
        if (row < work.valid_rows) ptx::tensor_store(&p.out, ragged_at(work, col, row), set + piece * kSlotBytes);
      }
    });
  }
}

// What a warp reads of the weights in a stage, and the shared address of those in stage 0.
struct TurnedWeights {
  const TurnedCodes codes;
  const uint32_t at;
  __device__ TurnedWeights(const Shell<Shape>& shell, int, int warp) : codes(warp), at(shell.shared) {}
};

// Adds a warpgroup's products of one tile, its first kRows rows, to `acc`. `rows` is their descriptor in stage 0.
// Leaves all stages released.
template <class Pair, int kRows>
__device__ inline void multiply_turned(float* acc, Ring<Shape::kStages>& ring, int length, const TurnedWeights& weights,
                                       uint64_t rows, uint32_t barriers) {
  const int lane = threadIdx.x % 32;
  int left = length;
  HalfBlock codes[2], raw;
  const auto wait = [&] { ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity); };
  const auto of_stage = [&] { return weights.at + ring.slot * Shape::kStageBytes; };
  const auto release = [&](uint32_t slot) {
    if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + slot), lane);
  };
  // The first kSteps of a block, and with kMore the codes of the next one.
  const auto block = [&](auto steps, auto more) {
    constexpr int kSteps = decltype(steps)::value;
    constexpr bool kMore = decltype(more)::value;
    float sums[kRows / 2];
    const uint32_t slot = ring.slot, stage = of_stage();
    const uint64_t columns = rows + uint64_t(slot * (Shape::kStageBytes >> 4));
    // In front of the products: loads wait until the tensor cores have begun all products that were issued before.
    if constexpr (kMore) weights.codes.load(stage, 0, raw);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t (&of_step)[4] = codes[k / kHalfSteps][k % kHalfSteps];
      if (k == 0) {
        ptx::wgmma_fp8_part<Pair, kRows, true>(sums, of_step, columns);
      } else {
        ptx::wgmma_fp8_part<Pair, kRows, false>(sums, of_step, columns + k * descriptor_step(Major::k));
      }
      if (k == kHalfSteps - 1 || k == kSteps - 1) ptx::wgmma_commit();
    }
    ring.advance();
    left -= kBlockK;
    if constexpr (kMore) {
      ptx::wgmma_wait<1>();
      weights.codes.turn(raw, codes[0]);
      weights.codes.load(stage, 1, raw);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(sums);
    if constexpr (kMore) weights.codes.turn(raw, codes[1]);
    release(slot);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) acc[i] = __fadd_rn(sums[i], acc[i]);
    if constexpr (kMore) wait();
  };
  wait();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    weights.codes.load(of_stage(), half, raw);
    weights.codes.turn(raw, codes[half]);
  }
  release(ring.slot);
  ring.advance();
  wait();
  // Nothing is in flight at the loop's end: ptxas serialises products whose sums are read in another turn.
#pragma unroll 1
  while (left > kBlockK) block(std::integral_constant<int, kBlockSteps>{}, std::true_type{});
  const auto last = [&](auto steps) { block(steps, std::false_type{}); };
  if (left > 48) {
    last(std::integral_constant<int, 4>{});
  } else if (left > 32) {
    last(std::integral_constant<int, 3>{});
  } else if (left > 16) {
    last(std::integral_constant<int, 2>{});
  } else {
    last(std::integral_constant<int, 1>{});
  }
}

// How a tile is loaded: the codes of a block's weights come with the rows of the block before, which multiplies while
// they are on their way to registers. The first stage of a tile has no rows, the last one no weights.
template <class Product>
struct WeightsAhead : PairLoads<Product> {
  __device__ WeightsAhead(const Fp8RowsParams& p, const Work& work) : PairLoads<Product>(p, work) {
    this->blocks = Product::stages(work);
  }
  __device__ uint32_t bytes_of(int block) const {
    return (has_rows(block) ? this->boxes * kBlockBytes : 0) + (has_weights(block) ? Product::Rhs::kBytes : 0);
  }
  __device__ void load(const Fp8RowsParams& p, const Work& work, int block, uint32_t rank, uint32_t stage,
                       uint32_t full) const {
    const int32_t code = kBlockCodes * block;
    if (has_rows(block)) {
      load_lhs<1, Shape::kRowBoxes>(&p.lhs, ragged_at(work, code - kBlockCodes, 0), this->boxes, work.across, rank,
                                    stage + Product::Rhs::kBytes, full);
    }
    if (has_weights(block)) {
      Product::Rhs::load(&p.rhs, {{work.col0, code, work.slice2, work.slice3}}, work.across, rank, stage, full);
    }
  }

 private:
  __device__ bool has_rows(int block) const { return block > 0; }
  __device__ bool has_weights(int block) const { return this->columns && block < this->blocks - 1; }
};

template <class Pair, class Out>
struct MnRows : EvenFp8Rows<Out, Shape> {
  using Params = Fp8RowsParams;
  using Element = ptx::Fp8Pair<Pair::kWideB, Pair::kWideA>;  // as wgmma has them
  using Weights = TurnedWeights;
  using Loads = WeightsAhead<MnRows>;
  static __device__ int stages(const Work& work) { return work.k_blocks() + 1; }
  using Rhs = LinesOfCodes;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows<pair_at, kEvenRows, true>(p, kEvenCols, rank, mail, push);
  }

  template <int kRows>
  static __device__ void multiply(float* acc, Ring<Shape::kStages>& ring, int length, const Weights& weights,
                                  uint64_t rows, uint32_t barriers) {
    multiply_turned<Element, kRows>(acc, ring, length, weights, rows, barriers);
  }

  static __device__ void store(const Params& p, const Work& work, int col0, int warp, float (&sums)[kEvenRows / 2],
                               const Alpha& group, EvenFp8Slots& slots) {
    using Bias = device::BiasOf<std::conditional_t<sizeof(Out) == 2, Out, __nv_bfloat16>>;
    device::scale_sums(sums, __fmul_rn(group.lhs, group.rhs));
    end_even<Bias>(p, work, col0, turned_columns(warp), sums);
    store_turned<Out>(p, work, col0, warp, sums, slots);
  }
};

std::string refuses(const GroupedMatmul& c, const Target& target) {
  if (std::string reason = refuses_fp8_rows(c, target, 1); !reason.empty()) return reason;
  if (c.scales.lhs_block != 0 || c.scales.rhs_block != 0) return "takes scales of groups, not of blocks";
  return refuses_16_bytes({{"N", c.rhs.dims[2], 16}});
}

void launch(const GroupedMatmul& call, const Context& context) {
  launch_fp8_rows<MnRows>(call, context, [&](auto product, Fp8RowsParams p) {
    using Product = decltype(product);
    map_weights<typename Product::Rhs>(call, &p);
    launch_rows_product<Product, kEvenCols>(even_product_fp8_sm90<Product>, p, context.stream);
  });
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp8_mn_sm90 = {"grouped_matmul_fp8_mn_sm90",
                                                          Arch::sm90,
                                                          Kind::special,
                                                          refuses,
                                                          fp8_rows_workspace,
                                                          launch,
                                                          kAlignment,
                                                          nullptr,
                                                          false,
                                                          true};

}  // namespace grouped
