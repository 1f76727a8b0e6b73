"""Code that saving and loading share: files of a compiled call, and conditions under which a folder is valid."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType

import torch

from mla_compile.core.inner import called_within
from mla_compile.dynamo import entry as entry_of_dynamo
from mla_compile.dynamo.forward import CompiledForward
from mla_compile.errors import InputError
from mla_compile.saved import kind
from mla_compile.saved.entries import Entry
from mla_compile.saved.guards import guards_of_file
from mla_compile.saved.pickling import references, unpickled

NATIVE = "native.so"
REPORT = "report.pickle"


def names(number: int) -> tuple[str, str]:
    """Return the names of the two files of a call."""
    return f"call_{number}.pickle", f"guards_{number}.pickle"


def entry_of(call: bytes, guards: bytes, model: torch.nn.Module) -> Entry:
    """Rebuild a compiled call from its two files."""
    code, modules, values = unpickled(call, references(model))
    scope = {**vars(entry_of_dynamo), **values}
    scope |= {alias: importlib.import_module(name) for alias, name in modules.items()}
    return Entry(partial(guards_of_file, guards, model, code, scope), FunctionType(code, scope, code.co_name, (None,)))


def kind_of(model: torch.nn.Module, options: Mapping[str, object]) -> kind.Kind:
    """Return the conditions under which a folder is valid, except for conditions on source files."""
    return {
        "versions": kind.of_versions(),
        "machine": kind.of_machine(),
        "options": dict(options),
        "model": kind.of_model(model),
    }


def forward_of(model: object) -> CompiledForward:
    """Return the forward that ``optimize`` installed in a module. Raises :class:`InputError` for other modules."""
    forward = vars(model).get("forward") if isinstance(model, torch.nn.Module) else None
    if not isinstance(forward, CompiledForward) or forward.outer is not None:
        raise InputError(f"save() takes a module that optimize() returned, got {type(model).__name__}")
    return forward


def only_whole(model: torch.nn.Module, kind_of_error: type[Exception]) -> None:
    """Make inner models raise ``kind_of_error`` if they are called directly instead of through ``model``."""
    for part in called_within(model):
        if isinstance(forward := vars(part).get("forward"), CompiledForward):
            forward.use(_Refusing(type(part).__name__, type(model).__name__, kind_of_error))


@dataclass(frozen=True)
class _Refusing:
    part: str
    whole: str
    kind_of_error: type[Exception]

    def __call__(self, *_: object) -> object:
        raise self.kind_of_error(
            f"{self.part} was called by itself, and code is saved for calls of {self.whole} alone: save {self.part}"
        )
