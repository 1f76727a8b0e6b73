// The CUDA driver, found at run time: a machine without one can load the library and use its CPU kernel.

#ifndef MLA_DRIVER_H
#define MLA_DRIVER_H

#include "kernels.h"
#include "node.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef uint64_t CUdeviceptr;

enum { MAX_BATCH = 65535 };  // blocks along a grid's second and third axis

typedef struct {
  int ordinal;
  Gpu gpu;
  CUcontext context;       // the device's primary one, which ONNX Runtime uses too
  CUdeviceptr no_lengths;  // int64 [MAX_BATCH], each beyond any length: what a node without seq_lens passes
  CUfunction* functions;   // one for each entry of mla_kernels; NULL: not loaded yet
} Device;

// The device of this number, opened once. An error where there is no driver, no such device, or no kernels for it.
OrtStatus* mla_device(const OrtApi* api, int ordinal, Device** out);

// Loads every kernel that a request fits on the device.
OrtStatus* mla_load(const OrtApi* api, Device* device, const Kernel* request);

typedef union {
  void* address;
  int64_t integer;  // little-endian: an int32 parameter is read from the same place
  float real;
} Argument;

// Launches on a stream; the kernel is loaded now where it was not, which a stream that is being captured forbids.
OrtStatus* mla_launch(const OrtApi* api, Device* device, const Kernel* kernel, CUstream stream, const int64_t grid[3],
                      const Argument* arguments);

// The architecture of a device as in `sm_90`; -1 where there is none. Changes nothing.
int mla_device_arch(int ordinal);

#endif
