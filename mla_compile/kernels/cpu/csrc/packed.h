// Products of a few rows with a weight in four bits, which kernels/packed.py packs for this walk.
//
// y[m,o] = sum_k x[m,k] (code[o,k] - zero[o,k/group]) scale[o,k/group] + bias[o]. A tile holds TILE outputs. For each
// group of columns it has words [group/8,TILE] of eight codes each, then the scales and the zero points [TILE]. So
// neighbouring lanes are neighbouring outputs, and no sum runs across lanes. A mask leaves two codes of a word as 16-bit
// integers, which belong to neighbouring columns.
#pragma once

#include "integers.h"
#include "rows.h"

namespace mla {

template <class S>
class PackedProduct {
  static constexpr int64_t TILE = 16, CODES = 8;  // outputs of a tile, codes of a word
  static constexpr int64_t AHEAD = 8192;          // prefetch distance in bytes
  static constexpr int VECTORS = TILE / VL;
  typedef vi vi_any __attribute__((aligned(4), may_alias));
  typedef int32_t pair __attribute__((aligned(2), may_alias));

 public:
  static constexpr int64_t GROUP = 64;  // outputs that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return Integers::bytes(MAX_SIDE, c.K); }

  template <int M>
  static void run(const Part<bf16, char>& p, char* scratch, bool packed) {
    const RowsCall& c = p.c;
    Integers x(scratch, M, c.K);
    if (!packed) x.pack(p.x, c.x_m, c.K, c.group);
    const int64_t tile = c.K / c.group * bytes(c);
    const bf16* bias = reinterpret_cast<const bf16*>(c.bias);
    for (int64_t o = p.begin; o < p.end; o += TILE) {
      constexpr int TOGETHER = M < 2 ? VECTORS : 1;  // vectors of a tile that share numbers of x
      float sums[M][TILE];
      for (int v = 0; v < VECTORS; v += TOGETHER)
        add<M, TOGETHER>(c, reinterpret_cast<const char*>(c.weight) + o / TILE * tile, x, v, sums);
      for (int m = 0; m < M; ++m)
        for (int64_t i = o; i < std::min(o + TILE, p.end); ++i)
          from_float(sums[m][i - o] + (bias ? to_float(bias[i]) : 0.f), p.out[m * c.O + i]);
    }
  }

 private:
  static int64_t words(const RowsCall& c) { return c.group / CODES * TILE * 4; }  // bytes of a group's words
  static int64_t bytes(const RowsCall& c) { return words(c) + TILE * int64_t(sizeof(S) + 1); }  // of a group

  // The products of a tile with x, for some vectors of its outputs. `first`: the first one of them.
  template <int M, int TOGETHER>
  static void add(const RowsCall& c, const char* tile, const Integers& x, int first, float (&sums)[M][TILE]) {
    const int64_t words = PackedProduct::words(c), bytes = PackedProduct::bytes(c), count = x.count();
    vf sum[M][TOGETHER] = {};
    for (int64_t term = 0; term < count; ++term) {
      const int64_t group = x.group(term);
      const char* at = tile + group * bytes;
      vi dots[M][TOGETHER];
      multiply<M, TOGETHER>(at + (x.column(term) - group * c.group) * (TILE * 4 / CODES) + first * VL * 4,
                            x.numbers(term), dots);
      const S* scales = reinterpret_cast<const S*>(at + words) + first * VL;
      const int8_t* zeros = reinterpret_cast<const int8_t*>(at + words + TILE * sizeof(S)) + first * VL;
#pragma GCC unroll 4
      for (int v = 0; v < TOGETHER; ++v) {
        const vf scale = widened(scales + v * VL), zero = widened(zeros + v * VL) + 8.f;  // codes are stored plus 8
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
          sum[m][v] += (__builtin_convertvector(dots[m][v], vf) - zero * x.sums(term)[m]) * (scale * x.units(term)[m]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < TOGETHER; ++v) store(sums[m] + (first + v) * VL, sum[m][v]);
  }

  // The products of a block's codes with the numbers of a term, exactly: they stay below 2^24.
  template <int M, int TOGETHER>
  static void multiply(const char* at, const int16_t* numbers, vi (&dots)[M][TOGETHER]) {
    const vi_any* words = reinterpret_cast<const vi_any*>(at);
    // Every second pair of codes is used in its place, times 16.
    vi even[M][TOGETHER] = {}, odd[M][TOGETHER] = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < BLOCK_COLUMNS; k += CODES, words += VECTORS) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + AHEAD, 0, 2);
#pragma GCC unroll 4
      for (int v = 0; v < TOGETHER; ++v) {
        const vi low = words[v], high = low >> 8;
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const pair* of = reinterpret_cast<const pair*>(numbers + m * BLOCK_COLUMNS + k);
          even[m][v] = add_pairs(even[m][v], vs(low & 0x000f000f), vs(of[0] - vi{}));
          odd[m][v] = add_pairs(odd[m][v], vs(low & 0x00f000f0), vs(of[1] - vi{}));
          even[m][v] = add_pairs(even[m][v], vs(high & 0x000f000f), vs(of[2] - vi{}));
          odd[m][v] = add_pairs(odd[m][v], vs(high & 0x00f000f0), vs(of[3] - vi{}));
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < TOGETHER; ++v) dots[m][v] = even[m][v] + (odd[m][v] >> 4);
  }
};

inline bool multiply_packed(const RowsCall& c) {
  return c.scale_kind == BFLOAT16 ? multiply_groups<PackedProduct<bf16>, bf16, char>(c)
                                  : multiply_groups<PackedProduct<float>, bf16, char>(c);
}

}  // namespace mla
