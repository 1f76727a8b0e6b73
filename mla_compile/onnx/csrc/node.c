// Reads and checks the inputs of a node. Every message tells what was got and what was expected.

#define _POSIX_C_SOURCE 200809L
#include "node.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

OrtStatus* mla_error(const OrtApi* api, int code, const char* format, ...) {
  if (!api) return (OrtStatus*)(uintptr_t)1;  // the caller only tests for an error: see mla_compile_onnx_plan
  char text[640] = "mla_compile.DecodeAttention: ";
  const size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + used, sizeof text - used, format, arguments);
  va_end(arguments);
  return ORT(api, CreateStatus)(code, text);
}

const char* mla_dtype_name(int dtype) {
  switch (dtype) {
    case ORT_FLOAT:
      return "float32";
    case ORT_FLOAT16:
      return "float16";
    case ORT_BFLOAT16:
      return "bfloat16";
    case ORT_BOOL:
      return "bool";
    case ORT_INT64:
      return "int64";
    default:
      return "another type";
  }
}

int64_t mla_dtype_bytes(int dtype) {
  return dtype == ORT_FLOAT ? 4 : dtype == ORT_FLOAT16 || dtype == ORT_BFLOAT16 ? 2 : dtype == ORT_BOOL ? 1 : 0;
}

