// What follows a product whose result is activated, or whose gradients at the hidden rows are wanted, and then stored
// in a quantised format: one pass over rows, where the plain calls make several.
#pragma once

#include "cc/api/calls.h"

namespace grouped {

// result = act(hidden) or, with `grad`, the gradients at `hidden`, as ActivationForward and ActivationGrad have them.
// What is stored is `result`, rounded to the type of hidden: `store` is of that, with a source that is nowhere, and so
// is `store_activated`.
struct ActivatedStore {
  TensorView hidden;     // [M, W]
  TensorView grad;       // [M, F]; absent: forward
  TensorView row_scale;  // [M] float32
  TensorView row_base;   // [M] float32
  TensorView result;     // [M, W], gradients that are wanted beside
  TensorView activated;  // [M, F], with gradients
  TensorView row_sum;    // [M] float32, likewise
  ActivationParams activation;
  int64_t zero_tail = 1;  // of `result` and `activated`
  Quantize store;
  Quantize store_activated;  // of rows that `activated` would hold, with gradients; no values: it is not wanted
};

}  // namespace grouped
