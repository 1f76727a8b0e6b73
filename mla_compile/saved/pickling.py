"""Converts compiled calls to bytes: mla_compile's closures, graphs as source code, and Inductor's serialized code.

A file's owner and digest are checked before the file is unpickled, because unpickling runs code.
"""

from __future__ import annotations

import importlib
import io
import pickle
import types
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._dynamo.package import SerializedCode

from mla_compile.errors import ExportError, ModelFileError, brief
from mla_compile.passes.ir.expr import Expr


class SavedGraph:
    """A graph's source, and the values that the source reads. The first call compiles the source."""

    def __init__(self, source: str, names: dict[str, Any], held: dict[str, object]) -> None:
        self._source, self._names = source, names
        for path, value in held.items():
            *owners, last = path.split(".")
            at: Any = self
            for owner in owners:
                at = vars(at).setdefault(owner, types.SimpleNamespace())
            setattr(at, last, value)

    def forward(self, *inputs: object) -> object:
        """Return the graph's outputs."""
        call = vars(self).get("_call")
        if call is None:
            scope = dict(self._names)
            exec(self._source, scope)  # noqa: S102  as torch does with every graph
            call = vars(self)["_call"] = types.MethodType(scope["forward"], self)
        return call(*inputs)

    __call__ = _lazy_forward = forward


def references(model: torch.nn.Module) -> dict[str, object]:
    """Return a dict: reference -> module, parameter or buffer of a model. Files contain only the references."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        found[f"module {path}"] = module
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            found |= {f"{kind} {path} {name}": tensor for name, tensor in held.items() if tensor is not None}
    return found


def pickled(value: object, names: Mapping[int, str]) -> bytes:
    """Pickle ``value``, with references in place of parts of a model. ``names`` maps a part's ``id`` to its reference.

    Raises :class:`ExportError` for a value that cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _CallPickler(file, names).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ExportError(f"compiled code holds what cannot be saved: {brief(error)}") from error
    return file.getvalue()


def unpickled(data: bytes, found: Mapping[str, object]) -> Any:
    """Unpickle a value. ``found`` maps each reference to a part of a model."""
    return _Unpickler(found, io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, found: Mapping[str, object], file: io.BytesIO) -> None:
        super().__init__(file)
        self.found = found

    def persistent_load(self, name: str) -> object:
        if name not in self.found:
            raise ModelFileError(f"the model has no {name}, for which code was compiled")
        return self.found[name]


class _CallPickler(pickle.Pickler):
    """A pickler that also writes nested functions."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self.names = names

    def persistent_id(self, value: object) -> str | None:
        return self.names.get(id(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, fx.GraphModule):
            return SavedGraph, _source_of(value)
        if isinstance(value, Expr):
            name = None if value.node is None else value.node.name
            return _expression, (name, getattr(value.value, "dtype", None), value.op, value.args, dict(value.kwargs))
        if isinstance(value, types.FunctionType):
            serialize = getattr(value, "serialize", None)
            if serialize is not None:
                return _inductor, (pickle.dumps(serialize()),)
            if "<" in value.__qualname__:
                parts = (value.__code__, value.__module__, value.__qualname__, value.__defaults__, value.__closure__)
                return _function, (*parts, value.__kwdefaults__)
        if isinstance(value, types.CodeType):
            return _code, (SerializedCode.from_code_object(value),)
        if isinstance(value, types.CellType):
            return _cell, (value.cell_contents,)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        if isinstance(value, torch._ops.OpOverloadPacket):
            return _operator, tuple(value._qualified_op_name.split("::"))
        return NotImplemented


def _source_of(gm: fx.GraphModule) -> tuple[str, dict[str, object], dict[str, object]]:
    code = gm.graph.python_code("self")
    paths = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    held = {}
    for path in paths:
        value: object = gm
        for name in path.split("."):
            value = getattr(value, name)
        held[path] = value
    return code.src, code.globals, held


def _function(
    code: types.CodeType,
    module: str,
    name: str,
    defaults: tuple[object, ...] | None,
    closure: tuple[types.CellType, ...] | None,
    keywords: dict[str, object] | None,
) -> types.FunctionType:
    made = types.FunctionType(code, vars(importlib.import_module(module)), name, defaults, closure)
    made.__kwdefaults__ = keywords
    return made


def _code(serialized: SerializedCode) -> types.CodeType:
    code: types.CodeType = SerializedCode.to_code_object(serialized)
    return code


def _cell(value: object) -> types.CellType:
    return types.CellType(value)


def _expression(
    name: str | None,
    dtype: torch.dtype | None,
    op: Callable[..., object] | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Expr:
    """Rebuild the expression of a folded weight from the names of weights, without a graph."""
    node: Any = None if name is None else types.SimpleNamespace(name=name)
    value: Any = None if dtype is None else torch.empty(0, dtype=dtype)
    return Expr(value, None, node, op, args, kwargs)


def _operator(*path: str) -> object:
    """Return the operator with this namespace, name and overload, or the packet if no overload is given."""
    return attrgetter(".".join(path))(torch.ops)


def _inductor(data: bytes) -> Callable[..., object]:
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    return deserialize_bundled_cache_entry(pickle.loads(data))
