// The compiled kernels of a library, in the table.c that build.py generates, and the look-up in this table.

#ifndef MLA_KERNELS_H
#define MLA_KERNELS_H

#include <stdint.h>

enum { ATTEND, SCAN, LIST, COMBINE };                         // what a kernel does
enum { NO_MASK, LISTED_MASK, BOOL_MASK, FLOAT_MASK, MASKS };  // what the attention loop reads from the mask
enum { ANY = -1 };

// The kernels' parameters by name; build.py refers to them as A_<name>. Addresses come first, then numbers.
enum {
  A_query,
  A_latent,
  A_rope,
  A_values,
  A_out,
  A_lse,
  A_part,
  A_part_lse,
  A_staged,
  A_lengths,
  A_work,
  A_mask,
  A_sinks,
  ADDRESSES,
  A_scale = ADDRESSES,
  A_softcap,
  A_query_b,
  A_query_s,
  A_query_h,
  A_latent_b,
  A_rope_b,
  A_values_b,
  A_mask_b,
  A_mask_h,
  A_mask_s,
  A_work_b,
  A_work_plane,
  A_S,
  A_H,
  A_T,
  A_least,
  A_window,
  A_HM,
  A_SM,
  A_capacity,
  A_NS,
  ARGUMENTS
};

// One kernel for one architecture. Fields that do not apply to a role are ANY. In a request, a field that is ANY
// matches every value.
typedef struct {
  int role, arch, dtype;         // dtype: of the rows; SCAN: of the mask; COMBINE: of the result; LIST: ANY
  int query;                     // ATTEND: dtype of query and result
  int La, Lb, Lv, values;        // ATTEND, COMBINE (Lv); values: whether values are a separate tensor
  int mask;                      // ATTEND: one of the enumeration above
  int softcap, window;           // ATTEND, SCAN (window): whether it is compiled for this feature
  int causal, direct, sinks;     // ATTEND: causal, direct. SCAN: causal. COMBINE: sinks
  int max_rows;                  // ATTEND: the most query rows S*H; 0: any number
  int block_m, block_n;          // the tile; SCAN has only block_n
  int occupancy, smem;           // blocks per multiprocessor; the plan's bound on a block's shared memory
  int depth;                     // tiles being loaded while one is computed
  double t0_us, tile_us;         // the plan's times for a block and for a tile
  const char* name;              // the kernel's name in the image
  uint64_t offset, bytes;        // of the image within mla_images
  int shared, threads, spilled;  // per launch: shared bytes, threads; per thread: spilled bytes
  int count;                     // the number of arguments
  const uint8_t* arguments;
} Kernel;

extern const Kernel mla_kernels[];
extern const int mla_kernel_count;
extern const uint8_t mla_images[];
extern const char mla_manifest[];

// Returns the first kernel at or after `from` that fits a request; NULL if there is none.
const Kernel* mla_find(const Kernel* request, int from);

// Returns the attention kernel whose tile is for `rows` query rows. The table lists tiles for the fewest rows first.
const Kernel* mla_tile(const Kernel* request, int64_t rows);

typedef struct {
  int arch, multiprocessors, smem;
  double bandwidth;  // bytes/s; 0 if unknown, which selects the architecture's usual bandwidth
} Gpu;

// Returns the fastest number of splits of each request's tokens, by the model of kernels/plan.py.
int64_t mla_splits(const Kernel* tile, const Gpu* gpu, int64_t batch, int64_t rows, int64_t tokens);

#endif
