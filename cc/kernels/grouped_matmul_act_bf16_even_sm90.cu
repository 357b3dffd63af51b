// A part of grouped_matmul_act_bf16_sm90: tiles of even height (pipeline_even.cuh), for gated activations.
//
//   loader: weights in two boxes of 64 columns: gates and linear halves of 64 results, or 128 hidden columns in order;
//           rows by a ragged map in boxes of 64; what a pair shares is multicast
//            |  ring of blocks: weights 128 x 64, rows 64 x up to 192
//            v
//   2 consumer warpgroups in turn: wgmma m64nRk16 of two times 64 hidden columns, R rows, fp32 in registers
//            |  + bias, one rounding: hidden, 32 rows at once, transposed, to shared memory; from there 8 gates and 8
//            |  linear columns at once: activation, * row scale, one rounding -> result
//            v
//   stores of 16 rows x 64 columns, as far as the tile has rows, clipped at the group's last row and the last column
//
//   tile               accumulators     ring         slots            registers, 128 + 256 threads
//   192 x (64 + 64)    192 per thread   5 x 40 KiB   2 x 1 x 12 KiB   40 / 232
//
// Since the activation reads whole rows out of shared memory, one kernel serves every interleave.
#include "cc/device/sm90/pipeline_even.cuh"
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"

namespace grouped::sm90 {
namespace {

using EvenUpShape = EvenShape<kWithActivation.stages, kWithActivation.slots, kNarrowSlotBytes>;
constexpr int kChunkRows = 32;
constexpr int kPieceBytes = kChunkRows * 128;  // of 64 columns

struct EvenUpParams : UpParams {
  bool alternating;  // gate and linear columns do, one by one
};

template <class T, Major kWeights>
struct EvenUpProduct : EvenTiles<kWeights, kEvenCols / 2> {
  using Params = EvenUpParams;
  using Element = T;
  using Shape = EvenUpShape;
  static constexpr int kParts = 2, kResultCols = kEvenCols / kParts;
  static constexpr int kRowsBox = 64, kPieceRows = kOutRows, kPieceCols = 64;  // as UpProduct has them
  using typename EvenTiles<kWeights, kEvenCols / 2>::Rhs;
  // Hidden rows, two pieces of 64 columns, and results.
  using Slots = EvenSlots<1, 3 * kPieceBytes>;
  static_assert(2 * Slots::kBytes == Shape::kWarps * Shape::WarpSlots::kBytes);

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const FromLow part(p.low, work, k);
    load_even_rows(p, work, part, boxes, rank, to, full);
    if (!columns) return;
    const int32_t col = p.across * work.col0;
    const int32_t c0 = kWeights == Major::k ? part.at : col, c1 = kWeights == Major::k ? col : part.at;
    Rhs::load(part.low ? &p.low.rhs : &p.rhs, part.low ? &p.low.rhs : &p.rhs_up,
              {{c0, c1, part.slice.near, part.slice.far}}, p.weight_part, work.across, rank, to, full);
  }

