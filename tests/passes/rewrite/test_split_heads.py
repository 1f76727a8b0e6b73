"""Attentions of which only some heads are absorbed, or groups of heads each in its own latent."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile import pipeline
from mla_compile.codes import Code
from mla_compile.options import Options
from mla_compile.passes.decide import head_groups
from mla_compile.passes.dependence.parts import PartMaker
from mla_compile.report.report import Report
from tests.passes.decide.test_negatives import rotate
from tests.passes.rewrite.test_absorb import no_expansion, softcap
from tests.support import modules
from tests.support.modules import MLA, H, L, N, R, V, causal, inputs, padded
from tests.support.programs import (
    OP,
    absorbed,
    assert_equal,
    assert_untouched,
    calls,
    codes,
    export,
    optimized,
    refused,
    seeded,
)
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

DYN = Dim.DYNAMIC
G = 2  # heads beside those of the latent
LATENT, DENSE = f"heads 0-{H - 1} of {H + G}", f"heads {H}-{H + G - 1} of {H + G}"


class SomeHeads(MLA):
    """H heads of the latent c, then ``more`` heads that are K [B,G,T,N+R] and V [B,G,T,V] as they come in."""

    def __init__(self, more: int = G, **options):
        super().__init__(**options)
        self.more, self.of_latent = more, self.H
        self.w_q = nn.Parameter(seeded((self.H + more) * (self.N + self.R), modules.D, seed=1))

    def query(self, x):
        self.H = self.of_latent + self.more
        q = super().query(x)
        self.H = self.of_latent
        return q

    def forward(self, x, c, r, k_more, v_more, mask=None):
        k, v = self.expand(c)
        k, v = self.joined(self.join(k, r), v, k_more, v_more)
        return self.finish(self.attend(self.query(x), *self.spoil(k, v), mask), x)

    def joined(self, k, v, k_more, v_more):
        return torch.cat([k, k_more], 1), torch.cat([v, v_more], 1)


def data(B=2, S=1, T=7, more=G, dims=(N + R, V), **sizes):
    return [*inputs(B, S, T, **sizes), *(seeded(B, more, T, d, seed=5 + k) for k, d in enumerate(dims))]


def split(module, given, dynamic=None, kept=Code.EXPANDED_INPUTS, parts=(LATENT,), **options):
    """The heads of the latent are absorbed, the others are kept and say why; the numbers stay."""
    outcome = optimized(export(module, given, dynamic), **{"forms": "absorbed", **options})
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, parts), (site.code, site.parts, site.reason, site.blame)
    assert [(k.part, k.code) for k in site.kept] == ([(DENSE, kept)] if kept else [])
    assert_equal(module, outcome.program, given)
    return outcome.program, site


@pytest.mark.parametrize("core", ["heads_last", *also("combination", "sdpa", "matmul")])
def test_heads_of_a_latent_beside_others(core):
    program, _ = split(SomeHeads(core=core, bias=True), [*data(S=3), padded(2, 3, 7)])
    assert no_expansion(program, H, 7, N)


class Added(SomeHeads):
    """A number added to every score."""

    def attend(self, q, k, v, mask):
        return (q @ k.mT * self.scale + mask).softmax(-1) @ v


MASKS = {
    "rows": (SomeHeads, causal(3, 7)[0, 0]),
    "of_every_head": (SomeHeads, seeded(2, H + G, 3, 7, seed=9)),
    "boolean_of_every_head": (SomeHeads, seeded(1, H + G, 3, 7, seed=9) > -1),
    "of_every_head_written_out": (Added, seeded(H + G, 1, 7, seed=9)),
}


@pytest.mark.parametrize("name", usual(MASKS, ("boolean_of_every_head", "of_every_head_written_out")))
def test_masks(name):
    make, mask = MASKS[name]
    split(make(), [*data(S=3), mask])


def test_is_causal():
    class Causal(SomeHeads):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)

    split(Causal(), data(S=7))


class FlatColumns(SomeHeads):
    """Joined as columns [B,T,H*N], the rotary key afterwards, for all heads."""

    def forward(self, x, c, r, k_more, v_more, mask=None):
        k, v = (y.transpose(1, 2).flatten(2) for y in self.expand(c))
        more = ((k, k_more[..., :N], N), (v, v_more, V))
        k, v = (torch.cat([y, z.transpose(1, 2).flatten(2)], -1).view(*c.shape[:2], H + G, n) for y, z, n in more)
        k = torch.cat([k, r.unsqueeze(2).expand(-1, -1, H + G, -1)], -1).transpose(1, 2)
        return self.finish(self.attend(self.query(x), k, v.transpose(1, 2), mask), x)


class WrittenIntoParts(SomeHeads):
    def joined(self, k, v, k_more, v_more):
        whole = k.new_zeros(k.shape[0], H + G, *k.shape[2:])
        whole[:, :H], whole[:, H:] = k, k_more
        return whole, torch.cat([v, v_more], 1)


class TakenApart(SomeHeads):
    """Columns taken apart, scaled, cast and joined again after the heads were joined."""

    def joined(self, k, v, k_more, v_more):
        a, b = torch.cat([k, k_more], 1).split([N, R], -1)
        return torch.cat([-a, b * 0.5], -1).to(a.dtype, copy=True), torch.cat([v, v_more], 1).contiguous()


@pytest.mark.parametrize(("make", "core"), [(FlatColumns, "sdpa"), (WrittenIntoParts, "matmul"), (TakenApart, "sdpa")])
def test_ways_to_join_heads(make, core):
    split(make(core=core), [*data(S=3), causal(3, 7)])


def test_heads_merged_with_the_batch_stay_whole():
    refused(SomeHeads(core="bmm"), [*data(S=3), causal(3, 7)], Code.HEAD_DEPENDENT_LATENT)


@pytest.mark.parametrize(("core", "E"), [("heads_last", 4), *also("combination", ("sdpa", 2))])
def test_sizes_that_are_all_equal(core, E):
    module = SomeHeads(more=E, H=E, L=E, N=E, R=E, V=E, core=core)
    given = [seeded(E, E, modules.D, seed=1), seeded(E, E, E, seed=2), seeded(E, E, E, seed=3)]
    given += [seeded(E, E, E, 2 * E, seed=4), seeded(E, E, E, E, seed=5), causal(E, E)]
    absorbed(module, given)


def test_a_symbolic_context():
    module = FlatColumns()
    program = absorbed(module, data(2, 3, 9), ({}, {1: DYN}, {1: DYN}, {2: DYN}, {2: DYN}))
    assert_equal(module, program, data(2, 3, 5))


@full("combination")
def test_everything_symbolic_and_each_call_picks():
    dynamic = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 2: DYN}, {0: DYN, 2: DYN})
    module = FlatColumns()
    outcome = optimized(export(module, data(2, 3, 9), dynamic))
    for B, S, T in ((1, 1, 5), (3, 4, 4), (2, 2, 11)):
        assert_equal(module, outcome.program, data(B, S, T))
    assert codes(outcome) == [Code.ABSORBED]
    (variant,) = outcome.variants
    assert variant.dims.H == H
    assert variant.S != variant.T
    assert not isinstance(variant.S, int)
    assert_equal(module, outcome.base, data(3, 4, 4))


class TwoLatents(MLA):
    """Heads 0 to H-1 from c, the others from c_more by weights of their own; one rotary key for all."""

    def __init__(self, **options):
        super().__init__(**options)
        self.other = SomeHeads(**options)
        self.other.w = nn.Parameter(self.other.w.detach().flip(0))
        self.w_q = nn.Parameter(seeded(2 * H * (N + R), modules.D, seed=1))

    def forward(self, x, c, r, c_more, mask=None):
        (k, v), (k_more, v_more) = self.expand(c), self.other.expand(c_more)
        k, v = torch.cat([k, k_more], 1), torch.cat([v, v_more], 1)
        B, S = x.shape[:2]
        q = F.linear(x, self.w_q).view(B, S, 2 * H, N + R).transpose(1, 2)
        return self.finish(self.attend(q, torch.cat([k, r[:, None].expand(-1, 2 * H, -1, -1)], -1), v, mask), x)


FIRST, SECOND = f"heads 0-{H - 1} of {2 * H}", f"heads {H}-{2 * H - 1} of {2 * H}"


@pytest.mark.parametrize("core", ["matmul", *also("combination", "sdpa")])
def test_groups_of_heads_with_latents_of_their_own(core):
    given = [*inputs(S=3), seeded(2, 7, L, seed=4), causal(3, 7)]
    program, site = split(TwoLatents(core=core, bias=True), given, kept=None, parts=(FIRST, SECOND), lowering="op")
    assert calls(program).count(OP) == 2
    assert site.dims.H == 2 * H
    assert (site.values_read_before, site.values_read_after) == (2 * H * (N + R + V), 2 * L + R)


class Grouped(SomeHeads):
    """Three query heads for each head of K and V."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.w_q = nn.Parameter(seeded(3 * (H + G) * (N + R), modules.D, seed=1))

    def query(self, x):
        return F.linear(x, self.w_q).view(*x.shape[:2], 3 * (H + G), N + R).transpose(1, 2)

    def attend(self, q, k, v, mask):
        if self.how == "gqa":
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)
        if self.how == "interleave":
            return super().attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask)
        k, v = (y[:, :, None].expand(-1, -1, 3, -1, -1).reshape(y.shape[0], -1, *y.shape[2:]) for y in (k, v))
        return super().attend(q, k, v, mask)


