// Values of a quantised form. A task takes a band of rows of one group and works through tiles of it.
#include "cc/cpu/formats.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/quantized.h"
#include "cc/kernels/kernels.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

struct Scratch {
  uint8_t codes[kTileRows * kTileColumns];
  uint8_t line[kTileRows];
  float values[kTileColumns];
  float factors[kTileColumns];
};

struct Job {
  const Dequantize& call;
  const Isa& isa;
  const bool ragged = call.group_sizes.present();
  const QuantizedGroups groups{call.result, call.group_sizes, call.cross ? call.segment : 0};
  const int64_t width = call.result.dims[call.result.rank - 1];
  const int64_t block = std::max<int64_t>(call.block, 1);
  const int64_t outer = call.block_outer;
  const bool padded = ragged && call.cross;
  const int64_t pitch = call.values.dims[call.values.rank - 1];  // bytes
  const ScalePlace place =
      ScalePlace::of(call.scales, ragged, call.cross != 0,
                     padded ? call.values.dims[call.transposed ? 1 : 0] / block
                            : divide_up(call.result.dims[ragged ? 0 : 1], call.cross ? block : outer),
                     call.cross ? divide_up(width, outer) : divide_up(width, block));

  // Codes of a tile, a row of it after the other.
  void load(const Band& band, int64_t column, int64_t columns, Scratch* s) const {
    const uint8_t* from = call.values.as<const uint8_t>();
    const QuantizedGroup& group = groups[band.group];
    const DType type = call.values.dtype;
    if (!call.cross || (padded && !call.transposed)) {
      const int64_t first = padded ? group.segment : group.begin;
      for (int64_t r = 0; r < band.valid; ++r) {
        take_codes(type, from + (first + band.row + r) * pitch, column, columns, s->codes + r * kTileColumns);
      }
      return;
    }
    const int64_t first = padded ? group.segment : 0;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t line = (padded ? 0 : band.group * width) + column + c;
      take_codes(type, from + line * pitch, first + band.row, band.valid, s->line);
      for (int64_t r = 0; r < band.valid; ++r) s->codes[r * kTileColumns + c] = s->line[r];
    }
  }

  float scale_at(int64_t index) const {
    if (call.scales.dtype == DType::f32) return call.scales.as<const float>()[index];
    const uint8_t code = call.scales.as<const uint8_t>()[index];
    return call.scales.dtype == DType::e8m0 ? decode_e8m0(code) : decode<E4M3>(code);
  }

  // Block scales of `columns` values of a row.
  void load_factors(const Band& band, int64_t r, int64_t column, int64_t columns, Scratch* s) const {
    const QuantizedGroup& group = groups[band.group];
    const int64_t row = band.row + r + (padded ? group.segment : ragged ? group.begin : 0);
    for (int64_t c = 0; c < columns;) {
      const int64_t step = call.cross ? outer : block, at = (column + c) / step;
      const int64_t count = std::min(columns - c, step);
      const float scale = scale_at(place.at(band.group, row / (call.cross ? block : outer), at));
      std::fill(s->factors + c, s->factors + c + count, scale);
      c += count;
    }
  }

  void write(const Band& band) const {
    Scratch* s = static_cast<Scratch*>(panel_scratch(sizeof(Scratch)));
    const int64_t bytes = dtype_bytes(call.result.dtype), first = groups[band.group].begin + band.row;
    const float shared = call.group_scales.present() ? call.group_scales.as<const float>()[band.group] : 1.0f;
    std::fill(s->factors, s->factors + kTileColumns, 1.0f);
    for (int64_t column = 0; column < width; column += kTileColumns) {
      const int64_t columns = std::min(kTileColumns, width - column);
      load(band, column, columns, s);
      for (int64_t r = 0; r < band.valid; ++r) {
        const bool same = call.cross && r % block != 0;  // the block of the row before
        if (call.scales.present() && !same) load_factors(band, r, column, columns, s);
        isa.decode_codes(call.values.dtype, s->codes + r * kTileColumns, columns, s->values);
        for (int64_t c = 0; c < columns; ++c) s->values[c] = dequantized_value(s->values[c], s->factors[c], shared);
        isa.encode(call.result.dtype, s->values, columns,
                   call.result.as<char>() + ((first + r) * width + column) * bytes);
      }
    }
  }
};

template <const Isa* isa>
std::string refuses(const Dequantize&, const Target&) {
  return refuses_unless_runs(isa);
}

template <const Isa* isa>
void launch(const Dequantize& call, const Context& context) {
  const Job job = {call, pinned_or_best(isa)};
  parallel_for(context.pool, job.groups.bands(), [&](int64_t index) { job.write(job.groups.band(index)); });
  if (job.ragged) zero_rows(context.pool, call.result, job.groups.end(), call.result.dims[0]);
}

}  // namespace

const Kernel<Dequantize> dequantize_any_cpu = {"dequantize_any_cpu", Arch::cpu,    Kind::reference,
                                               refuses<nullptr>,     no_workspace, launch<nullptr>};
const Kernel<Dequantize> dequantize_any_cpu_plain = {"dequantize_any_cpu_plain", Arch::cpu,    Kind::reference,
                                                     refuses<&kIsaPlain>,        no_workspace, launch<&kIsaPlain>};
#if defined(__x86_64__)
const Kernel<Dequantize> dequantize_any_cpu_avx2 = {"dequantize_any_cpu_avx2", Arch::cpu,    Kind::reference,
                                                    refuses<&kIsaAvx2>,        no_workspace, launch<&kIsaAvx2>};
const Kernel<Dequantize> dequantize_any_cpu_avx512 = {"dequantize_any_cpu_avx512", Arch::cpu,    Kind::reference,
                                                      refuses<&kIsaAvx512>,        no_workspace, launch<&kIsaAvx512>};
#endif

}  // namespace grouped
