"""Attention operators of libraries: absorbed by what their schemas say, or refused with what stands in the way.

The libraries are not there; :mod:`tests.support.flash` registers operators under their names and schemas.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile import pipeline
from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.ir.graph import is_tensor
from tests.support import flash
from tests.support.flash import HUB, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.modules import MLA, H, N, R, V, inputs
from tests.support.programs import OP, absorbed, assert_equal, calls, codes, export, optimized, seeded
from tests.support.tiers import also, full
from tests.support.usual import usual

flash.register()

S, T = 3, 7
LENGTHS = torch.tensor([4, 7], dtype=torch.int32)


class Flash(MLA):
    """``function`` is given q [B,S,H,N+R], k [B,T,H,N+R] and v [B,T,H,V], and returns [B,S,H,V]."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function
        self.register_buffer("lengths", LENGTHS)

    def attend(self, q, k, v, mask):
        out = self.function(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)


def padded(function):
    """V as wide as K, and the result cut: FlashAttention 2 asks for it, and transformers does it for such models."""

    def call(q, k, v):
        return function(q, k, F.pad(v, [0, q.shape[-1] - v.shape[-1]]))[..., : v.shape[-1]]

    return call


def to_eight(function):
    """Heads padded to the next multiple of 8, as the library's own function does."""

    def call(q, k, v):
        more = -q.shape[-1] % 8
        out = function(*(F.pad(x, [0, more]) for x in (q, k, v)), softmax_scale=q.shape[-1] ** -0.5)
        return out[..., : v.shape[-1]]

    return call


def kv_packed(q, k, v):
    """k and v cut from one tensor, as for ``flash_attn_kvpacked_func``."""
    kv = torch.stack([k, F.pad(v, [0, k.shape[-1] - v.shape[-1]])], 2)
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True)[..., : v.shape[-1]]


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return flash_attn_func(q, k, v, causal=True)


def varlen(starts_q, starts_k, **how):
    def call(q, k, v):
        rows = (x.flatten(0, 1) for x in (q, k, v))
        a, b = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
        return flash_attn_varlen_func(*rows, a, b, S, T, **how).unflatten(0, q.shape[:2])

    return call


def xformers(q, k, v, **how):
    return torch.ops.xformer.memory_efficient_attention_forward(q, k, v, **how)


def by_heads(function):
    """xformers' form for three axes: heads in the batch."""

    def call(q, k, v):
        out = function(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
        return out.unflatten(0, (-1, H)).transpose(1, 2)

    return call


BIAS = seeded(2, H, S, T, seed=9)


def three(q, k, v, **how):
    return torch.ops.flash_attn_3.fwd(q, k, v, **how)[0]


SINKS = seeded(H, seed=6)


def with_sinks(q, k, v, sinks=SINKS, **how):
    return getattr(torch.ops, flash.VLLM).fwd(q, k, v, s_aux=sinks, **how)[0]


def packed_with_sinks(q, k, v):
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (S, T)]
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    return with_sinks(*(x.flatten(0, 1) for x in (q, k, v)), is_causal=True, **names).unflatten(0, q.shape[:2])


def of_torch(op, *before, causal=False):
    """An operator that torch's own attention calls on some device, heads first; ``before``: what precedes dropout."""

    def call(q, k, v):
        return op(*(x.transpose(1, 2) for x in (q, k, v)), *before, 0.0, causal, scale=0.3)[0].transpose(1, 2)

    return call


