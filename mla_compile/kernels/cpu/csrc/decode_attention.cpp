// Decode attention on CPU: walks the cache in tiles that serve as keys and values, with an online softmax.
//
//     s = cap(q [c, r]^T) + mask;  m' = max(m, max s);  p = exp(s - m')
//     l = l e^(m-m') + sum p;  acc = acc e^(m-m') + p c
//
// A call is cut into pieces (some query rows over some keys). Threads take pieces, and pieces of the same rows are
// merged. The cuts, and so the rounding of the result, depend only on the call's sizes and the number of threads.

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "amx.h"
#include "call.h"
#include "codes.h"
#include "dots.h"
#include "fma.h"
#include "index.h"
#include "mask.h"
#include "packed.h"
#include "rows.h"
#include "simd.h"

namespace mla {

constexpr int64_t SHORT = 64;            // keys: no piece is shorter, so that packing the query pays

struct State {  // state of the softmax, per query row
  float *top, *total, *sums;  // [rows], [rows], [rows, columns]
};

// Turns the scores of a tile [n, stride] into weights and updates the state; the old sums are to be multiplied by
// `shrink`.
inline void soften(float* scores, int64_t n, int64_t stride, State& state, float* shrink) {
  for (int64_t m = 0; m < stride; m += VL) {
    vf best = splat(-INF);
    for (int64_t i = 0; i < n; ++i) best = larger(load(scores + i * stride + m), best);
    const vf before = load(state.top + m), top = larger(before, best);
    const vf shift = top == -INF ? vf{} : top;  // the row has seen no key yet
    vf sum[4] = {};
    for (int64_t i = 0; i < n; ++i) {
      const vf weight = exp_of_nonpositive(load(scores + i * stride + m) - shift);
      store(scores + i * stride + m, weight);
      sum[i % 4] += weight;
    }
    const vf factor = exp_of_nonpositive(before - shift);
    store(shrink + m, factor);
    store(state.total + m, load(state.total + m) * factor + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    store(state.top + m, top);
  }
}

template <class Product>
void walk(const Call& c, const Piece& piece, Product& product, float* scores, float* shrink, State& state) {
  const int64_t stride = piece.panels() * PANEL, columns = product.columns();
  std::fill(state.top, state.top + stride, -INF);
  std::fill(state.total, state.total + stride, 0.f);
  std::fill(state.sums, state.sums + stride * columns, 0.f);
  for (int64_t start = piece.lo, n; start < piece.hi; start += n) {
    n = std::min({Product::TILE, piece.hi - start, piece.tile(c, start)});
    const uint8_t* seen = piece.seen;
    if (seen && !std::memchr(seen + start, 1, n)) continue;
    if (seen && !std::memchr(seen + start, 0, n)) seen = nullptr;
    product.set_tile(start, n, seen);
    product.scores(scores);
    if (c.softcap > 0)
      for (int64_t i = 0; i < n * stride; i += VL) store(scores + i, capped(load(scores + i), float(c.softcap)));
    hide(c, piece, start, n, scores);
    soften(scores, n, stride, state, shrink);
    std::fill(scores + n * stride, scores + product.padded(n) * stride, 0.f);
    product.add_weighted(scores, shrink, state.sums);
  }
}

// Merges the states of the pieces of one query row and writes its result.
void finish_row(const Call& c, const State* states, int64_t parts, int64_t m, int64_t columns, int64_t row) {
  float top = -INF, total = 0.f;
  for (int64_t i = 0; i < parts; ++i) top = std::max(top, states[i].top[m]);
  const float shift = top == -INF ? 0.f : top;
  for (int64_t i = 0; i < parts; ++i) total += states[i].total[m] * std::exp(states[i].top[m] - shift);
  c.lse[row] = top + std::log(total);
  if (c.sinks && total != 0.f) total += std::exp(c.sinks[row % c.H] - shift);  // a sink is in the denominator only
  with_row_type(c.query_kind, [&](auto type) {
    using T = decltype(type);
    T* out = reinterpret_cast<T*>(c.out) + row * c.Lv;
    if (total == 0.f) {
      for (int64_t k = 0; k < c.Lv; ++k) from_float(0.f, out[k]);
      return;
    }
    float* sums = states[0].sums + m * columns;
    for (int64_t i = 0; i < parts; ++i) {
      const float* more = states[i].sums + m * columns;
      const float factor = std::exp(states[i].top[m] - shift) / total;
      for (int64_t k = 0; k < c.Lv; ++k) sums[k] = i ? sums[k] + more[k] * factor : more[k] * factor;
    }
    for (int64_t k = 0; k < c.Lv; ++k) from_float(sums[k], out[k]);
  });
}

// The keys that the queries of a call see: per batch entry, or per query if each has picked its keys.
struct Sight {
  std::vector<Seen> seen;
  std::vector<std::vector<int32_t>> picks;
};

Sight look(const Call& c) {
  Sight sight;
  if (!c.picks()) {
    for (int64_t b = 0; b < (c.mask_b || c.lengths ? c.B : 1); ++b) sight.seen.push_back(find_seen(c, b));
    return sight;
  }
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t s = 0; s < c.S; ++s) sight.picks.push_back(find_picks(c, b, s));
  return sight;
}

std::vector<Piece> cut_call(const Call& c, const Sight& sight, int64_t& threads) {
  // Rows of one walk read the same keys: all rows of a batch entry, or with picks those of one query.
  const int64_t M = c.S * c.H, span = c.picks() ? c.H : M, groups = ceil_div(span, MAX_ROWS);
  const int64_t rows = std::min(span, round_up(ceil_div(span, groups), PANEL));
  std::vector<Piece> whole;
  int64_t keys = 0;
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t base = 0; base < M; base += span)
      for (int64_t first = base; first < base + span; first += rows) {
        Piece piece{b, first, std::min(rows, base + span - first), 0, 0, 0, 1, nullptr, nullptr};
        if (c.picks()) {
          const std::vector<int32_t>& picks = sight.picks[b * c.S + base / c.H];
          piece.hi = int64_t(picks.size());
          piece.picks = picks.data();
        } else {
          const Seen& s = sight.seen[sight.seen.size() > 1 ? b : 0];
          piece.seen = s.keys.empty() ? nullptr : s.keys.data();
          piece.lo = std::max(s.lo, c.first(b, first / c.H));
          piece.hi = std::max(piece.lo, std::min(s.hi, c.stop(b, (first + piece.rows - 1) / c.H)));
        }
        keys += piece.hi - piece.lo;
        whole.push_back(piece);
      }
  if (keys * rows * (c.L + c.R + c.Lv) <= ALONE) threads = 1;
  if (threads == 1) return whole;
  const int64_t each = std::max(SHORT, round_up(keys / (whole.size() == 1 ? threads : 4 * threads) + 1, 32));
  std::vector<Piece> pieces;
  for (Piece piece : whole) {
    const int64_t lo = piece.lo, hi = piece.hi;
    piece.parts = std::max<int64_t>(1, ceil_div(hi - lo, each));
    const int64_t length = round_up(ceil_div(hi - lo, piece.parts), 32);
    for (piece.part = 0; piece.part < piece.parts; ++piece.part) {
      piece.lo = std::min(hi, lo + piece.part * length);
      piece.hi = std::min(hi, piece.lo + length);
      pieces.push_back(piece);
    }
  }
  return pieces;
}

