"""What torch's own switches show of us: ``TORCH_LOGS`` on stderr, and the report in the trace that tlparse reads."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import mla_compile

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import mla_compile  # before torch, which then reads TORCH_LOGS and imports this package while it is being imported
import torch
from mla_compile.backend import mla
from tests.support.toy import Toy, decode_inputs
step = torch.compile(Toy().eval(), backend=mla, options={"codegen": "eager"})
with torch.no_grad():
    step(*decode_inputs(cached=300))
"""


def test_logs_and_trace_of_a_process(tmp_path: Path):
    """Both switches in one process, as a user sets them."""
    environment = {**os.environ, "TORCH_LOGS": "+mla_compile", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (summary,) = [line for line in lines if "1 absorbed" in line and line.startswith("I")]
    assert "telling.py" in summary
    assert any(line.startswith("V") and "telling.py" in line and "H=4 L=16" in line for line in lines), done.stderr

    (log,) = tmp_path.glob("dedicated_log_torch_trace_*.log")
    written = log.read_text().splitlines()
    (at,) = [i for i, line in enumerate(written) if '"name": "mla_compile_report"' in line]
    head = json.loads(written[at][written[at].index("{") :])
    assert head["artifact"] == {"name": "mla_compile_report", "encoding": "json"}
    assert head["frame_id"] == 0  # it belongs to the compilation it is about
    payload = []
    for line in written[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    report = json.loads("\n".join(payload))
    assert report["counts"]["absorbed"] == 1


def test_the_package_does_not_contain_itself():
    """Torch walks through the whole package that TORCH_LOGS names."""
    names = {module.name for module in pkgutil.iter_modules(mla_compile.__path__)}
    assert "backend" in names
    assert not names & {"mla_compile", "tests", "benchmarks", "setup"}
