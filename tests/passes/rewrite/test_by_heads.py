"""Expanded attentions that are computed for a few heads at a time: the same numbers, and nothing where heads meet."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.passes.decide.by_heads import MOST_GROUPS
from tests.support import modules
from tests.support.modules import MLA, D, H, L, N, causal, inputs, padded
from tests.support.programs import assert_equal, calls, export, optimized, seeded
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

DYN = Dim.DYNAMIC
SDPA, ORDER = "scaled_dot_product_attention.default", "mla_compile.copy_after.default"
GROUPED = {"forms": "expanded", "expanded_bytes": 0, "verify": True, "strict": True}


def grouped(module, given, dynamic=None, heads=H, of=1, **options):
    """The one attention of ``module`` runs ``of`` of its ``heads`` at a time, with the module's numbers."""
    program = export(module, given, dynamic)
    outcome = optimized(program, **{**GROUPED, **options})
    (site,) = outcome.report.sites
    assert outcome.by_heads == 1, site.notes
    assert any(note.startswith(f"{of} of {heads} heads at a time") for note in site.notes), site.notes
    assert_equal(module, outcome.program, given)
    return outcome


def at_once(module, given, why, dynamic=None, **options):
    """All heads at once, for a reason that has the words ``why``; the numbers are the module's."""
    program = export(module, given, dynamic)
    outcome = optimized(program, **{**GROUPED, **options})
    notes = [note for site in outcome.report.sites for note in site.notes]
    assert outcome.by_heads == 0, notes
    assert any(note.startswith("all heads at once") and why in note for note in notes), notes
    assert_equal(module, outcome.program, given)
    return outcome


SOME = ("heads_last",)


@pytest.mark.parametrize("core", usual((core for core in modules.CORES if core != "bmm"), SOME))
def test_every_way_to_write_an_attention(core):
    outcome = grouped(MLA(core=core), [*inputs(S=5), padded(2, 5, 7)])
    assert ORDER not in calls(outcome.program)  # plain ATen has nothing to order groups by


@pytest.mark.parametrize(
    "up",
    ["int8", "block", *also("combination", "per_head", "einsum", "joint", "lora", "merged", "two", "param")],
)
def test_every_way_to_write_the_up_projection(up):
    grouped(MLA(up=up, core="matmul", bias=up != "int8"), inputs(S=5))


@pytest.mark.parametrize("share", ["assign", *also("combination", "repeat", "expand")])
def test_every_way_to_share_the_rotary_key(share):
    grouped(MLA(share=share, order="rope_nope"), inputs(S=5))


class LikeTheWhole(MLA):
    """K is assigned to memory that is made like what K and V are cut from, as transformers does."""

    def forward(self, x, c, r):
        made = F.linear(c, self.w).view(*c.shape[:2], self.H, self.N + self.V).transpose(1, 2)
        k, v = made.split([self.N, self.V], -1)
        keys = made.new_empty(*k.shape[:-1], self.N + self.R)
        keys[..., : self.N].copy_(k)
        keys[..., self.N :].copy_(r.unsqueeze(1).expand(*k.shape[:-1], -1))
        return self.finish(self.attend(self.query(x), keys, v, None), x)


@pytest.mark.parametrize("dynamic", [None, *also("combination", (({1: DYN}, {1: DYN}, {1: DYN}),))])
def test_memory_that_is_made_like_another_tensor_does_not_keep_it(dynamic):
    outcome = grouped(LikeTheWhole(), inputs(S=5), dynamic)
    if dynamic is None:  # else its size is read
        products = [n for n in outcome.program.gm.graph.nodes if n.target is torch.ops.aten.linear.default]
        assert {n.meta["val"].shape[-1] for n in products} == {6 + 4, 6 + 5}  # of one head each


class Merged(MLA):
    """With an output projection, a gate for each feature, and queries from a latent."""

    def __init__(self, **options):
        super().__init__(**options)
        self.w_o = nn.Parameter(seeded(10, self.H * self.V, seed=31))
        self.w_g = nn.Parameter(seeded(self.H * self.V, 10, seed=32))

    def finish(self, out, x):
        return F.linear(super().finish(out, x) * torch.sigmoid(F.linear(x, self.w_g)), self.w_o)


def test_weights_are_sliced_and_nothing_with_all_heads_is_left():
    outcome = grouped(Merged(), inputs(S=5), lowering="op")
    wide = {H * n for n in (6 + 4, 6 + 5)}
    shapes = [
        n.meta["val"].shape for n in outcome.program.gm.graph.nodes if "val" in n.meta and n.op == "call_function"
    ]
    assert not [s for s in shapes if len(s) and s[-1] in wide]
    assert not [s for s in shapes if len(s) == 4 and H in s[1:3]]
    # Each group begins when the one before it has written what it made.
    assert calls(outcome.program).count("slice_scatter.default") == H
    assert calls(outcome.program).count(ORDER) == (H - 1) * 4  # rows of queries, K and V, gate, and the rotary key