template <class Product>
bool run(const Call& c) {
  static thread_local Scratch shared_block;
  int64_t threads = std::max<int64_t>(1, c.threads);
  const Sight sight = look(c);
  const std::vector<Piece> pieces = cut_call(c, sight, threads);
  if (pieces.empty()) return true;
  threads = std::min<int64_t>(threads, pieces.size());
  int64_t panels = 0;
  for (const Piece& piece : pieces) panels = std::max(panels, piece.panels());

  // Memory for each thread, and a state for each piece, or for each thread if no pieces are to be merged.
  std::vector<State> states;
  bool joined = false;
  for (const Piece& piece : pieces) joined = joined || piece.parts > 1;
  Cursor count{nullptr};
  Product measured(c, count, panels);
  const int64_t columns = measured.columns();
  auto take_state = [&](Cursor& memory) {
    return State{memory.take<float>(panels * PANEL), memory.take<float>(panels * PANEL),
                 memory.take<float>(panels * PANEL * columns)};
  };
  count.take<float>(measured.padded(Product::TILE) * panels * PANEL);
  count.take<float>(panels * PANEL);
  const size_t own = round_up(count.used, 4096);
  Cursor state_count{nullptr};
  take_state(state_count);
  const size_t state_bytes = state_count.used;
  const int64_t kept = joined ? int64_t(pieces.size()) : threads;
  char* block = shared_block.of_size(own * threads + state_bytes * kept);
  if (!block) return false;
  for (int64_t i = 0; i < kept; ++i) {
    Cursor memory{block + own * threads + state_bytes * i};
    states.push_back(take_state(memory));
  }

  std::atomic<int64_t> next_thread{0}, next_piece{0}, next_row{0};
  const int64_t M = c.S * c.H;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    const int64_t me = next_thread++;
    Cursor memory{block + own * me};
    Product product(c, memory, panels);
    float* scores = memory.take<float>(product.padded(Product::TILE) * panels * PANEL);
    float* shrink = memory.take<float>(panels * PANEL);
    Product::enter();
    for (int64_t i = next_piece++; i < int64_t(pieces.size()); i = next_piece++) {
      State& state = states[joined ? i : me];
      product.set_query(pieces[i]);
      walk(c, pieces[i], product, scores, shrink, state);
      if (!joined)
        for (int64_t m = 0; m < pieces[i].rows; ++m)
          finish_row(c, &state, 1, m, columns, pieces[i].b * M + pieces[i].first + m);
    }
    Product::leave();
    if (joined) {
#pragma omp barrier
      for (int64_t i = next_row++;; i = next_row++) {  // the i-th query row, over the first pieces only
        int64_t at = 0, m = i;
        while (at < int64_t(pieces.size()) && m >= pieces[at].rows) m -= pieces[at].rows, at += pieces[at].parts;
        if (at >= int64_t(pieces.size())) break;
        finish_row(c, &states[at], pieces[at].parts, m, columns, pieces[at].b * M + pieces[at].first + m);
      }
    }
  }
  return true;
}

}  // namespace mla

