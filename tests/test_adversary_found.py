"""What the mutants found, each as the smallest module that shows it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.codes import Code
from tests.support.modules import MLA, H, N, V, inputs
from tests.support.programs import absorbed, export, one_side, optimized, refused, seeded


class Core(MLA):
    """The attention by ``core``, and something of its own in between."""

    def __init__(self, core: str, **options) -> None:
        super().__init__(**options)
        self.core = core

    def plain(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.core == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scores = q @ k.mT * self.scale
        scores = scores if mask is None else scores + mask
        return (scores.tanh() if self.core == "capped" else scores).softmax(-1) @ v


def test_scores_plus_their_own_transpose():
    """One product twice, its axes swapped, which no renaming of axes can undo: it recursed without end."""

    class Symmetrised(MLA):
        def attend(self, q, k, v, mask):
            scores = q @ k.mT
            return (scores + scores.mT).softmax(-1) @ v

    refused(Symmetrised(), inputs(S=7), Code.UNSUPPORTED_OP)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_scores_added_to_themselves(scale):
    """The product was replaced twice; folding then met the queries of the second, which nothing read any more."""

    class Doubled(MLA):
        def __init__(self):
            super().__init__(up="two")

        def attend(self, q, k, v, mask):
            scores = q @ k.mT
            return (scores * scale + scores).softmax(-1) @ v

    absorbed(Doubled(), inputs(), fold="always")


@pytest.mark.parametrize("part", ["values", "rotary key"])
def test_a_column_that_stands_for_several(part):
    """The rewrite has no name for the copies: einsum had an axis that no operand has."""

    class Repeated(MLA):
        def expand(self, c):
            k, v = super().expand(c)
            return k, (v[..., :1].expand(-1, -1, -1, V) if part == "values" else v)

        def join(self, k, r):
            return super().join(k, r[..., :1].expand(-1, -1, self.R) if part == "rotary key" else r)

    one_side(Repeated(), inputs(), "keys" if part == "values" else "values", Code.UNSUPPORTED_OP)


def test_a_column_of_the_keys_that_stands_for_several():
    class Repeated(MLA):
        def expand(self, c):
            k, v = super().expand(c)
            return k[..., :1].expand(-1, -1, -1, N), v

    absorbed(Repeated(), inputs())


@pytest.mark.parametrize(("shape", "core"), [((2, 1, 1, 7), "sdpa"), ((1, 2, 3, 7), "matmul"), ((1, 2, 1, 1), "sdpa")])
def test_a_mask_for_one_of_two_head_axes(shape, core):
    """Heads as [2, 2]: a mask for one of the two axes was taken for one of two heads."""

    class Grouped(Core):
        def __init__(self):
            super().__init__(core, H=4)
            self.mask = nn.Parameter(seeded(*shape))

        def attend(self, q, k, v, mask):
            return self.plain(*(t.unflatten(1, (2, 2)) for t in (q, k, v)), self.mask).flatten(1, 2)

    absorbed(Grouped(), inputs(S=3))


@pytest.mark.parametrize(
    ("which", "core"), [("queries", "sdpa"), ("queries", "capped"), ("keys", "matmul"), ("values", "capped")]
)
def test_one_head_of_queries_keys_or_values_for_all(which, core):
    """Broadcast in the product itself, with no node that expands it; for queries nothing expanded them again."""

    class One(Core):
        def attend(self, q, k, v, mask):
            given = {"queries": q, "keys": k, "values": v}
            given[which] = given[which][:, :1]
            return self.plain(*given.values())

    absorbed(One(core), inputs(S=3))


@pytest.mark.parametrize(("where", "core"), [("scores", "einsum"), ("probs", "matmul"), ("both", "einsum")])
def test_heads_that_talk_are_reported(core, where):
    """A matrix over the heads of scores or probabilities: no rule of ours follows it, and nothing was said."""

    class Talking(MLA):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(seeded(H, H))

        def talk(self, x):
            if core == "einsum":
                return torch.einsum("bhst,hg->bgst", x, self.mix)
            return (x.transpose(1, 3) @ self.mix).transpose(1, 3)

        def attend(self, q, k, v, mask):
            scores = q @ k.mT * self.scale
            probs = (scores if where == "probs" else self.talk(scores)).softmax(-1)
            return (probs if where == "scores" else self.talk(probs)) @ v

    refused(Talking(), inputs(S=3), Code.UNSUPPORTED_OP)


def test_a_number_added_to_the_keys():
    """A bias like any other, but not followed: the reason was that it differed from token to token."""

    class Shifted(MLA):
        def expand(self, c):
            k, v = super().expand(c)
            return k + 0.5, v

    outcome = one_side(Shifted(), inputs(), "values", Code.UNSUPPORTED_OP)
    assert "number" in outcome.report.sites[0].kept[0].reason


def test_tokens_mixed_by_weights_alone():
    """No walk ends at it, so nothing was to blame, and the report spoke of rotary keys of every head."""

    class Mixed(MLA):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(seeded(7, 7))

        def expand(self, c):
            k, v = super().expand(c)
            return self.mix @ k, self.mix @ v

    refused(Mixed(), inputs(), Code.TOKEN_MIXING)


def test_an_adapter_that_reads_other_rows():
    """Legal: the sum of what two row tensors are projected to. It was called a factor that depends on the position."""

    class Adapted(MLA):
        def __init__(self):
            super().__init__(up="lora")

        def _joint(self, c):
            return F.linear(c, self.w) + F.linear(F.linear(c.cumsum(1), self.down), self.back)

    absorbed(Adapted(), inputs())


def test_dropout_of_a_rotary_key_that_was_expanded():
    """Every head has rows of its own then, but it is not for that that they stay."""

    class Dropped(MLA):
        def join(self, k, r):
            r = r[:, None].expand(-1, self.H, -1, -1)
            return torch.cat([k, F.dropout(r, 0.3, training=True)], -1)

    outcome = optimized(export(Dropped(), inputs()), forms="absorbed")
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("keys", "values"))
    assert [k.code for k in site.kept] == [Code.DROPOUT]


class SpoiltValues(MLA):
    """Values from rows no wider than themselves, and ``step`` on the rows or on the values."""

    def __init__(self, of_rows=None, of_values=None) -> None:
        super().__init__(up="two", V=2)
        self.of_rows, self.of_values = of_rows or (lambda c: c), of_values or (lambda v: v)

    def expand(self, c: Tensor) -> tuple[Tensor, Tensor]:
        k, _ = super().expand(c)
        _, v = super().expand(self.of_rows(c))
        return k, self.of_values(v)


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ({"of_values": lambda v: v.cumsum(2)}, Code.TOKEN_MIXING),
        ({"of_values": lambda v: v.relu()}, Code.NONLINEAR),
        ({"of_rows": lambda c: c.cumsum(1)}, Code.TOKEN_MIXING),
        ({"of_rows": lambda c: c * torch.arange(7.0)[:, None]}, Code.POSITION_DEPENDENT),
        ({"of_rows": lambda c: c.flip(1) + c}, Code.TOKEN_MIXING),
    ],
)
def test_values_no_wider_than_their_rows(step, code):
    """Nothing is expanded on the way of such values, so it was said that every head has rows of its own."""
    one_side(SpoiltValues(**step), inputs(), "keys", code)


@pytest.mark.parametrize("columns", [1, 2, V - 1])
def test_columns_of_the_values_that_are_a_bias_alone(columns):
    """With one column, the zeros that the bias of each head was added to had an axis too many: heads met queries."""

    class Blank(MLA):
        def __init__(self):
            super().__init__(up="two")
            self.each = nn.Parameter(seeded(H, V, seed=8))

        def expand(self, c):
            k, v = super().expand(c)
            return k, torch.cat([v[..., columns:], torch.zeros_like(v[..., :columns])], -1) + self.each[:, None]

    absorbed(Blank(), inputs(S=H))
