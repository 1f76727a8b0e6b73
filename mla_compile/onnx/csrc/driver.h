// The CUDA driver, looked up at run time, so that a machine without a driver can load the library for its CPU kernel.

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

enum { MAX_BATCH = 65535 };  // the most blocks along a grid's second and third axis

typedef struct {
  int ordinal;
  Gpu gpu;
  CUcontext context;       // the device's primary context, which ONNX Runtime uses too
  CUdeviceptr no_lengths;  // int64 [MAX_BATCH], beyond any length, passed by a node without seq_lens
  CUfunction* functions;   // one per entry of mla_kernels; NULL if not loaded yet
} Device;

// Opens a device once. Returns an error if there is no driver, no such device, or no kernel for it.
OrtStatus* mla_device(const OrtApi* api, int ordinal, Device** out);

// Loads every kernel that fits a request on the device.
OrtStatus* mla_load(const OrtApi* api, Device* device, const Kernel* request);

typedef union {
  void* address;
  int64_t integer;  // little-endian: an int32 parameter is read from the same place
  float real;
} Argument;

// Launches on a stream. A kernel that is not loaded yet is loaded now, which a stream that is being captured forbids.
OrtStatus* mla_launch(const OrtApi* api, Device* device, const Kernel* kernel, CUstream stream, const int64_t grid[3],
                      const Argument* arguments);

// Returns the number of a device's architecture, as in `sm_90`; -1 if there is no device. Changes nothing.
int mla_device_arch(int ordinal);

#endif
