// Which tile next. A work item is one cluster's: two CTAs take two neighbouring tiles of one group, so that one operand
// tile is loaded once and multicast. The order inside a group is arithmetic (`pair_at`, also tested on the CPU); groups
// are found by a warp that scans the sizes on the device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include "cc/device/common/group_walk.cuh"
#include "cc/device/sm90/ptx.cuh"
#define GROUPED_HOST_DEVICE __host__ __device__
#else
#define GROUPED_HOST_DEVICE
#endif

namespace grouped::sm90 {

constexpr int kTileRows = 128;  // rows of a tile, but for tiles with swapped operands
constexpr int kBlockK = 64;     // contracted elements of one pipeline stage
constexpr int kTailRows = 128;  // tail rows that one work item clears

// Of tiles of even height (pipeline_even.cuh): rows at most, the step of their heights, and columns.
constexpr int kEvenRows = 192, kEvenStep = 16, kEvenCols = 128;

// Pairs of row tiles walked before the next column: 8 pairs are 2048 rows, and 66 clusters then cover 8 columns more or
// less, which keeps both operands of the tiles in flight in L2.
constexpr int kWindowPairs = 8;

struct Tile {
  int row;      // row tile
  int col;      // column tile; may be one past the last
  bool across;  // the pair shares the row tile (two columns) instead of the column tile (two row tiles)
};

// Row tiles go two by two down a column; an odd last row tile goes two columns at once, so no CTA idles.
GROUPED_HOST_DEVICE inline int64_t pair_count(int row_tiles, int col_tiles) {
  return int64_t(row_tiles / 2) * col_tiles + int64_t(row_tiles & 1) * ((col_tiles + 1) / 2);
}

// A launch has fewer items than this; kernels refuse larger problems.
constexpr int64_t kMaxItems = int64_t(1) << 31;

// Tile of CTA `rank` (0 or 1) in pair `item` < pair_count. Full windows of `most` pairs run rows first. The last window
// goes by two columns, its odd row tile right behind the pairs of the same columns, while these are in L2.
GROUPED_HOST_DEVICE inline Tile windowed_pair_at(int item, int row_tiles, int col_tiles, int rank, int most) {
  const int pairs = row_tiles / 2, odd = row_tiles & 1, full = pairs / most, rest = pairs % most;
  const int in_full = full * most * col_tiles;
  if (item < in_full) {
    const int window = item / (most * col_tiles), r = item % (most * col_tiles);
    return {2 * (window * most + r % most) + rank, r / most, false};
  }
  const int r = item - in_full, unit = 2 * rest + odd, u = r / unit, s = r % unit;
  const int straight = 2 * u + 1 < col_tiles ? 2 * rest : rest;  // pairs of this unit; its last column may be single
  if (s < straight) return {2 * (full * most + s % rest) + rank, 2 * u + s / rest, false};
  return {row_tiles - 1, 2 * u + rank, true};
}
GROUPED_HOST_DEVICE inline Tile pair_at(int item, int row_tiles, int col_tiles, int rank) {
  return windowed_pair_at(item, row_tiles, col_tiles, rank, kWindowPairs);
}

// The same tiles, but of two columns a pair always takes both: the rows then cross the L2 cache once.
GROUPED_HOST_DEVICE inline Tile row_pair_at(int item, int row_tiles, int col_tiles, int rank) {
  return col_tiles == 2 ? Tile{item, rank, true} : pair_at(item, row_tiles, col_tiles, rank);
}

// The same tiles, but a pair takes two columns of one row tile wherever there are two: of weights that come as codes
// the rows are what is heavy. The last of an odd number of columns goes two row tiles at once.
GROUPED_HOST_DEVICE inline Tile two_columns_at(int item, int row_tiles, int col_tiles, int rank) {
  constexpr int kWindow = 2 * kWindowPairs;
  const int doubles = col_tiles / 2, across = row_tiles * doubles;
  if (item < across) {
    const int first = item / (kWindow * doubles) * kWindow, r = item - first * doubles;
    const int rows = row_tiles - first < kWindow ? row_tiles - first : kWindow;
    return {first + r % rows, 2 * (r / rows) + rank, true};
  }
  const int r = item - across;
  if (2 * r + 1 == row_tiles) return {2 * r, col_tiles - 1 + rank, true};
  return {2 * r + rank, col_tiles - 1, false};
}

// Rows of each tile of a group of `rows`, but of the last one, where a group's tiles are equally high: a multiple of
// kEvenStep, with which there are as many tiles as with the `most` rows that a tile can have, itself such a multiple.
GROUPED_HOST_DEVICE inline int even_height(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return (rows + tiles * kEvenStep - 1) / (tiles * kEvenStep) * kEvenStep;
}

// One CTA's share of a work item, handed through shared memory to the warps that load, multiply and store.
struct alignas(16) Work {
  enum Kind : int32_t { kDone, kTile, kTail };
  int32_t kind;
  int32_t length;      // contracted elements: K, or the rows of the group
  int32_t row0, col0;  // first row (inside the group) and column of the tile
  int32_t valid_rows;  // rows of the tile that exist: 1 and more, may exceed those of a tile
  int32_t across;      // Tile::across
  int32_t group;
  int32_t rows, end;       // of the group: m_g and o_g + m_g. kTail: end is the first row to clear
  int32_t slice2, slice3;  // last two coordinates of the group's slice in a [G, ...] tensor map
  int32_t part;            // of the sum, where it is cut

