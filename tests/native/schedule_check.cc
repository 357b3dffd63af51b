// The arithmetic that the wgmma kernels share, by brute force and without a GPU: which tile a CTA computes, which
// address a map's coordinates name, where an element is in shared memory and where the descriptors look for it.
// test_schedule.py compiles and runs this; each line of output is one property that held.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cc/api/tensor.h"
#include "cc/device/sm90/layout.cuh"
#include "cc/device/sm90/layout_codes.cuh"
#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/layout_pieces.cuh"
#include "cc/device/sm90/layout_swapped.cuh"
#include "cc/device/sm90/layout_tf32.cuh"
#include "cc/device/sm90/map_shapes.h"
#include "cc/device/sm90/schedule.cuh"
#include "cc/dispatch/tiles_sm90.h"
#include "cc/math/code_pairs.h"

namespace {

using namespace grouped;
using namespace grouped::sm90;

#define EXPECT(condition, ...)                                    \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::puts("");                                              \
      std::exit(1);                                               \
    }                                                             \
  } while (0)

using Long = long long;

// ---- tiles ----

void neighbours(Tile a, Tile b) {
  EXPECT(a.across == b.across, "one pair, two ways");
  EXPECT(a.across ? a.row == b.row && b.col == a.col + 1 : b.row == a.row + 1 && a.col == b.col,
         "(%d, %d) and (%d, %d)", a.row, a.col, b.row, b.col);
}

// Up to `most_across` columns of tiles a pair may take two, in any row tile.
template <class PairAt>
void every_tile_once(PairAt pair_at, int most_across) {
  for (int row_tiles = 0; row_tiles < 45; ++row_tiles) {
    for (int col_tiles = 1; col_tiles < 20; ++col_tiles) {
      const int pitch = col_tiles + 1;
      std::vector<int> seen(size_t(row_tiles) * pitch);
      for (int item = 0; item < pair_count(row_tiles, col_tiles); ++item) {
        const Tile pair[2] = {pair_at(item, row_tiles, col_tiles, 0), pair_at(item, row_tiles, col_tiles, 1)};
        neighbours(pair[0], pair[1]);
        EXPECT(!pair[0].across || col_tiles <= most_across || pair[0].row == row_tiles - 1,
               "only an odd last row tile goes across");
        EXPECT(pair[0].col < col_tiles, "the first of a pair exists");
        for (const Tile& t : pair) {
          EXPECT(t.row >= 0 && t.row < row_tiles && t.col >= 0 && t.col <= col_tiles, "%d x %d, item %d: (%d, %d)",
                 row_tiles, col_tiles, item, t.row, t.col);
          ++seen[size_t(t.row) * pitch + t.col];
        }
      }
      for (int row = 0; row < row_tiles; ++row) {
        for (int col = 0; col < col_tiles; ++col) {
          EXPECT(seen[size_t(row) * pitch + col] == 1, "%d x %d: tile (%d, %d) comes %d times", row_tiles, col_tiles,
                 row, col, seen[size_t(row) * pitch + col]);
        }
      }
    }
  }
}

// Up to the number of items that kernels take; compiled with checks for signed overflow.
void large_shapes(std::mt19937_64& rng) {
  int tried = 0;
  while (tried < 200000) {
    const int row_tiles = 1 + int(rng() >> (40 + rng() % 23)), col_tiles = 1 + int(rng() >> (40 + rng() % 23));
    const int64_t items = pair_count(row_tiles, col_tiles);
    if (items >= kMaxItems) continue;
    const int64_t tiles = int64_t(row_tiles) * col_tiles;
    EXPECT(2 * items >= tiles && 2 * items <= tiles + 1, "%d x %d in %lld pairs", row_tiles, col_tiles, Long(items));
    const int item = int(tried % 3 ? rng() % uint64_t(items) : uint64_t(items) - 1);
    const Tile a = pair_at(item, row_tiles, col_tiles, 0), b = pair_at(item, row_tiles, col_tiles, 1);
    neighbours(a, b);
    EXPECT(a.row >= 0 && b.row < row_tiles && a.col >= 0 && a.col < col_tiles, "%d x %d, item %d: (%d, %d)", row_tiles,
           col_tiles, item, a.row, a.col);
    ++tried;
  }
  std::puts("shapes up to 2^31 pairs stay in range");
}

void every_draw_once(std::mt19937_64& rng) {
  for (int items : {1, 2, 7, 100, 4096}) {
    for (int run = 0; run < 50; ++run) {
      uint64_t counter = 0;
      std::vector<int> seen(items);
      for (int i = 0; i < items + 264; ++i) {  // each of 132 CTAs asks once more
        const uint64_t step = rng() % 3 ? kFromFront : kFromBack;
        const int64_t item = drawn_item(counter, step, items);
        counter += step;
        EXPECT((item >= 0) == (i < items), "draw %d of %d found item %lld", i, items, Long(item));
        if (item >= 0) EXPECT(item < items && ++seen[item] == 1, "item %lld of %d", Long(item), items);
      }
    }
  }
  std::puts("draws from both ends take every item once");
}

// ---- sums in parts ----

// Every block of every tile's sum goes to one part, whatever the other groups are; parts are as long as one another,
// and those without blocks come last. Blocks of k are in their order inside a part, as parts are in add_parts.
void every_block_once(std::mt19937_64& rng) {
  for (int run = 0; run < 300; ++run) {
    const int groups = 1 + int(rng() % 5), parts = 1 + int(rng() % (run % 3 ? 8 : 132));
    const int row_tiles = 2 * (1 + int(rng() % 12)), col_tiles = 1 + int(rng() % 5);  // pairs of row tiles, as there
    const int tiles = int(pair_count(row_tiles, col_tiles));
    std::vector<int> blocks(groups);
    for (int& count : blocks) count = rng() % 4 ? int(rng() % 40) : int(rng() % 3);
    std::vector<std::vector<int>> seen(groups);  // by group: times of (tile, block)
    for (int g = 0; g < groups; ++g) seen[g].resize(size_t(tiles) * blocks[g]);
    std::vector<int> at(size_t(row_tiles) * col_tiles);
    for (int64_t item = 0; item < int64_t(tiles) * parts * groups; ++item) {
      const PartItem found = part_at(item, tiles, parts);
      EXPECT(found.group >= 0 && found.group < groups, "item %lld: group %d", Long(item), found.group);
      EXPECT(found.part >= 0 && found.part < parts, "item %lld: part %d", Long(item), found.part);
      EXPECT(item == (int64_t(found.group) * parts + found.part) * tiles + found.tile, "item %lld", Long(item));
      const Tile tile = pair_at(found.tile, row_tiles, col_tiles, 0);
      EXPECT(!tile.across && tile.row % 2 == 0, "tile %d is no pair of row tiles", found.tile);
      ++at[size_t(tile.row) * col_tiles + tile.col];
      const int count = blocks_of_part(blocks[found.group], found.part, parts);
      EXPECT((count > 0) == (found.part < parts_in_use(blocks[found.group], parts)), "part %d of %d", found.part,
             parts);
      int before = -1;
      for (int b = 0; b < count; ++b) {
        const int block = block_of_part(b, found.part, parts);
        EXPECT(block > before && block < blocks[found.group], "block %d of part %d", block, found.part);
        ++seen[found.group][size_t(found.tile) * blocks[found.group] + block];
        before = block;
      }
    }
    for (int row = 0; row < row_tiles; row += 2) {
      for (int col = 0; col < col_tiles; ++col) {
        const int times = at[size_t(row) * col_tiles + col];
        EXPECT(times == parts * groups, "tile (%d, %d) comes %d times in %d parts", row, col, times, parts * groups);
      }
    }
    for (const auto& of_group : seen) {
      for (int times : of_group) EXPECT(times == 1, "a block of k is added %d times", times);
    }
  }
  for (int parts = 1; parts <= 132; ++parts) {
    for (int blocks = 0; blocks < 600; ++blocks) {
      const int longest = blocks_of_part(blocks, 0, parts), shortest = blocks_of_part(blocks, parts - 1, parts);
      EXPECT(longest - shortest <= 1, "%d blocks in %d parts", blocks, parts);
      EXPECT(blocks == 0 || longest + parts_in_use(blocks, parts) - 1 <= blocks, "a longer chain of additions");
      EXPECT(parts > 1 || longest == blocks, "one part is the whole sum");
    }
  }
  std::puts("every block of k is added once, in parts that depend on its group's length alone");
}

