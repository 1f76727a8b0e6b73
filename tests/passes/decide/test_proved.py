"""A code is given where what it states was shown; else the operator is named, without advice that does not apply."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile.codes import Code
from tests.support.modules import MLA, H, L, N, V, inputs
from tests.support.programs import absorbed, codes, export, optimized, refused, run, seeded
from tests.support.usual import usual

B, T = 2, 7
POSITION, UNKNOWN, MIXED = Code.POSITION_DEPENDENT, Code.UNSUPPORTED_OP, Code.TOKEN_MIXING


class Spoiled(MLA):
    """``step`` on the expanded keys [B,H,T,N], with a further input."""

    def __init__(self, step):
        super().__init__(up="two", R=0)
        self.step = step

    def forward(self, x, c, other):
        k, v = self.expand(c)
        return self.finish(self.attend(self.query(x), self.step(k, other), v, None), x)


def product(k, other):
    """Two tensors that are computed from the rows, multiplied token by token."""
    return torch.einsum("bhtr,bhtrn->bhtn", k[..., :2], k[..., 2:4, None] * k[..., None, :])


KEYS = {
    "positions are added": (lambda k, r: k + torch.arange(T)[:, None], (1,), POSITION),
    "a factor of each head": (lambda k, g: k * g, (H, 1, 1), UNKNOWN),
    "a matrix of each token": (lambda k, g: torch.einsum("bhtn,tnm->bhtm", k, g), (T, N, N), POSITION),
    "a product with itself": (product, (1,), Code.NONLINEAR),
    "a product of other tokens": (lambda k, r: (k @ k.mT) @ k, (1,), MIXED),
    "the mean of a head": (lambda k, r: k - k.mean(-1, keepdim=True), (1,), UNKNOWN),
    "the mean of all tokens": (lambda k, r: k - k.mean(2, keepdim=True), (1,), MIXED),
    "tokens joined": (lambda k, r: torch.cat([k[:, :, :3], k[:, :, 3:] * 2], 2), (1,), UNKNOWN),
    "tokens in another order": (lambda k, r: torch.cat([k[:, :, 3:], k[:, :, :3]], 2), (1,), MIXED),
    "along the features": (lambda k, r: k.cumsum(-1), (1,), UNKNOWN),
}


@pytest.mark.parametrize("name", KEYS)
def test_what_is_done_to_the_keys(name):
    step, shape, code = KEYS[name]
    outcome = optimized(export(Spoiled(step), [*inputs(R=0), seeded(*shape, seed=9)]), forms="absorbed")
    (site,) = outcome.report.sites
    assert [(k.part, k.code) for k in site.kept] == [("keys", code)], site.kept


PROJECTIONS = {
    "matmul": lambda c, w: c[:, None] @ w.mT,
    "matmul of the weight": lambda c, w: (w @ c[:, None].mT).mT,
    "einsum": lambda c, w: torch.einsum("btl,hnl->bhtn", c, w),
    "mm": lambda c, w: torch.mm(c.flatten(0, 1), w.flatten(0, 1).T).view(B, T, H, N).transpose(1, 2),
    "linear": lambda c, w: F.linear(c, w.flatten(0, 1)).view(B, T, H, N).transpose(1, 2),
}


class Computed(MLA):
    """The weight of the keys, multiplied by what is computed from an input."""

    def __init__(self, project, sides):
        super().__init__(up="two", R=0)
        self.project, self.sides = project, sides

    def forward(self, x, c, other):
        w = (self.w[: H * N] * other.sum(0).tanh() / 2).view(H, N, L)
        k, v = self.project(c, w), self.expand(c)[1]
        return self.finish(self.attend(self.query(x), k, self.project(c, w) if self.sides == 2 else v, None), x)


@pytest.mark.singly
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("how", PROJECTIONS)
def test_a_weight_that_is_multiplied_by_an_input(how, sides):
    """It was said to mix tokens, along the axis that it sums over; or that no weight is there."""
    given = [*inputs(R=0), seeded(2, 1 if how == "mm" else L, seed=9)]
    outcome = optimized(export(Computed(PROJECTIONS[how], sides), given), forms="absorbed")
    (site,) = outcome.report.sites
    assert [k.code for k in site.kept] or [site.code] == [Code.UNSUPPORTED_WEIGHT], site


class Beside(nn.Module):
    """Keys, values or both from rows that are no narrower, or from outside, beside a latent."""

    def __init__(self, keys, values):
        super().__init__()
        self.plain, self.up = nn.Linear(3 * N * H, H * N, bias=False), nn.Linear(L, H * N, bias=False)
        self.sides = keys, values

    def forward(self, q, c, given, x):
        made = {"latent": self.up(c), "given": given, "plain": self.plain(x)}
        k, v = (made[side].unflatten(-1, (H, N)).transpose(1, 2) for side in self.sides)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("keys", "values", "code"),
    [
        ("plain", "latent", Code.NOT_MLA),
        ("latent", "plain", Code.NOT_MLA),
        ("given", "latent", Code.EXPANDED_INPUTS),
        ("latent", "given", Code.EXPANDED_INPUTS),
        ("given", "given", Code.EXPANDED_INPUTS),
    ],
)
def test_keys_and_values_of_two_kinds(keys, values, code):
    """It was said that the keys have a rotary part for each head, where they are plain."""
    given = [seeded(B, H, 1, N), seeded(B, T, L), seeded(B, T, H * N), seeded(B, T, 3 * H * N)]
    outcome = optimized(export(Beside(keys, values).double(), given), forms="absorbed")
    (site,) = outcome.report.sites
    assert code in [site.code, *(kept.code for kept in site.kept)]
    assert Code.PER_HEAD_ROPE not in [site.code, *(kept.code for kept in site.kept)]


class Made(nn.Module):
    """An attention over what ``make`` makes of a module's weights and its inputs."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.up, self.other = (nn.Parameter(seeded(H * N, L, seed=k)) for k in (1, 2))
        self.several = nn.Parameter(seeded(4, L, H * N, seed=3))

    def forward(self, q, *given):
        k, v = (x.unflatten(-1, (H, N)).transpose(1, 2) for x in self.make(self, *given))
        return F.scaled_dot_product_attention(q, k, v)


