// A part of grouped_matmul_act_bf16_sm90.cu, on its own because it takes half a minute to compile.
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"

namespace grouped::sm90 {

template void launch_up_pairs<__half, Major::k>(const GroupedMatmulAct&, const UpParams&, void*);

}  // namespace grouped::sm90
