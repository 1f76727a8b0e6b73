// The indexer of a sparse attention: score[t] = sum_j w_j max(0, scale q_j k_t), with the products of decode attention.
//
// A tile of keys is multiplied by all heads of a query, and its scores are summed over the heads while they are in the
// cache. Scores per head exist only for that tile.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "call.h"

namespace mla {

struct IndexCall {  // kernels/cpu/native.py packs exactly these 8-byte fields
  int64_t B, S, J, T, D;
  const char* query;
  int64_t query_b, query_s, query_j;
  Rows keys;
  const float* weights;  // [B,S,J] contiguous
  float* out;            // [B,S,T] contiguous
  int64_t query_kind, row_kind, threads, amx;
  double scale;

  // A call of decode attention with the same rows, of which only the scores are computed. Its scale is 1: a scaled
  // query would have more digits than half precision products keep.
  Call products() const {
    Call c{};
    c.B = B, c.S = S, c.H = J, c.T = T, c.L = c.Lv = D, c.k = -1, c.scale = 1;
    c.query = query, c.query_b = query_b, c.query_s = query_s, c.query_h = query_j;
    c.latent = keys, c.query_kind = query_kind, c.row_kind = row_kind;
    return c;
  }
};

// Sums a tile of scores [n, stride] over the heads into `to`; `fresh` overwrites it. Weights are 0 past the last head;
// products there with rows that hold infinity are NaN and are left out.
inline void add_heads(const float* scores, int64_t n, int64_t stride, const float* weights, int64_t heads, float scale,
                      bool fresh, float* to) {
  vi lane;
  for (int i = 0; i < VL; ++i) lane[i] = i;
  for (int64_t t = 0; t < n; ++t, scores += stride) {
    vf sum = {};
    for (int64_t m = 0; m < stride; m += VL) {
      const vf x = load(scores + m) * scale;
      const vf part = (x < vf{} ? vf{} : x) * load(weights + m);
      sum += lane < int32_t(heads - m) ? part : vf{};
    }
    float total = 0;
    for (int i = 0; i < VL; ++i) total += sum[i];
    to[t] = fresh ? total : to[t] + total;
  }
}

template <class Product>
bool index_scores(const IndexCall& given) {
  static thread_local Scratch shared_block;
  const Call c = given.products();
  const int64_t queries = c.B * c.S;
  int64_t threads = std::max<int64_t>(1, given.threads);
  if (queries * c.T * c.H * c.L <= ALONE) threads = 1;
  // Divides each query's keys into enough runs to keep all threads busy to the end.
  const int64_t tiles = ceil_div(c.T, Product::TILE);
  const int64_t parts = threads == 1 ? 1 : std::min(tiles, std::max<int64_t>(1, ceil_div(4 * threads, queries)));
  const int64_t length = ceil_div(tiles, parts) * Product::TILE;
  const int64_t groups = ceil_div(c.H, MAX_ROWS), panels = ceil_div(std::min(c.H, MAX_ROWS), PANEL);
  threads = std::min(threads, queries * parts);

  Cursor count{nullptr};
  Product measured(c, count, panels);
  count.take<float>(measured.padded(Product::TILE) * panels * PANEL);
  count.take<float>(panels * PANEL);
  const size_t own = round_up(count.used, 4096);
  char* block = shared_block.of_size(own * threads);
  if (!block) return false;

  std::atomic<int64_t> next_thread{0}, next_piece{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    Cursor memory{block + own * next_thread++};
    Product product(c, memory, panels);
    float* scores = memory.take<float>(product.padded(Product::TILE) * panels * PANEL);
    float* weights = memory.take<float>(panels * PANEL);
    Product::enter();
    for (int64_t i = next_piece++; i < queries * parts; i = next_piece++) {
      const int64_t row = i / parts, lo = i % parts * length, hi = std::min(c.T, lo + length);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * MAX_ROWS, heads = std::min(MAX_ROWS, c.H - first);
        const Piece piece{row / c.S, row % c.S * c.H + first, heads, lo, hi, 0, 1, nullptr, nullptr};
        std::copy_n(given.weights + row * c.H + first, heads, weights);
        std::fill(weights + heads, weights + panels * PANEL, 0.f);
        product.set_query(piece);
        for (int64_t t = lo; t < hi; t += Product::TILE) {
          const int64_t n = std::min(Product::TILE, hi - t);
          product.set_tile(t, n, nullptr);
          product.scores(scores);
          add_heads(scores, n, piece.panels() * PANEL, weights, heads, float(given.scale), group == 0,
                    given.out + row * c.T + t);
        }
      }
    }
    Product::leave();
  }
  return true;
}

}  // namespace mla