def by_turns(self, c, d):
    """Tokens of two sequences in turn, each made by a weight of its own."""
    k = torch.stack([c @ self.up.mT, d @ self.other.mT], 2).flatten(1, 2)
    return k, k


def of_two_projections(self, c):
    """Keys of low rank for each token, as tensor product attention has them."""
    a, b = (c @ self.up[: 2 * H].mT).unflatten(-1, (2, H)), (c @ self.other[: 2 * N].mT).unflatten(-1, (2, N))
    k = torch.einsum("btrh,btrn->bthn", a, b).flatten(2)
    return k, k


def of_experts(self, c):
    """A weight that is mixed for each token."""
    k = torch.einsum("btl,elo,bte->bto", c, self.several, (c @ self.up[:4].mT).softmax(-1))
    return k, k


ENTRY = torch.tensor([2, 1])
REASONS = {
    "tokens stacked": (by_turns, (L, L), UNKNOWN, "no rule for stack"),
    "weights given": (lambda self, c, w: (c @ w, c @ w), (L, (L, H * N)), Code.UNSUPPORTED_WEIGHT, "which inputs make"),
    "a weight of each entry": (
        lambda self, c, at: (torch.bmm(c, self.several[at]),) * 2, (L, ENTRY), UNKNOWN, "a weight that indices select",
    ),
    "two projections": (of_two_projections, (L,), Code.NONLINEAR, "multiplies functions of the rows"),
    "experts": (of_experts, (L,), UNKNOWN, "no rule for einsum"),
    "products of what is given": (
        lambda self, a, b: (torch.einsum("btnr,btr->btn", a, b),) * 2, ((B, T, H * N, 2), 2), UNKNOWN, "inputs make",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_reasons_say_what_was_established(name):
    """It was said that heads read different latents, that K is an input, and that tokens are mixed."""
    make, shapes, code, words = REASONS[name]
    given = [s if s is ENTRY else seeded(*(s if isinstance(s, tuple) else (B, T, s)), seed=5) for s in shapes]
    (site,) = optimized(export(Made(make).double(), [seeded(B, H, 1, N), *given])).report.sites
    assert site.code is code
    assert words in site.reason, site.reason


def test_keys_projected_as_the_queries_are_beside_values_without_a_weight():
    """It was said that these keys are no image of narrower rows."""

    class Unweighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = (nn.Linear(5 * H, H * N, bias=False) for _ in range(2))

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), x))
            return F.scaled_dot_product_attention(q, k, v)

    (site,) = optimized(export(Unweighted().double(), [seeded(B, T, 5 * H)])).report.sites
    assert site.code is Code.NOT_MLA
    assert "projected from hidden states" in site.reason, site.reason


