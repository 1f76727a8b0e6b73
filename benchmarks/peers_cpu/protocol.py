"""A peer is a process that answers questions over its standard streams: a line of JSON each way.

A question is ``{"ask": NAME, ...}``; its answer is ``{"ok": RESULT}`` or ``{"error": TEXT}``. Whatever else a peer's
libraries print goes to standard error, so that it cannot be taken for an answer. Only the standard library is used
here, because peers run in environments of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class PeerError(RuntimeError):
    """A peer that did not start, ended, or answered with an error."""


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer questions until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    known = {**answers, "resident": resident}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            said = {"ok": known[question.pop("ask")](**question)}
        except Exception as error:  # noqa: BLE001  a peer may fail in any way, and the driver goes on without it
            said = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(said) + "\n")
        out.flush()


def resident() -> int:
    """Bytes of memory that this process holds now."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def timed(call: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Peer:
    """The driver's side of one process."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start ``command``, whose threads wait as its own libraries have it."""
        pipe = subprocess.PIPE
        variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
        except OSError as error:
            raise PeerError(f"did not start: {error}") from error

    def ask(self, name: str, **more: Any) -> Any:
        """The answer to one question. Raises :class:`PeerError` where there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"ask": name, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(f"ended with {self._process.wait()}") from error
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended with {self._process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise PeerError(said["error"])
        return said["ok"]

    def rest(self, most: float = 5.0) -> None:
        """Wait until the process uses no processor, at most ``most`` seconds.

        Threads look for work for a while after a step, and would take a core from the next peer.
        """
        end, before = time.monotonic() + most, -1.0
        while (now := self._cpu_seconds()) != before and time.monotonic() < end:
            before = now
            time.sleep(0.05)

    def _cpu_seconds(self) -> float:
        """Processor time so far, by the kernel's ticks of a hundredth of a second; of a process that ended, 0."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
