"""Reads query rows and writes output rows, for the consumers of the Hopper kernel (decode_gluon.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_compile.kernels.hopper.producer_gluon import HALF

ROWS = gl.constexpr(64)  # query rows per CTA: the M of wgmma
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def load_query(q, tile, row_offsets, live, COL: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Load columns COL..COL+WIDTH of the CTA's query rows into tile [64,WIDTH]; rows that do not exist are zeros."""
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    for c in gl.static_range(WIDTH // 64):
        part = gl.load(q + (row_offsets + column + (COL + c * 64)), mask=live, other=0.0)
        if WIDTH == 64:
            tile.store(part.to(tile.dtype))
        else:
            tile.slice(c * 64, 64, 1).store(part.to(tile.dtype))


@gluon.jit
def scaled(acc, a, O_L: gl.constexpr):
    """Multiply half of the output by one factor per row."""
    return acc * gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(1, O_L)), 1)


@gluon.jit
def _store_rows(o, acc, row0, live, W: gl.constexpr, O_L: gl.constexpr):
    """Store half W of o [rows,512], up to 64 rows per CTA. Changing the layout would need 64 KB of shared memory."""
    r = gl.arange(0, ROWS * gl.num_ctas(), gl.SliceLayout(1, O_L))
    c = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O_L))
    cells = gl.expand_dims(r * (2 * HALF), 1) + gl.expand_dims(c, 0)
    base = o + row0.to(gl.int64) * (2 * HALF)
    gl.store(base + cells, acc.to(o.dtype.element_ty), mask=gl.expand_dims(r < live, 1))


@gluon.jit
def store_final(out, lse, sinks, acc, lse2, row0, live, H, W: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr):
    """Store the finished half W to out [rows,512], from row0 on. Consumer 0 also stores lse [rows] (natural)."""
    r = gl.arange(0, ROWS * gl.num_ctas(), gl.SliceLayout(1, S_L))
    if sinks is not None:  # every request starts at a multiple of H, so row % H is the head
        sink = gl.load(sinks + (row0 + r) % H).to(gl.float32) * LOG2E
        acc = scaled(acc, gl.where(lse2 != float("-inf"), 1.0 / (1.0 + gl.exp2(sink - lse2)), 0.0), O_L)
    _store_rows(out, acc, row0, live, W, O_L)
    if W == 0:
        gl.store(lse + row0 + r, lse2 * LN2, mask=r < live)


@gluon.jit
def store_partial(o_part, lse_part, acc, lse2, row0, live, n, W: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr):
    """Store half W to scratch, from row0 on, unless the item is empty. Consumer 0 also stores lse2."""
    if n > 0:
        _store_rows(o_part, acc, row0, live, W, O_L)
    if W == 0:
        r = gl.arange(0, ROWS * gl.num_ctas(), gl.SliceLayout(1, S_L))
        gl.store(lse_part + row0 + r, lse2, mask=r < live)
