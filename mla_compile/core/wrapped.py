"""Copies modules without the wrappers that libraries put around forwards and that Dynamo cannot trace.

Two kinds of wrappers are removed. The first kind only places tensors (accelerate's hooks, the offloading of
compressed-tensors). If everything is on one device already, the copy runs the forward inside the wrapper. The second
kind computes (roundings of compressed-tensors, functions under ``torch.compiler.disable``). If a layer of rows (a
module with ``in_features`` and ``out_features``) has such a wrapper, the copy calls the layer as one operator
(:mod:`mla_compile.core.layers`).

The original modules are not changed. A copy shares the original's dicts of tensors and hooks, so that later changes
affect the original and the copy.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule

from mla_compile.core.layers import CalledLayer, is_of_library
from mla_compile.core.modules import Added, shallow

_CLOSED = (fx.GraphModule, torch.jit.ScriptModule, OptimizedModule)
Function = Callable[..., Any]
IsKnown = Callable[[nn.Module, Function], bool]
"""Takes a layer and its forward, and returns whether Dynamo is known to be unable to trace this forward."""
IsCaptured = Callable[[Function, Tensor], bool]
"""Takes a layer's forward and a row, and returns whether the call is captured as one graph."""


class OwnForward(Added):
    """The forward of a module that is already a copy."""

    def below(self, forward: Function | None) -> None:
        """Set the function that this forward replaces. None means the forward of the module's class."""
        raise NotImplementedError

    @property
    def __func__(self) -> Function:
        """The forward as a function of the module and its arguments, for libraries that expect a bound method."""

        def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
            return self(*args, **kwargs)  # type: ignore[operator]

        forward.own = self  # type: ignore[attr-defined]
        return forward


@dataclass
class Unwrapped:
    """The result of unwrapping a model.

    Attributes:
        device: the device of all tensors, if wrappers that place tensors were removed. Inputs have to be there.
        left: description of a wrapper that remains and that Dynamo cannot trace -> how many modules have the wrapper.
    """

    device: torch.device | None = None
    left: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Count a wrapper that remains."""
        self.left[what] = self.left.get(what, 0) + 1


@dataclass(frozen=True)
class _Placing:
    """A wrapper that places tensors.

    Attributes:
        inner: the forward inside the wrapper, with the module as first argument; None if unknown.
        devices: the devices to or from which the wrapper moves tensors.
        library: the library that installed the wrapper.
        moves: a description of further effects; empty if the wrapper only places everything on one device.
        tensors: the dicts ``_parameters`` and ``_buffers``, if the library keeps the tensors in other containers.
    """

    inner: Function | None
    devices: frozenset[str]
    library: str
    moves: str = ""
    tensors: Mapping[str, dict[str, object]] = field(default_factory=dict)


def unwrap(root: nn.Module, known: IsKnown, captured: IsCaptured) -> Unwrapped:
    """Replace wrapped modules below ``root`` by unwrapped copies. ``root`` must itself be a copy.

    ``root`` gets a new dict of submodules. Wrappers around ``root`` itself are removed if they only place tensors.
    """
    found = Unwrapped()
    placing = {m: w for m in root.modules() if (w := _placing(m)) is not None}
    if placing and not _moves_nothing(placing, found):
        return found
    copier = _Copier(placing, known, captured, found)
    if placing or any(copier.is_wrapped(m) for m in root.modules()):
        copier.in_place(root)
    return found


def _moves_nothing(placing: Mapping[nn.Module, _Placing], found: Unwrapped) -> bool:
    """Whether all tensors are already on the one device to which the wrappers move tensors.

    If so, record the device in ``found``. Otherwise, record what the wrappers do.
    """
    tensors = [t for m in placing for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    devices = {d for wrapper in placing.values() for d in wrapper.devices} | {_name(t.device) for t in tensors}
    busy = [w for w in placing.values() if w.moves]
    if len(devices) == 1 and not busy:
        found.device = torch.device(devices.pop())
        return True
    for wrapper in busy or placing.values():
        what = wrapper.moves or f"moves tensors between devices ({', '.join(sorted(devices))})"
        found.note(f"{wrapper.library} {what}")
    return False


def _placing(module: nn.Module) -> _Placing | None:
    own = vars(module)
    if "_hf_hook" in own and "_old_forward" in own:
        return _of_accelerate(own["_hf_hook"], own["_old_forward"])
    if "_original_forward_func" in own and hasattr(own["_parameters"], "offloaded_values"):
        return _of_compressed_tensors(own)
    return None


def _of_accelerate(hook: Any, below: object) -> _Placing:
    """Return the wrapper that ``add_hook_to_module`` installed: hooks before and after the module's former forward."""
    devices, moves = set[str](), ""
    for one in getattr(hook, "hooks", (hook,)):
        kind = type(one).__name__
        if kind != "AlignDevicesHook":
            moves = f"runs its {kind}"
        elif one.offload:
            moves = "loads weights before each call and drops them after it (offload)"
        elif one.execution_device is not None:
            devices.add(_name(one.execution_device))
    return _Placing(getattr(below, "__func__", None), frozenset(devices), "accelerate", moves)


