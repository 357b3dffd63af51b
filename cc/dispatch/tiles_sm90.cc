#include "cc/dispatch/tiles_sm90.h"

namespace grouped {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kDwarfsStore = 6144;  // contracted elements

// Measured (docs/kernels.md, "Tiles of even height"): groups of 128 rows gain 6 to 29 % (of 8 bits to 35 %), because
// every second one has more and takes two tiles of 128; likewise those of 256, with three, where sums are long (two
// tiles of 128 x 128 read shared memory more often than two of 128 x 192); 512 gain 5 to 8 % in 16 bits. With fewer
// rows loads of weights are what counts.
bool even_tiles(int64_t rows, int64_t groups, int64_t most, int64_t contracted = 0) {
  constexpr int64_t kFewRows = 96, kTwoTiles = 272, kTwoTilesOfLongSums = 256, kLongSums = 1152;
  if (groups == 0) return false;
  const int64_t mean = rows / groups, least = contracted < kLongSums ? kTwoTiles : kTwoTilesOfLongSums;
  return (mean > kFewRows && mean <= kMostEvenRows) || (mean >= least && mean <= most);
}

}  // namespace

// One warpgroup stores while the other multiplies. A single slot makes the store slow, which does not matter once the
// other's main loop is longer: measured, the fifth stage gains 1 to 2 % from K = 1024 on and loses 2 % at 768.
// Four-byte results store twice as long and keep their slots.
//
// Where a warpgroup has 128 of 256 columns, operands cost less energy on their way, and the store is not hidden:
// measured, that gains 1 to 5 % from K = 7168 on and loses 3 % at 4096. It must multiply no more columns that do not
// exist than tiles of 192, of whose last one the first 128 may be enough.
const TileChoice& rows_tile_sm90(int64_t contracted, int64_t out_bytes, int64_t cols) {
  constexpr int64_t kHidesStore = 1024;  // contracted elements
  if (cols <= kNarrow.cols) return kNarrow;
  if (out_bytes != 2 || contracted < kHidesStore) return kManySlots;
  const int64_t by_halves = divide_up(cols, 128) * 128, last = cols % 192;
  const int64_t by_tiles = cols - last + (last == 0 ? 0 : last <= 128 ? 128 : 192);
  return contracted >= kDwarfsStore && by_halves <= by_tiles ? kCooperative : kManyStages;
}

bool even_tiles_sm90(int64_t rows, int64_t groups, int64_t contracted, int64_t cols) {
  // The fewer ends of groups there are, the more a last tile counts of whose columns half do not exist.
  constexpr int64_t kAnyColumns = 768, kWholeTiles = 2304, kBesideCooperative = 1536;
  if (cols <= kNarrow.cols) return false;
  const int64_t whole = contracted < kDwarfsStore ? kWholeTiles : kBesideCooperative;
  return even_tiles(rows, groups, cols % kEvenTileCols == 0 ? whole : kAnyColumns, contracted);
}

bool even_tiles_with_activation_sm90(int64_t rows, int64_t groups) { return even_tiles(rows, groups, 768); }

bool even_fp8_tiles_sm90(int64_t rows, int64_t groups) { return even_tiles(rows, groups, kMostEvenRows); }

// Measured (docs/kernels.md, "Weight gradients of short sums"): sums of 512 rows gain 1 to 4 % if they are about
// equally long, those of 128, of 256 and of 1 024 rows change by up to 2 %, either way. The bounds are between these
// points.
bool many_stages_for_sums_sm90(int64_t rows, int64_t groups) {
  constexpr int64_t kShortest = 320, kLongest = 768;
  if (groups == 0) return false;
  const int64_t mean = rows / groups;
  return mean >= kShortest && mean <= kLongest;
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
  const bool transposed = other < straight || (other == straight && cols > rows);
  const int64_t tiles = groups * (transposed ? tall_tiles_sm90(cols, rows, tile_cols)  //
                                             : tall_tiles_sm90(rows, cols, tile_cols));
  const int64_t rounds = 2 * tiles <= kMultiprocessors ? 1 : 2, parts = rounds * kMultiprocessors / tiles;
  if (parts <= rounds) return {1, false};
  return {int(parts), transposed};
}

}  // namespace grouped
