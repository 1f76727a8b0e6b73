// Products on AMX tiles, which multiply bfloat16 exactly and sum in float32.
//
// With P planes (planes.h) of query and weights, the products of row plane r and query plane j with r + j < P are
// added. P = 2 leaves an error of 2^-18 in a query element, P = 3 one below float32's own rounding.
#pragma once

#include "planes.h"

#if defined(MLA_AMX)

#include <sys/syscall.h>
#include <unistd.h>

namespace mla {

// GCC's tile intrinsics do not declare that they read memory: this forces earlier writes to be complete.
inline void settle(const void* written = nullptr) { __asm__ volatile("" ::"r"(written) : "memory"); }

// Linux lets a process use the tile registers only after it has asked for them.
inline bool amx_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

template <class Row, int ROW_PLANES, int PLANES>
class Amx {
 public:
  static constexpr int64_t TILE = PLANES == 3 ? 64 : 128;  // keys; a multiple of 64

  Amx(const Call& call, Cursor& memory, int64_t panels) : c(call) {
    latent_chunks = ceil_div(c.L, CHUNK);
    chunks = latent_chunks + ceil_div(c.R, CHUNK);
    wide = round_up(c.Lv, COLUMNS);
    query_plane = panels * chunks * BLOCK;
    key_plane = chunks * TILE * CHUNK;
    value_plane = TILE * COLUMNS;
    weight_plane = panels * PANEL * TILE;
    query = memory.take<Plane>(PLANES * query_plane);
    key_copy = memory.take<Plane>(ROW_PLANES * key_plane);
    values = memory.take<Plane>(ROW_PLANES * value_plane);
    weight = memory.take<Plane>(PLANES * weight_plane);
  }

  int64_t columns() const { return wide; }  // of an accumulated row
  int64_t padded(int64_t n) const { return round_up(n, 64); }  // rows of scores that are written

  void set_query(const Piece& p) {
    piece = p;
    with_row_type(c.query_kind, [&](auto type) {
      using T = decltype(type);
      const T* base = reinterpret_cast<const T*>(c.query) + p.b * c.query_b;
      for (int64_t panel = 0; panel < p.panels(); ++panel)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) pack_query(base, panel, chunk);
    });
  }

  void set_tile(int64_t start, int64_t n, const uint8_t* seen) {
    first_key = start, given = n, keys = round_up(n, 64), sees = seen;
    // bfloat16 rows in whole chunks serve as left factors in place.
    const bool in_place =
        ROW_PLANES == 1 && !seen && n == keys && c.L % CHUNK == 0 && c.R % CHUNK == 0 && n <= piece.adjacent(c, start);
    for (int64_t i = 0; i < keys && !in_place; ++i) {
      copy_key(row_of(c.latent, i), visible(i) ? c.L : 0, i, 0, latent_chunks);
      if (c.R) copy_key(row_of(c.rope, i), visible(i) ? c.R : 0, i, latent_chunks, chunks);
    }
    const int64_t copied = TILE * CHUNK * 2;
    if (in_place) {
      const Row *latent = row_of(c.latent, 0), *rope = c.R ? row_of(c.rope, 0) : nullptr;
      part[0] = {reinterpret_cast<const char*>(latent), c.latent.t * 2, CHUNK * 2, 0, latent_chunks};
      part[1] = {reinterpret_cast<const char*>(rope), c.rope.t * 2, CHUNK * 2, latent_chunks, chunks};
    } else {
      const char* all = reinterpret_cast<const char*>(key_copy);
      part[0] = {all, CHUNK * 2, copied, 0, chunks};
      part[1] = {all, CHUNK * 2, copied, chunks, chunks};
    }
    ahead = Ahead::of(c, piece, start + n, TILE, sizeof(Row));
  }

  void scores(float* to) {
    const int64_t panels = piece.panels();
    for (int64_t i = 0; i < keys; i += 64) {
      int64_t p = 0;
      for (; p + 2 <= panels; p += 2)
        for (int64_t half = 0; half < 64; half += 32) score_2x2(i + half, p, to);
      if (p < panels) score_4x1(i, p, to);
    }
  }

