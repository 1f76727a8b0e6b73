"""Describes values in words, so that values of different processes can be compared.

Two values have the same description if Dynamo's guards would accept one in place of the other.
"""

from __future__ import annotations

import enum
import hashlib
import types

import torch

MISSING = "missing"
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), slice, range, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
)  # fmt: skip
"""Types whose ``repr`` describes the value completely."""
_MEMOS = ("__slotnames__", "__annotations__", "__annotations_cache__")
"""Attributes that Python adds to a class on demand. For example, copying an object adds ``__slotnames__``."""
_SHOWN = 200
"""How many characters of a description an error shows."""


def told(value: object, depth: int = 3) -> str:
    """Describe a value: a constant by ``repr``, code by digest, a collection by its items, anything else by type.

    ``depth``: how many levels of nested collections are described.
    """
    kind = type(value)
    if isinstance(value, _PLAIN):
        return f"{kind.__name__} {value!r}"
    if isinstance(value, types.FunctionType):
        return f"function {value.__module__}.{value.__qualname__} {digest_of(value.__code__)}"
    if isinstance(value, types.CodeType):
        return f"code {digest_of(value)}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.MethodType):
        return f"method {told(value.__func__)} of {name_of(type(value.__self__))}"
    if isinstance(value, types.BuiltinFunctionType):
        return f"builtin {value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"tensor {name_of(kind)} {value.dtype} {value.device} {value.requires_grad}"
    of = name_of(kind)
    if isinstance(value, dict):
        items = ((key, one) for key, one in value.items() if key not in _MEMOS)
        return f"{of} of {[(told(key, 0), told(one, depth - 1) if depth else '') for key, one in items]}"
    if isinstance(value, (list, tuple)):
        return f"{of} of {[told(one, depth - 1) for one in value] if depth else len(value)}"
    if isinstance(value, (set, frozenset)):
        return f"{of} of {sorted(told(one, 0) for one in value)}"
    return of


def name_of(kind: type) -> str:
    """Return the module and the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def digest_of(code: types.CodeType) -> str:
    """Return a hash of what a function does. The hash is independent of the function's file and lines."""
    digest = hashlib.sha256(code.co_code)
    for const in code.co_consts:
        digest.update((digest_of(const) if isinstance(const, types.CodeType) else told(const)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode())
    return digest.hexdigest()


def told_apart(one: str, other: str) -> tuple[str, str]:
    """Shorten two descriptions for an error. If either is long, only text near the first difference is kept."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    equal = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, equal - _SHOWN // 4)
    return _part(one, start), _part(other, start)


def _part(text: str, start: int) -> str:
    before, behind = "..." if start else "", "..." if len(text) > start + _SHOWN else ""
    return f"{before}{text[start : start + _SHOWN]}{behind}"
