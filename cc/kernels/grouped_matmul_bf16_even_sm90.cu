// A part of grouped_matmul_bf16_sm90: tiles of even height (pipeline_even.cuh), for results of the operands' type.
//
//   loader: weights 64 x 128 in two boxes, rows by a ragged map in boxes of 64; what a pair shares is multicast
//            |  ring of blocks: weights 128 x 64, rows 64 x up to 192
//            v
//   2 consumer warpgroups in turn: wgmma m64nRk16 of two times 64 columns, R rows, fp32 in registers
//            |  + bias, * row scale, one rounding; 64 rows x 64 columns of a warpgroup, transposed, in shared memory
//            v
//   stores of 16 rows x 64 columns, as far as the tile has rows, clipped at the group's last one
//
//   tile        accumulators     ring         slots            registers, 128 + 256 threads
//   192 x 128   192 per thread   5 x 40 KiB   2 x 1 x  8 KiB   40 / 232    long sums
//   192 x 128   192 per thread   4 x 40 KiB   2 x 4 x  8 KiB   40 / 232    short sums
#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/sm90/pipeline_even.cuh"
#include "cc/device/sm90/rows_matmul.cuh"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {
namespace {

static_assert(kEvenRows == kMostEvenRows && kEvenCols == kEvenTileCols);

template <const TileChoice& kChoice>
using EvenTile = EvenShape<kChoice.stages, kChoice.slots>;

template <class T, Major kWeights, class Shape_>
struct EvenProduct : EvenTiles<kWeights, kEvenCols> {
  using Params = HalvesParams;
  using Element = T;
  using Shape = Shape_;
  using typename EvenTiles<kWeights, kEvenCols>::Rhs;
  static constexpr int kSetRows = 64;
  using Slots = EvenSlots<Shape::kSlots, kSetRows * 128>;
  static_assert(2 * Slots::kBytes == Shape::kWarps * Shape::WarpSlots::kBytes);

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const FromLow part(p.low, work, k);
    load_even_rows(p, work, part, boxes, rank, to, full);
    if (!columns) return;
    const OneOfTwo from = part.low ? OneOfTwo{false, part.at} : one_of_two(part.at, p.first_depth);
    const int32_t c0 = kWeights == Major::k ? from.at : work.col0, c1 = kWeights == Major::k ? work.col0 : from.at;
    const CUtensorMap* map = part.low ? &p.low.rhs : from.second ? &p.rhs_up : &p.rhs;
    Rhs::load(map, map, {{c0, c1, part.slice.near, part.slice.far}}, kEvenCols / 2, work.across, rank, to, full);
  }

  static __device__ void store(const Params& p, const Work& work, int warp, float (&acc)[2][kEvenRows / 2],
                               Slots& slots) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int col0 = work.col0 + 64 * h;
      if (col0 >= p.cols) break;
      end_even<device::BiasOf<T>>(p, work, col0, even_columns(warp), acc[h]);
      store_even<T, kSetRows>(p, work, col0, warp, acc[h], slots);
    }
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    clear_result<T>(p, work, rank, thread);
  }
};

template <class T, Major kWeights, const TileChoice& kChoice>
void launch_even(const GroupedMatmul& call, HalvesParams p, void* stream) {
  using Product = EvenProduct<T, kWeights, EvenTile<kChoice>>;
  map_halves<typename Product::Rhs>(call, &p);
  map_result(call, &p);
  launch_rows_product<Product, kEvenCols>(even_product_sm90<Product>, p, stream);
}

template <class T, Major kWeights>
void launch_choice(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  return &rows_tile_sm90(p.length, sizeof(T), p.cols) == &kManySlots
             ? launch_even<T, kWeights, kManySlots>(call, p, stream)
             : launch_even<T, kWeights, kManyStages>(call, p, stream);
}

template <class T>
void launch_major(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  return call.rhs_axis == 2 ? launch_choice<T, Major::k>(call, p, stream)
                            : launch_choice<T, Major::mn>(call, p, stream);
}

}  // namespace

// `p` has all but maps.
void launch_even_rows(const GroupedMatmul& call, const HalvesParams& p, void* stream) {
  return call.lhs.dtype == DType::bf16 ? launch_major<__nv_bfloat16>(call, p, stream)
                                       : launch_major<__half>(call, p, stream);
}

}  // namespace grouped::sm90
