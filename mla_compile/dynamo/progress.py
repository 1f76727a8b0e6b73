"""Shows the progress of compilations: what is being compiled, the time so far, and the time of each stage.

The stages are, in this order: ``trace`` (Dynamo), ``capture`` and ``passes`` (mla_compile), ``code`` (Inductor) and
``guards`` (Dynamo again). Code for a kind of layers is a separate stage (``code of 60 equal layers``).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from mla_compile.core import collector

if TYPE_CHECKING:
    from rich.progress import Progress

_STAGES = {
    "trace": "tracing the model",
    "capture": "making the graph functional",
    "passes": "looking for attentions",
    "code": "generating code",
    "guards": "noting what the code assumes of the model",
}
_ALL_KEPT = (
    "trace",
    "capture",
    "passes",
    "guards",
)  # the cycle collector is paused in these stages, because they keep most objects; code generation drops many tensors
_TOLD_SECONDS = 1.0  # no line is printed for faster compilations


class Compilations:
    """The compilations of one model.

    Args:
        name: the name of the compiled function.
        show: whether stderr shows a spinner with the stage (on a terminal only) and a line at the end. ``None`` shows
            both on a terminal, and nothing elsewhere.

    Attributes:
        seconds: the time of each stage of the last compilation.
        on_end: called when a compilation has ended.
    """

    def __init__(self, name: str, *, show: bool | None = False) -> None:
        self.name = name
        self.show = show
        self.seconds: dict[str, float] = {}
        self.on_end: Callable[[], None] | None = None
        self.count = 0
        self._stage = ""
        self._since = 0.0
        self._thread = 0
        self._shown: Progress | None = None
        self._paused = False

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Follow the compilations that Dynamo starts within this context, in the current thread."""
        thread = threading.get_ident()

        def started(what: CallbackArgs) -> None:
            if threading.get_ident() == thread and what.callback_trigger is CallbackTrigger.DYNAMO:
                self.begin("trace")

        def ended(_: CallbackArgs) -> None:
            if threading.get_ident() == thread:
                self.end()

        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)
        try:
            yield
        finally:
            if self._thread == thread:  # a reset of Dynamo within the call may have dropped the callbacks
                self.end()
            for callbacks, ours in (
                (callback_handler.start_callbacks, started),
                (callback_handler.end_callbacks, ended),
            ):
                if ours in callbacks:
                    callbacks.remove(ours)

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Record the code within this context as a compilation with one stage."""
        self.begin(stage)
        try:
            yield
        finally:
            self.end()

    def begin(self, stage: str) -> None:
        """Begin a compilation. ``stage``: its first stage."""
        self.end()
        self.count += 1
        self.seconds = {}
        self._stage, self._since, self._thread = stage, time.perf_counter(), threading.get_ident()
        self._collect(wanted=stage not in _ALL_KEPT)
        if self._visible():
            self._show()
        self._describe()

    def stage(self, name: str) -> None:
        """Enter the next stage. This does nothing outside of a compilation."""
        if not self._stage:
            return
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = name, now
        self._collect(wanted=name not in _ALL_KEPT)
        self._describe()

    def _collect(self, *, wanted: bool) -> None:
        """Resume the cycle collector if it is ``wanted`` in the next stage, else pause it."""
        if wanted == self._paused:
            (collector.resume if wanted else collector.pause)()
            self._paused = not wanted

    def end(self) -> None:
        """End the compilation, whether it succeeded or failed."""
        if not self._stage:
            return
        self.stage("")
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
        if self.on_end is not None:
            self.on_end()
        total = sum(self.seconds.values())
        if total >= _TOLD_SECONDS and self._visible():
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
            sys.stderr.write(f"mla_compile: {self._what()} took {total:.1f} s ({parts})\n")

    def _what(self) -> str:
        return f"{self.name}, graph {self.count}"

    def _visible(self) -> bool:
        stream: object = sys.stderr  # a program may have set stderr to None, or to an object without ``isatty``
        if self.show is False or stream is None or getattr(stream, "closed", False):
            return False
        return self.show is True or (hasattr(stream, "isatty") and stream.isatty())

    def _show(self) -> None:
        # Imported here, because only a terminal needs it.
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._shown = Progress(*columns, console=console, transient=True)
            self._shown.add_task("")
            self._shown.start()

    def _describe(self) -> None:
        if self._shown is not None and self._stage:
            stage, of, what = self._stage.partition(" of ")
            about = f"mla_compile: {self._what()}: {_STAGES[stage]}{of}{what}"
            self._shown.update(self._shown.task_ids[0], description=about)