void cuts(std::mt19937_64& rng) {
  constexpr int kChip = 132;
  for (int tile_cols : {96, 128}) {
    for (int run = 0; run < 200000; ++run) {
      const int64_t groups = 1 + (rng() % 3 ? 0 : int64_t(rng() % 300));
      const int64_t rows = 4 + 4 * int64_t(rng() % 2000), cols = 4 + 4 * int64_t(rng() % 2000);
      const SumCut cut = cut_sums_sm90(groups, rows, cols, tile_cols),
                   other = cut_sums_sm90(groups, cols, rows, tile_cols);
      EXPECT(cut.parts == other.parts, "%lld x %lld: layouts have other parts", Long(rows), Long(cols));
      EXPECT(cut.parts == 1 || rows == cols || cut.transposed != other.transposed,
             "%lld x %lld: layouts have other tiles", Long(rows), Long(cols));
      EXPECT(cut.parts > 1 || !cut.transposed, "whole sums are stored as they come");
      const int64_t straight = groups * tall_tiles_sm90(rows, cols, tile_cols);
      const int64_t tiles = cut.transposed ? groups * tall_tiles_sm90(cols, rows, tile_cols) : straight;
      EXPECT(cut.parts > 1 || straight > kChip / 2, "%lld tiles are whole", Long(tiles));
      if (cut.parts == 1) continue;
      const int64_t items = tiles * cut.parts, rounds = (items + kChip - 1) / kChip;
      EXPECT(rounds <= 2, "%lld items", Long(items));  // so the partial sums take at most 2 x 132 tiles of memory
      EXPECT(3 * items >= 2 * rounds * kChip, "%lld items in %lld rounds leave much of the chip idle", Long(items),
             Long(rounds));
    }
  }
  struct {
    int64_t groups, rows, cols;
    int tile_cols, parts;
    bool transposed;
  } const known[] = {
      {1, 2048, 128, 96, 6, true},    {1, 128, 2048, 96, 6, false},  {1, 2048, 128, 128, 16, false},
      {1, 128, 2048, 128, 16, true},  {1, 7168, 256, 96, 3, true},   {1, 2880, 32, 96, 11, false},
      {8, 4096, 14336, 96, 1, false}, {1, 4096, 4096, 96, 1, false}, {128, 2048, 1536, 96, 1, false},
      {256, 32, 32, 96, 1, false},
  };
  for (const auto& k : known) {
    const SumCut cut = cut_sums_sm90(k.groups, k.rows, k.cols, k.tile_cols);
    EXPECT(cut.parts == k.parts && cut.transposed == k.transposed, "%lld x %lld x %lld: %d parts%s", Long(k.groups),
           Long(k.rows), Long(k.cols), cut.parts, cut.transposed ? ", transposed" : "");
  }
  std::puts("few tiles are cut into parts that fill the chip, the same way in both layouts");
}

// ---- addresses ----

constexpr uint64_t kMaxStride = uint64_t(1) << 40, kMaxExtent = uint64_t(1) << 32;  // of tensor maps

uint64_t address(const MapShape& map, uint64_t base, DType dtype, const int32_t (&at)[4]) {
  uint64_t a = base + uint64_t(at[0]) * dtype_bytes(dtype);
  for (int d = 1; d < 4; ++d) a += map.strides[d - 1] * uint64_t(at[d]);  // modulo 2^64
  return a;
}
bool inside(const MapShape& map, const int32_t (&at)[4]) {
  for (int d = 0; d < 4; ++d) {
    if (at[d] < 0 || uint64_t(at[d]) >= map.dims[d]) return false;
  }
  return true;
}
void encodable(const MapShape& map) {
  for (uint64_t extent : map.dims)
    EXPECT(extent >= 1 && extent <= kMaxExtent, "extent %llu", (unsigned long long)extent);
  for (uint64_t stride : map.strides) {
    EXPECT(stride % 16 == 0 && stride < kMaxStride, "stride %llu", (unsigned long long)stride);
  }
}

void ragged_addresses() {
  for (DType dtype : {DType::f32, DType::bf16, DType::e4m3fn}) {
    for (int64_t cols : {16, 64, 2880, 28672, kRagged - 16}) {
      const MapShape map = ragged_shape(cols, dtype);
      encodable(map);
      const uint64_t pitch = uint64_t(cols) * dtype_bytes(dtype);
      for (uint64_t base : {uint64_t(0x10), uint64_t(0x7f0123456780), ~uint64_t(0) - 0xff}) {
        for (int64_t start : {0, 5, 1000000, kRagged - 70001}) {
          for (int64_t rows : {1, 127, 1000, 70000}) {
            for (int64_t r : {int64_t(0), rows / 2, rows - 1, rows, rows + 63, rows + 127}) {
              const int32_t at[4] = {3, int32_t(kRagged - rows + r), kRagged, int32_t(start + rows)};
              EXPECT(inside(map, at) == (r < rows), "row %lld of %lld", Long(r), Long(rows));
              const uint64_t wanted = base + pitch * uint64_t(start + r) + 3 * uint64_t(dtype_bytes(dtype));
              EXPECT(address(map, base, dtype, at) == wanted,
                     "row %lld of a group of %lld rows from row %lld, %lld columns", Long(r), Long(rows), Long(start),
                     Long(cols));
            }
          }
        }
      }
    }
  }
  std::puts("ragged coordinates name the group's rows, those past its end are outside");
}

