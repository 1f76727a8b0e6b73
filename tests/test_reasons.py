"""Every reason is true: what a refusal states of K and V is what they do when the rows they are made of are changed.

:mod:`tests.support.reasons` watches them; nothing of the analysis that gives the reasons has a part in it. Run over the
zoo and over generated modules with a fault; ``MLA_REASONS=1000 MLA_REASONS_SEED=1`` draws more of those, and others.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import pytest
import torch

from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from mla_compile.pipeline.manager import Analyses
from tests.support.generated_module import GeneratedMLA
from tests.support.generated_run import captured_step
from tests.support.generator import Case, cases, check_each, drawn
from tests.support.modules import MLA, inputs
from tests.support.programs import LEGAL, canonical, seeded
from tests.support.reasons import Told, recording, told
from tests.support.tiers import also
from tests.test_zoo import ODD, STYLES, load, pytestmark, random_inputs
from tests.zoo.base import NotCaptured

__all__ = ["pytestmark"]

CASES = int(os.environ.get("MLA_REASONS", "45"))
SEED = int(os.environ.get("MLA_REASONS_SEED", "0"))
PARTS = 15  # tests that share the cases between them, of which the default tier runs one

# What each breaks of all that can be broken, so that the check is seen to tell these apart.
ONLY = {
    "activation_after_up": {"nonlinear"},
    "complex_rope_on_whole_key": {"position"},
    "convolution_over_tokens": {"mixed", "heads"},  # the convolution reads each head's own columns
    "latent_per_head": {"heads", "nonlinear"},  # of the hidden state, behind a norm
    "mask_from_expanded_keys": {"mask"},
    "softmax_over_queries": {"no softmax of keys"},
    "dropout_left_on": {"random"},
}
BY_DEFAULT = ("complex_rope_on_whole_key", "convolution_over_tokens")
TOLD_APART = {"nonlinear", "position", "mixed", "heads", "mask", "no softmax of keys", "random"}


def said_of(style: str) -> list[Told]:
    """All that is said of the attentions of a style in the step after a prompt, which runs as it is."""
    zoo = load(style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        with recording() as backend:
            step = zoo.session(torch.compile(zoo.build(ODD).eval(), backend=backend, dynamic=False))
            prompt, x, *_ = random_inputs(ODD, 4)
            with torch.compiler.set_stance("force_eager"):
                step(prompt)
            step(x)
            return backend.said(ODD.B)


@pytest.mark.parametrize("style", [s if s in BY_DEFAULT else also("family", s)[0] for s in STYLES])
def test_reasons_of_the_zoo(style: str) -> None:
    if isinstance(load(style).EXPECTED, NotCaptured):
        pytest.skip("no graph can be made of it")
    found = said_of(style)
    assert not [str(t) for t in found if not t.true]
    if style in ONLY:
        (last,) = {t.broken & TOLD_APART for t in found[-1:]}
        assert last == ONLY[style], [str(t) for t in found]


def reasons(case: Case) -> list[Told]:
    program, given = captured_step(GeneratedMLA(case))
    return told(program, given, case.B)


def check(case: Case) -> list[Told]:
    """The reasons that are given for a faulty case; raises AssertionError where one of them is not so."""
    found = reasons(replace(case, dtype="float64", library="", T=max(case.T, 2)))
    assert not [str(t) for t in found if not t.true]
    return found


@pytest.mark.parametrize("part", [0, *also("draws", *range(1, PARTS))])
def test_reasons_of_generated_modules(part: int) -> None:
    # A hidden state narrower than the latent makes an up-projection of what makes the latent.
    found = drawn(max(1, CASES // PARTS), SEED * PARTS + part, cases(legal=False))
    check_each((replace(case, D=9, H=max(case.H, 2)) for case in found), check)


# One head, whose K or V (rotated, of a nonlinear function, of a norm) passes for rows that all heads share: the product
# that makes it is needed for the attention itself, and not by anything besides.
OWN_ROWS = [
    Case(B=3, T=2, D=1, H=1, L=1, N=1, R=0, V=1, up="blocks", latent_norm=False, rope="none", mask="add", mask_rank=3,
         scale="argument", cache="joint", fault="silu_on_values"),
    Case(B=1, T=2, D=1, H=1, L=1, Q=1, N=2, R=1, V=1, latent_norm=False, rope="none", scale="query", mask="add",
         mask_rank=3, cache="none", fault="rope_on_keys"),
    Case(B=1, T=2, D=1, H=1, L=1, N=1, R=1, V=1, groups=2, up="two", rope="none", scale="argument", mask="add_min",
         cache="none", fault="norm_on_keys"),
]  # fmt: skip


@pytest.mark.parametrize("case", OWN_ROWS)
def test_what_the_attention_reads_itself_is_not_read_elsewhere(case: Case) -> None:
    assert {str(t.code) for t in check(case)} == {
        "silu_on_values": {"nonlinear"},
        "rope_on_keys": {"position_dependent"}, "norm_on_keys": {"nonlinear"},
    }[case.fault]  # fmt: skip


# Keys of a latent and of a nonlinear row of it, both up-projected: the mask is what keeps them, and not how the row is
# made.
MASKED = Case(
    T=3, D=9, H=2, L=1, Q=1, N=1, R=1, V=1, steps=1, chunk=2, up="two", lora=True, latent_norm=False,
    latent_scale="vector", rope="none", rotate="on_read", share="repeat", join="sum", layout="heads_last", core="bmm",
    scale="divide", mask="where", mask_rank=3, extra="max", cache="index_copy", fault="mask_from_keys", beside="rows",
    latents=2,
)  # fmt: skip


# Keys that are returned, and values that are a sum: of a latent that is wider than they are, and of a narrow row.
WIDE_SUMMAND = Case(
    T=6, D=9, H=2, L=7, Q=5, N=5, R=0, V=2, groups=2, up="two", bias=True, key_scale="vector", query_scale="constant",
    rope="none", share="repeat", join="assign", layout="heads_last", pad_values=True, scale="argument", factor=0.37,
    mask="is_causal", cache="none", fault="keys_returned", door="dynamo", lowering="aten", seed=9, beside="rows",
)  # fmt: skip


# A latent for each head, made wider of a hidden state that all share, with a norm between.
OWN_LATENTS = Case(
    D=9, H=6, L=6, Q=7, N=7, R=7, V=7, up="blocks", bias=True, query_scale="positions", rope="none", join="assign",
    layout="heads_last", core="einsum_heads_last", scale="both", factor=0.37, mask="compare", mask_rank=2, cache="none",
    fault="latent_per_head", lowering="aten", seed=4,
)  # fmt: skip


# Keys that are returned, which no product makes wider than the latent.
NARROW_KEYS = Case(
    T=2, D=9, H=2, L=5, N=1, R=0, steps=1, chunk=2, up="raw", lora=True, latent_norm=False, key_scale="heads",
    rope="none", share="repeat_interleave", join="cat_reversed", core="matmul", mask="add", mask_rank=3, cache="joint",
    fault="keys_returned", seed=8,
)  # fmt: skip


# A softmax over heads, which read two normalised latents, made of a hidden state that is hardly wider.
OVER_HEADS = Case(
    D=9, H=2, L=3, R=7, V=7, up="batched", bias=True, rope="none", share="repeat", layout="heads_last", core="matmul",
    mask="keep", softmax="cast", cache="none", fault="softmax_over_heads", latents=2,
)  # fmt: skip


# Keys that mix tokens, behind the columns of a rotary row that all heads share: rotating that row is no obstacle.
ROTARY_FIRST = Case(T=2, join="cat_reversed", cache="none", fault="cumsum_tokens")


@pytest.mark.parametrize(
    ("case", "part", "code"),
    [
        (ROTARY_FIRST, "both", "token_mixing"),
        (MASKED, "keys", "mask_depends_on_keys"),
        (OVER_HEADS, "both", "softmax_axis"),
        (WIDE_SUMMAND, "some columns of the values", "cost_latent_wide"),
    ],
    ids=["rotary", "mask", "softmax", "wide"],
)
def test_how_rows_are_made_is_no_reason(case: Case, part: str, code: str) -> None:
    assert {str(t.code) for t in check(case) if t.part == part} == {code}


@pytest.mark.parametrize(
    ("case", "part", "code"),
    [(OWN_LATENTS, "both", "nonlinear"), (NARROW_KEYS, "keys", "keys_used_elsewhere")],
    ids=["own latents", "narrow keys"],
)
def test_what_is_narrower_or_wider_than_the_rows(case: Case, part: str, code: str) -> None:
    assert {str(t.code) for t in check(case) if t.part == part} == {code}


def test_the_norm_before_latents_of_single_heads_is_the_obstacle() -> None:
    """Without it all heads read an image of the same hidden states, which are kept and which no query is made of."""
    program, _ = captured_step(GeneratedMLA(replace(OWN_LATENTS, latent_norm=False)))
    program = program.copy()
    canonical(program)
    (verdict,) = Analyses(program).get(LEGAL)
    assert (verdict.code, verdict.parts) == (Code.ABSORBED, ())
    assert verdict.plan is not None
    assert verdict.plan.dims.L == OWN_LATENTS.D


class Mixed(MLA):
    """The rotary rows that all heads share are a constant matrix times the cached ones, or times the first of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(seeded(7, count))

    def forward(self, x: torch.Tensor, c: torch.Tensor, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        r = torch.cat([past, new], 1)
        return super().forward(x, c, self.mixed(r)), r

    def mixed(self, r: torch.Tensor) -> torch.Tensor:
        return self.mix @ r[:, : self.mix.shape[1]]


class MixedKeys(Mixed):
    """The same matrix, times the keys of each head."""

    def mixed(self, r: torch.Tensor) -> torch.Tensor:
        return r

    def join(self, k: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        joined = super().join(k, r)
        return self.mix @ joined[:, :, : self.mix.shape[1]]


@pytest.mark.parametrize("count", [3, 7])
def test_tokens_mixed_before_heads_share_a_row(count: int) -> None:
    """What is mixed is a row of all heads again. Behind the up-projection, no row stands for a key."""
    x, c, r = inputs(T=7)
    for kind, absorbed in ((Mixed, True), (MixedKeys, False)):
        torch._dynamo.reset()
        module = kind(count)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", MlaCompileWarning)
            with recording() as backend:
                got = torch.compile(module, backend=backend, dynamic=False)(x, c, r[:, :6], r[:, 6:])
                said = backend.said(len(x))
        torch.testing.assert_close(got, module(x, c, r[:, :6], r[:, 6:]))
        assert [(keys.code, keys.true) for keys in said] == ([] if absorbed else [(Code.TOKEN_MIXING, True)]), said