  void add_weighted(const float* weights, const float* shrink, float* sums) {
    const int64_t panels = piece.panels();
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t i = 0; i < keys; i += CHUNK) pack_weights(weights, p, i);
    for (int64_t column = 0; column < wide; column += COLUMNS) {
      copy_values(column);  // few enough columns at a time to stay in the first-level cache
      int64_t p = 0;
      for (; p + 2 <= panels; p += 2)
        for (int64_t half = 0; half < COLUMNS; half += COLUMNS / 2) weigh_2x2(p, column, half, shrink, sums);
      if (p < panels) weigh_1x4(p, column, shrink, sums);
    }
  }

  static void enter() {  // configures every tile register as 16 rows of 64 bytes
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    settle(&config);
    _tile_loadconfig(&config);
  }
  static void leave() { _tile_release(); }
 private:
  static constexpr int64_t COLUMNS = 4 * PANEL;  // columns of the values that are processed at a time
  struct Part {  // left factors of the scores: chunks [begin, end) of all keys
    const char* data;
    int64_t row, chunk;  // strides in bytes
    int64_t begin, end;
  };

  // Row i of the tile; for padding rows the last one, of which nothing is read.
  const Row* row_of(const Rows& rows, int64_t i) const {
    return reinterpret_cast<const Row*>(rows.data) + piece.at(c, rows, first_key + std::min(i, given - 1));
  }

  template <class T>
  void pack_query(const T* base, int64_t panel, int64_t chunk) {
    const bool in_latent = chunk < latent_chunks;
    const int64_t column = in_latent ? chunk * CHUNK : c.L + (chunk - latent_chunks) * CHUNK;
    const int64_t left = (in_latent ? c.L : c.L + c.R) - column;
    const __m512 scale = _mm512_set1_ps(float(c.scale));
    alignas(64) Plane planes[PLANES][BLOCK];
    for (int64_t i = 0; i < PANEL; ++i) {
      const int64_t m = panel * PANEL + i, row = piece.first + m;
      const T* from = base + row / c.H * c.query_s + row % c.H * c.query_h + column;
      const int64_t filled = m < piece.rows ? left : 0;
      __m512 x = _mm512_mul_ps(read16(from, valid16(filled)), scale);
      __m512 y = _mm512_mul_ps(read16(from + 16, valid16(filled - 16)), scale);
      if (ROW_PLANES == 1) {  // even and odd columns, which in interleaved form have the order of key_words
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512 in_order = x;
        x = _mm512_permutex2var_ps(in_order, even, y);
        y = _mm512_permutex2var_ps(in_order, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y);
      }
      split_rounded<PLANES>(x, y, planes[0] + i * CHUNK, BLOCK);
    }
    for (int j = 0; j < PLANES; ++j)
      store_transposed(planes[j], query + j * query_plane + (panel * chunks + chunk) * BLOCK);
  }

  static void store_transposed(const Plane* from, Plane* to) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(from + i * CHUNK);
    transpose(x);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * CHUNK, x[i]);
  }

  bool visible(int64_t i) const { return i < given && (!sees || sees[first_key + i]); }

  // Copies chunks [begin, end) of a key as left factors of the scores. Columns past `width` are zero.
  void copy_key(const Row* row, int64_t width, int64_t key, int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk, row += CHUNK, width -= CHUNK) {
      __m512 a = read16(row, valid16(width)), b = read16(row + 16, valid16(width - 16));
      Plane* to = key_copy + (chunk * TILE + key) * CHUNK;
#pragma GCC unroll 3
      for (int r = 0; r < ROW_PLANES; ++r) {
        _mm512_storeu_si512(to + r * key_plane, key_words(a, b));
        a = tail(a), b = tail(b);
      }
    }
  }

  // Copies COLUMNS columns of all values as right factors of the sums: [keys / 32][COLUMNS / 16][16 pairs][16][2].
  void copy_values(int64_t column) {
    const Rows& rows = c.values.data ? c.values : c.latent;
    for (int64_t i = 0; i < keys; i += 2) {
      const Row *from = row_of(rows, i) + column, *after = row_of(rows, i + 1) + column;
      const int64_t left_a = visible(i) ? c.Lv - column : 0, left_b = visible(i + 1) ? c.Lv - column : 0;
      Plane* to = values + i / CHUNK * CHUNK * COLUMNS + i % CHUNK * PANEL;
#pragma GCC unroll 4
      for (int64_t at = 0; at < COLUMNS; at += PANEL) {
        __m512 a = read16(from + at, valid16(left_a - at)), b = read16(after + at, valid16(left_b - at));
#pragma GCC unroll 3
        for (int r = 0; r < ROW_PLANES; ++r) {
          _mm512_storeu_si512(to + at * CHUNK + r * value_plane, interleaved(a, b));
          a = tail(a), b = tail(b);
        }
      }
    }
  }

  // 32 columns of a left factor: in order for one plane, since such rows are also used in place, else interleaved.
  static __m512i key_words(__m512 a, __m512 b) {
    if (ROW_PLANES > 1) return interleaved(a, b);
    const __m256i x = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16));
    const __m256i y = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(b), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1);
  }

  void pack_weights(const float* weights, int64_t panel, int64_t key) {
    const int64_t stride = piece.panels() * PANEL;
    const float* from = weights + key * stride + panel * PANEL;
    alignas(64) Plane planes[PLANES][BLOCK];
    for (int64_t i = 0; i < CHUNK; i += 2)
      split_rounded<PLANES>(_mm512_loadu_ps(from + i * stride), _mm512_loadu_ps(from + (i + 1) * stride),
                            planes[0] + i * PANEL, BLOCK);
    for (int j = 0; j < PLANES; ++j)
      store_transposed(planes[j], weight + j * weight_plane + (panel * TILE + key) * PANEL);
  }

  // Products of planes with r + j in [FROM, TO) are added before the larger ones, so that the large sum is rounded less
  // often.
  static constexpr bool SMALL_FIRST = PLANES == 3;

  static void clear_sums() {
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void score_2x2(int64_t key, int64_t panel, float* to) {
    clear_sums();
    if (SMALL_FIRST) add_scores_2x2<1, PLANES>(key, panel);
    add_scores_2x2<0, SMALL_FIRST ? 1 : PLANES>(key, panel);
    const int64_t stride = piece.panels() * PANEL;
    to += key * stride + panel * PANEL;
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + PANEL, stride * 4);
    _tile_stored(2, to + 16 * stride, stride * 4);
    _tile_stored(3, to + 16 * stride + PANEL, stride * 4);
  }

  void score_4x1(int64_t key, int64_t panel, float* to) {
    clear_sums();
    if (SMALL_FIRST) add_scores_4x1<1, PLANES>(key, panel);
    add_scores_4x1<0, SMALL_FIRST ? 1 : PLANES>(key, panel);
    const int64_t stride = piece.panels() * PANEL;
    to += key * stride + panel * PANEL;
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + 16 * stride, stride * 4);
    _tile_stored(2, to + 32 * stride, stride * 4);
    _tile_stored(3, to + 48 * stride, stride * 4);
  }

  void weigh_2x2(int64_t panel, int64_t column, int64_t half, const float* shrink, float* sums) {
    clear_sums();
    if (SMALL_FIRST) add_sums_2x2<1, PLANES>(panel, half);
    add_sums_2x2<0, SMALL_FIRST ? 1 : PLANES>(panel, half);
    alignas(64) float fresh[32][32];
    _tile_stored(0, fresh[0], 128);
    _tile_stored(1, fresh[0] + PANEL, 128);
    _tile_stored(2, fresh[16], 128);
    _tile_stored(3, fresh[16] + PANEL, 128);
    join<2>(fresh[0], 32, panel * PANEL, column + half, shrink, sums);
  }

  void weigh_1x4(int64_t panel, int64_t column, const float* shrink, float* sums) {
    clear_sums();
    if (SMALL_FIRST) add_sums_1x4<1, PLANES>(panel);
    add_sums_1x4<0, SMALL_FIRST ? 1 : PLANES>(panel);
    alignas(64) float fresh[16][64];
    _tile_stored(0, fresh[0], 256);
    _tile_stored(1, fresh[0] + PANEL, 256);
    _tile_stored(2, fresh[0] + 2 * PANEL, 256);
    _tile_stored(3, fresh[0] + 3 * PANEL, 256);
    join<4>(fresh[0], 16, panel * PANEL, column, shrink, sums);
  }

  template <int N>
  void join(const float* fresh, int64_t rows, int64_t first, int64_t column, const float* shrink, float* sums) {
    for (int64_t m = 0; m < rows; ++m, fresh += N * PANEL) {
      float* to = sums + (first + m) * wide + column;
      const __m512 factor = _mm512_set1_ps(shrink[first + m]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j)
        _mm512_storeu_ps(to + j * PANEL, _mm512_fmadd_ps(_mm512_loadu_ps(to + j * PANEL), factor,
                                                         _mm512_load_ps(fresh + j * PANEL)));
    }
  }

  template <int FROM, int TO>
  void add_scores_2x2(int64_t key, int64_t panel) {
    for (const Part& x : part)
      for (int64_t chunk = x.begin; chunk < x.end; ++chunk) {
        ahead.step(4);
        const char* rows = x.data + key * x.row + (chunk - x.begin) * x.chunk;
        const Plane* q = query + (panel * chunks + chunk) * BLOCK;
#pragma GCC unroll 3
        for (int r = 0; r < ROW_PLANES; ++r) {
          if (r >= TO) break;
          _tile_loadd(4, rows + r * key_plane * 2, x.row);
          _tile_loadd(5, rows + r * key_plane * 2 + 16 * x.row, x.row);
#pragma GCC unroll 3
          for (int j = 0; j < PLANES; ++j) {
            if (r + j < FROM || r + j >= TO) continue;
            _tile_loadd(6, q + j * query_plane, 64);
            _tile_loadd(7, q + j * query_plane + chunks * BLOCK, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
      }
  }

// Adds the product with plane j of the other factor to a sum, if r + j is in the current range.
#define MLA_ADD(sum, j, left, right) if (r + j >= FROM && r + j < TO) _tile_dpbf16ps(sum, left, right)

  template <int FROM, int TO>
  void add_scores_4x1(int64_t key, int64_t panel) {
    for (const Part& x : part)
      for (int64_t chunk = x.begin; chunk < x.end; ++chunk) {
        ahead.step(16);
        const char* rows = x.data + key * x.row + (chunk - x.begin) * x.chunk;
        const Plane* q = query + (panel * chunks + chunk) * BLOCK;
        _tile_loadd(5, q, 64);
        if (TO > 1) _tile_loadd(6, q + query_plane, 64);
        if (TO > 2) _tile_loadd(7, q + 2 * query_plane, 64);
#pragma GCC unroll 3
        for (int r = 0; r < ROW_PLANES; ++r) {
          if (r >= TO) break;
          const char* at = rows + r * key_plane * 2;
          _tile_loadd(4, at, x.row);
          MLA_ADD(0, 0, 4, 5); MLA_ADD(0, 1, 4, 6); MLA_ADD(0, 2, 4, 7);
          _tile_loadd(4, at + 16 * x.row, x.row);
          MLA_ADD(1, 0, 4, 5); MLA_ADD(1, 1, 4, 6); MLA_ADD(1, 2, 4, 7);
          _tile_loadd(4, at + 32 * x.row, x.row);
          MLA_ADD(2, 0, 4, 5); MLA_ADD(2, 1, 4, 6); MLA_ADD(2, 2, 4, 7);
          _tile_loadd(4, at + 48 * x.row, x.row);
          MLA_ADD(3, 0, 4, 5); MLA_ADD(3, 1, 4, 6); MLA_ADD(3, 2, 4, 7);
        }
      }
  }

  template <int FROM, int TO>
  void add_sums_1x4(int64_t panel) {
    for (int64_t key = 0; key < keys; key += CHUNK) {
      ahead.step(16);
      const Plane* w = weight + (panel * TILE + key) * PANEL;
      _tile_loadd(5, w, 64);
      if (TO > 1) _tile_loadd(6, w + weight_plane, 64);
      if (TO > 2) _tile_loadd(7, w + 2 * weight_plane, 64);
#pragma GCC unroll 3
      for (int r = 0; r < ROW_PLANES; ++r) {
        if (r >= TO) break;
        const Plane* v = values + key * COLUMNS + r * value_plane;
        _tile_loadd(4, v, 64);
        MLA_ADD(0, 0, 5, 4); MLA_ADD(0, 1, 6, 4); MLA_ADD(0, 2, 7, 4);
        _tile_loadd(4, v + BLOCK, 64);
        MLA_ADD(1, 0, 5, 4); MLA_ADD(1, 1, 6, 4); MLA_ADD(1, 2, 7, 4);
        _tile_loadd(4, v + 2 * BLOCK, 64);
        MLA_ADD(2, 0, 5, 4); MLA_ADD(2, 1, 6, 4); MLA_ADD(2, 2, 7, 4);
        _tile_loadd(4, v + 3 * BLOCK, 64);
        MLA_ADD(3, 0, 5, 4); MLA_ADD(3, 1, 6, 4); MLA_ADD(3, 2, 7, 4);
      }
    }
  }
#undef MLA_ADD

  template <int FROM, int TO>
  void add_sums_2x2(int64_t panel, int64_t half) {
    for (int64_t key = 0; key < keys; key += CHUNK) {
      ahead.step(4);
      const Plane* v = values + key * COLUMNS + half * CHUNK;
      const Plane* w = weight + (panel * TILE + key) * PANEL;
#pragma GCC unroll 3
      for (int r = 0; r < ROW_PLANES; ++r) {
        if (r >= TO) break;
        _tile_loadd(6, v + r * value_plane, 64);
        _tile_loadd(7, v + r * value_plane + BLOCK, 64);
#pragma GCC unroll 3
        for (int j = 0; j < PLANES; ++j) {
          if (r + j < FROM || r + j >= TO) continue;
          _tile_loadd(4, w + j * weight_plane, 64);
          _tile_loadd(5, w + j * weight_plane + TILE * PANEL, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
  }

  const Call& c;
  int64_t latent_chunks, chunks, wide;  // wide: Lv rounded up to COLUMNS
  int64_t first_key = 0, given = 0, keys = 0;  // the start of the tile, its number of keys, and that with padding
  const uint8_t* sees = nullptr;  // the piece's `seen`, if some key of the tile is not seen
  int64_t query_plane, key_plane, value_plane, weight_plane;  // values in one plane
  Piece piece{};
  Plane *query, *key_copy, *values, *weight;
  Part part[2];
  Ahead ahead;
};

}  // namespace mla

#endif
