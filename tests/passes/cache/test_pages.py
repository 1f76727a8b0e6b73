"""Decode steps over pages: the graph before and after, its numbers, and each near miss, by its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from mla_compile import ops
from mla_compile.capture import capture
from mla_compile.core.program import Program
from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.packed import packed_width
from mla_compile.passes.cache.page_rows import rows_of_pages, write_to_pages
from mla_compile.passes.cache.pages import (
    PagedRows,
    Unpaged,
    find_pages,
    not_shared,
    pool_rows,
    read_batch_from,
    step_over_pages,
)
from tests.support.programs import canonical, seeded
from tests.support.tiers import full

pytestmark = pytest.mark.thorough

VOCAB, H, L, R, PAGE = 11, 3, 10, 4, 4
CACHES = ("c_past", "r_past")
Step = Callable[..., Any]


class Model(nn.Module):
    """A step as passes leave it: an embedding, new rows, the operator over the joined ones."""

    def __init__(self, attend: Step) -> None:
        super().__init__()
        self.embed = nn.Parameter(seeded(VOCAB, L + R, seed=1, dtype=torch.float32), requires_grad=False)
        self.query = nn.Parameter(seeded(L + R, H * (L + R), seed=2, dtype=torch.float32), requires_grad=False)
        self.attend = attend

    def forward(self, input_ids: torch.Tensor, c_past: torch.Tensor, r_past: torch.Tensor) -> Any:
        x = self.embed[input_ids]
        q = (x @ self.query).unflatten(2, (H, L + R))
        return self.attend(q, x[..., :L].sin(), x[..., L:], c_past, r_past)


def op(q: torch.Tensor, c: torch.Tensor, r: torch.Tensor | None, **more: Any) -> torch.Tensor:
    return ops.decode_attention(q, c, r, scale=0.3, **more)[0]


def some(table: dict[str, Any], *rare: str) -> list[Any]:
    """Its cases, of which the full tier alone tries the ``rare`` ones."""
    rows = {name: case if isinstance(case, tuple) else (case,) for name, case in table.items()}
    marks = {name: full("combination") if name in rare else () for name in table}
    return [pytest.param(*rows[name], id=name, marks=marks[name]) for name in table]


def plain(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c, r).sum(2), c, r


def step(attend: Step, past: int = 5) -> tuple[Program, Model]:
    model = Model(attend)
    B, T = Dim("batch"), Dim("past", min=0)
    given = (torch.tensor([[3], [7]]), seeded(2, past, L, dtype=torch.float32), seeded(2, past, R, dtype=torch.float32))
    exported = torch.export.export(model, given, dynamic_shapes=({0: B}, {0: B, 1: T}, {0: B, 1: T}), strict=False)
    program = capture.from_exported(exported)
    canonical(program)
    read_batch_from(program, "input_ids")
    return program, model


def written(pools: tuple[torch.Tensor, ...], table: torch.Tensor, past: list[list[torch.Tensor]]) -> None:
    """Puts the rows ``past`` of each request and cache where its pages are."""
    for b, rows in enumerate(past):
        for pool, own in zip(pools, rows, strict=True):
            for t, row in enumerate(own):
                pool[table[b, t // PAGE], t % PAGE] = row


def alone(model: Model, ids: torch.Tensor, past: list[list[torch.Tensor]], b: int) -> Any:
    """What the step returns for one request."""
    return model(ids[b : b + 1], *(own[None] for own in past[b]))


def found_in(program: Program) -> tuple[PagedRows, ...]:
    found = find_pages(program, CACHES)
    assert isinstance(found, tuple), found
    return found


def axes_of_one(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    """Rows with an axis for one head, as transformers keeps them, joined there and read without it."""
    c4 = torch.cat([c_past[:, None], c[:, None]], 2)
    r4 = torch.cat([r_past[:, None], r[:, None]], 2)
    return op(q, c4.squeeze(1), r4[:, 0:1].reshape(r4.shape[0], -1, R)).sum(2), c4.squeeze(1), r4.squeeze(1)


def twice(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    """Two attentions over the same rows, as of layers that share a cache."""
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return (op(q, c, r) + op(q.cos(), c, r)).sum(2), c, r


@pytest.mark.singly
@pytest.mark.parametrize("attend", [plain, axes_of_one, twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("window", [0, 3])
def test_each_request_has_a_length_of_its_own(attend: Step, window: int):
    layers = 2 if attend is twice else 1
    if window:
        attend = _windowed(attend, window)
    program, model = step(attend)
    found = found_in(program)
    assert (not_shared(found) is not None) == bool(window)
    assert [(rows.width, rows.is_latent) for rows in found] == [(L, True), (R, False)]
    lengths, ids = [1, 9, 4], torch.tensor([[3], [7], [1]])
    table = torch.tensor([[2, 0, 0], [5, 3, 1], [4, 0, 0]], dtype=torch.int32)
    pools = tuple(torch.full((6, PAGE, rows.width), torch.nan) for rows in found)
    past = [[seeded(n - 1, w, seed=n, dtype=torch.float32) for w in (L, R)] for n in lengths]
    written(pools, table, past)
    names = step_over_pages(program, found, pools, "input_ids", packed=False)
    graph = program.gm.graph
    assert len(graph.find_nodes(op="call_function", target=ops.paged_decode_attention)) == layers
    assert not graph.find_nodes(op="call_function", target=ops.decode_attention)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert {n.name for n in program.placeholders} - program.weights.keys() == {"input_ids", *names}
    values = {**program.weights, "input_ids": ids}
    values |= dict(zip(names, (table, torch.tensor(lengths, dtype=torch.int32), *pools), strict=True))
    (out,) = program.gm(*[values[n.name] for n in program.placeholders])
    for b, n in enumerate(lengths):
        want, *present = alone(model, ids, past, b)
        torch.testing.assert_close(out[b], want[0], rtol=1e-5, atol=1e-5)
        for pool, own, info in zip(pools, present, found, strict=True):
            assert torch.equal(rows_of_pages(pool, table[b], n, info), own[0])


def _windowed(attend: Step, window: int) -> Step:
    def inner(*args: Any) -> Any:
        global op
        before = op
        op = lambda q, c, r, **more: before(q, c, r, window=window, **more)  # noqa: E731
        try:
            return attend(*args)
        finally:
            op = before

    return inner


def test_rows_in_float8_are_bytes_with_their_scale():
    program, model = step(plain)
    found = found_in(program)
    kinds = [pool_rows(rows, packed=True) for rows in found]
    assert kinds == [(packed_width(L), torch.uint8), (R, torch.float32)]
    pools = tuple(torch.zeros(4, PAGE, width, dtype=dtype) for width, dtype in kinds)
    names = step_over_pages(program, found, pools, "input_ids", packed=True)
    table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    ids = torch.tensor([[3], [7]])
    values = {**program.weights, "input_ids": ids, **dict(zip(names, (table, lengths, *pools), strict=True))}
    (out,) = program.gm(*[values[n.name] for n in program.placeholders])
    want, c, _ = model(ids, torch.zeros(2, 0, L), torch.zeros(2, 0, R))
    kept = torch.stack([rows_of_pages(pools[0], row, 1, found[0]) for row in table])
    error = (kept - c).norm() / c.norm()
    assert 1e-3 < error < 0.06
    torch.testing.assert_close(out, want, rtol=0.2, atol=0.1)
    assert not torch.equal(out, want)


def _masked(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    mask = (torch.arange(c.shape[1]) % 2 == 0)[None, None, None].expand(c.shape[0], 1, 1, c.shape[1])
    return op(q, c, r, mask=mask), c, r


def _lengths(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c, r, seq_lens=torch.full((c.shape[0],), 2, dtype=torch.int32)), c, r


def _returned_twice(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c, r).sum() + c.mean(), c, r


def _length_used(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    joined, rope = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q * (1 + c_past.shape[1]), joined, rope), joined, rope


def _past_used(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    joined, rope = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, joined, rope).sum() + c_past.sum(), joined, rope


def _in_front(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c, c_past], 1), torch.cat([r_past, r], 1)
    return op(q, c, r), c, r


def _changed(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c * 2, r), c, r


def _windowed_cache(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c, r), c[:, 1:], r[:, 1:]


def _other_rope(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    joined, rope = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, joined, rope.sin()) + op(q, joined, rope), joined, rope


def _two_rows(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c.expand(-1, 2, -1)], 1), torch.cat([r_past, r.expand(-1, 2, -1)], 1)
    return op(q, c, r), c, r


def _swapped(q: Any, c: Any, r: Any, c_past: Any, r_past: Any) -> Any:
    c, r = torch.cat([c_past, c], 1), torch.cat([r_past, r], 1)
    return op(q, c.flip(0), r), c, r


NEAR_MISSES = {
    "a mask that hides rows": (_masked, "hides some of the rows that are cached"),
    "lengths of the model's own": (_lengths, "hides some of the rows that are cached"),
    "rows that something else reads": (_returned_twice, "the rows of c_past are also read by"),
    "a length that reaches the query": (_length_used, "reads c_past, the cache or its length"),
    "old rows read without the new": (_past_used, "reads c_past, the cache or its length"),
    "new rows in front": (_in_front, "the cache c_past does not grow by new rows behind the old ones"),
    "rows that are changed before": (_changed, "the rows of c_past are also read by"),
    "rows that leave the cache": (_windowed_cache, "the cache c_past does not grow"),
    "rotary keys that are no cache": (_other_rope, "also read by"),
    "several rows in a step": (_two_rows, "expected [B,T,width] by one"),
    "rows of other sequences": (_swapped, "the rows of c_past are also read by"),
}


RARE = ("lengths of the model's own", "rows that are changed before", "rows that leave the cache")
"""Of which others show the reason."""


@pytest.mark.parametrize(("attend", "told"), some(NEAR_MISSES, *RARE))
def test_near_misses(attend: Step, told: str):
    program, _ = step(attend)
    before = str(program.gm.graph)
    found = find_pages(program, CACHES)
    assert isinstance(found, Unpaged)
    assert told in found.reason
    assert str(program.gm.graph) == before


@pytest.mark.singly
@pytest.mark.parametrize("packed", [False, True], ids=["values", "float8"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_write_each_row_once(packed, ranks, monkeypatch):
    """Pieces of any length, from any token on: all rows of all ranks are those of one rank that has all of them."""
    program, _ = step(plain)
    (rows, _), table = found_in(program), torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    width, dtype = pool_rows(rows, packed=packed)
    shares = [Sharing("ranks", tuple(range(ranks)), rank) for rank in range(ranks)]
    pools = [torch.zeros(4, PAGE, width, dtype=dtype) for _ in shares]
    whole = torch.zeros(4 * ranks, PAGE, width, dtype=dtype)
    in_order = torch.arange(4 * ranks)
    values, start = seeded(4 * PAGE * ranks, L, seed=0, dtype=torch.float32), 0
    for count in (3, 1, 6, 2 * PAGE):
        piece = values[start : start + count]
        write_to_pages(whole, in_order, start, piece, rows)
        for pool, sharing in zip(pools, shares, strict=True):
            write_to_pages(pool, table, start, piece, rows, sharing)
        start += count
    own = [pool[table].reshape(-1, width)[: shares[0].capacity(start)] for pool in pools]

    def all_rows(self: Sharing, given: torch.Tensor, tokens: int) -> torch.Tensor:
        assert torch.equal(given, own[self.rank])
        return torch.stack(own, 1).flatten(0, 1)[:tokens]

    monkeypatch.setattr(Sharing, "all_rows", all_rows)
    wanted = rows_of_pages(whole, in_order, start, rows)
    for pool, sharing in zip(pools, shares, strict=True):
        assert torch.equal(rows_of_pages(pool, table, start, rows, sharing), wanted)
