"""What the GPU benchmarks share: cases, the results file, the run that fills it, and the description of the machine.

A result is a *row* under a *section* and a *key*. One process writes the file, before and after every row, so that
whatever is killed or dies, and whenever, loses at most the rows in progress, and which those were is known. A row says
what it depends on (its section's sources, the card, the versions, the tile): where that is as it was, it is not
measured again.

    ok, skipped, failed     done; a failure is a wrong number, or an error that the program could name
    unfinished              killed for time, or out of memory: run again by the next command
    died                    the process died in it: run again by the next command, after all others
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import benchmarks.common as cpu_common  # sets the environment, so before torch

import torch  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
DONE = ("ok", "skipped", "failed")
AGAIN = {"started": 1, "unfinished": 1, "died": 2}  # status of an earlier run's row: when it is tried again
DEAD_CONTEXT = 75  # exit status of a worker whose CUDA context is lost: start another one
FAULTS = ("raise", "die", "hang", "context")  # what --inject can do to a row of a dry run
Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The time of a section is spent; what is left of it stays for the next run."""


class SkipError(Exception):
    """A case cannot be run here; the text says why."""


@dataclass(frozen=True)
class Case:
    """A row to be. ``seconds`` is about what it takes on a GPU; ``of`` what it depends on beside its section's sources.

    ``first``: cheap, or what is most wanted; run before the rest of all sections.
    """

    key: str
    call: Callable[[], Row]
    seconds: float = 1.0
    first: bool = False
    of: str = ""


@lru_cache(maxsize=64)
def sources_hash(paths: tuple[str, ...]) -> str:
    """Eleven digits of the Python files under these paths, and of other files that are named themselves."""
    digest = hashlib.sha256()
    found = [p for name in paths for p in (ROOT / name, *(ROOT / name).rglob("*.py"))]
    for path in sorted(p for p in found if p.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:11]


def machine(device: torch.device) -> Row:
    """The card, its driver, versions and the date."""
    about: Row = {"host": cpu_common.machine_without_transformers()}
    for name in ("triton", "transformers", "numpy"):
        try:
            about[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            about[name] = None
    if device.type != "cuda":
        return {**about, "gpu": None}
    found = torch.cuda.get_device_properties(device)
    about["gpu"] = {
        "name": found.name, "capability": [found.major, found.minor], "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1), "l2_bytes": getattr(found, "L2_cache_size", None),
        "cuda": torch.version.cuda, **_nvidia_smi(),
    }  # fmt: skip
    return about


def _nvidia_smi() -> Row:
    """Driver and clocks as found; they are read, never set."""
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in out.splitlines()[0].split(",")), strict=False))


def basis(about: Row) -> str:
    """What all rows of a machine depend on: its card and the versions that compile for it."""
    gpu = about.get("gpu") or {}
    return json.dumps([gpu.get("name"), about["host"].get("torch"), about.get("triton"), about.get("dry_run")])


class Store:
    """The results file: ``{"about": ..., "sections": {section: {"status", "note", "rows": {key: row}}}}``."""

    def __init__(self, path: Path) -> None:
        """With the rows that are in the file already."""
        self.path = path
        self.data: Row = {"about": {}, "sections": {}}
        self.note = ""
        if path.exists():
            self.adopt(path)

    def adopt(self, path: Path) -> None:
        """Take the rows of a file of an earlier run for keys that have none."""
        try:
            old = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            self.note = f"{path} cannot be read ({error}): its rows are measured anew"
            return
        self.data["about"] = old["about"] | self.data["about"]
        self.data["about"]["run"] = max(self.run, old["about"].get("run", 0))
        for name, section in old["sections"].items():
            own = self.section(name)
            own["rows"] = section["rows"] | own["rows"]

    @property
    def run(self) -> int:
        """How many runs have written to this file; rows have the number of theirs."""
        found: int = self.data["about"].get("run", 0)
        return found

    def section(self, name: str) -> Row:
        """One section, made when first asked for."""
        empty: Row = {"status": "pending", "note": "", "rows": {}}
        found: Row = self.data["sections"].setdefault(name, empty)
        return found

    def rows(self, name: str) -> dict[str, Row]:
        """The rows of a section by key."""
        rows: dict[str, Row] = self.section(name)["rows"]
        return rows

    def record(self, section: str, key: str, row: Row) -> None:
        """Keep one row, on disk too."""
        self.rows(section)[key] = row
        self.write()

    def close(self, section: str, status: str, note: str = "") -> None:
        """How a section ended."""
        self.section(section).update(status=status, note=note)
        self.write()

    def failures(self, section: str) -> list[str]:
        """Keys of the rows that went wrong."""
        rows = self.data["sections"].get(section, {"rows": {}})["rows"]
        return [key for key, row in rows.items() if row["status"] == "failed"]

    def write(self) -> None:
        """The whole file, a row a line, so that a reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = []
        for name, section in self.data["sections"].items():
            rows = [f"   {json.dumps(key)}: {json.dumps(row, default=str)}" for key, row in section["rows"].items()]
            head = f'"status": {json.dumps(section["status"])}, "note": {json.dumps(section["note"])}'
            parts.append(f'  {json.dumps(name)}: {{{head}, "rows": {{\n' + ",\n".join(rows) + "\n  }}")
        text = f'{{\n "about": {json.dumps(self.data["about"], default=str)},\n "sections": {{\n'
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(text + ",\n".join(parts) + "\n }\n}\n")
        os.replace(draft, self.path)


class Wire(Store):
    """A worker's view of the results: what it records goes to the process that owns the file, a line a row."""

    def __init__(self, path: Path, out: TextIO) -> None:
        super().__init__(path)
        self.out = out

    def record(self, section: str, key: str, row: Row) -> None:
        """Keep one row here, and tell."""
        self.rows(section)[key] = row
        print(json.dumps([section, key, row], default=str), file=self.out, flush=True)

    def write(self) -> None:
        """Not this process's to write."""