void packed_addresses() {
  for (int64_t groups : {1, 2, 65535}) {
    const MapShape map = packed_shape(groups, 2880, 5760, DType::bf16);
    encodable(map);
    for (int64_t g : {int64_t(0), groups - 1, groups}) {
      const int32_t at[4] = {5759, 2879, int32_t(g), 0};
      EXPECT(inside(map, at) == (g < groups), "group %lld of %lld", Long(g), Long(groups));
      const uint64_t wanted = 64 + 2 * (uint64_t(g) * 2880 * 5760 + 2879 * 5760 + 5759);
      EXPECT(address(map, 64, DType::bf16, at) == wanted, "group %lld of %lld", Long(g), Long(groups));
    }
  }
  std::puts("packed coordinates name the group's slice");
}

void scattered_addresses(std::mt19937_64& rng) {
  const MapShape map = scattered_shape(320, 256, DType::f32);
  encodable(map);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t base = rng() >> (rng() % 40) & ~uint64_t(15), there = rng() >> (rng() % 40) & ~uint64_t(15);
    const Slice slice = slice_of(there - base);
    const int32_t at[4] = {255, 319, slice.near, slice.far};
    EXPECT(inside(map, at), "distance %llx", (unsigned long long)(there - base));
    EXPECT(address(map, base, DType::f32, at) == there + 4 * (319 * 256 + 255), "%llx from %llx",
           (unsigned long long)there, (unsigned long long)base);
  }
  std::puts("scattered slices reach any address from any other");
}

// ---- shared memory ----

// What copy engine and wgmma do.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }
uint32_t swizzled_64(uint32_t address) { return address ^ (address >> 3 & 0x30); }

// Where the copy engine puts 16-bit element (n, k) of a tile: boxes of 128-byte (or 64-byte) rows, one behind the
// other.
uint32_t placed(Major major, uint32_t tile, int n, int k) {
  if (major == Major::mn32) return swizzled_64(tile + n / 32 * 64 * 64 + k * 64 + 2 * (n % 32));
  const uint32_t block = n / 64, row = major == Major::k ? n % 64 : k, byte = 2 * (major == Major::k ? k : n % 64);
  return swizzled(tile + block * kBlockBytes + row * 128 + byte);
}
// Where wgmma looks for element (n, k), k < 16, given a descriptor: cores of 8 x 16 bytes, in atoms of 8 x 128 bytes or
// 8 x 64.
uint32_t read_at(Major major, uint64_t descriptor, int n, int k) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, leading = uint32_t(descriptor >> 16 & 0x3fff) << 4,
                 stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  EXPECT(descriptor >> 62 == (major == Major::mn32 ? 2 : 1), "swizzle");
  if (major == Major::k) return swizzled(start + n / 8 * stride + n % 8 * 128 + 2 * k);
  if (major == Major::mn32) return swizzled_64(start + n / 32 * leading + k / 8 * stride + k % 8 * 64 + 2 * (n % 32));
  return swizzled(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + 2 * (n % 64));
}

void descriptors() {
  for (Major major : {Major::k, Major::mn, Major::mn32}) {
    for (uint32_t tile : {0u, 1024u, 16384u, 200u * 1024}) {
      const uint64_t first = descriptor(tile | 5u << 24, major);  // of CTA 5 in a cluster
      for (int n = 0; n < 192; ++n) {
        for (int k = 0; k < kBlockK; ++k) {
          const uint64_t step = first + uint64_t(k / 16) * descriptor_step(major);
          EXPECT(read_at(major, step, n, k % 16) == placed(major, tile, n, k), "element (%d, %d), major %d, tile %u", n,
                 k, int(major), tile);
        }
      }
    }
  }
  std::puts("descriptors find every element where the copy engine puts it");
}

void slots() {
  for (int element : {2, 4}) {
    std::vector<int> seen(kSlotBytes);
    const int cols = 128 / element;
    for (int lane = 0; lane < 32; ++lane) {
      for (int j = 0; j < cols / 8; ++j) {
        for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8, columns 8 j + 2 (lane % 4)
          const int row = lane / 4 + 8 * half, col = 8 * j + 2 * (lane % 4);
          uint32_t to;
          if (element == 4) {
            to = slot_of_pair(lane, j) + half * 8 * 128;
          } else {  // stmatrix: matrix 2 (j % 2) + half of a call, whose rows are addressed by lanes 8 matrix + row % 8
            const int matrix = 2 * (j % 2) + half, addressing = 8 * matrix + row % 8;
            to = slot_of_matrix(addressing, j & ~1) + 4 * (lane % 4);
          }
          EXPECT(to == swizzled(row * 128 + col * element), "row %d, column %d, %d bytes: %u", row, col, element, to);
          for (int b = 0; b < 2 * element; ++b) ++seen[to + b];
        }
      }
    }
    for (int b = 0; b < kSlotBytes; ++b) EXPECT(seen[b] == 1, "byte %d is written %d times", b, seen[b]);
  }
  std::vector<int> seen(kNarrowSlotBytes);
  for (int row = 0; row < 16; ++row) {
    for (int chunk = 0; chunk < 4; ++chunk) {
      const uint32_t to = narrow_slot_of(row, chunk);
      EXPECT(to == swizzled_64(row * 64 + chunk * 16), "row %d, chunk %d of a narrow slot: %u", row, chunk, to);
      EXPECT(chunk > 1 || narrow_slot_of(row, chunk + 2) == (to ^ 32), "row %d, two chunks from %d", row, chunk);
      ++seen[to];
    }
  }
  for (int b = 0; b < kNarrowSlotBytes; ++b) EXPECT(seen[b] == (b % 16 == 0), "byte %d starts %d chunks", b, seen[b]);
  std::puts("lanes fill a slot as the copy engine reads it");
}

// ---- tf32 ----

// Where the copy engine puts fp32 element (r, k) of a tile.
uint32_t placed_tf32(Major major, int r, int k) {
  return major == Major::k ? swizzled(r * 128 + 4 * k) : swizzled(r / 32 * kBoxBytes + k * 128 + 4 * (r % 32));
}
// The lanes of one access, each of `bytes`, are on different banks wherever that is possible.
void spread_over_banks(const std::vector<uint32_t>& addresses, uint32_t bytes) {
  for (size_t first = 0; first < 32; first += 128 / bytes) {
    std::vector<bool> used(128);
    for (size_t lane = first; lane < first + 128 / bytes; ++lane) {
      const uint32_t bank = addresses[lane] % 128;
      EXPECT(!used[bank], "lane %d meets another", int(lane));
      used[bank] = true;
    }
  }
}

