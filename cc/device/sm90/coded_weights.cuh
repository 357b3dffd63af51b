// Weights that come as codes, as the kernels that widen them on the chip take them (pipeline_swapped.cuh,
// widen_tiles.cuh): what they refuse of them, and their maps.
#pragma once

#include <cstdint>
#include <string>

#include "cc/api/operands.h"
#include "cc/device/sm90/layout_pieces.cuh"
#include "cc/device/sm90/low_rank.cuh"
#include "cc/device/sm90/tensor_map.h"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

// Codes of all groups, [G, lines, line], and the scales of their blocks along a line.
struct CodedWeights {
  CUtensorMap map;        // of bytes: boxes of 64 codes by as many lines as the product asks for
  const uint8_t* scales;  // null: none
  uint32_t scale_bytes;   // of all
  uint32_t scale_slice;   // from one group's scales to the next
  int32_t scale_line;     // bytes of a line of scales
  int32_t line_shift;     // 2^line_shift lines share one
  int32_t lines, line;    // of one group; codes of a line
  pairs::Codes codes;
};

// Which blocks of k have codes; those behind are a low-rank product's.
struct CodedBlocks {
  template <class Params>
  static __device__ bool from_codes(const Params& p, int block) {
    return block * kBlockK < p.low.first;
  }
  // How many of so many.
  template <class Params>
  static __device__ int coded_blocks(const Params& p, int blocks) {
    return min(blocks, p.low.first / kBlockK);
  }
};

constexpr int64_t kMostOuter = kPassRows;         // rows of a pass are whole blocks
constexpr int64_t kMostCodes = int64_t{1} << 35;  // then bytes of scales are counted in 32 bits

template <class Call>
bool has_nibbles(const Call& c) {
  return c.rhs.dtype == DType::u8;
}

// Why a product of such weights, which may have a low-rank one beside it, is not taken; of ragged rows.
template <class Call>
std::string refuses_coded(const Call& c) {
  const OperandScales& s = c.scales;
  if (c.lhs.dtype != DType::bf16 || s.lhs_block || s.lhs_group_scales.present()) {
    return "takes plain rows of bfloat16, not " + describe(c.lhs);
  }
  const bool nibbles = has_nibbles(c);
  if (!nibbles && c.rhs.dtype != DType::e4m3fn) return "takes weights of E4M3 or E2M1 codes, not " + describe(c.rhs);
  if (c.rhs_table.present()) return "takes weights in one array";
  const DType scale = s.rhs_scales.dtype;
  const bool known = s.rhs_block == 0 ? !nibbles
                     : nibbles ? (scale == DType::e8m0 && s.rhs_block == pairs::block_of(pairs::Codes::mxfp4)) ||
                                     (scale == DType::e4m3fn && s.rhs_block == pairs::block_of(pairs::Codes::nvfp4))
                               : scale == DType::e8m0 && s.rhs_block == pairs::block_of(pairs::Codes::mxfp8);
  if (!known) {
    return "takes E2M1 codes in blocks of 32 with E8M0 scales or of 16 with E4M3 scales, and E4M3 codes without blocks "
           "or in blocks of 32 with E8M0 scales, not blocks of " +
           std::to_string(s.rhs_block) + " with " + describe(s.rhs_scales);
  }
  if (s.rhs_block_outer > kMostOuter || (s.rhs_block_outer & (s.rhs_block_outer - 1)) != 0) {
    return "takes blocks whose lines are a power of two up to 64, not " + std::to_string(s.rhs_block_outer);
  }
  const int64_t line = last_axis(c.rhs), lines = c.rhs.dims[1], multiple = nibbles ? 32 : 16;
  if (line % multiple != 0) {
    return "needs rows of codes of a multiple of 16 bytes: " + std::to_string(line) + " codes are no multiple of " +
           std::to_string(multiple);
  }
  if (line == 0 || lines == 0) return "takes no empty weights";
  if (c.rhs.dims[0] * lines * line > kMostCodes) return "takes weights of at most 2^35 codes";
  if (has_group_scales(s) && c.low.present()) {
    return "takes no scales of groups beside a low-rank product: they would multiply its sums as well";
  }
  return refuses_low(c.low, c.lhs.dtype, c.rhs_axis);
}

// In boxes of 64 codes by `box_lines` lines.
template <class Call>
CodedWeights coded_weights(const Call& c, uint32_t box_lines) {
  const OperandScales& s = c.scales;
  const bool nibbles = has_nibbles(c);
  CodedWeights w{};
  w.map = tensor_map(c.rhs.data, DType::u8, packed_shape(c.rhs.dims[0], c.rhs.dims[1], c.rhs.dims[2], DType::u8),
                     coded_row_bytes(nibbles), box_lines);
  w.lines = static_cast<int32_t>(c.rhs.dims[1]);
  w.line = static_cast<int32_t>(last_axis(c.rhs));
  w.codes = nibbles ? pairs::Codes::mxfp4 : pairs::Codes::e4m3;
  if (s.rhs_block == 0) return w;
  w.scales = s.rhs_scales.template as<const uint8_t>();
  w.scale_bytes = static_cast<uint32_t>(s.rhs_scales.bytes());
  w.scale_slice = static_cast<uint32_t>(s.rhs_scales.dims[1] * s.rhs_scales.dims[2]);
  w.scale_line = static_cast<int32_t>(s.rhs_scales.dims[2]);
  while (int64_t{1} << w.line_shift < s.rhs_block_outer) ++w.line_shift;
  w.codes = !nibbles                            ? pairs::Codes::mxfp8
            : s.rhs_scales.dtype == DType::e8m0 ? pairs::Codes::mxfp4
                                                : pairs::Codes::nvfp4;
  return w;
}

}  // namespace grouped::sm90
