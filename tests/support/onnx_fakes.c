// Stands in for the CUDA driver and for ONNX Runtime around the native library's CUDA kernels, on a machine without a
// GPU: the library is driven through its real entry, and what it launches is written down for the test to look at.
//
// Machine code is a note instead: which kernel it stands for, and how many parameters a launch of it has.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_api.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  char magic[8];
  int32_t kernel, parameters;
} Note;

typedef struct {
  int32_t kernel, parameters, grid[3], block[3], shared;
  uint64_t stream;
  uint64_t values[64];  // the first 8 bytes that each parameter points to
} Launch;

typedef struct {
  int32_t arch, multiprocessors, smem, kilohertz, bits;  // of the device
  int32_t capturing, capture_status, fail_launch;        // settings
  int32_t loads, launches, wrong_context, pushed, allocated, freed, statuses, initialised;
  Launch launch[64];
} Machine;

EXPORT Machine machine = {.arch = 90, .multiprocessors = 132, .smem = 227 * 1024};
static const void *modules[4096], *current, *const primary = &machine;
static int reserved[4096];  // dynamic shared memory of each kernel

// ---- the driver

EXPORT int cuInit(unsigned flags) { return machine.initialised++, (int)flags; }
EXPORT int cuDeviceGet(int* out, int ordinal) { return *out = ordinal, ordinal == 0 ? 0 : 101; }
EXPORT int cuDeviceGetAttribute(int* out, int which, int device) {
  (void)device;
  switch (which) {
    case 16:
      return *out = machine.multiprocessors, 0;
    case 36:
      return *out = machine.kilohertz, 0;
    case 37:
      return *out = machine.bits, 0;
    case 75:
      return *out = machine.arch / 10, 0;
    case 76:
      return *out = machine.arch % 10, 0;
    case 97:
      return *out = machine.smem, 0;
    default:
      return 1;
  }
}
EXPORT int cuDevicePrimaryCtxRetain(const void** out, int device) { return *out = primary, device; }
EXPORT int cuCtxGetCurrent(const void** out) { return *out = current, 0; }
EXPORT int cuCtxPushCurrent_v2(const void* context) { return machine.pushed++, current = context, 0; }
EXPORT int cuCtxPopCurrent_v2(const void** out) { return machine.pushed--, *out = current, current = NULL, 0; }
EXPORT int cuModuleLoadData(const void** out, const void* image) {
  const Note* note = image;
  machine.wrong_context += current != primary;
  if (machine.capturing) return 900;
  if (memcmp(note->magic, "HOLLOW\0", 8) || modules[note->kernel]) return 200;  // no image, or loaded twice
  machine.loads++;
  return *out = modules[note->kernel] = image, 0;
}
EXPORT int cuModuleGetFunction(const void** out, const void* module, const char* name) {
  return *out = module, strlen(name) ? 0 : 500;
}
EXPORT int cuFuncGetAttribute(int* out, int which, const void* function) {
  return (void)which, *out = 64, function ? 0 : 400;
}
EXPORT int cuFuncSetAttribute(const void* function, int which, int value) {
  return reserved[((const Note*)function)->kernel] = value, which == 8 && value <= machine.smem ? 0 : 1;
}
EXPORT int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  return *out = (uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256), 0;
}
EXPORT int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) { return memset((void*)to, value, bytes), 0; }
EXPORT int cuStreamIsCapturing(void* stream, int* out) { return (void)stream, *out = machine.capture_status, 0; }
EXPORT int cuGetErrorString(int result, const char** out) { return *out = "a fake's error", result * 0; }
EXPORT int cuLaunchKernel(const void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  const Note* note = function;
  Launch* l = machine.launch + machine.launches++ % 64;
  machine.wrong_context += current != primary;
  if (machine.fail_launch || extra || (shared > 48 * 1024 && (int)shared > reserved[note->kernel])) return 701;
  *l = (Launch){note->kernel, note->parameters, {(int)x, (int)y, (int)z}, {(int)bx, (int)by, (int)bz}, (int)shared, 0,
                {0}};
  l->stream = (uintptr_t)stream;
  for (int i = 0; i < note->parameters; i++) memcpy(l->values + i, parameters[i], 8);
  return 0;
}

// ---- ONNX Runtime

typedef struct {
  int32_t present, type;
  int64_t rank, shape[4];
  void* data;
} Value;

typedef struct {
  float scale, softcap;
  int64_t causal, window, value_width;
  int32_t has_scale, inputs, outputs, static_shapes;
  Value input[7], output[2];
  uint64_t stream;
} Node;

typedef struct {
  int code;
  char text[1024];
} Status;

