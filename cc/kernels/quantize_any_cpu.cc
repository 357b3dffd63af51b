// Codes and scales of rows or weights. A task takes a band of rows of one group and works through tiles of it: a tile
// is decoded once, and both forms are made of it. Scales that belong to a group want a pass before, for its amax.
#include <atomic>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/cpu/panel.h"
#include "cc/cpu/quantized.h"
#include "cc/kernels/kernels.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

struct Scratch {
  float values[kTileRows * kTileColumns];
  float rotated[kTileRows * kTileColumns];
  uint8_t codes[kTileRows * kTileColumns];
  float factors[kTileColumns];
  uint32_t amax[kTileColumns];
  uint8_t line[kTileRows];
};

// Where a tile is.
struct Tile {
  Band band;
  int64_t column;
  int64_t columns;
  int64_t rows;  // of the padded form; those past band.valid are zeros
};

void raise(std::atomic<uint32_t>* amax, uint32_t found) {
  uint32_t old = amax->load();
  while (found > old && !amax->compare_exchange_weak(old, found)) {
  }
}

template <class T>
class Job {
 public:
  Job(const Quantize& call, const Isa& isa)
      : call_(call),
        isa_(isa),
        ragged_(call.group_sizes.present()),
        groups_(call.rows(), call.group_sizes, call.segment),
        width_(call.source.dims[call.source.rank - 1]),
        type_(call.values.present() ? call.values.dtype : call.cross_values.dtype),
        rule_(store_rule(call, T::kMax, call.source.dtype == DType::bf16)),
        amax_(static_cast<size_t>(groups_.count())),
        rotated_amax_(static_cast<size_t>(groups_.count())),
        scales_(static_cast<size_t>(2 * groups_.count()), GroupScale{1.0f, 1.0f}) {
    const int64_t tall = call.rows().dims[ragged_ ? 0 : 1], b = std::max<int64_t>(call.block, 1);
    const int64_t cross_tall = ragged_ && call.cross_values.present() ? padded_rows() : tall;
    rows_place_ = ScalePlace::of(call.scales, ragged_, false, divide_up(tall, call.block_outer), divide_up(width_, b));
    cross_place_ =
        ScalePlace::of(call.cross_scales, ragged_, true, divide_up(cross_tall, b), divide_up(width_, call.block_outer));
  }

  void run(Pool* pool) {
    const bool per_group = call_.block == 0 || rule_.kind == ScaleRule::nvfp4;
    const bool stores = call_.values.present() || call_.cross_values.present();
    const bool ahead = !stores || (per_group && !call_.scale.present());
    parallel_for(pool, groups_.bands(), [&](int64_t index) {
      const Band& band = groups_.band(index);
      if (!ahead && !starts(band.group)) return;
      tiles(band, [&](const Tile& tile, Scratch* s) { measure(tile, s); });
    });
    find_group_scales();
    if (stores) {
      parallel_for(pool, groups_.bands(), [&](int64_t index) {
        tiles(groups_.band(index), [&](const Tile& tile, Scratch* s) {
          if (!ahead && call_.amax.present()) measure(tile, s);
          if (call_.values.present()) store_rows(tile, s);
          if (call_.cross_values.present()) store_columns(tile, rotate_tile(tile, s), s);
        });
      });
    }
    finish(pool);
  }

 private:
  int64_t padded_rows() const { return call_.cross_values.dims[call_.transposed ? 1 : 0]; }
  size_t scale_index(int64_t group, bool cross) const { return static_cast<size_t>(2 * group + cross); }

  // Of a row that a group owns; below 0: zeros.
  int64_t source_row(int64_t row) const {
    if (!call_.places.present()) return row;
    const int64_t place = call_.places.as<const int32_t>()[row];
    return place >= 0 && place < call_.source.dims[0] * call_.slots ? place / call_.slots : -1;
  }

  // body(tile, scratch) for the tiles of a band, values decoded and zeros around them.
  template <class Body>
  void tiles(const Band& band, const Body& body) {
    Scratch* s = static_cast<Scratch*>(panel_scratch(sizeof(Scratch)));
    const QuantizedGroup& group = groups_[band.group];
    const int64_t bytes = dtype_bytes(call_.source.dtype);
    const bool listed = call_.source_table.present();
    const char* from = listed ? reinterpret_cast<const char*>(call_.source_table.as<const int64_t>()[band.group])
                              : call_.source.as<const char>();
    const int64_t first = band.row + (listed ? 0 : group.begin);
    const int64_t padded = ragged_ && call_.segment ? divide_up(band.valid, call_.segment) * call_.segment : band.valid;
    for (int64_t column = 0; column < width_; column += kTileColumns) {
      const Tile tile = {band, column, std::min(kTileColumns, width_ - column), padded};
      for (int64_t r = 0; r < padded; ++r) {
        float* to = s->values + r * kTileColumns;
        const int64_t row = r < band.valid ? source_row(first + r) : -1;
        if (row >= 0) {
          isa_.decode(call_.source.dtype, from + (row * width_ + column) * bytes, tile.columns, to);
        } else {
          memset(to, 0, static_cast<size_t>(tile.columns) * sizeof(float));
        }
      }
      body(tile, s);
    }
  }

