#include "cuda.h"

#include <limits.h>

enum { MIN_SPLIT = 256, GROUP = 16, COMBINE_COLUMNS = 256, ALIGNMENT = 256 };
static const double LOG2E = 1.4426950408889634;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static Kernel request(int role, int arch) {
  return (Kernel){.role = role,
                  .arch = arch,
                  .dtype = ANY,
                  .query = ANY,
                  .La = ANY,
                  .Lb = ANY,
                  .Lv = ANY,
                  .values = ANY,
                  .mask = ANY,
                  .softcap = ANY,
                  .window = ANY,
                  .causal = ANY,
                  .direct = ANY,
                  .sinks = ANY,
                  .max_rows = ANY,
                  .block_n = ANY};
}

// Requests a node's attention kernels for any mask. Returns false if a width does not fit an int.
static int attention(const Node* node, const Call* c, int arch, Kernel* out) {
  *out = request(ATTEND, arch);
  out->dtype = c->dtype;
  out->query = c->query_dtype;
  out->La = (int)c->La;
  out->Lb = (int)c->Lb;
  out->Lv = (int)c->Lv;
  out->values = c->values != NULL;
  out->softcap = node->softcap > 0;
  out->window = node->window > 0;
  return c->La <= INT_MAX && c->Lb <= INT_MAX && c->Lv <= INT_MAX;
}

static OrtStatus* not_covered(const OrtApi* api, const Node* node, int arch, const Call* c) {
  return mla_error(
      api, ORT_NOT_IMPLEMENTED,
      "this library has no kernel for sm_%d, %s query and %s rows, La+Lb = %lld+%lld, Lv = %lld%s%s%s; build "
      "it again with these dims, or do not register it and the model's own function is used",
      arch, mla_dtype_name(c->query_dtype), mla_dtype_name(c->dtype), (long long)c->La, (long long)c->Lb,
      (long long)c->Lv, c->values ? " of separate values" : "", node->softcap > 0 ? ", softcap" : "",
      node->window > 0 ? ", window" : "");
}

static OrtStatus* mask_type(const OrtApi* api, const Call* c) {
  if (!c->mask || c->mask_dtype == ORT_BOOL || c->mask_dtype == c->dtype) return NULL;
  return mla_error(api, ORT_NOT_IMPLEMENTED, "mask is %s beside %s rows, the CUDA kernels take bool or %s; add a Cast",
                   mla_dtype_name(c->mask_dtype), mla_dtype_name(c->dtype), mla_dtype_name(c->dtype));
}

OrtStatus* mla_prepare(const OrtApi* api, Device* device, const Node* node, const Call* c) {
  const int arch = device->gpu.arch;
  Kernel attend, list = request(LIST, arch), scan = request(SCAN, arch), combine = request(COMBINE, arch);
  TRY(mask_type(api, c));
  if (!attention(node, c, arch, &attend) || !mla_find(&attend, 0)) return not_covered(api, node, arch, c);
  combine.dtype = c->query_dtype;
  combine.Lv = (int)c->Lv;
  scan.window = attend.window;
  TRY(mla_load(api, device, &attend));
  TRY(mla_load(api, device, &combine));
  TRY(mla_load(api, device, &list));
  scan.dtype = c->dtype;
  TRY(mla_load(api, device, &scan));
  scan.dtype = ORT_BOOL;
  return mla_load(api, device, &scan);
}

static OrtStatus* sizes(const OrtApi* api, const Call* c) {
  const int64_t limit = INT_MAX, widest = c->Lv > c->La + c->Lb ? c->Lv : c->La + c->Lb;
  if (c->B <= MAX_BATCH && c->B * c->S * c->H <= limit && c->C * (widest + 1) <= limit) return NULL;
  return mla_error(
      api, ORT_NOT_IMPLEMENTED,
      "B = %lld, S = %lld, H = %lld, C = %lld: the kernels take %d requests, and offsets below 2^31 inside "
      "one; call it in parts",
      (long long)c->B, (long long)c->S, (long long)c->H, (long long)c->C, MAX_BATCH);
}