@pytest.mark.parametrize(("heads", "of"), [(17, 2), *also("combination", (2, 1), (33, 3), (16, 1))])
def test_numbers_of_heads_that_groups_do_not_divide(heads, of):
    outcome = grouped(Merged(H=heads), inputs(S=5), heads=heads, of=of)
    count = -(-heads // of)
    assert calls(outcome.program).count(SDPA) == count <= MOST_GROUPS


@full("combination")
@pytest.mark.parametrize(("core", "lowering"), [("sdpa", "op"), ("matmul", "aten")])
def test_symbolic_batch_and_lengths(core, lowering):
    module = Merged(H=5, core=core)
    dynamic = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN})
    outcome = grouped(module, inputs(S=5), dynamic, heads=5, lowering=lowering)
    assert_equal(module, outcome.program, inputs(B=3, S=4, T=11))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *also("family", torch.float32)])
def test_values_are_padded_where_torch_has_no_fused_attention_for_their_width(dtype):
    module = Merged().to(dtype)
    given = inputs(S=5, dtype=dtype)
    outcome = optimized(export(module, given), **GROUPED)
    assert outcome.by_heads == 1
    assert calls(outcome.program).count("new_zeros.default") == H
    same_width = optimized(export(MLA(R=4, N=6, V=10).to(dtype), given), **GROUPED)
    assert same_width.by_heads == 1
    assert "new_zeros.default" not in calls(same_width.program)


def test_rows_that_see_no_key():
    mask = torch.zeros(1, 1, 5, 7, dtype=torch.bool)
    grouped(MLA(), [*inputs(S=5), mask])
    grouped(MLA(core="matmul"), [*inputs(S=5), causal(5, 7)])


def test_one_mask_for_each_head_is_cut_with_the_heads():
    grouped(MLA(), [*inputs(S=5), seeded(2, H, 5, 7, seed=8) > -1])
    grouped(MLA(core="matmul"), [*inputs(S=5), seeded(2, H, 5, 7, seed=8) > -1])


class Grouped(nn.Module):
    """GQA of 12 query heads over ``kv`` heads, which are made of narrower rows."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv
        self.w_q = nn.Parameter(seeded(12 * 6, 10, seed=1))
        self.w_k, self.w_v = (nn.Parameter(seeded(kv * 6, L, seed=s)) for s in (2, 3))

    def forward(self, x, c):
        q, k, v = (
            F.linear(rows, w).view(2, -1, n, 6).transpose(1, 2)
            for rows, w, n in ((x, self.w_q, 12), (c, self.w_k, self.kv), (c, self.w_v, self.kv))
        )
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).reshape(2, 5, -1)


@pytest.mark.parametrize(("kv", "of"), [(4, 3), *also("combination", (3, 4), (2, 6))])
def test_queries_that_share_a_key_head_stay_together(kv, of):
    grouped(Grouped(kv), inputs(S=5)[:2], heads=12, of=of)


def test_models_without_a_latent_keep_their_graphs():
    """Keys and values of the queries' own rows: no group, and no guard on sizes either."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(seeded(3 * H * N, D, seed=4))

        def forward(self, x):
            q, k, v = F.linear(x, self.w).unflatten(-1, (3, H, N)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v)

    outcome = optimized(export(Own(), inputs(S=5)[:1], ({1: DYN},)), expanded_bytes=0)
    assert [str(site.verdict) for site in outcome.report.sites] == ["not_mla"]
    assert (outcome.by_heads, outcome.expanded) == (0, None)
    assert calls(outcome.program).count(SDPA) == 1


def test_one_key_head_for_all_queries_has_no_groups_to_share_it():
    outcome = optimized(export(Grouped(1), inputs(S=5)[:2]), **GROUPED)
    assert_equal(Grouped(1), outcome.program, inputs(S=5)[:2])


# What must not happen, and what must not be believed.


class Mixed(MLA):
    """Something that reads across heads, at ``where``."""

    def __init__(self, where, **options):
        super().__init__(**options)
        self.where = where
        self.mix = nn.Parameter(seeded(self.H, self.H, seed=9))

    def attend(self, q, k, v, mask):
        w, mix = self.where, self.mix
        if w == "queries":
            q = torch.einsum("bhsd,hg->bgsd", q, mix)
        elif w == "keys":
            k = torch.einsum("bhtd,hg->bgtd", k, mix)
        elif w == "values mean":
            v = v - v.mean(1, keepdim=True)
        elif w == "values norm":
            v = F.layer_norm(v.transpose(1, 3), (v.shape[1],)).transpose(1, 3)
        elif w == "permuted":
            k, v = k[:, [2, 0, 1]], v[:, [2, 0, 1]]
        elif w == "flipped":
            k, v = k.flip(1), v.flip(1)
        elif w == "rolled":
            q = q.roll(1, 1)
        scores = q @ k.mT * self.scale
        if w == "talking before":
            scores = torch.einsum("bhst,hg->bgst", scores, mix)
        probs = scores.softmax(1 if w == "softmax over heads" else -1)
        if w == "talking after":
            probs = torch.einsum("bhst,hg->bgst", probs, mix)
        out = probs @ v
        if w == "output mean":
            out = out - out.mean(1, keepdim=True)
        elif w == "output norm":
            out = F.normalize(out, dim=1)
        elif w == "gate per head":
            out = out * torch.sigmoid(mix[0]).view(1, -1, 1, 1)
        elif w == "gate of the mean":
            out = out * torch.sigmoid(out.mean((1, 3), keepdim=True))
        return out


