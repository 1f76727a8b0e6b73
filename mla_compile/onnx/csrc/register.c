// Registers the library with ONNX Runtime: one domain, one operator, a kernel per element type on CPU and on CUDA.
//
// A registered operator replaces the model's own function of the same name, and ONNX Runtime cannot fall back to the
// function. So every element type of our models is registered, even if only the plain CPU kernel supports it.

#include <stdlib.h>

#include "cuda.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  OrtCustomOp op;        // must come first, because the callbacks get its address
  const char* provider;  // NULL means CPU
  int query, dtype;      // query: of query and result; dtype: of the rows
} Operator;

typedef struct {
  const OrtApi* api;
  Node node;
  int query, dtype;
  // The fields below are for CUDA only.
  Device* device;
  OrtAllocator* allocator;
  const OrtMemoryInfo* memory;  // the allocator's memory
} Instance;

static const Operator* of(const OrtCustomOp* op) { return (const Operator*)(const void*)op; }
static const char* name(const OrtCustomOp* op) { return (void)op, "DecodeAttention"; }
static const char* provider(const OrtCustomOp* op) { return of(op)->provider; }
static size_t input_count(const OrtCustomOp* op) { return (void)op, INPUTS; }
static size_t output_count(const OrtCustomOp* op) { return (void)op, OUTPUTS; }
static int output_type(const OrtCustomOp* op, size_t index) { return index == LSE ? ORT_FLOAT : of(op)->query; }
static int output_kind(const OrtCustomOp* op, size_t index) {
  return (void)op, index == LSE ? ORT_OPTIONAL : ORT_REQUIRED;
}
static int input_kind(const OrtCustomOp* op, size_t index) {
  return (void)op, index > LATENT ? ORT_OPTIONAL : ORT_REQUIRED;
}
static int input_memory(const OrtCustomOp* op, size_t index) { return (void)op, (void)index, ORT_DEFAULT_MEMORY; }
static int no_arity(const OrtCustomOp* op) { return (void)op, 0; }
static int op_version(const OrtCustomOp* op) { return (void)op, 1; }

static int input_type(const OrtCustomOp* op, size_t index) {
  switch (index) {
    case QUERY:
      return of(op)->query;
    case MASK:
      return ORT_ANY;  // bool or a float; the call checks the type
    case SEQ_LENS:
      return ORT_INT64;
    case SINKS:
      return ORT_FLOAT;
    default:
      return of(op)->dtype;
  }
}

// Reads the dtype and the last axis of an input from the model: 0 if the input is absent, ANY if the model does not
// tell.
static void foresee(const OrtApi* api, const OrtKernelInfo* info, size_t index, size_t rank, int* dtype,
                    int64_t* width) {
  OrtTypeInfo* type = NULL;
  const OrtTensorInfo* tensor = NULL;
  int64_t shape[4] = {ANY, ANY, ANY, ANY};
  size_t count = 0, axes = 0;
  *dtype = 0;
  *width = 0;
  OrtStatus* status = ORT(api, KernelInfo_GetInputCount)(info, &count);
  if (!status && index < count) status = ORT(api, KernelInfo_GetInputTypeInfo)(info, index, &type);
  if (!status && type) {
    *width = ANY;
    status = ORT(api, CastTypeInfoToTensorInfo)(type, &tensor);
    if (!status && tensor) status = ORT(api, GetTensorElementType)(tensor, dtype);
    if (!status && tensor) status = ORT(api, GetDimensionsCount)(tensor, &axes);
    if (!status && axes == rank) status = ORT(api, GetDimensions)(tensor, shape, axes);
    if (!status && axes == rank && shape[rank - 1] > 0) *width = shape[rank - 1];
    ORT(api, ReleaseTypeInfo)(type);
  }
  if (status) ORT(api, ReleaseStatus)(status);  // an absent input returns a status
}