def test_a_norm_of_keys_that_divides_the_scores_is_not_read_elsewhere():
    class Cosine(MLA):
        def forward(self, x, c):
            (k, v), q = self.expand(c), self.query(x)
            scores = q @ k.mT / k.norm(dim=-1)[:, :, None]
            return self.finish(scores.softmax(-1) @ v, x)

    (site,) = optimized(export(Cosine(up="two", R=0), inputs(R=0)), forms="absorbed").report.sites
    (kept,) = site.kept
    assert (kept.part, kept.code) == ("keys", UNKNOWN), kept
    assert "beside the scores, linalg_vector_norm of this attention" in kept.reason


def test_tokens_that_are_returned_are_said_to_be_returned():
    """The caller sees that their memory is laid out like that of all values, so they are not made alone."""

    class Returned(MLA):
        def forward(self, x, c):
            k, v = self.expand(c)
            return self.finish(self.attend(self.query(x), k, v, None), x), v[:, :, -1:]

    program = export(Returned(up="two", R=0), inputs(R=0))
    (kept,) = optimized(program, forms="absorbed").report.sites[0].kept
    assert (kept.part, kept.code) == ("values", UNKNOWN)
    assert "are returned with the strides of all" in kept.reason


class Grouped(nn.Module):
    """Groups of heads with a latent each, their weights in one parameter; a sum over the groups mixes them."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(64, 2 * L)
        self.up = nn.ParameterList([nn.Parameter(seeded(2, L, H, w)) for w in (N, V)])

    def forward(self, q, x, past):
        c = torch.cat([past, self.down(x)], 1) if past is not None else self.down(x)
        k, v = (torch.einsum("btgl,glhn->bghtn", c.unflatten(-1, (2, L)), w).relu() for w in self.up)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("past", [None, seeded(B, T, 2 * L)])
def test_weights_that_are_there_are_not_said_to_be_missing(past):
    given = [seeded(B, 2, H, 1, N), seeded(B, T, 64), past]
    (code,) = codes(optimized(export(Grouped().double(), given), forms="absorbed"))
    assert code in (Code.NONLINEAR, Code.HEAD_DEPENDENT_LATENT)


def test_one_query_of_the_first_key():
    """The cache was blamed for it: PyTorch aligns `is_causal` to the first key."""

    class Causal(Spoiled):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    outcome = optimized(export(Causal(lambda k, other: k), [*inputs(R=0), seeded(1)]), forms="absorbed")
    (site,) = outcome.report.sites
    assert site.code is Code.ABSORBED
    assert any("sees only that key" in note for note in site.notes), site.notes


READS = {
    "the length": (lambda k: 0.0, []),
    "the length behind moves": (lambda k: 0.0, []),
    "values": (lambda k: k.sum(), [Code.KEYS_USED_ELSEWHERE]),
    "products": (lambda k: (k[..., :1, :] @ k.mT).sum(), [Code.KEYS_USED_ELSEWHERE]),
}


@pytest.mark.parametrize("name", usual(READS, ("the length behind moves", "values")))
def test_the_length_of_keys_that_are_joined_from_two_rows(name):
    """The mask of one query from the first key counts the keys behind the join, which does not need their values."""
    more, expected = READS[name]

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.k_up, self.v_up = nn.Linear(L, H * N).double(), nn.Linear(L, H * V).double()

        def forward(self, q, c, r):
            k, v = (up(c).unflatten(-1, (H, -1)) for up in (self.k_up, self.v_up))
            k = torch.cat([k, r[:, :, None].expand(-1, -1, H, -1)], -1)
            k, v = (x.permute(2, 0, 1, 3).transpose(0, 1) if "moves" in name else x.transpose(1, 2) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) + more(k)

    given = [seeded(B, H, 1, N + 4), seeded(B, T, L), seeded(B, T, 4)]
    length = torch.export.Dim("T", min=5, max=64)
    program = export(Joined(), given, ({}, {1: length}, {1: length}))
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert (site.code, [kept.code for kept in site.kept]) == (Code.ABSORBED, expected)


def test_a_slice_of_the_values_is_not_all_of_them():
    class Last(Spoiled):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask) + v[:, :, -1:]

    outcome = optimized(export(Last(lambda k, other: k), [*inputs(R=0), seeded(1)]), forms="absorbed")
    assert Code.VALUES_USED_ELSEWHERE not in [kept.code for site in outcome.report.sites for kept in site.kept]


LIKE = {
    "ones_like": lambda q, k, v: (q, v * torch.ones_like(k[..., :1])),
    "new_zeros": lambda q, k, v: (q, v + k.new_zeros(k.shape[2], 1)),
    "type_as": lambda q, k, v: (q.type_as(k), v.to(k)),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_asked_for_its_dtype_and_sizes_is_not_read(name):
    """The keys were said to be used elsewhere, or by a mask, and were computed where no compiler left them out."""

    class Asks(Spoiled):
        def attend(self, q, k, v, mask):
            q, v = LIKE[name](q, k, v)
            return super().attend(q, k, v, mask)

    given = [*inputs(R=0), seeded(1)]
    length = torch.export.Dim("T", min=3, max=64)
    program = export(Asks(lambda k, other: k), given, ({}, {1: length}, {}) if name == "ones_like" else None)
    absorbed(Asks(lambda k, other: k), given, program=program)


def test_a_product_of_which_one_part_is_kept_as_rows_makes_the_other_alone():
    """It went on making both, and what the rows make came on top."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(L, 6 * (N + V), bias=False)

        def forward(self, q, c):
            k, v = self.up(c).unflatten(-1, (6, N + V)).transpose(1, 2).split([N, V], -1)
            k = k * torch.arange(T)[:, None].cos()
            return F.scaled_dot_product_attention(q, k, v), k, v

    given = [seeded(B, 6, T, N), seeded(B, T, L)]
    program = export(Turned().double(), given)
    outcome = optimized(program, cache="latent", forms="auto")
    assert outcome.base.cache is not None
    with FlopCounterMode(display=False) as before:
        run(program, *given)
    with FlopCounterMode(display=False) as after:
        run(outcome.program, *given)
    assert after.get_total_flops() <= before.get_total_flops()


