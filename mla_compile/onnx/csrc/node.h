// The node `mla_compile.DecodeAttention`: its attributes, and the checked tensors of one call.
// The letters: B requests, S query tokens, H heads, C cached rows (T of them attended to), La+Lb columns.

#ifndef MLA_NODE_H
#define MLA_NODE_H

#include "ort_api.h"

enum { QUERY, LATENT, ROPE, MASK, SEQ_LENS, SINKS, VALUES, INPUTS };
enum { OUT, LSE, OUTPUTS };

typedef struct {
  float scale, softcap;
  int64_t causal, window, value_width;
} Node;

typedef struct {
  int dtype, query_dtype;  // dtype: of rows and values; query_dtype: of query and out, the same or float32
  int64_t B, S, H, C, T, La, Lb, Lv;
  const void *query, *latent, *rope, *values;  // dense; rope and values are NULL if absent
  const void* mask;                            // [B,H,S,T], axes of size 1 have stride 0; NULL if absent
  int mask_dtype;                              // bool or a float
  int64_t mask_b, mask_h, mask_s;
  const int64_t* seq_lens;  // NULL if absent
  const float* sinks;       // NULL if absent
  void* out;
  float* lse;  // NULL if the node has no such output
} Call;

// Creates a status with a formatted message.
OrtStatus* mla_error(const OrtApi* api, int code, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Returns the name of a dtype for messages.
const char* mla_dtype_name(int dtype);
int64_t mla_dtype_bytes(int dtype);  // 0 for dtypes other than floats and bool

// Reads the attributes. Returns an error if `scale` is missing or a value is invalid.
OrtStatus* mla_read_node(const OrtApi* api, const OrtKernelInfo* info, Node* out);

// Reads the tensors of one call and allocates its outputs. Reads shapes and addresses, never the elements.
OrtStatus* mla_read_call(const OrtApi* api, OrtKernelContext* context, const Node* node, int query_dtype, int dtype,
                         Call* out);

// Runs one call on the CPU (cpu.c).
OrtStatus* mla_cpu_attention(const OrtApi* api, const Node* node, const Call* call);

#define TRY(expression)                   \
  do {                                    \
    OrtStatus* try_status = (expression); \
    if (try_status) return try_status;    \
  } while (0)

#endif
