"""What is the same for all heads is one row per token, also where it was copied to the heads before it was rotated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_compile.codes import Code
from tests.passes.decide.test_negatives import rotate, rotate_complex
from tests.passes.rewrite.test_absorb import no_expansion
from tests.support.modules import MLA, H, L, N, R, V, inputs, padded
from tests.support.programs import absorbed, assert_equal, assert_untouched, codes, export, optimized, seeded
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough


class Copied(MLA):
    """The rotary key [B,T,R] becomes that of each head by ``copy``, and then ``turn`` is done to it."""

    def __init__(self, copy, turn, **options):
        super().__init__(**options)
        self.copy, self.turn = copy, turn

    def join(self, k, r):
        return torch.cat([k, self.turn(self.copy(r))], -1)


COPIES = {
    "expand": lambda r: r[:, None].expand(-1, H, -1, -1),
    "repeat": lambda r: r.unsqueeze(1).repeat(1, H, 1, 1),
    "repeat_interleave": lambda r: r[:, None].repeat_interleave(H, 1),
    "heads_last": lambda r: r[:, :, None].expand(-1, -1, H, -1).transpose(1, 2),
    "stored": lambda r: r[:, None].expand(-1, H, -1, -1).contiguous(),
}


def written(r):
    """Pairs of columns, written into zeros."""
    turned, done = rotate(torch.cat([r[..., ::2], r[..., 1::2]], -1)), torch.zeros_like(r)
    done[..., ::2], done[..., 1::2] = turned.chunk(2, -1)
    return done


TURNS = {
    "halves": rotate,
    "complex": rotate_complex,
    "written": written,
    "norm": lambda r: F.rms_norm(r, (R,)),
    "norm_by_hand": lambda r: r * r.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "weight": lambda r: rotate(r) @ seeded(R, R, seed=3),
}


@pytest.mark.parametrize("copy", usual(COPIES, ("repeat_interleave", "heads_last")))
def test_every_way_to_copy(copy):
    program = absorbed(Copied(COPIES[copy], rotate, core="matmul"), [*inputs(S=2), padded(2, 2, 7)])
    assert no_expansion(program, H, 7, N)


@pytest.mark.parametrize("turn", usual(TURNS, ("complex", "written")))
def test_whatever_is_done_to_the_copies(turn):
    program = absorbed(Copied(COPIES["expand"], TURNS[turn]), inputs())
    assert no_expansion(program, H, 7, N)


@full("combination")
@pytest.mark.parametrize("axes", [(1,), (0, 1)], ids=str)
def test_symbolic_sizes(axes):
    """Of tokens, and of sequences besides."""
    open_sizes = dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
    dynamic = ({0: torch.export.Dim.DYNAMIC} if 0 in axes else None, open_sizes, open_sizes)
    absorbed(Copied(COPIES["expand"], rotate), inputs(), dynamic=dynamic, forms="absorbed")


TOLD_APART = {
    "a_factor_per_head": lambda r: rotate(r * torch.arange(1.0, H + 1)[:, None, None]),
    "a_sum_over_heads": lambda r: rotate(r).cumsum(1),
    "a_softmax_over_heads": lambda r: (r + torch.arange(3.0).view(H, 1, 1)).softmax(1),
    "positions_per_head": lambda r: rotate(r.transpose(1, 2)).transpose(1, 2),
    "one_head_written": lambda r: torch.cat([rotate(r)[:, 1:], r[:, :1]], 1),
    "seen_otherwise": lambda r: rotate(r.transpose(1, 2).reshape(r.shape)),
}


@pytest.mark.parametrize("turn", usual(TOLD_APART, rare=("a_factor_per_head", "a_softmax_over_heads")))
def test_what_tells_the_heads_apart(turn):
    module, given = Copied(COPIES["expand"], TOLD_APART[turn]), inputs()
    outcome = optimized(export(module, given))
    (site,) = outcome.report.sites
    assert site.kept, "the rotary key stays one of every head"
    assert_equal(module, outcome.program, given)


@pytest.mark.parametrize("drawn", [lambda r: F.dropout(r, 0.5, training=True), lambda r: r * torch.rand_like(r)])
def test_chance_tells_the_heads_apart(drawn):
    """One factor drawn for all heads would be another distribution, which no comparison of numbers need show."""
    outcome = optimized(export(Copied(COPIES["expand"], lambda r: rotate(drawn(r))), inputs()), forms="absorbed")
    assert outcome.report.sites[0].kept
    assert not any(node.target is torch.ops.aten.select.int for node in outcome.program.gm.graph.nodes)


def test_sequences_that_share_a_latent_keep_their_rows():
    """What is copied to the batch is as good as rows of each sequence; their rotary keys differ."""

    class OneLatent(MLA):
        def latent(self, c):
            return F.rms_norm(c[:1].expand_as(c), (L,))

    absorbed(OneLatent(), inputs())


def test_keys_that_are_copies_as_a_whole_and_are_read_twice():
    """What is left of the keys where a model absorbs them by hand, and normalizes them as keys of each head."""

    class Shared(MLA):
        def forward(self, x, c, r):
            _, v = self.expand(c)
            k = F.rms_norm(torch.cat([c, r], -1)[:, None].expand(-1, H, -1, -1), (L + R,))
            q = F.pad(self.query(x), (0, L + R - N - R))
            y = self.attend(q, k, v, None)
            return y + self.attend(q * 2, k, v, None)

    program = absorbed(Shared(L=L), inputs(), sites=2)
    assert no_expansion(program, H, 7, V)


def viewed(r):
    """A view that copies, which lie in no memory of their own, could not be seen through."""
    turned = rotate(r).transpose(1, 2).contiguous()
    return turned.view(*turned.shape[:2], -1).view(turned.shape).transpose(1, 2)


@pytest.mark.parametrize("turn", [viewed, *also("combination", rotate)])
def test_an_attention_that_stays_reads_what_it_read(turn):
    program = export(Copied(COPIES["expand"], turn), inputs(S=7))
    for forms, code in (("expanded", Code.FORMS_EXPANDED), ("auto", Code.COST_PREFILL)):
        outcome = optimized(program, forms=forms)
        assert codes(outcome) == [code]
        assert_untouched(program, outcome)
    absorbed(Copied(COPIES["expand"], turn), inputs(S=7))


def test_keys_that_stay_read_what_they_read():
    class RotatedKeys(Copied):
        def spoil(self, k, v):
            return rotate(k), v

    module = RotatedKeys(COPIES["expand"], viewed)
    outcome = optimized(export(module, inputs()), forms="absorbed")
    assert [site.parts for site in outcome.report.sites] == [("values",)]
    assert_equal(module, outcome.program, inputs())
    assert not any(node.target is torch.ops.aten.select.int for node in outcome.program.gm.graph.nodes)