// Fragments of the lhs in registers and pieces of the rhs in shared memory meet at the same k, each k once.
void tf32_operands() {
  for (int pair = 0; pair < 3; ++pair) {
    const Major lhs = pair == 2 ? Major::mn : Major::k, rhs = pair == 0 ? Major::k : Major::mn;
    const bool spread = lhs == Major::mn;
    std::vector<int> times(kTf32K);
    for (int step = 0; step < kTf32Steps; ++step) {
      for (int i = 0; i < 4; ++i) {
        for (uint32_t warp = 0; warp < 4; ++warp) {
          std::vector<uint32_t> words(32);
          for (uint32_t lane = 0; lane < 32; ++lane) {
            const int row = 16 * warp + lane / 4 + 8 * (i % 2), k = k_of_piece(spread, 2 * step + i / 2, lane % 4);
            if (lhs == Major::k) {  // ldmatrix: lanes 8i and on address the rows of matrix i
              words[lane] = lhs_matrices(lhs_base(lhs, warp, 8 * i + lane / 4), step) + 4 * (lane % 4);
            } else {
              words[lane] = lhs_element(lhs_base(lhs, warp, lane), step, i);
            }
            EXPECT(words[lane] == placed_tf32(lhs, row, k), "row %d, k %d: %u", row, k, words[lane]);
            if (row == 0) ++times[k];
          }
          spread_over_banks(words, 4);
        }
      }
    }
    for (int k = 0; k < kTf32K; ++k) EXPECT(times[k] == 1, "k %d takes part %d times", k, times[k]);
    for (uint32_t warp = 0; warp < 4; ++warp) {
      for (int k = 0; k < kTf32K; ++k) {
        std::vector<uint32_t> from(32);
        for (uint32_t lane = 0; lane < 32; ++lane) {
          const uint32_t column = 32 * warp + lane;
          from[lane] = rhs == Major::k ? raw_k_major(column, k / 4) : raw_mn_major(column, k);
          const uint32_t word = from[lane] + (rhs == Major::k ? 4 * (k % 4) : 0);
          EXPECT(word == placed_tf32(rhs, column, k), "column %u, k %d: %u", column, k, word);
          EXPECT(word / kBoxBytes == warp && finished_column(column) / kBoxBytes == warp,
                 "transposed in place by a warp");
        }
        spread_over_banks(from, rhs == Major::k ? 16 : 4);
      }
    }
  }
  std::vector<uint32_t> to(32);
  for (uint32_t lane = 0; lane < 32; ++lane) to[lane] = finished_column(lane);
  spread_over_banks(to, 16);
  std::puts("fp32 operands meet at the same k and cross no banks on their way");
}

// wgmma finds 8 k of a column where they were written: 16-byte rows, eight to a core, cores by two strides.
void tf32_descriptors() {
  for (uint32_t start : {32768u, 200u * 1024}) {
    for (uint32_t distance : {kPieceBytes, 12288u, 16384u}) {
      const uint64_t d = plain_descriptor(start, distance);
      const uint32_t leading = uint32_t(d >> 16 & 0x3fff) << 4, stride = uint32_t(d >> 32 & 0x3fff) << 4;
      EXPECT((uint32_t(d & 0x3fff) << 4) == start && d >> 62 == 0, "no swizzle");
      for (uint32_t column = 0; column < 128; ++column) {
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t found = start + column / 8 * stride + column % 8 * 16 + half * leading;
          EXPECT(found == start + finished_column(column) + half * distance, "column %u, four k %u", column, half);
        }
      }
    }
  }
  std::puts("tf32 descriptors find every finished piece");
}

// ---- 8-bit codes ----

// Segments follow one another in whole blocks and fit the axis that the contract gives them; of P = segment * floor((M
// + G (segment - 1)) / segment) positions the groups never need more.
void segments(std::mt19937_64& rng) {
  for (int run = 0; run < 20000; ++run) {
    const int64_t groups = 1 + int64_t(rng() % 40), room = int64_t(rng() % 3000);
    const int64_t padded = (room + groups * (kBlockCodes - 1)) / kBlockCodes * kBlockCodes;
    int64_t left = room, at = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t rows = rng() % 3 ? int64_t(rng() % uint64_t(left + 1)) : 0;
      left -= rows;
      EXPECT(at % kBlockCodes == 0, "a segment starts at %lld", Long(at));
      const int64_t codes = segment_codes(rows);
      EXPECT(codes >= rows && codes - rows < kBlockCodes && (rows != 0 || codes == 0), "%lld rows", Long(rows));
      const Work work{Work::kTile, elements_of_codes(int32_t(rows)), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
      EXPECT(work.k_blocks() * kBlockCodes == codes, "%lld codes in %d blocks", Long(codes), work.k_blocks());
      EXPECT(kCodesPerElement * work.length >= rows && kCodesPerElement * (work.length - 1) < rows,
             "%lld rows in a sum of %d elements", Long(rows), work.length);
      at += codes;
    }
    EXPECT(at <= padded, "%lld positions of %lld", Long(at), Long(padded));
  }
  std::puts("segments of codes are whole blocks and fit the padded axis");
}

void stage_scales(const TileChoice& tile, int rows) {
  std::vector<int> seen(stage_scale_bytes(rows, tile.cols));
  for (int row = 0; row < rows; ++row) ++seen[stage_row(row)];
  for (int col = 0; col < tile.cols; ++col) ++seen[stage_column(rows, col)];
  for (size_t b = 0; b < seen.size(); ++b) EXPECT(seen[b] == (b % 4 == 0), "byte %d starts %d scales", int(b), seen[b]);
  EXPECT(stage_column(rows, 0) % 16 == 0 && stage_scale_bytes(rows, tile.cols) % 16 == 0,
         "columns are read 16 bytes at once");
  for (int col0 = 0; col0 < 64 * tile.cols; col0 += tile.cols) {
    for (int part = 0; part < tile.cols / kPartCols; ++part) {
      const int first = col0 + kPartCols * part, last = first + kPartCols - 1;
      EXPECT(first / kBlockCodes == last / kBlockCodes, "columns %d to %d have two scales", first, last);
    }
  }
  const int shared = tile.stages * ((rows + tile.cols) * 128 + stage_scale_bytes(rows, tile.cols)) +
                     rows / 16 * tile.slots * kSlotBytes + kSlotBytes;
  EXPECT(shared + 2048 < 227 * 1024, "%d bytes beside barriers and items", shared);
  std::puts("scales of a stage have places of their own, and parts of a tile one scale each");
}

// ---- codes of weights, bf16 rows ----

