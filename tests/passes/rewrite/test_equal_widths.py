"""Values that are padded to the width of the keys, so that torch's fused attention on a CPU takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mla_compile
from mla_compile.passes.rewrite.equal_widths import FEWEST, equal_widths
from tests.support.models import build
from tests.support.programs import canonical, export, run, seeded, trace

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attended(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, *mask, **options)


def padded(fn: Any, *given: Tensor) -> tuple[int, Any]:
    """How many attentions of ``fn(*given)`` are padded, and the graph; results have to stay the same."""
    program = trace(fn, given, [])
    canonical(program)
    done = equal_widths(program.gm.graph, program.fake_mode)
    program.gm.graph.lint()
    program.gm.recompile()
    with torch.no_grad():
        torch.testing.assert_close(program.gm(*given)[0], fn(*given), rtol=1e-12, atol=1e-12)
    return done, program.gm


@pytest.mark.parametrize(
    ("queries", "keys", "values", "padding"),
    [
        (FEWEST, 12, 8, True),
        (FEWEST - 1, 12, 8, False),
        (40, 12, 12, False),
        (40, 8, 12, False),  # the scores would be wider
        (40, 12, 1, True),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_which_are_padded(queries: int, keys: int, values: int, padding: bool, masked: bool):
    q, k, v = seeded(2, 3, queries, keys), seeded(2, 3, 50, keys), seeded(2, 3, 50, values)
    mask = [seeded(2, 1, queries, 50)] if masked else []
    done, gm = padded(attended, q, k, v, *mask)
    assert done == int(padding)
    (node,) = (n for n in gm.graph.nodes if n.target is SDPA)
    assert node.args[2].meta["val"].shape[-1] == (keys if padding else values)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_options_stay(options: dict[str, Any]):
    heads = 1 if "enable_gqa" in options else 4
    q, k, v = seeded(1, 4, 20, 12), seeded(1, heads, 20, 12), seeded(1, heads, 20, 8)
    done, _ = padded(lambda *given: attended(*given, **options), q, k, v)
    assert done == 1


class Attended(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(q, k, v)


@pytest.mark.parametrize("seen", [FEWEST - 1, FEWEST])
def test_an_open_number_of_queries_is_judged_by_the_one_seen(seen: int):
    k, v = seeded(2, 3, 50, 12), seeded(2, 3, 50, 8)
    program = export(Attended(), [seeded(2, 3, seen, 12), k, v], [{2: torch.export.Dim.DYNAMIC}, None, None])
    assert equal_widths(program.gm.graph, program.fake_mode) == int(seen >= FEWEST)
    program.gm.recompile()
    for queries in (2, 33):
        q = seeded(2, 3, queries, 12)
        torch.testing.assert_close(run(program, q, k, v)[0], attended(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["minicpm3"])
def test_a_prompt_runs_in_the_fused_attention(family: str):
    """As torch's profiler sees it, with results as close to float64 as the original's."""
    model = build(family, num_hidden_layers=1).float()
    given = {"input_ids": torch.arange(64)[None] % 90}
    fast: Any = mla_compile.optimize(model, codegen="eager", strict=True)
    ran: list[set[str]] = []
    with torch.no_grad():
        want = build(family, num_hidden_layers=1).double()(**given).logits
        for call in (model, fast):
            call(**given)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                got = call(**given).logits
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
            ran.append({event.name for event in seen.events()} & {FLASH})
    assert ran == [set(), {FLASH}]
    assert {p.name: p.changes for p in fast.mla_report.passes}["pad_values"] == 1
    (site,) = fast.mla_report.sites
    assert str(site.code) == "cost_prefill"