CASES = {
    "all keys": flash_attn_func,
    "causal": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "a scale": lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=0.7),
    "padded values": padded(lambda q, k, v: flash_attn_func(q, k, v, causal=True)),
    "padded heads": to_eight(flash_attn_func),
    "a window": lambda q, k, v: flash_attn_func(q, k, v, window_size=(3, 0)),
    "a window, causal": lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(3, 5)),
    "a window on both sides": lambda q, k, v: flash_attn_func(q, k, v, window_size=(2, 1)),
    "a window to the right": lambda q, k, v: flash_attn_func(q, k, v, window_size=(-1, 1)),
    "a soft cap": lambda q, k, v: flash_attn_func(q, k, v, softcap=1.5),
    "a soft cap, causal": lambda q, k, v: flash_attn_func(q, k, v, softcap=1.5, causal=True),
    "a namespace with a hash": lambda q, k, v: flash_attn_func(q, k, v, causal=True, namespace=HUB),
    "an autograd function": Function.apply,
    "k and v of one tensor": kv_packed,
    "version 3": lambda q, k, v: three(q, k, v, is_causal=True),
    "version 3, a cap": lambda q, k, v: three(q, k, v, is_causal=True, softcap=2.0, softmax_scale=0.4),
    "version 3, lengths": lambda q, k, v: three(q, k, v, is_causal=True, seqused_k=LENGTHS),
    "sinks": lambda q, k, v: with_sinks(q, k, v, is_causal=True),
    "sinks that take nothing": lambda q, k, v: with_sinks(q, k, v, SINKS - float("inf"), is_causal=True),
    "sinks in half precision": lambda q, k, v: with_sinks(q, k, v, SINKS.bfloat16(), window_size_left=2),
    "sinks and lengths": lambda q, k, v: with_sinks(q, k, v, is_causal=True, seqused_k=LENGTHS - 3),
    "sinks and a cap": lambda q, k, v: with_sinks(q, k, v, softcap=1.5),
    "sinks of packed sequences": packed_with_sinks,
    "a cache that is filled": lambda q, k, v: flash_attn_with_kvcache(q * 1, k, v, cache_seqlens=LENGTHS, causal=True),
    "lengths, no diagonal": lambda q, k, v: flash_attn_with_kvcache(q * 1, k, v, cache_seqlens=LENGTHS),
    "lengths and a window": lambda q, k, v: flash_attn_with_kvcache(
        q * 1, k, v, cache_seqlens=LENGTHS, causal=True, window_size=(2, 0)
    ),
    "packed": varlen([0, S, 2 * S], [0, T, 2 * T], causal=True),
    "packed, not alike": varlen([0, S - 1, 2 * S], [0, T + 2, 2 * T], causal=True),
    "packed, three of them": varlen([0, 1, 2, 2 * S], [0, 4, 5, 2 * T]),
    "packed, a window": varlen([0, S, 2 * S], [0, T, 2 * T], window_size=(2, 1)),
    "packed, a cap": varlen([0, S, 2 * S], [0, T, 2 * T], causal=True, softcap=1.5),
    "xformers": xformers,
    "xformers, a bias": lambda q, k, v: xformers(q, k, v, b=BIAS, scale=0.4),
    "xformers, three axes": by_heads(xformers),
    "torch's own for the CPU": padded(of_torch(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)),
    "torch's own, written out": of_torch(torch.ops.aten._scaled_dot_product_attention_math, None),
    "torch's own, written out, causal": of_torch(torch.ops.aten._scaled_dot_product_attention_math, None, causal=True),
}


@functools.cache
def exported(case):
    """The program of a case, for all tests of it: the pipeline leaves what it is given as it is."""
    return export(Flash(CASES[case]), inputs(S=S, T=T))


SELDOM = (
    "padded heads", "a window to the right", "a soft cap, causal", "version 3, a cap", "packed, three of them",
    "packed, a cap", "a scale", "a window, causal", "a namespace with a hash", "version 3", "lengths, no diagonal",
    "packed, a window", "xformers", "causal", "all keys", "a window", "a cache that is filled", "packed",
    "xformers, three axes", "torch's own, written out, causal", "sinks and a cap", "sinks in half precision",
    "sinks and lengths", "sinks of packed sequences", "torch's own, written out",
)  # fmt: skip
"""Cases of which others show each part."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", usual(CASES, rare=SELDOM))
def test_absorbed(case):
    program = absorbed(Flash(CASES[case]), inputs(S=S, T=T), program=exported(case))
    assert not any("flash" in op or "xformer" in op for op in calls(program))


OPERATORS = ("lengths and a window", "packed, not alike", "torch's own for the CPU")
ONE_QUERY = ("version 3, lengths", "sinks")


@pytest.mark.parametrize(
    "case",
    usual((c for c in CASES if "packed" not in c and "bias" not in c), ONE_QUERY),
)
def test_one_query_is_absorbed(case):
    absorbed(Flash(CASES[case]), inputs(S=1, T=T), lowering="op")


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize(
    "case", ["a window on both sides", "a soft cap, causal", *also("combination", "causal", "a window")]
)
@pytest.mark.parametrize("sizes", [(7, 7), (9, 4)], ids=["as many queries", "more queries than keys"])
def test_other_numbers_of_queries(case, sizes):
    """A query at which no key is visible gives zero, also where the values have a bias."""
    absorbed(Flash(CASES[case], bias=case != "a soft cap, causal"), inputs(S=sizes[0], T=sizes[1]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    ["a window", *also("combination", "causal", "padded values", "version 3, lengths", "a soft cap, causal")],
)
def test_symbolic_lengths(case):
    tokens, queries = torch.export.Dim("T", min=8), torch.export.Dim("S", max=6)
    given = inputs(S=S, T=9)
    program = export(Flash(CASES[case]), given, ({1: queries}, {1: tokens}, {1: tokens}))
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED], outcome.report
    for s, t in ((S, 9), (2, 13), (5, 8)):
        assert_equal(Flash(CASES[case]), outcome.program, inputs(S=s, T=t))


class WithoutHeads(torch.nn.Module):
    """Queries [B,S,N] over keys and values of a latent [B,T,L], by torch's own operator of three axes."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.k, self.v = causal, torch.nn.Linear(8, 16).double(), torch.nn.Linear(8, 12).double()

    def forward(self, q, rows):
        attend = torch.ops.aten._scaled_dot_product_attention_math
        return attend(q, self.k(rows), self.v(rows), is_causal=self.causal)[0]


