// Products in float32 with fused multiply-adds, for any machine. Half precision and float8 are converted tile by tile.
//
// Registers hold a tile of sums. Scores: KEYS keys by one or two panels of query rows, a key element broadcast to the
// rows of a panel. Sums: HEADS query rows by up to VALUES vectors of columns, one weight broadcast to them.
#pragma once

#include <algorithm>

#include "call.h"

namespace mla {

class Fma {
 public:
  // Keys: 216 KiB at L + R = 576, or 149 KiB, which stay in the second-level cache between their two uses.
  static constexpr int64_t TILE = VL == 16 ? 96 : 66;

  Fma(const Call& call, Cursor& memory, int64_t panels) : c(call), K(call.L + call.R) {
    wide_latent = round_up(c.L, VL);
    wide_values = round_up(c.Lv, VL);
    query = memory.take<float>(panels * K * PANEL);
    latent_copy = memory.take<float>(TILE * wide_latent);
    rope_copy = memory.take<float>(TILE * c.R);
    columns_copy = memory.take<float>(TILE * VALUES * VL);
    values_copy = c.values.data ? memory.take<float>(TILE * wide_values) : nullptr;
  }

  static void enter() {}
  static void leave() {}
  int64_t columns() const { return wide_values; }  // of an accumulated row
  int64_t padded(int64_t n) const { return n; }  // rows of scores that are written

  void set_query(const Piece& p) {
    piece = p;
    with_row_type(c.query_kind, [&](auto type) {
      using T = decltype(type);
      const T* rows = reinterpret_cast<const T*>(c.query) + p.b * c.query_b;
      const float scale = float(c.scale);
      for (int64_t m = 0; m < p.panels() * PANEL; ++m) {
        float* to = query + m / PANEL * K * PANEL + m % PANEL;
        const int64_t row = p.first + m;
        const T* from = rows + row / c.H * c.query_s + row % c.H * c.query_h;
        for (int64_t k = 0; k < K; ++k) to[k * PANEL] = m < p.rows ? to_float(from[k]) * scale : 0.f;
      }
    });
  }

  void set_tile(int64_t start, int64_t n, const uint8_t* seen) {
    keys = n;
    latent = rows_of(c.latent, c.row_kind, c.L, wide_latent, start, seen, latent_copy, !c.values.data && c.L % VL);
    rope = c.R ? rows_of(c.rope, c.rope_kind, c.R, c.R, start, seen, rope_copy, false) : Tile{};
    values = latent;
    if (c.values.data)
      values = rows_of(c.values, c.row_kind, c.Lv, wide_values, start, seen, values_copy, c.Lv % VL);
    ahead = Ahead::of(c, piece, start + n, TILE, size_of(c.row_kind));
    // Prefetches are spread evenly over the scores: too many at a time would wait for free fill buffers.
    const int64_t steps = ceil_div(n, KEYS) * ceil_div(piece.panels(), PAIR) * (ceil_div(c.L, STEP) + ceil_div(c.R, STEP));
    pace = int(ceil_div(ahead.lines(), steps));
  }

  void scores(float* to) {  // some columns of a few panels stay in the first-level cache while all keys pass
    int64_t p = 0;
    for (; p + PAIR <= piece.panels(); p += PAIR) score_panels<PAIR>(p, to + p * PANEL);
    for (; p < piece.panels(); ++p) score_panels<1>(p, to + p * PANEL);
  }

  void add_weighted(const float* weights, const float* shrink, float* sums) {
    int64_t at = 0;
    for (; at + VALUES * VL <= wide_values; at += VALUES * VL) weigh_columns<VALUES>(at, weights, shrink, sums);
    for (; at < wide_values; at += VL) weigh_columns<1>(at, weights, shrink, sums);
  }

 private:
  static constexpr int PAIR = VL == 16 ? 2 : 1;             // panels in one register tile
  static constexpr int KEYS = VL == 16 ? 12 : VL == 8 ? 6 : 4;
  static constexpr int HEADS = VL == 16 ? 8 : 4;
  static constexpr int VALUES = 3;
  static constexpr int64_t MANY = 64;    // query rows from which packing columns of values side by side pays
  static constexpr int64_t CHAIN = 128;  // length of a chain of additions before it is added to the rest
  static constexpr int64_t STEP = 8;     // columns between two prefetches

  struct Tile {
    const float* data = nullptr;
    int64_t stride = 0;
  };

