"""Start and shut down. After SIGTERM no more requests are accepted, and running requests have some time to end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from mla_compile.errors import RankError
from mla_compile.serving.app import Desk, build
from mla_compile.serving.door import Door
from mla_compile.serving.loaded import Loaded
from mla_compile.serving.settings import Settings
from mla_compile.serving.trial import try_out

_AT_ONCE = 143
"""The exit status of a process that was ended by SIGTERM."""


class Server:
    """A server of one model.

    It listens before the model is ready, so that ``/health`` can show the current stage. If :meth:`load` is called
    first, the server is ready as soon as it listens. ``told`` is called with each stage as it begins.
    """

    def __init__(self, settings: Settings, told: Callable[[str], None] = lambda _: None) -> None:
        # This logger is silenced, because transformers logs the arrival of each request.
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
        self.loaded = Loaded(settings, told)
        self.desk = Desk(settings, self.loaded)
        self.app = build(settings, self.loaded, self.desk)
        self._settings, self._told = settings, told
        self._http: _Http | None = None

    def load(self) -> None:
        """Load and compile the model. Raises the errors of :meth:`Loaded.load`."""
        self.loaded.load(self._first_requests)
        if self.loaded.ranks.count > 1:  # if a rank fails, torchrun has to restart all ranks
            threading.Thread(target=self._until_ranks_end, daemon=True).start()

    def _first_requests(self) -> None:
        try_out(self.app)
        # The objects that exist now are permanent. A garbage collection that searches them would block for a third of a
        # second.
        gc.collect()
        gc.freeze()

    def _until_ranks_end(self) -> None:
        try:
            self.loaded.manager.wait()
        except RankError as error:
            self.loaded.problem = error
            self.end()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. A second signal ends the process at once.

        Raises the error that kept the model from loading, or that ended a rank.
        """
        settings = self._settings
        config = uvicorn.Config(
            Door(self.app, settings),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(settings.grace)),
        )
        self._http = http = _Http(config, self._stopping)
        if not self.loaded.ready:
            threading.Thread(target=self._load_behind, args=(http,), daemon=True).start()
        try:
            http.run()
        finally:  # if uvicorn exits, the generation loop would keep the process alive
            self.loaded.stop()
        if self.loaded.problem is not None:
            raise self.loaded.problem

    def end(self) -> None:
        """End :meth:`run` from another thread, as SIGTERM does."""
        if self._http is not None:
            self._http.should_exit = True

    def _load_behind(self, http: _Http) -> None:
        try:
            self.load()
        except Exception as error:  # noqa: BLE001  raised again in the thread of run()
            self.loaded.problem = error
            http.should_exit = True

    def _stopping(self) -> None:
        self.loaded.stopping = True
        self._told(f"stopping: requests have {self._settings.grace:g} s to end")


def follow(settings: Settings) -> None:
    """Serve as a rank other than the first: run the steps that the first rank requests, and end when it ends.

    Raises the errors of :meth:`Loaded.load`, and :class:`RankError` if another rank fails. After loading, this process
    ignores the first signal, because the first rank has the requests and ends all ranks. A second signal ends this
    process at once.
    """
    seen: list[int] = []

    def noted(sig: int, _: FrameType | None) -> None:
        if seen:
            os._exit(_AT_ONCE if sig == signal.SIGTERM else 130)
        seen.append(sig)

    loaded = Loaded(settings)
    loaded.load()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, noted)
    loaded.manager.wait()


class _Http(uvicorn.Server):
    """A server that exits with status 0 after one signal, and ends at once after a second signal."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop.

        Uvicorn's own method would raise the signal again at the end, which would set the exit status.
        """
        if self.should_exit:
            os._exit(_AT_ONCE if sig == signal.SIGTERM else 130)
        self.should_exit = True
        self._stopping()
