"""The scores of a tile of keys in decode attention: the first product, soft-cap, causality, window, mask."""

from __future__ import annotations

import triton
import triton.language as tl
from mla_compile.kernels.triton.lists_triton import base_2
from mla_compile.kernels.triton.operands_triton import load_tile, times_groups, to_dot
from mla_compile.kernels.triton.tiles_triton import LOG2E, tile_rows


@triton.jit
def scores_of(
    b_q,  # [BLOCK_M,BLOCK_L]
    b_qr,  # [BLOCK_M,BLOCK_R]
    scale,  # [], or [BLOCK_M] with NORMALIZE
    one_scale,  # the scale of all cached values, or None
    latent, rope, kv_scale,
    table,
    start, n, seen,
    length,
    latent_b, latent_t, latent_c,
    rope_b, rope_t, rope_c,
    scale_b, scale_t, scale_g,
    L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, LISTED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, NORMALIZE: tl.constexpr,
    TOKEN_SCALE: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALED: tl.constexpr,
):  # fmt: skip
    """Return the latent rows b_k [BLOCK_N,BLOCK_L] in DTYPE, the scaled scores b_s [BLOCK_M,BLOCK_N], and b_kv.

    b_kv is the scale of the values: [1,BLOCK_N] with TOKEN_SCALE, else one number. Arguments are named as in
    decode_triton.py.
    """
    b_k = load_tile(
        latent, table, start, n, seen, length, latent_b, latent_t, latent_c, L, BLOCK_L,
        PAGE, BLOCK_N, WIDE, LISTED, OFFSETS_FIRST=False,
    )  # fmt: skip
    if GROUP > 0:
        b_g = load_tile(
            kv_scale, table, start, n, seen, length, scale_b, scale_t, scale_g, L // GROUP, BLOCK_L // GROUP,
            PAGE, BLOCK_N, WIDE, LISTED, OFFSETS_FIRST=False,
        )  # fmt: skip
        b_k = times_groups(b_k, b_g, GROUP)
    b_k = to_dot(b_k, DTYPE)
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION)
    if TOKEN_SCALE:
        p_kv, o_kv = tile_rows(kv_scale, table, start, n, length, scale_b, scale_t, PAGE, BLOCK_N, WIDE, LISTED)
        b_kv = tl.load(p_kv + o_kv, mask=seen, other=0.0).to(tl.float32)[None, :]
    else:
        b_kv = 1.0 if one_scale is None else one_scale
    SCALED: tl.constexpr = kv_scale is not None and GROUP == 0
    if SCALED and not ROPE_SCALED:
        b_s = b_s * b_kv
    if R > 0:
        b_r = load_tile(
            rope, table, start, n, seen, length, rope_b, rope_t, rope_c, R, BLOCK_R,
            PAGE, BLOCK_N, WIDE, LISTED, OFFSETS_FIRST=PAGE > 0,
        )  # fmt: skip
        b_s = tl.dot(b_qr, to_dot(b_r, DTYPE).T, b_s, input_precision=PRECISION)
    if SCALED and ROPE_SCALED:
        b_s = b_s * b_kv
    return b_k, b_s * (scale[:, None] if NORMALIZE else scale), b_kv


@triton.jit
def capped(b_s, softcap):
    """Return ``softcap * tanh(s)`` in base 2; the scale of s includes 1 / softcap. tanh x = 2 / (1 + e^-2x) - 1."""
    return (2.0 / (1.0 + tl.exp2(b_s * (-2.0 * LOG2E))) - 1.0) * softcap


@triton.jit
def mask_rows(mask, b, s, head, mask_b, mask_h, mask_s, LISTED: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Return where a request's mask starts: for the query token (LISTED), for each row (MASK_ROWS), or for all rows."""
    mask += b.to(tl.int64) * mask_b
    if LISTED:
        mask += s.to(tl.int64) * mask_s
    elif MASK_ROWS:
        mask = mask + head.to(tl.int64) * mask_h + s.to(tl.int64) * mask_s
    return mask


@triton.jit
def hidden(
    b_s,  # [BLOCK_M,BLOCK_N]
    n, seen,  # [BLOCK_N]
    end,  # the last key that a row sees: [BLOCK_M]
    window,
    mask,  # None, or the address of the mask's first column: for each row [BLOCK_M] with MASK_ROWS, else for all rows
    mask_t,
    valid,  # [BLOCK_M]
    LISTED_TILES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add an additive mask to the scores, and set the scores of hidden keys to minus infinity.

    With causality, ``seen`` is applied only if there are lists of tiles. Otherwise, a row's causal limit and window
    hide these keys.
    """
    if CAUSAL:
        visible = n[None, :] <= end[:, None]
        if LISTED_TILES:
            visible = visible & seen[None, :]
    else:
        visible = seen[None, :]
    if WINDOW:
        visible = visible & (n[None, :] > end[:, None] - window)
    if mask is not None:
        if WIDE:
            n = n.to(tl.int64)
        if MASK_ROWS:
            p_mask = mask[:, None] + (n * mask_t)[None, :]
            m_mask = seen[None, :] & valid[:, None]
        else:
            p_mask = mask + (n * mask_t)[None, :]
            m_mask = seen[None, :]
        b_mask = tl.load(p_mask, mask=m_mask, other=0)
        if b_mask.dtype == tl.uint8:
            visible = visible & (b_mask != 0)
        else:
            b_s = b_s + base_2(b_mask)
    return tl.where(visible, b_s, float("-inf"))
