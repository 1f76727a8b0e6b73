"""Find quantized products and rounded rows, and add plain stand-ins for them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.core.alike import constant_of, each, known_of, number_of
from mla_compile.errors import InputError
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import SPELLED, Builder, args_of, is_tensor, operator_name, packet, shape, val
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.schema import named_arguments, schema_name
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stand_in import BARRED, DROPPED, STANDS_FOR, WAITS, stand_in
from mla_compile.passes.ir.walk import reachable
from mla_compile.passes.quantized.layers import product_of
from mla_compile.passes.quantized.library import MEMBERS, PRODUCTS, ROWS
from mla_compile.passes.quantized.registry import QuantizedLinear, registered
from mla_compile.passes.quantized.rows import RowTracker
from mla_compile.passes.quantized.scales import copied, regrouped
from mla_compile.passes.quantized.stored import is_narrow

aten = torch.ops.aten


def is_quantized(graph: fx.Graph) -> bool:
    """Whether ``graph`` has tensors with a byte or less per number, or operators that round rows."""
    return any(is_tensor(n) and (is_narrow(val(n).dtype) or _rounds(n)) for n in graph.nodes)


def _rounds(node: fx.Node) -> bool:
    if packet(node) is aten.round:
        return True
    name = schema_name(node)
    return _known(node) is not None or name in ROWS


def _known(node: fx.Node) -> QuantizedLinear | None:
    """Return the description of the product that ``node`` calls; None if it calls no known product."""
    return registered.get(node) or PRODUCTS.get(node) or product_of(node)


def add_stand_ins(
    graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None, *, exact: bool
) -> int:
    """Add a stand-in for every node that equals plain rows up to rounding; return the number of stand-ins.

    If ``exact``, a node with rounded rows gets no stand-in. It is barred instead: attentions that read the node are
    refused.
    """
    reader = _Reader(graph, weights, fake_mode, exact=exact)
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in weights and is_tensor(node):
            reader.visit(node)
    return reader.found


class _Reader:
    def __init__(
        self, graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None, *, exact: bool
    ) -> None:
        self.weights = set(weights)
        self.fake_mode = fake_mode
        self.exact = exact
        self.tracker = RowTracker(self.weights, fake_mode)
        self.found = 0
        # Layers of one shape are traced once, because a model has hundreds of products.
        self.traced: dict[Hashable, fx.GraphModule] = {}

    def visit(self, node: fx.Node) -> None:
        product = self._product(node)
        if product is not None:
            self._replace(node, *product)
            return
        found = self._rule(node)
        if found is None:
            return
        if not (found.settled and val(node).dtype.is_floating_point and val(node).dtype.itemsize > 1):
            self.tracker.known[node] = found
        # Only rows rounded for a product get a stand-in. Rounded keys stay: the model attends to them or caches them.
        elif found.projected or self._only_projected(node):
            self._replace(node, found.plain, found.dropped)

    def _only_projected(self, node: fx.Node) -> bool:
        """Whether all readers of ``node``, and of its views and copies, multiply it by a weight."""
        for reader in reachable([node], lambda n: n.users if n is node or _shows(n) else ()):
            weighs = is_contraction(reader) and any(n in self.weights for n in reader.all_input_nodes)
            checks = not reader.users and reader.op != "output"  # tracing leaves checks of the dtype without users
            if reader is not node and not _shows(reader) and not weighs and not checks:
                return False
        return bool(node.users)

    def _rule(self, node: fx.Node) -> Any:
        if packet(node) is operator.getitem:
            rule = MEMBERS.get(schema_name(args_of(node)[0]))
        else:
            rule = ROWS.get(schema_name(node))
        return self.tracker.read(node) if rule is None else rule(self.tracker, node)

    def _product(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        """Return a plain ``rows W^T + bias`` for ``node``; None if ``node`` is not a known quantized product.

        The second result is "few bits" if the operator also quantizes its rows, and "" if it does not.
        """
        call = args_of(node)[0] if packet(node) is operator.getitem else node
        if packet(node) is operator.getitem and args_of(node)[1] != 0:
            return None
        known = _known(call)
        if known is None:
            return None
        told = named_arguments(call)
        rows = told.pop(known.rows, None)
        # If the rows are a weight, or the weight is an activation, this is no product of rows with a weight.
        if not is_tensor(rows) or rows in self.weights or not all(n in self.weights for n in _nodes(told)):
            return None
        dtype = wide(val(rows).dtype)
        builder = Builder(node, self.fake_mode)
        weight, bias = self._dequantized(node, call, known, rows, told)
        x = builder.cast(rows, dtype)
        given = [builder.cast(w, dtype) for w in (weight, bias) if w is not None]
        plain = builder.call(aten.linear.default, x, *given)
        return plain, "few bits" if known.rounds else ""

    def _dequantized(
        self, node: fx.Node, call: fx.Node, known: QuantizedLinear, rows: fx.Node, told: dict[str, Any]
    ) -> tuple[fx.Node, fx.Node | None]:
        """Return the nodes of the weight [out, in] and of the bias."""
        out, width = shape(node)[-1], shape(rows)[-1]
        operands = _nodes(told)

        def compute(*tensors: torch.Tensor) -> Any:
            arguments: Any = fx.map_arg(told, dict(zip(operands, tensors, strict=True)).__getitem__)
            if known.dequantize is None:
                units = torch.eye(int(width), dtype=val(rows).dtype, device=val(rows).device)
                made: Any = call.target(**{known.rows: units, **arguments})  # type: ignore[operator]
                made = made[0] if isinstance(made, (tuple, list)) else made
                return (made.mT,)
            made = known.dequantize(**arguments)
            return tuple(t for t in made if t is not None) if isinstance(made, (tuple, list)) else (made,)

        builder = Builder(node, self.fake_mode)
        places = {node: place for place, node in enumerate(operands)}

        def read(value: object) -> Hashable:
            if isinstance(value, fx.Node):
                return places[value], known_of(val(value), begins=False)
            return constant_of(value)

        key = (schema_name(call), known, each(told, read), number_of(width), val(rows).dtype)
        if key not in self.traced:
            self.traced[key] = builder.traced(compute, operands)
        found = builder.insert(self.traced[key], operands)
        weight, bias = (*found, None)[:2]
        assert weight is not None
        if not (len(shape(weight)) == 2 and same(shape(weight)[0], out) and same(shape(weight)[1], width)):
            raise InputError(
                f"the dequantization of {schema_name(call)} returned a tensor of shape {list(val(weight).shape)}, "
                f"expected the weight [out, in] = [{out}, {width}]"
            )
        if not val(weight).dtype.is_floating_point or val(weight).dtype.itemsize < 2:
            raise InputError(
                f"the dequantization of {schema_name(call)} returned {val(weight).dtype}, expected float32"
            )
        return weight, bias

    def _replace(self, node: fx.Node, plain: fx.Node, dropped: str) -> None:
        """Redirect every reader of ``node`` to ``plain``, or bar the node if it must not be replaced."""
        if dropped and self.exact:
            node.meta[BARRED] = dropped
            return
        builder = Builder(node, self.fake_mode)
        new = builder.call(stand_in, builder.cast(plain, val(node).dtype))
        node.replace_all_uses_with(new)
        node.meta[WAITS] = new.meta[STANDS_FOR] = node.name
        # Drawings and reasons show the operator that the user wrote.
        new._rename(f"{node.name}_plain")
        new.meta[SPELLED] = operator_name(node)
        if dropped:
            new.meta[DROPPED] = dropped
        self.found += 1


def _shows(node: fx.Node) -> bool:
    return regrouped(node) is not None or copied(node) is not None


def _nodes(told: dict[str, Any]) -> list[fx.Node]:
    """Return the nodes among some arguments, without duplicates."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(told, found.setdefault)
    return list(found)
