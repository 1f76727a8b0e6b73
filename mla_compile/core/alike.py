"""Computes structural keys of values. Calls with equal keys compute the same function of their tensor arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

PLAIN = (type(None), int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of constants that can be compared by ``==``."""


def known_of(value: object, *, begins: bool = True) -> Hashable:
    """Return the key of a value, such as a tensor, a number, or a list of these.

    A tensor's key contains the class, dtype, device, flags, sizes and strides. ``begins`` adds the storage offset.
    """
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        numbers = (*value.shape, None, *value.stride()) if strided else ()
        offset = (value.storage_offset(),) if strided and begins else ()
        lies = (value.device, value.layout, value.requires_grad, value.is_conj(), value.is_neg())
        return type(value), value.dtype, lies, tuple(map(number_of, (*numbers, *offset)))
    if isinstance(value, (tuple, list)):
        return tuple(known_of(one, begins=begins) for one in value)
    return number_of(value)


def each(value: object, read: Callable[[object], Hashable]) -> Hashable:
    """Return the key of nested lists, tuples, dicts and slices. The key of each leaf is ``read(leaf)``."""
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(each(one, read) for one in value)
    if isinstance(value, dict):
        return "dict", *((key, each(one, read)) for key, one in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", each((value.start, value.stop, value.step), read)
    return read(value)


def constant_of(value: object) -> Hashable:
    """Return the key of a constant.

    The keys of 1, 1.0 and True differ, and the key of NaN equals itself. Numbers and constants of the types in
    :data:`PLAIN` are compared by type and value, all other objects by identity.
    """
    if isinstance(value, (float, complex)):
        return type(value), str(value)
    return (type(value), value) if isinstance(value, PLAIN) else Itself(value)


class Itself:
    """The key of one object, equal only to other keys of the same object.

    It keeps the object alive, so that no other object gets the same ``id``.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def number_of(value: object) -> Hashable:
    """Return the key of a number. The key of a symbolic number contains the symbolic expression."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        # In a tuple, because SymPy cannot compare a bare expression with a tuple that contains a type.
        return constant_of(int(expression)) if expression.is_Integer else ("expression", expression)
    return constant_of(value)
