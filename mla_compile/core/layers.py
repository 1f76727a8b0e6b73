"""Layers that compiled code calls as one operator, because Dynamo cannot trace their forwards.

``mla_compile::call_layer(rows, weights, layer) -> y`` runs the layer's own forward on rows [..., in]. The result
y [..., out] has the dtype of the rows. ``layer`` is the layer's name in this process. ``weights`` are the layer's
tensors. The compiler passes find the weight among them.

``mla_compile::layer_weight(weights, layer) -> W`` returns the rounded weight [out, in] of a layer that rounds its
weight in each call. The layer's library does the rounding, because other code could round differently.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.errors import InputError

CALL = "mla_compile::call_layer"
SCHEMA = "(Tensor rows, Tensor[] weights, str layer) -> Tensor"
WEIGHT, WEIGHT_SCHEMA = "mla_compile::layer_weight", "(Tensor[] weights, str layer) -> Tensor"

Paths = tuple[tuple[str, ...], ...]
_numbers = itertools.count()
_called: weakref.WeakValueDictionary[str, CalledLayer] = weakref.WeakValueDictionary()


class CalledLayer:
    """A layer that graphs call by its name. A deep copy of this object calls a deep copy of the layer.

    Attributes:
        layer: the library's module, with all wrappers around its forward. Calls run this module.
        plain: a module with the layer's tensors in plain dicts. The layer may use a container of the library instead.
        inner: the forward without wrappers that only place tensors, as a function of the layer and rows. If ``inner``
            is None (unknown), the layer always computes with its own tensors.
        width: the width of the layer's result.
        parts: name of a tensor of a library's own class -> attribute paths to its plain tensors. No operator takes
            such a tensor directly.
        rounded: a function that computes the rounded weight of a module like the layer; None if the layer does not
            round its weight in each call.
    """

    rounded: Callable[[nn.Module], Tensor] | None = None

    def __init__(
        self,
        layer: nn.Module,
        plain: nn.Module,
        inner: Callable[..., Tensor] | None,
        width: int,
        parts: Mapping[str, Paths] | None = None,
    ) -> None:
        self.layer = layer
        self.plain = plain
        self.inner = inner
        self.width = width
        if parts is None:
            parts = {name: _parts(t) for name, t in self._named() if t is not None and is_of_library(t)}
        self.parts = parts
        self.name = f"{type(layer).__name__}_{next(_numbers)}"
        _called[self.name] = self

    @property
    def tensors(self) -> list[Tensor]:
        """The current tensors of the layer. A tensor of a library's own class is replaced by its plain tensors."""
        named = [(t, self.parts.get(name, ((),))) for name, t in self._named() if t is not None]
        return [functools.reduce(getattr, path, t) for t, paths in named for path in paths]

    def _named(self) -> list[tuple[str, Tensor | None]]:
        return [*self.plain._parameters.items(), *self.plain._buffers.items()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> nn.Module:
        """Return a module with the layer's attributes and inner forward, but with ``tensors`` as its tensors."""
        made: nn.Module = object.__new__(type(self.layer))
        vars(made).update(vars(self.layer))
        given = iter(tensors)
        for kind in ("_parameters", "_buffers"):
            own: dict[str, Tensor | None] = vars(self.plain)[kind]
            vars(made)[kind] = {name: None if value is None else _made(value, given) for name, value in own.items()}
        if self.inner is not None:
            vars(made)["forward"] = types.MethodType(self.inner, made)
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> CalledLayer:
        layer, plain = copy.deepcopy((self.layer, self.plain), memo)
        # ``parts`` is not computed again, because the copies may still be incomplete.
        return CalledLayer(layer, plain, self.inner, self.width, self.parts)

    def __reduce__(self) -> tuple[object, ...]:
        return CalledLayer, (self.layer, self.plain, self.inner, self.width, self.parts)


def is_of_library(tensor: object) -> bool:
    """Whether a tensor's class is a library's own and wraps other tensors. For torch's DTensor, this is False."""
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # DTensor exists only after its import
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, spread)


def _parts(tensor: Tensor) -> Paths:
    """Return the attribute paths from a tensor to its plain tensors."""
    if not is_of_library(tensor):
        return ((),)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return tuple((name, *path) for name in names for path in _parts(getattr(tensor, name)))


def _made(tensor: Tensor, given: Iterator[Tensor]) -> Tensor:
    """Build a tensor of the class of ``tensor`` from the next tensors in ``given``."""
    if not is_of_library(tensor):
        return next(given)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: _made(getattr(tensor, name), given) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def find(name: str) -> CalledLayer:
    """Return the layer ``name``. Raises :class:`InputError` if this process has no such layer."""
    found = _called.get(name)
    if found is None:
        raise InputError(f"{CALL} calls the layer {name}, which is not in this process: optimize the model again here")
    return found


def run(rows: Tensor, weights: list[Tensor], layer: str) -> Tensor:
    """Implement ``call_layer``."""
    called = find(layer)
    # ``weights`` may differ from the layer's own tensors: a check, for example, passes random values.
    own = called.inner is None or all(
        a.data_ptr() == b.data_ptr() for a, b in zip(called.tensors, weights, strict=True)
    )
    with torch.no_grad():
        y = called.layer.forward(rows) if own else called.with_tensors(weights).forward(rows)
    if y.dtype != rows.dtype or y.shape != (*rows.shape[:-1], called.width):
        raise InputError(
            f"{type(called.layer).__name__} returned {y.dtype} {list(y.shape)} for rows {rows.dtype} "
            f"{list(rows.shape)}, expected {rows.dtype} [..., {called.width}]"
        )
    return y.contiguous() if y is not rows else y.clone()


def fake(rows: Tensor, weights: list[Tensor], layer: str) -> Tensor:
    """Return an empty tensor with the shape and dtype of the result of ``call_layer``."""
    return rows.new_empty(*rows.shape[:-1], find(layer).width)


def run_weight(weights: list[Tensor], layer: str) -> Tensor:
    """Implement ``layer_weight``."""
    called = find(layer)
    assert called.rounded is not None
    with torch.no_grad():
        return called.rounded(called.with_tensors(weights)).clone()


def fake_weight(weights: list[Tensor], layer: str) -> Tensor:
    """Return an empty tensor like the unrounded weight, which is the first of ``weights``."""
    return torch.empty_like(weights[0])


def flops(rows: torch.Size, weights: object, layer: str, **_: object) -> int:
    """Return the FLOPs of ``call_layer`` as torch counts a matrix product: two per weight value and row."""
    count = 2 * find(layer).width
    for size in rows:
        count *= size
    return int(count)
