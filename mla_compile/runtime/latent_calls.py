"""Code that runs around a compiled graph whose cache is kept as latent rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from mla_compile.core.program import Append, Call, Inputs, Program
from mla_compile.errors import warn
from mla_compile.passes.cache.rewrite import LatentCache
from mla_compile.runtime.appending import length_marker
from mla_compile.runtime.folds import weight_reader
from mla_compile.runtime.latent import LatentTensor
from mla_compile.runtime.shared_rows import RankRows


def plain_examples(gm: fx.GraphModule, example_inputs: Inputs) -> list[object]:
    """Return the example inputs of a Dynamo graph with plain fake tensors in place of tensors that hold rows.

    The plain tensors also replace the examples stored in the graph, because a trace of a subgraph starts from stored
    examples.
    """
    values = list(example_inputs)
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(values[index], (LatentTensor, RankRows)):
            fake = node.meta["example_value"]
            inner = getattr(fake, fake.__tensor_flatten__()[0][0])
            with inner.fake_mode:
                values[index] = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
            node.meta["example_value"] = values[index]
    return values


def expanding(call: Call, gm: fx.GraphModule) -> Call:
    """Wrap ``call``, which takes the plain inputs of ``gm``, so that it also accepts tensors of rows."""
    may_be_written = possibly_written(gm.graph)
    written = [node in may_be_written for node in gm.graph.find_nodes(op="placeholder")]

    def plain(*inputs: object) -> object:
        return call(*(_plain(x, written=is_written) for x, is_written in zip(inputs, written, strict=False)))

    return plain


def _plain(value: object, *, written: bool) -> object:
    """Return K if ``value`` holds rows, else ``value``. If the graph writes to K, K replaces the rows for good."""
    if isinstance(value, RankRows):  # every rank runs this graph, so the collective is safe
        return value.refuse("a graph writes to it") if written else value.full_tensor()
    if not isinstance(value, LatentTensor):
        return value
    return value.settled() if written else value.expanded()


def possibly_written(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that a Dynamo graph may write to.

    These are the arguments of calls that write, and all nodes upstream, because an argument may be a view.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in found or _writes(user) for user in node.users):
            found.add(node)
    return found


def _writes(user: fx.Node) -> bool:
    """Whether a call may write to any of its arguments."""
    if user.op == "output":
        return False
    if user.op == "call_method":
        return str(user.target).endswith("_")
    if user.op != "call_function" or isinstance(user.target, HigherOrderOperator):
        return True  # a nested graph or a module
    if isinstance(user.target, torch._ops.OpOverload):
        return bool(user.target._schema.is_mutable)
    named = getattr(user.target, "__name__", "_").endswith("_") or user.target is operator.setitem
    return named or "out" in user.kwargs or user.kwargs.get("inplace") is True


def example_in_order(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a fake tensor like ``rows``, but with the axes in this order in memory."""
    made = torch.empty_like(rows.permute(*order), memory_format=torch.contiguous_format)
    return made.permute(*(order.index(dim) for dim in range(len(order))))


def in_order(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return ``rows`` as a dense tensor whose axes have this order in memory. Copy them only if needed."""
    moved = rows.permute(*order)
    return rows if moved.is_contiguous() else moved.contiguous().permute(*(order.index(d) for d in range(len(order))))


def with_rows(
    call: Call,
    program: Program,
    names: Sequence[str],
    otherwise: Call,
    appends: Sequence[Append] = (),
    layouts: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Call:
    """Wrap ``call``, which takes the program's inputs, as a callable of the captured inputs ``names``.

    The wrapper takes rows out of each input :class:`LatentTensor`, and returns new rows as :class:`LatentTensor`. It
    warns and calls ``otherwise`` in three cases: an input holds K or V instead of rows, a tensor of rows was made with
    other weights than the call's, or the compiled program expects that rows are shared in another way.

    ``appends`` lists the rows that will grow. ``layouts`` maps names of other rows to the order of axes in memory that
    the compiled code expects.
    """
    cache = program.cache
    assert cache is not None
    position = {name: index for index, name in enumerate(names)}
    kept = [(index, name in program.mutations) for index, name in enumerate(names) if name not in cache.inputs]
    takes = [(position[name], _leaves(program, position, cache, name), rows) for name, rows in cache.inputs.items()]
    gives = [
        (index - len(program.mutations), cache.recipes[index][0], _leaves(program, position, cache, index),
         [r - len(program.mutations) for r in rows], index in cache.begun)
        for index, rows in cache.outputs.items()
    ]  # fmt: skip
    mark, growing = length_marker(), {one.output for one in appends}
    written = [position[name] for name in cache.written]
    same = [(index, position[name]) for index, name in cache.handed_back.items()]
    count = len(program.outputs) - len(program.mutations) - len({r for rows in cache.outputs.values() for r in rows})

    def _otherwise(why: str) -> Call:
        # This is a warning and not a log record: the call is correct, but as slow as without this package.
        warn(f"the original graph runs in this call, because its cache is {why}; start with an empty cache")
        return otherwise

    def around(*inputs: Any) -> object:
        rows: dict[str, torch.Tensor] = {}
        for at, leaves, wanted in takes:
            tensor = inputs[at]
            fits = isinstance(tensor, LatentTensor) and tensor.recipe is not None
            if not fits or any(a is not read(inputs) for a, read in zip(tensor.leaves, leaves, strict=True)):
                return _otherwise("expanded with other weights")(*inputs)
            for name, row in zip(wanted, tensor.rows(), strict=True):
                if rows.setdefault(name, row) is not row:
                    return _otherwise("made from rows that are shared in another way than before")(*inputs)
        for name, order in layouts.items():
            rows[name] = in_order(rows[name], order)
        buffers = [inputs[at] for at in written]
        if not all(buffer.shares_only_with(buffers) for buffer in buffers):
            return _otherwise("made from rows of another buffer, which this call does not write to")(*inputs)
        given = (
            inputs[index] if isinstance(inputs[index], RankRows) else _plain(inputs[index], written=written)
            for index, written in kept
        )
        results = list(call(*given, *(rows[name] for name in cache.rows)))
        for index, recipe, leaves, parts, own in gives:
            held, weights = [results[part] for part in parts], [read(inputs) for read in leaves]
            made = LatentTensor.of(recipe, held, weights, own=own)
            # A mark also applies to inner tensors with the same number of axes, although axes may differ in meaning.
            if growing.issuperset(parts) and all(inner.dim() != made.dim() for inner in (*held, *weights)):
                mark(made, recipe.tokens)
            results[index] = made
        for index, at in same:
            results[index] = inputs[at]
        return results[:count]

    return around


def _leaves(
    program: Program, position: dict[str, int], cache: LatentCache, of: str | int
) -> list[Callable[[Inputs], torch.Tensor]]:
    return [weight_reader(program, position, name) for name in cache.recipes[of][1]]
