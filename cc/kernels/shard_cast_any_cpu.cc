// Codes of the elements of weights that a shard has, and all scales, given the magnitudes of all ranks.
#include "cc/cpu/formats.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/shards.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

template <class T>
class Job {
 public:
  explicit Job(const ShardCast& call)
      : call_(call),
        isa_(best_isa()),
        slots_(ShardSlots::of(call)),
        type_(call.values.present() ? call.values.dtype : call.cross_values.dtype),
        rule_(store_rule(whole_of(call), T::kMax, call.source.dtype == DType::bf16)) {
    const int64_t a = call.source.dims[1], b = call.source.dims[2], block = std::max<int64_t>(call.block, 1);
    place_ = ScalePlace::of(call.scales, false, false, divide_up(a, call.block_outer), divide_up(b, block));
    cross_place_ = ScalePlace::of(call.cross_scales, false, true, divide_up(a, block), divide_up(b, call.block_outer));
  }

  void run(Pool* pool) {
    const int64_t* starts = call_.source_table.as<const int64_t>() + call_.source.dims[0];
    shard_bands(pool, call_, [&](int64_t member, int64_t first, int64_t last) {
      if (starts[member] < 0) return;
      const GroupScale group = group_scale_of(member);
      if (first == 0) put_group_scales(member, group);
      if (call_.block) put_block_scales(member, group, first, last);
      shard_strips(call_, member, first, last, [&](const ShardStrip& strip) {
        float x[kTileColumns], factors[kTileColumns];
        uint8_t codes[kTileColumns];
        isa_.decode(call_.source.dtype, strip.elements, strip.count, x);
        for (const bool cross : {false, true}) {
          if (!(cross ? call_.cross_values : call_.values).present()) continue;
          for (int64_t i = 0; i < strip.count; ++i) {
            factors[i] = call_.block ? scale_at(member, group, strip.row, strip.column + i, cross).scale : group.scale;
          }
          isa_.encode_codes(type_, x, factors, strip.count, codes);
          for (int64_t i = 0; i < strip.count; ++i) put(member, strip.row, strip.column + i, cross, codes[i]);
        }
      });
    });
  }

 private:
  const uint32_t* amax(int64_t member) const { return call_.amax.as<const uint32_t>() + member * slots_.count; }

  GroupScale group_scale_of(int64_t member) const {
    if (!call_.scale.present()) return group_scale(rule_, call_.block == 0, amax(member)[0]);
    return delayed_group_scale(rule_, call_.scale.as<const float>()[member], amax(member)[0]);
  }

  BlockScale scale_at(int64_t member, GroupScale group, int64_t a, int64_t b, bool cross) const {
    return block_scale<T>(rule_, amax(member)[cross ? slots_.cross_at(a, b) : slots_.at(a, b)], group);
  }

  void put_group_scales(int64_t member, GroupScale group) const {
    for (const TensorView* scales : {&call_.group_scales, &call_.cross_group_scales}) {
      if (scales->present()) scales->as<float>()[member] = group.scale_inv;
    }
  }

  // Of the blocks that start in rows [first, last).
  void put_block_scales(int64_t member, GroupScale group, int64_t first, int64_t last) const {
    const int64_t width = call_.source.dims[2], block = call_.block, outer = call_.block_outer;
    for (const bool cross : {false, true}) {
      const TensorView& scales = cross ? call_.cross_scales : call_.scales;
      if (!scales.present()) continue;
      const int64_t tall = cross ? block : outer, wide = cross ? outer : block;
      for (int64_t a = first; a < last; a += tall) {
        for (int64_t b = 0; b < width; b += wide) {
          const int64_t at = (cross ? cross_place_ : place_).at(member, a / tall, b / wide);
          const uint32_t stored = scale_at(member, group, a, b, cross).scale_inv;
          if (scales.dtype == DType::f32) {
            scales.as<float>()[at] = bits_float(stored);
          } else {
            scales.as<uint8_t>()[at] = static_cast<uint8_t>(stored);
          }
        }
      }
    }
  }

  // Half a byte leaves the other half, which may be another rank's; behind an odd end it is zero.
  void put(int64_t member, int64_t a, int64_t b, bool cross, uint8_t code) const {
    const int64_t lines = call_.source.dims[cross ? 2 : 1], length = call_.source.dims[cross ? 1 : 2];
    const int64_t line = cross ? b : a, at = cross ? a : b;
    uint8_t* row = (cross ? call_.cross_values : call_.values).as<uint8_t>();
    row += (member * lines + line) * row_bytes(type_, length);
    if (T::kBits == 8) {
      row[at] = code;
    } else {
      const int shift = at % 2 ? 4 : 0, kept = at + 1 == length ? 0 : row[at / 2];
      row[at / 2] = static_cast<uint8_t>((at % 2 ? row[at / 2] & 0x0F : kept & 0xF0) | code << shift);
    }
  }

  const ShardCast& call_;
  const Isa& isa_;
  const ShardSlots slots_;
  const DType type_;
  const StoreRule rule_;
  ScalePlace place_, cross_place_;
};

void launch(const ShardCast& call, const Context& context) {
  if (call.skip.present() && *call.skip.as<const int32_t>() != 0) return;
  const DType type = (call.values.present() ? call.values : call.cross_values).dtype;
  if (type == DType::e5m2) return Job<E5M2>(call).run(context.pool);
  if (type == DType::e4m3fn) return Job<E4M3>(call).run(context.pool);
  Job<E2M1>(call).run(context.pool);
}

}  // namespace

const Kernel<ShardCast> shard_cast_any_cpu = {"shard_cast_any_cpu", Arch::cpu, Kind::reference, takes_any,
                                              no_workspace,         launch};

}  // namespace grouped
