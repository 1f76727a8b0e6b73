"""K and V with tokens of zeros before or behind them: the same map of rows with zeros around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import mla_compile
from mla_compile.codes import Code
from mla_compile.pipeline.analyses import sites, sliced_maps
from mla_compile.pipeline.manager import Analyses
from tests.passes.decide.test_row_slices import Used
from tests.passes.rewrite.test_absorb import no_expansion
from tests.support.modules import H, L, N, V, inputs, padded
from tests.support.programs import absorbed, calls, canonical, decide, one_side, refused, seeded
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

S, T = 3, 11


def used(S=1):
    return inputs(2, S, T)


class Padded(Used):
    cut = staticmethod(lambda y, n: F.pad(y, (0, 0, 1, 0)))


def with_cut(cut, **how):
    module = Padded(**how)
    module.cut = cut
    return module


def of_padded_rows(program, length=T + 1):
    """Nothing is expanded: zeros are put around the rows."""
    assert no_expansion(program, H, T, N)
    assert no_expansion(program, H, length, N)
    assert any("pad" in name for name in calls(program))
    return program


@pytest.mark.parametrize("core", ["bmm", *also("combination", "sdpa", "heads_last", "two_products")])
def test_a_token_of_zeros(core):
    of_padded_rows(absorbed(Padded(core=core), [*used(S=S), padded(2, S, T + 1)], verify=True, strict=True))


@pytest.mark.parametrize("up", ["per_head", *also("combination", "joint", "int8", "lora")])
def test_every_up_projection(up):
    of_padded_rows(absorbed(Padded(up=up, share="assign"), used()))


WAYS = {
    "behind": lambda y, n: F.pad(y, (0, 0, 0, 2)),
    "around": lambda y, n: F.pad(y, (0, 0, 2, 1)),
    "twice": lambda y, n: F.pad(F.pad(y, (0, 0, 1, 0)), (0, 0, 0, 1)),
    "of a slice": lambda y, n: F.pad(y[:, :, 1:n], (0, 0, 1, 0)),
    "a slice of it": lambda y, n: F.pad(y, (0, 0, 1, 0))[:, :, :n],
    "by its name": lambda y, n: torch.constant_pad_nd(y, (0, 0, 1, 0), 0.0),
    "of all axes": lambda y, n: F.pad(y, (0, 0, 1, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", usual(WAYS, ("around", "a slice of it")))
def test_other_ways(name):
    program = absorbed(with_cut(WAYS[name]), used(), verify=True, strict=True)
    assert no_expansion(program, H, T, N)


def test_open_lengths():
    dynamic = {"x": None, "c": {1: Dim.DYNAMIC}, "r": {1: Dim.DYNAMIC}}
    of_padded_rows(absorbed(Padded(), used(), dynamic, verify=True, strict=True))


def test_columns_of_zeros_beside_tokens_of_zeros():
    """One pad of both is no map of rows with zeros around them; two are."""
    of_padded_rows(absorbed(with_cut(lambda y, n: F.pad(F.pad(y, (0, 2)), (0, 0, 1, 0))[..., : y.shape[-1]]), used()))


OTHERS = {
    "ones": lambda y, n: F.pad(y, (0, 0, 1, 0), value=1.0),
    "the first token again": lambda y, n: F.pad(y, (0, 0, 1, 0), mode="replicate"),
    "less": lambda y, n: F.pad(y, (0, 0, 1, -1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_that_rows_of_zeros_do_not_make(name):
    refused(with_cut(OTHERS[name]), used(), Code.UNSUPPORTED_OP)


def test_a_bias_is_no_zero():
    """Where a token of zeros stands, there is no bias: neither K nor V is made of rows with zeros around them."""
    outcome = refused(Padded(bias=True), used(), Code.UNSUPPORTED_OP)
    (site,) = outcome.report.sites
    assert site.reason == "zero rows are joined to rows of a linear map"


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_bias_of_one_side(side):
    class Biased(Padded):
        def spoil(self, k, v):
            bias = torch.ones(1, 1, 1, dtype=k.dtype)
            return (k, v + bias) if side == "keys" else (k + bias, v)

    one_side(Biased(), used(), side, Code.UNSUPPORTED_OP)


def test_heads_of_zeros_are_no_tokens():
    def fn(q, c, w_k, w_v):
        k, v = (F.pad(F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2), (0, 0, 0, 0, 1, 0)) for w in (w_k, w_v))
        return F.scaled_dot_product_attention(q, k, v)

    _, outcome = decide(fn, [seeded(2, H + 1, 1, N), seeded(2, T, L)], (H * N, L), (H * V, L))
    assert outcome.absorbed == 0


def test_one_token_for_all_is_no_row_of_each():
    """Columns of the keys are those of one token, broadcast: a token of zeros beside them is none of these."""

    def fn(q, c, r, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        k = torch.cat([k, r[:, None].expand(-1, H, T, -1)], -1)
        return F.scaled_dot_product_attention(q, *(F.pad(one, (0, 0, 1, 0)) for one in (k, v)))

    given = [seeded(2, H, 1, N + 2), seeded(2, T, L), seeded(2, 1, 2)]
    program, outcome = decide(fn, given, (H * N, L), (H * V, L))
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("values",))
    canonical(program := program.copy())
    known = Analyses(program)
    keys = known.get(sites)[0].products[0].k.node
    assert [piece.source for piece in known.get(sliced_maps).map(keys).pieces] == [keys]


@pytest.mark.singly
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width", [H * N, H * N + 4])
def test_hidden_states_are_no_latent(residual, width):
    def fn(x, w_h, w_q, w_k, w_v):
        x = x + F.linear(x, w_h) if residual else F.linear(x, w_h)
        q, k, v = (F.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
        return F.scaled_dot_product_attention(q, *(F.pad(one, (0, 0, 1, 0)) for one in (k, v)))

    _, outcome = decide(fn, [seeded(2, T, width)], (width, width), *[(H * N, width)] * 3)
    (site,) = outcome.report.sites
    assert site.code is Code.NOT_MLA


@pytest.mark.singly
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("cut", [lambda y: F.pad(y, (0, 0, 1, 0)), lambda y: y[:, :, :7]], ids=["zeros", "a slice"])
def test_values_that_are_wider_than_the_hidden_state(cut, residual):
    """As of keys that are rotated as a whole: nothing of it is a latent, however much wider the values are."""

    def fn(x, w_h, *weights):
        x = x + F.linear(x, w_h) if residual else F.linear(x, w_h)
        q, k, v = (F.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in weights)
        turn = torch.arange(T, dtype=x.dtype).cos()[:, None]
        return F.scaled_dot_product_attention(q * turn, cut(k * turn), cut(v))

    _, outcome = decide(fn, [seeded(2, T, 10)], (10, 10), *[(H * 8, 10)] * 3)
    (site,) = outcome.report.sites
    assert site.code is Code.NOT_MLA


def test_hidden_states_that_no_query_is_made_of():
    def fn(q, x, w_h, w_k, w_v):
        x = x + F.linear(x, w_h)
        k, v = (F.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        return F.scaled_dot_product_attention(q, *(F.pad(one, (0, 0, 1, 0)) for one in (k, v)))

    _, outcome = decide(fn, [seeded(2, H, 1, N), seeded(2, T, H * N)], (H * N, H * N), *[(H * N, H * N)] * 2)
    (site,) = outcome.report.sites
    assert (site.code, site.reason) == (
        Code.NOT_MLA,
        "K and V are projected from hidden states, which are no narrower",
    )


class Cached(nn.Module):
    """A token of zeros before K and V in each call, beside a latent or K and V that are cached."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.q, self.down = nn.Linear(12, H * N, bias=False), nn.Linear(12, L, bias=False)
        self.k, self.v = nn.Linear(L, H * N, bias=False), nn.Linear(L, H * V, bias=False)

    def forward(self, x, past):
        c = self.down(x)
        c = torch.cat([past, c], 1) if self.rows and past is not None else c
        k, v = (f(c).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.k, self.v))
        if not self.rows and past is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        q = self.q(x).unflatten(-1, (H, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)))
        return y.transpose(1, 2).flatten(2), c if self.rows else (k, v)


@pytest.mark.filterwarnings("ignore:nothing was absorbed")
@pytest.mark.parametrize("rows", [True, False])
def test_beside_a_cache(rows):
    """Of a cache of K and V it is not known that rows could make it: these stay, and the numbers are right."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Cached(rows).double()
    fast = mla_compile.optimize(model, codegen="eager", forms="absorbed", strict=True)
    mine = theirs = None
    with torch.no_grad():
        for count in (5, 1):
            x = torch.randn(2, count, 12).double()
            (expected, theirs), (got, mine) = model(x, theirs), fast(x, mine)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert {site.verdict == "absorbed" for site in fast.mla_report.sites} == {rows}
