"""Lists of keys chosen among rows in pages: the numbers of each request alone, and each near miss, by its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils._sympy.functions import Min

from mla_compile import ops
from mla_compile.batching.table import drop_asserts
from mla_compile.capture import capture
from mla_compile.core.program import Program
from mla_compile.passes.cache.page_rows import rows_of_pages
from mla_compile.passes.cache.pages import Unpaged, find_pages, read_batch_from, step_over_pages
from mla_compile.passes.ir.sizes import holds
from tests.passes.cache.test_pages import CACHES, PAGE, L, Model, R, alone, op, some, written
from tests.support.programs import canonical, seeded

pytestmark = pytest.mark.thorough

K = 3


def choosing(
    *,
    keys: Callable[[Tensor], Tensor] = lambda r: r,
    scored: Callable[[Tensor, int], Tensor] = lambda s, T: s,
    k: Callable[[Any], Any] = lambda T: torch.sym_min(K, T),
    largest: bool = True,
    listed: Callable[[Tensor], Tensor] = lambda i: i,
    after: Callable[[Tensor, Any, Tensor, Tensor], Tensor] = lambda out, chosen, scores, rows: out,
) -> Callable[..., Any]:
    """A step whose second cache has the keys of an indexer."""

    def attend(q: Tensor, c: Tensor, r: Tensor, c_past: Tensor, r_past: Tensor) -> Any:
        c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
        T = c.shape[1]
        scores = scored(ops.index_scores(q[..., L:], keys(r), q.sum(-1), 0.5), T)
        chosen = scores.topk(k(T), dim=-1, largest=largest)
        out = op(q[..., :L], c, None, indices=listed(chosen.indices).to(torch.int32)).sum(2)
        return after(out, chosen, scores, r), c, r

    return attend


def step(attend: Callable[..., Any], past: int = 5) -> tuple[Program, Model]:
    model = Model(attend)
    B, T = Dim("batch"), Dim("past", min=0)
    given = (torch.tensor([[3], [7]]), *(seeded(2, past, width, dtype=torch.float32) for width in (L, R)))
    shapes = ({0: B}, {0: B, 1: T}, {0: B, 1: T})
    exported = torch.export.export(
        model, given, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
    )
    program = capture.from_exported(exported)
    canonical(program)
    drop_asserts(program)
    read_batch_from(program, "input_ids")
    return program, model


def nothing_hidden(scores: Tensor, T: int) -> Tensor:
    """The mask of one query among rows that are all before it, as models write it."""
    return scores.masked_fill(~(torch.arange(T) <= torch.arange(T - 1, T)[:, None]), -torch.inf)


CHOICES = {
    "plain": choosing(),
    "a mask that hides nothing": choosing(scored=nothing_hidden),
    "in float64": choosing(scored=lambda s, T: s.double()),
    "other axes of one": choosing(scored=lambda s, T: s.squeeze(1), listed=lambda i: i.long().unsqueeze(1)),
}


@pytest.mark.parametrize("attend", some(CHOICES, "plain", "a mask that hides nothing", "in float64"))
def test_each_request_chooses_among_its_own_rows(attend):
    """With fewer, as many, and more rows than are chosen, in pages whose other rows are NaN."""
    program, model = step(attend)
    found = find_pages(program, CACHES)
    assert isinstance(found, tuple), found
    assert [(rows.is_latent, len(rows.lists)) for rows in found] == [(True, 0), (False, 1)]
    lengths, ids = [1, 9, 3, 7], torch.tensor([[3], [7], [1], [9]])
    table = torch.tensor([[2, 0, 0], [5, 3, 1], [4, 0, 0], [7, 6, 0]], dtype=torch.int32)
    pools = tuple(torch.full((8, PAGE, rows.width), torch.nan) for rows in found)
    past = [[seeded(n - 1, width, seed=n, dtype=torch.float32) for width in (L, R)] for n in lengths]
    written(pools, table, past)
    names = step_over_pages(program, found, pools, "input_ids", packed=False)
    assert not program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    values = {**program.weights, "input_ids": ids}
    values |= dict(zip(names, (table, torch.tensor(lengths, dtype=torch.int32), *pools), strict=True))
    (out,) = program.gm(*[values[n.name] for n in program.placeholders])
    for b, n in enumerate(lengths):
        want, *present = alone(model, ids, past, b)
        torch.testing.assert_close(out[b], want[0], rtol=1e-5, atol=1e-5)
        for pool, own, info in zip(pools, present, found, strict=True):
            assert torch.equal(rows_of_pages(pool, table[b], n, info), own[0])


NEAR_MISSES = {
    "rows that are hidden": (
        choosing(scored=lambda s, T: s.masked_fill(torch.arange(T) % 2 == 0, -torch.inf)), "changes the scores",
    ),
    "the newest row is hidden": (
        choosing(scored=lambda s, T: s.masked_fill(~(torch.arange(T) < T - 1), -torch.inf)), "changes the scores",
    ),
    "scores that grow with the place": (choosing(scored=lambda s, T: s + torch.arange(T)), "changes the scores"),
    "all of them, in order": (choosing(k=lambda T: T), "chooses no fixed number of rows"),
    "the worst": (choosing(largest=False), "chooses no fixed number of rows"),
    "keys that are changed": (choosing(keys=lambda r: 2 * r), "the rows of r_past are also read by"),
    "places that are moved": (choosing(listed=lambda i: (i - 1).clamp(min=0)), "reads the list"),
    "a list that is read": (choosing(after=lambda o, chosen, s, r: o + chosen.indices.sum()), "reads the list"),
    "chosen scores that are read": (choosing(after=lambda o, chosen, s, r: o + chosen.values.sum()), "are chosen"),
    "scores that are read": (choosing(after=lambda o, chosen, s, r: o + s.sum()), "are read by 2 operators"),
    "keys that are read": (choosing(after=lambda o, chosen, s, r: o + r.sum()), "the rows of r_past are also read by"),
}  # fmt: skip

RARE = (
    "the newest row is hidden", "all of them, in order", "a list that is read", "keys that are read",
)  # fmt: skip
"""Of which others show the reason."""


@pytest.mark.parametrize(("attend", "told"), some(NEAR_MISSES, *RARE))
def test_near_misses(attend, told):
    program, _ = step(attend)
    before = str(program.gm.graph)
    found = find_pages(program, CACHES)
    assert isinstance(found, Unpaged)
    assert told in found.reason
    assert str(program.gm.graph) == before


def test_comparisons_that_hold_for_all_sizes():
    s, t = sympy.symbols("s t", integer=True, nonnegative=True)
    for least in (Min, sympy.Min):
        assert holds(sympy.Le(least(8, s + 1), s + 1, evaluate=False))
        assert holds(sympy.Ge(s + 3, 2 + least(s + t, s), evaluate=False))
        assert not holds(sympy.Le(-least(8, s), -s, evaluate=False))
        assert not holds(sympy.Le(s, least(8, s), evaluate=False))
    assert holds(sympy.Lt(s, s + 1, evaluate=False))
    assert not holds(sympy.Lt(s, s, evaluate=False))
    assert not holds(sympy.Ge(s, 1))
    assert holds(sympy.Eq(2 * (s + 1), 2 * s + 2, evaluate=False))
    assert not holds(sympy.Ne(s, t))
