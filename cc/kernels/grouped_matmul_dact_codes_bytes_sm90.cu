// A part of grouped_matmul_dact_codes_sm90.cu, on its own because of the time that it takes to compile.
#include "cc/kernels/grouped_matmul_dact_codes_sm90.cuh"

namespace grouped::sm90 {

template void launch_coded_dact<false>(const GroupedMatmulDact&, CodedDactParams, cudaStream_t);

}  // namespace grouped::sm90
