"""Compute the value of a node from values drawn for its inputs and from live weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.passes.ir.collectives import is_collective
from mla_compile.passes.ir.expr import is_foreign, widened
from mla_compile.passes.ir.graph import ORIGIN, args_of, is_tensor, val
from mla_compile.passes.ir.sizes import Size, hint, size
from mla_compile.passes.ir.stand_in import original_of

aten = torch.ops.aten


def symbols(nodes: Sequence[fx.Node]) -> dict[sympy.Symbol, int]:
    """Return the shape symbols of the nodes, with the values seen in the trace."""
    return of_sizes(dim for node in nodes for dim in val(node).shape)


def of_sizes(dims: Iterable[int | torch.SymInt]) -> dict[sympy.Symbol, int]:
    found: dict[sympy.Symbol, int] = {}
    environments: dict[int, Any] = {}
    for dim in dims:
        if isinstance(dim, int):
            continue
        env = environments.setdefault(id(dim.node.shape_env), dim.node.shape_env)
        seen = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # torch < 2.13
        expr = sympy.sympify(size(dim))
        # The original expression is also read, because a guard may have replaced its symbols later.
        for symbol in expr.free_symbols | sympy.sympify(dim.node.expr).free_symbols:
            found[symbol] = int(seen[symbol]) if symbol in seen else hint(expr, dim)
    for env in environments.values():
        found.update(_replaced(env, found))
    return found


def _replaced(env: ShapeEnv, found: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Return ``found`` and the values of the symbols that guards replaced. Layers share cached results."""
    known = _known.setdefault(env, {})
    key = len(env.replacements), frozenset(found.items())
    if key not in known:
        known[key] = _closed(env.replacements, found)
    return known[key]


_known: WeakKeyDictionary[ShapeEnv, dict[Hashable, dict[sympy.Symbol, int]]] = WeakKeyDictionary()


def _closed(
    replacements: Mapping[sympy.Symbol, sympy.Expr], found: Mapping[sympy.Symbol, int]
) -> dict[sympy.Symbol, int]:
    closed, known = dict(found), -1
    while known < len(closed):  # the replacement of a symbol may itself be replaced
        known = len(closed)
        for symbol, instead in replacements.items():
            if symbol not in closed and instead.free_symbols <= closed.keys():
                closed[symbol] = number(instead, closed)
    return closed


