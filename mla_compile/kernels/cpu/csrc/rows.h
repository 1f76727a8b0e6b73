// Products of a few rows with a weight, which is read once: y[g,m,o] = sum_k x[g,m,k] w[g,o,k] + bias[o].
//
// If the weight is read in its memory order, such a product takes as long as reading it from memory. So the rows of the
// weight are walked one after the other, each with all rows of x, which stay in a cache. A weight that is
// contiguous along o is walked along k. codes.h and packed.h read integer codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "call.h"

namespace mla {

struct RowsCall {  // kernels/cpu/native.py packs exactly these 8-byte fields
  int64_t G, M, O, K;
  const char* x;  // [G,M,K], the last axis contiguous; strides in elements
  int64_t x_g, x_m;
  const char* weight;  // [G,O,K], the last or the second axis contiguous
  int64_t w_g, w_o, w_k;
  const char* bias;  // [O], of the kind of x, or null
  char* out;         // [G,M,O] contiguous, of the kind of x
  int64_t kind, weight_kind, threads;  // kind: FLOAT32 or BFLOAT16; of the weight also INT8, or INT4 (packed.h)
  int64_t group;       // columns with one scale, a multiple of 32; 0: no scales
  const char* scales;  // [O,K/group] contiguous
  const char* zeros;   // [O,K/group] contiguous, int8, or null
  int64_t scale_kind;  // the kind of x, or FLOAT32
};

constexpr int64_t MAX_SIDE = 4;  // rows of x that are multiplied at a time; the weight stays in a cache for further ones

inline float total_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float all = 0;
  for (int i = 0; i < VL; ++i) all += x[i];
  return all;
#endif
}

// Vectors of rows of x and of one row of the weight. `Few<X, W>` stores x in the form that the products need: in float32,
// in which every kind of number is exact.
template <class X, class W>
struct Few {
  static constexpr int64_t STEP = 2 * VL;  // elements of a row per product
  using Element = float;                   // of the stored x
  static void pack(const X* from, int64_t n, float* to) {
    for (int64_t k = 0; k < n; ++k) to[k] = to_float(from[k]);
  }
  struct Weight {
    vf first, second;
    explicit Weight(const W* at) : first(widened(at)), second(widened(at + VL)) {}
  };
  struct Sum {  // two sums: a single one would be a longer chain of additions than the weight takes
    vf first{}, second{};
  };
  static Sum add(const Sum& sum, const float* x, const Weight& w) {
    return {sum.first + load(x) * w.first, sum.second + load(x + VL) * w.second};
  }
  static float total(const Sum& sum) { return total_of(sum.first + sum.second); }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
template <>
struct Few<bf16, bf16> {  // exact products, sums in float32
  static constexpr int64_t STEP = 32;
  using Element = bf16;
  using Sum = __m512;
  static void pack(const bf16* from, int64_t n, bf16* to) { std::copy_n(from, n, to); }
  struct Weight {
    __m512bh w;
    explicit Weight(const bf16* at) : w((__m512bh)_mm512_loadu_si512(at)) {}
  };
  static Sum add(Sum sum, const bf16* x, const Weight& w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), w.w);
  }
  static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};
#else
template <>
struct Few<bf16, bf16> {  // in float32: even and odd columns separately, as the two halves of a word hold them
  static constexpr int64_t STEP = 2 * VL;
  using Element = float;
  static void pack(const bf16* from, int64_t n, float* to) {
    for (int64_t k = 0; k < n; ++k) to[k / 2 + k % 2 * VL] = to_float(from[k]);  // n is at most a step
  }
  struct Weight {
    vf even, odd;
    explicit Weight(const bf16* at) {
      vi words;
      std::memcpy(&words, at, sizeof words);
      const vi low = words << 16, high = words & vi(vi{} - 65536);
      std::memcpy(&even, &low, sizeof even);
      std::memcpy(&odd, &high, sizeof odd);
    }
  };
  struct Sum {
    vf even{}, odd{};
  };
  static Sum add(const Sum& sum, const float* x, const Weight& w) {
    return {sum.even + load(x) * w.even, sum.odd + load(x + VL) * w.odd};
  }
  static float total(const Sum& sum) { return total_of(sum.even + sum.odd); }
};
#endif

// One matrix of a call: rows [M,K] of x times rows [begin, end) of the weight.
template <class X, class W>
struct Part {
  const RowsCall& c;
  const X* x;
  const W* weight;
  X* out;
  int64_t begin, end;
};

