"""Records what Dynamo compiles for the calls of a model."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType

import torch
from torch._dynamo import guards as dynamo_guards

from mla_compile.saved.guards import guards_in_file
from mla_compile.saved.instead import instead

_SERIALIZABLE = {
    "strict_autograd_cache": True,
    "bypass_autograd_cache_key": True,
    "bundled_autograd_cache": True,
    "force_non_lazy_backward_lowering": True,
    "force_autograd_cache": True,
}
"""The settings of torch's own ``aot_compile``, under which Inductor's code can be saved."""


@dataclass
class RecordedCall:
    """One compiled call.

    Attributes:
        code: Dynamo's bytecode, which unpacks the entry's arguments, calls graphs, and assembles the model's result.
        guards: the conditions under which the code may run, as :func:`guards_in_file` writes them.
        modules: name of a global that the code reads -> name of the module in the global.
        values: the other globals that the code reads, mainly compiled graphs.
    """

    code: CodeType
    guards: bytes
    modules: dict[str, str]
    values: dict[str, object]


class Recording:
    """The ``package`` argument of Dynamo, which receives everything that Dynamo compiles for one function.

    Attributes:
        names: ``id`` of a module, parameter or buffer of the model -> the reference in a file.
        compiled: the calls, in the order of compilation.
        traced: the functions that were traced.
        problem: why the calls cannot be saved, or None.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self.compiled: list[RecordedCall] = []
        self.traced: set[CodeType] = set()
        self.problem: str | None = None
        self._function: FunctionType | None = None
        self._code: CodeType | None = None
        self._modules: dict[str, str] = {}
        self._graphs: dict[str, Callable[..., object]] = {}

    def begin(self, function: FunctionType) -> None:
        """Set the function whose calls are recorded."""
        self._function = function

    # Dynamo calls the following methods.

    def is_initialized(self) -> bool:
        """Return True, because there is nothing to initialize."""
        return True

    @contextmanager
    def code_context(self, code: CodeType) -> Iterator[None]:
        """Let one compilation generate code and guards that can be saved."""
        self._code, self._modules, self._graphs = code, {}, {}
        with ExitStack() as stack:
            write = partial(guards_in_file, names=self.names)
            stack.enter_context(instead(dynamo_guards, "pickle_guards_state", write))
            checks = dynamo_guards.CheckFunctionManager
            stack.enter_context(instead(checks, "UNSUPPORTED_SERIALIZATION_GUARD_TYPES", ()))
            stack.enter_context(torch._dynamo.config.patch(strict_precompile=True))
            stack.enter_context(torch._functorch.config.patch(_SERIALIZABLE))
            yield

    def add_guarded_code(self, guards: bytes, code: CodeType) -> None:
        """Record a call that was compiled.

        Code of functions that guards call (for attributes of mla_compile's tensors) is ignored, because it may run
        uncompiled. Code after a graph break is reported to :meth:`add_resume_function` instead.
        """
        assert self._function is not None
        if self._code is not self._function.__code__:
            return
        read, known = globals_of(code) - self._modules.keys(), {**self._function.__globals__, **self._graphs}
        values = {name: known[name] for name in read if name in known and not name.startswith("__builtins_dict__")}
        self.compiled.append(RecordedCall(code, guards, self._modules, values))

    def add_backend_id(self, name: str, call: Callable[..., object] | None = None) -> None:
        """Record a compiled graph. The code calls the graph as the global ``name``."""
        if call is not None:
            self._graphs[name] = call

    def add_import_source(self, alias: str, module: str) -> None:
        """Record a module that is a global of the code."""
        self._modules[alias] = module

    def add_inlined_source(self, codes: list[CodeType]) -> None:
        """Record functions that were traced."""
        self.traced.update(codes)

    def add_resume_function(self, code: CodeType, *_: object) -> None:
        """Note that the graph breaks, so that the call cannot be saved."""
        self._cannot(f"the graph breaks in {code.co_name} ({code.co_filename}:{code.co_firstlineno})")

    def update_device_type(self, _: object) -> None:
        """Do nothing: the device is not recorded."""

    def bypass_current_entry(self) -> None:
        """Note that torch cannot save the call."""
        self._cannot("torch cannot save what it assumed of the model")

    def _cannot(self, why: str) -> None:
        self.problem = self.problem or why


def globals_of(code: CodeType) -> set[str]:
    """Return the names of the globals that a function and its nested functions read."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(globals_of(const) for const in code.co_consts if isinstance(const, CodeType)))
