"""Generated MLA modules: whatever is done to them, the numbers stay; legal ones decode absorbed, illegal ones are left.

Every case runs a prefill and some decode steps and is compared, step by step, with the same module in float64 in eager
mode. ``MLA_PROPERTY_CASES`` sets how many cases all tiers draw (40 by default) and ``MLA_PROPERTY_SEED`` draws others:
``MLA_PROPERTY_CASES=10000 MLA_PROPERTY_SEED=1 pytest -n 2 -m "" tests/test_property.py``.
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
from torch import Tensor

from mla_compile.errors import MlaCompileWarning
from mla_compile.report.report import Report
from tests.support.generated_module import GeneratedMLA
from tests.support.generated_run import options_of, side_by_side
from tests.support.generator import Case, cases, check_each, drawn
from tests.support.tiers import also

CASES = int(os.environ.get("MLA_PROPERTY_CASES", "40"))
SEED = int(os.environ.get("MLA_PROPERTY_SEED", "0"))
PARTS = 20  # tests that share the cases between them, of which the default tier runs one

# Largest error relative to the largest value. Below float64 a rewrite may not be much worse than eager is.
EXACT = 1e-9
THROUGH_FLOAT32 = 2e-5
WORSE_THAN_EAGER = 3.0

# The side that a fault leaves sound, which may be absorbed by itself.
SOUND = {"silu_on_values": ("keys",)} | dict.fromkeys(
    ("rope_on_keys", "norm_on_keys", "tanh_on_keys", "roll_tokens", "conv_tokens", "mask_from_keys", "keys_returned"),
    ("values",),
)


@pytest.mark.parametrize("part", [0, *also("draws", *range(1, PARTS))])
def test_generated_attention(part: int) -> None:
    check_each(drawn(max(1, CASES // PARTS), SEED * PARTS + part, cases()), check)


# A hidden state narrower than the rotary key, which comes from the projection that makes the latent too (twice);
# returned keys that are narrow enough to be mistaken for such rows; a finite fill that is minus infinity in the dtype
# of the softmax, so that rows without a visible key are NaN; two caches whose lengths only a guard makes equal; and a
# latent that is too wide and else legal, from a hidden state narrower still (twice: the second has a rotary key wider
# than both); rows with a gate, of which a static cache shows a part, where the slice was known before the gate; and a
# token of values that is read beside the attention, of rows that are multiplied by a number. Keys that are returned and
# that no step is given, which carry the hidden states that they are made of. A token that is read beside, by a weight
# that is dequantized once. A latent for each group of heads, which is an axis of its own. A latent of one value: its
# keys, rotated, are an image of it by cos and by sin. A latent for each head, and rows of all heads beside it.
FOUND = [
    Case(T=1, D=1, H=6, L=1, Q=6, N=1, R=4, V=6, steps=1, dtype="float32", up="two", latent_scale="vector", rope="none",
         share="repeat", join="assign", core="bmm", scale="after_mask", factor=1.0, mask_rank=3, extra="probs",
         cache="none"),
    Case(B=1, T=2, D=1, H=1, L=1, N=8, R=3, V=1, groups=2, up="raw", weight="dequant", lora=True, rope="none",
         core="einsum_heads_last", mask="where", mask_rank=2, softmax="cast", extra="sink", cache="none",
         door="dynamo", forms="absorbed", fold="never", seed=6),
    Case(B=1, T=1, D=6, H=2, L=2, Q=4, N=4, R=2, V=2, steps=1, dtype="float16", up="blocks", bias=True,
         latent_scale="none", rope="none", join="assign", core="einsum", scale="query", factor=0.0, mask="none",
         extra="probs", gate=True, fault="keys_returned", fold="never", seed=8),
    Case(T=2, D=2, H=2, L=1, Q=3, N=2, R=1, V=3, groups=2, chunk=3, up="blocks", weight="merged", values_first=True,
         lora=True, rope="none", join="assign", layout="heads_last", core="bmm", scale="query", mask="where",
         padded=True, softmax="cast", gate=True, cache="index_copy", door="dynamo", lowering="aten", seed=4),
    Case(B=3, T=2, D=5, H=5, L=5, Q=5, N=5, R=0, groups=2, chunk=3, dtype="float32", up="two", values_first=True,
         tied=True, key_scale="constant", rope="none", rotate="on_read", share="repeat", join="cat_reversed",
         layout="heads_last", core="einsum", scale="both", factor=0.37, mask="add_min", mask_rank=2, padded=True,
         door="dynamo", forms="absorbed", fold="never", seed=3),
    Case(B=3, T=4, D=2, H=1, L=2, Q=1, N=1, V=1, groups=2, up="batched", bias=True, tied=True, latent_scale="vector",
         key_scale="constant", rotate="on_read", share="repeat", scale="query", factor=1.0, gate=True, cache="none",
         forms="absorbed", lowering="aten", seed=9),
    Case(B=1, T=1, D=5, H=1, L=8, N=5, R=7, V=1, groups=2, up="raw", bias=True, latent_scale="vector",
         key_scale="heads", query_scale="norm", rope="none", join="sum", layout="heads_last", core="matmul",
         scale="query", factor=0.37, padded=True, softmax="cast", gate=True, cache="none", lowering="aten", seed=1),
    Case(B=1, T=4, D=4, L=3, R=0, V=4, groups=2, steps=1, dtype="float16", up="einsum", weight="dequant",
         values_first=True, key_scale="vector", rope="none", share="repeat", layout="heads_last", scale="default",
         factor=1.0, mask="keep", cache="index_copy", cut=True, seed=8, beside="gated", latents=3),
    Case(B=1, T=4, D=4, L=6, Q=6, N=6, R=0, V=3, groups=2, steps=1, up="blocks", values_first=True, bias=True,
         latent_scale="constant", rope="none", layout="heads_last", core="einsum", cache="head_axis", reads=True),
    Case(T=4, D=4, H=4, Q=3, R=0, V=4, chunk=2, values_first=True, bias=True, query_scale="positions", rope="none",
         share="repeat_interleave", scale="argument", mask="keep", mask_rank=2, cache="none", fault="keys_returned",
         door="dynamo", forms="absorbed", fold="always", lowering="aten", latents=2),
    Case(B=3, T=2, H=4, L=7, N=6, R=5, V=7, steps=1, chunk=2, up="batched", weight="dequant", bias=True,
         latent_norm=False, rope="none", join="sum", core="einsum_heads_last", extra="softcap", seed=7, reads=True),
    Case(T=1, D=2, H=2, L=2, N=2, V=2, groups=2, dtype="float32", up="two", weight="dequant", key_scale="heads",
         rope="complex", share="repeat_interleave", join="assign", layout="heads_last", scale="query", factor=1.0,
         mask="add", mask_rank=3, cache="index_copy", cut=True, fault="latent_per_head", lowering="aten", seed=4,
         library="flash"),
    Case(T=1, D=1, H=5, L=1, N=2, R=0, V=1, up="blocks", key_scale="vector", query_scale="norm", rope="none",
         share="repeat_interleave", join="assign", layout="heads_last", scale="query", factor=0.37, mask="keep",
         mask_rank=3, cache="joint", fault="rope_on_keys", door="dynamo", fold="never", seed=8, library="xformers"),
    Case(B=1, T=1, D=9, H=4, L=6, N=4, R=6, V=4, steps=1, chunk=2, up="select", values_first=True,
         query_scale="constant", rope="interleaved", share="repeat", join="assign", layout="heads_last",
         scale="argument", cache="none", fault="latent_per_head", forms="absorbed", lowering="aten", seed=9,
         beside="key"),
    Case(T=2, D=3, H=7, L=3, R=0, V=3, tied=True, latent_scale="constant", query_scale="norm", rope="none",
         layout="heads_last", core="einsum_heads_last", scale="both", mask_rank=2, padded=True, fault="latent_per_head",
         door="dynamo", forms="absorbed", fold="always", lowering="aten", seed=4, beside="rows", reads=True),
]  # fmt: skip


@pytest.mark.parametrize("case", [*FOUND[::3], *also("draws", *(one for i, one in enumerate(FOUND) if i % 3))])
def test_cases_that_longer_runs_found(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Runs ``case`` compiled and in eager mode; raises AssertionError on a wrong number or a wrong verdict."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)  # nothing absorbed: what is expected of the faulty ones
        report = _run(case)
    assert report is not None, "the last decode step was not compiled"
    _check_verdict(case, report)


def _run(case: Case) -> Report | None:
    module = GeneratedMLA(case)
    plain, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    last: Report | None = None
    for done, *results, report in side_by_side(module, plain, exact, options_of(case)):
        last = report
        for name, values in zip(("y", "state", "state"), zip(*results, strict=True), strict=False):
            compare(case, f"{name} after {done} tokens", *values)
    for buffers in zip(module.buffers(), plain.buffers(), exact.buffers(), strict=True):
        if buffers[0].is_floating_point():
            compare(case, "cache", *buffers)
    return last


def compare(case: Case, what: str, got: Tensor, eager: Tensor, truth: Tensor) -> None:
    assert (got.shape, got.dtype) == (truth.shape, eager.dtype), what
    if not truth.numel():
        return
    if case.dtype == "float64":
        empty = truth.isnan()
        assert torch.equal(got.isnan(), empty), f"{what}: NaN in other places"
        allowed = THROUGH_FLOAT32 if case.softmax == "cast" else EXACT
        error, size = _error(got, truth, ~empty), _size(truth, ~empty)
    else:
        both = ~(truth.isnan() | eager.isnan())
        assert not got[both].isnan().any(), f"{what}: NaN where eager has none"
        size = _size(truth, both)
        allowed = WORSE_THAN_EAGER * (_error(eager, truth, both) / size + 32 * torch.finfo(got.dtype).eps)
        error = _error(got, truth, both)
    assert error <= allowed * size, f"{what}: relative error {error / size:.2e}, allowed {allowed:.2e}"


def _error(a: Tensor, truth: Tensor, where: Tensor) -> float:
    return float((a.double() - truth)[where].abs().max()) if where.any() else 0.0


def _size(truth: Tensor, where: Tensor) -> float:
    return max(float(truth[where].abs().max()), 1e-6) if where.any() else 1.0


def _check_verdict(case: Case, report: Report) -> None:
    """What must have become of the attention in a step of ``case.chunk`` queries."""
    assert len(report.sites) == 1, [str(s.where) for s in report.sites]
    (site,) = report.sites
    said = f"{site.verdict} ({site.code}): {site.reason}"
    if not case.legal:
        # With one head the rows of K are shared by all heads whatever was done to them: rightly absorbed through V.
        sound = site.parts == SOUND.get(case.fault) or case.H == 1
        # Keys that a compiled step returns may carry their rows instead, of which the next reader makes them.
        sound |= case.fault == "keys_returned" and case.door == "dynamo"
        # Absorbed head by head: with several queries to a head of K, and where heads take the place of the batch.
        if case.fault == "latent_per_head" and (case.groups > 1 or case.B == 1):
            sound |= bool(site.parts) and all(part.startswith("heads ") for part in site.parts)
            sound |= not site.parts and site.dims is not None and site.dims.G == case.H
        if case.fault == "rope_on_keys":  # an image of two rows that all heads share: the latent by cos, and by sin
            sound |= not site.parts and site.dims is not None and site.dims.A > 0
        if case.fault == "latent_per_head" and case.beside != "none":
            # Each head is a group with latents of its own, or what is added is an image of rows that all heads share.
            sound |= site.parts in (("keys", "values"), ("keys",), ("values",))
        if case.fault == "mask_from_keys" and case.latents > 1:  # the mask gets a product of its own, of one column
            sound |= site.parts == ("keys", "values")
        assert site.verdict != "absorbed" or sound, f"{said} {site.parts}"
        return
    if case.forms == "expanded":
        assert site.verdict != "absorbed", said
    elif not narrow(case):  # nothing is gained by absorbing: any reason to keep it will do
        assert site.verdict in ("absorbed", "kept") or case.beside != "none", said
    elif case.chunk == 1 or case.forms == "absorbed":
        # Groups of two heads, whose latents are two values wide, gain so little that a tie is decided by what is kept.
        tie = case.latents > 1 and min(case.N, case.V) <= case.L and site.code == "cost_prefill"
        # Known and left: a scale of each head on gated rows that each group of heads has of its own.
        odd = case.latents > 1 and case.beside == "gated" and case.key_scale == "heads"
        # One token beside one token: neither tells along which axis of its operands the tokens lie.
        odd |= case.cache == "apart" and case.T == case.chunk == 1
        assert site.verdict == "absorbed" or tie or (odd and site.code == "unsupported_op"), said


def narrow(case: Case) -> bool:
    """Whether the latent rows hold fewer values than what they are expanded to."""
    if case.beside != "none":  # no row of a sum may be wider than what it makes by itself
        own = case.H * min(case.N, case.V)
        if case.beside == "gated" and not case.latent_norm:  # the gate reads what makes the latent of narrower rows
            return False
        return max(case.L, 2) < own and case.L + 2 + case.N + case.R < case.H * (case.N + case.R + case.V)
    return case.L < case.H * (case.N + case.V) and case.L + case.R < case.H * (case.N + case.R + case.V)
