"""What runs in each call around compiled graphs: the choice between two of them, and folded weights kept up to date."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from mla_compile.core.program import Fold, Program
from mla_compile.errors import StaleWeightError, WeightError
from mla_compile.passes.decide import cost, formulas
from mla_compile.passes.ir.sizes import UNSEEN, canonical, hint, size
from mla_compile.pipeline import SiteCost

Call = Callable[..., Any]


def picker(program: Program, variants: Sequence[SiteCost]) -> Callable[[Sequence[Any]], bool]:
    """A function of one call's inputs: whether the absorbed form of all sites together needs fewer FLOPs.

    A size that the inputs do not show, such as one computed in the graph, counts as ``UNSEEN``.
    """
    gain = _gain(program, variants)
    found = {symbol: _reader(program, symbol) for symbol in sorted(gain.free_symbols, key=str)}
    readers = {symbol: read for symbol, read in found.items() if read is not None}
    gain = gain.subs(dict.fromkeys(found.keys() - readers.keys(), UNSEEN))
    # torch's printer knows the functions of its shape expressions (FloorDiv, Mod).
    value = sympy.lambdify(list(readers), gain, modules=[{"math": math}, "math"], printer=PythonPrinter)

    def absorbed_pays(inputs: Sequence[Any]) -> bool:
        return bool(value(*[read(inputs) for read in readers.values()]) > 0)

    return absorbed_pays


def pays_as_traced(program: Program, variants: Sequence[SiteCost]) -> bool:
    """The same decision for the sizes the program was traced with."""
    gain = _gain(program, variants).subs({size(n): hint(size(n), n) for _, _, n in _symbolic_inputs(program)})
    return bool(gain.subs(dict.fromkeys(gain.free_symbols, UNSEEN)) > 0)


def _gain(program: Program, variants: Sequence[SiteCost]) -> sympy.Expr:
    """Multiply-adds that absorbing saves over all sites, in the graph's shape symbols as the passes spell them."""
    gain = sympy.Integer(0)
    for site, count in Counter(variants).items():
        dims, sizes = site.dims, {formulas.S: site.S, formulas.T: site.T}
        for part in site.parts:
            gain += count * site.B * cost.part_gain(part).subs(sizes)
        if not site.parts:
            letters = {**sizes, formulas.L: dims.L, formulas.N: dims.N, formulas.V: dims.V}
            gain += count * site.B * dims.H * formulas.absorption_gain().subs(letters)
    env = next((n.node.shape_env for _, _, n in _symbolic_inputs(program)), None)
    return canonical(gain, env)  # guards may have come since the sizes were read


def _reader(program: Program, symbol: sympy.Symbol) -> Callable[[Sequence[Any]], int] | None:
    """Where in the inputs the value of a shape symbol stands."""
    for index, axis, value in _symbolic_inputs(program):
        if size(value) == symbol:
            return lambda inputs: int(inputs[index] if axis is None else inputs[index].shape[axis])
    return None


def _symbolic_inputs(program: Program) -> list[tuple[int, int | None, torch.SymInt]]:
    """Symbolic numbers, and after them symbolic axes of tensors: position of the input, axis, value."""
    values = [node.meta["val"] for node in program.placeholders]
    found: list[tuple[int, int | None, Any]] = [(i, None, v) for i, v in enumerate(values)]
    tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    found += [(i, axis, n) for i, value in tensors for axis, n in enumerate(value.shape)]
    return [one for one in found if isinstance(one[2], torch.SymInt)]


def choose_by_call(pays: Callable[[Sequence[Any]], bool], absorbed: Call, expanded: Call) -> Call:
    """A callable that runs one of two compiled graphs of the same inputs."""

    def call(*inputs: Any) -> Any:
        return absorbed(*inputs) if pays(inputs) else expanded(*inputs)

    return call


@dataclass(frozen=True)
class _Seen:
    """A weight as it was when it was folded: the object, which may be gone, and a copy of its values."""

    tensor: weakref.ref[torch.Tensor]
    snapshot: torch.Tensor
    version: int
    address: int

    def is_current(self, live: torch.Tensor) -> bool:
        """Whether nothing has changed since: the cheap signs first, then every bit."""
        if self.tensor() is not live or self.version != _version(live) or self.address != live.data_ptr():
            return False
        return same_bits(live.detach(), self.snapshot)