@pytest.mark.parametrize("causal", [True, *also("combination", False)])
def test_without_heads_the_second_axis_is_tokens(causal):
    module, given = WithoutHeads(causal).eval(), [seeded(2, S, 16), seeded(2, 9, 8, seed=1)]
    tokens, queries = torch.export.Dim("T", min=8), torch.export.Dim("S", max=6)
    outcome = optimized(export(module, given, ({1: queries}, {1: tokens})), forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED], outcome.report
    assert ("begins at the first key" in str(outcome.report)) is causal
    assert_equal(module, outcome.program, [seeded(2, 3, 16), seeded(2, 11, 8, seed=1)])


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("softcap", [1.5, *also("combination", 0.0)])
@pytest.mark.parametrize("causal", [True, *also("combination", False)])
def test_heads_of_keys_that_serve_several_queries(causal, softcap):
    def grouped(q, k, v):
        out = flash_attn_func(q.repeat_interleave(2, 2) * seeded(2 * H, 1), k, v, causal=causal, softcap=softcap)
        return out[:, :, ::2] + out[:, :, 1::2]

    absorbed(Flash(grouped), inputs(S=S, T=T))


@pytest.mark.thorough
def test_sinks_of_heads_that_share_keys():
    """A number for each head of the queries, of which two read the same keys."""

    def grouped(q, k, v):
        q = q.repeat_interleave(2, 2) * seeded(2 * H, 1)
        out = with_sinks(q, k, v, seeded(2 * H, seed=3), is_causal=True)
        return out[:, :, ::2] + out[:, :, 1::2]

    absorbed(Flash(grouped), inputs(S=S, T=T))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    usual(
        [c for c in CASES if "sinks" in c and c != "sinks and a cap"],
        ("sinks", "sinks in half precision", "sinks of packed sequences"),
    ),
)
def test_sinks_are_those_of_the_operator(case):
    """Not one product after the other, with the softmax of the original between."""
    program = absorbed(Flash(CASES[case]), inputs(S=S, T=T), program=exported(case), lowering="op")
    assert calls(program).count(OP) == 1


class SharedRows(torch.nn.Module):
    """Queries [B,S,H,W] over rows [B,T,1,W] that are key and value of all heads, with learned sinks."""

    def __init__(self, dtype):
        super().__init__()
        self.sinks = torch.nn.Parameter(SINKS.to(dtype))

    def forward(self, q, rows):
        return with_sinks(q, rows, rows, self.sinks, window_size_left=4, is_causal=True).flatten(2)


