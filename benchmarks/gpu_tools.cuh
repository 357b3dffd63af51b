// What the programs in this folder share.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                            \
  if (const cudaError_t error = call; error != cudaSuccess) {  \
    std::printf("%s: %s\n", #call, cudaGetErrorString(error)); \
    std::exit(1);                                              \
  }

// Watts that the board draws now, as nvidia-smi says; 0 where it does not.
inline double board_watts() {
  double watts = 0;
  if (FILE* smi = popen("nvidia-smi --query-gpu=power.draw.instant --format=csv,noheader,nounits", "r")) {
    if (std::fscanf(smi, "%lf", &watts) != 1) watts = 0;
    pclose(smi);
  }
  return watts;
}

// A word that looks random, for each of the last; starts from any number.
__host__ __device__ inline unsigned scrambled(unsigned h) {
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return h;
}
