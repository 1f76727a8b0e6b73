"""Several processes that run one program together (gloo, on the CPU), for tests: started once, given jobs."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mla_compile import backend

PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers",
    "transformers.models.deepseek_v3.modeling_deepseek_v3", "mla_compile.dynamo.compiler", "mla_compile.api",
    "tests.support.models",
    # What the first graph of a process imports.
    "torch._dynamo.debug_utils", "torch._dynamo.repro.after_dynamo", "torch.export._trace", "sympy.physics.units",
]  # fmt: skip
GROUP_S = 300
"""How long a rank waits for the others in a collective (s)."""
JOB_S = 1200
"""How long a job may take in all (s). None takes a quarter of it on two busy cores; a hang is a failure."""


class RankFailedError(AssertionError):
    """A rank raised, or did not answer in time."""


class Ranks:
    """``count`` processes. A job is a function of a module, called on every rank with the arguments."""

    def __init__(self, count: int) -> None:
        # One server imports everything, and all ranks are forked off it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._directory = tempfile.TemporaryDirectory()
        store = str(Path(self._directory.name) / "store")
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_work, args=(rank, count, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = JOB_S) -> list[Any]:
        """What the job returns, by rank. Raises :class:`RankFailedError` where one raises or does not come back."""
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = [self._answer(rank, seconds) for rank in range(len(self._pipes))]
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self.stop()
            raise RankFailedError("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank: int, seconds: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            return pipe.recv() if pipe.poll(seconds) else (False, f"no answer in {seconds} s")
        except EOFError:
            return True, None  # it ended, as some jobs want; what the others make of it is their answer

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()


def _work(rank: int, count: int, store: str, jobs: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=GROUP_S),
    )
    while True:
        try:
            job, args = jobs.recv()
        except EOFError:  # the tests are over
            os._exit(0)
        torch._dynamo.reset()
        backend._recent.clear()
        try:
            jobs.send((True, job(rank, *args)))
        except Exception:  # noqa: BLE001  whatever it is, the test shows it
            jobs.send((False, traceback.format_exc()))
