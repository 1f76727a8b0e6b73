// Products of a few rows with a weight of integer codes of eight bits, which have a scale and perhaps a zero point for
// each group of columns: y[m,o] = sum_k x[m,k] (w[o,k] - zero[o,k/group]) scale[o,k/group] + bias[o].
#pragma once

#include "integers.h"
#include "rows.h"

namespace mla {

// Rows in float32.
class GroupsProduct {
  using F = Few<float, int8_t>;
  using Sum = typename F::Sum;
  static constexpr int64_t STEP = F::STEP;
  static constexpr int64_t AHEAD = 8192;  // prefetch distance in bytes

 public:
  static constexpr int64_t GROUP = 64;  // rows of the weight that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return sizeof(float) * MAX_SIDE * c.K; }

  template <int M>
  static void run(const Part<float, int8_t>& p, char* scratch, bool packed) {
    const RowsCall& c = p.c;
    const int64_t groups = c.K / c.group;
    float* x = reinterpret_cast<float*>(scratch);
    for (int64_t k = 0; !packed && k < c.K; k += STEP)
      for (int m = 0; m < M; ++m) F::pack(p.x + m * c.x_m + k, STEP, x + k * M + m * STEP);
    const float* bias = reinterpret_cast<const float*>(c.bias);
    for (int64_t o = p.begin; o < p.end; ++o) {
      const float* scales = reinterpret_cast<const float*>(c.scales) + o * groups;
      const int8_t* zeros = c.zeros ? reinterpret_cast<const int8_t*>(c.zeros) + o * groups : nullptr;
      const int8_t* row = p.weight + o * c.w_o;
      vf sum[M] = {};
      for (int64_t g = 0; g < groups; ++g) {
        const float zero = zeros ? zeros[g] : 0.f;  // subtracted here: a difference of two sums would lose digits
        Sum part[M] = {};
        for (int64_t k = g * c.group; k < (g + 1) * c.group; k += STEP) {
          __builtin_prefetch(row + k + AHEAD, 0, 2);
          typename F::Weight w(row + k);
          w.first -= zero, w.second -= zero;
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) part[m] = F::add(part[m], x + k * M + m * STEP, w);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sum[m] += (part[m].first + part[m].second) * scales[g];
      }
      for (int m = 0; m < M; ++m) p.out[m * c.O + o] = total_of(sum[m]) + (bias ? bias[o] : 0.f);
    }
  }
};

// Rows in bfloat16, as integers. `GROUPED`: the weight has scales.
template <bool GROUPED>
class CodesProduct {
  static constexpr int64_t STEP = 2 * VL;  // codes of a vector
  static constexpr int SIDE = VL == 16 ? 4 : 2;  // long rows of the weight processed together: x is read once
  static constexpr int VECTORS = BLOCK_COLUMNS / STEP;
  struct Codes {
    vs of[VECTORS];
  };
  struct Row {  // of the weight
    const int8_t* codes;
    const int8_t* zeros;  // or null
    const float* scales;  // if there are any
  };

 public:
  static constexpr int64_t GROUP = 64;  // rows of the weight that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return of_rows(c) + sizeof(float) * SIDE * groups(c); }

  template <int M>
  static void run(const Part<bf16, int8_t>& p, char* scratch, bool packed) {
    const RowsCall& c = p.c;
    Integers x(scratch, M, c.K);
    if (!packed) x.pack(p.x, c.x_m, c.K, c.group);
    float* scales = reinterpret_cast<float*>(scratch + of_rows(c));
    constexpr int64_t LONG = VL < 16 ? 0 : M > 1 ? 8192 : INT64_MAX;  // in bytes; for one row of x none is
    float sums[GROUP][M];
    int64_t o = p.begin;
    if (c.K >= LONG)
      for (; o + SIDE <= p.end; o += SIDE) add<M, SIDE>(c, p.weight, o, x, scales, sums + o - p.begin);
    for (; o < p.end; ++o) add<M, 1>(c, p.weight, o, x, scales, sums + o - p.begin);
    const bf16* bias = reinterpret_cast<const bf16*>(c.bias);
    for (int m = 0; m < M; ++m)
      for (o = p.begin; o < p.end; ++o)
        from_float(sums[o - p.begin][m] + (bias ? to_float(bias[o]) : 0.f), p.out[m * c.O + o]);
  }

