"""Rows that lie in several memories: each is read where it lies, and where they cannot be told apart the join stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile.codes import Code
from tests.support.made import Made
from tests.support.programs import OP, error, export, optimized, run, seeded
from tests.support.tiers import also

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("native_kernel"),
]

B, H, W, T, C = 2, 3, 8, 5, 7


class Joined(nn.Module):
    """Queries [B,H,1,W] over the rows [B,1,T,W] and [B,1,C,W], joined; ``mask`` makes that of the scores."""

    def __init__(self, mask=None, columns=W, sinks=True):
        super().__init__()
        self.mask, self.columns = mask, columns
        self.sinks = nn.Parameter(seeded(H, seed=5)) if sinks else None

    def forward(self, q, *memories):
        rows = torch.cat(memories, 2)
        k = rows.expand(-1, H, -1, -1)
        scores = q @ k.mT * 0.4
        if self.mask is not None:
            scores = scores + self.mask(q, *memories)
        if self.sinks is None:
            return scores.softmax(-1) @ k[..., : self.columns]
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ k[..., : self.columns]


LOWEST = torch.finfo(torch.float64).min


def hides(number, rows, fill=float("-inf")):
    """``fill`` for the first rows, as many as the batch entry's number and one more."""
    seen = torch.arange(rows.shape[2]) > torch.arange(rows.shape[0])[:, None] + number
    return torch.zeros(seen.shape, dtype=rows.dtype).masked_fill(~seen, fill)[:, None, None]


def low(rows):
    """Numbers that only the model knows to be low."""
    return rows[..., :1].mT * 0 - 1e30


def lists(q, rows, count=3):
    at = torch.einsum("bhsw,bcw->bsc", q, rows[:, 0]).topk(count).indices[:, None]
    return q.new_full((B, 1, q.shape[2], rows.shape[2]), float("-inf")).scatter(-1, at, 0.0)


APART = {
    "no mask": None,
    "zeros behind": lambda q, a, b: F.pad(hides(0, a), (0, b.shape[2])),
    "a mask of each": lambda q, a, b: torch.cat([hides(0, a), hides(2, b)], -1),
    "a list of the second": lambda q, a, b: torch.cat([hides(0, a), lists(q, b)], -1),
    "a list of the first": lambda q, a, b: torch.cat([lists(q, a), hides(1, b)], -1),
    "a list of each": lambda q, a, b: torch.cat([lists(q, a, 2), lists(q, b)], -1),
    "one of the two hidden": lambda q, a, b: torch.cat([hides(T, a), hides(0, b)], -1),
    "all hidden": lambda q, a, b: torch.cat([hides(T, a), hides(C, b)], -1),
}
TOGETHER = {
    "one mask of both": lambda q, a, b: hides(3, torch.cat([a, b], 2)),
    "joined elsewhere": lambda q, a, b: torch.cat([hides(0, b), hides(2, a)], -1),
    "zeros in front": lambda q, a, b: F.pad(hides(0, b), (a.shape[2], 0)),
    "numbers behind": lambda q, a, b: F.pad(hides(0, a), (0, b.shape[2]), value=-1.5),
    "a list of both": lambda q, a, b: lists(q, torch.cat([a, b], 2)),
    "numbers that hide all": lambda q, a, b: torch.cat([hides(T, a, LOWEST), hides(C, b, LOWEST)], -1),
    "numbers of the rows": lambda q, a, b: torch.cat([low(a), low(b)], -1),
}
GIVEN = [seeded(B, H, 1, W, seed=1), seeded(B, 1, T, W, seed=2), seeded(B, 1, C, W, seed=3)]


def attended(module, given=GIVEN, **options):
    """The operators of the only site; numbers are compared with the module's own."""
    done = optimized(export(module, given), lowering="op", **options)
    assert [site.code for site in done.report.sites] == [Code.SHARED_ROWS]
    assert done.fused == 1
    with torch.no_grad():
        assert error(run(done.program, *given)[0], module(*given)) < 1e-12
    nodes = list(done.program.gm.graph.nodes)
    joins = [n for n in nodes if str(n.target).startswith("aten.cat") and n.meta["val"].shape[-2:] == (T + C, W)]
    return [n for n in nodes if str(n.target) == OP], joins