  static __device__ void store(const Params& p, const Work& work, int warp, float (&acc)[2][kEvenRows / 2],
                               Slots& slots) {
    const int lane = threadIdx.x % 32;
    const uint32_t place = even_place(warp, lane);
    float bias[2][2] = {{-0.f, -0.f}, {-0.f, -0.f}};  // which change no sum
    bias_of(p, work, 16 * warp + lane / 4, bias);
    constexpr int kWords = kEvenRows / 4, kOfChunk = kChunkRows / 4;
    uint32_t hidden[2][kWords];  // rounded, rows 8 j + 2t and 1 on by turns of columns g and g + 8
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        hidden[h][i] = pack2<T>(acc[h][2 * i] + bias[h][i % 2], acc[h][2 * i + 1] + bias[h][i % 2]);
      }
    }
#pragma unroll 1
    for (int row0 = 0; row0 < work.valid_rows; row0 += kChunkRows) {
      const uint32_t slot = slots.take();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kOfChunk; i += 4) {
          const uint32_t* v = &hidden[h][i];
          ptx::store_transposed_x4(slot + h * kPieceBytes + i / 4 * kSlotBytes + place, v[0], v[1], v[2], v[3]);
        }
#pragma unroll
        for (int i = 0; i + kOfChunk < kWords; ++i) hidden[h][i] = hidden[h][i + kOfChunk];
      }
      slots.meet();
      with_activation(p.activation.kind, [&](auto kind) {
        if constexpr (is_gated(decltype(kind)::value))
          activate<ActivationOf<decltype(kind)::value>>(p, work, row0, slot);
      });
      slots.send([&] {
        const int piece = warp % 2, first = row0 + 16 * piece;
        if (first >= work.valid_rows) return;
        const ptx::Coords at = ragged_at(work, 0, first);
        const auto store = [&](const CUtensorMap* map, int col, int of) {
          ptx::tensor_store(map, {{col, at.c[1], at.c[2], at.c[3]}}, slot + of * kPieceBytes + piece * kSlotBytes);
        };
        const int half = warp / 2;
        if (half == 0) store(&p.out, work.col0, 2);
        if (p.hidden_rows != nullptr) store(&p.hidden[half], p.across * work.col0 + half * p.hidden_part, half);
      });
    }
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    const int64_t bytes = int64_t(p.cols) * sizeof(T), hidden_bytes = int64_t(p.width) * sizeof(T);
    clear_rows(p, work, rank, thread, p.result, bytes, bytes);
    if (p.hidden_rows != nullptr) clear_rows(p, work, rank, thread, p.hidden_rows, hidden_bytes, hidden_bytes);
  }

 private:
  // Of hidden columns `col` and 8 further of either half of the tile.
  static __device__ void bias_of(const Params& p, const Work& work, int col, float (&bias)[2][2]) {
    using Bias = device::BiasOf<T>;
    const char* from = device::bias_at<Bias>(p, work.group, 0);
    if (from == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int hidden = p.across * work.col0 + h * p.part + col + 8 * b;
        if (hidden < p.width) bias[h][b] = Bias::value(p, from, hidden);
      }
    }
  }

  // The results of a chunk of rows, 8 at once: of 16 bytes of gates and 16 of linear columns, or of 32 in which they
  // alternate.
  template <class Act>
  static __device__ void activate(const Params& p, const Work& work, int row0, uint32_t slot) {
    constexpr int kChunks = kResultCols / 8;
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < kChunkRows * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      float scale = 1;
      if (row0 + row >= work.valid_rows) continue;
      if (p.row_scale != nullptr) scale = __ldg(p.row_scale + work.end - work.rows + work.row0 + row0 + row);
      // Columns of hidden: gates of all 64 results, then linear columns; or by 32; or one by one.
      const int first = p.alternating ? 2 * chunk : p.across == 1 ? chunk : chunk / 4 * 8 + chunk % 4;
      const int second = p.alternating ? first + 1 : first + (p.across == 1 ? kChunks : kChunks / 2);
      uint32_t a[4], u[4], z[4];
      ptx::load_shared_v4(slot + at(row, first), a);
      ptx::load_shared_v4(slot + at(row, second), u);
      if (p.alternating) {
        const uint32_t w[8] = {a[0], a[1], a[2], a[3], u[0], u[1], u[2], u[3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          a[j] = __byte_perm(w[2 * j], w[2 * j + 1], 0x5410);
          u[j] = __byte_perm(w[2 * j], w[2 * j + 1], 0x7632);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float g[2], l[2];
        unpack2<T>(a[j], g[0], g[1]);
        unpack2<T>(u[j], l[0], l[1]);
        z[j] = pack2<T>(scale * Act::value(p.activation, g[0], l[0]), scale * Act::value(p.activation, g[1], l[1]));
      }
      ptx::store_shared_v4(slot + 2 * kPieceBytes + at(row, chunk), z);
    }
  }
  // Chunk of 16 bytes of a row of pieces that follow one another.
  static __device__ uint32_t at(int row, int chunk) {
    return chunk / 8 * kPieceBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }
};

template <class T, Major kWeights>
void launch_even(const GroupedMatmulAct& call, const UpParams& up, void* stream) {
  using Product = EvenUpProduct<T, kWeights>;
  using Rhs = typename Product::Rhs;
  EvenUpParams p{};
  static_cast<UpParams&>(p) = up;
  p.alternating = call.activation.interleave == 1;
  if (p.across != 1) p.weight_part = p.part = p.hidden_part = kEvenCols / 2;  // the halves are not apart
  map_weights<Rhs>(call, &p);
  p.rhs_up = call.rhs_up.present() ? map_of_weights<Rhs>(call.rhs_up, call.rhs_up.data, false) : p.rhs;
  p.paced = keeps_pace(p.length);
  launch_up_product<Product>(even_product_sm90<Product>, call, p, kThreads, stream);
}

template <class T>
void launch_major(const GroupedMatmulAct& call, const UpParams& p, void* stream) {
  return call.rhs_axis == 2 ? launch_even<T, Major::k>(call, p, stream) : launch_even<T, Major::mn>(call, p, stream);
}

}  // namespace

void launch_even_up(const GroupedMatmulAct& call, const UpParams& p, void* stream) {
  return call.lhs.dtype == DType::bf16 ? launch_major<__nv_bfloat16>(call, p, stream)
                                       : launch_major<__half>(call, p, stream);
}

}  // namespace grouped::sm90