double value_of(bool nibbles, int code) {
  const int exponent = nibbles ? code >> 1 & 3 : code >> 3 & 15, mantissa = nibbles ? code & 1 : code & 7;
  const int bits = nibbles ? 1 : 3, bias = nibbles ? 1 : 7;
  const double fraction = std::ldexp(mantissa, -bits) + (exponent ? 1 : 0);
  return (code >> (nibbles ? 3 : 7) ? -1 : 1) * std::ldexp(fraction, (exponent ? exponent : 1) - bias);
}
double value_of_bf16(uint32_t bits) {
  const int exponent = bits >> 7 & 255;
  const double fraction = (bits & 127) / 128.0 + (exponent ? 1 : 0);
  return (bits >> 15 ? -1 : 1) * std::ldexp(fraction, (exponent ? exponent : 1) - 127);
}

// Every code of a stage reaches the fragments as its value, at the place that meets its k of the rows.
template <bool kNibbles, int kSlabs>
void codes_meet_rows(std::mt19937_64& rng) {
  using C = Codes<kNibbles>;
  using Stage = StageLayout<kNibbles, Scale::e8m0, 256, 3, kSlabs>;
  constexpr int kLoadBytes = 16, kCodes = kNibbles ? 16 : 256, kPartsALoad = 4 / C::kLoads, kDepth = kSlabs * kSlabK;
  static_assert(Stage::kCodeBytes % 1024 == 0 && Stage::kBytes % 1024 == 0, "swizzles begin at multiples of 1 KiB");
  std::vector<int> codes(16 * kDepth);
  std::vector<uint8_t> stage(Stage::kBytes);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      const int code = codes[row * kDepth + k] = int(rng() % kCodes), in_slab = k % kSlabK;
      const uint32_t at = row * C::kRowBytes + (kNibbles ? in_slab / 2 : in_slab);
      const uint32_t chunk = kNibbles ? at >> 7 & 3 : at >> 7 & 7;
      stage[k / kSlabK * Stage::kCodeBytes + (at ^ chunk << 4)] |= kNibbles ? code << (k % 2 * 4) : code;
    }
  }
  for (int slab = 0; slab < kSlabs; ++slab) {
    const uint32_t rows = Stage::kRowsAt + slab * Stage::kRowsBytes;
    EXPECT((slab + 1) * Stage::kCodeBytes <= Stage::kRowsAt, "codes of slab %d end under the rows", slab);
    EXPECT(rows + Stage::kRowsBytes <= uint32_t(Stage::kScalesAt), "rows of slab %d end under the scales", slab);
    const uint64_t d = rows_descriptor(rows);
    const uint32_t start = uint32_t(d & 0x3fff) << 4, leading = uint32_t(d >> 16 & 0x3fff) << 4;
    const uint32_t stride = uint32_t(d >> 32 & 0x3fff) << 4;
    for (int r = 0; r < 16; r += 8) {
      for (int part = 0; part < 4; ++part) {
        std::vector<uint32_t> from(32);
        for (int lane = 0; lane < 32; ++lane) {
          const int row = lane / 4 + r, q = lane % 4;
          from[lane] = (slab * Stage::kCodeBytes + C::place(row, q)) ^ (16 * (part / kPartsALoad));
          EXPECT(C::place(row, q) == C::place(row % 8, q) + r * C::kRowBytes, "rows 8 apart have the same swizzle");
          uint32_t words[4] = {}, pairs[4];
          for (int byte = 0; byte < kLoadBytes; ++byte) {
            words[byte / 4] |= uint32_t(stage[from[lane] + byte]) << (byte % 4 * 8);
          }
          C::pairs(words, part % kPartsALoad, pairs);
          for (int i = 0; i < 4; ++i) {
            for (int h = 0; h < 2; ++h) {
              const int k = slab * kSlabK + 32 * q + 8 * part + C::k_of_pair(i, h), code = codes[row * kDepth + k];
              const double found = std::ldexp(value_of_bf16(pairs[i] >> (16 * h) & 0xffff), C::kBias);
              EXPECT(found == value_of(kNibbles, code), "row %d, k %d, code %d: %g", row, k, code, found);
              // Columns 2 q + h and 8 on of step 2 part + i / 2, which the descriptor finds in piece i % 2.
              for (uint32_t n = 0; n < 24; ++n) {
                const uint32_t step = 2 * part + i / 2, column = 2 * q + h;
                const uint32_t at =
                    start + step * (kRowStep << 4) + i % 2 * leading + n / 8 * stride + n % 8 * 16 + column * 2;
                const uint32_t put = rows + n / 8 * kRowBlockBytes + row_pair(part, int(n % 8), q, i) + 2 * h;
                EXPECT(at == put, "row %u at k %d: %u, put at %u", n, k, at, put);
              }
            }
          }
        }
        spread_over_banks(from, kLoadBytes);
      }
    }
  }
}

// What ptx::choose_bytes does.
uint32_t chosen_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t of = selector >> (4 * i) & 15, byte = (uint64_t{high} << 32 | low) >> (8 * (of & 7)) & 0xff;
    found |= (of & 8 ? byte >> 7 ? 0xffu : 0u : byte) << (8 * i);
  }
  return found;
}

// A lane finds the scales of its k in the words that were copied, wherever a line starts.
template <Scale kScale, int kSlabs>
void scales_of_lanes(std::mt19937_64& rng) {
  constexpr uint32_t kBytes = scale_bytes_of_slab(kScale) * kSlabs, kStride = scale_words(kScale, kSlabs);
  static_assert(kStride * 4 >= kBytes + (kScale == Scale::f32 ? 0 : 4), "rows have room for one word more");
  static_assert(kBytes % 8 != 0 || kStride % 2 == 0, "copies of 8 bytes are aligned");
  for (uint32_t start = 0; start < 4; ++start) {
    for (bool whole : {false, true}) {  // lines at multiples of 4: only a stage's own bytes are copied
      if (whole && start != 0) continue;
      for (bool large : {false, true}) {
        std::vector<uint8_t> line(4 + kBytes * 3 + 8);
        for (uint8_t& code : line) code = uint8_t(rng() % (large ? 256 : 128));
        const uint32_t stage = 1, from = start + stage * kBytes, words = kBytes / 4 + !whole;
        std::vector<uint32_t> copied(kStride, 0xffffffffu);
        for (uint32_t i = 0; i < words; ++i) std::memcpy(&copied[i], &line[from / 4 * 4 + 4 * i], 4);
        for (int slab = 0; slab < kSlabs; ++slab) {
          for (uint32_t q = 0; q < 4; ++q) {
            const uint32_t word = scale_word(kScale, slab, q), selector = scale_selector(kScale, start, q);
            EXPECT(word + 1 < kStride, "word %u of %u", word, kStride);
            const uint32_t found = chosen_bytes(copied[word], copied[word + 1], selector);
            // Blocks of 32 k or, with E4M3, of 16; a lane has 32 k from 32 q on.
            const uint8_t* at = &line[from + scale_bytes_of_slab(kScale) * slab + (kScale == Scale::e4m3 ? 2 * q : q)];
            if (kScale == Scale::e4m3) {
              EXPECT((found & 0xffff) == (at[0] | uint32_t{at[1]} << 8), "slab %d, lane %u: %x", slab, q, found);
            } else {
              EXPECT((found & 0xff) == at[0], "slab %d, lane %u: %x", slab, q, found);
              EXPECT(large || found == at[0], "slab %d, lane %u: %x where no scale is large", slab, q, found);
            }
          }
        }
      }
    }
  }
  std::vector<bool> used(32);
  for (uint32_t row = 0; row < 8; ++row) {  // of one access: words of eight rows
    for (uint32_t word = 0; word < 2; ++word) {
      const uint32_t bank = (row * kStride + word) % 32;
      EXPECT(!used[bank], "row %u meets another", row);
      used[bank] = true;
    }
  }
}