  // The rows in place, or a copy in float32 that is padded with zeros to `wide` and zero for rows that no query sees.
  Tile rows_of(const Rows& rows, int64_t kind, int64_t width, int64_t wide, int64_t start, const uint8_t* seen,
               float* copy, bool pad) {
    if (kind == FLOAT32 && !seen && !pad && keys <= piece.adjacent(c, start))
      return {reinterpret_cast<const float*>(rows.data) + piece.at(c, rows, start), rows.t};
    with_cached_type(kind, [&](auto type) {
      using T = decltype(type);
      for (int64_t i = 0; i < keys; ++i) {
        const T* from = reinterpret_cast<const T*>(rows.data) + piece.at(c, rows, start + i);
        float* to = copy + i * wide;
        const int64_t filled = seen && !seen[start + i] ? 0 : width;
        if constexpr (sizeof(T) == 1) {
          const float* scales = reinterpret_cast<const float*>(c.scales.data) + piece.at(c, c.scales, start + i);
          for (int64_t k = 0; k < filled; scales += c.scales_g) {
            const float factor = *scales;
            for (const int64_t end = std::min(filled, k + c.scale_width); k < end; ++k) to[k] = to_float(from[k]) * factor;
          }
        } else {
          for (int64_t k = 0; k < filled; ++k) to[k] = to_float(from[k]);
        }
        std::fill(to + filled, to + wide, 0.f);
      }
    });
    return {copy, wide};
  }

  template <int PANELS>
  void score_panels(int64_t panel, float* to) {
    const float* q = query + panel * K * PANEL;
    for (int64_t k = 0; k < c.L; k += CHAIN) score_columns<PANELS>(latent, k, std::min(c.L, k + CHAIN), q, to, k == 0);
    q += c.L * PANEL;
    for (int64_t k = 0; k < c.R; k += CHAIN) score_columns<PANELS>(rope, k, std::min(c.R, k + CHAIN), q, to, false);
  }

  template <int PANELS>
  void score_columns(Tile rows, int64_t begin, int64_t end, const float* q, float* to, bool fresh) {
    int64_t i = 0;
    for (; i + KEYS <= keys; i += KEYS) chain<KEYS, PANELS>(rows, i, begin, end, q, to, fresh);
    if (i < keys && keys >= KEYS) return chain<KEYS, PANELS>(rows, keys - KEYS, begin, end, q, to, fresh, i + KEYS - keys);
    for (; i < keys; ++i) chain<1, PANELS>(rows, i, begin, end, q, to, fresh);
  }

  // Adds some columns of the products of ROWS keys, except for the first `done` keys, which are complete.
  template <int ROWS, int PANELS>
  void chain(Tile rows, int64_t first, int64_t begin, int64_t end, const float* q, float* to, bool fresh,
             int64_t done = 0) {
    constexpr int N = PANELS * PANEL / VL, EACH = PANEL / VL;
    const float* row = rows.data + first * rows.stride + begin;
    const float* x_row = q + begin * PANEL;
    const int64_t stride = rows.stride, panel_stride = K * PANEL;
    vf sum[ROWS][N] = {};
    for (int64_t k = begin; k < end; k += STEP) {
      ahead.step(pace);
      const int64_t some = std::min(STEP, end - k);
      const float *row_3 = row + 3 * stride, *row_6 = row + 6 * stride, *row_9 = row + 9 * stride;
      for (int64_t i = 0; i < some; ++i, ++row, ++row_3, ++row_6, ++row_9, x_row += PANEL) {
        vf x[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) x[j] = kept(load(x_row + j / EACH * panel_stride + j % EACH * VL));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {  // few pointers, so that all stay in registers
          const float* group = r < 3 ? row : r < 6 ? row_3 : r < 9 ? row_6 : row_9;
          const float y = group[r % 3 * stride];
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) sum[r][j] += y * x[j];
        }
      }
    }
    const int64_t to_stride = piece.panels() * PANEL;
    to += first * to_stride;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        if (r < done) continue;
        float* at = to + r * to_stride + j * VL;
        store(at, fresh ? sum[r][j] : load(at) + sum[r][j]);
      }
  }

  template <int N>
  void weigh_columns(int64_t column, const float* weights, const float* shrink, float* sums) {
    Tile some{values.data + column, values.stride};
    if (piece.rows >= MANY) some = {packed_columns<N>(some), N * VL};
    const int64_t stride = piece.panels() * PANEL;
    for (int64_t m = 0; m < piece.rows; m += HEADS) {
      vf sum[HEADS][N] = {};
      const float* value = some.data;
      const float* weight = weights + m;
      for (int64_t i = 0; i < keys; ++i, value += some.stride, weight += stride) {
        vf x[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) x[j] = kept(load(value + j * VL));
#pragma GCC unroll 8
        for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) sum[h][j] += weight[h] * x[j];
      }
      for (int h = 0; h < HEADS; ++h)
        for (int j = 0; j < N; ++j) {
          float* at = sums + (m + h) * wide_values + column + j * VL;
          store(at, load(at) * shrink[m + h] + sum[h][j]);
        }
    }
  }

  // Packs columns of all keys side by side: rows are a power of two apart, so that few of them would stay in a cache.
  template <int N>
  const float* packed_columns(Tile some) {
    for (int64_t i = 0; i < keys; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) store(columns_copy + (i * N + j) * VL, load(some.data + i * some.stride + j * VL));
    return columns_copy;
  }

  const Call& c;
  const int64_t K;
  int64_t wide_latent, wide_values, keys = 0;
  Piece piece{};
  float *query, *latent_copy, *rope_copy, *values_copy, *columns_copy;
  Tile latent, rope, values;
  Ahead ahead;
  int pace = 0;  // cache lines to prefetch per step
};

}  // namespace mla