  // Whether delayed scaling has no scale for a group yet, and takes that of its values.
  bool starts(int64_t group) const {
    return call_.scale.present() && !call_.starts_at_one && call_.scale.as<const float>()[group] == 0.0f;
  }

  void measure(const Tile& tile, Scratch* s) {
    raise(&amax_[static_cast<size_t>(tile.band.group)], tile_amax(tile, s->values, tile.band.valid));
    if (call_.rotate && call_.cross_values.present()) {
      raise(&rotated_amax_[static_cast<size_t>(tile.band.group)], tile_amax(tile, rotate_tile(tile, s), tile.rows));
    }
  }

  uint32_t tile_amax(const Tile& tile, const float* values, int64_t rows) {
    uint32_t amax = 0;
    for (int64_t r = 0; r < rows; ++r) amax = std::max(amax, isa_.row_amax(values + r * kTileColumns, tile.columns));
    return amax;
  }

  // The values that the form along rows stores: every 16 rows rotated, where that is asked for.
  const float* rotate_tile(const Tile& tile, Scratch* s) {
    if (!call_.rotate) return s->values;
    for (int64_t first = 0; first < tile.rows; first += kRotation) {
      for (int64_t c = 0; c < tile.columns; ++c) {
        float v[kRotation];
        for (int64_t i = 0; i < kRotation; ++i) v[i] = s->values[(first + i) * kTileColumns + c];
        rotate(v);
        for (int64_t i = 0; i < kRotation; ++i) {
          const float x = call_.source.dtype == DType::bf16 ? bf16_to_float(float_to_bf16(v[i])) : v[i];
          s->rotated[(first + i) * kTileColumns + c] = x;
        }
      }
    }
    return s->rotated;
  }

  void find_group_scales() {
    for (int64_t g = 0; g < groups_.count(); ++g) {
      for (const bool cross : {false, true}) {
        const TensorView& result = cross ? call_.cross_group_scales : call_.group_scales;
        const auto& amax = cross && call_.rotate ? rotated_amax_ : amax_;
        const uint32_t found = amax[static_cast<size_t>(g)].load();
        const GroupScale group = call_.scale.present()
                                     ? delayed_group_scale(rule_, call_.scale.as<const float>()[g], found)
                                     : group_scale(rule_, call_.block == 0, found);
        scales_[scale_index(g, cross)] = group;
        if (result.present()) result.as<float>()[g] = group.scale_inv;
      }
    }
  }

  void put_scale(const TensorView& scales, int64_t index, BlockScale found) {
    if (scales.dtype == DType::f32) {
      scales.as<float>()[index] = bits_float(found.scale_inv);
    } else {
      scales.as<uint8_t>()[index] = static_cast<uint8_t>(found.scale_inv);
    }
  }

  // `lines` of `length` values each, which share a scale; 4over6 sums errors line by line.
  BlockScale scale_of(uint32_t amax, GroupScale group, const float* values, int64_t lines, int64_t line_step,
                      int64_t length, int64_t step) {
    const BlockScale first = block_scale<T>(rule_, amax, group);
    if (call_.four_over_six.empty()) return first;
    const uint8_t second = nvfp4_block_scale_inv(bits_float(amax), group.scale, 1.5f);
    const bool squares = call_.four_over_six == "square";
    float costs[2];
    for (int candidate = 0; candidate < 2; ++candidate) {
      const uint8_t code = candidate ? second : static_cast<uint8_t>(first.scale_inv);
      float sums[kRotation] = {};
      for (int64_t line = 0; line < lines; ++line) {
        const float* x = values + line * line_step;
        sums[line] = nvfp4_row_error(x, step, static_cast<int>(length), code, group.scale_inv, squares);
      }
      costs[candidate] = call_.block_outer > 1 ? nvfp4_block_error(sums) : sums[0];
    }
    if (!(costs[1] < costs[0])) return first;
    return {nvfp4_block_scale(second, group.scale_inv), second};
  }

