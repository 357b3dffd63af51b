// Gradients at the hidden rows on Hopper, bf16 and fp16: dz = rows of dy [M, N] times the weight of their group, which
// never leaves the registers; h [M, W] is read and dh [M, W], z [M, F] and the row sums of dz * t are written.
//
//   scheduler, loader, work rings: as in grouped_matmul_bf16_sm90.cu, but pairs share rows where they can. Blocks of a
//   low-rank product follow those of N (low_rank.cuh)
//   fetcher (a warp): h --TMA--> sets of 64 rows x 64 columns, gate and linear
//            |
//   2 consumer warpgroups in turn: wgmma m64n128k16 -> dz; then, set by set, 16 columns at a time
//            |  h out of the set, t and act' recomputed, dh over h, z beside it, dz * t into two sums per thread
//            v
//   storer (a warp): sets --ragged TMA--> dh, z; clipped at the group's last row; the set goes back to the fetcher
//   row sums: one partial per row and column tile --sum_partials--> [M], in the order of the tiles
//
//   tile        accumulators     ring         sets         registers, 128 + 256 threads
//   128 x 128   128 per thread   5 x 32 KiB   2 x 24 KiB   40 / 232
//   128 x 192   192 per thread   4 x 40 KiB   2 x 24 KiB   40 / 232    long sums
#include "cc/api/kernel.h"
#include "cc/kernels/grouped_matmul_dact_bf16_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

template <class T, Major kWeights, class Shape>
void launch_dact(const GroupedMatmulDact& call, DactParams p, cudaStream_t stream) {
  using Product = DactProduct<T, kWeights, Shape>;
  using Rhs = typename Product::Rhs;
  map_weights<Rhs>(call, &p);
  launch_dact_product<Product>(grouped_product_sm90<Product>, call, p, kThreads, stream);
}

template <class T, class Shape>
void launch_weights(const GroupedMatmulDact& call, const DactParams& p, cudaStream_t stream) {
  return call.rhs_axis == 2 ? launch_dact<T, Major::k, Shape>(call, p, stream)
                            : launch_dact<T, Major::mn, Shape>(call, p, stream);
}

template <class T>
void launch_shape(const GroupedMatmulDact& call, const DactParams& p, cudaStream_t stream) {
  return &dact_tile_sm90(p.length) == &kDactLong ? launch_weights<T, DactShapeOf<kDactLong>>(call, p, stream)
                                                 : launch_weights<T, DactShape>(call, p, stream);
}

std::string refuses(const GroupedMatmulDact& c, const Target&) {
  if (!has_plain_operands(c) || has_group_scales(c.scales)) return "takes no scaled operands";
  if (c.quantized.stores()) return "gives plain rows";
  if (std::string reason = refuses_16_bit_lhs(c.lhs.dtype); !reason.empty()) return reason;
  for (const TensorView* t : {&c.rhs, &c.hidden, &c.result, &c.activated}) {
    if (t->present() && t->dtype != c.lhs.dtype) {
      return std::string("takes and gives one type; beside lhs in ") + dtype_name(c.lhs.dtype) + " there is " +
             describe(*t);
    }
  }
  return refuses_dact(c);
}

size_t workspace(const GroupedMatmulDact& c, const Target&) {
  return dact_workspace(c, dact_tile_sm90(c.lhs.dims[1]).cols);
}

void launch(const GroupedMatmulDact& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const DactParams p = dact_params(call, context);
  return call.lhs.dtype == DType::bf16 ? launch_shape<__nv_bfloat16>(call, p, stream)
                                       : launch_shape<__half>(call, p, stream);
}

}  // namespace

const Kernel<GroupedMatmulDact> grouped_matmul_dact_bf16_sm90 = {
    "grouped_matmul_dact_bf16_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment, nullptr, true};

}  // namespace grouped
