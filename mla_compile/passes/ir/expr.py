"""Tensors computed only from weights, described without adding them to the graph.

An analysis must not change the graph, yet it needs products and slices of weights ("the rows of W_kc that make head 3's
keys"). An :class:`Expr` describes such a tensor as an operator over graph nodes, together with its fake value. A
rewrite adds the described operators to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.core.alike import Itself, constant_of, each, known_of
from mla_compile.core.layers import CALL, WEIGHT
from mla_compile.passes.ir.axes import Atom, Axis, Split, fixed_size, substitute
from mla_compile.passes.ir.graph import Builder, val

aten = torch.ops.aten
_VIEWS = (aten.reshape.default, aten.permute.default, aten.slice.Tensor)


@dataclass(frozen=True, eq=False)
class Expr:
    """``op(*args)``, or the value of ``node`` if ``op`` is None.

    Expressions are compared by identity, so they can be keys of a dict.
    """

    value: torch.Tensor
    fake_mode: FakeTensorMode | None
    node: fx.Node | None = None
    op: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def leaf(node: fx.Node, fake_mode: FakeTensorMode | None) -> Expr:
        return Expr(val(node), fake_mode, node=node)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.value.shape)

    def call(self, op: Callable[..., object], *args: object, **kwargs: object) -> Expr:
        """Apply ``op``. This expression becomes the first argument, unless ``args`` already contains the expression."""
        # `einsum` and `cat` take a list of operands, so this expression may be inside an argument.
        everything = args if any(a is self or _holds(a, self) for a in args) else (self, *args)
        value = _value(self.fake_mode, op, _each(everything, lambda e: e.value), kwargs)
        return Expr(value, self.fake_mode, None, op, everything, kwargs)

    def view(self, shape: Sequence[int]) -> Expr:
        """Return the same values in another shape, copied only if the strides require a copy."""
        if tuple(shape) == self.shape:
            return self
        return self.call(aten.reshape.default, list(shape))

    def permute(self, order: Sequence[int]) -> Expr:
        return self if list(order) == list(range(len(order))) else self.call(aten.permute.default, list(order))

    def slice(self, dim: int, start: int, stop: int) -> Expr:
        if start == 0 and stop == self.shape[dim]:
            return self
        return self.call(aten.slice.Tensor, dim, start, stop)

    def cast(self, dtype: torch.dtype) -> Expr:
        return self if self.value.dtype == dtype else self.call(aten._to_copy.default, dtype=dtype)

    @property
    def is_view(self) -> bool:
        """Whether the expression only selects or rearranges elements of one leaf.

        Any other expression may round.
        """
        if self.node is not None:
            return True
        (of, *_) = self.args
        return self.op in _VIEWS and isinstance(of, Expr) and of.is_view

    def leaves(self) -> tuple[fx.Node, ...]:
        """Return the graph nodes that this expression reads."""
        found: dict[fx.Node, None] = {}

        def visit(expr: Expr) -> None:
            if expr.node is not None:
                found[expr.node] = None
            else:
                _each(expr.args, visit)

        visit(self)
        return tuple(found)

    def emit(self, builder: Builder, memo: dict[Expr, fx.Node]) -> fx.Node:
        """Add the expression to the graph. Subexpressions that are in ``memo`` are reused."""
        if self.node is not None:
            return self.node
        if self not in memo:
            assert self.op is not None
            args = _each(self.args, lambda e: e.emit(builder, memo))
            memo[self] = builder.call(self.op, *args, **self.kwargs)
        return memo[self]

    def with_leaves(self, fn: Callable[[fx.Node], Expr]) -> Expr:
        """Return the same expression with each leaf replaced by ``fn(leaf)``."""
        if self.node is not None:
            return fn(self.node)
        args = _each(self.args, lambda e: e.with_leaves(fn))
        return Expr(self.value, self.fake_mode, None, self.op, args, self.kwargs)

    def formula(self, names: Sequence[str]) -> str:
        """Return the computation as text, with leaves as indices into ``names``.

        Equal texts mean equal computations.
        """
        memo: dict[Expr, str] = {}

        def visit(expr: Expr) -> str:
            if expr not in memo:
                if expr.node is not None:
                    memo[expr] = f"%{names.index(expr.node.name)}"
                else:
                    memo[expr] = f"{expr.op}({_each(expr.args, visit)!r}, {dict(expr.kwargs)!r})"
            return memo[expr]

        return visit(self)

    def evaluate_named(self, values: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Evaluate the expression in ``dtype``, if given. ``values`` maps node names to values of leaves."""
        # Each subexpression is computed once, because it may be shared and may be a large matrix product.
        memo: dict[Expr, object] = {}

        def visit(expr: Expr) -> object:
            if expr not in memo:
                memo[expr] = one(expr)
            return memo[expr]

        def one(expr: Expr) -> object:  # a tensor, or several if a weight was split
            if expr.node is not None:
                leaf = values[expr.node.name]
                # A tensor subclass is not cast here. Its inner tensors are cast when they are read.
                whole = dtype is None or is_traceable_wrapper_subclass(leaf)
                return leaf if whole or not leaf.is_floating_point() else leaf.to(dtype)
            assert expr.op is not None
            if dtype is not None and is_foreign(expr.op):
                return in_own_precision(expr)
            kwargs = {k: widened(v, dtype) for k, v in expr.kwargs.items()}
            # Casts are widened too, because an exact evaluation must not round.
            result = expr.op(*(widened(a, dtype) for a in _each(expr.args, visit)), **kwargs)
            if expr.op is getattr and dtype is not None and isinstance(result, torch.Tensor):
                return result.to(dtype) if result.is_floating_point() and result.element_size() > 1 else result
            return result

        def in_own_precision(expr: Expr) -> object:
            def as_it_was(one: Expr) -> object:
                value = visit(one)
                return value.to(one.value.dtype) if isinstance(value, torch.Tensor) else value

            assert expr.op is not None
            result = expr.op(*_each(expr.args, as_it_was), **expr.kwargs)
            return result.to(dtype) if isinstance(result, torch.Tensor) and result.is_floating_point() else result

        result = visit(self)
        assert isinstance(result, torch.Tensor)
        return result