static const OrtCustomOp* registered[64];
static int count_registered;
static void* scratch[256];
static char allocator_of[4];  // an allocator and its memory are an address

static OrtStatus* status(int code, const char* text) {
  Status* made = calloc(1, sizeof *made);
  made->code = code;
  snprintf(made->text, sizeof made->text, "%s", text);
  machine.statuses++;
  return (OrtStatus*)made;
}
static void release_status(OrtStatus* s) { machine.statuses -= s != NULL, free(s); }
static OrtStatus* create_domain(const char* name, OrtCustomOpDomain** out) {
  return *out = (OrtCustomOpDomain*)allocator_of, strcmp(name, "mla_compile") ? status(1, "domain") : NULL;
}
static OrtStatus* add(OrtCustomOpDomain* d, const OrtCustomOp* op) {
  return (void)d, registered[count_registered++] = op, NULL;
}
static OrtStatus* add_domain(OrtSessionOptions* o, OrtCustomOpDomain* d) {
  return (void)o, d ? NULL : status(1, "domain");
}
static OrtStatus* data_of(OrtValue* v, void** out) { return *out = ((Value*)v)->data, NULL; }
static OrtStatus* cast(const OrtTypeInfo* t, const OrtTensorInfo** out) { return *out = (const OrtTensorInfo*)t, NULL; }
static OrtStatus* element(const OrtTensorInfo* t, int* out) { return *out = ((const Value*)t)->type, NULL; }
static OrtStatus* rank(const OrtTensorInfo* t, size_t* out) { return *out = (size_t)((const Value*)t)->rank, NULL; }
static OrtStatus* dims(const OrtTensorInfo* t, int64_t* out, size_t n) {
  return memcpy(out, ((const Value*)t)->shape, n * sizeof *out), NULL;
}
static OrtStatus* shape_of(const OrtValue* v, OrtTensorInfo** out) { return *out = (OrtTensorInfo*)(uintptr_t)v, NULL; }
static void nothing(void* any) { (void)any; }
static OrtStatus* real(const OrtKernelInfo* i, const char* name, float* out) {
  const Node* n = (const Node*)i;
  if (!strcmp(name, "scale")) return *out = n->scale, n->has_scale ? NULL : status(1, "no attribute");
  if (n->softcap == 0) return status(1, "no attribute");
  return *out = n->softcap, NULL;
}
static OrtStatus* integer(const OrtKernelInfo* i, const char* name, int64_t* out) {
  const Node* n = (const Node*)i;
  *out = !strcmp(name, "causal") ? n->causal : !strcmp(name, "window") ? n->window : n->value_width;
  return *out ? NULL : status(1, "no attribute");
}
static OrtStatus* inputs(const OrtKernelContext* c, size_t* out) {
  return *out = (size_t)((const Node*)c)->inputs, NULL;
}
static OrtStatus* outputs(const OrtKernelContext* c, size_t* out) {
  return *out = (size_t)((const Node*)c)->outputs, NULL;
}
static OrtStatus* input(const OrtKernelContext* c, size_t i, const OrtValue** out) {
  const Value* v = &((const Node*)c)->input[i];
  return *out = v->present ? (const OrtValue*)v : NULL, NULL;
}
static OrtStatus* output(OrtKernelContext* c, size_t i, const int64_t* shape, size_t n, OrtValue** out) {
  Value* v = &((Node*)c)->output[i];
  if (!v->present) return *out = NULL, NULL;
  v->rank = (int64_t)n;
  memcpy(v->shape, shape, n * sizeof *shape);
  return *out = (OrtValue*)v, NULL;
}
static OrtStatus* info_inputs(const OrtKernelInfo* i, size_t* out) { return inputs((const OrtKernelContext*)i, out); }
static OrtStatus* info_type(const OrtKernelInfo* info, size_t i, OrtTypeInfo** out) {
  const Node* n = (const Node*)info;
  static Value unknown;
  if (!n->input[i].present) return status(1, "no such input");
  unknown = n->input[i];
  for (int axis = 0; axis < 4; axis++) unknown.shape[axis] = n->static_shapes ? unknown.shape[axis] : -1;
  return *out = (OrtTypeInfo*)&unknown, NULL;
}
static OrtStatus* allocator(const OrtKernelInfo* i, int type, OrtAllocator** out) {
  return (void)i, *out = (OrtAllocator*)allocator_of, type ? status(1, "memory") : NULL;
}
static OrtStatus* memory(const OrtAllocator* a, const OrtMemoryInfo** out) {
  return *out = (const OrtMemoryInfo*)a, NULL;
}
static OrtStatus* ordinal(const OrtMemoryInfo* m, int* out) { return *out = (const char*)m != allocator_of, NULL; }
static OrtStatus* stream_of(const OrtKernelContext* c, void** out) {
  return *out = (void*)((const Node*)c)->stream, NULL;
}
static OrtStatus* allocate(OrtAllocator* a, size_t bytes, void** out) {
  const size_t whole = (bytes + 255) / 256 * 256;
  *out = scratch[machine.allocated++ % 256] = memset(aligned_alloc(256, whole), 0xff, whole);  // NaN, and -1
  return (char*)a == allocator_of ? NULL : status(1, "allocator");
}
static OrtStatus* buffer(const OrtKernelContext* c, const OrtMemoryInfo* m, size_t bytes, void** out) {
  return (void)c, allocate((OrtAllocator*)(uintptr_t)m, bytes, out);
}
static OrtStatus* release(OrtAllocator* a, void* p) {  // kept: the test runs the kernels afterwards
  machine.freed++;
  return (char*)a == allocator_of && p == scratch[(machine.allocated - 1) % 256] ? NULL : status(1, "not ours");
}
static void unused(void) { abort(); }

