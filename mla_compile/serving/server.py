"""Start and shut down a server. After SIGTERM, new requests are refused, and running requests get time to end."""

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
"""The exit status of a process that SIGTERM has ended."""


class Server:
    """A server of one model.

    The server listens before the model is ready, so that ``/health`` can show the current stage. If :meth:`load` is
    called before :meth:`run`, the model is ready when the server begins to listen. ``told`` is called with each new
    stage.
    """

    def __init__(self, settings: Settings, told: Callable[[str], None] = lambda _: None) -> None:
        # Silence this logger, because transformers logs the arrival of each request.
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
        # The objects that exist now are permanent. Searching them in each garbage collection would take a third of a
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

        Raises the error with which loading or a rank has failed.
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
        finally:  # otherwise the generation loop would keep the process alive
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
    """Serve as a rank other than the first. Run the steps that the first rank requests, until the first rank ends.

    Raises the errors of :meth:`Loaded.load`, and :class:`RankError` if another rank fails. After loading, this process
    ignores the first signal, because the first rank ends all ranks. A second signal ends this process at once.
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

        Uvicorn's own method would raise the signal again at the end, and thus change the exit status.
        """
        if self.should_exit:
            os._exit(_AT_ONCE if sig == signal.SIGTERM else 130)
        self.should_exit = True
        self._stopping()