template <class X, class W>
class RowsProduct {
  using F = Few<X, W>;
  using Element = typename F::Element;
  using Sum = typename F::Sum;
  static constexpr int64_t STEP = F::STEP;
  static constexpr int SIDE = VL == 16 ? 4 : 2;  // long rows of the weight processed together: x is read once
    
 public:
  static constexpr int64_t GROUP = 64;  // rows of the weight that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return sizeof(Element) * MAX_SIDE * round_up(c.K, STEP); }

  // Products of M rows of x.
  template <int M>
  static void run(const Part<X, W>& p, char* scratch, bool packed) {
    const RowsCall& c = p.c;
    Element* x = reinterpret_cast<Element*>(scratch);
    if (!packed) std::fill(x, x + M * round_up(c.K, STEP), Element{});
    for (int64_t k = 0; !packed && k < c.K; k += STEP)  // step by step, not row by row: rows would share cache sets
      for (int m = 0; m < M; ++m) F::pack(p.x + m * c.x_m + k, std::min(STEP, c.K - k), x + k * M + m * STEP);
    // In bytes; shorter rows are read faster one after the other, and int8 for one row of x any.
    constexpr int64_t LONG = VL < 16 ? 0 : sizeof(W) > 1 || M > 1 ? 8192 : INT64_MAX;
    float sums[GROUP][M];
    int64_t o = p.begin;
    if (LONG < INT64_MAX && c.K * int64_t(sizeof(W)) >= LONG)
      for (; o + SIDE <= p.end; o += SIDE) add<M, SIDE>(p.weight + o * c.w_o, c.w_o, x, c.K, sums[o - p.begin]);
    for (; o < p.end; ++o) add<M, 1>(p.weight + o * c.w_o, c.w_o, x, c.K, sums[o - p.begin]);
    const X* bias = reinterpret_cast<const X*>(c.bias);
    for (int m = 0; m < M; ++m)
      for (int64_t o = p.begin; o < p.end; ++o)
        from_float(sums[o - p.begin][m] + (bias ? to_float(bias[o]) : 0.f), p.out[m * c.O + o]);
  }

 private:
  // The products of ROWS rows of the weight with x: sums [ROWS,M].
  template <int M, int ROWS>
  static void add(const W* row, int64_t stride, const Element* x, int64_t K, float* sums) {
    Sum sum[ROWS][M] = {};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) step<M, ROWS>(row + k, stride, x + k * M, sum);
    if (k < K) {
      W last[ROWS * STEP] = {};
      for (int r = 0; r < ROWS; ++r) std::copy_n(row + r * stride + k, K - k, last + r * STEP);
      step<M, ROWS>(last, STEP, x + k * M, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[r * M + m] = F::total(sum[r][m]);
  }

  template <int M, int ROWS>
  static void step(const W* row, int64_t stride, const Element* x, Sum (&sum)[ROWS][M]) {
    constexpr int64_t AHEAD = VL == 16 ? (ROWS == 1 ? 4096 : 0) : 8192;  // prefetch distance in bytes
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (AHEAD > 0)  // into the second-level cache, which has room for it
        __builtin_prefetch(reinterpret_cast<const char*>(row + r * stride) + AHEAD, 0, 2);
      const typename F::Weight w(row + r * stride);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[r][m] = F::add(sum[r][m], x + m * STEP, w);
    }
  }
};

// The same for a weight [O,K] that is contiguous along o: some columns k are added to sums [M,O] in a cache.
template <class X, class W>
class ColumnsProduct {
    static constexpr int SIDE = 4;  // columns k together: sums are read and written once for all
  static constexpr int64_t AHEAD = 8192;  // prefetch distance in bytes

 public:
  static constexpr int64_t GROUP = 512;  // outputs that a thread takes at a time

  static size_t scratch(const RowsCall& c) { return sizeof(float) * MAX_SIDE * (GROUP + round_up(c.K, SIDE)); }

  template <int M>
  static void run(const Part<X, W>& p, char* scratch, bool packed) {
    const RowsCall& c = p.c;
    float* sums = reinterpret_cast<float*>(scratch);
    float* x = sums + MAX_SIDE * GROUP;  // [K,M]
    for (int64_t k = 0; !packed && k < c.K; ++k)
      for (int m = 0; m < M; ++m) x[k * M + m] = to_float(p.x[m * c.x_m + k]);
    std::fill(sums, sums + M * GROUP, 0.f);
    const int64_t n = p.end - p.begin;
    const W* column = p.weight + p.begin;
    int64_t k = 0;
    for (; k + SIDE <= c.K; k += SIDE) add<M, SIDE>(column + k * c.w_k, c.w_k, n, x + k * M, sums);
    for (; k < c.K; ++k) add<M, 1>(column + k * c.w_k, c.w_k, n, x + k * M, sums);
    const X* bias = reinterpret_cast<const X*>(c.bias);
    for (int m = 0; m < M; ++m)
      for (int64_t i = 0; i < n; ++i)
        from_float(sums[m * GROUP + i] + (bias ? to_float(bias[p.begin + i]) : 0.f), p.out[m * c.O + p.begin + i]);
  }

