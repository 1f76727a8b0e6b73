"""Attention that is absorbed by hand as one operator: where that is, that its numbers stay, and where it is not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile import backend
from mla_compile.codes import Code
from mla_compile.kernels.cpu import native
from mla_compile.passes.decide import fuse
from mla_compile.pipeline.target import this_machine
from tests.passes.decide.test_by_hand import PAST, SCALE, SPELLINGS, B, ByHand, D, fused, step
from tests.support.modules import H, L, R
from tests.support.programs import OP, export, noted_comparisons, optimized, run, seeded
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("native_kernel"),
]


@functools.cache
def fused_step():
    """The usual step, for all tests of it: the pipeline leaves what it is given as it is."""
    return export(ByHand(SPELLINGS["fused"]), step())


def operators(program) -> list[torch.fx.Node]:
    return [n for n in program.gm.graph.nodes if str(n.target) == OP]


def widths(node) -> list[int | None]:
    """Columns of the query, the latent, the rotary rows and the values."""
    return [None if x is None else x.meta["val"].shape[-1] for x in node.args[:4]]


def compare(module, S=1, **options) -> torch.fx.Node:
    """The operator of the only site; numbers are compared with the module's own."""
    call = step(S)
    done = optimized(export(module, call), lowering="op", verify=True, **options)
    assert [site.code for site in done.report.sites] == [Code.ALREADY_ABSORBED]
    assert done.fused == 1
    assert "one operator" in done.report.sites[0].notes[-1]
    with torch.no_grad():
        for got, want in zip(run(done.program, *call), module(*call), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (found,) = operators(done.program)
    return found


OTHERS = {
    "fused, the keys as values": [L + R, L + R, None, None],  # of which the model drops the last columns
    # The model cuts the latent twice, once for the keys and once for the values.
    "copied to heads": [L + R, L, R, L],
    "copied to heads, the rotary key first": [L + R, L, R, L],
}


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize(
    "name",
    usual(
        sorted(SPELLINGS.keys() - {"copied to heads in parts"}),
        sorted({"heads among the queries", "fused, the keys as values", "copied to heads, the rotary key first"}),
    ),
)
def test_every_spelling_is_one_operator_over_a_latent_and_rotary_rows(name, S):
    found = compare(ByHand(SPELLINGS[name]).eval(), S)
    assert widths(found) == OTHERS.get(name, [L + R, L, R, None])
    query = found.args[0].meta["val"].shape
    assert query[1] * query[2] == S * H


class LastColumns(ByHand):
    """The cache itself holds [r | c]."""

    def rows(self, x, past):
        c, r = F.linear(x, self.down).split([L, R], -1)
        return torch.cat([past, torch.cat([r, c], -1)], 1)

    def forward(self, x, past):
        q, q_rope = self.queries(x)
        w_k, w_v = self.up.view(H, -1, L).tensor_split([q.shape[-1]], 1)
        rows = self.rows(x, past)[:, None]
        query = torch.cat([q_rope, torch.einsum("bshn,hnl->bshl", q, w_k)], -1).transpose(1, 2)
        o = F.scaled_dot_product_attention(query, rows, rows[..., R:], scale=SCALE).transpose(1, 2)
        return torch.einsum("bshl,hvl->bshv", o, w_v).flatten(2), rows[:, 0]


class MiddleColumns(ByHand):
    """Values are neither the first nor the last columns of the rows, and W_v is not applied to them."""

    def forward(self, x, past):
        rows = self.rows(x, past)[:, None]
        q, q_rope = self.queries(x)
        w_k = self.up.view(H, -1, L)[:, : q.shape[-1]]
        query = torch.cat([torch.einsum("bshn,hnl->bshl", q, w_k), q_rope], -1).transpose(1, 2)
        o = F.scaled_dot_product_attention(query, rows, rows[..., 1 : L - 1], scale=SCALE).transpose(1, 2)
        return o.flatten(2), rows[:, 0]


def test_values_that_are_the_last_columns():
    assert widths(compare(LastColumns().eval())) == [L + R, L, R, None]


class TwoEnds(ByHand):
    """Two attentions alike but for which end of the rows their values are."""

    def forward(self, x, past):
        rows = self.rows(x, past)[:, None]
        q, q_rope = self.queries(x)
        w_k = self.up.view(H, -1, L)[:, : q.shape[-1]]
        query = torch.cat([torch.einsum("bshn,hnl->bshl", q, w_k), q_rope], -1).transpose(1, 2)
        first, last = (
            F.scaled_dot_product_attention(query, rows, values, scale=SCALE)
            for values in (rows[..., :L], rows[..., R:])
        )
        return (first + 2 * last).flatten(2), rows[:, 0]


def test_each_end_is_checked_by_itself(monkeypatch):
    made = noted_comparisons(monkeypatch)
    done = optimized(export(TwoEnds().eval(), step()), lowering="op", verify=True)
    assert (done.fused, len(made)) == (2, 2)
    with torch.no_grad():
        want, got = TwoEnds().eval()(*step())[0], run(done.program, *step())[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_gpu_that_is_not_there_runs_nothing():
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with torch._subclasses.FakeTensorMode():
        assert not this_machine().runs(torch.empty(1, 2, 3, device="cuda"))


def test_values_in_the_middle_are_rows_of_their_own():
    assert widths(compare(MiddleColumns().eval())) == [L + R, L + R, None, L - 2]


def masked(q, q_rope, rows, kind):
    S, T = q.shape[1], rows.shape[1]
    seen = torch.arange(T) <= torch.arange(T - S, T)[:, None]
    if kind == "padded":
        seen = seen & (torch.arange(T) >= torch.tensor([[0], [3]]))[:, None, None]
    if kind == "added":
        return fused(q, q_rope, rows, attn_mask=torch.zeros(S, T, dtype=rows.dtype).masked_fill(~seen, float("-inf")))
    if kind == "none seen":
        seen = seen & (torch.arange(T) >= torch.tensor([[0], [T]]))[:, None, None]
    if kind == "softmax of none":  # NaN where no key is seen
        seen = seen & (torch.arange(T) >= torch.tensor([[0], [T]]))[:, None]
        c, r = rows.split([L, R], -1)
        scores = torch.einsum("bshl,btl->bhst", q, c) + torch.einsum("bshr,btr->bhst", q_rope, r)
        weights = (scores * SCALE).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("bhst,btl->bshl", weights, c)
    return fused(q, q_rope, rows, attn_mask=seen)


@pytest.mark.parametrize(
    ("kind", "S"),
    [
        ("padded", 4),
        ("softmax of none", 1),
        *also("combination", ("added", 1), ("causal", 4), ("none seen", 4), ("padded", 1), ("softmax of none", 4)),
    ],
)
def test_masks(kind, S):
    module = ByHand(lambda *operands: masked(*operands, kind)).eval()
    call = step(S)
    done = optimized(export(module, call), lowering="op", verify=True)
    assert done.fused == 1
    with torch.no_grad():
        want, got = module(*call)[0], run(done.program, *call)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert want.isnan().any() == (kind == "softmax of none")


def through(door, module):
    options = {"codegen": "eager", "strict": True}
    if door == "optimize":
        return mla_compile.optimize(module, **options)
    return torch.compile(module, backend="mla", options=options)


@pytest.mark.singly
@pytest.mark.parametrize("door", ["backend", *also("combination", "optimize")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *also("family", torch.float16, torch.float32)])
def test_every_dtype_through_each_door(dtype, door):
    module = ByHand(SPELLINGS["heads first"]).eval()
    exact = module(*step())[0]
    module = module.to(dtype)
    call = [x.to(dtype) for x in step()]
    with torch.no_grad():
        own = (module(*call)[0].double() - exact).abs().max()
        torch._dynamo.reset()
        backend._recent.clear()
        compiled = through(door, module)
        error = (compiled(*call)[0].double() - exact).abs().max()
        assert error <= 3 * own + 1e-12
        report = compiled.mla_report if door == "optimize" else backend.reports()[-1]
        assert "one operator" in report.sites[0].notes[-1]


@pytest.mark.parametrize(
    ("S", "options"),
    [
        (fuse.MOST_QUERIES + 1, {}),  # a prompt
        (1, {"forms": "expanded"}),
        (1, {"lowering": "aten"}),
    ],
)
def test_what_stays_as_it_is(S, options):
    program = fused_step() if S == 1 else export(ByHand(SPELLINGS["fused"]), step(S))
    done = optimized(program, **{"lowering": "op", **options})
    assert [site.code for site in done.report.sites] == [Code.ALREADY_ABSORBED]
    assert (done.fused, operators(done.program), done.report.sites[0].notes) == (0, [], ())


def test_without_a_kernel_it_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    assert optimized(fused_step(), lowering="op").fused == 0


def test_a_list_of_keys_stays_a_mask():
    """What is chosen is no reason to read less: how that is decided is asked of what is absorbed."""

    def few(q, q_rope, rows):
        chosen = rows.sum(-1).topk(3).indices[:, None, None]
        mask = torch.full((rows.shape[0], 1, 1, rows.shape[1]), float("-inf"), dtype=rows.dtype)
        return fused(q, q_rope, rows, attn_mask=mask.scatter(-1, chosen, 0.0))

    found = compare(ByHand(few).eval())
    assert found.args[4] is not None
    assert "indices" not in found.kwargs


def test_any_number_of_queries_stays_as_it_is():
    tokens = torch.export.Dim("S", min=2, max=64)
    program = export(ByHand(SPELLINGS["einsum"]), step(4), ({1: tokens}, None))
    assert optimized(program, lowering="op").fused == 0


def test_many_heads_stay_as_they_are_on_a_cpu(monkeypatch):
    program = export(ByHand(SPELLINGS["heads first"]), step(2))
    monkeypatch.setattr(fuse, "MOST_ROWS", 2 * H)
    assert optimized(program, lowering="op").fused == 1
    monkeypatch.setattr(fuse, "MOST_ROWS", 2 * H - 1)
    assert optimized(program, lowering="op").fused == 0


def test_keys_of_more_than_two_sources_stay_as_they_are():
    program = export(ByHand(SPELLINGS["copied to heads in parts"]), step())
    assert optimized(program, lowering="op").fused == 0


def test_dropout_stays_as_it_is():
    module = ByHand(lambda q, q_rope, rows: fused(q, q_rope, rows, dropout_p=0.5))
    assert optimized(export(module, step()), lowering="op").fused == 0


def test_a_check_that_fails_leaves_it_as_it_is(monkeypatch):
    from mla_compile.passes.rewrite import by_hand

    def wrong(self, x, start, stop):
        return self.builder.call(torch.ops.aten.mul.Tensor, cut(self, x, start, stop), 1.001)

    cut = by_hand._ByHand._cut
    monkeypatch.setattr(by_hand._ByHand, "_cut", wrong)
    done = optimized(fused_step(), lowering="op", verify=True)
    assert (done.fused, operators(done.program)) == (0, [])
    assert [site.code for site in done.report.sites] == [Code.VERIFY_FAILED]


@pytest.mark.parametrize("door", ["optimize", *also("combination", "backend")])
def test_steps_of_a_growing_cache(door):
    module = ByHand(SPELLINGS["einsum"]).eval()
    compiled = through(door, module)
    past = own = seeded(B, PAST, L + R)
    with torch.no_grad():
        for i in range(3):
            x: Tensor = seeded(B, 1, D, seed=i)
            got, past = compiled(x, past)
            want, own = module(x, own)
            torch.testing.assert_close((got, past), (want, own), rtol=1e-10, atol=1e-10)