  GROUPED_HOST_DEVICE int k_blocks() const { return (length + kBlockK - 1) / kBlockK; }
};
static_assert(sizeof(Work) == 48);

// Extent of the row dimension of a ragged map (map_shapes.h): a group's last row is put right below it.
constexpr int32_t kRagged = 1 << 30;

// Last two coordinates, in a scattered map (map_shapes.h), of the tensor that is `distance` bytes behind the map's
// start, modulo 2^64: in units of 16 bytes and of 2^34.
struct Slice {
  int32_t near, far;
};
GROUPED_HOST_DEVICE inline Slice slice_of(uint64_t distance) {
  return {int32_t(distance >> 4 & (kRagged - 1)), int32_t(distance >> 34)};
}

// Where index `i` is along two arrays that follow one another, the first of `first` elements.
struct OneOfTwo {
  bool second;
  int at;
};
GROUPED_HOST_DEVICE inline OneOfTwo one_of_two(int i, int first) {
  return i < first ? OneOfTwo{false, i} : OneOfTwo{true, i - first};
}

// A sum over a group's rows may be cut into parts, which are added in their order. Blocks of rows, counted from the
// group's first one, go to the parts in turn: parts of long sums are equally long, those of short sums empty but for
// the first, and which rows a part adds follows from the number of parts alone.
GROUPED_HOST_DEVICE inline int blocks_of_part(int blocks, int part, int parts) {
  return (blocks - part + parts - 1) / parts;
}
GROUPED_HOST_DEVICE inline int block_of_part(int block, int part, int parts) { return block * parts + part; }
GROUPED_HOST_DEVICE inline int parts_in_use(int blocks, int parts) { return blocks < parts ? blocks : parts; }

// Item of a launch in which every group has the same `tiles`: those of one part, which share their rows, come together.
struct PartItem {
  int group, part, tile;
};
GROUPED_HOST_DEVICE inline PartItem part_at(int64_t item, int tiles, int parts) {
  const int64_t of_part = item / tiles;
  return {int(of_part / parts), int(of_part % parts), int(item % tiles)};
}

// Items that are sorted by length and drawn from both ends, so that at any time the chip works on a mix of long sums
// (which multiply) and short ones (which mostly store). One counter holds how many were drawn from the front (low half)
// and from the back (high half).
constexpr uint64_t kFromFront = 1, kFromBack = uint64_t(1) << 32;
// Item of a draw that found the counter at `before`; -1 once all are drawn.
GROUPED_HOST_DEVICE inline int64_t drawn_item(uint64_t before, uint64_t step, int64_t items) {
  const int64_t front = uint32_t(before), back = before >> 32;
  if (front + back >= items) return -1;
  return step == kFromFront ? front : items - 1 - back;
}

#if defined(__CUDACC__)

// What the leader (rank 0) of a pair tells its peer: values in order, through a ring of words in the peer's shared
// memory. At `mail`, in both: barriers that say posted (the peer's count) and taken (the leader's), then the words. The
// ring lets the leader run ahead: a round trip per item would take longer than a short sum.
constexpr int kMailDepth = 4;

class Mailbox {
 public:
  static constexpr int kWords = 3 * kMailDepth;

