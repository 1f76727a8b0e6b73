"""Where a model holds its tensors, and which of them nothing else in the model can reach."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_REGISTERED = ("_modules", "_parameters", "_buffers")
_MANY = 1_000_000


@dataclass(frozen=True)
class Place:
    """A buffer or plain attribute of a module: the names of the submodules that lead to it, and its own."""

    modules: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.modules, self.name))

    def holder(self, model: nn.Module) -> dict[str, Any]:
        """The dict that has the tensor under its name."""
        owner = model.get_submodule(".".join(self.modules))
        return owner._buffers if self.name in owner._buffers else vars(owner)

    def tensor(self, model: nn.Module) -> Any:
        """What is there; ``None`` where nothing is, or no longer."""
        try:
            return self.holder(model).get(self.name)
        except AttributeError:
            return None


def tensors_of(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every buffer and every tensor that is a plain attribute of a module, at each place where it is found."""
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        for key, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield Place(path, key), value


def paths_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """The attributes that lead to each tensor of a model, also to those that a tensor subclass is made of, by id."""
    found: dict[int, tuple[str, ...]] = {}

    def add(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
        found.setdefault(id(tensor), path)
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, name), (*path, name))

    for name, parameter in model.named_parameters(remove_duplicate=False):
        add(parameter, tuple(name.split(".")))
    for place, tensor in tensors_of(model):
        add(tensor, (*place.modules, place.name))
    return found


def at_path(model: nn.Module, path: Iterable[str]) -> Any:
    """What the attributes of ``path`` lead to."""
    return functools.reduce(getattr, path, model)


def only_here(model: nn.Module, places: Iterable[Place]) -> set[Place]:
    """Those of ``places`` that code of the model can only reach by that place.

    Their modules are found once in the model, and no attribute of a module leads to one of them, or to the memory of
    the tensor, in another way: through a list, a dict, a closure, a bound method, a hook, another object.
    """
    modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    memory: Counter[int] = Counter()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            memory.update(_memory(tensor))
        for key, value in vars(module).items():
            for held in () if key in _REGISTERED else _reached(value):
                if isinstance(held, nn.Module):
                    modules[id(held)] += 1
                memory.update(_memory(held))
    return {place for place in places if _is_only(model, place, modules, memory)}


def _is_only(model: nn.Module, place: Place, modules: Counter[int], memory: Counter[int]) -> bool:
    tensor, owner, way = place.tensor(model), model, []
    for name in place.modules:
        owner = owner._modules[name]  # type: ignore[assignment]  # a module, as there is a tensor in it
        way.append(owner)
    (storage,) = _memory(tensor)
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and memory[storage] == 1 and all(modules[id(module)] == 1 for module in way)


def _memory(value: object) -> tuple[int, ...]:
    """What tells whether two tensors share memory."""
    if not isinstance(value, torch.Tensor):
        return ()
    return (id(value),) if is_traceable_wrapper_subclass(value) else (value.untyped_storage()._cdata,)


_OPAQUE = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType, types.FrameType,
    types.BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip


def _reached(value: object) -> Iterator[object]:
    """All modules and tensors that an object leads to, but not what those hold in turn."""
    seen: dict[int, object] = {}
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, _OPAQUE) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, (nn.Module, torch.Tensor)):
            yield one
        elif isinstance(one, weakref.ReferenceType):
            left.append(one())
        elif isinstance(one, types.FunctionType):  # not its module, which may hold anything
            left += [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        elif len(seen) < _MANY:
            left += gc.get_referents(one)