@pytest.mark.thorough
@pytest.mark.usefixtures("native_kernel")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_all_heads_share_with_sinks(dtype):
    module, given = SharedRows(dtype).eval(), [seeded(2, 1, H, 8), seeded(2, T, 1, 8, seed=1)]
    outcome = optimized(export(module, given), lowering="op", verify=True)
    assert codes(outcome) == [Code.SHARED_ROWS]
    assert (outcome.fused, calls(outcome.program).count(OP)) == (1, 1)
    assert_equal(module, outcome.program, given)


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True])
def test_a_part_of_it(causal):
    """K that is normed stays, and V is absorbed alone: the operator goes all the same."""

    class Normed(Flash):
        def spoil(self, k, v):
            return F.normalize(k, dim=-1), v

    module = Normed(lambda q, k, v: flash_attn_func(q, k, v, causal=causal))
    program = export(module, inputs(S=S, T=T))
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert site.parts == ("values",)
    assert not any("flash" in op for op in calls(outcome.program))
    assert_equal(module, outcome.program, inputs(S=S, T=T))


@pytest.mark.thorough
@pytest.mark.parametrize("case", usual(CASES, OPERATORS))
def test_what_is_not_absorbed_runs_as_it_was(case):
    module, program = Flash(CASES[case]), exported(case)
    outcome = optimized(program, forms="expanded")
    assert codes(outcome) == [Code.FORMS_EXPANDED]
    (op,) = {
        op
        for op in calls(program)
        if any(word in op for word in ("flash", "xformer", "auto_functionalized", "attention_math"))
    }
    assert op in calls(outcome.program)
    assert not any("scaled_dot_product_attention." in name or "softmax" in name for name in calls(outcome.program))
    assert_equal(module, outcome.program, inputs(S=S, T=T))


@full("combination")
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["causal", "padded values", "a soft cap, causal"])
def test_the_form_that_each_call_takes(case):
    """With a symbolic number of queries, both forms are kept, and in the expanded one the operator is back."""
    module = Flash(CASES[case]).eval()
    fast = mla_compile.optimize(module, codegen="eager", strict=True)
    with torch.no_grad():
        for queries, tokens in ((3, 40), (5, 41), (41, 41), (90, 95)):
            given = inputs(S=queries, T=tokens)
            torch.testing.assert_close(fast(*given), module(*given), rtol=1e-9, atol=1e-9)
    assert {site.code for site in fast.mla_report.sites} <= {Code.ABSORBED, Code.COST_PREFILL}
    assert fast.mla_report.absorbed
    assert len(fast.mla_report.sites) < 4, "compiled for each number of queries"


@pytest.mark.thorough
def test_as_many_heads_of_plain_attention_are_no_mla():
    class Plain(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    given = (seeded(2, S, H, N), seeded(2, T, H, N, seed=1), seeded(2, T, H, N, seed=2))
    outcome = optimized(export(Plain(), given))
    assert [str(code) for code in codes(outcome)] == ["expanded_inputs"]


def with_sums(q, k, v):
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    return out + lse.mT[..., None].to(out.dtype)


def appended(q, k, v):
    return flash_attn_with_kvcache(q * 1, k * 1, v * 1, k[:, :2], v[:, :2], cache_seqlens=LENGTHS - 2, causal=True)


def written_afterwards(q, k, v):
    k = k * 1
    return flash_attn_with_kvcache(q * 1, k, v, cache_seqlens=LENGTHS) + k.sum()


UNTOLD = {
    "the sums are read": (with_sums, Code.UNSUPPORTED_OP, "the log-sum-exp"),
    "alibi": (
        lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=torch.ones(H)),
        Code.UNSUPPORTED_OP,
        "alibi_slopes is given",
    ),
    "dropout": (lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.1), Code.DROPOUT, "dropout of 0.1"),
    "a block table": (
        lambda q, k, v: flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            *(torch.tensor([0, 2 * n]) for n in (S, T)),
            S,
            T,
            block_table=torch.zeros(1, 1, dtype=torch.int32),
        ).unflatten(0, q.shape[:2]),
        Code.UNSUPPORTED_OP,
        "block_table is given",
    ),
    "a sink for all heads": (
        lambda q, k, v: with_sinks(q, k, v, SINKS[:1].expand(1, H)),
        Code.UNSUPPORTED_OP,
        "sinks that are not one number for each head",
    ),
    "sinks of some heads": (
        lambda q, k, v: with_sinks(q, k, v, torch.ones(H + 1)),
        Code.UNSUPPORTED_OP,
        "sinks that are not one number for each head",
    ),
    "whole numbers as sinks": (
        lambda q, k, v: with_sinks(q, k, v, torch.ones(H, dtype=torch.int64)),
        Code.UNSUPPORTED_OP,
        "sinks that are not one number for each head",
    ),
    "a second query": (lambda q, k, v: three(q, k, v, q_v=v[:, :S] * 1), Code.UNSUPPORTED_OP, "q_v is given"),
    "a chunk": (lambda q, k, v: three(q, k, v, attention_chunk=2), Code.UNSUPPORTED_OP, "attention_chunk is given"),
    "keys are appended": (appended, Code.EXPANDED_CACHE, "appended, per head, inside the operator"),
    "an argument is read afterwards": (written_afterwards, Code.UNSUPPORTED_OP, "may write into is used"),
    "an unknown name": (
        lambda q, k, v: torch.ops.house.fast_attn(q, k, v, 0.3),
        Code.UNSUPPORTED_OP,
        "house::fast_attn is not known",
    ),
    "unknown, by its shapes": (
        lambda q, k, v: torch.ops.house.mix(q, k, v, 0.3),
        Code.UNSUPPORTED_OP,
        "house::mix is not known",
    ),
    "a diagonal that nobody documents": (
        padded(of_torch(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, causal=True)),
        Code.UNSUPPORTED_OP,
        "a diagonal that is not known to end at the last key",
    ),
}