class FoldedWeights:
    """The values of a program's folds, computed from the live weights and again whenever one of those has changed.

    Every call compares each weight bit by bit with a copy made when it was folded, because ``p.data.mul_(2)`` changes
    neither the identity, nor the address, nor the version of ``p``. New values are written into the same memory, so
    that a CUDA graph that holds the address stays right. One compiled graph may serve several layers in turn: values
    are kept per set of weights, until one of those is gone; the least recently used set is dropped first.
    """

    SETS = 128

    def __init__(self, program: Program) -> None:
        self._folds = list(program.folds)
        positions = {node.name: index for index, node in enumerate(program.placeholders)}
        names = dict.fromkeys(name for fold in self._folds for name in fold.weights)
        self._read = {name: weight_reader(program, positions, name) for name in names}
        self._known: dict[tuple[int, ...], tuple[dict[str, _Seen], list[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def values(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """One tensor per fold for these inputs. Raises :class:`WeightError` for weights that cannot be folded."""
        live = {name: read(inputs) for name, read in self._read.items()}
        with self._lock:
            return self._values(live)

    def _values(self, live: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        key = tuple(id(tensor) for tensor in live.values())
        seen, values = self._known.pop(key, ({}, []))
        changed = {name for name in live if name not in seen or not seen[name].is_current(live[name])}
        if not values:
            values = [compute(fold, live) for fold in self._folds]
        for fold, value in zip(self._folds, values, strict=True) if seen else ():
            if changed.intersection(fold.weights):
                _overwrite(value, compute(fold, live), fold)
        for name in changed:
            tensor = live[name].detach()
            owner = weakref.ref(live[name], lambda _: self._known.pop(key, None))
            seen[name] = _Seen(owner, tensor.clone(), _version(tensor), tensor.data_ptr())
        self._known[key] = (seen, values)
        if len(self._known) > self.SETS:
            del self._known[next(iter(self._known))]
        return values


def compute(fold: Fold, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of a fold; :class:`WeightError` where a weight has no dense values or the product cannot be formed."""
    for name in fold.weights:
        check_weight(name, live[name])
    try:
        with torch.no_grad():
            return fold.compute({name: live[name].detach() for name in fold.weights}).contiguous()
    except (RuntimeError, TypeError) as error:
        kinds = ", ".join(f"{name} {live[name].dtype}" for name in fold.weights)
        raise WeightError(f'weights cannot be folded ({kinds}): {error}; use fold="never"') from error


def folded_values(program: Program) -> dict[str, torch.Tensor]:
    """The values of all folds of a program that is about to be saved, from its weights as they are now.

    Raises :class:`WeightError` for weights without dense values.
    """
    for fold in program.folds:
        for name in fold.weights:
            check_weight(name, program.weights.get(name))
    live = {name: tensor for name, tensor in program.weights.items() if tensor is not None}
    return {fold.placeholder: compute(fold, live) for fold in program.folds}


def check_weight(name: str, tensor: torch.Tensor | None) -> None:
    """Raises :class:`WeightError` unless the tensor has values, stored densely."""
    problem = None
    if tensor is None or tensor.is_meta:
        problem = "has no values (it is on the meta device, or fake)"
    elif tensor.layout is not torch.strided:
        problem = f"is stored as {tensor.layout}"
    if problem is not None:
        raise WeightError(f'weight {name!r} {problem} and cannot be folded; load it densely, or use fold="never"')


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself, and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


def _overwrite(value: torch.Tensor, new: torch.Tensor, fold: Fold) -> None:
    if value.shape != new.shape or value.dtype != new.dtype or value.device != new.device:
        raise StaleWeightError(
            f"a weight of the fold {fold.placeholder!r} changed: its product was {list(value.shape)} {value.dtype} on "
            f"{value.device}, now {list(new.shape)} {new.dtype} on {new.device}; compile the model again"
        )
    value.copy_(new)


def weight_reader(program: Program, positions: Mapping[str, int], name: str) -> Callable[[Sequence[Any]], torch.Tensor]:
    """Reads a weight of ``program`` from the inputs of a call, or from the program where it is an attribute of it."""
    if name in positions:
        index = positions[name]
        return lambda inputs: inputs[index]
    target = str(program.node(name).target)
    owner, _, leaf = target.rpartition(".")
    module = program.gm.get_submodule(owner)
    return lambda inputs: getattr(module, leaf)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def with_folds(call: Call, folds: FoldedWeights) -> Call:
    """A callable of the original inputs that appends the folded weights."""

    def folded(*inputs: Any) -> Any:
        return call(*inputs, *folds.values(inputs))

    return folded
