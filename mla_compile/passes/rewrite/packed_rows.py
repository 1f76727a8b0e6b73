"""Let attention read float8 rows in place, without a copy in the model's dtype.

Before: ``decode_attention(q, _to_copy(values.to(float32) * scales, bfloat16), rope, ...)`` writes a copy of all rows.

After: in ``decode_attention(q, values, rope, ..., kv_scale=scales)``, the kernel multiplies by the scales.

Each row has one scale, or one scale per group of columns, as in FlashMLA's row format (512 values, 4 scales).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, argument, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Expand, Regroup, Repeat
from mla_compile.passes.ir.operators import behind, decode
from mla_compile.passes.ir.sizes import Size, quotient, same, same_sizes
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten

_FLOAT8 = torch.float8_e4m3fn
_HALF = (torch.float16, torch.bfloat16)


def read_packed(graph: fx.Graph, fake_mode: FakeTensorMode | None, reads: Callable[[torch.device], bool]) -> int:
    """Pass float8 rows and their scales directly to attentions; return how many attentions changed.

    ``reads``: tells whether a device has a kernel that reads float8. On other devices, a copy in the model's dtype is
    faster.
    """
    done = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_attention.default):
        query, latent = args_of(node)[:2]
        rope, values = argument(node, 2, "rope"), argument(node, 3, "values")
        found = _float8(latent)
        if found is None or values is not None or torch.float64 in {val(n).dtype for n in (query, latent)}:
            continue
        device = val(latent).device
        beside = (*_HALF, torch.float32) if device.type == "cpu" else _HALF
        if (rope is not None and val(rope).dtype not in beside) or not reads(device):
            continue
        rows, scales = found
        builder = Builder(node, fake_mode)
        while len(shape(scales)) > 2 and same(shape(scales)[-1], 1):
            scales = builder.call(aten.squeeze.dim, scales, -1)
        if val(scales).dtype != torch.float32:
            scales = builder.call(aten._to_copy.default, scales, dtype=torch.float32)
        node.args = (query, rows, *args_of(node)[2:])
        node.update_kwarg("kv_scale", scales)
        done += 1
    if done:
        remove_dead_code(graph)
    return done


def _float8(latent: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (values, scales) if ``latent`` is float8 values [B,T,L] times scales [B,T,1], [B,T,G] or [B,T,G,1].

    Casting float8 values to a wider dtype is exact. If the model rounds the product, a kernel that reads the rows in
    place skips this rounding.
    """
    product = _moved(latent)
    if packet(product) is not aten.mul or not all(is_tensor(n) for n in args_of(product)):
        return None
    if val(product).dtype not in (torch.float32, *_HALF):
        return None
    for values, scales in (args_of(product), args_of(product)[::-1]):
        rows = _moved(values)
        if val(rows).dtype == _FLOAT8 and same_sizes(shape(rows), shape(latent)):
            found = _of_groups(scales, product, latent)
            return None if found is None else (rows, found)
    return None


def _moved(node: fx.Node) -> fx.Node:
    """Return the tensor upstream of dtype conversions and layout changes."""
    return behind(node, (Copy, Regroup))[-1]


def _of_groups(scales: fx.Node, product: fx.Node, latent: fx.Node) -> fx.Node | None:
    """Return the scales of ``product`` before broadcasting: one per row, or one per 2^n adjacent columns.

    The shape of ``product`` is [B,T,L], like ``latent``, or [B,T,G,L/G]. Return None for other kinds of scales.
    """
    (B, T, L), whole = shape(latent), shape(product)
    if len(whole) == 3 and same_sizes(shape(scales), whole):
        spread = scales
        while isinstance(how := decode(spread), (Copy, Regroup)) and val(how.x).dtype == val(scales).dtype:
            spread = how.x
        if isinstance(how, Expand):
            scales, whole = how.x, shape(spread)
        elif isinstance(how, Repeat) and how.map is not None:
            of, neighbours = shape(how.x), how.map.after[-1][:1] == how.map.before[-1]
            return how.x if neighbours and same_sizes(of[:2], (B, T)) and _fits(L, of[2]) else None
    of = shape(scales)
    if len(of) != len(whole) or len(of) not in (3, 4) or not same_sizes((*of[:2], of[-1]), (B, T, 1)):
        return None
    return scales if len(of) == 3 or same(of[2], 1) or _fits(L, whole[2]) else None


def _fits(L: Size, groups: Size) -> bool:
    """Whether the operator accepts rows of ``L`` values with one scale for each of ``groups`` column groups."""
    width = quotient(L, groups)
    return isinstance(width, int) and width.bit_count() == 1
