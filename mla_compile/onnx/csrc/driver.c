#define _POSIX_C_SOURCE 200809L
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {  // CUdevice_attribute, CUfunction_attribute
  MULTIPROCESSORS = 16,
  MEMORY_KILOHERTZ = 36,
  BUS_BITS = 37,
  MAJOR = 75,
  MINOR = 76,
  SHARED_OPTIN = 97,
  REGISTERS = 4,
  DYNAMIC_SHARED = 8
};
enum { DEVICES = 64, NOT_CAPTURING = 0 };

// FUNCTION(name in libcuda, our name, parameters)
#define FUNCTIONS                                                                                           \
  FUNCTION(cuInit, init, (unsigned flags))                                                                  \
  FUNCTION(cuDeviceGet, device_get, (CUdevice * out, int ordinal))                                          \
  FUNCTION(cuDeviceGetAttribute, attribute, (int* out, int which, CUdevice device))                         \
  FUNCTION(cuDevicePrimaryCtxRetain, retain, (CUcontext * out, CUdevice device))                            \
  FUNCTION(cuCtxGetCurrent, current, (CUcontext * out))                                                     \
  FUNCTION(cuCtxPushCurrent_v2, push, (CUcontext context))                                                  \
  FUNCTION(cuCtxPopCurrent_v2, pop, (CUcontext * out))                                                      \
  FUNCTION(cuModuleLoadData, load, (CUmodule * out, const void* image))                                     \
  FUNCTION(cuModuleGetFunction, get, (CUfunction * out, CUmodule module, const char* name))                 \
  FUNCTION(cuFuncGetAttribute, function_attribute, (int* out, int which, CUfunction function))              \
  FUNCTION(cuFuncSetAttribute, set_attribute, (CUfunction function, int which, int value))                  \
  FUNCTION(cuMemAlloc_v2, allocate, (CUdeviceptr * out, size_t bytes))                                      \
  FUNCTION(cuMemsetD8_v2, fill, (CUdeviceptr to, unsigned char value, size_t bytes))                        \
  FUNCTION(cuStreamIsCapturing, capturing, (CUstream stream, int* out))                                     \
  FUNCTION(cuGetErrorString, message, (CUresult result, const char** out))                                  \
  FUNCTION(cuLaunchKernel, launch,                                                                          \
           (CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, \
            unsigned shared, CUstream stream, void** arguments, void** extra))

#define FUNCTION(symbol, name, parameters) CUresult(*name) parameters;
static struct {
  FUNCTIONS
} cuda;
#undef FUNCTION

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char why_not[256];  // empty if the driver was found
static Device* devices[DEVICES];

