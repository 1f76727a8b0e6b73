"""Imports names of a package on first use (PEP 562), so that a program loads only what it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, owners: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    ``owners`` maps each name to the module that defines the name. A submodule's name is mapped to the submodule.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        owner = import_module(owners[name])
        namespace[name] = owner if owner.__name__ == f"{package}.{name}" else getattr(owner, name)
        return namespace[name]

    def names() -> list[str]:
        return sorted({*namespace.get("__all__", namespace), *owners})

    return get, names