static OrtApi api;
static int version_of_api = ORT_API;
#define SET(name, function) api.slot[ORT_SLOT_##name] = (void (*)(void))function
static const OrtApi* get_api(uint32_t version) {
  for (int i = 0; i < 285; i++) api.slot[i] = unused;
  SET(CreateStatus, status), SET(ReleaseStatus, release_status), SET(CreateCustomOpDomain, create_domain);
  SET(CustomOpDomain_Add, add), SET(AddCustomOpDomain, add_domain), SET(GetTensorMutableData, data_of);
  SET(CastTypeInfoToTensorInfo, cast), SET(GetTensorElementType, element), SET(GetDimensionsCount, rank);
  SET(GetDimensions, dims), SET(GetTensorTypeAndShape, shape_of), SET(ReleaseTensorTypeAndShapeInfo, nothing);
  SET(ReleaseTypeInfo, nothing), SET(ReleaseAllocator, nothing), SET(KernelInfoGetAttribute_float, real);
  SET(KernelInfoGetAttribute_int64, integer), SET(KernelContext_GetInputCount, inputs);
  SET(KernelContext_GetOutputCount, outputs), SET(KernelContext_GetInput, input), SET(KernelContext_GetOutput, output);
  SET(KernelInfo_GetInputCount, info_inputs), SET(KernelInfo_GetInputTypeInfo, info_type);
  SET(KernelInfoGetAllocator, allocator), SET(AllocatorGetInfo, memory), SET(MemoryInfoGetId, ordinal);
  SET(KernelContext_GetGPUComputeStream, stream_of), SET(KernelContext_GetScratchBuffer, buffer);
  SET(AllocatorAlloc, allocate), SET(AllocatorFree, release);
  return version > (uint32_t)version_of_api ? NULL : &api;
}
static const char* version_string(void) { return "a fake"; }
static const OrtApiBase base = {get_api, version_string};

static char message[1200];
static const char* told(OrtStatus* s) {
  snprintf(message, sizeof message, "%d: %s", ((Status*)s)->code, ((Status*)s)->text);
  release_status(s);
  return message;
}

// Registers a library; how many operators it has, or -1 and a message. `version`: of the fake ONNX Runtime's interface.
EXPORT int fake_register(OrtStatus* (*entry)(OrtSessionOptions*, const OrtApiBase*), int version) {
  count_registered = 0;
  version_of_api = version;
  OrtStatus* s = entry(NULL, &base);
  return s ? (told(s), -1) : count_registered;
}

// Makes the kernel of a node and runs it `times` over, changing the settings in between as a session would that
// captures the last run (`capture`). NULL, or what went wrong.
EXPORT const char* fake_run(const char* provider, Node* node, int times, int capture) {
  for (int i = 0; i < count_registered; i++) {
    const OrtCustomOp* op = registered[i];
    const char* of = op->GetExecutionProviderType(op);
    if (strcmp(of ? of : "CPU", provider) || op->GetInputType(op, 0) != node->input[0].type ||
        op->GetInputType(op, 1) != node->input[1].type)
      continue;
    void* kernel = NULL;
    OrtStatus* s = op->CreateKernelV2(op, &api, (const OrtKernelInfo*)node, &kernel);
    for (int run = 0; !s && run < times; run++) {
      machine.capturing = machine.capture_status = capture && run + 1 == times;
      s = op->KernelComputeV2(kernel, (OrtKernelContext*)node);
    }
    machine.capturing = machine.capture_status = 0;
    if (kernel) op->KernelDestroy(kernel);
    return s ? told(s) : NULL;
  }
  return "no operator for these types";
}
