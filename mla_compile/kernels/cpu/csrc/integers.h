// Rows of bfloat16 as integers of 16 bits, which instructions multiply by integer codes two at a time.
//
// A block of BLOCK_COLUMNS columns is a sum of terms: 16-bit integers times a unit, which is a power of two. In the
// first term, the largest number becomes 2^14 to 2^15. Since bfloat16 has eight significant bits, numbers down to 1/64
// of the largest are exact, and the error of all others is at most 2^-15 of the largest. If this error exceeds 2^-9 of
// the number, which is the error of rounding to bfloat16, for more than a quarter of the block, a second term holds what
// the first one left. So an outlier costs time, and the numbers beside it keep their digits. Only numbers
// below 2^-112 lose digits, because units are normal floats.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace mla {

constexpr int64_t BLOCK_COLUMNS = 32;
typedef int16_t vs __attribute__((vector_size(4 * VL)));  // half as wide integers as vi, twice as many

// sum[i] + a[2i] b[2i] + a[2i+1] b[2i+1]
inline vi add_pairs(vi sum, vs a, vs b) {
#if defined(__AVX512VNNI__)
  return kept((vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b));
#elif defined(__AVX512BW__)
  return kept(sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return kept(sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__aarch64__)
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return sum + (vi)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  const vi x = (vi)a, y = (vi)b;
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Some rows [M,K] as terms. The memory holds as many terms as there can be.
class Integers {
 public:
  static constexpr int64_t TERMS = 2;  // of a block, at most

  static size_t bytes(int64_t rows, int64_t K) {
    return 64 + most(K) * (2 * sizeof(int64_t) + rows * (sizeof(int16_t) * BLOCK_COLUMNS + 2 * sizeof(float)));
  }

  Integers(char* memory, int64_t rows, int64_t K)
      : count_(reinterpret_cast<int64_t*>(memory)),
        numbers_(reinterpret_cast<int16_t*>(memory + 64)),
        columns_(reinterpret_cast<int64_t*>(numbers_ + most(K) * rows * BLOCK_COLUMNS)),
        groups_(columns_ + most(K)),
        units_(reinterpret_cast<float*>(groups_ + most(K))),
        sums_(units_ + most(K) * rows),
        rows_(rows) {}

  int64_t count() const { return *count_; }
  int64_t column(int64_t term) const { return columns_[term]; }            // the first one of the term's block
  int64_t group(int64_t term) const { return groups_[term]; }              // of columns, in which the block lies
  const int16_t* numbers(int64_t term) const { return numbers_ + term * rows_ * BLOCK_COLUMNS; }  // a block [M,...]
  const float* units(int64_t term) const { return units_ + term * rows_; }  // [M]
  const float* sums(int64_t term) const { return sums_ + term * rows_; }    // [M], of the numbers, exactly

  // The number of terms before column k.
  int64_t below(int64_t k) const {
    int64_t n = count();
    while (n > 0 && column(n - 1) >= k) --n;
    return n;
  }

  // Fills the terms from rows that are `stride` elements apart. `group`: the width of groups of columns, or 0. The last
  // block is filled up with zeros.
  void pack(const bf16* x, int64_t stride, int64_t K, int64_t group) {
    int64_t& term = *count_ = 0;
    vf left[MOST_ROWS][BLOCK_COLUMNS / VL];
    for (int64_t k = 0; k < K; k += BLOCK_COLUMNS) {
      for (int64_t m = 0; m < rows_; ++m) {
        bf16 last[BLOCK_COLUMNS] = {};
        const bf16* from = x + m * stride + k;
        if (K - k < BLOCK_COLUMNS) from = std::copy_n(from, K - k, last) - (K - k);
        for (int64_t i = 0; i < BLOCK_COLUMNS / VL; ++i) left[m][i] = widened(from + i * VL);
      }
      bool more = true;
      for (int64_t i = 0; more && i < TERMS; ++i, ++term) {
        columns_[term] = k, groups_[term] = group ? k / group : 0, more = false;
        for (int64_t m = 0; m < rows_; ++m) {
          const int64_t at = term * rows_ + m;
          more |= take(left[m], numbers_ + at * BLOCK_COLUMNS, units_[at], sums_[at]);
        }
      }
    }
  }

 private:
  static constexpr int64_t MOST_ROWS = 4;

  static int64_t most(int64_t K) { return round_up(TERMS * ceil_div(K, BLOCK_COLUMNS), 2); }

  // Subtracts a term from the numbers of a block. Returns whether what is left needs another one.
  static bool take(vf (&left)[BLOCK_COLUMNS / VL], int16_t* numbers, float& unit, float& sum) {
    typedef int16_t narrow __attribute__((vector_size(2 * VL)));
    vi largest{};
    for (const vf& some : left) largest = larger((vi)some & 0x7fffffff, largest);
    const int32_t most = largest_of(largest);
    if (most >= INFINITE) return take_infinite(left, numbers, unit, sum, most > INFINITE);
    const int32_t exponent = std::max(most >> 23, 15) - 14;  // of normal units, and of their inverses
    unit = float_of(exponent << 23);
    const float inverse = float_of((254 - exponent) << 23);
    vi total{}, changed{};
    for (vf& some : left) {
      const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
      const vf whole = (some * inverse + magic) - magic, was = some;
      some -= whole * unit;
      changed += size(some) > size(was) * 0x1p-9f;  // -1 where it is true
      const vi integers = __builtin_convertvector(whole, vi);
      total += integers;
      const narrow halves = __builtin_convertvector(integers, narrow);
      std::memcpy(numbers, &halves, sizeof halves);
      numbers += VL;
    }
    sum = float(total_of(total));
    return total_of(changed) * 4 < -BLOCK_COLUMNS;
  }

  // The lanes of a sum without an infinity must not become NaN, so numbers whose products overflow take its place.
  static bool take_infinite(const vf (&left)[BLOCK_COLUMNS / VL], int16_t* numbers, float& unit, float& sum, bool nan) {
    unit = nan ? std::numeric_limits<float>::quiet_NaN() : 0x1p127f;
    sum = 0;
    for (int64_t i = 0; i < BLOCK_COLUMNS; ++i) {
      const float each = left[i / VL][i % VL];
      numbers[i] = each == INF ? 32767 : each == -INF ? -32767 : 0;
      sum += numbers[i];
    }
    return false;
  }

  static constexpr int32_t INFINITE = 255 << 23;  // the bits of an infinity
  static vi larger(vi a, vi b) { return a > b ? a : b; }
  static vf size(vf x) { return (vf)((vi)x & 0x7fffffff); }
  static float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  static int32_t largest_of(vi x) {
    int32_t most = x[0];
    for (int i = 1; i < VL; ++i) most = std::max(most, x[i]);
    return most;
  }
  static int32_t total_of(vi x) {
    int32_t all = 0;
    for (int i = 0; i < VL; ++i) all += x[i];
    return all;
  }

  int64_t* count_;
  int16_t* numbers_;
  int64_t *columns_, *groups_;
  float *units_, *sums_;
  int64_t rows_;
};

}  // namespace mla