  __device__ Mailbox(uint32_t rank, uint32_t mail) : mail_(mail), leader_(rank == 0) {}
  __device__ bool leader() const { return leader_; }

  // The leader's value, in every lane of both warps.
  __device__ int64_t share(int64_t value) {
    const uint32_t posted = mail_ + 8 * slot_, taken = posted + 8 * kMailDepth, word = taken + 8 * kMailDepth;
    if (leader_) {
      if (threadIdx.x % 32 == 0) {
        ptx::barrier_wait(taken, parity_ ^ 1);
        ptx::store_peer(ptx::peer_address(word, 1), value, ptx::peer_address(posted, 1));
      }
    } else {
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive_expect(posted, sizeof value);
      ptx::barrier_wait(posted, parity_);
      value = ptx::load_shared(word);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive_peer(taken, 0);
    }
    if (++slot_ == kMailDepth) slot_ = 0, parity_ ^= 1;
    return __shfl_sync(~0u, value, 0);
  }

 private:
  uint32_t mail_;
  bool leader_;
  uint32_t slot_ = 0, parity_ = 0;
};

struct FoundItem {
  bool tile;  // false: past the last tile; `item` then counts from there, and `end` is the first tail row
  int item;   // inside the group
  int group, rows, end;
};

// A warp's walk over groups, by pairs of tiles of kRows rows, as far as items are asked for: `find` takes rising ones.
template <int kRows = kTileRows>
class RowScan {
 public:
  __device__ RowScan(const int32_t* sizes, int groups, int64_t max_rows, int col_tiles)
      : sizes_(sizes), groups_(groups), max_rows_(int(max_rows)), col_tiles_(col_tiles), lane_(threadIdx.x % 32) {
    next_ = lane_ < groups_ ? sizes_[lane_] : 0;
  }

  __device__ FoundItem find(uint32_t item) {
    while (item >= walked_.parts && base_ + 32 < groups_) advance();
    if (item >= walked_.parts) return {false, int(item - walked_.parts), 0, 0, walked_.rows};
    const int lane = __popc(__ballot_sync(~0u, items_end_ <= item));  // ends rise: these lanes come first
    return {true, int(item - __shfl_sync(~0u, first_item_, lane)), base_ + lane, __shfl_sync(~0u, rows_, lane),
            __shfl_sync(~0u, end_, lane)};
  }

 private:
  __device__ void advance() {
    base_ += 32;
    const int32_t sizes[1] = {next_};
    const int ahead = base_ + 32 + lane_;
    next_ = ahead < groups_ ? sizes_[ahead] : 0;
    const auto pairs_of = [&](int rows) { return uint32_t(pair_count((rows + kRows - 1) / kRows, col_tiles_)); };
    device::walk_window<1>(sizes, max_rows_, &walked_, nullptr, pairs_of, [&](int, int first, int end, uint32_t items) {
      rows_ = end - first;
      end_ = end;
      first_item_ = items;
      items_end_ = items + pairs_of(rows_);
    });
  }

  const int32_t* sizes_;
  const int groups_;
  const int max_rows_, col_tiles_, lane_;
  int next_, base_ = -32;
  int rows_ = 0, end_ = 0;                     // of this lane's group
  uint32_t first_item_ = 0, items_end_ = 0;    // and its pairs, below kMaxItems
  device::GroupTotals<int, uint32_t> walked_;  // up to the end of the window
};

#endif  // __CUDACC__

}  // namespace grouped::sm90
