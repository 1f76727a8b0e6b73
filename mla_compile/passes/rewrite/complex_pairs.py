"""Turn complex numbers into pairs of real numbers. ONNX and Inductor have code for real numbers only.

Before: ``view_as_real(view_as_complex(q) * polar(ones, angles))``, a rotary embedding written with complex numbers.

After: products and sums of real and imaginary parts. A complex value of shape [...] becomes a real value of shape
[..., 2], the *pair*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import Builder, args_of, packet, val
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def unsplit(graph: fx.Graph) -> tuple[fx.Node, str] | None:
    """Return the first node that has no counterpart on pairs, and what it computes. None: there is no such node."""
    for node in _on_complex(graph):
        if node.op == "output":
            return node, "a complex result"
        if node.op == "placeholder":
            continue
        if packet(node) not in _RULES:
            return node, f"{node.target} on complex numbers"
        if packet(node) in (aten.add, aten.sub) and not all(map(_is_complex, args_of(node)[:2])):
            return node, f"{node.target} of a complex and a real number"
    return None


def split_complex(
    graph: fx.Graph, fake_mode: FakeTensorMode | None, pair_of_input: Callable[[fx.Node], fx.Node]
) -> int:
    """Replace every complex value of a graph for which :func:`unsplit` returns None. Return how many were replaced.

    ``pair_of_input`` returns the pair of a complex input.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    found = _on_complex(graph)
    for node in found:
        if node.op == "placeholder":
            pairs[node] = pair_of_input(node)
            continue
        result = _RULES[packet(node)](_PairRewrite(node, Builder(node, fake_mode), pairs))
        if _is_complex(node):
            pairs[node] = result
        else:
            node.replace_all_uses_with(result)
    for node in reversed(found):
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)
    remove_dead_code(graph)
    return len(pairs)