 private:
  template <int M, int COLUMNS>
  static void add(const W* column, int64_t stride, int64_t n, const float* x, float* sums) {
    int64_t i = 0;
    const W* later = column + std::max<int64_t>(COLUMNS, AHEAD / int64_t(sizeof(W)) / n) * stride;
    for (; i + VL <= n; i += VL) {
      // Into the second-level cache: columns at a power of two of bytes share sets of the first.
#pragma GCC unroll 4
      for (int r = 0; r < COLUMNS; ++r) __builtin_prefetch(later + r * stride + i, 0, 2);
      step<M, COLUMNS>(column + i, stride, x, sums + i);
    }
    if (i == n) return;
    W last[COLUMNS * VL] = {};
    for (int r = 0; r < COLUMNS; ++r) std::copy_n(column + r * stride + i, n - i, last + r * VL);
    step<M, COLUMNS>(last, VL, x, sums + i);
  }

  template <int M, int COLUMNS>
  static void step(const W* column, int64_t stride, const float* x, float* sums) {
    vf w[COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < COLUMNS; ++r) w[r] = kept(widened(column + r * stride));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      vf sum = load(sums + m * GROUP);
#pragma GCC unroll 4
      for (int r = 0; r < COLUMNS; ++r) sum += x[r * M + m] * w[r];
      store(sums + m * GROUP, sum);
    }
  }
};

// All rows of x with some outputs: a few rows at a time. `packed`: the scratch space holds these rows already, in the
// form that the products need.
template <class Product, class X, class W, int M = MAX_SIDE>
void multiply(Part<X, W> p, int64_t rows, char* scratch, bool packed) {
  for (; rows >= M; rows -= M, p.x += M * p.c.x_m, p.out += M * p.c.O, scratch += round_up(Product::scratch(p.c), 64))
    Product::template run<M>(p, scratch, packed);
  if constexpr (M > 1) multiply<Product, X, W, M - 1>(p, rows, scratch, packed);
}

template <class Product, class X, class W>
bool multiply_groups(const RowsCall& c) {
  static thread_local Scratch block;
  const int64_t groups = ceil_div(c.O, Product::GROUP);
  const int64_t threads =
      c.G * c.M * c.O * c.K <= ALONE ? 1 : std::clamp<int64_t>(c.threads, 1, std::max<int64_t>(1, c.G * groups));
  const size_t own = round_up(ceil_div(c.M, MAX_SIDE) * round_up(Product::scratch(c), 64), 4096);
  char* scratch = block.of_size(own * threads);
  if (!scratch) return false;
  std::atomic<int64_t> next_thread{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    char* mine = scratch + own * next_thread++;
    int64_t packed = -1;  // the matrix whose rows of x are in there
#pragma omp for schedule(static)
    for (int64_t i = 0; i < c.G * groups; ++i) {
      const int64_t g = i / groups, begin = i % groups * Product::GROUP;
      multiply<Product>(Part<X, W>{c, reinterpret_cast<const X*>(c.x) + g * c.x_g,
                                   reinterpret_cast<const W*>(c.weight) + g * c.w_g,
                                   reinterpret_cast<X*>(c.out) + g * c.M * c.O, begin,
                                   std::min(c.O, begin + Product::GROUP)},
                        c.M, mine, packed == g);
      packed = g;
    }
  }
  return true;
}

template <class X, class W>
bool multiply_rows(const RowsCall& c) {
  return c.w_k == 1 || c.K == 1 ? multiply_groups<RowsProduct<X, W>, X, W>(c)
                                : multiply_groups<ColumnsProduct<X, W>, X, W>(c);
}

inline bool multiply_rows(const RowsCall& c) {
  if (c.kind == BFLOAT16) return multiply_rows<bf16, bf16>(c);
  return c.weight_kind == BFLOAT16 ? multiply_rows<float, bf16>(c) : multiply_rows<float, float>(c);
}

}  // namespace mla