// Likewise where lines are copied whole, one for all of the stages that it has scales of.
template <Scale kScale, int kSlabs>
void scales_of_whole_lines(std::mt19937_64& rng) {
  constexpr uint32_t kStageBytes = scale_bytes_of_slab(kScale) * kSlabs;
  static_assert(kScaleLineBytes % kStageBytes == 0 && scale_words(kScale, kSlabs) * 4 == kScaleLineBytes);
  for (uint32_t stage = 0; stage < 8; ++stage) {
    std::vector<uint8_t> line(8 * kStageBytes + kScaleLineBytes);
    for (uint8_t& code : line) code = uint8_t(rng() % 128);
    const uint32_t from = stage * kStageBytes, copied = from / kScaleLineBytes * kScaleLineBytes;
    for (int slab = 0; slab < kSlabs; ++slab) {
      for (uint32_t q = 0; q < 4; ++q) {
        uint32_t word;
        std::memcpy(&word, &line[copied + scale_in_line(kScale, kSlabs, stage) + 4 * scale_word(kScale, slab, q)], 4);
        const uint32_t found = chosen_bytes(word, 0, scale_selector(kScale, 0, q)) & (is_e4m3(kScale) ? 0xffff : 0xff);
        const uint8_t* at = &line[from + scale_bytes_of_slab(kScale) * slab + (is_e4m3(kScale) ? 2 * q : q)];
        EXPECT(found == (is_e4m3(kScale) ? at[0] | uint32_t{at[1]} << 8 : at[0]), "stage %u, slab %d, lane %u: %x",
               stage, slab, q, found);
      }
    }
  }
}

// ---- codes that are widened in shared memory ----

// Every code of a tile of 192 rows of 64 becomes its value where a copy of the widened row would have put it.
template <pairs::Codes kCodes>
void codes_become_tiles(std::mt19937_64& rng) {
  constexpr bool kNibbles = pairs::is_nibbles(kCodes);
  constexpr int kPasses = 3, kRows = kPasses * kPassRows, kRowBytes = coded_row_bytes(kNibbles);
  std::vector<int> codes(kRows * kBlockK);
  std::vector<uint8_t> from(kRows * kRowBytes);
  std::vector<uint16_t> to(kRows * kBlockK);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kBlockK; ++k) {
      int& code = codes[row * kBlockK + k];
      do code = int(rng() % (kNibbles ? 16 : 256));
      while (!kNibbles && code % 128 == 127);
      const uint32_t at = row * kRowBytes + (kNibbles ? k / 2 : k);
      from[at ^ (at >> 7 & (kNibbles ? 1 : 3)) << 4] |= kNibbles ? code << (k % 2 * 4) : code;  // as copies swizzle
    }
  }
  constexpr uint32_t kScaleOne = kCodes == pairs::Codes::nvfp4 ? 0x38 : 127;
  const pairs::Factor one = pairs::factor_of<kCodes>(kScaleOne);
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int half = 0; half < 2; ++half) {
      for (int warp = 0; warp < 4; ++warp) {
        std::vector<uint32_t> loads(32), stores[2] = {loads, loads};
        for (int lane = 0; lane < 32; ++lane) {
          const int thread = 32 * warp + lane;
          constexpr int kWords = kNibbles ? 2 : 4;
          uint32_t words[4], chunks[8];
          loads[lane] = piece_codes(kNibbles, thread) ^ (kNibbles ? 0 : 16 * half);
          std::memcpy(words, &from[pass * kPassRows * kRowBytes + loads[lane]], sizeof words);
          pairs::widen<kCodes, kWords, pairs::needs_second<kCodes>(kScaleOne)>(words + (kNibbles ? 2 * half : 0), one,
                                                                               chunks);
          for (int c = 0; c < 2; ++c) {
            stores[c][lane] = piece_chunk(thread) ^ (32 * half + 16 * c);
            std::memcpy(&to[(pass * kPassBytes + stores[c][lane]) / 2], chunks + 4 * c, 16);
          }
        }
        spread_over_banks(loads, 16);
        for (const auto& addresses : stores) spread_over_banks(addresses, 16);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kBlockK; ++k) {
      const int code = codes[row * kBlockK + k];
      const double found = value_of_bf16(to[row * kBlockK + ((k / 8) ^ row % 8) * 8 + k % 8]);
      EXPECT(found == value_of(kNibbles, code), "row %d, k %d, code %d: %g", row, k, code, found);
    }
  }
}

// ---- codes of 4 bits in registers, operands swapped ----

// A tile of 128 columns by 64 k as copies put it into shared memory, in lines of 64 codes; two codes per byte.
struct SwappedTile {
  std::vector<int> codes = std::vector<int>(2 * kSwappedCols * kBlockK);  // [column][k]
  std::vector<uint8_t> bytes = std::vector<uint8_t>(codes.size() / 2);

  SwappedTile(std::mt19937_64& rng, bool along) {
    for (int column = 0; column < 2 * kSwappedCols; ++column) {
      for (int k = 0; k < kBlockK; ++k) {
        const int code = codes[column * kBlockK + k] = int(rng() % 16);
        const int line = along ? column : k, at = along ? k : column % 64, box = along ? 0 : column / 64;
        bytes[box * 64 * 32 + nibbles_at(line, at / 32) + at % 32 / 2] |= code << (at % 2 * 4);
      }
    }
  }
  void expect(uint32_t pair, int column, int k) const {
    for (int half = 0; half < 2; ++half) {
      const int code = codes[column * kBlockK + k + half];
      const double found = std::ldexp(value_of_bf16(pair >> (16 * half) & 0xffff), 126);
      EXPECT(found == value_of(true, code), "column %d, k %d, code %d: %g", column, k + half, code, found);
    }
  }
};

