"""Masks as people make them: what the operator is told in their place, and that it sees the same keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.codes import Code
from tests.support.programs import OP, codes, error, noted_comparisons, optimized, seeded, trace
from tests.support.tiers import also
from tests.support.usual import usual

B, H, T, L, N, V = 3, 4, 7, 8, 6, 5
INF = float("-inf")
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1, 1]]).bool()


def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fill: float) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~mask, fill).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def told(make, S, *given, attend=sdpa, other=(), plain=False):
    """What the operator is told instead of ``make(S, *given)``: mask, lengths, causal and window.

    ``other``: further values of ``given`` for which the rewritten attention has to be what the original is.
    ``plain``: its numbers in plain ATen, too, and by the check of the pipeline, which compares them as is done here.
    """

    def fn(q, c, *rest):
        *given, w_k, w_v = rest
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        return attend(q, k, v, make(S, *given))

    q, c = seeded(B, H, S, N), seeded(B, T, L)
    weights = [seeded(H * N, L, seed=3), seeded(H * V, L, seed=4)]
    program = trace(fn, [q, c, *given], weights)
    outcome = optimized(program, forms="absorbed", lowering="op", verify=plain, strict=True)
    assert codes(outcome) == [Code.ABSORBED]
    outcomes = [outcome, *([optimized(program, forms="absorbed", lowering="aten")] if plain else [])]
    for values in (given, *other):
        want = fn(q, c, *values, *weights)
        for one in outcomes:
            (result,) = one.program.gm(q, c, *values, *weights)
            assert torch.equal(result.isnan(), want.isnan())
            assert error(result.nan_to_num(), want.nan_to_num()) < 1e-10
    (node,) = (n for n in outcome.program.gm.graph.nodes if str(n.target) == OP)
    mask, lengths = ((*node.args, None, None)[k] for k in (4, 5))
    shape = None if mask is None else tuple(mask.meta["val"].shape)
    return shape, lengths is not None, node.kwargs["causal"], node.kwargs.get("window", 0)


def positions(S: int) -> tuple[Tensor, Tensor]:
    """[S,1] and [T]: queries are the last S of T tokens."""
    return torch.arange(T - S, T)[:, None], torch.arange(T)


def tril_buffer(S: int) -> Tensor:
    return torch.ones(20, 20, dtype=torch.bool).tril()[T - S : T, :T]


def above(S: int) -> Tensor:
    return torch.full((S, T), INF).triu(T - S + 1)


def window(S: int, width: int) -> Tensor:
    own, key = positions(S)
    return (key <= own) & (key > own - width)


CAUSAL = {
    "compared": lambda S: positions(S)[1] <= positions(S)[0],
    "compared the other way": lambda S: positions(S)[0] + 1 > positions(S)[1],
    "not later": lambda S: ~(positions(S)[1] > positions(S)[0]),
    "not later or padded": lambda S: ~((positions(S)[1] > positions(S)[0]) | (positions(S)[1] < 0)),
    "a difference": lambda S: positions(S)[0] - positions(S)[1] >= 0,
    "a difference the other way": lambda S: 1 - positions(S)[1] + positions(S)[0] > 0,
    "doubled": lambda S: positions(S)[1] * 2 < positions(S)[0] * 2 + 1,
    "tril": lambda S: torch.ones(S, T, dtype=torch.bool).tril(T - S),
    "not triu": lambda S: ~torch.ones(S, T, dtype=torch.bool).triu(T - S + 1),
    "a slice of a buffer": tril_buffer,
    "triu of minus infinity": above,
    "where": lambda S: torch.where(positions(S)[1] <= positions(S)[0], 0.0, INF),
    "filled": lambda S: torch.zeros(S, T).masked_fill(positions(S)[1] > positions(S)[0], INF)[None, None],
    "looked up": lambda S: (torch.arange(T)[torch.arange(T)] <= positions(S)[0])[None].expand(B, -1, -1)[:, None],
    "with ones": lambda S: torch.ones((), dtype=torch.bool) & (positions(S)[1] <= positions(S)[0]),
    "a sum": lambda S: above(S) + torch.where(positions(S)[1] <= positions(S)[0], 0.0, INF),
    "nowhere later": lambda S: (
        (positions(S)[1] >= 0).expand(S, T).masked_fill(positions(S)[1] > positions(S)[0], False)
    ),
}


SELDOM = ("compared the other way", "not later", "where", "filled", "with ones", "a difference")


@pytest.mark.parametrize("name", usual([name for name in CAUSAL if name != "doubled"], rare=SELDOM))
def test_causal(name):
    assert told(CAUSAL[name], 3, plain=name == "compared") == (None, False, True, 0)


@pytest.mark.parametrize("name", usual(CAUSAL, ("compared", "doubled", "a slice of a buffer", "filled", "looked up")))
def test_one_query_may_see_all_keys(name):
    assert told(CAUSAL[name], 1)[1:] == (False, False, 0)


def test_a_diagonal_of_other_steps_stays_a_mask():
    """2t < 2s + 1 is t <= s, but that is not followed."""
    assert told(CAUSAL["doubled"], 3) == ((1, 1, 3, T), False, False, 0)


@pytest.mark.parametrize("shift", [-1, 1, *also("combination", -2)])
def test_another_diagonal(shift):
    """Query s of a call sees keys up to another than its own: no causality of the operator."""

    def mask(S):
        own, key = positions(S)
        return key <= own + shift

    assert told(mask, 3) == ((1, 1, 3, T), False, False, 0)
    assert told(mask, 1) == (None, shift < 0, False, 0)


@pytest.mark.singly
@pytest.mark.parametrize("attend", [sdpa, lambda *a: softmax(*a, INF)])
@pytest.mark.parametrize("past", [torch.tensor(4), torch.tensor([4, 0, 6])[:, None, None, None]])
def test_a_length_from_a_tensor(past, attend):
    """As in a cache of full length. Some of the lengths are none: below the first key, or beyond the last."""
    other = [[torch.full_like(past, n)] for n in (-3, -1, 0, T - 1, T, T + 5, 2**40, -(2**40))]

    def mask(S, past):
        return (torch.arange(T) <= torch.arange(S)[:, None] + past).expand(B, 1, S, T)

    assert told(mask, 1, past, attend=attend, other=other, plain=True) == (None, True, False, 0)
    # More queries: the operator's diagonal starts at the last key, wherever a length beyond it was meant to put it.
    assert told(mask, 3, past, attend=attend, other=other) == ((B, 1, 3, T), False, False, 0)


def test_several_lengths():
    one, two = torch.tensor([1, 3, 5]), torch.tensor([4, 2, 6])
    shape = (B, 1, 1, 1)

    def mask(S, one, two):
        t = torch.arange(T)
        return (t < one.view(shape)) & (two.view(shape) - 1 >= t) & (t < 100)

    assert told(mask, 1, one, two, other=[[two, one], [one - 9, two]]) == (None, True, False, 0)
    assert told(mask, 4, one, two, other=[[two, one]]) == (None, True, False, 0)


@pytest.mark.parametrize("first", [1, *also("combination", 0)])
def test_lengths_of_more_sequences_than_there_are(first):
    more = torch.tensor([1, 3, 5, 2, 4])

    def mask(S, more):
        return (torch.arange(T) < more[first : first + B, None])[:, None, None]

    assert told(mask, 1, more, other=[[more.flip(0)]]) == (None, True, False, 0)


def test_the_largest_number_is_a_length_too():
    largest = torch.iinfo(torch.int64).max
    past = torch.tensor([largest, 2, -largest]).view(B, 1, 1, 1)
    assert told(lambda S, p: torch.arange(T) <= p, 1, past) == (None, True, False, 0)


def test_a_batch_of_two_axes():
    """One of them tells lengths apart."""
    lengths = torch.tensor([1, 3, 5]).view(B, 1, 1, 1, 1)

    def attend(q, k, v, mask):
        q, k, v = (x.unflatten(0, (B, 1)).expand(-1, 2, -1, -1, -1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    assert told(lambda S, n: torch.arange(T) < n, 1, lengths, attend=attend)[1:] == (True, False, 0)


def test_a_length_for_each_head_stays_a_mask():
    lengths = torch.tensor([1, 3, 5, 7]).view(1, H, 1, 1)
    assert told(lambda S, n: torch.arange(T) < n, 1, lengths) == ((1, H, 1, T), False, False, 0)


def test_padding_is_left_over():
    def mask(S, padding):
        own, key = positions(S)
        return (key <= own) & padding[torch.arange(B)[:, None, None, None], torch.arange(T)]

    other = [[torch.rand(B, T) < 0.5], [torch.zeros(B, T).bool()]]
    assert told(mask, 3, PADDING, other=other, plain=True) == ((B, 1, 1, T), False, True, 0)
    assert told(mask, 1, PADDING, other=other) == ((B, 1, 1, T), False, False, 0)
    attend = lambda *a: softmax(*a, INF)  # noqa: E731
    assert told(mask, 3, PADDING, other=other, attend=attend) == ((B, 1, 1, T), False, True, 0)


def test_padding_beside_a_length():
    def mask(S, padding, past):
        full = F.pad(padding[:, : T - 2], (0, 2))[:, None, None]
        return full & (torch.arange(T) <= past)

    assert told(mask, 1, PADDING, torch.tensor(3)) == ((B, 1, 1, T), True, False, 0)


@pytest.mark.parametrize("width", [2, 100, *also("combination", 1, 5)])
def test_a_window(width):
    kept = width if width < T else 0
    assert told(lambda S: window(S, width), 3, plain=True) == (None, False, True, kept)
    assert told(lambda S: window(S, width), 1) == (None, False, False, kept)


def test_a_window_that_is_not_of_the_last_keys():
    def ahead(S):
        own, key = positions(S)
        return (key > own - 3) & (key <= own + 1)

    def of_a_tensor(S, past):
        key = torch.arange(T)[None]
        return (key <= past) & (key > past - 3)

    assert told(ahead, 3) == ((1, 1, 3, T), False, False, 0)
    # The operator's window ends at the length, and a length beyond T is taken for T.
    assert told(of_a_tensor, 1, torch.tensor(4), other=[[torch.tensor(n)] for n in (-1, T, T + 1)])[1:] == (
        True,
        False,
        0,
    )


def test_finite_fills():
    """A query that sees nothing weighs all keys alike, which no length says; so it has to be known that it sees one."""
    low = torch.finfo(torch.float32).min
    attend = lambda *a: softmax(*a, low)  # noqa: E731
    assert told(CAUSAL["compared"], 3, attend=attend) == (None, False, True, 0)
    past = torch.tensor(3)
    other = [[torch.tensor(-2)]]
    assert told(lambda S, p: torch.arange(T) <= p, 1, past, attend=attend, other=other)[:2] == ((1, 1, 1, T), False)
    nothing = lambda S: positions(S)[1] < positions(S)[0] - (T - S)  # noqa: E731  the first query sees no key
    assert told(nothing, 3, attend=attend)[:2] == ((1, 1, 3, T), False)


def test_a_bias_stays_beside_what_is_explained():
    def attend(q, k, v, masks):
        mask, bias = masks
        scores = q @ k.mT * 0.3 + bias
        return scores.masked_fill(~mask, INF).softmax(-1) @ v

    def masks(S, bias):
        return CAUSAL["compared"](S), bias

    assert told(masks, 3, seeded(1, H, 1, T), attend=attend) == ((1, H, 1, T), False, True, 0)


def test_is_causal_beside_a_length_that_would_move_it():
    """Square: the length stays a mask."""

    def attend(q, k, v, mask):
        scores = (q @ k.mT * 0.3).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), INF)
        return scores.masked_fill(~mask, INF).softmax(-1) @ v

    past = torch.tensor(4)
    assert told(lambda S, p: torch.arange(T) <= p, T, past, attend=attend)[1:] == (False, True, 0)


@pytest.mark.parametrize("negated", [False, True])
def test_a_number_on_the_cpu_beside_tensors_elsewhere(negated):
    """Which torch lets meet in a comparison, and no operator of ours. "meta" is a device that every machine has."""

    def fn(q, c, past, some, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        seen = (torch.arange(T, device=q.device) <= past) & (~some if negated else some)
        return sdpa(q, k, v, seen.expand(B, 1, 1, T))

    inputs = [seeded(B, H, 1, N).to("meta"), seeded(B, T, L).to("meta"), torch.tensor(3), torch.tensor(True)]
    outcome = optimized(
        trace(fn, inputs, [seeded(H * N, L).to("meta"), seeded(H * V, L).to("meta")]), forms="absorbed", lowering="op"
    )
    assert codes(outcome) == [Code.ABSORBED]
    (node,) = (n for n in outcome.program.gm.graph.nodes if str(n.target) == OP)
    assert {n.meta["val"].device.type for n in node.args[4:6]} == {"meta"}


def test_masks_of_one_shape_that_say_other_things_are_verified_each(monkeypatch):
    """A window in every second layer: two computations, whatever their masks have in common."""
    made = noted_comparisons(monkeypatch)

    def fn(q, c, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        return sum(sdpa(q, k, v, mask) for mask in (window(3, 2), CAUSAL["compared"](3), CAUSAL["compared"](3)))

    program = trace(fn, [seeded(B, H, 3, N), seeded(B, T, L)], [seeded(H * N, L), seeded(H * V, L)])
    outcome = optimized(program, forms="absorbed", verify=True, strict=True)
    assert codes(outcome) == [Code.ABSORBED] * 3
    assert len(made) == 2