@pytest.mark.singly
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("name", APART)
def test_each_memory_is_read_by_itself(name, sinks):
    found, joins = attended(Joined(APART[name], sinks=sinks).eval())
    assert [n.args[1].meta["val"].shape[1] for n in found] == [T, C]
    assert joins == []
    assert sum("indices" in n.kwargs for n in found) == {"a list of each": 2}.get(name, int("list" in name))


@pytest.mark.singly
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("name", TOGETHER)
def test_masks_that_are_of_no_memory_alone(name, sinks):
    found, joins = attended(Joined(TOGETHER[name], sinks=sinks).eval())
    assert len(found) == 1
    assert joins


def test_values_of_some_columns_are_read_of_the_joined_rows():
    found, _ = attended(Joined(columns=W // 2).eval())
    assert len(found) == 1


def test_three_memories_and_an_empty_one():
    more = [*GIVEN, seeded(B, 1, 4, W, seed=4), seeded(B, 1, 0, W)]
    found, _ = attended(Joined().eval(), more, verify=True)
    assert [n.args[1].meta["val"].shape[1] for n in found] == [T, C, 4]


def test_a_part_that_weighs_wrong_is_found(monkeypatch):
    from mla_compile.passes.rewrite import by_hand

    attend = by_hand._Memories.attend

    def wrong(self):
        out, lse, indices = attend(self)
        return self.builder.call(torch.ops.aten.mul.Tensor, out, 1.001), lse, indices

    monkeypatch.setattr(by_hand._Memories, "attend", wrong)
    done = optimized(export(Joined().eval(), GIVEN), lowering="op", verify=True)
    assert (done.fused, [site.code for site in done.report.sites]) == (0, [Code.VERIFY_FAILED])


def test_large_scores_do_not_scale_the_result():
    """A log-sum-exp of some hundreds is rounded by 1e-5 in float32, and so would its exponential be."""
    exact, module = Joined(APART["a list of the second"]).eval(), Joined(APART["a list of the second"]).eval().float()
    program = optimized(export(module, [x.float() for x in GIVEN]), lowering="op").program
    worst = {}
    for trial in range(40):
        given = [8 * seeded(*x.shape, seed=3 * trial + k) for k, x in enumerate(GIVEN)]
        with torch.no_grad():
            truth, single = exact(*given), [x.float() for x in given]
            for name, found in (("ours", run(program, *single)[0]), ("own", module(*single))):
                errors = (found - truth).norm(dim=-1) / truth.norm(dim=-1)
                worst.setdefault(name, []).append(errors.flatten())
    ours, own = (torch.cat(worst[name]).quantile(0.9) for name in ("ours", "own"))
    assert ours < 2 * own, (ours, own)


def test_one_more_row_costs_what_choosing_costs():
    counted = []
    for rows in (8, 28):
        given = [*GIVEN[:2], seeded(B, 1, rows, W, seed=3)]
        done = optimized(export(Joined(APART["a list of the second"]).eval(), given), lowering="op")
        with FlopCounterMode(display=False) as counter:
            run(done.program, *given)
        counted.append(counter.get_total_flops())
    assert counted[1] - counted[0] == 20 * 2 * B * W  # heads are summed before


def near(q, rows, window):
    """Minus infinity but for the last ``window`` rows that each query has behind it; the last query sees the last."""
    S, N = q.shape[2], rows.shape[2]
    behind = torch.arange(N - S, N)[:, None] - torch.arange(N)
    return torch.zeros(S, N, dtype=q.dtype).masked_fill((behind < 0) | (behind >= window), float("-inf"))


@pytest.mark.singly
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("window", "count", "fused"), [(5, 4, 1), (12, 12, 0), (60, 4, 0)])
def test_a_prompt_whose_queries_read_few_keys(window, count, fused, symbolic):
    """Half of 30 and 12 keys at most, by a window and a list; products read all of them."""

    def mask(q, a, b):
        own = near(q, a, window).expand(q.shape[0], 1, -1, -1)
        return torch.cat([own, lists(q, b, count)], -1)

    module, given = Joined(mask).eval(), [seeded(B, 1, n, W, seed=n) for n in (30, 12)]
    given = [seeded(B, H, 20, W), *given]
    shapes = ({2: torch.export.Dim("queries", min=2, max=29)}, (None, None)) if symbolic else None
    done = optimized(export(module, given, shapes), lowering="op", verify=True)
    assert done.fused == fused
    for queries in (20, 11) if symbolic else (20,):
        more = [seeded(B, H, queries, W, seed=8), *given[1:]]
        with torch.no_grad():
            assert error(run(done.program, *more)[0], module(*more)) < 1e-12


def test_a_prompt_makes_no_copies_of_rows_and_no_scores_of_all() -> None:
    """30 rows of the last tokens and 12 of a list for 20 queries: no axis has 42, and no other holds all for each."""

    def mask(q, a, b):
        return torch.cat([near(q, a, 5).expand(q.shape[0], 1, -1, -1), lists(q, b, 4)], -1)

    module = Joined(mask).eval()
    given = [seeded(B, H, 20, W), seeded(B, 1, 30, W), seeded(B, 1, 12, W)]
    done = optimized(export(module, given), lowering="op")
    both, queries = frozenset((42, 43)), frozenset((20,))
    for call, of_ours in ((lambda: module(*given), False), (lambda: run(done.program, *given), True)):
        with torch.no_grad(), Made() as made:
            call()
        assert (not made.with_axes(both)) == of_ours, "rows or scores of both"
        assert (not made.with_axes(queries, frozenset((30, 31)))) == of_ours, "a mask of the last tokens"
        many = [shape for _, shape in made.with_axes(queries, frozenset((12, 13)))]
        assert (set(many) == {(B, 20, 12)}) == of_ours, "numbers from which the list is chosen"


class Ring(nn.Module):
    """x [B,1,W] at position [1]: each row overwrites the oldest of five, and which is where is kept beside them."""

    def __init__(self, *, beside):
        super().__init__()
        self.beside, self.sinks = beside, nn.Parameter(seeded(H, seed=5))
        self.register_buffer("rows", torch.zeros(B, 5, W, dtype=torch.float64))
        self.register_buffer("held", torch.full((5,), 10**6))

    def forward(self, x, position, compressed):
        self.rows[:, position % 5], self.held[position % 5] = x.sin(), position
        q = F.rms_norm(x[:, None] * torch.arange(1, H + 1)[:, None, None], (W,)) + x[:, None]
        mask = torch.zeros(1, 5, dtype=x.dtype).masked_fill(self.held > position[:, None], float("-inf"))
        rows = self.rows
        if self.beside:
            rows, mask = torch.cat([rows, compressed], 1), F.pad(mask, (0, compressed.shape[1]))
        k = rows[:, None].expand(-1, H, -1, -1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
        return torch.cat([q @ k.mT * 0.4 + mask, sinks], -1).softmax(-1)[..., :-1] @ k


@pytest.mark.parametrize("beside", [True, *also("combination", False)])
def test_a_ring_keeps_its_order_by_positions(beside):
    torch.compiler.reset()
    own, compressed = Ring(beside=beside).eval(), seeded(B, C, W)
    fast = mla_compile.optimize(copy.deepcopy(own), codegen="eager")
    with torch.no_grad():
        for at in range(8):
            given = seeded(B, 1, W, seed=at), torch.tensor([at]), compressed
            torch.testing.assert_close(fast(*given), own(*given))
    (site,) = fast.mla_report.sites
    assert site.code is Code.SHARED_ROWS
    assert any(("lie in 2 memories" if beside else "are one operator now") in note for note in site.notes)