static OrtStatus* create_cuda(const OrtApi* api, const OrtKernelInfo* info, Instance* it) {
  int ordinal = 0, dtype;
  int64_t values, ignored;
  Call call = {.dtype = it->dtype, .query_dtype = it->query};
  TRY(ORT(api, KernelInfoGetAllocator)(info, ORT_DEFAULT_MEMORY, &it->allocator));
  TRY(ORT(api, AllocatorGetInfo)(it->allocator, &it->memory));
  TRY(ORT(api, MemoryInfoGetId)(it->memory, &ordinal));
  TRY(mla_device(api, ordinal, &it->device));
  // Kernels are loaded now if the model tells the widths, otherwise at the first call.
  foresee(api, info, LATENT, 3, &dtype, &call.La);
  foresee(api, info, ROPE, 3, &dtype, &call.Lb);
  foresee(api, info, VALUES, 3, &dtype, &values);
  foresee(api, info, MASK, 4, &call.mask_dtype, &ignored);
  if (call.La <= 0) return NULL;
  call.Lv = values ? values : it->node.value_width ? it->node.value_width : call.La;
  call.values = values ? info : NULL;  // any address marks the values as present
  call.mask = call.mask_dtype ? info : NULL;
  return mla_prepare(api, it->device, &it->node, &call);
}

static void destroy(void* kernel) {
  Instance* it = kernel;
  if (it->allocator) ORT(it->api, ReleaseAllocator)(it->allocator);
  free(it);
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  Instance* it = calloc(1, sizeof *it);
  if (!it) return mla_error(api, ORT_FAIL, "no memory");
  it->api = api;
  it->query = of(op)->query;
  it->dtype = of(op)->dtype;
  OrtStatus* status = mla_read_node(api, info, &it->node);
  if (!status && of(op)->provider) status = create_cuda(api, info, it);
  if (status)
    destroy(it);
  else
    *out = it;
  return status;
}

static OrtStatus* compute_cpu(void* kernel, OrtKernelContext* context) {
  Instance* it = kernel;
  Call call;
  TRY(mla_read_call(it->api, context, &it->node, it->query, it->dtype, &call));
  return mla_cpu_attention(it->api, &it->node, &call);
}

static OrtStatus* compute_cuda(void* kernel, OrtKernelContext* context) {
  Instance* it = kernel;
  const OrtApi* api = it->api;
  Call call;
  Plan plan;
  void *stream = NULL, *scratch = NULL;
  TRY(mla_read_call(api, context, &it->node, it->query, it->dtype, &call));
  if (call.B * call.S * call.H * call.Lv == 0) return NULL;
  TRY(mla_plan(api, &it->device->gpu, &it->node, &call, &plan));
  TRY(ORT(api, KernelContext_GetGPUComputeStream)(context, &stream));
  // Scratch that belongs to a stream may be freed as soon as the work is queued. Without a stream, ONNX Runtime queues
  // everything on the default stream, where plain allocations are safe.
  if (plan.bytes && stream)
    TRY(ORT(api, KernelContext_GetScratchBuffer)(context, it->memory, plan.bytes, &scratch));
  else if (plan.bytes)
    TRY(ORT(api, AllocatorAlloc)(it->allocator, plan.bytes, &scratch));
  if (plan.bytes && !scratch) return mla_error(api, ORT_EP_FAIL, "no memory for %zu bytes of scratch", plan.bytes);
  OrtStatus* status = mla_run(api, it->device, &it->node, &call, &plan, scratch, stream);
  OrtStatus* freed = scratch ? ORT(api, AllocatorFree)(it->allocator, scratch) : NULL;
  if (!status) return freed;
  if (freed) ORT(api, ReleaseStatus)(freed);
  return status;
}

#define CALLBACKS                                                                                                    \
  .version = ORT_API, .GetName = name, .GetExecutionProviderType = provider, .GetInputType = input_type,             \
  .GetInputTypeCount = input_count, .GetOutputType = output_type, .GetOutputTypeCount = output_count,                \
  .KernelDestroy = destroy, .GetInputCharacteristic = input_kind, .GetOutputCharacteristic = output_kind,            \
  .GetInputMemoryType = input_memory, .GetVariadicInputMinArity = no_arity, .GetVariadicInputHomogeneity = no_arity, \
  .GetVariadicOutputMinArity = no_arity, .GetVariadicOutputHomogeneity = no_arity, .CreateKernelV2 = create,         \
  .GetStartVersion = op_version, .GetEndVersion = op_version
