"""Stores Dynamo's guards in a file, with references to the modules and tensors of the model.

Dynamo assumes facts about a model (types, flags, hooks, functions, sizes of weights). Loading first checks these facts
on the given model. The restored guards then notice later changes, as under Dynamo. The file describes the arguments of
calls (tokens, caches) without their values.
"""

from __future__ import annotations

import builtins
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.guards import GuardBuilder, GuardManagerWrapper, GuardsState, GuardsStatePickler
from torch._dynamo.package import load_guard_manager
from torch._guards import Guard
from torch.utils import _pytree as pytree

from mla_compile.errors import ModelFileError
from mla_compile.runtime.latent import LatentTensor
from mla_compile.saved.facts import MISSING, told, told_apart
from mla_compile.saved.pickling import references, unpickled

_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_static_indices")
"""Attributes that tell Dynamo which sizes of a tensor are dynamic or static."""


@dataclass(frozen=True)
class GuardsOfCall:
    """The guards of one compiled call, and for each guard a description of the guarded value."""

    state: GuardsState
    guards: list[Guard]
    values: list[str]


class _GuardsPickler(GuardsStatePickler):
    """A pickler that writes parts of the model as references. Like torch's pickler, it omits what no guard reads."""

    def __init__(self, names: Mapping[int, str], *given: Any) -> None:
        super().__init__(*given)
        self.names = names

    def persistent_id(self, value: object) -> str | None:
        return self.names.get(id(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, LatentTensor) and value.recipe is not None:
            return _latent, (value.recipe, value.shown_rows(), value.leaves, value.is_own, _marks(value))
        if isinstance(value, LatentTensor):
            tokens = value.__tensor_flatten__()[1]
            return LatentTensor.__tensor_unflatten__, ({"full": value.expanded()}, tokens)
        if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
            like = (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
            return _empty, (type(value), *like, value.is_inference(), _marks(value))
        return super().reducer_override(value)


def _marks(value: torch.Tensor) -> dict[str, object]:
    return {name: getattr(value, name) for name in _MARKS if hasattr(value, name)}


def _latent(
    recipe: Any,
    rows: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    own: bool,  # noqa: FBT001  pickle passes arguments by position
    marks: dict[str, object],
) -> LatentTensor:
    made = LatentTensor.of(recipe, rows, leaves, own=own)
    vars(made).update(marks)
    return made


def _empty(
    kind: type,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,  # noqa: FBT001  pickle passes arguments by position
    inference: bool,  # noqa: FBT001
    marks: dict[str, object],
) -> torch.Tensor:
    with torch.inference_mode(mode=inference):
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        made = torch.nn.Parameter(made, grad) if kind is torch.nn.Parameter else made.requires_grad_(grad)
    vars(made).update(marks)
    return made


def guards_in_file(state: GuardsState, builder: GuardBuilder, names: Mapping[int, str]) -> bytes:
    """Return the bytes that :func:`guards_of_file` reads. torch calls this function while it builds guards."""
    guards = [replace(guard, stack=None, user_stack=None) for guard in state.output_graph.guards]
    state.output_graph._guards = torch._guards.GuardsSet(torch.utils._ordered_set.OrderedSet(guards))
    values = _values(guards, builder.scope)
    empty, missing = {}, {}
    for leaf in pytree.tree_leaves(state.output_graph.local_scope):
        if id(leaf) in names:
            continue
        if inspect.ismethod(leaf) and id(leaf.__self__) not in builder.guard_tree_values:
            empty[id(leaf.__self__)] = leaf.__self__
        elif id(leaf) not in builder.guard_tree_values:
            missing[id(leaf)] = leaf
    file = io.BytesIO()
    _GuardsPickler(names, builder.guard_tree_values, empty, missing, file).dump(GuardsOfCall(state, guards, values))
    return file.getvalue()


def _values(guards: list[Guard], scope: dict[str, Any]) -> list[str]:
    """Describe the guarded value of each guard."""
    closure, known = dynamo_guards._get_closure_vars(), dict[Any, Any]()
    values = []
    for guard in guards:
        try:
            value = guard.originating_source.get_value(scope, closure, known) if guard.name else None
        except Exception:  # noqa: BLE001  as torch does: many guards state that a value is missing
            values.append(MISSING)
        else:
            values.append(told(value))
    return values


def guards_of_file(
    data: bytes, model: torch.nn.Module, code: CodeType, scope: dict[str, object]
) -> GuardManagerWrapper:
    """Build the guards of a call for ``model``. ``scope`` holds the globals of the compiled ``code``.

    Raises :class:`ModelFileError`, which names the first value that differs from the saved one.
    """
    given: GuardsOfCall = unpickled(data, references(model))
    output, key = given.state.output_graph, given.state.output_graph.name_of_builtins_dict_key_in_fglobals
    if key:
        output.global_scope[key] = scope[key] = vars(builtins)
    scope.update(output.global_scope)
    now = _values(given.guards, {"L": output.local_scope, "G": scope})
    for guard, before, value in zip(given.guards, given.values, now, strict=True):
        if value != before:
            value, before = told_apart(value, before)
            raise ModelFileError(f"{guard.name} is {value}, and was {before} when the code was made")
    return load_guard_manager(given.state, code, scope)