// Every pair of a fragment has the codes of its line and columns, and every column belongs to one line.
void codes_along_lines(std::mt19937_64& rng, ColumnOrder lines) {
  const SwappedTile tile(rng, true);
  std::vector<int> owners(2 * kSwappedCols);
  for (int warp = 0; warp < 8; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int b = 0; b < 2; ++b) {
        const int t = lane % 4, column = swapped_column(lines, warp, lane / 4 + 8 * b);
        if (t == 0) ++owners[column];
        for (int chunk = 0; chunk < 2; ++chunk) {
          uint32_t words[4], pairs[4];
          std::memcpy(words, &tile.bytes[nibbles_at(column, chunk)], sizeof words);
          pairs_of_line(words, t, pairs);
          for (int j = 0; j < 4; ++j) tile.expect(pairs[j], column, 32 * chunk + 16 * (j / 2) + 8 * (j % 2) + 2 * t);
        }
      }
    }
  }
  for (int column = 0; column < 2 * kSwappedCols; ++column) EXPECT(owners[column] == 1, "column %d", column);
}

void codes_across_lines(std::mt19937_64& rng) {
  const SwappedTile tile(rng, false);
  std::vector<int> owners(2 * kSwappedCols);
  for (int warp = 0; warp < 8; ++warp) {
    for (int part = 0; part < 2; ++part) {
      std::vector<uint32_t> rows(32);
      for (int lane = 0; lane < 32; ++lane) rows[lane] = swapped_bytes_at(warp, lane) + part * 32 * 32;
      spread_over_banks(rows, 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {  // what a transposed load of four matrices gives a lane
          uint16_t lines[2];
          for (int e = 0; e < 2; ++e) std::memcpy(&lines[e], &tile.bytes[rows[8 * i + 2 * t + e] + 2 * g], 2);
          uint32_t pairs[2];
          pairs_of_bytes(lines[0] | uint32_t{lines[1]} << 16, warp, pairs);
          for (int b = 0; b < 2; ++b) {
            const int column = swapped_column_of_bytes(warp, g + 8 * b);
            if (t == 0 && i == 0 && part == 0) ++owners[column];
            tile.expect(pairs[b], column, 32 * part + 8 * i + 2 * t);
          }
        }
      }
    }
  }
  for (int column = 0; column < 2 * kSwappedCols; ++column) EXPECT(owners[column] == 1, "column %d", column);
}

// ---- codes of 8 bits in registers, contracted across their lines ----

// Every byte of a fragment is the code of its line and column; results are where a swizzled store wants them.
void codes_are_turned(std::mt19937_64& rng) {
  std::vector<uint8_t> block(kBlockCodes * kBlockCodes), codes(block.size());  // codes: [line][column]
  for (int line = 0; line < kBlockCodes; ++line) {
    for (int column = 0; column < kBlockCodes; ++column) {
      const uint8_t code = codes[line * kBlockCodes + column] = uint8_t(rng());
      block[line * 128 + ((column / 16) ^ (line % 8)) * 16 + column % 16] = code;
    }
  }
  for (int warp = 0; warp < 8; ++warp) {
    for (int step = 0; step < kBlockSteps; ++step) {
      std::vector<uint32_t> rows(32);
      for (int lane = 0; lane < 32; ++lane) rows[lane] = turned_at(warp, lane) + step * kStepCodes * 128;
      spread_over_banks(rows, 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        uint32_t words[4];
        for (int i = 0; i < 4; ++i) {  // what a transposed load of four matrices gives a lane
          uint16_t lines[2];
          for (int e = 0; e < 2; ++e) std::memcpy(&lines[e], &block[rows[8 * i + 2 * t + e] + 2 * g], 2);
          words[i] = lines[0] | uint32_t{lines[1]} << 16;
        }
        for (int i = 0; i < 4; ++i) {
          const uint32_t found = pairs::chosen_bytes(words[i / 2 * 2], words[i / 2 * 2 + 1], turned_bytes(lane, i % 2));
          for (int byte = 0; byte < 4; ++byte) {
            const int line = step * kStepCodes + 16 * (i / 2) + 4 * t + byte, column = 16 * warp + 2 * g + i % 2;
            EXPECT((found >> (8 * byte) & 0xff) == codes[line * kBlockCodes + column], "line %d, column %d", line,
                   column);
          }
        }
      }
    }
  }
  for (const int bytes : {4, 8}) {  // of two columns
    for (int warp = 0; warp < 16 / bytes; ++warp) {
      for (int i = 0; i < 4; ++i) {
        std::vector<uint32_t> to(32);
        for (int lane = 0; lane < 32; ++lane) {
          const int row = i / 2 * 8 + lane % 4 * 2 + i % 2, at = (8 * warp + lane / 4) * bytes;
          to[lane] = turned_result_at(warp, lane, i / 2, i % 2, bytes);
          EXPECT(to[lane] == uint32_t(row * 128 + ((at / 16) ^ (row % 8)) * 16 + at % 16), "row %d, byte %d", row, at);
        }
        spread_over_banks(to, bytes);
      }
    }
  }
  std::puts("codes that are contracted across their lines become fragments, and results rows");
}

// Factors fill their place, each once; those of a lane's two lines and eight steps of 8 k are 32 bytes.
void factors_of_swapped_tiles() {
  std::vector<int> words(kFactorBytes / 4), halves(kFactorBytes / 2);
  for (int column = 0; column < 2 * kSwappedCols; ++column) {
    for (int i = 0; i < kBlockK / kFactorCodes; ++i) ++words[factor_of_line(column, i)];
  }
  for (int line = 0; line < kBlockK; ++line) {
    for (int i = 0; i < 2 * kSwappedCols / kFactorCodes; ++i) {
      ++halves[factor_across(line, i)];
      const int t = line % 8 / 2;
      EXPECT(factor_across(line, i) == factor_across(2 * t, i) + 2 * (line / 8) + line % 2, "line %d", line);
    }
  }
  for (size_t i = 0; i < words.size(); ++i) EXPECT(words[i] == 1, "word %zu", i);
  for (size_t i = 0; i < halves.size(); ++i) EXPECT(halves[i] == (i < halves.size() / 2), "half word %zu", i);
}

// ---- what a map that is not encoded says ----

