"""Joins of cached and new rows that become writes: which ones, and what the program then returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.core.program import Append, FoldedWeight, Program
from mla_compile.passes.cache.append import append_in_place, token_major
from tests.support.programs import seeded

B, T, S, W = 2, 5, 1, 3
Flat = tuple[torch.Tensor, ...]


def program(fn: Callable[..., Flat], *inputs: torch.Tensor, mutations: Sequence[str] = ()) -> Program:
    gm = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(*inputs)
    gm.graph.output_node().args = (tuple(gm.graph.output_node().args[0]),)
    fake = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    return Program(gm, mutations=tuple(mutations), fake_mode=fake)


def inputs(dtype: torch.dtype = torch.float64) -> Flat:
    return seeded(B, T, W, dtype=dtype), seeded(B, S, W, seed=1), seeded(B, 4, W, seed=2)


def attend(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return (query @ rows.transpose(1, 2)).softmax(-1) @ rows


def step(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([past, new], dim=-2)
    return query + 1, rows, attend(rows, query)


def with_room(past: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """The rows, and behind them some that nobody may read."""
    sizes = [n + count * (d == dim) for d, n in enumerate(past.shape)]
    rows = torch.full(sizes, torch.nan, dtype=past.dtype).as_strided(sizes, token_major(sizes, dim))
    rows.narrow(dim, 0, past.shape[dim]).copy_(past)
    return rows


def test_a_join_becomes_a_write_into_an_input_with_room() -> None:
    given = inputs()
    one = program(step, *given)
    assert append_in_place(one) == 1
    assert one.appends == (Append("past_1", 1, 1, S),)
    assert one.mutations == ("past_1",)
    assert tuple(one.node("past_1").meta["val"].shape) == (B, T + S, W)
    assert not [n for n in one.gm.graph.nodes if n.target is torch.ops.aten.cat.default]
    one.gm.graph.lint()
    one.gm.recompile()
    written, *rest = one.gm(with_room(given[0], S, 1), *given[1:])
    first, rows, out = step(*given)
    assert torch.equal(written, rows)
    assert len(rest) == 2
    torch.testing.assert_close(rest, [first, out])


def test_metadata_follows_the_strides_and_views_that_they_forbid_become_copies() -> None:
    def flattened(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
        rows = torch.cat([past, new], dim=1)
        return rows, rows.view(-1, W) * 2, attend(rows, query)

    given = inputs()
    one = program(flattened, *given)
    assert append_in_place(one) == 1
    one.gm.recompile()
    room = with_room(given[0], S, 1)
    seen = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            seen[n] = super().run_node(n)
            return seen[n]

    (_, flat, out) = Watch(one.gm).run(room, *given[1:])
    _, expected, attended = flattened(*given)
    torch.testing.assert_close((flat, out), (expected, attended))
    for node, value in seen.items():
        if isinstance(value, torch.Tensor):
            fake = node.meta["val"]
            assert (fake.shape, fake.stride()) == (value.shape, value.stride()), node


def test_several_caches_keep_the_order_of_what_is_returned() -> None:
    def two(a: torch.Tensor, b: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
        first, second = torch.cat([a, new], 1), torch.cat([b, new * 2], 1)
        return second, query * 3, first, attend(first, query) + attend(second, query)

    past, new, query = inputs()
    given = (past, past * 2, new, query)
    one = program(two, *given)
    assert append_in_place(one) == 2
    assert one.appends == (Append("b_1", 0, 1, S), Append("a_1", 2, 1, S))
    assert one.mutations == ("b_1", "a_1")
    one.gm.recompile()
    second, first, *rest = one.gm(with_room(given[0], S, 1), with_room(given[1], S, 1), new, query)
    expected = two(*given)
    torch.testing.assert_close((second, first, *rest), (expected[0], expected[2], expected[1], expected[3]))


def returned_too(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    return past, *step(past, new, query)


def read_too(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    return *step(past, new, query), past.sum()


def returned_twice(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([past, new], 1)
    return rows, attend(rows, query), rows


def read_by_nobody(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    return torch.cat([past, new], 1), query * 2


def not_returned(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    return (attend(torch.cat([past, new], 1), query),)


def in_front(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([new, past], 1)
    return rows, attend(rows, query), new


def of_three(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([past, new, new], 1)
    return rows, attend(rows, query)


def computed(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([past * 2, new], 1)
    return rows, attend(rows, query)


def with_itself(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([past, past], 1)
    return rows, attend(rows, query) + new


@pytest.mark.parametrize(
    "fn",
    [returned_too, read_too, returned_twice, read_by_nobody, not_returned, in_front, of_three, computed, with_itself],
)
def test_what_is_no_growing_cache_stays(fn: Callable[..., Flat]) -> None:
    one = program(fn, *inputs())
    before = str(one.gm.graph)
    assert append_in_place(one) == 0
    assert str(one.gm.graph) == before
    assert (one.appends, one.mutations) == ((), ())


def test_rows_of_another_dtype_which_cat_converts_stay() -> None:
    def mixed(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
        rows = torch.cat([past, new], 1)
        return rows, attend(rows, query)

    assert append_in_place(program(mixed, *inputs(torch.float32))) == 0


@pytest.mark.parametrize("kind", ["folded", "mutation", "alias"])
def test_inputs_with_another_meaning_stay(kind: str) -> None:
    def written(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
        rows = torch.cat([past, new], 1)
        return query * 2, rows, attend(rows, query)

    one = program(written, *inputs(), mutations=["past_1"] if kind == "mutation" else ())
    if kind == "folded":
        one.folds.append(FoldedWeight("fold_0", lambda weights: weights["past_1"], ("past_1",)))
    if kind == "alias":
        one.aliases[1] = "past_1"
    assert append_in_place(one) == 0


def begins(past: torch.Tensor, new: torch.Tensor, query: torch.Tensor) -> Flat:
    rows = torch.cat([torch.empty(0, dtype=new.dtype), new], -2)
    return query + 1, rows, attend(rows, query)


@pytest.mark.parametrize("fn", [begins, step])
def test_rows_that_are_returned_as_they_were_are_moved_by_the_caller(fn: Callable[..., Flat]) -> None:
    """A cache that begins, and one that grows in a graph of which another form takes the same inputs."""
    one = program(fn, *inputs())
    before = str(one.gm.graph)
    assert append_in_place(one, rewrite=fn is begins) == 1
    assert one.appends == (Append(None, 1, 1, 0),)
    assert str(one.gm.graph) == before


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(1, 1, 7, 4), (2, 1, 7, 4), (1, 3, 7, 4), (5, 4, 2, 1)])
def test_rows_of_one_memory_have_strides_that_do_not_change_as_it_grows(sizes: tuple[int, ...], dim: int) -> None:
    strides = token_major(sizes, dim)
    rows = torch.empty_strided(sizes, strides)
    assert rows.untyped_storage().nbytes() == 4 * rows.numel(), "some of the memory is nobody's"
    larger = [n + 9 * (d == dim) for d, n in enumerate(sizes)]
    told = [s for n, s in zip(sizes, strides, strict=True) if n > 1]
    assert [s for n, s in zip(sizes, token_major(larger, dim), strict=True) if n > 1] == told
