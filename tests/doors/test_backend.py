"""The entry point: it is found by its name, and keeps the reports of what it compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed

from mla_compile.backend import mla, reports
from mla_compile.dynamo.compiler import Compiler
from mla_compile.errors import OptionError
from mla_compile.options import Options
from tests.support.tiers import full
from tests.support.toy import Toy, decode_inputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which Python finds what it would find of the package if it were installed."""
    info = tmp_path / "mla_compile-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-compile\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nmla = mla_compile.backend:mla\n")
    return tmp_path


def test_it_is_found_by_name_and_loaded_only_then(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's registry, of which a second one has not looked for backends yet."""
    monkeypatch.syspath_prepend(installed)
    spec = importlib.util.find_spec(registry.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    load, loaded = EntryPoint.load, []
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded.append(self.value) or load(self))
    assert "mla" in fresh.list_backends()
    assert loaded == []
    assert fresh.lookup_backend("mla") is mla
    assert loaded == ["mla_compile.backend:mla"]


@full("command")  # a process that has nothing of ours yet
def test_it_is_found_by_name_without_importing_it(installed: Path) -> None:
    script = (
        "import sys\n"
        "from torch._dynamo.backends import registry\n"
        "assert 'mla' in registry.list_backends()\n"
        "assert 'mla_compile' not in sys.modules\n"
        "print(registry.lookup_backend('mla') is sys.modules['mla_compile.backend'].mla)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_reports_of_the_named_backend_are_kept() -> None:
    before = len(reports())
    with torch.no_grad():
        torch.compile(Toy().eval(), backend="mla", options={"codegen": "eager", "lowering": "aten"})(*decode_inputs())
    assert len(reports()) == min(before + 1, 64)
    assert reports()[-1].absorbed == 1


def test_wrong_options_are_raised_even_though_failures_fall_back() -> None:
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="did you mean 'lowering'") as caught:
        torch.compile(Toy().eval(), backend=mla, options={"lowerin": "aten"})(*decode_inputs())
    assert isinstance(caught.value.inner_exception, OptionError)
    with pytest.raises(OptionError, match="no-such-mode"):
        Compiler(Options(), "no-such-mode")