def _of_compressed_tensors(own: Mapping[str, Any]) -> _Placing:
    """Return the wrapper that ``offload_module`` installed.

    The wrapper moves tensors to one device at each read, and inputs at each call of the module.
    """
    caches = {kind: own[kind] for kind in ("_parameters", "_buffers")}
    places = {_name(place) for c in caches.values() for place in (c.onload_device, c.offload_device)}
    tensors = {kind: cache.offloaded_values for kind, cache in caches.items()}
    return _Placing(own["_original_forward_func"], frozenset(places), "compressed-tensors", "", tensors)


def _name(place: Any) -> str:
    """Return the name of a device. Devices other than the CPU get an index, 0 by default. "disk" stays as it is."""
    if place == "disk":
        return "disk"
    device = torch.device(place)
    return (
        str(torch.device(device.type, 0 if device.index is None else device.index)) if device.type != "cpu" else "cpu"
    )


class _Copier:
    """Makes unwrapped copies of modules, at most one of each module."""

    def __init__(
        self, placing: Mapping[nn.Module, _Placing], known: IsKnown, captured: IsCaptured, found: Unwrapped
    ) -> None:
        self.placing = placing
        self.known = known
        self.captured = captured
        self.found = found
        self.copies: dict[nn.Module, nn.Module] = {}
        self.followed: dict[object, bool] = {}

    def is_wrapped(self, module: nn.Module) -> bool:
        """Whether Dynamo may be unable to trace the forward of a module."""
        replaced = vars(module).get("forward")
        if replaced is None:
            forward = type(module).forward
            own = _of_library(module)
            return (
                _is_disabled(forward) or self.known(module, forward) or bool(own and not self._follows(module, forward))
            )
        return not isinstance(replaced, (OwnForward, _WrappedCall))

    def in_place(self, module: nn.Module) -> None:
        """Remove the wrappers of a module that is already a copy, and replace modules below it by unwrapped copies."""
        forward, wrapper = vars(module).get("forward"), self.placing.get(module)
        if wrapper is not None:
            own = getattr(wrapper.inner, "own", None)
            if isinstance(own, OwnForward):  # the wrapper was installed on the copy itself
                vars(module)["forward"] = own
            elif isinstance(forward, OwnForward):
                forward.below(self._bound(module, wrapper.inner))
            vars(module).update(wrapper.tensors)
        children = self._children(module)
        if children is not None:
            vars(module)["_modules"] = children

    def copy(self, module: nn.Module) -> nn.Module:
        """Return the module, or a copy of it that Dynamo can trace."""
        if module not in self.copies:
            self.copies[module] = module  # ends the recursion if the module is its own descendant
            self.copies[module] = self._copied(module)
        return self.copies[module]

    def _children(self, module: nn.Module) -> dict[str, nn.Module | None] | None:
        """Return the submodules or their copies by name, or None if no submodule needs a copy."""
        new = {name: None if child is None else self.copy(child) for name, child in module._modules.items()}
        return new if any(child is not module._modules[name] for name, child in new.items()) else None

    def _copied(self, module: nn.Module) -> nn.Module:
        forward = vars(module).get("forward")
        if isinstance(forward, OwnForward):
            self.in_place(module)
            return module
        if isinstance(module, _CLOSED) or isinstance(forward, _WrappedCall):
            return module
        wrapper = self.placing.get(module)
        inner = wrapper.inner if wrapper is not None else _function(module)
        if not self._follows(module, inner):
            called = self._called(module, inner, wrapper)
            if called is None:
                self.found.note(_who(module, inner or forward))
            return called or module
        if inner is None:  # the forward may hold a reference to the module, so the module is not copied
            return module
        children = self._children(module)
        if wrapper is None and children is None:
            return module
        made = _bare(module, wrapper)
        if children is not None:
            vars(made)["_modules"] = children
        if (bound := self._bound(made, inner)) is not None:
            vars(made)["forward"] = bound
        return made

    @staticmethod
    def _bound(module: nn.Module, inner: Function | None) -> Function | None:
        return None if inner is None or inner is type(module).forward else types.MethodType(inner, module)

    def _follows(self, module: nn.Module, inner: Function | None) -> bool:
        """Whether Dynamo can trace the forward of a module. Each function is tried once."""
        forward = vars(module).get("forward", inner) if inner is None else inner
        if _is_disabled(forward):
            return False
        if inner is not None and self.known(module, inner):
            return False
        own = _of_library(module)
        # Only layers of rows are tried here. The trace of the whole model decides about all other modules.
        if (inner is type(module).forward and not own) or (rows := _one_row(module)) is None or rows.is_meta:
            return True
        key = type(module), getattr(forward, "__code__", forward), own
        if key not in self.followed:
            self.followed[key] = self.captured(_method(module, inner), rows)
        return self.followed[key]

    def _called(self, module: nn.Module, inner: Function | None, wrapper: _Placing | None) -> nn.Module | None:
        """Return a copy that calls ``module`` as one operator, or None if it is not known to be a layer of rows."""
        width = _width(module)
        if width is None or module._modules:
            return None
        if (inner is None or not self.known(module, inner)) and not _maps_a_row(module, inner, width):
            return None
        made = _bare(module, wrapper)
        vars(made)["forward"] = _WrappedCall(CalledLayer(module, made, inner, width))
        return made


