// The part of ONNX Runtime's C interface that we use, version 21 (ONNX Runtime 1.21), so that no headers are needed.
//
// The interface is a table of function pointers that only grows at its end: a slot keeps its number and type in every
// later version, and GetApi(21) returns NULL in every earlier version. The first field of OrtCustomOp is its version.

#ifndef MLA_ORT_API_H
#define MLA_ORT_API_H

#include <stddef.h>
#include <stdint.h>

enum { ORT_API = 21 };

enum {  // OrtErrorCode
  ORT_FAIL = 1,
  ORT_INVALID_ARGUMENT = 2,
  ORT_RUNTIME_EXCEPTION = 6,
  ORT_NOT_IMPLEMENTED = 9,
  ORT_INVALID_GRAPH = 10,
  ORT_EP_FAIL = 11
};

enum {  // ONNXTensorElementDataType
  ORT_ANY = 0,
  ORT_FLOAT = 1,
  ORT_INT64 = 7,
  ORT_BOOL = 9,
  ORT_FLOAT16 = 10,
  ORT_BFLOAT16 = 16
};

enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };  // OrtCustomOpInputOutputCharacteristic
enum { ORT_DEFAULT_MEMORY = 0 };              // OrtMemType: the memory of the execution provider

typedef struct OrtStatus OrtStatus;
typedef struct OrtCustomOp OrtCustomOp;
typedef struct OrtValue OrtValue;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtShapeInferContext OrtShapeInferContext;

typedef struct {
  void (*slot[285])(void);
} OrtApi;

typedef struct {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

// SLOT(number, result, name, (parameters)): ORT(api, name)(...) calls it.
#define SLOT(number, result, name, parameters) \
  enum { ORT_SLOT_##name = number };           \
  typedef result(*ort_##name) parameters;
#define ORT(api, name) ((ort_##name)(api)->slot[ORT_SLOT_##name])

SLOT(0, OrtStatus*, CreateStatus, (int code, const char* message))
SLOT(26, OrtStatus*, CreateCustomOpDomain, (const char* domain, OrtCustomOpDomain** out))
SLOT(27, OrtStatus*, CustomOpDomain_Add, (OrtCustomOpDomain * domain, const OrtCustomOp* op))
SLOT(28, OrtStatus*, AddCustomOpDomain, (OrtSessionOptions * options, OrtCustomOpDomain* domain))
SLOT(51, OrtStatus*, GetTensorMutableData, (OrtValue * value, void** out))
SLOT(55, OrtStatus*, CastTypeInfoToTensorInfo, (const OrtTypeInfo* info, const OrtTensorInfo** out))
SLOT(60, OrtStatus*, GetTensorElementType, (const OrtTensorInfo* info, int* out))
SLOT(61, OrtStatus*, GetDimensionsCount, (const OrtTensorInfo* info, size_t* out))
SLOT(62, OrtStatus*, GetDimensions, (const OrtTensorInfo* info, int64_t* out, size_t count))
SLOT(65, OrtStatus*, GetTensorTypeAndShape, (const OrtValue* value, OrtTensorInfo** out))
SLOT(72, OrtStatus*, MemoryInfoGetId, (const OrtMemoryInfo* info, int* out))
SLOT(75, OrtStatus*, AllocatorAlloc, (OrtAllocator * allocator, size_t bytes, void** out))
SLOT(76, OrtStatus*, AllocatorFree, (OrtAllocator * allocator, void* memory))
SLOT(77, OrtStatus*, AllocatorGetInfo, (const OrtAllocator* allocator, const OrtMemoryInfo** out))
SLOT(85, OrtStatus*, KernelInfoGetAttribute_float, (const OrtKernelInfo* info, const char* name, float* out))
SLOT(86, OrtStatus*, KernelInfoGetAttribute_int64, (const OrtKernelInfo* info, const char* name, int64_t* out))
SLOT(88, OrtStatus*, KernelContext_GetInputCount, (const OrtKernelContext* context, size_t* out))
SLOT(89, OrtStatus*, KernelContext_GetOutputCount, (const OrtKernelContext* context, size_t* out))
SLOT(90, OrtStatus*, KernelContext_GetInput, (const OrtKernelContext* context, size_t index, const OrtValue** out))
SLOT(91, OrtStatus*, KernelContext_GetOutput,
     (OrtKernelContext * context, size_t index, const int64_t* shape, size_t count, OrtValue** out))
SLOT(93, void, ReleaseStatus, (OrtStatus * status))
SLOT(98, void, ReleaseTypeInfo, (OrtTypeInfo * info))
SLOT(99, void, ReleaseTensorTypeAndShapeInfo, (OrtTensorInfo * info))
SLOT(132, void, ReleaseAllocator, (OrtAllocator * allocator))
SLOT(193, OrtStatus*, KernelContext_GetGPUComputeStream, (const OrtKernelContext* context, void** out))
SLOT(230, OrtStatus*, KernelInfo_GetInputCount, (const OrtKernelInfo* info, size_t* out))
SLOT(234, OrtStatus*, KernelInfo_GetInputTypeInfo, (const OrtKernelInfo* info, size_t index, OrtTypeInfo** out))
// The caller frees the buffer with the allocator of the same memory.
SLOT(277, OrtStatus*, KernelContext_GetScratchBuffer,
     (const OrtKernelContext* context, const OrtMemoryInfo* memory, size_t bytes, void** out))
SLOT(278, OrtStatus*, KernelInfoGetAllocator, (const OrtKernelInfo* info, int memory_type, OrtAllocator** out))

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  int (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  int (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

_Static_assert(sizeof(void*) == 8 && sizeof(void (*)(void)) == 8, "the layouts above are those of 64-bit systems");
_Static_assert(sizeof(OrtCustomOp) == 26 * sizeof(void*), "OrtCustomOp has 26 words at version 21");
_Static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 17 * sizeof(void*), "OrtCustomOp: a field is missing");
_Static_assert(offsetof(OrtCustomOp, GetEndVersion) == 21 * sizeof(void*), "OrtCustomOp: a field is missing");

#endif