 private:
  static int64_t groups(const RowsCall& c) { return GROUPED ? c.K / c.group : 0; }
  static size_t of_rows(const RowsCall& c) { return round_up(Integers::bytes(MAX_SIDE, c.K), 64); }

  // The products of ROWS rows of the weight, from row o on, with x.
  template <int M, int ROWS>
  static void add(const RowsCall& c, const int8_t* weight, int64_t o, const Integers& x, float* scales,
                  float (*sums)[M]) {
    Row rows[ROWS];
    for (int r = 0; r < ROWS; ++r, scales += groups(c)) {
      rows[r] = {weight + (o + r) * c.w_o, nullptr, scales};
      if constexpr (GROUPED) {
        const int64_t at = (o + r) * groups(c);
        if (c.zeros) rows[r].zeros = reinterpret_cast<const int8_t*>(c.zeros) + at;
        if (c.scale_kind == BFLOAT16) widen(reinterpret_cast<const bf16*>(c.scales) + at, groups(c), scales);
        else rows[r].scales = reinterpret_cast<const float*>(c.scales) + at;
      }
    }
    vf sum[ROWS][M] = {};
    const int64_t whole = x.below(c.K - BLOCK_COLUMNS + 1);  // terms whose blocks lie within the row
    for (int64_t term = 0; term < whole; ++term) step<M, ROWS>(rows, x.column(term), x, term, sum);
    if (whole < x.count()) {
      const int64_t k = x.column(whole);
      int8_t last[ROWS][BLOCK_COLUMNS] = {};
      for (int r = 0; r < ROWS; ++r) {
        std::copy_n(rows[r].codes + k, c.K - k, last[r]);
        rows[r].codes = last[r];
      }
      for (int64_t term = whole; term < x.count(); ++term) step<M, ROWS>(rows, 0, x, term, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[r][m] = total_of(sum[r][m]);
  }

  static void widen(const bf16* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
  }

  // One term times the codes of its block, which begin at column k.
  template <int M, int ROWS>
  static void step(const Row (&rows)[ROWS], int64_t k, const Integers& x, int64_t term, vf (&sum)[ROWS][M]) {
    constexpr int64_t AHEAD = VL == 16 ? (ROWS == 1 ? 4096 : 0) : 8192;  // prefetch distance in bytes
    const vs* numbers = reinterpret_cast<const vs*>(x.numbers(term));
    const float* units = x.units(term);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (AHEAD > 0) __builtin_prefetch(rows[r].codes + k + AHEAD, 0, 2);
      Codes codes = read(rows[r].codes + k);
      if (GROUPED && rows[r].zeros) {  // subtracted here: a difference of two sums would lose digits
        const int16_t zero = rows[r].zeros[x.group(term)];
        for (vs& some : codes.of) some -= zero;
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vi dots{};
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) dots = add_pairs(dots, codes.of[i], numbers[m * VECTORS + i]);
        const vf product = __builtin_convertvector(dots, vf) * units[m];
        sum[r][m] += GROUPED ? product * rows[r].scales[x.group(term)] : product;
      }
    }
  }

  static Codes read(const int8_t* at) {
    Codes codes;
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i, at += STEP) {
#if defined(__AVX512BW__)
      codes.of[i] = (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
      codes.of[i] = (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
      for (int64_t j = 0; j < STEP; ++j) codes.of[i][j] = at[j];
#endif
    }
    return codes;
  }
};

inline bool multiply_codes(const RowsCall& c) {
  if (c.kind == FLOAT32)
    return c.group ? multiply_groups<GroupsProduct, float, int8_t>(c) : multiply_rows<float, int8_t>(c);
  if (c.w_k != 1 && c.K > 1) return multiply_groups<ColumnsProduct<bf16, int8_t>, bf16, int8_t>(c);
  return c.group ? multiply_groups<CodesProduct<true>, bf16, int8_t>(c)
                 : multiply_groups<CodesProduct<false>, bf16, int8_t>(c);
}

}  // namespace mla