  // Codes of one row of a tile under the factors in scratch.
  void encode_row(const Tile& tile, const float* values, int64_t row, bool cross, Scratch* s, uint8_t* codes) {
    const float* x = values + row * kTileColumns;
    if (!call_.stochastic) return isa_.encode_codes(type_, x, s->factors, tile.columns, codes);
    const uint64_t key = call_.key.present() ? key_of(call_.key.as<const uint32_t>()) : 0;
    for (int64_t c = 0; c < tile.columns; c += 4) {
      const Words4 words =
          random_words(key, static_cast<uint32_t>(tile.column + c), static_cast<uint32_t>(tile.band.row + row),
                       static_cast<uint32_t>(tile.band.group), static_cast<uint32_t>(call_.stream + cross));
      for (int64_t i = c; i < std::min(tile.columns, c + 4); ++i) {
        codes[i] = encode_e2m1_stochastic(fl_mul(x[i], s->factors[i]), words.word[i - c]);
      }
    }
  }

  // The form that contracts the last axis.
  void store_rows(const Tile& tile, Scratch* s) {
    const QuantizedGroup& group = groups_[tile.band.group];
    const GroupScale shared = scales_[scale_index(tile.band.group, false)];
    const int64_t block = call_.block, outer = call_.block_outer;
    std::fill(s->factors, s->factors + tile.columns, shared.scale);
    for (int64_t r = 0; r < tile.band.valid; r += outer) {
      const int64_t lines = std::min(outer, tile.band.valid - r);
      const float* x = s->values + r * kTileColumns;
      for (int64_t c = 0; block && c < tile.columns; c += block) {
        const int64_t length = std::min(block, tile.columns - c);
        uint32_t amax = 0;
        for (int64_t i = 0; i < lines; ++i) amax = std::max(amax, isa_.row_amax(x + i * kTileColumns + c, length));
        const BlockScale of_block = scale_of(amax, shared, x + c, lines, kTileColumns, length, 1);
        const int64_t row = ragged_ ? group.begin + tile.band.row + r : (tile.band.row + r) / outer;
        put_scale(call_.scales, rows_place_.at(tile.band.group, row, (tile.column + c) / block), of_block);
        std::fill(s->factors + c, s->factors + c + length, of_block.scale);
      }
      for (int64_t i = 0; i < lines; ++i) {
        encode_row(tile, s->values, r + i, false, s, s->codes);
        uint8_t* row = call_.values.as<uint8_t>() + (group.begin + tile.band.row + r + i) * row_bytes(type_, width_);
        put_codes(type_, s->codes, tile.columns, row, tile.column);
      }
    }
  }

  // The form that contracts the axis before it.
  void store_columns(const Tile& tile, const float* values, Scratch* s) {
    const GroupScale shared = scales_[scale_index(tile.band.group, true)];
    const int64_t block = call_.block ? call_.block : kTileRows;
    std::fill(s->factors, s->factors + tile.columns, shared.scale);
    for (int64_t r = 0; r < tile.rows; r += block) {
      const int64_t length = std::min(block, tile.rows - r);
      const float* x = values + r * kTileColumns;
      if (call_.block) column_scales(tile, x, r, length, shared, s);
      for (int64_t i = 0; i < length; ++i) {
        encode_row(tile, values, r + i, true, s, s->codes + (r + i) * kTileColumns);
      }
    }
    put_columns(tile, s);
  }

  void column_scales(const Tile& tile, const float* x, int64_t r, int64_t length, GroupScale shared, Scratch* s) {
    const int64_t outer = call_.block_outer;
    memset(s->amax, 0, sizeof s->amax);
    for (int64_t i = 0; i < length; ++i) isa_.column_amax(x + i * kTileColumns, tile.columns, s->amax);
    const int64_t first = (ragged_ ? groups_[tile.band.group].segment : 0) + tile.band.row + r;
    for (int64_t c = 0; c < tile.columns; c += outer) {
      const int64_t count = std::min(outer, tile.columns - c);
      const uint32_t amax = *std::max_element(s->amax + c, s->amax + c + count);
      // Lines of square blocks run along the source's rows, so that both forms choose the same.
      const BlockScale of_block = outer > 1 ? scale_of(amax, shared, x + c, length, kTileColumns, count, 1)
                                            : scale_of(amax, shared, x + c, 1, 0, length, kTileColumns);
      put_scale(call_.cross_scales, cross_place_.at(tile.band.group, first / call_.block, (tile.column + c) / outer),
                of_block);
      std::fill(s->factors + c, s->factors + c + count, of_block.scale);
    }
  }