bool says(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

void tensor_map_failures() {
  const MapShape shape = packed_shape(3, 64, 40, DType::bf16);
  const std::string misplaced = tensor_map_failure(kInvalidValue, 4104, shape);
  EXPECT(says(misplaced, "8 bytes past a multiple of 16, 40 columns, pitch 80"), "%s", misplaced.c_str());
  const std::string homeless = tensor_map_failure(kInvalidContext, 4104, shape);
  EXPECT(says(homeless, "failed with 201: no CUDA context is current") && !says(homeless, "multiple"), "%s",
         homeless.c_str());
  const std::string other = tensor_map_failure(999, 4104, shape);
  EXPECT(says(other, "failed with 999") && !says(other, "multiple") && !says(other, "context"), "%s", other.c_str());
  std::puts("a failure blames address and pitch only where the driver does");
}

void even_heights() {
  for (int most : {kEvenRows, 16, 48}) {
    for (int rows = 1; rows < 20 * most; ++rows) {
      const int height = even_height(rows, most), tiles = (rows + most - 1) / most;
      EXPECT(height % kEvenStep == 0 && height <= most, "%d rows in tiles of %d", rows, height);
      EXPECT((tiles - 1) * height < rows && rows <= tiles * height, "%d rows in %d tiles of %d", rows, tiles, height);
    }
  }
  std::puts("tiles of even height cover every group");
}

// ---- tiles by problem ----

void choices() {
  constexpr int kSharedBytes = 227 * 1024;
  for (int64_t contracted = 1; contracted <= 1 << 16; contracted += 1 + contracted / 16) {
    for (int64_t choice = 0; choice < 8; ++choice) {
      const int64_t out_bytes = choice % 2 ? 4 : 2, cols = std::array{16, 192, 4096, 2880}[choice / 2];
      const TileChoice& tile = rows_tile_sm90(contracted, out_bytes, cols);
      const int ring = tile.stages * (2 * kBlockBytes + tile.cols * 128), slot_bytes = 8 * tile.slots * kSlotBytes;
      EXPECT(ring + slot_bytes + kSlotBytes < kSharedBytes, "%d stages and %d slots", tile.stages, tile.slots);
      EXPECT(out_bytes == 2 || tile.slots >= 2, "four-byte results store twice as long");
      const bool shared = &tile == &kCooperative;
      EXPECT(shared == (contracted >= 6144 && out_bytes == 2 && cols == 4096), "%d columns for both warpgroups",
             int(cols));
    }
  }
  for (const int64_t groups : {1, 7, 128}) {
    const auto even = [&](int64_t mean, int64_t contracted, int64_t cols) {
      return even_tiles_sm90(mean * groups, groups, contracted, cols);
    };
    EXPECT(even(128, 64, 2880) && even(512, 8192, 2880) && !even(96, 64, 4096) && !even(256, 64, 4096),
           "groups in few tiles, and those that fill tiles of 128 rows");
    EXPECT(even(256, 1152, 4096) && !even(256, 1151, 4096) && !even(255, 1152, 4096), "two tiles, whose sums are long");
    EXPECT(even(272, 64, 4096) && !even(271, 64, 4096) && even_tiles_with_activation_sm90(272 * groups, groups) &&
               !even_tiles_with_activation_sm90(271 * groups, groups),
           "two tiles, whatever the sums");
    EXPECT(even(1024, 8192, 4096) && !even(1024, 64, 2880) && even(2048, 4096, 4096) && !even(2048, 8192, 4096),
           "many tiles, long sums, and a last tile of which half exists");
    EXPECT(!even(128, 64, 64), "few columns");
  }
  EXPECT(!even_tiles_sm90(0, 0, 64, 4096) && !even_tiles_sm90(0, 3, 64, 4096), "no groups, and no rows");
  // Tests on a GPU compare the tiles of groups of 160 rows with those of 70 and 220 (test_even_sm90.py,
  // test_fp8_sm90.py, test_fused_sm90.py).
  for (const int64_t mean : {70, 160, 220}) {
    const bool even = mean == 160;
    EXPECT(even_tiles_sm90(9 * mean, 9, 4096, 200) == even && even_tiles_with_activation_sm90(9 * mean, 9) == even &&
               even_fp8_tiles_sm90(9 * mean, 9) == even,
           "groups of %d rows", int(mean));
  }
  EXPECT(even_tiles_with_activation_sm90(512, 1) && !even_tiles_with_activation_sm90(1024, 1) &&
             !even_fp8_tiles_sm90(512, 1),
         "several tiles with an activation, one of 8 bits");
  const auto many_stages = [](int64_t mean) { return many_stages_for_sums_sm90(6 * mean, 6); };
  EXPECT(!many_stages(319) && many_stages(320) && many_stages(768) && !many_stages(769) &&
             !many_stages_for_sums_sm90(0, 0),
         "sums of about 512 rows");
  EXPECT(many_stages_for_sums_sm90(2600, 6), "those of cases.STAGED");
  EXPECT(&dact_tile_sm90(4095) == &kDact && &dact_tile_sm90(4096) == &kDactLong, "long sums at the hidden rows");
  std::puts("every choice of a tile fits shared memory");
}

}  // namespace

int main() {
  std::mt19937_64 rng(0);
  every_tile_once(pair_at, 0);
  every_tile_once([](int item, int rows, int cols, int rank) { return windowed_pair_at(item, rows, cols, rank, 1); },
                  0);
  every_tile_once(row_pair_at, 2);
  every_tile_once(two_columns_at, INT32_MAX);
  std::puts("every tile of every shape comes exactly once, in pairs of neighbours");
  even_heights();
  large_shapes(rng);
  every_draw_once(rng);
  every_block_once(rng);
  cuts(rng);
  ragged_addresses();
  packed_addresses();
  scattered_addresses(rng);
  descriptors();
  slots();
  tf32_operands();
  tf32_descriptors();
  codes_meet_rows<false, 1>(rng);
  codes_meet_rows<true, 1>(rng);
  codes_meet_rows<true, 2>(rng);
  std::puts("codes become their values and meet the rows at the same k");
  scales_of_lanes<Scale::e8m0, 1>(rng);
  scales_of_lanes<Scale::e8m0, 2>(rng);
  scales_of_lanes<Scale::e4m3, 1>(rng);
  scales_of_lanes<Scale::e4m3, 2>(rng);
  scales_of_whole_lines<Scale::e8m0_lines, 1>(rng);
  scales_of_whole_lines<Scale::e8m0_lines, 2>(rng);
  scales_of_whole_lines<Scale::e4m3_lines, 1>(rng);
  scales_of_whole_lines<Scale::e4m3_lines, 2>(rng);
  std::puts("lanes find the scales of their codes wherever lines of scales start");
  codes_become_tiles<pairs::Codes::mxfp4>(rng);
  codes_become_tiles<pairs::Codes::nvfp4>(rng);
  codes_become_tiles<pairs::Codes::mxfp8>(rng);
  codes_become_tiles<pairs::Codes::e4m3>(rng);
  std::puts("codes become the tile that widened weights would be");
  for (const ColumnOrder lines : {ColumnOrder::neighbours, ColumnOrder::halves, ColumnOrder::alternating})
    codes_along_lines(rng, lines);
  codes_across_lines(rng);
  factors_of_swapped_tiles();
  std::puts("codes become fragments, and find their factors, whichever lines represent a column");
  codes_are_turned(rng);
  segments(rng);
  stage_scales(kPromoting, kTileRows);
  stage_scales(kPromotingTall, kPromotingTallRows);
  tensor_map_failures();
  choices();
}
