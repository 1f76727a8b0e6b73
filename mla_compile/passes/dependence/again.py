"""Repeats operators with operands that have another length along one axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.node import Argument

from mla_compile.passes.dependence.steps import Blind
from mla_compile.passes.ir.graph import ORIGIN, SPELLED, Builder, args_of, evaluate_fake, shape, val
from mla_compile.passes.ir.moves import Expand, Rearrange
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import size
from mla_compile.passes.ir.walk import length_behind

aten = torch.ops.aten
Dim: TypeAlias = "int | fx.Node"


class Repeater:
    """Adds operators of a graph once more, for operands that have another length along one axis."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def repeat(self, node: fx.Node, how: Blind, dim: int, length: Dim, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Repeat ``node`` with new operands. ``how`` is the step of ``node`` along axis ``dim``.

        ``length``: the new length of axis ``dim`` of the result. ``new``: the new operand for each old operand.
        """
        if how.instead is not None:
            (x,) = new.values()
            return self._again(node, how.instead[0], (x, *how.instead[1]), {})
        if how.reshaped:
            return self._in_shape(node, dim, length, next(iter(new.values()), None))
        assert callable(node.target)
        replaced = fx.map_arg((args_of(node), node.kwargs), lambda n: new.get(n, n))
        return self._again(node, node.target, *replaced)

    def _in_shape(self, node: fx.Node, dim: int, length: Dim, part: fx.Node | None) -> fx.Node:
        """Repeat ``node``, whose arguments give its shape, with another length of axis ``dim``."""
        how = decode(node)
        assert isinstance(how, Rearrange)
        x = how.x if part is None else part
        wanted = [self._size(node, k, x, how.told) for k in range(len(shape(node)))]
        wanted[dim] = length
        op = aten.expand.default if isinstance(how, Expand) else aten.reshape.default
        return self._again(node, op, (x, wanted), {})

    def _size(self, node: fx.Node, dim: int, x: fx.Node, told: Sequence[Dim] | None) -> Dim:
        """Return the size of axis ``dim`` of ``node`` from the arguments of ``node`` or from the operand ``x``.

        ``node`` itself is not read, because it may be removed.
        """
        known = size(val(node).shape[dim])
        if isinstance(known, int):
            return known
        given = told[dim] if told is not None and len(told) == len(shape(node)) else None
        if isinstance(given, fx.Node):
            return given
        # If an axis of the operand has an equal size expression, the axis has this length in every call.
        at = next((k for k, d in enumerate(val(x).shape) if size(d) == known), None)
        return length_behind(self.builder, node, dim) if at is None else self.builder.size(x, at)

    def _again(
        self,
        node: fx.Node,
        op: Callable[..., object],
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
    ) -> fx.Node:
        """Call ``op`` with the metadata of ``node``.

        The call is not marked as added by a rewrite, because it is the user's operator.
        """
        with node.graph.inserting_before(self.builder.anchor):
            new = node.graph.call_function(op, args, kwargs)
        left = ("val", "tensor_meta", SPELLED, ORIGIN)
        new.meta.update({k: v for k, v in node.meta.items() if k not in left})
        new.meta["val"] = evaluate_fake(self.builder.fake_mode, op, args, kwargs)
        return new
