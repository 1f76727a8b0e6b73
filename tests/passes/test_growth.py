"""What the passes do for a model grows linearly with its layers: counted, not timed."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile import pipeline
from mla_compile.core.program import Program
from mla_compile.options import Options
from tests.support.programs import export, noted_comparisons
from tests.support.tiers import also

pytestmark = pytest.mark.thorough

OURS = str(Path(mla_compile.__file__).parent)  # not a folder above it: an environment may lie in one of the same name
H, L, N, R, V, D, T = 2, 16, 6, 4, 5, 12, 7


class Layer(nn.Module):
    """Pre-norm, a rotary key beside the latent, a gated MLP; K and V of each head are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.up = nn.Linear(L, H * (N + V), bias=False)
        self.out = nn.Linear(H * V, D, bias=False)
        self.gate, self.wide, self.back = (nn.Linear(*s, bias=False) for s in ((D, 2 * D), (D, 2 * D), (2 * D, D)))

    def forward(self, x: Tensor, angles: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = norm(x)
        query = self.query(rows).unflatten(-1, (H, N + R)).transpose(1, 2)
        latent, key = self.down(rows).split([L, R], -1)
        made = self.up(norm(latent)).unflatten(-1, (H, N + V)).transpose(1, 2)
        shared = rotated(key, angles).unsqueeze(1).expand(-1, H, -1, -1)
        k = torch.cat([past[0], torch.cat([made[..., :N], shared], -1)], 2)
        v = torch.cat([past[1], made[..., N:]], 2)
        q = torch.cat([query[..., :N], rotated(query[..., N:], angles)], -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        rows = norm(x)
        return x + self.back(F.silu(self.gate(rows)) * self.wide(rows)), (k, v)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, position: Tensor, pasts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[object]]:
        angles, kept = position * torch.arange(1.0, R // 2 + 1), []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, new = layer(x, angles, past)
            kept.append(new)
        return x, kept


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., R // 2 :], x[..., : R // 2]], -1) * sin


@functools.cache
def step(layers: int) -> Program:
    """A decode step in caches that each have a length of their own."""
    torch.manual_seed(0)  # the check compares errors, which vary with the weights
    model = Deep(layers).eval().requires_grad_(False)
    pasts = [(torch.randn(1, H, T, N + R), torch.randn(1, H, T, V)) for _ in range(layers)]
    lengths = [torch.export.Dim(f"length{index}", max=4096) for index in range(layers)]
    dynamic = {"x": None, "position": None, "pasts": [({2: one}, {2: one}) for one in lengths]}
    return export(model, (torch.randn(1, 1, D), torch.tensor([[7.0]]), pasts), dynamic)


def calls(layers: int, **options: object) -> int:
    """How many functions and generators of ours the pipeline calls and resumes."""
    program, count = step(layers), 0

    def counted(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.gettrace()
    sys.settrace(counted)  # which is told of calls of Python alone: sys.setprofile is told of those of C, too
    try:
        report = pipeline.run(program, Options.parse({"forms": "absorbed", **options}), own_cache=True).report
    finally:
        sys.settrace(before)
    assert len(report.sites) == layers
    assert report.absorbed == (layers if options["cache"] == "latent" else 0)
    return count


@pytest.mark.parametrize(
    ("cache", "layers"),
    [("expanded", (1, 2, 3)), *also("combination", ("expanded", (2, 4, 6)), ("latent", (2, 4, 6)))],
    ids=str,
)
def test_work_grows_linearly_with_the_layers(cache, layers):
    few, more, most = (calls(count, cache=cache) for count in layers)
    assert most - more < 1.03 * (more - few), (few, more, most)


def test_layers_whose_caches_differ_in_name_alone_are_checked_once(monkeypatch):
    made = noted_comparisons(monkeypatch)
    options = Options.parse({"cache": "latent", "forms": "absorbed", "verify": True})
    outcome = pipeline.run(step(2), options, own_cache=True)
    assert outcome.absorbed == 2
    assert len(made) == 1
    assert all(site.precision_ratio is not None for site in outcome.report.sites)
