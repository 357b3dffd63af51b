#include "cc/dispatch/tiles_sm90.h"

namespace grouped {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// One warpgroup stores while the other multiplies. A single slot makes the store slow, which does not matter once the
// other's main loop is longer: measured, the fifth stage gains 1 to 2 % from K = 1024 on and loses 2 % at 768.
// Four-byte results store twice as long and keep their slots.
//
// Where a warpgroup has 128 of 256 columns, operands cost less energy on their way, and the store is not hidden:
// measured, that gains 1 to 5 % from K = 7168 on and loses 3 % at 4096. It must multiply no more columns that do not
// exist than tiles of 192, of whose last one the first 128 may be enough.
const TileChoice& rows_tile_sm90(int64_t contracted, int64_t out_bytes, int64_t cols) {
  constexpr int64_t kHidesStore = 1024, kDwarfsStore = 6144;  // contracted elements
  if (cols <= kNarrow.cols) return kNarrow;
  if (out_bytes != 2 || contracted < kHidesStore) return kManySlots;
  const int64_t by_halves = divide_up(cols, 128) * 128, last = cols % 192;
  const int64_t by_tiles = cols - last + (last == 0 ? 0 : last <= 128 ? 128 : 192);
  return contracted >= kDwarfsStore && by_halves <= by_tiles ? kCooperative : kManyStages;
}

const TileChoice& dact_tile_sm90(int64_t contracted) {
  constexpr int64_t kHidesEpilogue = 4096;  // contracted elements
  return contracted >= kHidesEpilogue ? kDactLong : kDact;
}

namespace {

// Of an H100 or H200 (SXM). A constant, not asked of the device: bits and workspaces follow from it.
constexpr int64_t kMultiprocessors = 132;

// What a block of k costs, in tiles of half the height: such a tile keeps both warpgroups busy.
int64_t half_tiles(int64_t rows, int64_t cols, int tile_cols) {
  return divide_up(rows, kTallRows / 2) * divide_up(cols, tile_cols);
}

}  // namespace

int64_t tall_tiles_sm90(int64_t rows, int64_t cols, int tile_cols) {
  return divide_up(rows, kTallRows) * divide_up(cols, tile_cols);
}

SumCut cut_sums_sm90(int64_t groups, int64_t rows, int64_t cols, int tile_cols) {
  const int64_t straight = half_tiles(rows, cols, tile_cols), other = half_tiles(cols, rows, tile_cols);
  const bool turned = other < straight || (other == straight && cols > rows);
  const int64_t tiles = groups * (turned ? tall_tiles_sm90(cols, rows, tile_cols)  //
                                         : tall_tiles_sm90(rows, cols, tile_cols));
  const int64_t rounds = 2 * tiles <= kMultiprocessors ? 1 : 2, parts = rounds * kMultiprocessors / tiles;
  if (parts <= rounds) return {1, false};
  return {int(parts), turned};
}

}  // namespace grouped