@functools.cache
def refused_program(case):
    return export(Flash(UNTOLD[case][0]), inputs(S=S, T=T))


@pytest.mark.parametrize("case", UNTOLD)
def test_refused(case):
    function, code, reason = UNTOLD[case]
    module, program = Flash(function), refused_program(case)
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert site.code == code
    assert reason in site.reason, site.reason
    assert site.fix is not None
    assert "softmax, view" not in site.fix
    if case != "dropout":
        assert_equal(module, outcome.program, inputs(S=S, T=T))


def test_one_site_per_operator():
    """A refused operator is told once, whatever is read of it."""
    outcome = optimized(refused_program("the sums are read"))
    assert [site.where.op for site in outcome.report.sites] == ["flash_attn::_flash_attn_forward"]


class Gated(torch.nn.Module):
    """Three tensors of one shape, as gates and norms combine."""

    def forward(self, x):
        return torch.ops.house.mix(x, x * 2, x * 3, 0.5)


def test_three_tensors_of_one_shape_are_no_attention():
    assert not optimized(export(Gated(), (seeded(2, 4, 3, 5),))).report.sites


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.bfloat16, *also("family", torch.float32)])
@pytest.mark.parametrize("case", ["packed", *also("combination", "padded values", "causal", "a soft cap, causal")])
def test_verified_in_half_precision(case, dtype):
    module = Flash(CASES[case]).to(dtype)
    given = tuple(None if x is None else x.to(dtype) for x in inputs(S=S, T=T))
    outcome = optimized(export(module, given), forms="absorbed", lowering="op", verify=True)
    (site,) = outcome.report.sites
    assert site.code == Code.ABSORBED
    assert site.precision_ratio is not None
    assert site.precision_ratio < 1.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", ["causal", "version 3", *also("combination", "a window on both sides", "a soft cap", "xformers")]
)
def test_fake_tensors_of_a_gpu(case):
    """The operators have kernels for a GPU alone; their fake functions are enough to trace and rewrite."""
    module = Flash(CASES[case])
    mode = FakeTensorMode()
    sizes = [tuple(t.shape) for t in (*inputs(S=S, T=T), module.w_q, module.w)]
    del module.w_q, module.w
    with mode:
        given = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]

        def step(x, c, r, w_q, w):
            module.w_q, module.w = w_q, w
            return module(x, c, r)

        gm = make_fx(step, pre_dispatch=True)(*given)
    weights = [node.name for node in gm.graph.find_nodes(op="placeholder")[3:]]
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    program = Program(gm, weights=dict.fromkeys(weights), fake_mode=mode)
    outcome = pipeline.run(program, Options.parse({"forms": "absorbed", "verify": False}))
    assert codes(outcome) == [Code.ABSORBED], outcome.report
    assert not any("flash" in op or "xformer" in op for op in calls(outcome.program))
    assert all(n.meta["val"].device.type == "cuda" for n in outcome.program.gm.graph.nodes if is_tensor(n))


assert (N, R, V) == (6, 4, 5)  # V is narrower than K, and neither width is a multiple of 8