@pytest.mark.parametrize("how", ["interleave", *also("combination", "gqa", "expand")])
def test_query_heads_that_share_heads_of_keys(how):
    program = export(Grouped(how), data(S=3))
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert site.parts == (f"heads 0-{3 * H - 1} of {3 * (H + G)}",)
    assert_equal(Grouped(how), outcome.program, data(S=3))


def test_an_open_core_and_sides_of_groups():
    """A soft cap; of the other heads V alone can be absorbed, whose keys are rotated."""

    class Soft(TwoLatents):
        def attend(self, q, k, v, mask):
            return softcap(q, torch.cat([k[:, :H], rotate(k[:, H:])], 1), v, mask, self.scale)

    given = [*inputs(S=3), seeded(2, 7, L, seed=4), causal(3, 7)]
    outcome = optimized(export(Soft(), given), forms="absorbed")
    (site,) = outcome.report.sites
    assert site.parts == (FIRST, f"values of {SECOND}")
    assert [(k.part, k.code) for k in site.kept] == [(f"keys of {SECOND}", Code.POSITION_DEPENDENT)]
    assert_equal(Soft(), outcome.program, given)


def test_precision_and_a_report_that_can_be_stored():
    module = SomeHeads(bias=True).float()
    program = export(module, [d.float() for d in data(B=4, S=9, T=30)])
    outcome = pipeline.run(program, Options.parse({"forms": "absorbed", "lowering": "aten"}, verify=True), draw=True)
    (site,) = outcome.report.sites
    assert site.precision_ratio is not None
    assert site.drawing is not None
    assert Report.from_dict(json.loads(outcome.report.to_json())).sites == outcome.report.sites
    assert f"{LATENT} only" in str(outcome.report)
    assert f"{DENSE} (expanded_inputs)" in str(outcome.report)