#define CPU(of_query, of_rows) {.op = {CALLBACKS, .KernelComputeV2 = compute_cpu}, .query = of_query, .dtype = of_rows}
#define CUDA(of_query, of_rows)                        \
  {.op = {CALLBACKS, .KernelComputeV2 = compute_cuda}, \
   .provider = "CUDAExecutionProvider",                \
   .query = of_query,                                  \
   .dtype = of_rows}
#define BOTH(of_query, of_rows) CPU(of_query, of_rows), CUDA(of_query, of_rows)

// A half-precision model keeps its absorbed queries in float32, because their products overflow float16.
static const Operator operators[] = {BOTH(ORT_FLOAT, ORT_FLOAT), BOTH(ORT_FLOAT16, ORT_FLOAT16),
                                     BOTH(ORT_BFLOAT16, ORT_BFLOAT16), BOTH(ORT_FLOAT, ORT_FLOAT16),
                                     BOTH(ORT_FLOAT, ORT_BFLOAT16)};

// The entry point of every library of custom operators. On an ONNX Runtime older than our interface it succeeds without
// registering, and the model's function runs.
EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API);
  OrtCustomOpDomain* domain;
  if (!api) return NULL;
  TRY(ORT(api, CreateCustomOpDomain)("mla_compile", &domain));  // never freed, because sessions refer to it
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
    TRY(ORT(api, CustomOpDomain_Add)(domain, &operators[i].op));
  return ORT(api, AddCustomOpDomain)(options, domain);
}

// Returns the contents of the library as JSON.
EXPORT const char* mla_compile_onnx_manifest(void) { return mla_manifest; }

// Returns the number of a CUDA device's architecture, as in `sm_90`; -1 if there is no device.
EXPORT int mla_compile_onnx_device(int ordinal) { return mla_device_arch(ordinal); }

typedef struct {  // the sizes of a call, and its plan
  int32_t arch, multiprocessors, smem, query, dtype, causal, has_values, has_sinks, has_lens, mask;
  double bandwidth, softcap;
  int64_t window, B, S, H, T, La, Lb, Lv, mask_b, mask_h, mask_s;
  int32_t block_m, block_n, threads, direct;
  int64_t splits, lists, scratch;
} Question;

// For tests: plans a call from sizes alone, without device and tensors. Returns 0 if the library has no kernel for it.
EXPORT int mla_compile_onnx_plan(Question* q) {
  static const float something;
  const Node node = {.scale = 1, .softcap = (float)q->softcap, .causal = q->causal, .window = q->window};
  const Gpu gpu = {q->arch, q->multiprocessors, q->smem, q->bandwidth};
  const Call call = {.query_dtype = q->query,
                     .dtype = q->dtype,
                     .B = q->B,
                     .S = q->S,
                     .H = q->H,
                     .C = q->T,
                     .T = q->T,
                     .La = q->La,
                     .Lb = q->Lb,
                     .Lv = q->Lv,
                     .mask_dtype = q->mask,
                     .mask_b = q->mask_b,
                     .mask_h = q->mask_h,
                     .mask_s = q->mask_s,
                     .mask = q->mask ? q : NULL,
                     .values = q->has_values ? q : NULL,
                     .seq_lens = q->has_lens ? (const int64_t*)(const void*)q : NULL,
                     .sinks = q->has_sinks ? &something : NULL};
  Plan plan;
  if (mla_plan(NULL, &gpu, &node, &call, &plan)) return 0;
  q->block_m = plan.attend->block_m;
  q->block_n = plan.attend->block_n;
  q->threads = plan.attend->threads;
  q->direct = plan.combine == NULL;
  q->splits = plan.splits;
  q->lists = plan.lists;
  q->scratch = (int64_t)plan.bytes;
  return 1;
}
