"""Find state that outlives a call and that later calls change: counters, and tensors that have no rows yet.

Dynamo makes a number or a size symbolic only after a change. If each row represents 128 tokens, the number of rows
first changes after 128 tokens. By then, the step that makes a row has been compiled for 0 rows. The trace shows earlier
which state is going to change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstDictVariable, ListVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable

from mla_compile.dynamo.causes import is_within, pattern

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """The state that a function keeps between its calls.

    ``counts``, ``empty`` and ``rows`` are regular expressions for Dynamo's names, for ``torch.compiler.config``. In
    ``empty`` and ``rows``, each name is followed by an axis, such as ``:1``. An axis of an n-axis tensor is called
    *resized* if the code changed the size of any kept n-axis tensor along this axis.

    Args:
        counts: ints that the traced code writes into objects, dicts and lists that outlive the call.
        empty: tensors that the code leaves empty along the axis, which is never the first axis.
        rows: tensors that the code reads or writes, with each of their resized axes.
        left: Dynamo's name of each tensor that the code reads or writes -> its sizes after the code has run.
        waits: whether the code made a tensor that is empty along a resized axis. Such a tensor gets rows only in some
            calls.
    """

    counts: frozenset[str]
    empty: frozenset[str]
    rows: frozenset[str]
    left: Mapping[str, Shape]
    waits: bool


_known: WeakKeyDictionary[fx.GraphModule, Kept] = WeakKeyDictionary()
"""Graph that is being compiled -> its kept state, which two callers need."""


def kept(gm: fx.GraphModule) -> Kept:
    """Return the state that the traced code keeps. Call this inside a backend."""
    if gm not in _known:
        _known[gm] = _kept(gm)
    return _known[gm]


def _kept(gm: fx.GraphModule) -> Kept:
    effects: SideEffects = InstructionTranslator.current_tx().output.side_effects
    new = {name: value for var in effects.id_to_variable.values() for name, value in _written(effects, var)}
    made = {name: shape for name, value in new.items() if (shape := _shape(value)) is not None}
    read = dict(_read(gm))
    left = {**read, **made}
    changing = {
        (len(now), axis)
        for name, now in made.items()
        for axis, size in enumerate(now)
        if name in read and len(read[name]) == len(now) and read[name][axis] != size
    }
    counts = {pattern(name) for name, value in new.items() if _is_int(value)}
    return Kept(
        frozenset(filter(None, counts)),
        _axes(left, lambda shape, axis: axis > 0 and shape[axis] == 0),
        _axes(left, lambda shape, axis: (len(shape), axis) in changing),
        left,
        any(_lacks_rows(node, changing) for node in gm.graph.nodes),
    )


def _lacks_rows(node: fx.Node, changing: Collection[tuple[int, int]]) -> bool:
    value = node.meta.get("example_value") if node.op != "placeholder" else None
    sizes = tuple(map(seen, value.shape)) if isinstance(value, torch.Tensor) else ()
    return any(size == 0 and (len(sizes), axis) in changing for axis, size in enumerate(sizes))


def _axes(shapes: Mapping[str, Shape], wanted: Callable[[Shape, int], bool]) -> frozenset[str]:
    named = ((pattern(name), shape) for name, shape in shapes.items())
    return frozenset(f"{n}:{axis}" for n, shape in named if n for axis in range(len(shape)) if wanted(shape, axis))


def _read(gm: fx.GraphModule) -> Iterator[tuple[str, Shape]]:
    """Yield the name of each tensor inside an argument, except parameters, with the tensor's sizes in this call."""
    for node in gm.graph.find_nodes(op="placeholder"):
        source, value = getattr(node, "_dynamo_source", None), node.meta.get("example_value")
        if source is None or not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            continue
        if is_within(name := source_name(source)):
            yield name, tuple(map(seen, value.shape))


def _shape(value: object) -> Shape | None:
    """Return the sizes, in this call, of a tensor that the code writes; None for any other value."""
    made = value.as_proxy().node.meta.get("example_value") if isinstance(value, TensorVariable) else None
    return tuple(map(seen, made.shape)) if isinstance(made, torch.Tensor) else None


def seen(size: int | torch.SymInt) -> int:
    """Return the value of a size in this call; -1 if the size depends on data."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else -1


def _written(effects: SideEffects, var: VariableTracker) -> Iterator[tuple[str, VariableTracker]]:
    """Yield the names and values that the code wrote into one object, except unchanged values from elsewhere."""
    for name, value in _held(effects, var):
        # The code has not read lazy values. Reading them here would add them to the graph.
        if not issubclass(type(value), LazyVariableTracker) and value.source is None:
            yield name, value


def _held(effects: SideEffects, var: VariableTracker) -> Iterator[tuple[str, VariableTracker]]:
    """Yield the names and values in an object from outside the trace, if the code wrote to the object."""
    if getattr(var, "source", None) is None or not effects.is_modified(var):
        return
    try:
        name = source_name(var.source)
    except NotImplementedError:  # Dynamo has no name for objects that an outer frame made
        return
    for attribute, value in effects.store_attr_mutations.get(var, {}).items():
        yield f"{name}.{attribute}", value
    items: Iterable[tuple[object, VariableTracker]] = enumerate(var.items) if isinstance(var, ListVariable) else ()
    if isinstance(var, ConstDictVariable):
        keys = ((key.vt, value) for key, value in var.items.items())
        items = ((key.as_python_constant(), value) for key, value in keys if key.is_python_constant())
    for key, value in items:
        yield f"{name}[{key!r}]", value


def _is_int(value: VariableTracker) -> bool:
    if isinstance(value, SymNodeVariable):
        return isinstance(value.sym_num, torch.SymInt)
    return bool(value.is_python_constant()) and type(value.as_python_constant()) is int


def source_name(source: Any) -> str:
    """Return Dynamo's name of a value. ``name`` is a method in torch 2.11 and an attribute in later releases."""
    return str(source.name() if callable(source.name) else source.name)
