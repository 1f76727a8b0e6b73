"""Generated layers that keep K and V in memory of their own, through both doors, two sessions each.

Every call is compared with the same module in float64, and so is what is in the memory after it. Legal ones are
absorbed. ``MLA_PROPERTY_OWN`` sets how many cases are drawn (8 by default) and ``MLA_PROPERTY_SEED`` draws others.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import mla_compile
import mla_compile.backend
from mla_compile.errors import MlaCompileWarning
from tests.support.generated_own import OwnCase, OwnMLA, own_cases, visible
from tests.support.generator import Case, check_each, drawn
from tests.support.tiers import also
from tests.test_property import compare, narrow

CASES = int(os.environ.get("MLA_PROPERTY_OWN", "8"))
SEED = int(os.environ.get("MLA_PROPERTY_SEED", "0"))
PARTS = 8


@pytest.mark.parametrize("door", ["optimize", "compile"])
@pytest.mark.parametrize("part", [0, *also("draws", *range(1, PARTS))])
def test_generated_layers_with_memory(part: int, door: str) -> None:
    check_each(drawn(max(1, CASES // PARTS), SEED * PARTS + part, own_cases()), partial(check, door=door))


FOUND = {
    "expanded from rows, batch and heads merged": OwnCase(
        case=Case(B=3, T=2, D=6, H=6, L=6, N=8, R=4, V=6, rope="none", core="bmm", forms="expanded", mask="where"),
        held="buffer", written="index_copy_replaces", heads_last=False, more=2, joined=False, whole=False,
        emptied="zero", back=4,
    ),
    "emptied by the first call": OwnCase(
        case=Case(B=3, T=3, H=7, L=7, Q=4, N=5, R=0, rope="none", mask="fill_min", up="unbind"),
        held="buffer", written="pairs", heads_last=True, more=2, joined=False, whole=True, emptied="first_call_set",
        back=4,
    ),
}  # fmt: skip


@pytest.mark.singly
@pytest.mark.parametrize("door", ["optimize", "compile"])
@pytest.mark.parametrize("name", FOUND)
def test_cases_that_failed(name: str, door: str) -> None:
    """A view of values that lay otherwise in memory; and a graph that writes zeros first had no rows beside."""
    check(
        replace(FOUND[name], case=replace(FOUND[name].case, steps=2, chunk=1, cache="tensors", rotate="on_write")), door
    )


@torch.no_grad()
def check(own: OwnCase, door: str) -> None:
    """Raises AssertionError on a wrong number or a wrong verdict."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        _check(own, door)


def opened(module: torch.nn.Module, door: str, options: dict[str, Any]) -> tuple[Any, Callable[[], list[Any]]]:
    """The module behind a door, and a function that returns the sites of all its graphs."""
    if door == "optimize":
        fast: Any = mla_compile.optimize(module, **options)
        return fast, lambda: list(fast.mla_report.sites)
    mla_compile.backend._recent.clear()
    reports = mla_compile.backend.reports
    return torch.compile(module, backend="mla", options=options), lambda: [s for r in reports() for s in r.sites]


def _check(own: OwnCase, door: str) -> None:
    case = own.case
    torch._dynamo.reset()
    module = OwnMLA(own)
    plain, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    if own.held != "made":
        exact.put(exact.zeros())  # what is no buffer is not moved with its module
    options = {"codegen": "eager", "strict": True, "forms": case.forms, "fold": case.fold, "lowering": case.lowering}
    fast, sites = opened(module, door, options)
    generator = torch.Generator().manual_seed(case.seed)
    done = 0
    for number in range(2):
        for count in (case.T, *[case.chunk] * case.steps):
            x = torch.randn(case.B, count, case.D, generator=generator, dtype=torch.float64).to(module.w_c.dtype)
            keep = visible(own, plain, done, count)
            seen = len(sites())
            results = fast(x, done, keep), plain(x, done, keep), exact(x.double(), done, keep)
            compare(case, f"y after {done + count} tokens of session {number}", *results)
            for caches in zip(fast.held(), plain.held(), exact.held(), strict=True):
                compare(case, f"memory after {done + count} tokens", *(cache + 0 for cache in caches))
            done += count
        said = [f"{site.verdict} ({site.code}): {site.reason}" for site in sites()]
        if number == 0 and may_be_rows(case) and case.forms != "expanded":
            expected = {"absorbed"} if case.chunk == 1 or case.forms == "absorbed" else {"absorbed", "kept"}
            assert {site.verdict for site in sites()[seen:]} <= expected, said
            assert not any(site.verdict == "refused" for site in sites()), said
        for one in (fast, plain, exact):
            one.empty()
        done = max(0, done - own.back) if own.emptied == "not" else 0


def may_be_rows(case: Case) -> bool:
    """Whether rows must stand for K and V.

    Values of width one may be taken for an axis of the rows. Where no norm comes between, or the position is
    a constant, keys are images of the hidden state, which may be narrower than the latent or than the rotary key.
    """
    from_the_hidden_state = not case.latent_norm or case.D <= case.R
    return case.legal and narrow(case) and case.V > 1 and not from_the_hidden_state
