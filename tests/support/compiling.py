"""Compiling a model with our backend, and seeing whether it was left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options


def compiler(**options: Any) -> Compiler:
    return Compiler(Options.parse({"codegen": "eager", "lowering": "aten", **options}))


def compiled(model: nn.Module, backend: Compiler, **settings: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **settings)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a user could see changed: the object's own attributes and the values of its tensors."""
    return {"own": dict(vars(model)), "values": {k: v.clone() for k, v in model.state_dict().items()}}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    assert vars(model) == before["own"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before["values"][name])


class CountedWithin(_FlopCounterMode):
    """Counts for a ``FlopCounterMode`` in what Dynamo compiled, which torch's own mode leaves uncompiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def flops_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The FLOPs of a call, of compiled code where it is compiled (with ``codegen="eager"``)."""
    with CountedWithin(counter := FlopCounterMode(display=False)):
        call(*args, **kwargs)
    return counter.get_total_flops()