static void open_driver(void) {
  const char* path = getenv("MLA_COMPILE_LIBCUDA");
  void* handle = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  const char* missing = handle ? NULL : "libcuda.so.1";
#define FUNCTION(symbol, name, parameters)                        \
  if (handle) {                                                   \
    void* found = dlsym(handle, #symbol);                         \
    if (!found && !missing) missing = #symbol " of libcuda.so.1"; \
    memcpy(&cuda.name, &found, sizeof found);                     \
  }
  FUNCTIONS
#undef FUNCTION
  if (!missing && cuda.init(0)) missing = "a CUDA device, or a driver that works";
  if (missing) {
    strcpy(why_not, "missing on this machine: ");
    strncat(why_not, missing, sizeof why_not - strlen(why_not) - 1);
  }
}

static OrtStatus* failed(const OrtApi* api, CUresult result, const char* doing) {
  if (!result) return NULL;
  const char* text = NULL;
  cuda.message(result, &text);
  return mla_error(api, ORT_EP_FAIL, "%s failed: %s (CUDA error %d)", doing, text ? text : "unknown", result);
}

static int capability(CUdevice device) {
  int major = 0, minor = 0;
  cuda.attribute(&major, MAJOR, device);
  cuda.attribute(&minor, MINOR, device);
  return major * 10 + minor;
}

int mla_device_arch(int ordinal) {
  CUdevice device;
  pthread_once(&once, open_driver);
  return *why_not || cuda.device_get(&device, ordinal) ? -1 : capability(device);
}

// Returns the newest architecture of the library that the device runs; code from sm_90 on runs on its own only.
static int best_arch(int has) {
  int best = -1;
  for (int i = 0; i < mla_kernel_count; i++) {
    const int arch = mla_kernels[i].arch;
    if ((arch == has || (has < 90 && arch / 10 == has / 10 && arch < has)) && arch > best) best = arch;
  }
  return best;
}

// Makes the device's context current; `pushed` says whether leave() has something to undo.
static OrtStatus* enter(const OrtApi* api, const Device* device, int* pushed) {
  CUcontext now = NULL;
  *pushed = 0;
  if (!cuda.current(&now) && now == device->context) return NULL;
  TRY(failed(api, cuda.push(device->context), "making the CUDA context current"));
  *pushed = 1;
  return NULL;
}

static void leave(int pushed) {
  CUcontext dropped;
  if (pushed) cuda.pop(&dropped);
}

static OrtStatus* open_device(const OrtApi* api, int ordinal, Device* d) {
  CUdevice device;
  int kilohertz = 0, bits = 0, pushed;
  TRY(failed(api, cuda.device_get(&device, ordinal), "finding the CUDA device"));
  const int has = capability(device);
  d->ordinal = ordinal;
  d->gpu.arch = best_arch(has);
  if (d->gpu.arch < 0)
    return mla_error(api, ORT_EP_FAIL,
                     "this library has no kernels for sm_%d; build it again with --arch sm_%d, or do not register it",
                     has, has);
  TRY(failed(api, cuda.attribute(&d->gpu.multiprocessors, MULTIPROCESSORS, device), "reading a device attribute"));
  TRY(failed(api, cuda.attribute(&d->gpu.smem, SHARED_OPTIN, device), "reading a device attribute"));
  if (!cuda.attribute(&kilohertz, MEMORY_KILOHERTZ, device) && !cuda.attribute(&bits, BUS_BITS, device))
    d->gpu.bandwidth = 2e3 * kilohertz * bits / 8;  // memory transfers twice in a cycle
  TRY(failed(api, cuda.retain(&d->context, device), "retaining the primary CUDA context"));
  TRY(enter(api, d, &pushed));
  CUresult result = cuda.allocate(&d->no_lengths, MAX_BATCH * sizeof(int64_t));
  if (!result) result = cuda.fill(d->no_lengths, 0x7f, MAX_BATCH * sizeof(int64_t));
  leave(pushed);
  return failed(api, result, "allocating device memory");
}

OrtStatus* mla_device(const OrtApi* api, int ordinal, Device** out) {
  OrtStatus* status = NULL;
  pthread_once(&once, open_driver);
  if (*why_not) return mla_error(api, ORT_EP_FAIL, "%s", why_not);
  if (ordinal < 0 || ordinal >= DEVICES) return mla_error(api, ORT_EP_FAIL, "there is no CUDA device %d", ordinal);
  pthread_mutex_lock(&lock);
  if (!devices[ordinal]) {
    Device* made = calloc(1, sizeof *made);
    CUfunction* functions = calloc((size_t)mla_kernel_count + 1, sizeof *functions);
    if (!made || !functions)
      status = mla_error(api, ORT_FAIL, "no memory");
    else
      status = open_device(api, ordinal, made);
    if (status) {
      free(made);
      free(functions);
    } else {
      made->functions = functions;
      devices[ordinal] = made;
    }
  }
  *out = devices[ordinal];
  pthread_mutex_unlock(&lock);
  return status;
}

// Called with the lock held and the context current.
static OrtStatus* load_one(const OrtApi* api, Device* device, const Kernel* kernel) {
  CUfunction *place = device->functions + (kernel - mla_kernels), function;
  CUmodule module;
  int registers;
  if (*place) return NULL;
  if (kernel->shared > device->gpu.smem)
    return mla_error(api, ORT_EP_FAIL,
                     "a kernel for sm_%d needs %d bytes of shared memory, the device has %d; build the "
                     "library again for this device's own architecture",
                     kernel->arch, kernel->shared, device->gpu.smem);
  TRY(failed(api, cuda.load(&module, mla_images + kernel->offset), "loading a kernel"));
  TRY(failed(api, cuda.get(&function, module, kernel->name), "finding a kernel"));
  // Reading an attribute makes lazy drivers load the kernel now; a stream that is being captured forbids loading.
  TRY(failed(api, cuda.function_attribute(&registers, REGISTERS, function), "loading a kernel"));
  if (kernel->shared > 48 * 1024)
    TRY(failed(api, cuda.set_attribute(function, DYNAMIC_SHARED, kernel->shared), "reserving shared memory"));
  __atomic_store_n(place, function, __ATOMIC_RELEASE);
  return NULL;
}

OrtStatus* mla_load(const OrtApi* api, Device* device, const Kernel* request) {
  int pushed;
  TRY(enter(api, device, &pushed));
  OrtStatus* status = NULL;
  pthread_mutex_lock(&lock);
  for (const Kernel* k = mla_find(request, 0); k && !status; k = mla_find(request, (int)(k - mla_kernels) + 1))
    status = load_one(api, device, k);
  pthread_mutex_unlock(&lock);
  leave(pushed);
  return status;
}

OrtStatus* mla_launch(const OrtApi* api, Device* device, const Kernel* kernel, CUstream stream, const int64_t grid[3],
                      const Argument* arguments) {
  void *none = NULL, *given[ARGUMENTS + 2];
  int pushed;
  for (int i = 0; i < kernel->count; i++) given[i] = (void*)(uintptr_t)(arguments + kernel->arguments[i]);
  given[kernel->count] = given[kernel->count + 1] = &none;  // Triton's global and profile scratch, both empty
  CUfunction* place = device->functions + (kernel - mla_kernels);
  CUfunction function = __atomic_load_n(place, __ATOMIC_ACQUIRE);
  TRY(enter(api, device, &pushed));
  OrtStatus* status = NULL;
  if (!function) {
    int state = NOT_CAPTURING;
    status = failed(api, cuda.capturing(stream, &state), "asking whether the stream is captured");
    if (!status && state != NOT_CAPTURING)
      status = mla_error(api, ORT_EP_FAIL,
                         "a kernel has to be loaded while the stream is captured; run the model once "
                         "with these shapes before the capture");
    pthread_mutex_lock(&lock);
    if (!status) status = load_one(api, device, kernel);
    pthread_mutex_unlock(&lock);
    function = *place;
  }
  if (!status)
    status = failed(api,
                    cuda.launch(function, (unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2],
                                (unsigned)kernel->threads, 1, 1, (unsigned)kernel->shared, stream, given, NULL),
                    "launching a kernel");
  leave(pushed);
  return status;
}