@dataclass
class Run:
    """One section being filled: where to, on what, until when.

    ``share`` (i, n): only every n-th case, from i on. ``first``: only the cases marked so, or only the others.
    ``without``: kernels (``gluon``, ``triton``) and peers that took a process down, and are left out.
    """

    store: Store
    section: str
    device: torch.device
    dry: bool = False
    end: float = float("inf")  # of time.monotonic()
    sources: tuple[str, ...] = ()
    peers: dict[str, str] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)
    first: bool | None = None
    without: frozenset[str] = frozenset()
    faults: dict[str, str] = field(default_factory=dict)
    current: tuple[str, Row] | None = None  # the row that is being measured, as it was begun

    @property
    def left(self) -> float:
        """Seconds that this section may still take."""
        return self.end - time.monotonic()

    def digest(self, case: Case) -> str:
        """What a row depends on, in eleven digits."""
        text = f"{basis(self.store.data['about'])} {sources_hash(self.sources)} {case.of}"
        return hashlib.sha256(text.encode()).hexdigest()[:11]

    def seconds(self, case: Case) -> float:
        """About how long a case takes; a dry run's are tiny."""
        return case.seconds / 100 if self.dry else case.seconds

    def todo(self, cases: Iterable[Case]) -> list[Case]:
        """What has no row yet, then what an earlier run left unfinished, then what it died of."""
        ranked = []
        for index, case in enumerate({case.key: case for case in cases}.values()):
            rank = self._rank(case)
            mine = index % self.share[1] == self.share[0] and self.first in (None, case.first)
            if rank is not None and mine and kernel_of(case.key) not in self.without:
                ranked.append((rank, index, case))
        return [case for _, _, case in sorted(ranked, key=lambda entry: entry[:2])]

    def _rank(self, case: Case) -> int | None:
        row = self.store.rows(self.section).get(case.key)
        if row is None or row.get("of") != self.digest(case):
            return 0
        if row["status"] in DONE or row["run"] == self.store.run:
            return None
        return AGAIN[row["status"]]

    def cases(self, cases: Iterable[Case]) -> None:
        """Run what is to do and fits the time that is left; raises :class:`OutOfTimeError` where something did not."""
        late = 0
        for case in self.todo(cases):
            if self.left < self.seconds(case):
                late += 1
                continue
            about: Row = {"of": self.digest(case), "run": self.store.run}
            self.current = case.key, {"status": "started", **about}
            self.store.record(self.section, *self.current)
            start = time.monotonic()
            try:
                self._inject(case.key)
                row = case.call()
            except SkipError as reason:
                row = {"status": "skipped", "reason": str(reason)}
            except torch.cuda.OutOfMemoryError as error:  # no verdict: other workers share the memory
                row = {"status": "unfinished", "error": _short(error)}
                torch.cuda.empty_cache()
            except Exception as error:  # noqa: BLE001  (whatever a case raises is its result, and the next one is run)
                row = {"status": "failed", "error": _short(error), "traceback": traceback.format_exc()[-3000:]}
            row = {"status": "ok", **row, **about, "seconds": round(time.monotonic() - start, 3)}
            self.store.record(self.section, case.key, row)
            if row["status"] == "failed":
                print(f"  FAILED {case.key}: {row['error']}", flush=True)
                self._leave_a_dead_context(case.key)
        if late:
            raise OutOfTimeError

    def at(self, what: str) -> None:
        """What a row is about to run: should the process hang or die, that is known."""
        if self.current is not None:
            key, row = self.current
            self.store.record(self.section, key, {**row, "at": what})

    def _inject(self, key: str) -> None:
        fault = self.faults.get(key)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(1e6)
        if fault:
            raise RuntimeError(f"injected: {fault}")

    def _leave_a_dead_context(self, key: str) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            sys.exit(DEAD_CONTEXT)
        if self.faults.get(key) == "context":
            sys.exit(DEAD_CONTEXT)


def kernel_of(key: str, row: Row | None = None) -> str:
    """The kernel that a check is about, the first word before the colon; of other rows what they ran last, if known."""
    named = key.split(":")[0] if ":" in key else (row or {}).get("at", "")
    return str(named).split(" ")[0]


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def counted(rows: dict[str, Row]) -> str:
    """``12 ok, 1 failed``."""
    states = [row["status"] for row in rows.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "nothing run"