def test_a_prompt_stays_whole_and_the_report_says_what_could_be():
    program = export(SomeHeads(L=40, N=24, V=24), data(S=300, T=300, L=40, dims=(24 + R, 24)))
    outcome = optimized(program)
    assert_untouched(program, outcome)
    (note,) = outcome.report.sites[0].notes
    assert note.startswith(f"{LATENT} alone could be absorbed; ")


def test_a_wrong_split_is_found_and_taken_back(monkeypatch):
    real = PartMaker.make

    def wrong(self, node, dim, start, stop):
        shifted = node in self.parts.ends and (start, stop) == (0, H)
        return real(self, node, dim, start + shifted, stop + shifted)

    program = export(SomeHeads(core="matmul"), data(S=3))
    assert codes(optimized(program, forms="absorbed", verify=True)) == [Code.ABSORBED]
    monkeypatch.setattr(PartMaker, "make", wrong)
    outcome = optimized(program, forms="absorbed", verify=True)
    assert codes(outcome) == [Code.VERIFY_FAILED]
    assert_untouched(program, outcome)


# Heads that meet before the output, or that no slice of the heads tells apart.


class OfScores(SomeHeads):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(seeded(H + G, H + G, seed=8))

    def between(self, scores):
        return scores.softmax(-1)

    def attend(self, q, k, v, mask):
        return self.between(q @ k.mT * self.scale) @ v

    def mixed(self, y):
        return torch.einsum("bh...,hg->bg...", y, self.mix)


class MixedKeysAndValues(OfScores):
    def spoil(self, k, v):
        return self.mixed(k), self.mixed(v)


