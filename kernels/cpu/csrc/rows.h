// Products of a few rows with a weight, which is read once: y[m,o] = sum_k x[m,k] w[o,k] + bias[o].
//
// If the weight is read in its memory order, such a product takes as long as reading it from memory. So the rows of the
// weight are walked one after the other, each with all rows of x, which stay in a cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "call.h"

namespace mla {

struct RowsCall {  // kernels/cpu/native.py packs exactly these 8-byte fields
  int64_t M, O, K;
  const char* x;  // [M,K]
  int64_t x_m;
  const char* weight;  // [O,K]
  int64_t weight_o;
  const char* bias;  // [O] or null
  char* out;         // [M,O] contiguous
  int64_t kind, threads;  // kind of all tensors: FLOAT32 or BFLOAT16
};

constexpr int64_t MAX_FEW = 4;  // rows of x: for more, torch's product is as fast

// Vectors of rows of x and of one row of the weight. `Few<T>` stores x in the form that the products need.
template <class T>
struct Few;

template <>
struct Few<float> {
  static constexpr int64_t STEP = VL;  // elements of a row per product
  using Element = float;               // of the stored x
  using Sum = vf;
  static void pack(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }
  struct Weight {
    vf w;
    explicit Weight(const float* at) : w(load(at)) {}
  };
  static Sum add(Sum sum, const float* x, const Weight& w) { return sum + load(x) * w.w; }
  static float total(Sum sum) {
    float all = 0;
    for (int i = 0; i < VL; ++i) all += sum[i];
    return all;
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
template <>
struct Few<bf16> {  // exact products, sums in float32
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
struct Few<bf16> {  // in float32: even and odd columns separately, as the two halves of a word hold them
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
  struct Sum {  // two sums: a single one would be a longer chain of additions than the weight takes
    vf even{}, odd{};
  };
  static Sum add(const Sum& sum, const float* x, const Weight& w) {
    return {sum.even + load(x) * w.even, sum.odd + load(x + VL) * w.odd};
  }
  static float total(const Sum& sum) { return Few<float>::total(sum.even + sum.odd); }
};
#endif

template <class T, int M>
class RowsProduct {
  using F = Few<T>;
  using Element = typename F::Element;
  using Sum = typename F::Sum;
  static constexpr int64_t STEP = F::STEP;
  static constexpr int SIDE = VL == 16 ? 4 : 2;  // long rows of the weight processed together: x is read once
  static constexpr int64_t LONG = VL == 16 ? 8192 : 0;  // bytes; shorter rows are read faster one after the other
  static constexpr int64_t AHEAD = VL == 16 ? 0 : 8192;  // prefetch distance in bytes
  static constexpr int64_t GROUP = 64;          // rows of the weight that a thread takes at a time

 public:
  // The number of elements that x takes, padded with zeros to whole steps.
  static int64_t packed(int64_t K) { return M * round_up(K, STEP); }

  static void run(const RowsCall& c, Element* x) {
    std::fill(x, x + packed(c.K), Element{});
    for (int64_t k = 0; k < c.K; k += STEP)  // step by step, not row by row: rows would share cache sets
      for (int m = 0; m < M; ++m)
        F::pack(reinterpret_cast<const T*>(c.x) + m * c.x_m + k, std::min(STEP, c.K - k), x + k * M + m * STEP);
    const int64_t groups = ceil_div(c.O, GROUP);
    const int64_t threads = M * c.O * c.K <= ALONE ? 1 : std::clamp<int64_t>(c.threads, 1, groups);
#pragma omp parallel for schedule(static) num_threads(int(threads)) if (threads > 1)
    for (int64_t group = 0; group < groups; ++group) multiply(c, x, group * GROUP, std::min(c.O, (group + 1) * GROUP));
  }

 private:
  static void multiply(const RowsCall& c, const Element* x, int64_t begin, int64_t end) {
    float sums[GROUP][M];
    const T* weight = reinterpret_cast<const T*>(c.weight);
    int64_t o = begin;
    if (c.K * int64_t(sizeof(T)) >= LONG)
      for (; o + SIDE <= end; o += SIDE) add<SIDE>(weight + o * c.weight_o, c.weight_o, x, c.K, sums[o - begin]);
    for (; o < end; ++o) add<1>(weight + o * c.weight_o, c.weight_o, x, c.K, sums[o - begin]);
    const T* bias = reinterpret_cast<const T*>(c.bias);
    for (int m = 0; m < M; ++m)
      for (int64_t o = begin; o < end; ++o)
        from_float(sums[o - begin][m] + (bias ? to_float(bias[o]) : 0.f), reinterpret_cast<T*>(c.out)[m * c.O + o]);
  }

  // The products of ROWS rows of the weight with x: sums [ROWS,M].
  template <int ROWS>
  static void add(const T* row, int64_t stride, const Element* x, int64_t K, float* sums) {
    Sum sum[ROWS][M] = {};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) step<ROWS>(row + k, stride, x + k * M, sum);
    if (k < K) {
      T last[ROWS * STEP] = {};
      for (int r = 0; r < ROWS; ++r) std::copy_n(row + r * stride + k, K - k, last + r * STEP);
      step<ROWS>(last, STEP, x + k * M, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[r * M + m] = F::total(sum[r][m]);
  }

  template <int ROWS>
  static void step(const T* row, int64_t stride, const Element* x, Sum (&sum)[ROWS][M]) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (AHEAD > 0) __builtin_prefetch(reinterpret_cast<const char*>(row + r * stride) + AHEAD);
      const typename F::Weight w(row + r * stride);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[r][m] = F::add(sum[r][m], x + m * STEP, w);
    }
  }
};

template <class T, int M = 1>
bool multiply_rows(const RowsCall& c) {
  static thread_local Scratch block;
  if constexpr (M < MAX_FEW)
    if (c.M > M) return multiply_rows<T, M + 1>(c);
  using Element = typename Few<T>::Element;
  char* x = block.of_size(size_t(RowsProduct<T, M>::packed(c.K)) * sizeof(Element));
  if (!x) return false;
  RowsProduct<T, M>::run(c, reinterpret_cast<Element*>(x));
  return true;
}

}  // namespace mla
