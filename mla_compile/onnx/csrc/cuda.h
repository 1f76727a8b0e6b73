// One call on a CUDA device: a plan from shapes alone, scratch from the caller's allocator, launches on one stream.

#ifndef MLA_CUDA_H
#define MLA_CUDA_H

#include "driver.h"

typedef struct {
  const Kernel *attend, *scan, *list, *combine;  // NULL: not launched
  int64_t S, H;  // of the attention kernel: all rows are heads of one token where the order of queries is moot
  int64_t splits, lists, capacity;                  // capacity: tiles of T tokens
  size_t part, part_lse, work, lse, staged, bytes;  // offsets of the scratch's pieces, and its size
} Plan;

// What a call launches; an error where the library has no kernel for it, or a size is beyond 32 bits.
OrtStatus* mla_plan(const OrtApi* api, const Gpu* gpu, const Node* node, const Call* call, Plan* out);

// Launches the plan; `scratch` has plan->bytes, aligned to 256.
OrtStatus* mla_run(const OrtApi* api, Device* device, const Node* node, const Call* call, const Plan* plan,
                   char* scratch, CUstream stream);

// Loads every kernel of a node of these types and widths, so that no launch has to. Lb and Lv may be ANY; values and
// mask are absent or not; the rest of the call is not looked at.
OrtStatus* mla_prepare(const OrtApi* api, Device* device, const Node* node, const Call* widths);

#endif