class NormsOverHeads(SomeHeads):
    def spoil(self, k, v):
        return tuple(F.layer_norm(y.transpose(1, 3), [H + G]).transpose(1, 3) for y in (k, v))


class TalkingHeads(OfScores):
    def between(self, scores):
        return self.mixed(scores).softmax(-1)


class SoftmaxOverHeads(OfScores):
    def between(self, scores):
        return scores.softmax(1)


class Returned(OfScores):
    def attend(self, q, k, v, mask):
        p = (q @ k.mT * self.scale).softmax(-1)
        return p @ v, p

    def finish(self, out, x):
        return super().finish(out[0], x), out[1]


class Interleaved(SomeHeads):
    def __init__(self):
        super().__init__(H=2)

    def joined(self, k, v, k_more, v_more):
        return torch.stack([k, k_more], 2).flatten(1, 2), torch.stack([v, v_more], 2).flatten(1, 2)


MEETING = {
    NormsOverHeads: Code.NONLINEAR,
    TalkingHeads: Code.UNSUPPORTED_OP,
    SoftmaxOverHeads: Code.SOFTMAX_AXIS,
    Returned: Code.HEAD_DEPENDENT_LATENT,
    Interleaved: Code.HEAD_DEPENDENT_LATENT,
}


@pytest.mark.parametrize("make", MEETING)
def test_heads_that_meet(make):
    refused(make(), data(S=3), MEETING[make])


def test_keys_and_values_mixed_over_heads_are_made_of_all_cached_rows():
    outcome = optimized(export(MixedKeysAndValues(), data(S=3)), forms="absorbed", verify=True, strict=True)
    assert codes(outcome) == [Code.ABSORBED]


def test_too_many_groups(monkeypatch):
    monkeypatch.setattr(head_groups, "MOST", 1)
    refused(SomeHeads(), data(), Code.HEAD_DEPENDENT_LATENT)


def test_keys_that_someone_else_reads_stay():
    class Reads(SomeHeads):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask), k, v

        def finish(self, out, x):
            return super().finish(out[0], x), *out[1:]

    program = export(Reads(), data())
    outcome = optimized(program, forms="absorbed")
    assert_untouched(program, outcome)


class WrittenIntoZeros(nn.Module):
    """Heads of two latents are written into zeros that are wider; the keys of half of them go through ``spoil``."""

    def __init__(self, spoil=torch.tanh):
        super().__init__()
        self.spoil = spoil
        self.ups = nn.ParameterList(seeded(L, H * (N + V), seed=k) for k in (1, 2))

    def forward(self, q, r, *latents):
        B, T, _ = r.shape
        k = torch.zeros(B, T, 2 * H, N + R + 1, dtype=r.dtype)
        v = torch.zeros(B, T, 2 * H, V + 1, dtype=r.dtype)
        for half, (c, up) in enumerate(zip(latents, self.ups, strict=True)):
            made = (c @ up).view(B, T, H, N + V)
            heads = slice(half * H, (half + 1) * H)
            k[:, :, heads, :N] = self.spoil(made[..., :N]) if half else made[..., :N]
            v[:, :, heads, :V] = made[..., N:]
        k[..., N : N + R] = r[:, :, None]
        return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), scale=0.3)


def latents(T, S=1):
    return [seeded(2, 2 * H, S, N + R + 1), *(seeded(2, T, width, seed=k) for k, width in enumerate((R, L, L), 1))]


def test_groups_are_verified_together_where_they_read_the_same_rows_in_two_ways_and_zeros():
    outcome = optimized(export(WrittenIntoZeros(), latents(7)), forms="absorbed", verify=True, strict=True)
    (site,) = outcome.report.sites
    assert [(k.part, k.code) for k in site.kept] == [(f"keys of heads {H}-{2 * H - 1} of {2 * H}", Code.NONLINEAR)]
    assert_equal(WrittenIntoZeros(), outcome.program, latents(7))


@pytest.mark.parametrize(("spoil", "code"), [(torch.neg, Code.FORMS_EXPANDED), (torch.tanh, Code.UNSUPPORTED_OP)])
def test_what_keeps_all_groups_keeps_the_whole(spoil, code):
    program = export(WrittenIntoZeros(spoil), latents(7))
    outcome = optimized(program, forms="expanded")
    assert_untouched(program, outcome)
    assert codes(outcome) == [code], outcome.report