extern "C" {

// Features: bit 0, float16 is compiled in; bit 1, AMX is compiled in and the process may use it.
int mla_features() {
  int features = 0;
#if defined(MLA_FLOAT16)
  features |= 1;
#endif
#if defined(MLA_AMX)
  if (mla::amx_allowed()) features |= 2;
#endif
  return features;
}

// 0; 1 where there is no memory to work in.
int mla_decode_attention(const mla::Call* call) {
  using namespace mla;
  try {
#if defined(MLA_AMX)
    // Splitting float32 rows into planes costs about as much as multiplying them with 48 query rows directly. Float8
    // rows have scales, which would have to be split, too.
    if (call->amx && call->row_kind != FLOAT8 &&
        (call->amx == AMX_ALWAYS || call->row_kind != FLOAT32 || call->S * call->H > 48)) {
      if (call->row_kind == BFLOAT16) return !run<Amx<bf16, 1, 2>>(*call);
      if (call->row_kind == FLOAT16) return !run<Amx<fp16, 2, 2>>(*call);
      return !run<Amx<float, 3, 3>>(*call);
    }
#endif
    return !run<Fma>(*call);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// 0; 1 where there is no memory to work in.
int mla_few_rows(const mla::RowsCall* call) {
  using namespace mla;
  switch (call->weight_kind) {
    case INT4: return !multiply_packed(*call);
    case INT8: return !multiply_codes(*call);
    default: return !multiply_rows(*call);
  }
}

// 0; 1 where there is no memory to work in.
int mla_index_scores(const mla::IndexCall* call) {
  using namespace mla;
  try {
#if defined(MLA_AMX)
    // Only if planes keep every digit: a bfloat16 query is one plane, a float32 query three.
    const bool exact = call->query_kind == call->row_kind && call->row_kind != FLOAT16;
    if (exact && call->amx && (call->amx == AMX_ALWAYS || call->row_kind != FLOAT32 || call->J > 48)) {
      if (call->row_kind == BFLOAT16) return !index_scores<Amx<bf16, 1, 1>>(*call);
      return !index_scores<Amx<float, 3, 3>>(*call);
    }
#endif
#if defined(MLA_DOTS)
    if (call->query_kind == BFLOAT16 && call->row_kind == BFLOAT16) return !index_scores<Dots>(*call);
#endif
    return !index_scores<Fma>(*call);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
}
