// The keys that are seen, and the effect of a mask, causality and a window on scores.
#pragma once

#include <vector>

#include "call.h"

namespace mla {

// The term that a mask's value adds to a score. "Low": finite, but meant to hide a key (half the lowest value or less).
inline float bias_of(uint8_t x) { return x ? 0.f : -INF; }
inline float bias_of(double x) {
  const double lowest = std::numeric_limits<float>::lowest();
  return x < lowest && x != -std::numeric_limits<double>::infinity() ? float(lowest) : float(x);
}
template <class T>
float bias_of(T x) {
  return to_float(x);
}
inline bool is_low(uint8_t x) { return !x; }
inline bool is_low(float x) { return x <= std::numeric_limits<float>::lowest() / 2; }
inline bool is_low(double x) { return x <= std::numeric_limits<double>::lowest() / 2; }
inline bool is_low(bf16 x) { return to_float(x) <= to_float(bf16{0xff7f}) / 2; }
#if defined(MLA_FLOAT16)
inline bool is_low(fp16 x) { return to_float(x) <= -65504.f / 2; }
#endif

template <class F>
void with_mask_type(int64_t kind, F f) {
  if (kind == BOOL) return f(uint8_t{});
  if (kind == FLOAT64) return f(double{});
  with_row_type(kind, f);
}

// The keys that some query of one batch entry sees.
struct Seen {
  std::vector<uint8_t> keys;  // [T]; empty if all are seen
  int64_t lo = 0, hi = 0;
};

// Marks the visible keys. Returns false if some query has none: low keys then count as visible, too.
template <class T>
bool mark(const Call& c, int64_t b, const T* mask, bool low_is_hidden, std::vector<uint8_t>& keys) {
  bool every = true;
  const int64_t S = c.mask_s || c.causal || c.window ? c.S : 1, H = c.mask_h ? c.H : 1;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t first = c.first(b, s), stop = c.stop(b, s);
    for (int64_t h = 0; h < H; ++h) {
      const T* row = mask + s * c.mask_s + h * c.mask_h;
      uint8_t some = 0;
      auto visit = [&](int64_t stride) {
        for (int64_t t = first; t < stop; ++t) {
          const T x = row[t * stride];
          const uint8_t visible = low_is_hidden ? !is_low(x) : bias_of(x) != -INF;
          keys[t] |= visible;
          some |= visible;
        }
      };
      c.mask_t == 1 ? visit(1) : visit(c.mask_t);  // the constant stride is vectorised
      every = every && some;
    }
  }
  return every;
}

inline Seen find_seen(const Call& c, int64_t b) {
  Seen seen;
  seen.hi = c.length(b);
  seen.lo = std::min(seen.hi, c.first(b, 0));
  if (!c.mask) return seen;
  with_mask_type(c.mask_kind, [&](auto type) {
    using T = decltype(type);
    const T* mask = reinterpret_cast<const T*>(c.mask) + b * c.mask_b;
    seen.keys.assign(c.T, 0);
    if (!mark(c, b, mask, true, seen.keys) && c.mask_kind != BOOL) {
      seen.keys.assign(c.T, 0);
      mark(c, b, mask, false, seen.keys);
    }
  });
  while (seen.hi > 0 && !seen.keys[seen.hi - 1]) --seen.hi;
  while (seen.lo < seen.hi && !seen.keys[seen.lo]) ++seen.lo;
  if (!std::memchr(seen.keys.data() + seen.lo, 0, seen.hi - seen.lo)) seen.keys.clear();
  return seen;
}

// Takes the keys that the mask lets some head see; false if some head then sees none.
template <class T>
bool take_visible(const Call& c, const T* mask, bool low_is_hidden, const std::vector<int32_t>& keys,
                  std::vector<int32_t>& taken) {
  const int64_t H = c.mask_h ? c.H : 1;
  std::vector<uint8_t> some(H, 0);
  for (const int32_t t : keys) {
    uint8_t any = 0;
    for (int64_t h = 0; h < H; ++h) {
      const T x = mask[h * c.mask_h + t * c.mask_t];
      const uint8_t visible = low_is_hidden ? !is_low(x) : bias_of(x) != -INF;
      some[h] |= visible, any |= visible;
    }
    if (any) taken.push_back(t);
  }
  return !std::memchr(some.data(), 0, H);
}

// The keys among its indices that a query sees.
inline std::vector<int32_t> find_picks(const Call& c, int64_t b, int64_t s) {
  const int32_t* named = c.indices + b * c.indices_b + s * c.indices_s;
  const int64_t first = c.first(b, s), stop = c.stop(b, s);
  std::vector<int32_t> keys;
  keys.reserve(c.k);
  for (int64_t i = 0; i < c.k; ++i)
    if (named[i] >= first && named[i] < stop) keys.push_back(named[i]);
  if (!c.mask) return keys;
  std::vector<int32_t> taken;
  with_mask_type(c.mask_kind, [&](auto type) {
    using T = decltype(type);
    const T* mask = reinterpret_cast<const T*>(c.mask) + b * c.mask_b + s * c.mask_s;
    if (!take_visible(c, mask, true, keys, taken) && c.mask_kind != BOOL) {
      taken.clear();
      take_visible(c, mask, false, keys, taken);
    }
  });
  return taken;
}

// Applies mask, causality, window and unseen keys to the scores [n, panels * PANEL] of keys [start, start + n).
inline void hide(const Call& c, const Piece& piece, int64_t start, int64_t n, float* scores) {
  const int64_t stride = piece.panels() * PANEL, M = piece.rows;
  if (c.mask)
    with_mask_type(c.mask_kind, [&](auto type) {
      using T = decltype(type);
      const T* of_batch = reinterpret_cast<const T*>(c.mask) + piece.b * c.mask_b;
      int64_t offset[MAX_ROWS];
      for (int64_t m = 0; m < M; ++m) {
        const int64_t row = piece.first + m;
        offset[m] = row / c.H * c.mask_s + row % c.H * c.mask_h;
      }
      const bool uniform = !c.mask_h && (!c.mask_s || c.S == 1 || piece.picks);
      for (int64_t i = 0; i < n; ++i, scores += stride) {
        const T* mask = of_batch + piece.key(start + i) * c.mask_t;
        if (uniform) {
          const float bias = bias_of(mask[offset[0]]);
          if (bias == 0.f) continue;
          for (int64_t m = 0; m < M; ++m) scores[m] = bias == -INF ? -INF : scores[m] + bias;
        } else {
          for (int64_t m = 0; m < M; ++m) {
            const float bias = bias_of(mask[offset[m]]);
            scores[m] = bias == -INF ? -INF : scores[m] + bias;
          }
        }
      }
      scores -= n * stride;
    });
  if (piece.picks) return;  // picked keys are within the bounds and seen
  const int64_t s = piece.first / c.H, last = (piece.first + M - 1) / c.H;
  if (start < c.first(piece.b, last) || start + n > c.stop(piece.b, s))
    for (int64_t m = 0; m < M; ++m) {
      const int64_t first = c.first(piece.b, (piece.first + m) / c.H), stop = c.stop(piece.b, (piece.first + m) / c.H);
      for (int64_t i = 0; i < n; ++i)
        if (start + i < first || start + i >= stop) scores[i * stride + m] = -INF;
    }
  if (piece.seen)
    for (int64_t i = 0; i < n; ++i)
      if (!piece.seen[start + i])
        for (int64_t m = 0; m < stride; ++m) scores[i * stride + m] = -INF;
}

}  // namespace mla
