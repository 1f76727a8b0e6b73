"""Commands of the documentation and the examples, typed as they stand there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import metadata, util

import pytest
import torch.distributed as dist

from tests.support.commands import ROOT, RUN, STATUS
from tests.support.tiers import full

PROGRAMS = {
    "python": [sys.executable],
    "mla-compile": [sys.executable, "-m", "mla_compile"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
NEEDS = {"onnx_generate": "onnxruntime", "lora": "peft", "serve": "fastapi"}


@full("command")
@pytest.mark.wholly
@pytest.mark.parametrize("command", RUN)
def test_a_command_does_what_the_page_says(command, tmp_path):
    program, *arguments = shlex.split(command)
    for name, library in NEEDS.items():
        if name in command and util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    if program == "torchrun" and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch has no gloo here")
    if "compile_backend" in command and not _is_installed():
        pytest.skip("torch finds the backend by name through the installed package's entry point")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == STATUS.get(command, 0), done.stderr[-4000:]
    assert RUN[command] in done.stdout
    assert ": False" not in done.stdout


def _is_installed() -> bool:
    try:
        metadata.distribution("mla-compile")
    except metadata.PackageNotFoundError:
        return False
    return True
