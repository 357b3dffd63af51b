// Problem -> tile, for the wgmma kernels. Pure arithmetic on shapes and types, tested without a GPU. No group's size
// takes part in any choice, M in that of tiles of even height and of stages for weight gradients alone. The choice of a
// tile does not show in bits, since every tile adds along the contracted axis in the same order; that of the parts of a
// sum does, and G takes part in it: batch-invariant calls have one part.
#pragma once

#include <cstdint>

namespace grouped {

// Columns of a tile, of 128 rows but for kSwapped and kPromotingTall; stages of the operand ring; slots for finished
// rows per consumer warp.
struct TileChoice {
  int cols, stages, slots;
};

// What is left of 227 KiB beside 4 stages of 40 KiB goes to a fifth stage or to slots.
inline constexpr TileChoice kManyStages = {192, 5, 1};
inline constexpr TileChoice kManySlots = {192, 4, 4};
// For long sums: both consumer warpgroups share a tile, and store at the same time.
inline constexpr TileChoice kCooperative = {256, 4, 1};
// For few columns, those of low-rank products: what counts is the rate at which rows arrive.
inline constexpr TileChoice kNarrow = {64, 7, 2};
// With an activation a slot is half as large, and three of them take turns.
inline constexpr TileChoice kWithActivation = {192, 5, 3};

// Tiles of up to so many rows and of so many columns, all those of a group equally high (pipeline_even.cuh), have the
// stages and slots of kManyStages, kManySlots, kWithActivation and kPromoting.
inline constexpr int kMostEvenRows = 192, kEvenTileCols = 128;

// Gradients at the hidden rows, whose epilogue has memory of its own instead of slots.
inline constexpr TileChoice kDact = {128, 5, 0};
// The same for long sums, behind which that epilogue hides although there are registers for one chain of its
// arithmetic.
inline constexpr TileChoice kDactLong = {192, 4, 0};

// Where weights come as codes of 4 bits, for tiles of 256 rows with swapped operands, whose slots are half as large.
inline constexpr TileChoice kSwapped = {128, 4, 3};
// Where weights come as codes of 8 bits, which are in the stages beside what they are widened to.
inline constexpr TileChoice kCodedBytes = {192, 4, 1};
inline constexpr TileChoice kCodedBytesWithActivation = {192, 4, 2};

// Where partial sums have registers of their own: a warp's slots hold its 16 rows of a tile of 16-bit results.
inline constexpr TileChoice kPromoting = {192, 4, 3};
// The same with 192 rows, for three consumer warpgroups: weight gradients in 16 bits.
inline constexpr TileChoice kPromotingTall = {128, 4, 2};
inline constexpr int kPromotingTallRows = 192;

// For ragged rows: `contracted` elements per sum, `out_bytes` of a result element, `cols` of a result row.
const TileChoice& rows_tile_sm90(int64_t contracted, int64_t out_bytes, int64_t cols);

// Whether tiles of even height take its place, for results of 16 bits: where groups have so many rows on average that
// they fit into few of them better than into tiles of 128 rows.
bool even_tiles_sm90(int64_t rows, int64_t groups, int64_t contracted, int64_t cols);
// The same for the up projection with a gated activation, and for 8-bit operands with scales of groups.
bool even_tiles_with_activation_sm90(int64_t rows, int64_t groups);
bool even_fp8_tiles_sm90(int64_t rows, int64_t groups);

// Whether weight gradients in 16 bits that are only stored, of more than 64 columns and without scales of groups, have
// kManyStages, not kManySlots.
bool many_stages_for_sums_sm90(int64_t rows, int64_t groups);

// For gradients at the hidden rows of plain operands.
const TileChoice& dact_tile_sm90(int64_t contracted);

// Weight gradients of fp32, [groups, rows, cols], have tiles of 256 rows by `tile_cols`.
inline constexpr int kTallRows = 256;
int64_t tall_tiles_sm90(int64_t rows, int64_t cols, int tile_cols);

// How their sums are cut where tiles are few: into parts that keep at least two thirds of the chip busy, in one round
// or in two. Both layouts of a gradient have the same parts, and the same tiles.
struct SumCut {
  int parts;        // 1: sums are whole
  bool transposed;  // the tiles are those of the other layout
};
SumCut cut_sums_sm90(int64_t groups, int64_t rows, int64_t cols, int tile_cols);

}  // namespace grouped
