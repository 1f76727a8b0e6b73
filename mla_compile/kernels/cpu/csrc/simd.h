// Vectors of floats of the machine's width, through the vector extensions of GCC and Clang.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mla {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef float vf_any __attribute__((vector_size(4 * VL), aligned(4), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();

inline vf load(const float* at) { return *reinterpret_cast<const vf_any*>(at); }
inline void store(float* at, vf x) { *reinterpret_cast<vf_any*>(at) = x; }
// Keeps x in a register: compilers would load it again for every product, which exceeds the load throughput. Of sums of
// integers, it fixes the order: compilers would compute all summands first, for which there are not enough registers.
template <class V>
inline V kept(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE__)
  asm("" : "+x"(x));
#endif
  return x;
}
inline vf splat(float x) { return x - vf{}; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }  // b if a is NaN

// e^x for x <= 0 to about 1 ulp, 0 below the normal range, NaN for NaN.
inline vf exp_of_nonpositive(vf x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693145752f;  // ln 2 in two parts; the first has 16 bits, so its product with n is exact
  r = r - n * 1.42860677e-6f;
  vf poly = splat(1.98412698e-4f);
  poly = poly * r + 1.38888889e-3f;
  poly = poly * r + 8.33333333e-3f;
  poly = poly * r + 4.16666667e-2f;
  poly = poly * r + 1.66666667e-1f;
  poly = poly * r + 0.5f;
  poly = (poly * r) * r + r;
  poly = poly + 1.f;
  vi bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  vf power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.f ? vf{} : poly * power;
}

// softcap * tanh(x / softcap) to a few ulp; NaN for NaN.
inline vf capped(vf x, float softcap) {
  const vf t = x / softcap, size = t < 0.f ? -t : t, square = t * t;
  const vf e = exp_of_nonpositive(-2.f * size);
  const vf far = (1.f - e) / (1.f + e);
  vf near = splat(62.f / 2835);  // the series of tanh: 1 - e would lose digits here
  near = near * square - 17.f / 315;
  near = near * square + 2.f / 15;
  near = near * square - 1.f / 3;
  near = near * square * t + t;
  return (size < 0.25f ? near : t < 0.f ? -far : far) * softcap;
}

// The storage types of half precision, read as float and written with rounding to nearest.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t wide = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, sizeof y);
  return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  y.bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
#if defined(__ARM_FP16_FORMAT_IEEE)  // GCC supports _Float16 in C++ on ARM only since 13
#define MLA_FLOAT16 1
using fp16 = __fp16;
#elif defined(__FLT16_MAX__)
#define MLA_FLOAT16 1
using fp16 = _Float16;
#endif
#if defined(MLA_FLOAT16)
inline float to_float(fp16 x) { return float(x); }
inline void from_float(float x, fp16& y) { y = fp16(x); }
#endif

// float8_e4m3fn: a sign, four exponent bits with bias 7, three mantissa bits; no infinity, NaN if all bits are set.
struct fp8 {
  uint8_t bits;
};

inline float to_float(fp8 x) {  // without branches and subnormal floats, so that loops become vectors
  const uint32_t magnitude = x.bits & 0x7f;
  uint32_t wide = (magnitude << 20) + (uint32_t(120) << 23);
  float y;
  std::memcpy(&y, &wide, sizeof y);
  y = magnitude < 8 ? 2.f * y - 0.015625f : y;  // subnormal, below 2^-6: subtract the implicit leading bit
  y = magnitude == 0x7f ? std::numeric_limits<float>::quiet_NaN() : y;
  return x.bits & 0x80 ? -y : y;
}

// Stored numbers as floats, all exactly.
inline vf widened(const float* at) { return load(at); }
inline vf widened(const bf16* at) {
  vi wide;
#if defined(__AVX512F__)
  wide = (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
  wide = (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
  typedef uint16_t narrow __attribute__((vector_size(2 * VL)));
  narrow given;
  std::memcpy(&given, at, sizeof given);
  wide = __builtin_convertvector(given, vi);
#endif
  return (vf)(wide << 16);
}
inline vf widened(const int8_t* at) {
  vi wide;
#if defined(__AVX512F__)
  wide = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  wide = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
  for (int i = 0; i < VL; ++i) wide[i] = at[i];
#endif
  return __builtin_convertvector(wide, vf);
}

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
constexpr int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

}  // namespace mla
