// An operator of its own that calls, inside a real ONNX Runtime, the slots that the library uses on CUDA only: a wrong
// number or type in csrc/ort_api.h shows here and not on somebody's GPU. Its output is how far it came.

#include <stdint.h>
#include <string.h>

#include "ort_api.h"

enum { ALL = 10 };
static const OrtApi* api;
static int64_t reached;

static OrtStatus* step(OrtStatus* status, int good) {
  if (status) return status;
  if (!good) return ORT(api, CreateStatus)(ORT_FAIL, "a slot does not do what its name says");
  reached++;
  return NULL;
}

#define TRY(expression, good)                     \
  do {                                            \
    OrtStatus* found = step((expression), 1);     \
    if (!found && !(good)) found = step(NULL, 0); \
    if (found) return found;                      \
  } while (0)

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* given, const OrtKernelInfo* info, void** out) {
  OrtAllocator* allocator = NULL;
  const OrtMemoryInfo* memory = NULL;
  OrtTypeInfo* type = NULL;
  const OrtTensorInfo* tensor = NULL;
  size_t count = 0;
  int id = -1, element = 0;
  void* block = NULL;
  api = given;
  reached = 0;
  *out = (void*)(uintptr_t)op;
  TRY(ORT(api, KernelInfoGetAllocator)(info, ORT_DEFAULT_MEMORY, &allocator), allocator);
  TRY(ORT(api, AllocatorGetInfo)(allocator, &memory), memory);
  TRY(ORT(api, MemoryInfoGetId)(memory, &id), id == 0);
  TRY(ORT(api, AllocatorAlloc)(allocator, 4096, &block), block);
  memset(block, 1, 4096);
  TRY(ORT(api, AllocatorFree)(allocator, block), 1);
  ORT(api, ReleaseAllocator)(allocator);
  TRY(ORT(api, KernelInfo_GetInputCount)(info, &count), count == 3);
  TRY(ORT(api, KernelInfo_GetInputTypeInfo)(info, 0, &type), type);
  TRY(ORT(api, CastTypeInfoToTensorInfo)(type, &tensor), tensor);
  OrtStatus* status = ORT(api, GetTensorElementType)(tensor, &element);
  size_t rank = 0;
  int64_t shape[3] = {0};
  if (!status) status = ORT(api, GetDimensionsCount)(tensor, &rank);
  if (!status && rank == 3) status = ORT(api, GetDimensions)(tensor, shape, 3);
  if (status) return status;
  ORT(api, ReleaseTypeInfo)(type);
  OrtTypeInfo* absent = NULL;  // an input that the node leaves out has no type, and asking is no crash
  status = ORT(api, KernelInfo_GetInputTypeInfo)(info, 1, &absent);
  if (status) ORT(api, ReleaseStatus)(status);
  if (absent) ORT(api, ReleaseTypeInfo)(absent);
  return step(NULL, element == ORT_FLOAT && shape[0] == -1 && shape[2] == 7 && !absent);
}

static OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  (void)kernel;
  OrtValue* value = NULL;
  void *stream = &value, *data = NULL, *nothing = &value;
  const int64_t shape[1] = {1};
  TRY(ORT(api, KernelContext_GetGPUComputeStream)(context, &stream), stream == NULL);  // a CPU has none
  OrtStatus* status =
      ORT(api, KernelContext_GetScratchBuffer)(context, NULL, 0, &nothing);  // no bytes: looks at nothing
  if (status || nothing) return status ? status : step(NULL, 0);
  status = ORT(api, KernelContext_GetOutput)(context, 0, shape, 1, &value);
  if (!status) status = ORT(api, GetTensorMutableData)(value, &data);
  if (status) return status;
  *(int64_t*)data = reached == ALL;
  return NULL;
}

static void destroy(void* kernel) { (void)kernel; }
static const char* name(const OrtCustomOp* op) { return (void)op, "Probe"; }
static const char* provider(const OrtCustomOp* op) { return (void)op, NULL; }
static size_t three(const OrtCustomOp* op) { return (void)op, 3; }
static size_t one(const OrtCustomOp* op) { return (void)op, 1; }
static int one_int(const OrtCustomOp* op) { return (void)op, 1; }
static int input_type(const OrtCustomOp* op, size_t i) { return (void)op, (void)i, ORT_FLOAT; }
static int output_type(const OrtCustomOp* op, size_t i) { return (void)op, (void)i, ORT_INT64; }
static int optional(const OrtCustomOp* op, size_t i) { return (void)op, i == 1; }
static int zero(const OrtCustomOp* op, size_t i) { return (void)op, (void)i, 0; }

static const OrtCustomOp op = {.version = ORT_API,
                               .GetName = name,
                               .GetExecutionProviderType = provider,
                               .GetInputType = input_type,
                               .GetInputTypeCount = three,
                               .GetOutputType = output_type,
                               .GetOutputTypeCount = one,
                               .KernelDestroy = destroy,
                               .GetInputCharacteristic = optional,
                               .GetOutputCharacteristic = zero,
                               .GetInputMemoryType = zero,
                               .CreateKernelV2 = create,
                               .KernelComputeV2 = compute,
                               .GetStartVersion = one_int,
                               .GetEndVersion = one_int};

__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                    const OrtApiBase* base) {
  const OrtApi* found = base->GetApi(ORT_API);
  OrtCustomOpDomain* domain;
  OrtStatus* status = ORT(found, CreateCustomOpDomain)("probe", &domain);
  if (!status) status = ORT(found, CustomOpDomain_Add)(domain, &op);
  return status ? status : ORT(found, AddCustomOpDomain)(options, domain);
}
