"""The function through which a module's forward is compiled."""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.comptime import ComptimeContext, comptime

from mla_compile.dynamo.fakes import remember_results
from mla_compile.dynamo.lines import remember_lines
from mla_compile.dynamo.names import read_names
from mla_compile.dynamo.settling import sizes_so_far
from mla_compile.dynamo.sizes import begin_apart, begin_with_one

_numbers = itertools.count()


def compiled_entry(compiler: Callable[..., object], package: Any = None, **settings: Any) -> Callable[..., object]:
    """Return a compiled ``entry(module, args, kwargs)`` that runs the forward of the module's class.

    ``compiler``: a backend. ``package``: an object like torch's ``CompilePackage``, in which Dynamo records everything
    that is compiled.

    Dynamo counts recompilations per code object. All models of a library may run through one code object (a decorator's
    wrapper). The third model would then reach the limit and run uncompiled, so each entry gets its own code object. In
    torch 2.13 and later, functions called after a graph break are counted per entry, too.
    """

    def entry(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], forward: Any = None) -> object:
        comptime(_begin)
        return type(module).forward(module, *args, **kwargs) if forward is None else forward(*args, **kwargs)

    # A copy of a code object equals the original, and would be the same key of a dict. Therefore its name is changed.
    code = entry.__code__.replace(co_name=f"forward_{next(_numbers)}")
    own = types.FunctionType(code, entry.__globals__, code.co_name, entry.__defaults__)
    # The entry's compiled graphs refer to the entry through C, in a cycle that the garbage collector does not see.
    weakref.finalize(own, reset_code, code).atexit = False
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        settings["isolate_recompiles"] = True
    if package is not None:
        package.begin(own)
        settings["package"] = package
    settings["nopython"] = settings.pop("fullgraph", False)
    # torch.compile() is not used here: if any thread is inside torch.export, it returns an uncompiled function, for
    # good.
    compiled: Callable[..., object] = torch._dynamo.optimize(compiler, **settings)(own)
    return compiled


def _begin(ctx: ComptimeContext) -> None:
    history = sizes_so_far()
    if history is None:
        begin_with_one(ctx)
    else:
        begin_apart(ctx, history)
    output = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    remember_results(output)
    remember_lines(output)
    read_names(output)