@pytest.mark.parametrize(
    "where",
    [
        "keys", "values norm", "permuted", "gate of the mean",
        *also("combination", "queries", "rolled", "values mean", "flipped", "talking before", "softmax over heads"),
        *also("combination", "talking after", "output norm", "output mean", "gate per head"),
    ],
)  # fmt: skip
def test_an_operator_across_heads_never_changes_the_numbers(where):
    """Whether groups are made or not: what is mixed is there for all heads before it is cut."""
    module, given = Mixed(where), inputs(S=5)
    outcome = optimized(export(module, given), **GROUPED)
    assert_equal(module, outcome.program, given)


@pytest.mark.parametrize("where", ["softmax over heads", *also("combination", "talking after", "talking before")])
def test_scores_that_are_mixed_over_heads_are_no_groups(where):
    module, given = Mixed(where), inputs(S=5)
    outcome = optimized(export(module, given), **GROUPED)
    assert outcome.by_heads == 0


def test_a_gate_for_each_head_is_followed():
    grouped(Mixed("gate per head"), inputs(S=5))


class Returned(MLA):
    """Also returns what it made for all heads."""

    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def attend(self, q, k, v, mask):
        scores = q @ k.mT * self.scale
        probs = scores.softmax(-1)
        return probs @ v, {"probs": probs, "keys and values": torch.cat([k, v], -1), "queries": q}[self.what]

    def finish(self, out, x):
        out, made = out
        return super().finish(out, x), made


@pytest.mark.parametrize(("what", "groups"), [("probs", 0), ("queries", 1), ("keys and values", 1)])
def test_what_somebody_else_reads_is_made_once(what, groups):
    module, given = Returned(what), inputs(S=5)
    outcome = optimized(export(module, given), **GROUPED)
    assert outcome.by_heads == groups
    assert_equal(module, outcome.program, given)


def test_heads_merged_with_the_batch_stay():
    at_once(MLA(core="bmm"), inputs(S=5), "cannot be divided into groups")


def test_an_operator_without_a_rule_stays():
    class Kron(MLA):
        def attend(self, q, k, v, mask):
            return torch.cumsum(super().attend(q, k, v, mask), 1)

    outcome = grouped(Kron(), inputs(S=5))  # what comes after the attention does not matter
    assert "cumsum.default" in calls(outcome.program)


def test_dropout_draws_other_numbers_for_a_part():
    class Dropped(MLA):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    program = export(Dropped(), inputs(S=5))
    outcome = optimized(program, **{**GROUPED, "verify": False})
    assert outcome.by_heads == 0


def test_one_query_and_small_attentions_stay():
    assert optimized(export(MLA(), inputs(S=1)), **GROUPED).by_heads == 0
    module, given = MLA(core="matmul"), inputs(S=5)
    program = export(module, given)
    # q, k [2,3,S,10], v [2,3,7,5], scores and probabilities [2,3,5,7], and the output, in float64
    held = 8 * 2 * 3 * (5 * 10 + 7 * 10 + 7 * 5 + 2 * 5 * 7 + 5 * 5)
    assert optimized(program, **{**GROUPED, "expanded_bytes": held}).by_heads == 0
    assert optimized(program, **{**GROUPED, "expanded_bytes": held - 1}).by_heads == 1
    assert optimized(program, **{**GROUPED, "expanded_bytes": None}).by_heads == 0


def test_scores_that_torch_writes_out_inside_of_its_operator_count():
    module, given = MLA(), inputs(S=5)
    program = export(module, given)
    held = 8 * 2 * 3 * (5 * 10 + 7 * 10 + 7 * 5 + 2 * 5 * 7 + 5 * 5)
    assert optimized(program, **{**GROUPED, "expanded_bytes": held}).by_heads == 0
    assert optimized(program, **{**GROUPED, "expanded_bytes": held - 1}).by_heads == 1


def test_both_forms_of_a_graph_that_picks_one_in_each_call():
    module, given = Merged(), inputs(S=5)
    program = export(module, given, ({1: DYN}, {1: DYN}, {1: DYN}))
    outcome = optimized(program, **{**GROUPED, "forms": "auto"})
    assert outcome.variants
    assert outcome.expanded is outcome.long
    assert outcome.base is program
    assert calls(outcome.long).count(SDPA) == H
    assert SDPA not in calls(outcome.program)
    (site,) = outcome.report.sites
    assert any(note.startswith("where it is expanded, 1 of 3 heads at a time") for note in site.notes)
    assert_equal(module, outcome.long, given)
    assert_equal(module, outcome.long, inputs(S=6, T=9))
    kept = optimized(program, **{**GROUPED, "forms": "auto", "expanded_bytes": None})
    assert kept.long is kept.base is program
