// Runs a call on a CUDA device: a plan from shapes alone, scratch from the caller's allocator, one stream.

#ifndef MLA_CUDA_H
#define MLA_CUDA_H

#include "driver.h"

typedef struct {
  const Kernel *attend, *scan, *list, *combine;  // NULL if not launched
  int64_t S, H;  // as the attention kernel sees them: S = 1 if the order of the queries does not matter
  int64_t splits, lists, capacity;                  // capacity: the number of tiles of T tokens
  size_t part, part_lse, work, lse, staged, bytes;  // offsets of the parts of the scratch, and its size
} Plan;

// Plans the launches of a call. Returns an error if the library has no kernel for it, or if a size exceeds 32 bits.
OrtStatus* mla_plan(const OrtApi* api, const Gpu* gpu, const Node* node, const Call* call, Plan* out);

// Launches the plan; `scratch` has plan->bytes bytes, aligned to 256.
OrtStatus* mla_run(const OrtApi* api, Device* device, const Node* node, const Call* call, const Plan* plan,
                   char* scratch, CUstream stream);

// Loads every kernel for a node of these types and widths, so that launches load none. Lb and Lv may be ANY. Of values
// and mask only the presence counts; the rest of the call is ignored.
OrtStatus* mla_prepare(const OrtApi* api, Device* device, const Node* node, const Call* widths);

#endif
