"""Finds, among the calls that are running, a method of a module that could be compiled with its attention."""

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
    """The frames called from the outermost frame that runs code of ``watches``, outer ones first."""
    found, below, frame = list[FrameType](), 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code in watches:
            below = len(found)
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found[:below][::-1]


def modules_called(frames: list[FrameType]) -> list[nn.Module]:
    """The modules whose calls are among ``frames``."""
    return [one.f_locals["self"] for one in frames if one.f_code is nn.Module._call_impl.__code__]


def step_among(frames: list[FrameType], module: nn.Module) -> str | None:
    """The name of the method of ``module`` among ``frames`` that makes one step, or None.

    This is the outermost of the module's methods below all running loops, because compiling a method that loops over
    steps would unroll the loop. Loops below its innermost method do not count. A generator or coroutine is no step.
    """
    methods = {inspect.unwrap(method).__code__: name for name, method in methods_of(type(module)).items()}
    methods = {code: name for code, name in methods.items() if not is_special(name)}  # Python finds these on the class
    numbers = [n for n, one in enumerate(frames) if one.f_code in methods and _has(one, module)]
    if not numbers:
        return None
    repeated = [n for n, one in enumerate(frames[: numbers[-1] + 1]) if _is_in_a_loop(one)]
    free = (methods[frames[n].f_code] for n in numbers if not repeated or n > repeated[-1])
    name = next(free, None)
    return None if name is None or runs_in_pieces(methods_of(type(module))[name]) else name


def _has(frame: FrameType, module: nn.Module) -> bool:
    """Whether the module is among a frame's variables, by identity: ``==`` would run the variables' own code."""
    return any(value is module for value in frame.f_locals.values())


def _is_in_a_loop(frame: FrameType) -> bool:
    """Whether a backward jump encloses the instruction that the frame is executing."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    targets = ((one.argval, one.offset) for one in dis.get_instructions(frame.f_code) if one.opcode in jumps)
    return any(target <= frame.f_lasti < offset for target, offset in targets)
