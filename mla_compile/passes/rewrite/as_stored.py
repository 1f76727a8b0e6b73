"""Find the stored weight that a product can read directly if the product's operator converts the numbers itself.

Before::

    w = _to_copy(slice(reshape(_to_copy(permute(stored), bfloat16), ...), ...), float32)

Read instead, where both conversions are exact::

    w = slice(reshape(permute(stored), ...), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from mla_compile.passes.ir.graph import Builder, args_of, packet, val
from mla_compile.passes.ir.moves import Copy
from mla_compile.passes.ir.operators import decode

aten = torch.ops.aten

_VIEWS = (aten.view, aten.reshape, aten.permute, aten.slice, aten.select, aten.squeeze, aten.unsqueeze)
_EXACT = {torch.int8: (torch.bfloat16, torch.float16, torch.float32), torch.bfloat16: (torch.float32,)}


def as_stored(
    weight: fx.Node, ends: Callable[[fx.Node], bool] = lambda _: False
) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the input that holds exactly the numbers of ``weight``, and the views from the input to ``weight``.

    None if anything but views and exact copies lies between the two. ``ends``: which other nodes count as inputs.
    """
    views = []
    while not (_is_input(weight) or ends(weight)):
        if packet(weight) in _VIEWS:
            views.append(weight)
        elif not (isinstance(decode(weight), Copy) and _is_exact(args_of(weight)[0], weight)):
            return None
        weight = args_of(weight)[0]
    return weight, views[::-1]


def replayed(builder: Builder, stored: fx.Node, views: Sequence[fx.Node]) -> fx.Node:
    """Apply the views to the stored weight."""
    for view in views:
        op = aten.reshape.default if packet(view) is aten.view else view.target
        assert callable(op)
        stored = builder.call(op, stored, *args_of(view)[1:], **view.kwargs)
    return stored


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") or node.target is getattr


def _is_exact(x: fx.Node, result: fx.Node) -> bool:
    """Whether ``result``, a copy of ``x``, has exactly the numbers of ``x`` and is on the same device."""
    before, after = val(x), val(result)
    same = after.dtype == before.dtype or after.dtype in _EXACT.get(before.dtype, ())
    return same and before.device == after.device