def real_rotations(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Replace the complex values of a graph that Inductor compiles, if all can be replaced. Return how many were.

    Inductor calls torch for each operator on complex numbers, and each such call ends a fused loop.
    """
    inputs = [n for n in graph.find_nodes(op="placeholder") if _is_complex(n)]
    if unsplit(graph) is not None or any(val(n).is_conj() for n in inputs):
        return 0
    anchor = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if anchor is None:
        return 0
    builder = Builder(anchor, fake_mode)
    return split_complex(graph, fake_mode, lambda node: builder.call(aten.view_as_real.default, node))


def _on_complex(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if _is_complex(n) or any(map(_is_complex, n.all_input_nodes))]


def _is_complex(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


class _PairRewrite:
    """A node that is being replaced, with its arguments as pairs and the operations that the rules need."""

    def __init__(self, node: fx.Node, builder: Builder, pairs: Mapping[fx.Node, fx.Node]) -> None:
        self.node = node
        self.call = builder.call
        self.pairs = pairs

    @property
    def first(self) -> fx.Node:
        return self.pairs[args_of(self.node)[0]]

    def part(self, pair: fx.Node, which: int) -> fx.Node:
        return self.call(aten.select.int, pair, -1, which)

    def join(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        parts = [self.call(aten.unsqueeze.default, part, -1) for part in (real, imaginary)]
        return self.call(aten.cat.default, parts, -1)


def _multiply(step: _PairRewrite) -> fx.Node:
    a, b = args_of(step.node)[:2]
    mul, call = aten.mul.Tensor, step.call
    if isinstance(a, complex) or isinstance(b, complex):
        number, other = (a, b) if isinstance(a, complex) else (b, a)
        return _times_number(step, other, number)
    if not (_is_complex(a) and _is_complex(b)):
        pair, other = (step.pairs[a], b) if _is_complex(a) else (step.pairs[b], a)
        if isinstance(other, fx.Node) and isinstance(other.meta["val"], torch.Tensor):
            other = call(aten.unsqueeze.default, other, -1)
        return call(mul, pair, other)
    ar, ai, br, bi = (step.part(step.pairs[n], k) for n in (a, b) for k in (0, 1))
    real = call(aten.sub.Tensor, call(mul, ar, br), call(mul, ai, bi))
    return step.join(real, call(aten.add.Tensor, call(mul, ar, bi), call(mul, ai, br)))


def _times_number(step: _PairRewrite, x: fx.Node, number: complex) -> fx.Node:
    """Multiply a complex or real tensor by a Python complex number."""
    mul, call = aten.mul.Tensor, step.call
    if not _is_complex(x):
        x = call(aten._to_copy.default, x, dtype=_REAL[val(step.node).dtype])
        return step.join(call(mul, x, number.real), call(mul, x, number.imag))
    re, im = (step.part(step.pairs[x], k) for k in (0, 1))
    real = call(aten.sub.Tensor, call(mul, re, number.real), call(mul, im, number.imag))
    return step.join(real, call(aten.add.Tensor, call(mul, re, number.imag), call(mul, im, number.real)))


def _polar(step: _PairRewrite) -> fx.Node:
    size, angle = args_of(step.node)
    cos, sin = (step.call(f, angle) for f in (aten.cos.default, aten.sin.default))
    return step.join(*(step.call(aten.mul.Tensor, size, part) for part in (cos, sin)))


def _conjugate(step: _PairRewrite) -> fx.Node:
    pair = step.first
    return step.join(step.part(pair, 0), step.call(aten.neg.default, step.part(pair, 1)))


def _both(step: _PairRewrite) -> fx.Node:
    """Add or subtract two complex operands part by part."""
    a, b = args_of(step.node)[:2]
    return step.call(step.node.target, step.pairs[a], step.pairs[b], **step.node.kwargs)  # type: ignore[arg-type]


def _along(step: _PairRewrite) -> fx.Node:
    """Apply to the pair an operator that only moves or copies elements.

    Negative axes become positive, and shapes get the last axis of the pair.
    """
    node = step.node
    kind: Any = packet(node)
    target: Any = node.target
    source, *rest = args_of(node)
    args: list[Any] = list(rest)
    rank = val(source).dim()

    def shifted(axis: int) -> int:
        return axis + rank + (1 if kind is aten.unsqueeze else 0) if axis < 0 else axis

    if kind in (aten.view, aten.reshape, aten.expand, aten._unsafe_view):
        args[0] = [*args[0], -1 if kind is aten.expand else 2]
    elif kind is aten.permute:
        args[0] = [*(shifted(a) for a in args[0]), rank]
    elif kind is aten.transpose:
        args = [shifted(a) for a in args]
    elif kind is aten.squeeze:  # squeeze without axes could remove the axis of the pair
        given = range(rank) if not args else [args[0]] if isinstance(args[0], int) else args[0]
        args = [[shifted(a) for a in given if val(source).shape[a] == 1]]
        target = aten.squeeze.dims
    elif args and isinstance(args[0], int):
        args[0] = shifted(args[0])
    kwargs: dict[str, Any] = dict(node.kwargs)
    if "dtype" in kwargs:
        kwargs["dtype"] = _REAL[kwargs["dtype"]]
    return step.call(target, step.pairs[source], *args, **kwargs)


_RULES: Mapping[Any, Callable[[_PairRewrite], fx.Node]] = {
    aten.view_as_complex: lambda s: args_of(s.node)[0],
    aten.view_as_real: lambda s: s.first,
    aten.complex: lambda s: s.join(*args_of(s.node)[:2]),
    aten.polar: _polar,
    aten.mul: _multiply,
    aten.add: _both,
    aten.sub: _both,
    aten.real: lambda s: s.part(s.first, 0),
    aten.imag: lambda s: s.part(s.first, 1),
    aten.conj: _conjugate,
    aten._conj: _conjugate,
    aten.sym_size: lambda s: s.call(s.node.target, s.first, args_of(s.node)[1]),  # type: ignore[arg-type]
    **dict.fromkeys(
        (
            aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.permute,
            aten.transpose, aten.slice, aten.select, aten.clone, aten.contiguous, aten.alias, aten._to_copy, aten.index,
            aten.index_select, aten.detach,
        ),
        _along,
    ),
}  # fmt: skip
