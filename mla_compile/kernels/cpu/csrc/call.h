// The records that Python passes, and the memory in which a call works.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "simd.h"

namespace mla {

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3, BOOL = 4, FLOAT8 = 5, INT8 = 6, INT4 = 7 };

enum Amx_use : int64_t { AMX_NEVER = 0, AMX_WHERE_FASTER = 1, AMX_ALWAYS = 2 };

struct Rows {  // [B,T,width], or pages [P,page,width]; the last axis is contiguous; strides in elements
  const char* data;
  int64_t b, t;
};

struct Call {  // kernels/cpu/native.py packs exactly these 8-byte fields
  int64_t B, S, H, T, L, R, Lv;
  const char* query;
  int64_t query_b, query_s, query_h;
  Rows latent, rope, values;  // values.data is null if the latent rows are summed
  const char* mask;           // or null; the stride of a broadcast axis is 0
  int64_t mask_b, mask_h, mask_s, mask_t;
  const int32_t* lengths;  // [B], or null if every batch entry has T keys
  char* out;   // [B,S,H,Lv] contiguous
  float* lse;  // [B,S,H] contiguous
  int64_t query_kind, row_kind, mask_kind;
  int64_t causal, window, threads, amx;
  const int32_t* table;  // [B,T/page], or null if the cache is contiguous
  int64_t table_b, page_bits;  // a page has 2^page_bits rows
  const int32_t* indices;      // [B,S,k], the last axis contiguous: the keys of each query
  int64_t indices_b, indices_s, k;  // k is -1 if a query sees all keys
  Rows scales;  // float32 [B,T,groups] or [P,page,groups]: the factors of float8 rows; or null
  int64_t scales_g, scale_width;  // stride between groups, and columns of a group
  int64_t rope_kind;  // row_kind; may differ from it if rows are float8
  const float* sinks;  // [H], or null
  double scale, softcap;  // softcap is 0 if there is none

  // The offset of row t of batch entry b, in elements; t < length(b), since later entries of the table must not be
  // read.
  int64_t at(const Rows& rows, int64_t b, int64_t t) const {
    if (!table) return b * rows.b + t * rows.t;
    return table[b * table_b + (t >> page_bits)] * rows.b + (t & ((int64_t{1} << page_bits) - 1)) * rows.t;
  }
  bool picks() const { return k >= 0; }  // whether each query has its own keys; the address of an empty list is null
  // The number of consecutive rows from t on.
  int64_t adjacent(int64_t t) const {
    if (!table) return T - t;
    const int64_t page = int64_t{1} << page_bits;
    return page - (t & (page - 1));
  }

  int64_t length(int64_t b) const { return lengths ? std::clamp<int64_t>(lengths[b], 0, T) : T; }
  // The keys that length, causality and window let query s of a batch entry see: [first, stop).
  int64_t stop(int64_t b, int64_t s) const {
    return causal ? std::clamp<int64_t>(length(b) - S + s + 1, 0, length(b)) : length(b);
  }
  int64_t first(int64_t b, int64_t s) const { return window ? std::max<int64_t>(0, length(b) - S + s - window + 1) : 0; }
};

constexpr int64_t ALONE = int64_t{1} << 19;  // multiply-adds up to which waking other threads costs more than it saves
constexpr int64_t PANEL = 16;      // query rows (s, h) side by side in scores and packed queries: one AVX-512 vector
constexpr int64_t MAX_ROWS = 128;  // query rows in one walk over the cache: 512 sums of each are 256 KiB

// One walk: some query rows of a batch entry over some of its keys.
struct Piece {
  int64_t b, first, rows;  // query rows [first, first + rows) of the S*H of batch entry b
  int64_t lo, hi;          // keys; with picks, positions in these
  int64_t part, parts;     // its position among the consecutive pieces of the same query rows
  const uint8_t* seen;     // [T], 0 if no query of the batch entry sees the key; null if all are seen
  const int32_t* picks;    // the keys of the only query of this piece; null: the i-th key is key i
  int64_t panels() const { return ceil_div(rows, PANEL); }
  int64_t key(int64_t i) const { return picks ? picks[i] : i; }
  // The offset of the row of the i-th key, in elements, and the number of consecutive rows from there on.
  int64_t at(const Call& c, const Rows& of, int64_t i) const { return c.at(of, b, key(i)); }
  int64_t adjacent(const Call& c, int64_t i) const { return picks ? 1 : c.adjacent(i); }
  // The longest tile that pays from the i-th key on: float32 rows in a page of 64 or more rows are read in place.
  int64_t tile(const Call& c, int64_t i) const {
    return picks || c.page_bits < 6 || c.row_kind != FLOAT32 ? c.T : c.adjacent(i);
  }
};

// Hands out aligned pieces of one block; with a null block it only counts bytes.
struct Cursor {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * int64_t(sizeof(T)), 64) + 64;  // rows at power-of-two distances would share cache sets
    return at;
  }
};

// A block that a thread keeps between calls, since fresh memory costs a page fault for every 4 KiB.
class Scratch {
 public:
  ~Scratch() { std::free(block_); }
  char* of_size(size_t bytes) {
    if (bytes > size_) {
      std::free(block_);
      size_ = round_up(bytes, 4096);
      block_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (!block_) size_ = 0;
    }
    return block_;
  }

 private:
  char* block_ = nullptr;
  size_t size_ = 0;
};

// Walks ahead through the rows of the next tile and prefetches them into the second-level cache.
struct Ahead {
  const char* row = nullptr;
  int64_t stride = 0, width = 0, left = 0, at = 0;  // in bytes; left: in rows
  const Call* call = nullptr;                       // set if rows are picked and not consecutive
  const Piece* piece = nullptr;
  int64_t next = 0;
  // For at most `most` rows of the latent from the i-th key of a piece on.
  static Ahead of(const Call& c, const Piece& p, int64_t i, int64_t most, int64_t bytes) {
    if (i >= p.hi) return {};
    most = std::min(most, p.hi - i);
    const char* first = c.latent.data + p.at(c, c.latent, i) * bytes;
    if (p.picks) return {first, bytes, c.L * bytes, most, 0, &c, &p, i};
    return {first, c.latent.t * bytes, c.L * bytes, std::min(c.adjacent(i), most)};
  }
  int64_t lines() const { return left * ceil_div(width, 64); }
  void step(int lines) {
    for (int i = 0; i < lines && left > 0; ++i) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at < width) continue;
      at = 0, --left;
      if (!piece) row += stride;
      else if (left > 0) row = call->latent.data + piece->at(*call, call->latent, ++next) * stride;
    }
  }
};

inline int64_t size_of(int64_t kind) {
  return kind == FLOAT32 ? 4 : kind == FLOAT64 ? 8 : kind == BOOL || kind == FLOAT8 ? 1 : 2;
}

// Calls f with a value of the C++ type of a kind. Python passes only the kinds listed here.
template <class F>
void with_row_type(int64_t kind, F f) {
  if (kind == FLOAT32) return f(float{});
  if (kind == BFLOAT16) return f(bf16{});
#if defined(MLA_FLOAT16)
  if (kind == FLOAT16) return f(fp16{});
#endif
}

// The same, including the kind that only cached rows have.
template <class F>
void with_cached_type(int64_t kind, F f) {
  if (kind == FLOAT8) return f(fp8{});
  with_row_type(kind, f);
}

}  // namespace mla