@contextmanager
def evaluated_once(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Let equal expressions, such as the weights of equal layers, share one fake value within this context.

    The values are dropped at the end. Otherwise the mode and the values would refer to each other, and neither would be
    freed.
    """
    if fake_mode is None or _KNOWN in vars(fake_mode):
        yield
        return
    vars(fake_mode)[_KNOWN] = {}
    try:
        yield
    finally:
        del vars(fake_mode)[_KNOWN]


_KNOWN = "mla_compile_known"


def _value(
    fake_mode: FakeTensorMode | None, op: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.Tensor:
    """Return the fake result of ``op``."""
    known: dict[Hashable, torch.Tensor] | None = None if fake_mode is None else vars(fake_mode).get(_KNOWN)
    key = None if known is None else _key(op, args, kwargs)
    if known is not None and key in known:
        return known[key]
    # `no_grad`, because weights may be parameters and the result must not be part of an autograd graph.
    with fake_mode or torch.no_grad(), torch.no_grad():
        value = op(*args, **kwargs)
    assert isinstance(value, torch.Tensor)
    if known is not None and key is not None:
        known[key] = value
    return value


def _key(op: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Hashable | None:
    """Return a key that is equal for equal calls; None if an argument can only be compared by identity."""
    objects: list[object] = []

    def read(value: object) -> Hashable:
        told = known_of(value) if type(value) in (FakeTensor, torch.nn.Parameter) else constant_of(value)
        if isinstance(told, Itself):
            objects.append(value)
        return told

    key = op, each(args, read), each(dict(kwargs), read)
    return None if objects else key


@dataclass(frozen=True)
class Factor:
    """A tensor of weights, with one atom for each dimension.

    ``terms``: the tensor as a sum of products, such as W + B A of an adapter; empty if no sum is known. Each term lists
    the factors of one product. Atoms that are not in ``atoms`` are summed over.
    """

    expr: Expr
    atoms: Axis
    terms: tuple[tuple[Factor, ...], ...] = ()

    def renamed(self, names: Mapping[Atom, Atom]) -> Factor:
        return self.each(lambda f: Factor(f.expr, tuple(names.get(a, a) for a in f.atoms)))

    def split(self, split: Split) -> Factor:
        """Return the same tensor with some atoms written as products of smaller atoms."""

        def one(f: Factor) -> Factor:
            if not any(a in split for a in f.atoms):
                return f
            atoms = substitute(f.atoms, split)
            return Factor(f.expr.view([fixed_size([a]) for a in atoms]), atoms)

        return self.each(one)

    def each(self, fn: Callable[[Factor], Factor]) -> Factor:
        """Apply ``fn`` to the tensor and to each factor in ``terms``. ``fn`` must not mix elements along atoms."""
        return replace(fn(self), terms=tuple(tuple(map(fn, term)) for term in self.terms))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for projections and accumulation: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def widened(value: object, dtype: torch.dtype | None) -> Any:
    """Return ``dtype``, if given, instead of a floating-point dtype. Return any other ``value`` unchanged."""
    floating = isinstance(value, torch.dtype) and value.is_floating_point
    return dtype if floating and dtype is not None else value


_PACKED = ("pack_codes", "_weight_int4pack_mm", "_weight_int8pack_mm", "_dyn_quant_matmul")


def is_foreign(op: object) -> bool:
    """Whether ``op`` may support only some dtypes, because it belongs to a library or to one kind of machine.

    Such an operator runs in its own precision, and the result is treated as exact.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return False
    own = ("aten", "prims", "prim", "mla_compile")
    return op.namespace not in own or op._opname.startswith(_PACKED) or op._schema.name in (CALL, WEIGHT)


def _holds(value: object, expr: Expr) -> bool:
    return isinstance(value, (list, tuple)) and any(v is expr for v in value)


def _each(args: tuple[object, ...], fn: Callable[[Expr], object]) -> tuple[object, ...]:
    """Replace every expression ``e`` in ``args`` by ``fn(e)``."""

    def one(value: object) -> object:
        if isinstance(value, Expr):
            return fn(value)
        return type(value)(map(one, value)) if isinstance(value, (list, tuple)) else value

    return tuple(map(one, args))