def number(expr: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    """Return the value of ``expr``; ``sizes`` contains all of its symbols."""
    if isinstance(expr, int):
        return expr
    # ``subs`` would first sort all given symbols, and a deep model has many symbols.
    return int(expr.xreplace({symbol: sympy.Integer(sizes[symbol]) for symbol in expr.free_symbols}))


def draw(
    node: fx.Node,
    sizes: Mapping[sympy.Symbol, int],
    scale: float,
    generator: torch.Generator,
    counts: int | None = None,
    lists: Listed | None = None,
) -> torch.Tensor:
    """Draw a random tensor for one input of a site: rows and queries are normal, and masks hide some tokens.

    ``counts``: if set, the input holds counts of keys, drawn between -2 and ``counts`` + 1. ``lists``: if set, the
    input is a sparse index list.
    """
    fake = val(node)
    shape = [number(size(d), sizes) for d in fake.shape]
    if fake.dtype == torch.bool:
        return _mask(shape, generator).to(fake.device)
    if counts is not None:
        return torch.randint(-2, counts + 2, shape, generator=generator).to(fake.dtype).to(fake.device)
    if lists is not None:
        return _named(shape, lists, generator).to(fake.dtype).to(fake.device)
    # Zero and one are valid indices, flags and counts.
    if not fake.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(fake.dtype).to(fake.device)
    return (torch.randn(shape, generator=generator) * scale).to(fake.dtype).to(fake.device)


@dataclass(frozen=True)
class Listed:
    """A sparse index list: the number of keys, the axis along which entries lie, and whether entries are distinct."""

    keys: int
    axis: int
    once: bool


def _named(shape: list[int], of: Listed, generator: torch.Generator) -> torch.Tensor:
    if not of.once:
        return torch.randint(0, max(1, of.keys), shape, generator=generator)
    rows = [n for k, n in enumerate(shape) if k != of.axis]
    orders = torch.rand([*rows, of.keys], generator=generator).argsort(-1)
    return orders[..., : shape[of.axis]].movedim(-1, of.axis)


def _mask(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return a mask that hides random tokens, or all tokens outside of a random range in each row.

    Such ranges make rows that are padded, ragged, full or empty.
    """
    if not shape or torch.rand((), generator=generator) < 0.5:
        return torch.rand(shape, generator=generator) < 0.8
    # Ends may lie beyond the row, so that many rows have no padding on one side.
    ends = torch.randint(-shape[-1], 2 * shape[-1] + 1, (2, *shape[:-1], 1), generator=generator)
    token = torch.arange(shape[-1])
    return (token >= ends.amin(0)) & (token < ends.amax(0))


class Evaluation:
    """Evaluates nodes from given inputs and live weights. If ``dtype`` is set, floats are cast to ``dtype``."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor | None],
        given: Mapping[str, torch.Tensor],
        sizes: Mapping[sympy.Symbol, int],
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.weights = weights
        self.given = given
        self.sizes = sizes
        self.seed = seed
        self.dtype = dtype
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> torch.Tensor:
        with torch.no_grad():
            # An explicit stack, because a graph of many layers is deeper than Python's recursion limit.
            pending = [node]
            while pending:
                current = pending[-1]
                if current in self._values:
                    pending.pop()
                    continue
                leaf = self._leaf(current)
                # In the model's own precision, quantized operators run. In other precisions, their stand-ins run.
                original = original_of(current) if self.dtype is None and leaf is None else None
                needed = [] if leaf is not None else current.all_input_nodes if original is None else [original]
                missing = [n for n in needed if n not in self._values]
                if missing:
                    pending.extend(missing)
                    continue
                pending.pop()
                if original is not None:
                    leaf = self._values[original]
                self._values[current] = leaf if leaf is not None else self._call(current)
        result = self._values[node]
        assert isinstance(result, torch.Tensor)
        return result

    def _leaf(self, node: fx.Node) -> object:
        name = node.meta.get(ORIGIN, "")
        if name in self.given:
            return self._cast(self.given[name])
        held = _held(node) if node.op == "get_attr" else None
        if isinstance(held, fx.GraphModule):  # a function that an operator of this graph calls
            return _Widened(held, self.dtype).run
        if isinstance(held, torch.Tensor) and node.name not in self.weights and not _is_fake(held):
            return self._cast(held)  # a constant of the graph
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and sympy.sympify(size(value)).free_symbols <= self.sizes.keys():
            return number(size(value), self.sizes)  # not computed, because it may depend on drawn values
        # No other rank takes part here, so results of collectives are drawn.
        inner = node.op not in ("placeholder", "get_attr") and node.name not in self.weights
        if inner and not (is_collective(node) and is_tensor(node)):
            return None
        known = self.weights.get(node.name)
        if isinstance(known, torch.Tensor) and known.device.type != "meta" and not _is_fake(known):
            return self._cast(known.detach())
        # An input outside of the site may have symbols of its own.
        if not is_tensor(node):
            if not isinstance(value, (int, torch.SymInt)):
                return value
            return number(size(value), {**of_sizes([value]), **self.sizes})
        sizes = {**symbols([node]), **self.sizes}
        # int() would permanently specialise a symbolic size to the traced one.
        width = max(1, number(size(val(node).shape[-1]), sizes)) if val(node).dim() else 1
        # The name seeds the generator, so that both graphs draw the same weight. hash() would differ from run to run.
        generator = torch.Generator().manual_seed(self.seed + sum(map(ord, node.name)))
        return self._cast(draw(node, sizes, width**-0.5, generator))

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        # A tensor subclass is not cast, because its inner tensors are read and cast one by one.
        whole = self.dtype is None or is_traceable_wrapper_subclass(value)
        return value.to(self.dtype) if not whole and value.is_floating_point() else value

    def _call(self, node: fx.Node) -> object:
        args = tuple(widened(a, self.dtype) for a in fx.map_arg(args_of(node), self._values.__getitem__))
        limit = None if self.dtype is None else _narrowed_to(node)
        if limit is not None:
            args = (_within(args[0], limit), *args[1:])
        kwargs = {k: widened(fx.map_arg(v, self._values.__getitem__), self.dtype) for k, v in node.kwargs.items()}
        if node.target is aten.view.default:  # the drawn values may have another memory layout
            return aten.reshape.default(*args)
        assert callable(node.target)
        if self.dtype is not None and is_foreign(node.target):
            return self._in_own_precision(node)
        value = node.target(*_promoted(node.target, args, self.dtype), **kwargs)
        # An operator without tensor operands may create a tensor in torch's default dtype.
        made = isinstance(value, torch.Tensor) and not any(map(is_tensor, node.all_input_nodes))
        return self._cast(value) if made else value

    def _in_own_precision(self, node: fx.Node) -> object:
        """Run a library's operator in the traced dtypes, and cast the result to the evaluation's dtype."""

        def as_it_was(n: fx.Node) -> Any:
            value = self._values[n]
            return value.to(val(n).dtype) if isinstance(value, torch.Tensor) and is_tensor(n) else value

        assert callable(node.target)
        args, kwargs = fx.map_arg((args_of(node), node.kwargs), as_it_was)
        return pytree.tree_map_only(torch.Tensor, self._cast, node.target(*args, **kwargs))


def _narrowed_to(node: fx.Node) -> float | None:
    """Return the largest number of the dtype to which ``node`` narrows its operand; None for other operators."""
    dtype = next((a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)), None)
    x = next(iter(node.args), None)
    if dtype is None or not isinstance(x, fx.Node) or not is_tensor(x):
        return None
    if not (dtype.is_floating_point and val(x).dtype.is_floating_point):
        return None
    limit = torch.finfo(dtype).max
    return limit if limit < torch.finfo(val(x).dtype).max else None


def _within(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Replace numbers beyond ``limit`` by infinity, since a narrowing cast must overflow even if it runs in float64."""
    return x.masked_fill(x > limit, math.inf).masked_fill(x < -limit, -math.inf)


def _promoted(op: object, args: tuple[object, ...], dtype: torch.dtype | None) -> tuple[object, ...]:
    """Cast integer tensors to ``dtype`` if an argument is a float. Torch would cast to float32, its default."""
    pointwise = torch.Tag.pointwise in getattr(op, "tags", ())
    if dtype is None or not pointwise or not any(isinstance(a, float) for a in args):
        return args
    whole = (torch.int32, torch.int64)
    return tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype in whole else a for a in args)


class _Widened(fx.Interpreter):
    """Runs a function that an operator calls, in the precision of the surrounding graph."""

    def __init__(self, module: fx.GraphModule, dtype: torch.dtype | None) -> None:
        super().__init__(module)
        self.dtype = dtype

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> object:
        value = super().get_attr(target, args, kwargs)
        wide = self.dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if wide else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        args = _promoted(target, tuple(widened(a, self.dtype) for a in args), self.dtype)
        return super().call_function(target, args, {k: widened(v, self.dtype) for k, v in kwargs.items()})


def _held(node: fx.Node) -> object:
    """Return the value that a ``get_attr`` node reads."""
    value: object = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)
