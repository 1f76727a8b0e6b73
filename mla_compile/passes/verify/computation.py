"""Describe what nodes compute from given inputs and weights; equal computations get equal descriptions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake

from mla_compile.core.alike import constant_of, each
from mla_compile.passes.ir.collectives import is_collective
from mla_compile.passes.ir.graph import ORIGIN, args_of, is_tensor
from mla_compile.passes.ir.sizes import Size, size
from mla_compile.passes.ir.stand_in import original_of

_FEW = 64  # constants with at most this many numbers are compared by value, larger ones by identity


class Computations:
    """The computations of several nodes, of one graph or two, from the same inputs and weights.

    Attributes:
        given: the names of the inputs, in the order of their first use.
        symbols: the symbols of all sizes, in the order of their first use.
    """

    def __init__(
        self,
        boundary: Mapping[str, fx.Node],
        weights: Mapping[str, torch.Tensor | None],
        sizes: Mapping[sympy.Symbol, int],
    ) -> None:
        self.given: dict[str, int] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._boundary = boundary
        self._weights = weights
        self._known_sizes = sizes.keys()
        self._places: dict[fx.Node | str, int] = {}
        self._calls: list[Hashable] = []
        self._sizes: dict[sympy.Expr, Hashable] = {}

    def of(self, node: fx.Node) -> Hashable:
        """Return the computation of ``node`` in terms of inputs, weights and nodes that were described before."""
        first = len(self._calls)
        pending = [node]  # an explicit stack, because a graph of many layers is deeper than Python's recursion limit
        while pending:
            current = pending[-1]
            missing = [n for n in self._read_by(current) if self._identity(n) not in self._places]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            identity = self._identity(current)
            if identity not in self._places:
                self._calls.append(self._call(current))
                self._places[identity] = len(self._places)
        return tuple(self._calls[first:]), self._places[self._identity(node)]

    def _identity(self, node: fx.Node) -> fx.Node | str:
        """Return the name of a drawn or given node, which both graphs share; otherwise the node."""
        if (name := node.meta.get(ORIGIN)) in self._boundary:
            return str(name)
        return node.name if self._is_drawn(node) else node

    def _is_drawn(self, node: fx.Node) -> bool:
        outside = node.op == "placeholder" or node.name in self._weights
        return outside or (is_collective(node) and is_tensor(node))

    def _is_leaf(self, node: fx.Node) -> bool:
        if node.op == "get_attr" or node.meta.get(ORIGIN) in self._boundary or self._is_drawn(node):
            return True
        value = node.meta.get("val")
        # The evaluation also reads such numbers from sizes. Their inputs could lead back to the first layer.
        return isinstance(value, torch.SymInt) and sympy.sympify(size(value)).free_symbols <= self._known_sizes

    def _read_by(self, node: fx.Node) -> list[fx.Node]:
        if self._is_leaf(node):
            return []
        original = original_of(node)
        return [*node.all_input_nodes, *([] if original is None else [original])]

    def _call(self, node: fx.Node) -> Hashable:
        known = self._known(node.meta.get("val"))
        if (name := node.meta.get(ORIGIN)) in self._boundary:
            self.given[str(name)] = len(self.given)
            return "given", known
        if self._is_leaf(node):
            return node.op, known, self._held(node)
        original = original_of(node)
        stands_for = None if original is None else self._places[self._identity(original)]
        return node.target, each(args_of(node), self._told), each(dict(node.kwargs), self._told), known, stands_for

    def _held(self, node: fx.Node) -> Hashable:
        """Describe a function by its text and a constant by its numbers.

        Weights get no description, because weights of equal shape and dtype are interchangeable.
        """
        if node.op != "get_attr" or node.name in self._weights:
            return None
        held: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            held = getattr(held, name, None)
        if isinstance(held, fx.GraphModule):
            return str(held.graph)
        small = isinstance(held, torch.Tensor) and not is_fake(held) and not held.is_meta and held.numel() <= _FEW
        return repr(held.tolist()) if small else id(held)

    def _known(self, value: object) -> Hashable:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.device, tuple(self._size(size(n)) for n in value.shape)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._known, value))
        return self._size(size(value)) if isinstance(value, (int, torch.SymInt)) else str(type(value))

    def _told(self, value: object) -> Hashable:
        return self._places[self._identity(value)] if isinstance(value, fx.Node) else constant_of(value)

    def _size(self, number: Size) -> Hashable:
        if isinstance(number, int):
            return number
        if number not in self._sizes:
            for symbol in sorted(number.free_symbols - self.symbols.keys(), key=str):
                self.symbols[symbol] = sympy.Symbol(f"size_{len(self.symbols)}", **symbol.assumptions0)
            self._sizes[number] = number.xreplace(self.symbols)
        return self._sizes[number]
