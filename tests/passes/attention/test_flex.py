"""flex_attention: absorbed where it may be, else the same operator as before, beside whatever else is rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mla_compile import backend
from mla_compile.codes import Code
from tests.support.modules import MLA, H, inputs
from tests.support.programs import absorbed, assert_equal, calls, codes, error, export, optimized, seeded
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

S, T = 3, 7


@pytest.fixture
def uncompiled(monkeypatch):
    """For functions without tensors of their own, which Dynamo has to find. It takes as long as the rest of a test."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


class Flex(MLA):
    """``options`` are those of flex_attention; ``finish_heads`` makes the result of it."""

    def __init__(self, finish_heads=lambda out, q, k, v: out, shapes=lambda q, k, v: (q, k, v), **options):
        super().__init__()
        self.register_buffer("slopes", seeded(2 * H, seed=8))
        self.finish_heads, self.shapes, self.options = finish_heads, shapes, options

    def attend(self, q, k, v, mask):
        options = {**self.options, "scale": self.scale}
        if options.pop("alibi", False):
            options["score_mod"] = lambda score, b, h, i, j: score - self.slopes[h] * (i + T - S - j)
        return self.finish_heads(flex_attention(*self.shapes(q, k, v), **options), q, k, v)


def written_out(out, q, k, v):
    e = (q @ k.mT).exp()
    return out + e / e.sum(-1, keepdim=True) @ v


def grouped(q, k, v):
    return q.repeat_interleave(2, 1), k, v


@pytest.mark.parametrize(
    "options", [{}, *also("combination", {"alibi": True})], ids=["scores as they are", "score_mod"]
)
def test_several_queries_are_absorbed(options):
    """The result lies in memory as flex_attention lays it out, by which a view of it was traced."""
    program = absorbed(Flex(**options), inputs(S=S))
    assert not any("flex" in op for op in calls(program))


@full("combination")  # of less than what the test of groups with a block mask and changed scores shows
@pytest.mark.parametrize("alibi", [True, False])
def test_queries_in_groups(alibi):
    def first(out, q, k, v):
        return out[:, ::2]

    absorbed(Flex(first, grouped, enable_gqa=True, alibi=alibi), inputs(S=S))


@pytest.mark.parametrize("alibi", [True, *also("combination", False)])
def test_what_is_not_absorbed_stays(alibi):
    """Also its functions and its block mask, when dead code is removed around it."""
    module = Flex(written_out, alibi=alibi)
    program = export(module, inputs(S=S))
    outcome = optimized(program, forms="expanded")
    assert codes(outcome) == [Code.FORMS_EXPANDED] * 2
    assert calls(outcome.program).count("flex_attention") == 1
    assert "softmax.int" in calls(outcome.program)
    assert_equal(module, outcome.program, inputs(S=S))


def with_sums(out, q, k, v):
    return out[0] + out[1][..., None]


def blocks(mask_mod, B=1):
    count, index = torch.ones(B, 1, 1, dtype=torch.int32), torch.zeros(B, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=1 << 30, mask_mod=mask_mod)


TOLD = {
    "a result that is used besides": {"finish_heads": with_sums, "return_lse": True},
    "one sequence for all": {"shapes": lambda q, k, v: (q, k[:1], v[:1]), "block_mask": blocks(None, B=2)},
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("name", usual(TOLD, rare=("one sequence for all",)))
def test_what_is_not_taken_apart_is_told(name):
    module = Flex(**TOLD[name])
    program = export(module, inputs(S=S))
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.UNSUPPORTED_OP]
    assert "flex_attention" in outcome.report.sites[0].reason
    assert_equal(module, outcome.program, inputs(S=S))


MASKS = {
    "of one block": blocks(lambda b, h, i, j: i + T - S >= j),
    "for all heads": create_block_mask(lambda b, h, i, j: i + T - S >= j, None, None, S, T, "cpu", BLOCK_SIZE=2),
    "for each": create_block_mask(lambda b, h, i, j: (i + j + h + b) % 5 > 1, 2, H, S, T, "cpu", BLOCK_SIZE=(2, 1)),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", usual(MASKS, ("for each",)))
def test_block_masks(name):
    """In small blocks some are listed as partial, some as seen wholly, and some not at all."""
    program = absorbed(Flex(block_mask=MASKS[name]), inputs(S=S))
    assert not any("flex" in op for op in calls(program))


@pytest.mark.parametrize("shapes", [grouped, *also("combination", lambda q, k, v: (q, k, v))])
def test_a_block_mask_beside_a_score_mod(shapes):
    """The scores are changed first, then hidden."""
    options = {"enable_gqa": shapes is grouped, "shapes": shapes, "block_mask": MASKS["of one block"]}
    program = absorbed(Flex(lambda out, q, k, v: out[:, -H:], alibi=True, **options), inputs(S=S))
    assert not any("flex" in op for op in calls(program))


@pytest.mark.usefixtures("uncompiled")
def test_blocks_that_are_not_listed_are_not_seen():
    """Uncompiled, flex_attention looks at mask_mod alone; compiled code reads the lists, and so do we."""
    count, index = torch.tensor([[[2, 1]]]), torch.tensor([[[[0, 3, 1, 2], [2, 0, 1, 3]]]])
    lists = BlockMask.from_kv_blocks(count.int(), index.int(), BLOCK_SIZE=2, seq_lengths=(S, T))

    def listed(b, h, i, j):
        return torch.where(i < 2, (j < 2) | (j >= 6), (j >= 4) & (j < 6))

    outcome = optimized(export(Flex(block_mask=lists), inputs(S=S)), forms="absorbed", verify=False)
    assert codes(outcome) == [Code.ABSORBED]
    assert_equal(Flex(block_mask=blocks(listed)), outcome.program, inputs(S=S))


@full("combination")
def test_constants_inside_of_score_mod(monkeypatch):
    """Of two layers, each with tensors of its own that bear the same names."""

    def sloped(first):
        slopes = [first, 0.2, 0.3]
        return Flex(score_mod=lambda score, b, h, i, j: score + torch.tensor(slopes, dtype=score.dtype)[h] * j)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = sloped(0.1), sloped(0.9)

        def forward(self, x, c, r):
            return self.first(x, c, r) + self.second(x, c, r)

    module = Two()
    reports = backend.reports()
    options = {"codegen": "eager", "strict": True, "forms": "absorbed"}
    with torch.no_grad():
        result = torch.compile(module, backend="mla", options=options)(*inputs(S=S))
        # Outside of torch.compile torch compiles the operator by itself; 2.15 fails there in the second layer.
        monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        assert error(result, module(*inputs(S=S))) < 1e-10
    (report,) = [r for r in backend.reports() if r not in reports]
    assert [s.code for s in report.sites] == [Code.ABSORBED] * 2
