"""Launches of a layer on a GPU, in the code that Inductor generates for one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.launches import launches, per_layer
from tests.support.tiers import full

ROOT = Path(__file__).parents[2]
OWN = 4 + 1 + 1
"""What MiniCPM3 launches in a layer beside products and attention: four norms (the third writes the latent into the
cache), the gate of its MLP, the counter of its StaticCache."""


@full("inductor")
@pytest.mark.skipif(torch.__version__ < "2.13" or torch.__version__ >= "2.14", reason="stand-ins for torch 2.13 only")
def test_a_layer_launches_five_kernels_around_its_attention(tmp_path: Path) -> None:
    """The rotary key into the cache, q W_kc, the rotated query, attention, W_v: besides what any layer launches."""
    out = tmp_path / "launches.json"
    command = [sys.executable, "-m", "benchmarks.gpu.launches", "--models", "minicpm3", "--out", str(out)]
    # In a process of its own: it tells torch that there is a GPU.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())
    assert row["launches"]["product"] == 7, "q down and up, kv down, the output; three of the MLP"
    assert row["launches"]["attention"] == 1
    assert set(row["launches"]) == {"product", "attention", "triton"}, "an operator that Inductor does not fuse"
    assert row["launches"]["triton"] + row["launches"]["attention"] - OWN <= 5


def test_calls_are_read_in_order() -> None:
    code = """
def call(self, args):
        triton_per_fused_0.run(buf0, 2, stream=raw_stream0)
        extern_kernels.mm(a, b, out=buf1)
        buf2 = torch.ops.mla_compile.decode_attention.default(buf1)
        buf3 = torch.ops.aten.sort.default(buf2)
        # torch.ops.aten.mm.default in a comment
        buf4 = torch.ops.mla_compile.decode_attention.default(buf3)
"""
    assert launches(code) == ["triton", "product", "attention", "aten.sort", "attention"]
    assert per_layer(launches(code)) == ["aten.sort", "attention"]