def test_advice_to_write_what_is_there_is_left_out():
    step = lambda k, r: torch.cat([k[:, :, :3], k[:, :, 3:] * 2], 2)  # noqa: E731
    both = type("Both", (Spoiled,), {"expand": lambda self, c: [step(one, None) for one in MLA.expand(self, c)]})
    outcome = refused(both(lambda k, r: k), [*inputs(R=0), seeded(1)], UNKNOWN)
    (site,) = outcome.report.sites
    assert (site.code, site.fix) == (UNKNOWN, "")
    assert "to change it" not in str(outcome.report)


def test_a_graph_break_is_one_that_dynamo_made():
    """K and V of the caller's dict, made in an earlier call, are handed over by no break; local variables are."""

    class Kept(Spoiled):
        def forward(self, q, c, cache):
            if "k" not in cache:
                cache["k"], cache["v"] = self.expand(c)
            if not cache.get("whole"):
                torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(q, cache["k"], cache["v"])

    class Broken(Spoiled):
        def forward(self, q, c):
            k, v = self.expand(c)
            torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(q, k, v)

    q, c = seeded(B, H, 1, N), seeded(B, T, L)
    with torch.no_grad():
        assert {s.code for s in mla_compile.explain(Broken(None), q, c).sites} == {Code.GRAPH_BREAK}
        for whole in (True, False):
            cache = {"k": seeded(B, H, T, N), "v": seeded(B, H, T, V), "whole": whole}
            assert {s.code for s in mla_compile.explain(Kept(None), q, c, cache).sites} == {Code.EXPANDED_INPUTS}
