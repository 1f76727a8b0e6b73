// Scores of bfloat16 queries and keys, two columns in one instruction (AVX512-BF16): exact products, sums in float32.
//
// The layout is that of fma.h with pairs of columns instead of columns. For scores only, of queries that are not
// scaled.
#pragma once

#include <algorithm>

#include "call.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define MLA_DOTS 1

namespace mla {

class Dots {
 public:
  static constexpr int64_t TILE = 96;  // keys

  Dots(const Call& call, Cursor& memory, int64_t panels) : c(call), pairs((call.L + 1) / 2) {
    query = memory.take<uint32_t>(panels * pairs * PANEL);
    copy = memory.take<uint32_t>(TILE * pairs);
  }

  static void enter() {}
  static void leave() {}
  int64_t padded(int64_t n) const { return n; }  // rows of scores that are written

  void set_query(const Piece& p) {
    piece = p;
    const bf16* rows = reinterpret_cast<const bf16*>(c.query) + p.b * c.query_b;
    for (int64_t m = 0; m < p.panels() * PANEL; ++m) {
      const int64_t row = p.first + m;
      uint32_t* to = query + m / PANEL * pairs * PANEL + m % PANEL;
      const bf16* from = m < p.rows ? rows + row / c.H * c.query_s + row % c.H * c.query_h : nullptr;
      for (int64_t k = 0; k < pairs; ++k) to[k * PANEL] = from ? pair(from, k) : 0;
    }
  }

  void set_tile(int64_t start, int64_t n, const uint8_t*) {
    keys = n;
    const bf16* rows = reinterpret_cast<const bf16*>(c.latent.data) + piece.at(c, c.latent, start);
    ahead = Ahead::of(c, piece, start + n, TILE, sizeof(bf16));
    first = rows, stride = c.latent.t;
    if (c.L % 2 == 0) return;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < pairs; ++k) copy[i * pairs + k] = pair(rows + i * c.latent.t, k);
    first = reinterpret_cast<const bf16*>(copy), stride = 2 * pairs;
  }

  void scores(float* to) {
    if (keys < KEYS) {
      for (int64_t i = 0; i < keys; ++i) score_rows<1>(i, to);
      return;
    }
    for (int64_t i = 0; i < keys; i += KEYS) score_rows<KEYS>(std::min(i, keys - KEYS), to);  // may repeat some keys
  }

 private:
  static constexpr int KEYS = 12;       // with two panels: 24 registers of sums
  static constexpr int64_t CHAIN = 64;  // length of a chain of additions, in pairs, before it is added to the rest

  // Columns 2k and 2k + 1; 0 past the last one.
  uint32_t pair(const bf16* row, int64_t k) const {
    return row[2 * k].bits | (2 * k + 1 < c.L ? uint32_t(row[2 * k + 1].bits) << 16 : 0);
  }

  template <int ROWS>
  void score_rows(int64_t i, float* to) {
    int64_t p = 0;
    for (; p + 2 <= piece.panels(); p += 2) score_tile<ROWS, 2>(i, p, to);
    for (; p < piece.panels(); ++p) score_tile<ROWS, 1>(i, p, to);
  }

  template <int ROWS, int PANELS>
  void score_tile(int64_t i, int64_t panel, float* to) {
    const int64_t to_stride = piece.panels() * PANEL;
    to += i * to_stride + panel * PANEL;
    for (int64_t begin = 0; begin < pairs; begin += CHAIN) {
      const uint32_t* q = query + (panel * pairs + begin) * PANEL;
      const bf16* row = first + i * stride + 2 * begin;
      __m512 sum[ROWS][PANELS];
      for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < PANELS; ++j) sum[r][j] = _mm512_setzero_ps();
      for (int64_t k = std::min(CHAIN, pairs - begin); k > 0; --k, q += PANEL, row += 2) {
        ahead.step(1);
        __m512bh x[PANELS];
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) x[j] = (__m512bh)_mm512_loadu_si512(q + j * pairs * PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          int32_t two;
          std::memcpy(&two, row + r * stride, sizeof two);
          const __m512bh y = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
          for (int j = 0; j < PANELS; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], x[j], y);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) {
          float* at = to + r * to_stride + j * PANEL;
          _mm512_storeu_ps(at, begin ? _mm512_add_ps(_mm512_loadu_ps(at), sum[r][j]) : sum[r][j]);
        }
    }
  }

  const Call& c;
  const int64_t pairs;
  int64_t keys = 0, stride = 0;
  Piece piece{};
  const bf16* first = nullptr;
  uint32_t *query, *copy;
  Ahead ahead;
};

}  // namespace mla

#endif