static OrtStatus* alignment(const OrtApi* api, const Call* c) {
  const void* addresses[] = {c->query, c->latent, c->rope, c->values, c->mask, c->seq_lens, c->sinks, c->out, c->lse};
  for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
    if ((uintptr_t)addresses[i] % 16)
      return mla_error(
          api, ORT_INVALID_ARGUMENT,
          "a tensor is bound at an address that is not a multiple of 16 bytes; copy it into one of its own");
  return NULL;
}

static int mask_kind(const Call* c) {
  if (!c->mask) return NO_MASK;
  if (c->mask_dtype != ORT_BOOL) return FLOAT_MASK;
  return c->mask_h || c->mask_s ? BOOL_MASK : LISTED_MASK;
}

static size_t piece(size_t* bytes, int64_t count, int64_t each) {
  const size_t at = *bytes;
  *bytes += ((size_t)count * (size_t)each + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return at;
}

// Plans the two kernels that turn a mask into lists of tiles (kernels/triton/tiles_triton.py), and their scratch.
static OrtStatus* plan_mask(const OrtApi* api, const Node* node, const Call* c, const Kernel* attend, int block_n,
                            Plan* p) {
  Kernel scan = request(SCAN, attend->arch), list = request(LIST, attend->arch);
  const int64_t tiles = ceil_div(c->T, block_n);
  p->capacity = tiles > 1 ? tiles : 1;
  p->lists = c->mask_b || c->seq_lens ? c->B : 1;
  if (6 * p->lists * p->capacity > INT_MAX)
    return mla_error(api, ORT_NOT_IMPLEMENTED, "B = %lld, T = %lld with a mask: more tiles than the kernels can list",
                     (long long)c->B, (long long)c->T);
  scan.dtype = c->mask_dtype;
  scan.block_n = block_n;
  scan.window = attend->window;
  scan.causal = attend->causal;
  p->scan = mla_find(&scan, 0);
  p->list = mla_find(&list, 0);
  p->work = piece(&p->bytes, 6 * p->lists * p->capacity, sizeof(int64_t));
  return p->scan && p->list ? NULL : not_covered(api, node, attend->arch, c);
}

OrtStatus* mla_plan(const OrtApi* api, const Gpu* gpu, const Node* node, const Call* c, Plan* p) {
  const int64_t rows = c->S * c->H;
  Kernel attend, combine = request(COMBINE, gpu->arch);
  TRY(mask_type(api, c));
  TRY(sizes(api, c));
  *p = (Plan){.S = c->S, .H = c->H};
  // If the order of the queries does not matter, S tokens of H heads are one token of S*H heads, which sees all keys.
  // So the kernels for causal calls also serve calls that are not causal.
  const int ordered = c->S > 1 && (node->causal || node->window > 0);
  if (!ordered && !c->mask_h && !c->mask_s) p->S = 1, p->H = rows;
  if (!attention(node, c, gpu->arch, &attend)) return not_covered(api, node, gpu->arch, c);
  attend.mask = mask_kind(c);
  attend.causal = p->S == 1 ? ANY : node->causal != 0;
  const Kernel* tile = mla_tile(&attend, rows);
  if (!tile) return not_covered(api, node, gpu->arch, c);
  p->splits = mla_splits(tile, gpu, c->B, rows, c->T);
  // A single split without sinks writes the result directly if there is a kernel for that.
  attend.max_rows = tile->max_rows;
  attend.direct = 1;
  p->attend = p->splits == 1 && !c->sinks ? mla_find(&attend, 0) : NULL;
  if (!p->attend) {
    combine.dtype = c->query_dtype;
    combine.Lv = (int)c->Lv;
    combine.sinks = c->sinks != NULL;
    attend.direct = 0;
    p->attend = mla_find(&attend, 0);
    p->combine = mla_find(&combine, 0);
    if (!p->attend || !p->combine) return not_covered(api, node, gpu->arch, c);
    p->part = piece(&p->bytes, p->splits * c->B * rows, (int64_t)sizeof(float) * c->Lv);
    p->part_lse = piece(&p->bytes, p->splits * c->B * rows, sizeof(float));
  }
  if (!c->lse) p->lse = piece(&p->bytes, c->B * rows, sizeof(float));
  for (int i = 0; i < p->attend->count; i++)
    if (p->attend->arguments[i] == A_staged)
      p->staged = piece(&p->bytes, c->B * rows, mla_dtype_bytes(c->dtype) * (c->La + c->Lb));
  return c->mask ? plan_mask(api, node, c, &attend, tile->block_n, p) : NULL;
}

static void* writable(const void* address) { return (void*)(uintptr_t)address; }

static void fill(const Device* device, const Node* node, const Call* c, const Plan* p, char* scratch, Argument* a) {
  const int64_t tokens = MIN_SPLIT / p->attend->block_n, row = c->La + c->Lb;
  const double scale = node->scale, softcap = node->softcap;
  const int64_t numbers[][2] = {{A_query_b, c->S * c->H * row},
                                {A_query_s, p->H * row},
                                {A_query_h, row},
                                {A_latent_b, c->C * c->La},
                                {A_rope_b, c->C * c->Lb},
                                {A_values_b, c->C * c->Lv},
                                {A_mask_b, c->mask_b},
                                {A_mask_h, c->mask_h},
                                {A_mask_s, c->mask_s},
                                {A_work_b, p->lists > 1 ? p->capacity : 0},
                                {A_work_plane, p->capacity * p->lists},
                                {A_S, p->S},
                                {A_H, p->H},
                                {A_T, c->T},
                                {A_least, tokens > 1 ? tokens : 1},
                                {A_window, node->window},
                                {A_HM, c->mask_h ? c->H : 1},
                                {A_SM, c->S > 1 && (c->mask_s || node->causal || node->window > 0) ? c->S : 1},
                                {A_capacity, p->capacity},
                                {A_NS, p->splits}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) a[numbers[i][0]].integer = numbers[i][1];
  a[A_scale].real = (float)(softcap > 0 ? scale / softcap : scale * LOG2E);
  a[A_softcap].real = (float)(softcap * LOG2E);
  a[A_query].address = writable(c->query);
  a[A_latent].address = writable(c->latent);
  a[A_rope].address = writable(c->rope);
  a[A_values].address = writable(c->values);
  a[A_out].address = c->out;
  a[A_lse].address = c->lse ? (void*)c->lse : scratch + p->lse;
  a[A_part].address = scratch + p->part;
  a[A_part_lse].address = scratch + p->part_lse;
  a[A_staged].address = scratch + p->staged;
  a[A_lengths].address = c->seq_lens ? writable(c->seq_lens) : (void*)(uintptr_t)device->no_lengths;
  a[A_work].address = scratch + p->work;
  a[A_mask].address = writable(c->mask);
  a[A_sinks].address = writable(c->sinks);
}

OrtStatus* mla_run(const OrtApi* api, Device* device, const Node* node, const Call* c, const Plan* p, char* scratch,
                   CUstream stream) {
  Argument a[ARGUMENTS] = {{0}};
  const int64_t rows = c->S * c->H, columns = c->Lv < COMBINE_COLUMNS ? c->Lv : COMBINE_COLUMNS;
  TRY(alignment(api, c));
  fill(device, node, c, p, scratch, a);
  if (p->scan) {
    const int64_t scan[3] = {ceil_div(p->capacity, GROUP), p->lists, 1}, list[3] = {p->lists, 1, 1};
    TRY(mla_launch(api, device, p->scan, stream, scan, a));
    TRY(mla_launch(api, device, p->list, stream, list, a));
  }
  const int64_t attend[3] = {ceil_div(rows, p->attend->block_m), p->splits, c->B};
  TRY(mla_launch(api, device, p->attend, stream, attend, a));
  if (!p->combine) return NULL;
  a[A_H].integer = c->H;  // there is one sink per head
  const int64_t combine[3] = {c->B * rows, ceil_div(c->Lv, columns), 1};
  return mla_launch(api, device, p->combine, stream, combine, a);
}
