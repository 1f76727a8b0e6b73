"""What the GPU benchmarks share: the results file, the run that fills it, and the description of the machine.

A result is a *row* under a *section* and a *key*. The file is written before and after every row, so that a run which
is stopped, hangs or takes the CUDA context down with it loses nothing, and the row that did it is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import benchmarks.common as cpu_common  # sets the environment, so before torch

import torch  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "mla_compile", "passes", "benchmarks/gpu")
GOOD = ("ok", "skipped")
DEAD_CONTEXT = 75  # exit status of a worker whose CUDA context is lost: start another one
Row = dict[str, Any]
Case = tuple[str, Callable[[], Row]]


class OutOfTimeError(Exception):
    """The time of a section is spent; what is left of it stays for ``--resume``."""


class SkipError(Exception):
    """A case cannot be run here; the text says why."""


def sources_hash() -> str:
    """Eleven digits of what is measured: results of other sources are not resumed."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:11]


def machine(device: torch.device) -> Row:
    """The card, its driver, versions, the date, and the sources that were measured."""
    about: Row = {"host": cpu_common.machine_without_transformers(), "sources": sources_hash()}
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


class Store:
    """The results file: ``{"about": ..., "sections": {section: {"status", "note", "rows": {key: row}}}}``."""

    def __init__(self, path: Path, about: Row | None = None, resume: Path | None = None) -> None:
        """``resume`` is a file to go on from; it is left behind when its sources are not those of this checkout."""
        self.path = path
        self.data: Row = {"about": about or {}, "sections": {}}
        self.note = ""
        if resume is not None and resume.exists():
            old = json.loads(resume.read_text())
            was, now = old["about"].get("sources"), (about or old["about"]).get("sources")
            if was == now:
                self.data["sections"] = old["sections"]
                self.data["about"] = about or old["about"]
            else:
                self.note = f"{resume} is of other sources ({was}, now {now}): starting anew"

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

    def bury(self, section: str, why: str) -> list[str]:
        """Mark the row that was running when a worker died; returns its key."""
        dead = [key for key, row in self.rows(section).items() if row["status"] == "started"]
        for key in dead:
            self.rows(section)[key] = {"status": "failed", "error": why}
        self.write()
        return dead

    def forget_unfinished(self) -> None:
        """Drop rows that were running when an earlier run was stopped from outside: they are run again."""
        for section in self.data["sections"].values():
            section["rows"] = {key: row for key, row in section["rows"].items() if row["status"] != "started"}

    def failures(self, section: str) -> list[str]:
        """Keys of the rows that went wrong."""
        rows = self.data["sections"].get(section, {"rows": {}})["rows"]
        return [key for key, row in rows.items() if row["status"] not in (*GOOD, "started")]

    def write(self) -> None:
        """The whole file, so that a reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        os.replace(draft, self.path)


@dataclass
class Run:
    """One section being filled: where to, on what, until when. ``share`` (i, n): only every n-th case, from i on."""

    store: Store
    section: str
    device: torch.device
    dry: bool = False
    end: float = float("inf")  # of time.monotonic()
    peers: dict[str, str] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)

    @property
    def left(self) -> float:
        """Seconds that this section may still take."""
        return self.end - time.monotonic()

    def cases(self, cases: Iterable[Case]) -> None:
        """Run what has no row yet; raises :class:`OutOfTimeError` when the section's time is spent."""
        rows = self.store.rows(self.section)
        for index, (key, call) in enumerate(cases):
            if key in rows or index % self.share[1] != self.share[0]:
                continue
            if self.left <= 0:
                raise OutOfTimeError
            self.store.record(self.section, key, {"status": "started"})
            start = time.monotonic()
            try:
                row = call()
            except SkipError as reason:
                row = {"status": "skipped", "reason": str(reason)}
            except Exception as error:  # noqa: BLE001  (whatever a case raises is its result, and the next one is run)
                row = {"status": "failed", "error": _short(error), "traceback": traceback.format_exc()[-3000:]}
            row.setdefault("status", "ok")
            row["seconds"] = round(time.monotonic() - start, 3)
            self.store.record(self.section, key, row)
            if row["status"] == "failed":
                print(f"  FAILED {key}: {row['error']}", flush=True)
                self._leave_a_dead_context()

    def _leave_a_dead_context(self) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            sys.exit(DEAD_CONTEXT)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def counted(rows: dict[str, Row]) -> str:
    """``12 ok, 1 failed``."""
    states = [row["status"] for row in rows.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "nothing run"
