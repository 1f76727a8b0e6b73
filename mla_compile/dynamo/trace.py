"""Traces a module's forward for its report. The trace uses copies, so that no tensor of the user is written to.

The copies are fake tensors, so that nothing is computed. If the trace needs values, the copies are real.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from mla_compile.core.modules import shallow
from mla_compile.core.places import Place, tensors_of
from mla_compile.core.tracing import one_at_a_time
from mla_compile.core.wrapped import OwnForward, Unwrapped
from mla_compile.dynamo.compiler import Compiler
from mla_compile.dynamo.entry import compiled_entry
from mla_compile.dynamo.finishing import UnfinishedError
from mla_compile.dynamo.outside import breaks, broken_since
from mla_compile.dynamo.wrappers import take_off
from mla_compile.errors import CaptureError, InputError, MlaCompileError, brief, first_line, nearest
from mla_compile.options import Options
from mla_compile.report.report import Report
from mla_compile.runtime.own_buffers import BuffersInTrace, KeptBuffer, empty_buffers

CallArguments = tuple[torch.nn.Module, Sequence[object], Mapping[str, object]]
"""A module, and the positional and keyword arguments of its forward."""
Copies = Callable[[CallArguments], AbstractContextManager[CallArguments]]


class PassFailedError(CaptureError):
    """A pass failed on a traced graph, which is a bug of this library."""


def explain_module(
    module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], options: Options
) -> Report:
    """Return the report on one forward.

    Raises :class:`InputError` if the inputs do not fit, and :class:`CaptureError` if tracing fails.
    """
    return trace(module, args, kwargs, options, empty_buffers(module, dict(tensors_of(module)))).report()


@dataclass(frozen=True)
class Trace:
    """One traced forward, in one or several graphs."""

    compiler: Compiler
    breaks: tuple[str, ...]

    @property
    def kept(self) -> list[KeptBuffer]:
        """The buffers of the module that can be kept as rows. Raises :class:`PassFailedError`, like :meth:`check`."""
        self.check()
        return [] if self.compiler.buffers is None else self.compiler.buffers.kept

    def check(self) -> None:
        """Raise :class:`PassFailedError` if a pass failed on one of the graphs."""
        for failure in self.compiler.failures:
            if not isinstance(failure, MlaCompileError):
                raise PassFailedError(f"{type(failure).__name__}: {failure}") from failure

    def report(self) -> Report:
        """Return the report on the attentions of the traced forward."""
        report = Report.merged(self.compiler.reports)
        problems = tuple(f"a graph could not be examined: {failure}" for failure in self.compiler.failures)
        # An attention that a break cuts in two, or that runs in a frame that Dynamo skips, is not in any graph. It is
        # therefore missing from the sites.
        broken = tuple(f"Dynamo broke the graph: {reason}" for reason in self.breaks)
        return replace(report, messages=report.messages + problems + broken)


@one_at_a_time()
def trace(
    module: torch.nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Options,
    empty: Collection[Place],
) -> Trace:
    """Trace one forward. The buffers at ``empty`` hold zeros. Raises the same errors as :func:`explain_module`."""
    module, wrapped = _unwrapped(module)
    try:
        inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except TypeError as error:
        hint = "".join(nearest(name, Options.names()) for name in kwargs)
        raise InputError(f"the inputs do not fit {type(module).__name__}.forward: {error}{hint}") from error
    attempts = [_fake_copies] if _has_meta(module) else [_fake_copies, _real_copies]
    for copies in attempts:
        before = breaks()
        try:
            with copies((module, args, kwargs)) as copied, torch.no_grad():
                compiler = Compiler(options, explain_only=True, buffers=BuffersInTrace(copied[0], empty))
                compiler.wrapped = wrapped
                compiler.finishing.allowed = copies is not _real_copies
                compiled_entry(compiler)(*copied)
                if compiler.finishing.happened:
                    compiled_entry(compiler)(*copied)
        except Exception as error:  # the user's model, or Dynamo in it, may raise anything
            if copies is _real_copies and isinstance(getattr(error, "inner_exception", error), UnfinishedError):
                attempts.append(_own_copies)
            # The trace may need values (for a branch or an index): try again with real copies, unless there are meta
            # tensors.
            if copies is not attempts[-1]:
                continue
            if isinstance(error, CaptureError):
                raise
            raise _why_not((module, args, kwargs), copies, error) from error
        break
    done = Trace(compiler, broken_since(before))
    if compiler.failures and not compiler.reports:
        done.check()
        raise compiler.failures[0]
    if not compiler.graphs:
        said = f"{type(module).__name__} cannot be captured: Dynamo made no graph of its forward"
        raise CaptureError("; ".join((said, *done.breaks)))
    return done


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, Unwrapped]:
    """Return the module, or a copy without wrappers that Dynamo cannot trace, and what is known about the wrappers."""
    made = shallow(module)
    if isinstance(vars(made).get("forward"), OwnForward):  # it is bound to the original module
        del vars(made)["forward"]
    found = take_off(made)
    return (module if made._modules is module._modules else made), found


def _why_not(given: CallArguments, copies: Copies, error: Exception) -> MlaCompileError:
    """Return the error for a failed capture: an ``InputError`` if the uncompiled model fails, too."""
    name = type(given[0]).__name__
    try:
        with copies(given) as (copied, positional, keywords), torch.no_grad():
            copied(*positional, **keywords)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return CaptureError(f"{name} cannot be captured without values: {first_line(error)}")
    except Exception as plain:  # noqa: BLE001  the user's model runs here, and may raise anything
        return InputError(f"{name} does not run on these inputs: {brief(plain)}")
    said = f"{name} cannot be captured{_traced_line(error)}: {brief(error)}"
    if copies is _fake_copies:
        said += "; torch can trace less on the meta device: explain a small model of the same kind that has weights"
    return CaptureError(said)


def _traced_line(error: Exception) -> str:
    """Return the line of the model at which Dynamo gave up; an empty string if it is unknown."""
    frames = getattr(error, "real_stack", None)
    if not frames:
        return ""
    frame = frames[-1]
    return f" at {'/'.join(frame.filename.replace(os.sep, '/').split('/')[-2:])}:{frame.lineno}, `{frame.line}`"


@contextmanager
def _fake_copies(given: CallArguments) -> Iterator[CallArguments]:
    """Make fake copies, and enter their fake mode. Tensors that the module and the inputs share stay shared."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        copied = _copied(given)
    with mode:
        yield copied


@contextmanager
def _real_copies(given: CallArguments) -> Iterator[CallArguments]:
    """Copy everything that a forward may write to. Parameters are shared with the original."""
    yield _copied(given, {id(parameter): parameter for parameter in given[0].parameters()})


@contextmanager
def _own_copies(given: CallArguments) -> Iterator[CallArguments]:
    """Copy everything, parameters too, for a forward that replaces parameters."""
    yield _copied(given)


def _copied(given: CallArguments, shared: dict[int, torch.nn.Parameter] | None = None) -> CallArguments:
    module, args, kwargs = given
    memo: dict[int, object] = {**(shared or {})}
    try:
        return copy.deepcopy((module, tuple(args), dict(kwargs)), memo)
    except Exception as error:  # a class may refuse to be copied with any error, as classes from fully_shard do
        name = type(module).__name__
        raise CaptureError(
            f"{name} cannot be copied, and only a copy is traced ({brief(error)}); explain it before it is sharded"
        ) from error


def _has_meta(module: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
