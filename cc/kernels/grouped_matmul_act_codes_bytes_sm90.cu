// A part of grouped_matmul_act_codes_sm90.cu, on its own because of the time that it takes to compile.
#include "cc/kernels/grouped_matmul_act_codes_sm90.cuh"

namespace grouped::sm90 {

template void launch_coded_up<false>(const GroupedMatmulAct&, CodedUpParams, void*);

}  // namespace grouped::sm90
