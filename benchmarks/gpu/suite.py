"""The test suite's GPU tests as a section: a row for each file, so that one that hangs costs no other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.common import ROOT, Case, Row, Run

SECONDS = 60.0  # of a file: small models are compiled in it


def cases(run: Run) -> Iterator[Case]:
    """Only files with such tests: the others need not even be importable where the GPU is."""
    found = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    for name in names if not run.dry else ["tests/kernels/test_tiles.py::test_padded_widths"]:
        yield Case(name, lambda name=name: tested(run, name), SECONDS)  # type: ignore[misc]


def tested(run: Run, name: str) -> Row:
    """Runs pytest on one file, in a process of its own."""
    marks = "not gpu and not full" if run.dry else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, name], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if not report.exists():
            return {"status": "failed", "error": (done.stderr or done.stdout)[-500:]}
        row: Row = {"tests": {}, "exit": done.returncode, "output": done.stdout[-3000:]}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            row["tests"][f"{case.get('classname')}::{case.get('name')}"] = states[0] if states else "passed"
    bad = [test for test, state in row["tests"].items() if state in ("failure", "error")]
    if bad or done.returncode not in (0, 5):
        row |= {"status": "failed", "error": f"{len(bad)} tests failed: {', '.join(bad[:5])}"}
    return row
