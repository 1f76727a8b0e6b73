// Products of a few rows with a weight in four bits, which kernels/packed.py packs for this walk.
//
// y[m,o] = sum_k x[m,k] (code[o,k] - zero[o,k/group]) scale[o,k/group] + bias[o]. A tile holds TILE outputs. For each group
// of columns it has words [group/8,TILE] of eight codes each, then the scales and the zero points [TILE]. So neighbouring
// lanes are neighbouring outputs, and no sum runs across lanes.
#pragma once

#include "rows.h"

namespace mla {

template <class S>
class PackedProduct {
  static constexpr int64_t TILE = 16, CODES = 8;  // outputs of a tile, codes of a word
  static constexpr int64_t AHEAD = 8192;          // prefetch distance in bytes
  static constexpr int VECTORS = TILE / VL;
  typedef vi vi_any __attribute__((aligned(4), may_alias));

 public:
  static constexpr int64_t GROUP = 64;  // outputs that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return sizeof(float) * MAX_SIDE * (stride(c) + c.K / c.group); }

  template <int M>
  static void run(const Part<bf16, char>& p, char* scratch) {
    const RowsCall& c = p.c;
    const int64_t groups = c.K / c.group, bytes = c.group / CODES * TILE * 4 + TILE * int64_t(sizeof(S) + 1);
    float* x = reinterpret_cast<float*>(scratch);  // [M,K]
    float* of_groups = x + M * stride(c);          // the sums of groups of x, [M,groups]
    for (int m = 0; m < M; ++m) pack(c, p.x + m * c.x_m, x + m * stride(c), of_groups + m * groups);
    const bf16* bias = reinterpret_cast<const bf16*>(c.bias);
    for (int64_t o = p.begin; o < p.end; o += TILE) {
      const char* at = reinterpret_cast<const char*>(c.weight) + o / TILE * groups * bytes;
      vf total[M][VECTORS] = {};
      for (int64_t g = 0; g < groups; ++g, at += bytes) add<M>(c, at, x + g * c.group, of_groups + g, total);
      float sums[TILE];
      for (int m = 0; m < M; ++m) {
        for (int v = 0; v < VECTORS; ++v) store(sums + v * VL, total[m][v]);
        for (int64_t i = o; i < std::min(o + TILE, p.end); ++i)
          from_float(sums[i - o] + (bias ? to_float(bias[i]) : 0.f), p.out[m * c.O + i]);
      }
    }
  }

 private:
  static int64_t stride(const RowsCall& c) { return c.K + 16; }  // rows at power-of-two distances share cache sets

  // Code j of a word is used in its place, as code * 16^j, except for the last one. So x is divided by 16^j.
  static void pack(const RowsCall& c, const bf16* row, float* x, float* sums) {
    constexpr float FACTORS[CODES] = {1.f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.f};
    for (int64_t k = 0; k < c.K; ++sums) {
      float sum[CODES] = {};
      for (const int64_t end = k + c.group; k < end; k += CODES)
        for (int64_t j = 0; j < CODES; ++j) {
          const float number = to_float(row[k + j]);
          sum[j] += number;
          x[k + j] = number * FACTORS[j];
        }
      *sums = 0;
      for (float one : sum) *sums += one;
    }
  }

  // Adds the sums of one group of columns. The lanes of a vector are some outputs of the tile.
  template <int M>
  static void add(const RowsCall& c, const char* at, const float* x, const float* sums, vf (&total)[M][VECTORS]) {
    constexpr int TOGETHER = M < 2 ? VECTORS : 1;  // vectors of a tile that share numbers of x
    for (int v = 0; v < VECTORS; v += TOGETHER) add<M, TOGETHER>(c, at, x, sums, v, total);
  }

  template <int M, int TOGETHER>
  static void add(const RowsCall& c, const char* at, const float* x, const float* sums, int first,
                  vf (&total)[M][VECTORS]) {
    constexpr int CHAINS = 8 / (M * TOGETHER) > 0 ? 8 / (M * TOGETHER) : 1;  // added alternately: one would be too slow
    const S* scales = reinterpret_cast<const S*>(at + c.group / CODES * TILE * 4) + first * VL;
    const int8_t* zeros = reinterpret_cast<const int8_t*>(at + c.group / CODES * TILE * 4 + TILE * sizeof(S)) + first * VL;
    const vi_any* words = reinterpret_cast<const vi_any*>(at) + first;
    vf part[CHAINS][M][TOGETHER] = {};
    for (int64_t k = 0; k < c.group; k += CODES, words += VECTORS) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + AHEAD, 0, 2);
      vi word[TOGETHER];
      for (int v = 0; v < TOGETHER; ++v) word[v] = words[v];
#pragma GCC unroll 8
      for (int j = 0; j < CODES; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < TOGETHER; ++v) {
          const vi placed = j + 1 < CODES ? word[v] & (15 << 4 * j % 28) : (word[v] >> 28) & 15;
          const vf code = __builtin_convertvector(placed, vf);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) part[j % CHAINS][m][v] += x[m * stride(c) + k + j] * code;
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < TOGETHER; ++v) {
      const vf scale = widened(scales + v * VL), zero = widened(zeros + v * VL) + 8.f;  // codes are stored plus 8
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf sum = part[0][m][v];
        for (int i = 1; i < CHAINS; ++i) sum += part[i][m][v];
        total[m][first + v] += (sum - zero * sums[m * (c.K / c.group)]) * scale;
      }
    }
  }
};

inline bool multiply_packed(const RowsCall& c) {
  return c.scale_kind == BFLOAT16 ? multiply_groups<PackedProduct<bf16>, bf16, char>(c)
                                  : multiply_groups<PackedProduct<float>, bf16, char>(c);
}

}  // namespace mla
