"""Dequantize weights once and keep them, instead of dequantizing them in every call.

Before::

    w = mul(_to_copy(packed, float32), scales); q~ = einsum(q, w)

After::

    q~ = einsum(q, _to_copy(kept, float32))    with kept = w, an input in the precision of the model

The runtime keeps these inputs up to date, like folded weights (:class:`mla_compile.core.program.FoldedWeight`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from mla_compile.core.choices import Dequantize
from mla_compile.core.program import Program
from mla_compile.passes.ir.collectives import gathered
from mla_compile.passes.ir.graph import OURS, Builder, packet, val
from mla_compile.passes.ir.walk import reachable, remove_dead_code
from mla_compile.passes.quantized.stored import dequantized_by_library, is_float8, made_of, stored_leaves
from mla_compile.passes.rewrite.fold import keep
from mla_compile.passes.rewrite.project import FEW_ROWS, Heads, reads_stored, rows_sharing_weight, takes
from mla_compile.passes.rewrite.records import Absorbed

aten = torch.ops.aten


def dequantize_once(
    program: Program,
    weights: Collection[fx.Node],
    sites: Sequence[Absorbed],
    mode: Dequantize,
    heads: Heads | None = None,
) -> int:
    """Turn dequantized weights of absorbed sites into inputs; return how many.

    ``mode``: "once" converts all weights, "step" none, and "auto" weights that save time. ``heads``: the operator that
    multiplies a few rows by a per-head weight; None if this machine has none.
    """
    done = 0
    if mode == "step":
        return done
    for site in sites:
        dtype = val(site.plan.site.v.node).dtype
        for weight in site.weights:
            if weight not in weights or not weight.users or gathered([weight]):
                continue
            stored = stored_leaves(weight)
            if stored and (mode == "once" or _saves(weight, stored, dtype, heads)):
                _keep(program, weight, dtype)
                done += 1
    if done:
        remove_dead_code(program.gm.graph)
    return done


def _saves(weight: fx.Node, stored: Sequence[fx.Node], dtype: torch.dtype, heads: Heads | None) -> bool:
    """Whether a step is faster if it reads the dequantized weight instead of the stored weight.

    If the operator ``heads`` takes all products, the answer is yes unless ``heads`` can read the stored weight.
    In all other cases, the moved bytes are compared. A compiler reads the stored numbers directly if there are few rows
    (:mod:`mla_compile.passes.rewrite.project`) and no library's operator dequantizes the weight. If not, each step
    writes the weight in float32 and reads it again.
    """
    reading = reachable([weight], lambda n: n.users if n is weight or packet(n) is aten._to_copy else ())
    products = [n for n in reading if packet(n) is aten.einsum and OURS in n.meta]
    if heads is not None and products and all(takes(n, heads, dtype) for n in products):
        return not all(reads_stored(n, heads) for n in products)
    # The stored tensor may hold the weights of both K and V, and `weight` may be only a part.
    share = val(weight).numel() / max(val(n).numel() for n in made_of(weight))
    read = share * sum(val(n).numel() * val(n).itemsize for n in stored)
    few = all(rows_sharing_weight(n) <= FEW_ROWS for n in products)
    # CPUs emulate float8 conversions, which cost more time than smaller reads save.
    slow = val(weight).device.type == "cpu" and any(is_float8(val(n).dtype) for n in stored)
    fused = few and not slow and not dequantized_by_library(weight)
    return val(weight).numel() * dtype.itemsize < read + (0 if fused else 8 * val(weight).numel())


def _keep(program: Program, weight: fx.Node, dtype: torch.dtype) -> None:
    """Redirect all readers of ``weight`` to a new input that holds its value in ``dtype``."""
    node = keep(program, weight, "dequantized", dtype)
    builder = Builder(weight, program.fake_mode)
    weight.replace_all_uses_with(builder.cast(node, val(weight).dtype))
