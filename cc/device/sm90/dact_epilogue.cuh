// Gradients at the hidden rows of an MLP, from a set of epilogue_fetch.cuh: h is read and dh written over it, 16 bytes
// by 16 bytes, while dz comes out of the accumulators.
#pragma once

#include "cc/device/sm90/epilogue.cuh"
#include "cc/device/sm90/epilogue_fetch.cuh"
#include "cc/math/activation.h"

namespace grouped::sm90 {

// Where the two halves of hidden rows are. A set holds 64 columns of each: in its two blocks where halves are in one
// piece or in pieces of 64 columns and more, else alternating, as in memory.
struct HiddenColumns {
  int32_t period;  // columns of a half before those of the other; at least 64; 2^30: the halves have maps of their own
  int32_t step;    // columns from a set's first block to its second
  int32_t chunks;  // 16-byte chunks of a half that neighbour one another in a set, a power of 2; 0: columns alternate

  static constexpr int32_t kApart = 1 << 30;

  // Column of memory where block `block` of the set for columns `col` and on starts.
  // NOTE: most calls need no division, which takes longer than all else here.
  GROUPED_HOST_DEVICE int32_t column(int32_t col, int block) const {
    const int32_t gate = col < period ? col : period == kSetCols ? col + col : gate_column_of(col, period);
    return gate + block * step;
  }

  // For an interleave of 0 or one that `takes` allows.
  static HiddenColumns of(int64_t interleave) {
    if (interleave == 0) return {kApart, 0, kSetCols / 8};
    const int32_t period = int32_t(interleave > kSetCols ? interleave : kSetCols);
    return {period, period, int32_t((interleave < kSetCols ? interleave : kSetCols) / 8)};
  }
  static bool takes(int64_t interleave) {
    const bool inside = interleave == 1 || interleave == 8 || interleave == 16 || interleave == 32;
    return inside || interleave % kSetCols == 0;
  }
};

// The warp's 16 rows of a set, by chunks of 8 columns of each half, as matrix operations have them: h[0] and h[1] are
// two gate columns of rows l/4 and l/4 + 8, h[2] and h[3] the linear ones of the same rows. Kinds that are not gated
// read and write a linear half as well, which is neither fetched nor stored.
class HiddenSet {
 public:
  // `rows` is where the set has them.
  __device__ HiddenSet(uint32_t rows, int chunks) : rows_(rows), chunks_(chunks) {
    const uint32_t row = threadIdx.x % 16;
    const int linear = threadIdx.x % 32 / 16 * chunks;  // lanes from 16 on see to the linear half
    base_ = rows + (linear >> 3) * kBlockBytes + row * 128 + ((linear ^ row) & 7) * 16;
  }

  __device__ void load(int chunk, uint32_t (&h)[4]) const {
    if (chunks_ != 0) {
      ptx::load_matrix_x4(place(chunk), h);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t first, second;  // (gate, linear) of two neighbouring columns
        ptx::load_words_v2(alternating(chunk, i), first, second);
        h[i] = __byte_perm(first, second, 0x5410);
        h[2 + i] = __byte_perm(first, second, 0x7632);
      }
    }
    __syncwarp();  // every lane has read before one writes
  }

  __device__ void store(int chunk, const uint32_t (&h)[4]) const {
    if (chunks_ != 0) {
      ptx::store_matrix_x4(place(chunk), h[0], h[1], h[2], h[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t first = __byte_perm(h[i], h[2 + i], 0x5410), second = __byte_perm(h[i], h[2 + i], 0x7632);
        ptx::store_words_v2(alternating(chunk, i), first, second);
      }
    }
  }

  // This lane's row of the chunk in the set's third block, for lanes below 16.
  __device__ uint32_t result(int chunk) const { return (base_ ^ (chunk * 16)) + 2 * kBlockBytes; }

 private:
  // This lane's row of a matrix operation. The swizzle is an exclusive or of address bits 4 to 6.
  __device__ uint32_t place(int chunk) const {
    const int q = chunk + (chunk & -chunks_);
    return (base_ ^ ((q & 7) * 16)) + (q >> 3) * kBlockBytes;
  }
  // This lane's 8 bytes of row l/4 + 8i where columns alternate.
  __device__ uint32_t alternating(int chunk, int i) const {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, q = 2 * chunk + lane % 4 / 2;
    return rows_ + (q >> 3) * kBlockBytes + row * 128 + ((q ^ row) & 7) * 16 + lane % 2 * 8 + i * 8 * 128;
  }

  uint32_t rows_, base_;
  int chunks_;
};

// The first kCount values take those that are kStep further on. `one` is 1, but the compiler must not know: it would
// hoist plain moves above the work on the values that they overwrite, and there are no registers for both.
template <int kCount, int kStep, int kAcc>
__device__ inline void move_up(float (&v)[kAcc], float one) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = __fmul_rn(v[i + kStep], one);
}

// One set of one warp. The first accumulators are dz of its 64 columns (of which `cols` exist); they are used up.
// `rows` is where the set has this warp's rows. Writes dh over h and z into the third block, and adds dz * t to the
// sums of rows l/4 and l/4 + 8.
//
// A loop works on kStep chunks, those of the first accumulators, and moves the others up: a copy of the body for each
// chunk and kind of activation would not fit the instruction cache.
template <class T, int kStep, int kAcc>
__device__ inline void hidden_gradients(const ActivationSpec& spec, float one, float (&dz)[kAcc],
                                        const float (&scale)[2], float (&sum)[2], int chunks, int cols, uint32_t rows) {
  const HiddenSet hidden(rows, chunks);
  with_activation(spec.kind, [&](auto kind) {
#pragma unroll 1
    for (int chunk = 0; chunk < kSetCols / 8 && 8 * chunk < cols; chunk += kStep) {
      uint32_t h[kStep][4], z[kStep][2];
#pragma unroll
      for (int c = 0; c < kStep; ++c) hidden.load(chunk + c, h[c]);
      activation_math::Derivatives grad[kStep][4];
#pragma unroll
      for (int c = 0; c < kStep; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const T gate = reinterpret_cast<const T*>(h[c])[i], linear = reinterpret_cast<const T*>(h[c] + 2)[i];
          grad[c][i] = ActivationOf<decltype(kind)::value>::grad(spec, to_float(gate), to_float(linear));
        }
      }
#pragma unroll
      for (int c = 0; c < kStep; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // two columns of a row
          float da[2], du[2], t[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const activation_math::Derivatives& g = grad[c][2 * i + e];
            const float d = dz[4 * c + 2 * i + e], scaled = __fmul_rn(scale[i], d);
            // Behind the last column dz is 0 or, of operands that are not finite, NaN.
            if (8 * (chunk + c) < cols) sum[i] = __fmaf_rn(d, g.t, sum[i]);
            da[e] = __fmul_rn(scaled, g.da);
            du[e] = __fmul_rn(scaled, g.du);
            t[e] = __fmul_rn(scale[i], g.t);
          }
          h[c][i] = pack2<T>(da[0], da[1]);
          h[c][2 + i] = pack2<T>(du[0], du[1]);
          z[c][i] = pack2<T>(t[0], t[1]);
        }
      }
#pragma unroll
      for (int c = 0; c < kStep; ++c) {
        hidden.store(chunk + c, h[c]);
        ptx::store_matrix_x2(hidden.result(chunk + c), z[c][0], z[c][1]);
      }
      move_up<kSetCols / 2 - 4 * kStep, 4 * kStep>(dz, one);
    }
  });
}

}  // namespace grouped::sm90
