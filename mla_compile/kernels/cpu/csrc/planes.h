// Numbers as sums of bfloat16 terms, "planes", in the layouts of AMX's tile registers.
//
// A bfloat16 number is one plane, a float16 two and a float32 three, all exactly. A tile register holds 16 rows of 64
// bytes: 16 x 16 sums; 16 x 32 left factors; or 32 x 16 right factors with two rows interleaved.
#pragma once

#include "call.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__)
#define MLA_AMX 1

#include <algorithm>

namespace mla {

using Plane = uint16_t;
constexpr int64_t BLOCK = 512;  // bfloat16 values in a tile register
constexpr int64_t CHUNK = 32;   // bfloat16 values in a row of a tile register

inline __m512 read16(const float* at, __mmask16 valid) { return _mm512_maskz_loadu_ps(valid, at); }
inline __m512 read16(const bf16* at, __mmask16 valid) {
  const __m256i x = _mm256_maskz_loadu_epi16(valid, at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m512 read16(const _Float16* at, __mmask16 valid) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(valid, at));
}
inline __mmask16 valid16(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// The high halves of a and b, which are bfloat16, interleaved.
inline __m512i interleaved(__m512 a, __m512 b) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(b), _mm512_set1_epi32(0xffff0000), 0xf8);  // low | b & mask
}

// x minus its truncated leading bfloat16. Exact; three of these exhaust a float.
inline __m512 tail(__m512 x) {
  const __m512i head = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff0000));
  return _mm512_sub_ps(x, _mm512_castsi512_ps(head));
}

// The leading bfloat16 of x, rounded instead of truncated: `left` has either sign and is half as large.
inline __m512 round_head(__m512 x, __m512& left) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  const __m512i head = _mm512_and_si512(up, _mm512_set1_epi32(0xffff0000));
  left = _mm512_sub_ps(x, _mm512_castsi512_ps(head));
  return _mm512_castsi512_ps(head);
}

// Stores PLANES rounded planes of 32 numbers, interleaved, 64 bytes each, at distances of `apart` values.
template <int PLANES>
void split_rounded(__m512 a, __m512 b, Plane* to, int64_t apart) {
#pragma GCC unroll 3
  for (int i = 0; i < PLANES; ++i) {
    __m512 left_a, left_b;
    const __m512 x = round_head(a, left_a), y = round_head(b, left_b);
    _mm512_storeu_si512(to + i * apart, interleaved(x, y));
    a = left_a, b = left_b;
  }
}

// Transposes 16 x 16 words of 32 bits.
inline void transpose(__m512i* x) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd), d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_i32x4(a, b, 0x88), y[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    y[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88), y[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  std::copy(y, y + 16, x);
}

}  // namespace mla

#endif
