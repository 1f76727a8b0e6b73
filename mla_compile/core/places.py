"""Finds where a model holds its tensors, and which of these places are the only way to reach a tensor."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.core.reached import is_a, reached

_REGISTERED = ("_modules", "_parameters", "_buffers")

Holder: TypeAlias = "dict[Any, Any] | list[Any]"
Link: TypeAlias = "tuple[Holder, Any, Any]"
"""A container, a key in the container, and the key's value."""


@dataclass(frozen=True)
class Place:
    """A buffer or plain attribute of a module, or an item of a list or dict in such an attribute.

    Attributes:
        modules: the names of the submodules on the path to the module.
        keys: the name of the attribute, then the keys in nested lists and dicts.
    """

    modules: tuple[str, ...]
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return ".".join((*self.modules, str(self.keys[0]))) + "".join(f"[{key!r}]" for key in self.keys[1:])

    def links(self, model: nn.Module) -> list[Link]:
        """Return the links from the model to the tensor, which is the value of the last link.

        If an item of the path is missing, the links end at this item, and its value is None.
        """
        links: list[Link] = []
        owner = model
        for name in self.modules:
            module = owner._modules.get(name)
            links.append((owner._modules, name, module))
            if module is None:
                return links
            owner = module
        held: Any = owner._buffers if self.keys[0] in owner._buffers else vars(owner)
        for key in self.keys:
            links.append((held, key, held := item(held, key)))
            if held is None:
                break
        return links

    def tensor(self, model: nn.Module) -> Any:
        """Return the tensor at this place, or ``None``."""
        return self.links(model)[-1][2]


def item(holder: Holder, key: Any) -> Any:
    """Return ``holder[key]``, or ``None`` if there is no such item."""
    try:
        return holder[key]
    except (KeyError, IndexError, TypeError):
        return None


def tensors_of(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield a place and a tensor for each buffer, and for each tensor in a plain attribute."""
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        for key, value in module._buffers.items():
            if value is not None:
                yield Place(path, (key,)), value
        for key, value in vars(module).items():
            if key not in _REGISTERED:
                yield from ((Place(path, (key, *keys)), tensor) for keys, tensor in _items(value))


def _items(value: object) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """Yield the tensors in nested lists and dicts, each with the keys that lead to it."""
    left: list[tuple[tuple[object, ...], object]] = [((), value)]
    seen: set[int] = set()
    while left:
        keys, one = left.pop()
        if is_a(one, torch.Tensor):
            yield keys, one
        elif type(one) in (list, dict) and id(one) not in seen:
            seen.add(id(one))
            pairs: Iterable[tuple[object, object]] = one.items() if isinstance(one, dict) else enumerate(one)  # type: ignore[arg-type]
            left += [((*keys, key), part) for key, part in pairs]


def paths_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return a dict: ``id`` of a tensor -> attribute path in the model. Items of lists and dicts are left out."""
    own = {(*place.modules, *place.keys): tensor for place, tensor in tensors_of(model) if len(place.keys) == 1}
    named = {tuple(name.split(".")): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {id(tensor): path for path, tensor in (own | named).items()}


def at_path(model: nn.Module, path: Iterable[str]) -> Any:
    """Return the object at the end of an attribute path."""
    return functools.reduce(getattr, path, model)


def only_here(model: nn.Module, places: Iterable[Place]) -> set[Place]:
    """Return the places that are the model's only way to reach a tensor.

    The tensor at such a place spans its whole storage. Each module on the path occurs once in the model. No other path
    leads to these modules or to the storage. The check follows attributes, lists, dicts, closures, bound methods, hooks
    and other objects.
    """
    modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    memory: Counter[int] = Counter()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            memory.update(_memory(tensor))
        for key, value in vars(module).items():
            for held in () if key in _REGISTERED else reached([value]):
                if is_a(held, nn.Module):
                    modules.update(map(id, held.modules()))
                memory.update(_memory(held))
    return {place for place in places if _is_only(model, place, modules, memory)}


def _is_only(model: nn.Module, place: Place, modules: Counter[int], memory: Counter[int]) -> bool:
    *way, (_, _, tensor) = place.links(model)
    (storage,) = _memory(tensor)
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and memory[storage] == 1 and all(modules[id(held)] == 1 for *_, held in way[: len(place.modules)])


def _memory(value: object) -> tuple[int, ...]:
    """Return keys of a tensor's memory. Tensors that share memory have a common key."""
    if not is_a(value, torch.Tensor):
        return ()
    if is_traceable_wrapper_subclass(value):  # two wrapper tensors may share inner tensors
        names, _ = value.__tensor_flatten__()
        return tuple(memory for name in names for memory in _memory(getattr(value, name)))
    # Sparse and lazy tensors have no memory that a view could share.
    if value.layout is not torch.strided or is_lazy(value):
        return (id(value),)
    return (value.untyped_storage()._cdata,)
