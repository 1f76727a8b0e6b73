"""Keep folds up to date. A fold is a product of weights, or a dequantized weight, that a graph takes as input."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.core.program import Call, FoldedWeight, Inputs, Program
from mla_compile.errors import StaleWeightError, WeightError


@dataclass(frozen=True)
class _Seen:
    """A weight at the time of folding: a weak reference to the object, and a copy of its values.

    ``snapshot`` is None if only versions and addresses are compared. For tensor subclasses such as DTensor,
    ``snapshot`` holds the local plain tensors, because comparing the weight itself might involve other ranks.
    """

    tensor: weakref.ref[torch.Tensor]
    snapshot: tuple[torch.Tensor, ...] | None
    mark: tuple[int, ...]

    def is_current(self, live: torch.Tensor) -> bool:
        """Whether the weight is unchanged. Cheap checks are made first; then every bit is compared."""
        if self.tensor() is not live or self.mark != _mark(live):
            return False
        return self.snapshot is None or all(map(same_bits, parts_of(live.detach()), self.snapshot))


class FoldedWeights:
    """The values of a program's folds, computed from the live weights and recomputed when a weight has changed.

    Each call compares every weight bit by bit with a copy from the time of folding, because ``p.data.mul_(2)`` changes
    neither the identity nor the address nor the version of ``p``. New values are written into the old memory, because a
    CUDA graph may hold its address.

    One compiled graph may serve several layers in turn, so values are kept for each set of weights. A set is dropped if
    one of its weights is freed. If there are more than :attr:`SETS` sets, the least recently used set is dropped.

    For dequantized weights, only versions and addresses are compared. Reading all stored values would cost too much.
    All graphs that need the same dequantized weight share one tensor.
    """

    SETS = 128

    def __init__(self, program: Program) -> None:
        self._folds = list(program.folds)
        positions = {node.name: index for index, node in enumerate(program.placeholders)}
        names = dict.fromkeys(name for fold in self._folds for name in fold.weights)
        self._watched = {name for fold in self._folds if fold.stored is None for name in fold.weights}
        self._read = {name: weight_reader(program, positions, name) for name in names}
        self._known: dict[tuple[int, ...], tuple[dict[str, _Seen], list[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the computed values and the lock."""
        return {**vars(self), "_known": {}, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def values(self, inputs: Inputs) -> list[torch.Tensor]:
        """Return one tensor per fold for these inputs. Raises :class:`WeightError` if weights cannot be folded."""
        live = {name: read(inputs) for name, read in self._read.items()}
        with self._lock:
            return self._values(live)

    def _values(self, live: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        key = tuple(id(tensor) for tensor in live.values())
        seen, values = self._known.pop(key, ({}, []))
        # Versions and addresses are read in each step. Tensor subclasses would first ask their __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            changed = {name for name in live if name not in seen or not seen[name].is_current(live[name])}
        if not values:
            values = [_shared(fold, live) for fold in self._folds]
        for fold, value in zip(self._folds, values, strict=True) if seen else ():
            if changed.intersection(fold.weights):
                _overwrite(value, compute(fold, live), fold)
        for name in changed:
            tensor = live[name]
            owner = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            snapshot = tuple(p.clone() for p in parts_of(tensor.detach())) if name in self._watched else None
            seen[name] = _Seen(owner, snapshot, _mark(tensor))
        self._known[key] = (seen, values)
        if len(self._known) > self.SETS:
            del self._known[next(iter(self._known))]
        return values


_stored: weakref.WeakValueDictionary[tuple[object, ...], torch.Tensor] = weakref.WeakValueDictionary()
"""Maps a computation's key and its weights' ids to the dequantized weight, while a graph uses this weight."""


def _shared(fold: FoldedWeight, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if fold.stored is None:
        return compute(fold, live)
    key = (fold.stored, *(id(live[name]) for name in fold.weights))
    value = compute(fold, live)
    known = _stored.setdefault(key, value)
    if known is not value:  # a weight may have changed, or its id may have belonged to another tensor
        known.copy_(value)
    return known


def compute(fold: FoldedWeight, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute a fold's value. Raises :class:`WeightError` for weights that are not dense or cannot be multiplied."""
    for name in fold.weights:
        check_weight(name, live[name], _without(fold))
    try:
        with torch.no_grad():
            return fold.compute({name: live[name].detach() for name in fold.weights}).contiguous()
    except (RuntimeError, TypeError) as error:
        kinds = ", ".join(f"{name} {live[name].dtype}" for name in fold.weights)
        raise WeightError(f"weights cannot be folded ({kinds}): {error}; use {_without(fold)}") from error


def folded_values(program: Program) -> dict[str, torch.Tensor]:
    """Compute the values of all folds from the program's present weights, so that the program can be saved.

    Raises :class:`WeightError` for weights without dense values.
    """
    for fold in program.folds:
        for name in fold.weights:
            check_weight(name, program.weights.get(name), _without(fold))
    live = {name: tensor for name, tensor in program.weights.items() if tensor is not None}
    return {fold.placeholder: compute(fold, live) for fold in program.folds}


def _without(fold: FoldedWeight) -> str:
    """Return the option setting that avoids a fold."""
    return 'fold="never"' if fold.stored is None else 'dequantize="step"'


def check_weight(name: str, tensor: torch.Tensor | None, instead: str = 'fold="never"') -> None:
    """Raise :class:`WeightError` unless the tensor has dense values. The message recommends the option ``instead``."""
    problem = None
    if tensor is None or tensor.is_meta:
        problem = "has no values (it is on the meta device, or fake)"
    elif tensor.layout is not torch.strided:
        problem = f"is stored as {tensor.layout}"
    if problem is not None:
        raise WeightError(f"weight {name!r} {problem} and cannot be folded; load it densely, or use {instead}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and bits: NaN equals itself, and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


def _overwrite(value: torch.Tensor, new: torch.Tensor, fold: FoldedWeight) -> None:
    if value.shape != new.shape or value.dtype != new.dtype or value.device != new.device:
        raise StaleWeightError(
            f"a weight of the fold {fold.placeholder!r} changed: its product was {list(value.shape)} {value.dtype} on "
            f"{value.device}, now {list(new.shape)} {new.dtype} on {new.device}; compile the model again"
        )
    value.copy_(new)


def weight_reader(program: Program, positions: Mapping[str, int], name: str) -> Callable[[Inputs], torch.Tensor]:
    """Return a function that reads a weight from a call's inputs, or from ``program`` if the weight is an attribute."""
    if name in positions:
        index = positions[name]
        return lambda inputs: inputs[index]
    if not any(node.name == name for node in program.gm.graph.nodes):
        # Only the fold still reads this constant, so its node was removed from the graph.
        constant = program.weights[name]
        if constant is None:
            raise KeyError(name)
        return lambda inputs: constant
    target = str(program.node(name).target)
    owner, _, leaf = target.rpartition(".")
    module = program.gm.get_submodule(owner)
    return lambda inputs: getattr(module, leaf)


def version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; -1 for inference tensors, which have no counter."""
    return -1 if tensor.is_inference() else tensor._version


def versions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the :func:`version` of a tensor and, for a tensor subclass, of all tensors inside it.

    A write to a tensor subclass may count only for the subclass (torchao's ``copy_``), or only for the inner tensor.
    """
    return (version(tensor), *(number for inner in _inner(tensor) for number in versions(inner)))


def addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the address of a tensor, or of each of its plain tensors."""
    return tuple(part.data_ptr() for part in parts_of(tensor))


def _mark(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the version and the address of a tensor, or the versions of a tensor subclass and the marks inside it."""
    inner = () if type(tensor) in (torch.Tensor, torch.nn.Parameter) else _inner(tensor)
    if not inner:
        return version(tensor), tensor.data_ptr()
    return (version(tensor), *(number for one in inner for number in _mark(one)))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that store ``tensor`` on this rank. A plain tensor is returned itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for inner in _inner(tensor) for part in parts_of(inner)]


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors directly inside a tensor subclass; none for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names if isinstance(inner := getattr(tensor, name), torch.Tensor)]


def with_folds(call: Call, folds: FoldedWeights) -> Call:
    """Wrap ``call`` so that each call appends the folded weights to the original inputs."""

    def folded(*inputs: object) -> object:
        return call(*inputs, *folds.values(inputs))

    return folded
