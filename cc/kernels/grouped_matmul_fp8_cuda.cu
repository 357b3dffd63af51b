// Products of 8-bit codes with scales of groups on the tensor cores of GPUs since sm_89, by the pipeline of
// mma_tiles.cuh: m16n8k32, of rows that run along the contraction and weights that run along it or across. Hopper has
// the instruction, but not the circuits: it widens codes to 16 bits.
//
//   tile       ring             accumulators   registers
//   128 x 64   4 x (8 + 4) KiB  64 + 64        255
//
// Tensor cores keep about 14 bits of a sum of such products, so each 64 terms are summed apart.
#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>

#include "cc/api/archs.h"
#include "cc/api/calls.h"
#include "cc/api/operands.h"
#include "cc/device/common/mma_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr DType dtype_of(Code code) { return code == Code::e4m3 ? DType::e4m3fn : DType::e5m2; }

template <Code kLhs, Code kRhs>
struct CodeProduct {
  using Shape = MmaShape<1, true>;
  static __device__ DType lhs_type(const Problem&) { return dtype_of(kLhs); }
  static __device__ DType rhs_type(const Problem&) { return dtype_of(kRhs); }

  template <bool kFirst>
  static __device__ void multiply(const Fragments<Shape>& f, Sums<Shape>& sums) {
    multiply_all<Shape>(f, sums, [](float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
      multiply_add_codes<kLhs, kRhs, kFirst>(sum, a, b0, b1);
    });
  }
};

struct Codes {
  using Shape = MmaShape<1, true>;

  template <class F>
  static __device__ void choose(const Problem& p, const F& multiply) {
    if (p.lhs_type == DType::e4m3fn) {
      choose_rhs<Code::e4m3>(p, multiply);
    } else {
      choose_rhs<Code::e5m2>(p, multiply);
    }
  }

 private:
  template <Code kLhs, class F>
  static __device__ void choose_rhs(const Problem& p, const F& multiply) {
    if (p.rhs_type == DType::e4m3fn) {
      multiply(CodeProduct<kLhs, Code::e4m3>{});
    } else {
      multiply(CodeProduct<kLhs, Code::e5m2>{});
    }
  }
};

constexpr int kFirstChip = 89;  // that multiplies codes
constexpr int kBuiltFor[] = {__CUDA_ARCH_LIST__};

// Whether the code that runs on a chip was compiled with the instruction: sm_80 code, which runs on sm_89, was not.
bool has_code(int chip) {
  return std::any_of(std::begin(kBuiltFor), std::end(kBuiltFor),
                     [chip](int built) { return built / 10 >= kFirstChip && built / 10 <= chip; });
}

std::string refuses(const GroupedMatmul& call, const Target& target) {
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    if (!is_fp8(t->dtype)) return "takes two operands of float8, got " + describe(*t);
  }
  if (target.sm < kFirstChip) {
    return "needs " + arch_name(kFirstChip) + " or later, the device is " + arch_name(target.sm);
  }
  if (!has_code(target.sm)) return "was not compiled for sm_89; build with GROUPED_CUDA_ARCHS=89";
  if (call.contract_rows) return "multiplies rows by weights";
  for (const TensorView* t : {&call.lhs, &call.rhs}) {
    if (t->dims[t->rank - 1] % Codes::Shape::kChunk != 0) {
      return "reads rows of multiples of 16 bytes, got " + describe(*t);
    }
  }
  if (std::string reason = refuses_ends(call); !reason.empty()) return reason;
  return refuses_extents(call, Codes::Shape::kDepth);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_fp8_cuda = {
    "grouped_matmul_fp8_cuda", Arch::cuda, Kind::special, refuses, scan_bytes, launch_mma<Codes>};

}  // namespace grouped
