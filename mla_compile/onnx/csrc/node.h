// The node `mla_compile.DecodeAttention`: its attributes, and the tensors of one call after they have been checked.
// Letters as in the project: B requests, S query tokens, H heads, C cached rows, T of them attended to, La+Lb columns.

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
  int dtype, query_dtype;  // of the rows and values; of query and out, the same or float32
  int64_t B, S, H, C, T, La, Lb, Lv;
  const void *query, *latent, *rope, *values;  // dense; rope and values NULL where absent
  const void* mask;                            // [B,H,S,T], axes of one entry have stride 0; NULL: none
  int mask_dtype;                              // bool or a float
  int64_t mask_b, mask_h, mask_s;
  const int64_t* seq_lens;  // NULL: none
  const float* sinks;       // NULL: none
  void* out;
  float* lse;  // NULL where the node does not have it
} Call;

// A status with a formatted message.
OrtStatus* mla_error(const OrtApi* api, int code, const char* format, ...) __attribute__((format(printf, 3, 4)));

// float, float16 and bfloat16 as ONNX Runtime's models name them.
const char* mla_dtype_name(int dtype);
int64_t mla_dtype_bytes(int dtype);  // 0: none of those, nor bool

// The attributes; an error where `scale` is missing or one has no meaning.
OrtStatus* mla_read_node(const OrtApi* api, const OrtKernelInfo* info, Node* out);

// The tensors of one call, with its outputs allocated. Reads shapes and addresses, never the tensors' elements.
OrtStatus* mla_read_call(const OrtApi* api, OrtKernelContext* context, const Node* node, int query_dtype, int dtype,
                         Call* out);

// One call on the CPU (cpu.c).
OrtStatus* mla_cpu_attention(const OrtApi* api, const Node* node, const Call* call);

#define TRY(expression)                   \
  do {                                    \
    OrtStatus* try_status = (expression); \
    if (try_status) return try_status;    \
  } while (0)

#endif
