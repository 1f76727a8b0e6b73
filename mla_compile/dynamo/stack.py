"""Finds, on the Python call stack, the method of a module that should be compiled together with its attention."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Collection
from types import CodeType, FrameType

from torch import nn

from mla_compile.core.named import is_special, methods_of
from mla_compile.dynamo.pieces import runs_in_pieces


def frames_below(watches: Collection[CodeType]) -> list[FrameType]:
    """Return the frames called from the outermost frame that runs code of ``watches``, outer frames first."""
    found, below, frame = list[FrameType](), 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code in watches:
            below = len(found)
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found[:below][::-1]


def modules_called(frames: list[FrameType]) -> list[nn.Module]:
    """Return the modules whose calls are among ``frames``."""
    return [one.f_locals["self"] for one in frames if one.f_code is nn.Module._call_impl.__code__]


def step_among(frames: list[FrameType], module: nn.Module) -> str | None:
    """Return the name of the method of ``module`` among ``frames`` that computes one step; None if there is none.

    Compiling a method that loops over steps would unroll the loop. The step is therefore the outermost method of the
    module that is called inside all running loops. Loops in frames below the module's innermost method are ignored. A
    generator or coroutine is never a step.
    """
    methods = {inspect.unwrap(method).__code__: name for name, method in methods_of(type(module)).items()}
    # Python calls special methods on the class.
    methods = {code: name for code, name in methods.items() if not is_special(name)}
    numbers = [n for n, one in enumerate(frames) if one.f_code in methods and _has(one, module)]
    if not numbers:
        return None
    repeated = [n for n, one in enumerate(frames[: numbers[-1] + 1]) if _is_in_a_loop(one)]
    free = (methods[frames[n].f_code] for n in numbers if not repeated or n > repeated[-1])
    name = next(free, None)
    return None if name is None or runs_in_pieces(methods_of(type(module))[name]) else name


def _has(frame: FrameType, module: nn.Module) -> bool:
    """Whether a variable of a frame is the module. ``==`` is not used, because it would run code of the variables."""
    return any(value is module for value in frame.f_locals.values())


def _is_in_a_loop(frame: FrameType) -> bool:
    """Whether a frame is executing an instruction inside a loop, which ends with a backward jump."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    targets = ((one.argval, one.offset) for one in dis.get_instructions(frame.f_code) if one.opcode in jumps)
    return any(target <= frame.f_lasti < offset for target, offset in targets)
