// Chooses the kernel and the number of splits: kernels/plan.py in C, for the kernels of a library. The order of the
// computations is the same, in double, so that both make the same choice.

#include <stddef.h>

#include "kernels.h"
#include "node.h"

enum { MIN_SPLIT = 256, MAX_SPLITS = 128, KB = 1024 };
static const double COMBINE_US = 2.0, L2_RATE = 8e12;

static int fits(int asked, int has) { return asked == ANY || has == ANY || asked == has; }

const Kernel* mla_find(const Kernel* r, int from) {
  for (int i = from; i < mla_kernel_count; i++) {
    const Kernel* k = mla_kernels + i;
    if (k->role == r->role && fits(r->arch, k->arch) && fits(r->dtype, k->dtype) && fits(r->query, k->query) &&
        fits(r->La, k->La) && fits(r->Lb, k->Lb) && fits(r->Lv, k->Lv) && fits(r->values, k->values) &&
        fits(r->mask, k->mask) && fits(r->softcap, k->softcap) && fits(r->window, k->window) &&
        fits(r->causal, k->causal) && fits(r->direct, k->direct) && fits(r->sinks, k->sinks) &&
        fits(r->max_rows, k->max_rows) && fits(r->block_n, k->block_n))
      return k;
  }
  return NULL;
}

const Kernel* mla_tile(const Kernel* request, int64_t rows) {
  const Kernel* k = mla_find(request, 0);
  while (k && k->max_rows && rows > k->max_rows) k = mla_find(request, (int)(k - mla_kernels) + 1);
  return k;
}

static double usual_bandwidth(int arch) {  // kernels/devices.py
  return arch >= 120   ? 1.8e12
         : arch >= 100 ? 8.0e12
         : arch >= 90  ? 4.3e12
         : arch >= 89  ? 0.86e12
         : arch >= 86  ? 0.6e12
                       : 2.0e12;
}

typedef struct {
  double latency, link, step;
} Pace;

static Pace usual_pace(int arch) {  // kernels/devices.py
  return arch >= 120   ? (Pace){1.0, 0.0137, 0.39}
         : arch >= 100 ? (Pace){1.0, 0.0178, 0.51}
         : arch >= 90  ? (Pace){1.0, 0.0188, 0.54}
         : arch >= 89  ? (Pace){1.0, 0.0131, 0.37}
         : arch >= 86  ? (Pace){1.0, 0.0195, 0.55}
                       : (Pace){1.0, 0.0234, 0.67};
}

static double larger(double a, double b) { return a > b ? a : b; }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t padded(int64_t width) {
  int64_t columns = 16;
  while (columns < width) columns *= 2;
  return width ? columns : 0;
}

static double microseconds(const Kernel* k, const Gpu* gpu, int64_t batch, int64_t rows, int64_t tiles,
                           int64_t splits) {
  const int64_t row_blocks = ceil_div(rows, k->block_m), room = (gpu->smem + KB) / (k->smem + KB);
  const int64_t held = room < k->occupancy ? room : k->occupancy, per_sm = held > 1 ? held : 1;
  const int64_t slots = gpu->multiprocessors * per_sm, blocks = batch * row_blocks * splits;
  const int64_t active = blocks < slots ? blocks : slots, beside = ceil_div(active, gpu->multiprocessors);
  const int64_t separate = k->values ? padded(k->Lv) : 0, out = separate ? separate : padded(k->La);
  const int64_t row = padded(k->La) + padded(k->Lb), columns = row + separate;
  const double bandwidth = gpu->bandwidth > 0 ? gpu->bandwidth : usual_bandwidth(gpu->arch);
  const Pace pace = usual_pace(gpu->arch);
  const double readers = (double)active / (double)row_blocks;
  const double memory = 1e6 * k->block_n * (double)columns * (double)mla_dtype_bytes(k->dtype) * readers / bandwidth;
  const double units = (double)beside * k->tile_us * (double)columns / 576;
  const double chain = (double)((row + k->block_n) / 16) * pace.link + pace.step;
  const double tile = larger(larger(memory, units), larger(chain, pace.latency / k->depth));
  double combine = 0;
  if (splits > 1)
    combine = COMBINE_US + 1e6 * 8 * (double)batch * (double)rows * (double)splits * (double)out / L2_RATE;
  return (double)ceil_div(blocks, slots) * (k->t0_us + (double)ceil_div(tiles, splits) * tile) + combine;
}

int64_t mla_splits(const Kernel* k, const Gpu* gpu, int64_t batch, int64_t rows, int64_t tokens) {
  const int64_t all = ceil_div(tokens, k->block_n), tiles = all > 1 ? all : 1;
  int64_t most = tiles * k->block_n / MIN_SPLIT, best = 1;
  most = most < 1 ? 1 : most > MAX_SPLITS ? MAX_SPLITS : most;
  double least = 0;
  for (int64_t splits = 1; splits <= most; splits++) {
    const int64_t per = ceil_div(tiles, splits);
    if (ceil_div(tiles, per) != splits) continue;  // some splits would be empty, and fewer do the same work
    const double time = microseconds(k, gpu, batch, rows, tiles, splits);
    if (splits == 1 || time < 0.995 * least) best = splits, least = time;
  }
  return best;
}