// Reads an optional attribute.
#define ATTRIBUTE(kind, name)                                                             \
  do {                                                                                    \
    OrtStatus* absent = ORT(api, KernelInfoGetAttribute_##kind)(info, #name, &out->name); \
    if (absent) {                                                                         \
      ORT(api, ReleaseStatus)(absent);                                                    \
      out->name = 0;                                                                      \
    }                                                                                     \
  } while (0)

OrtStatus* mla_read_node(const OrtApi* api, const OrtKernelInfo* info, Node* out) {
  OrtStatus* missing = ORT(api, KernelInfoGetAttribute_float)(info, "scale", &out->scale);
  if (missing) {
    ORT(api, ReleaseStatus)(missing);
    return mla_error(api, ORT_INVALID_GRAPH, "the attribute scale is missing; it has no default");
  }
  ATTRIBUTE(float, softcap);
  ATTRIBUTE(int64, causal);
  ATTRIBUTE(int64, window);
  ATTRIBUTE(int64, value_width);
  if (!isfinite(out->scale) || !(out->softcap >= 0) || !isfinite(out->softcap))
    return mla_error(api, ORT_INVALID_GRAPH, "scale is %g and softcap %g, expected a finite scale and softcap >= 0",
                     (double)out->scale, (double)out->softcap);
  if (out->window < 0 || out->value_width < 0)
    return mla_error(api, ORT_INVALID_GRAPH, "window is %lld and value_width %lld, expected at least 0",
                     (long long)out->window, (long long)out->value_width);
  return NULL;
}

typedef struct {
  const char* name;
  const void* data;  // NULL if absent
  int type;
  size_t rank;
  int64_t shape[4];
} Tensor;

static OrtStatus* describe(const OrtApi* api, const OrtValue* value, Tensor* t) {
  OrtTensorInfo* info;
  TRY(ORT(api, GetTensorTypeAndShape)(value, &info));
  OrtStatus* status = ORT(api, GetTensorElementType)(info, &t->type);
  if (!status) status = ORT(api, GetDimensionsCount)(info, &t->rank);
  if (!status && t->rank <= 4) status = ORT(api, GetDimensions)(info, t->shape, t->rank);
  ORT(api, ReleaseTensorTypeAndShapeInfo)(info);
  return status;
}

static OrtStatus* input(const OrtApi* api, const OrtKernelContext* context, size_t count, size_t index,
                        const char* name, size_t rank, int type, Tensor* t) {
  // A tensor without elements gets this address, to distinguish it from an absent tensor.
  static const _Alignas(16) char nothing[16];
  const OrtValue* value = NULL;
  *t = (Tensor){.name = name};
  if (index < count) TRY(ORT(api, KernelContext_GetInput)(context, index, &value));
  if (!value) return NULL;
  TRY(describe(api, value, t));
  if (t->rank != rank)
    return mla_error(api, ORT_INVALID_ARGUMENT, "%s has %zu axes, expected %zu", name, t->rank, rank);
  if (type != ORT_ANY && t->type != type)
    return mla_error(api, ORT_INVALID_ARGUMENT, "%s is %s, expected %s", name, mla_dtype_name(t->type),
                     mla_dtype_name(type));
  void* data;
  TRY(ORT(api, GetTensorMutableData)((OrtValue*)(uintptr_t)value, &data));
  t->data = data ? data : nothing;
  return NULL;
}

static OrtStatus* same(const OrtApi* api, const Tensor* t, size_t axis, const char* letter, int64_t expected) {
  if (!t->data || t->shape[axis] == expected) return NULL;
  return mla_error(api, ORT_INVALID_ARGUMENT, "axis %zu of %s is %lld, expected %s = %lld", axis, t->name,
                   (long long)t->shape[axis], letter, (long long)expected);
}

static OrtStatus* read_mask(const OrtApi* api, const Tensor* mask, Call* c) {
  const int64_t full[3] = {c->B, c->H, c->S};
  c->T = mask->shape[3];
  if (!mla_dtype_bytes(mask->type))
    return mla_error(api, ORT_INVALID_ARGUMENT, "mask is %s, expected bool or %s", mla_dtype_name(mask->type),
                     mla_dtype_name(c->dtype));
  if (c->T > c->C)
    return mla_error(api, ORT_INVALID_ARGUMENT, "mask is for T = %lld tokens, latent has C = %lld rows",
                     (long long)c->T, (long long)c->C);
  for (size_t axis = 0; axis < 3; axis++)
    if (mask->shape[axis] != 1 && mask->shape[axis] != full[axis])
      return mla_error(api, ORT_INVALID_ARGUMENT, "axis %zu of mask is %lld, expected 1 or %c = %lld", axis,
                       (long long)mask->shape[axis], "BHS"[axis], (long long)full[axis]);
  c->mask = mask->data;
  c->mask_dtype = mask->type;
  c->mask_s = mask->shape[2] == 1 ? 0 : c->T;
  c->mask_h = mask->shape[1] == 1 ? 0 : mask->shape[2] * c->T;
  c->mask_b = mask->shape[0] == 1 ? 0 : mask->shape[1] * mask->shape[2] * c->T;
  return NULL;
}

static OrtStatus* outputs(const OrtApi* api, OrtKernelContext* context, Call* c) {
  const int64_t shape[4] = {c->B, c->S, c->H, c->Lv};
  OrtValue* value = NULL;
  size_t count;
  TRY(ORT(api, KernelContext_GetOutputCount)(context, &count));
  TRY(ORT(api, KernelContext_GetOutput)(context, OUT, shape, 4, &value));
  TRY(ORT(api, GetTensorMutableData)(value, &c->out));
  c->lse = NULL;
  if (count <= LSE) return NULL;
  value = NULL;
  TRY(ORT(api, KernelContext_GetOutput)(context, LSE, shape, 3, &value));
  if (!value) return NULL;
  void* data;
  TRY(ORT(api, GetTensorMutableData)(value, &data));
  c->lse = data;
  return NULL;
}

OrtStatus* mla_read_call(const OrtApi* api, OrtKernelContext* context, const Node* node, int query_dtype, int dtype,
                         Call* out) {
  Tensor query, latent, rope, mask, lens, sinks, values;
  size_t count;
  TRY(ORT(api, KernelContext_GetInputCount)(context, &count));
  TRY(input(api, context, count, QUERY, "query", 4, query_dtype, &query));
  TRY(input(api, context, count, LATENT, "latent", 3, dtype, &latent));
  TRY(input(api, context, count, ROPE, "rope", 3, dtype, &rope));
  TRY(input(api, context, count, MASK, "mask", 4, ORT_ANY, &mask));
  TRY(input(api, context, count, SEQ_LENS, "seq_lens", 1, ORT_INT64, &lens));
  TRY(input(api, context, count, SINKS, "sinks", 1, ORT_FLOAT, &sinks));
  TRY(input(api, context, count, VALUES, "values", 3, dtype, &values));
  if (!query.data || !latent.data)
    return mla_error(api, ORT_INVALID_ARGUMENT, "query and latent are required, one of them is absent");
  *out = (Call){.dtype = dtype,
                .query_dtype = query_dtype,
                .B = query.shape[0],
                .S = query.shape[1],
                .H = query.shape[2],
                .C = latent.shape[1],
                .T = latent.shape[1],
                .La = latent.shape[2],
                .Lb = rope.data ? rope.shape[2] : 0,
                .query = query.data,
                .latent = latent.data,
                .rope = rope.data && rope.shape[2] ? rope.data : NULL,
                .values = values.data,
                .seq_lens = lens.data,
                .sinks = sinks.data};
  TRY(same(api, &query, 3, "La+Lb", out->La + out->Lb));
  TRY(same(api, &latent, 0, "B of query", out->B));
  TRY(same(api, &rope, 0, "B of query", out->B));
  TRY(same(api, &rope, 1, "C of latent", out->C));
  TRY(same(api, &values, 0, "B of query", out->B));
  TRY(same(api, &values, 1, "C of latent", out->C));
  TRY(same(api, &lens, 0, "B of query", out->B));
  TRY(same(api, &sinks, 0, "H of query", out->H));
  if (mask.data) TRY(read_mask(api, &mask, out));
  if (values.data && node->value_width)
    return mla_error(api, ORT_INVALID_ARGUMENT, "value_width is %lld beside values, expected one of them",
                     (long long)node->value_width);
  out->Lv = values.data ? values.shape[2] : node->value_width ? node->value_width : out->La;
  if (!values.data && out->Lv > out->La + out->Lb)
    return mla_error(api, ORT_INVALID_ARGUMENT, "value_width is %lld, the rows have La+Lb = %lld columns",
                     (long long)out->Lv, (long long)(out->La + out->Lb));
  return outputs(api, context, out);
}