class _WrappedCall:
    """The forward of a copy whose original is called as one operator."""

    def __init__(self, called: CalledLayer) -> None:
        self.called = called

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        """Call the operator while Dynamo traces without gradients and autocast. Otherwise, call the original."""
        if len(args) != 1 or kwargs or not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return self.called.layer.forward(*args, **kwargs)
        (rows,) = args
        if (torch.is_grad_enabled() and rows.requires_grad) or torch.is_autocast_enabled(rows.device.type):
            return self.called.layer.forward(rows)
        return torch.ops.mla_compile.call_layer(rows, self.called.tensors, self.called.name)


def _bare(module: nn.Module, wrapper: _Placing | None) -> nn.Module:
    """Return a copy without the attributes that mark a wrapper. The copy shares the dicts of tensors and hooks."""
    made = shallow(module)
    for name in ("forward", "_hf_hook", "_old_forward", "_original_forward_func"):
        vars(made).pop(name, None)
    if wrapper is not None:
        vars(made).update(wrapper.tensors)
    return made


def _function(module: nn.Module) -> Function | None:
    """Return the module's current forward as a function of the module and its arguments.

    Return None if the forward is not a method of the module.
    """
    own = vars(module).get("forward")
    if own is None:
        forward: Function = type(module).forward
        return forward
    return own.__func__ if isinstance(own, types.MethodType) and own.__self__ is module else None


def _method(module: nn.Module, inner: Function | None) -> Function:
    forward: Function = module.forward if inner is None else types.MethodType(inner, module)
    return forward


def _width(module: nn.Module) -> int | None:
    """Return the number of features that a layer of rows returns, or None for any other module."""
    width = getattr(module, "out_features", None)
    return width if isinstance(width, int) and isinstance(getattr(module, "in_features", None), int) else None


def _one_row(module: nn.Module) -> Tensor | None:
    """Return a row of zeros for a layer of rows, or None for any other module or an unknown dtype of rows."""
    dtypes = [t.dtype for t in module.parameters(recurse=False) if t.is_floating_point() and t.dtype.itemsize > 1]
    if _width(module) is None or not dtypes:
        return None
    device = next(module.parameters(recurse=False)).device
    return torch.zeros(1, int(module.in_features), dtype=dtypes[0], device=device)  # type: ignore[arg-type]


def _maps_a_row(module: nn.Module, inner: Function | None, width: int) -> bool:
    """Whether a trial call maps one row to ``width`` features of the same dtype."""
    rows = _one_row(module)
    if rows is None:
        return False
    try:
        with torch.no_grad():
            y = _method(module, inner)(rows)
    except Exception:  # noqa: BLE001  user code may raise anything, and is then no layer of rows
        return False
    return isinstance(y, Tensor) and y.dtype == rows.dtype and y.shape == (1, width)


def _of_library(module: nn.Module) -> tuple[type, ...]:
    """Return the library-defined classes of a module's tensors, which may decide whether Dynamo can trace it."""
    return tuple(type(t) for t in (*module._parameters.values(), *module._buffers.values()) if is_of_library(t))


def _is_disabled(function: object) -> bool:
    """Whether ``torch.compiler.disable`` wraps a function or method."""
    return bool(getattr(getattr(function, "__func__", function), "_torchdynamo_disable", False))


def _who(module: nn.Module, forward: object) -> str:
    """Describe a wrapper by its code's Python module, because ``functools.wraps`` changes the wrapper's own names."""
    function = getattr(getattr(forward, "__func__", forward), "_torchdynamo_orig_callable", forward)
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", {})
    written = str(names.get("__name__") or getattr(function, "__module__", "an unknown module"))
    how = "is under torch.compiler.disable" if _is_disabled(forward) else "is wrapped"
    return f"the forward of {type(module).__name__} {how} (by {written})"