  // The tile's codes, in the order of scratch, to where the form has them.
  void put_columns(const Tile& tile, Scratch* s) {
    uint8_t* to = call_.cross_values.as<uint8_t>();
    const QuantizedGroup& group = groups_[tile.band.group];
    if (ragged_ && !call_.transposed) {
      for (int64_t r = 0; r < tile.rows; ++r) {
        put_codes(type_, s->codes + r * kTileColumns, tile.columns,
                  to + (group.segment + tile.band.row + r) * row_bytes(type_, width_), tile.column);
      }
      return;
    }
    const int64_t pitch = ragged_ ? padded_rows() : row_bytes(type_, group.rows);
    const int64_t first = (ragged_ ? group.segment : 0) + tile.band.row;
    for (int64_t c = 0; c < tile.columns; ++c) {
      for (int64_t r = 0; r < tile.rows; ++r) s->line[r] = s->codes[r * kTileColumns + c];
      const int64_t column = (ragged_ ? 0 : tile.band.group * width_) + tile.column + c;
      put_codes(type_, s->line, tile.rows, to + column * pitch, first);
    }
  }

  // What no group owns, as if it were zeros; and the amaxes.
  void finish(Pool* pool) {
    for (int64_t g = 0; call_.amax.present() && g < groups_.count(); ++g) {
      uint32_t amax = amax_[static_cast<size_t>(g)].load();
      if (call_.into_amax.present()) amax = amax_with(amax, call_.into_amax.as<const float>()[g]);
      call_.amax.as<float>()[g] = amax_value(amax);
    }
    if (!ragged_) return;
    const BlockScale none = block_scale<T>(rule_, 0, {1.0f, 1.0f});
    const int64_t rows = call_.rows().dims[0], block = std::max<int64_t>(call_.block, 1);
    if (call_.values.present()) {
      zero_rows(pool, call_.values, groups_.end(), rows);
      for (int64_t c = 0; call_.block && c < divide_up(width_, block); ++c) {
        for (int64_t r = groups_.end(); r < rows; ++r) put_scale(call_.scales, rows_place_.at(0, r, c), none);
      }
    }
    if (!call_.cross_values.present()) return;
    if (!call_.transposed) zero_rows(pool, call_.cross_values, groups_.padded(), padded_rows());
    for (int64_t c = 0; c < width_; ++c) {
      if (call_.transposed) {
        memset(call_.cross_values.as<uint8_t>() + c * padded_rows() + groups_.padded(), 0,
               static_cast<size_t>(padded_rows() - groups_.padded()));
      }
      for (int64_t r = groups_.padded() / block; call_.block && r < padded_rows() / block; ++r) {
        put_scale(call_.cross_scales, cross_place_.at(0, r, c), none);
      }
    }
  }

  const Quantize& call_;
  const Isa& isa_;
  const bool ragged_;
  const QuantizedGroups groups_;
  const int64_t width_;
  const DType type_;
  const StoreRule rule_;
  ScalePlace rows_place_, cross_place_;
  std::vector<std::atomic<uint32_t>> amax_, rotated_amax_;
  std::vector<GroupScale> scales_;  // of a group's two forms
};

template <const Isa* isa>
std::string refuses(const Quantize&, const Target&) {
  return refuses_unless_runs(isa);
}

template <const Isa* isa>
void launch(const Quantize& call, const Context& context) {
  if (call.skip.present() && *call.skip.as<const int32_t>() != 0) return;
  const TensorView& codes = call.values.present() ? call.values : call.cross_values;
  if (codes.dtype == DType::e5m2) return Job<E5M2>(call, pinned_or_best(isa)).run(context.pool);
  if (codes.dtype == DType::e4m3fn) return Job<E4M3>(call, pinned_or_best(isa)).run(context.pool);
  Job<E2M1>(call, pinned_or_best(isa)).run(context.pool);
}

}  // namespace

const Kernel<Quantize> quantize_any_cpu = {"quantize_any_cpu", Arch::cpu,    Kind::reference,
                                           refuses<nullptr>,   no_workspace, launch<nullptr>};
const Kernel<Quantize> quantize_any_cpu_plain = {"quantize_any_cpu_plain", Arch::cpu,    Kind::reference,
                                                 refuses<&kIsaPlain>,      no_workspace, launch<&kIsaPlain>};
#if defined(__x86_64__)
const Kernel<Quantize> quantize_any_cpu_avx2 = {"quantize_any_cpu_avx2", Arch::cpu,    Kind::reference,
                                                refuses<&kIsaAvx2>,      no_workspace, launch<&kIsaAvx2>};
const Kernel<Quantize> quantize_any_cpu_avx512 = {"quantize_any_cpu_avx512", Arch::cpu,    Kind::reference,
                                                  refuses<&kIsaAvx512>,      no_workspace, launch<&kIsaAvx512>};
#endif

}  // namespace grouped
