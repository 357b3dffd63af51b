// Grouped rows on Hopper, 8-bit operands with a scale per group, summed by the tensor cores alone ("fast
// accumulation"): about 14 bits of a sum are kept. The kernel of pipeline.cuh, as for 16-bit rows; two codes take the
// place of one element.
//
//   lhs codes by a ragged map, weight codes [G, N, K] by a packed (or scattered) map, 128 codes per block
//            |  ring of blocks: lhs 128 x 128, weights 192 x 128 bytes; shared tiles multicast to the pair
//            v
//   2 consumer warpgroups in turn: wgmma m64n192k32, sums in registers
//            |  * both scales, + bias, * row scale, one rounding; slots of 16 rows in shared memory
//            v
//   ragged store, clipped at the group's last row; tail rows cleared as items behind the last tile
//
//   tile        accumulators     ring         slots           registers, 128 + 256 threads
//   128 x 192   192 per thread   4 x 40 KiB   8 x 4 x 2 KiB   40 / 232
#include "cc/device/sm90/rows_product_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace sm90;

using Shape = TileShape<kManySlots.cols, kManySlots.stages, kManySlots.slots>;

std::string refuses(const GroupedMatmul& c, const Target& target) {
  const std::string reason = refuses_fp8_rows(c, target);
  if (!reason.empty()) return reason;
  if (c.scales.promote != "never") return "never promotes partial sums; this call asks for " + c.scales.promote;
  if (c.scales.lhs_block != 0 || c.scales.rhs_block != 0) return "takes one scale per group, not scales of blocks";
  return "";
}

template <class Pair, class Out>
using FastRows = Fp8Rows<Pair, Out, Shape>;

void launch(const GroupedMatmul& call, const Context& context) {
  launch_fp8_rows<FastRows>(call, context, [&](auto product, Fp8RowsParams p) {
    using Product = decltype(product);
    map_weights<typename Product::Rhs>(call, &p);
    launch_rows_product<Product>(grouped_product_sm90<Product>, p, context.stream);
  });
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp8_fast_sm90 = {"grouped_matmul_fp8_fast_sm90",
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
