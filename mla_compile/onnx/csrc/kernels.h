// The compiled kernels that a library holds, as build.py writes them into a generated table.c, and the look-up in it.

#ifndef MLA_KERNELS_H
#define MLA_KERNELS_H

#include <stdint.h>

enum { ATTEND, SCAN, LIST, COMBINE };                         // what a kernel does
enum { NO_MASK, LISTED_MASK, BOOL_MASK, FLOAT_MASK, MASKS };  // what the attention loop reads of the mask
enum { ANY = -1 };

// Parameters of the kernels by name; build.py refers to them as A_<name>. Addresses first, then numbers.
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

// One kernel for one architecture. Fields that mean nothing for a role are ANY; a field of a request that is ANY
// matches.
typedef struct {
  int role, arch, dtype;         // of the rows; of the mask for SCAN, of the result for COMBINE, ANY for LIST
  int query;                     // ATTEND: dtype of query and result
  int La, Lb, Lv, values;        // ATTEND, COMBINE (Lv); values: read from a tensor of their own
  int mask;                      // ATTEND: one of the enumeration above
  int softcap, window;           // ATTEND, SCAN (window): compiled for it
  int causal, direct, sinks;     // ATTEND: causal, direct. SCAN: causal. COMBINE: sinks
  int max_rows;                  // ATTEND: for up to so many query rows S*H; 0: any number
  int block_m, block_n;          // the tile; SCAN has block_n
  int occupancy, smem;           // blocks a multiprocessor can hold; the plan's bound on a block's shared memory
  int depth;                     // tiles on their way while one is worked on
  double t0_us, tile_us;         // the plan's times of a block and of a tile
  const char* name;              // in the image
  uint64_t offset, bytes;        // of the image, in mla_images
  int shared, threads, spilled;  // of a launch; bytes of registers in memory, for each thread
  int count;                     // of arguments
  const uint8_t* arguments;
} Kernel;

extern const Kernel mla_kernels[];
extern const int mla_kernel_count;
extern const uint8_t mla_images[];
extern const char mla_manifest[];

// The first kernel of the table that a request fits, at or after `from`; NULL where there is none.
const Kernel* mla_find(const Kernel* request, int from);

// The attention kernels' tile for `rows` query rows: the first row of the table is the tile for the fewest.
const Kernel* mla_tile(const Kernel* request, int64_t rows);

typedef struct {
  int arch, multiprocessors, smem;
  double bandwidth;  // bytes/s; 0: unknown, and the architecture's usual one is taken
} Gpu;

// The number of splits of each request's tokens that takes least, as kernels/plan.py has it.
int64_t mla_splits(const Kernel* tile, const Gpu* gpu, int64_t batch, int64_t rows, int64_t tokens);

#endif
