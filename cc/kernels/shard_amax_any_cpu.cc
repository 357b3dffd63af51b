// Largest magnitudes among the elements of weights that a shard has.
#include <atomic>
#include <cstring>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/shards.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

void launch(const ShardAmax& call, const Context& context) {
  const ShardSlots slots = ShardSlots::of(call);
  const Isa& isa = best_isa();
  std::vector<std::atomic<uint32_t>> whole(static_cast<size_t>(call.source.dims[0]));
  memset(call.amax.as<char>(), 0, static_cast<size_t>(call.amax.elements()) * sizeof(uint32_t));
  shard_bands(context.pool, call, [&](int64_t member, int64_t first, int64_t last) {
    uint32_t* amax = call.amax.as<uint32_t>() + member * slots.count;
    uint32_t found = 0;
    shard_strips(call, member, first, last, [&](const ShardStrip& strip) {
      float x[kTileColumns];
      isa.decode(call.source.dtype, strip.elements, strip.count, x);
      for (int64_t i = 0; i < strip.count; ++i) {
        found = amax_with(found, x[i]);
        if (slots.block == 0) continue;
        uint32_t& block = amax[slots.at(strip.row, strip.column + i)];
        uint32_t& cross = amax[slots.cross_at(strip.row, strip.column + i)];
        block = amax_with(block, x[i]);
        cross = amax_with(cross, x[i]);
      }
    });
    std::atomic<uint32_t>& slot = whole[static_cast<size_t>(member)];
    uint32_t old = slot.load();
    while (found > old && !slot.compare_exchange_weak(old, found)) {
    }
  });
  for (int64_t g = 0; g < call.source.dims[0]; ++g) {
    call.amax.as<uint32_t>()[g * slots.count] = whole[static_cast<size_t>(g)].load();
  }
}

}  // namespace

const Kernel<ShardAmax> shard_amax_any_cpu = {"shard_amax_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                              no_workspace,         launch};

}  // namespace grouped
