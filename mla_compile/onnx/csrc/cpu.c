// A plain decode attention on the CPU, for sessions that have the library and run without a GPU. The function body that
// ONNX Runtime uses without the library is faster. This kernel is small, and correct for every input.
//
// Blocks of query rows walk tiles of keys with the running softmax (m: maximum, l: sum):
//
//     s = scale (q . k);  m' = max(m, s);  p = e^(s - m');  l = l e^(m - m') + sum p;  acc = acc e^(m - m') + p v
//
// A query row does not use the keys that are hidden from it, so the contents of hidden cache rows do not matter.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "node.h"

enum { TILE = 64, BLOCK = 128, LANES = 16 };

static float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // The exponents' biases differ by 112; multiplying by 2^112 also normalises subnormal numbers.
  return of_bits(sign | bits_of(of_bits(rest << 13) * 0x1p112f));
}

static uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // infinity from 65520 on
  if (rest < 0x38800000)  // subnormal: the last bit of the sum is worth 2^-24, and the sum rounds to nearest even
    return (uint16_t)(sign | (bits_of(of_bits(rest) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

static uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void read_floats(int dtype, const void* from, int64_t at, int64_t count, float* to) {
  if (dtype == ORT_FLOAT)
    memcpy(to, (const float*)from + at, (size_t)count * sizeof *to);
  else if (dtype == ORT_FLOAT16)
    for (int64_t i = 0; i < count; i++) to[i] = half_to_float(((const uint16_t*)from)[at + i]);
  else
    for (int64_t i = 0; i < count; i++) to[i] = of_bits((uint32_t)((const uint16_t*)from)[at + i] << 16);
}

static void write_floats(int dtype, const float* from, int64_t count, void* to, int64_t at) {
  if (dtype == ORT_FLOAT)
    memcpy((float*)to + at, from, (size_t)count * sizeof *from);
  else if (dtype == ORT_FLOAT16)
    for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[at + i] = float_to_half(from[i]);
  else
    for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[at + i] = float_to_bfloat(from[i]);
}

static float dot(const float* a, const float* b, int64_t count) {  // separate lanes, which compilers vectorise
  float lane[LANES] = {0}, sum = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int j = 0; j < LANES; j++) lane[j] += a[i + j] * b[i + j];
  for (; i < count; i++) sum += a[i] * b[i];
  for (int j = 0; j < LANES; j++) sum += lane[j];
  return sum;
}

typedef struct {  // buffers for one block of query rows
  float* query;   // [BLOCK, La+Lb]
  float* sums;    // [BLOCK, Lv]
  float* keys;    // [TILE, La+Lb]
  float* values;  // [TILE, Lv]
  float top[BLOCK], total[BLOCK];
} Block;

// Returns the entry of the additive mask, or minus infinity if the key is hidden from the query row.
static float bias(const Node* node, const Call* c, int64_t b, int64_t s, int64_t h, int64_t length, int64_t t) {
  const int64_t own = length - c->S + s;
  if (t >= length || (node->causal && t > own) || (node->window > 0 && t <= own - node->window)) return -INFINITY;
  if (!c->mask) return 0;
  const int64_t at = b * c->mask_b + h * c->mask_h + s * c->mask_s + t;
  float value;
  if (c->mask_dtype == ORT_BOOL) return ((const uint8_t*)c->mask)[at] ? 0 : -INFINITY;
  read_floats(c->mask_dtype, c->mask, at, 1, &value);
  return value;
}

static void one_tile(const Node* node, const Call* c, Block* k, int64_t b, int64_t first, int64_t rows, int64_t length,
                     int64_t start, int64_t count) {
  const int64_t width = c->La + c->Lb, at = b * c->C + start;
  for (int64_t t = 0; t < count; t++) {
    float* key = k->keys + t * width;
    read_floats(c->dtype, c->latent, (at + t) * c->La, c->La, key);
    if (c->rope) read_floats(c->dtype, c->rope, (at + t) * c->Lb, c->Lb, key + c->La);
    if (c->values) read_floats(c->dtype, c->values, (at + t) * c->Lv, c->Lv, k->values + t * c->Lv);
  }
  const int64_t stride = c->values ? c->Lv : width;
  const float* values = c->values ? k->values : k->keys;
  for (int64_t m = 0; m < rows; m++) {
    const int64_t s = (first + m) / c->H, h = (first + m) % c->H;
    float score[TILE], top = k->top[m];
    for (int64_t t = 0; t < count; t++) {
      score[t] = bias(node, c, b, s, h, length, start + t);
      if (score[t] == -INFINITY) continue;
      float value = dot(k->query + m * width, k->keys + t * width, width) * node->scale;
      if (node->softcap > 0) value = node->softcap * tanhf(value / node->softcap);
      score[t] += value;
      if (score[t] > top || score[t] != score[t]) top = score[t];
    }
    if (top == -INFINITY) continue;  // the row has seen no key so far
    const float decay = k->top[m] == -INFINITY ? 0 : expf(k->top[m] - top);
    float* sums = k->sums + m * c->Lv;
    if (decay != 1)
      for (int64_t v = 0; v < c->Lv; v++) sums[v] *= decay;
    k->total[m] *= decay;
    k->top[m] = top;
    for (int64_t t = 0; t < count; t++) {
      if (score[t] == -INFINITY) continue;
      const float weight = expf(score[t] - top), *value = values + t * stride;
      k->total[m] += weight;
      for (int64_t v = 0; v < c->Lv; v++) sums[v] += weight * value[v];
    }
  }
}

static void one_block(const Node* node, const Call* c, Block* k, int64_t b, int64_t first, int64_t rows) {
  const int64_t width = c->La + c->Lb, row = b * c->S * c->H + first;
  int64_t length = c->seq_lens ? c->seq_lens[b] : c->T;
  length = length < 0 ? 0 : length > c->T ? c->T : length;
  read_floats(c->query_dtype, c->query, row * width, rows * width, k->query);
  memset(k->sums, 0, (size_t)(rows * c->Lv) * sizeof *k->sums);
  for (int64_t m = 0; m < rows; m++) k->top[m] = -INFINITY, k->total[m] = 0;
  for (int64_t start = 0; start < length; start += TILE)
    one_tile(node, c, k, b, first, rows, length, start, length - start < TILE ? length - start : TILE);
  for (int64_t m = 0; m < rows; m++) {
    float *sums = k->sums + m * c->Lv, factor = 0, lse = -INFINITY;
    if (k->top[m] != -INFINITY) {
      lse = k->top[m] + logf(k->total[m]);
      factor = 1 / k->total[m];
      if (c->sinks) factor /= 1 + expf(c->sinks[(first + m) % c->H] - lse);
    }
    for (int64_t v = 0; v < c->Lv; v++) sums[v] *= factor;
    if (c->lse) c->lse[row + m] = lse;
  }
  write_floats(c->query_dtype, k->sums, rows * c->Lv, c->out, row * c->Lv);
}

OrtStatus* mla_cpu_attention(const OrtApi* api, const Node* node, const Call* c) {
  const int64_t width = c->La + c->Lb, rows = c->S * c->H;
  const size_t floats = (size_t)((BLOCK + TILE) * (width + c->Lv));
  Block block, *k = &block;
  float* memory = malloc((floats ? floats : 1) * sizeof *memory);
  if (!memory) return mla_error(api, ORT_FAIL, "no memory for %zu floats of scratch", floats);
  k->query = memory;
  k->sums = k->query + BLOCK * width;
  k->keys = k->sums + BLOCK * c->Lv;
  k->values = k->keys + TILE * width;
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t first = 0; first < rows; first += BLOCK)
      one_block(node, c, k, b, first, rows - first < BLOCK ? rows - first : BLOCK);
  free(memory);
  return NULL;
}
