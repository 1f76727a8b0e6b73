"""What looks odd and is legal: absorbed all the same, with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.codes import Code
from tests.support.modules import CORES, EXACT, MLA, UPS, D, H, L, N, R, V, causal, inputs, padded
from tests.support.programs import (
    OP,
    absorbed,
    assert_equal,
    assert_untouched,
    calls,
    codes,
    export,
    optimized,
    seeded,
)
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

DYN = Dim.DYNAMIC
FEW = ("bmm", "padded_values")
"""Cores whose steps differ most; tests/passes/rewrite/test_absorb.py goes through all of them."""


@pytest.mark.singly
@pytest.mark.parametrize("core", usual(EXACT, FEW))
@pytest.mark.parametrize("up", ["param", "per_head", *also("combination", "joint", "block", "two")])
def test_bias_on_the_up_projections(up, core):
    """The bias of K is the same for every key of a row and falls out; that of V comes back once."""
    absorbed(MLA(up=up, core=core, bias=True), [*inputs(S=3), causal(3, 7)])


@pytest.mark.parametrize("up", ["int8", *also("combination", "lora", "merged")])
def test_bias_beside_lora_and_quantized_weights(up):
    absorbed(MLA(up=up, bias=True), inputs())


def test_lora_as_people_write_it():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(L, H * (N + V), dtype=torch.float64)
            self.a = nn.Linear(L, 2, bias=False, dtype=torch.float64)
            self.b = nn.Linear(2, H * (N + V), bias=False, dtype=torch.float64)
            self.dropout = nn.Dropout(0.1)

        def forward(self, c):
            result = self.base(c)
            return result + (self.b(self.a(self.dropout(c))) * 2.0).to(result.dtype)

    class Module(MLA):
        def __init__(self):
            super().__init__()
            self.lora = Lora()

        def _joint(self, c):
            return self.lora(c)

    program = absorbed(Module(), inputs(S=3))
    latent = next(n for n in program.gm.graph.nodes if n.name == "c")
    assert not any("linear" in str(user.target) for user in latent.users)


@full("combination")
def test_two_lora_adapters():
    class Two(MLA):
        def __init__(self):
            super().__init__(up="lora")
            self.more, self.back2 = nn.Parameter(seeded(3, L, seed=40)), nn.Parameter(seeded(H * (N + V), 3, seed=41))

        def _joint(self, c):
            return super()._joint(c) - c @ self.more.mT @ self.back2.mT

    absorbed(Two(), inputs())


@pytest.mark.parametrize("core", ["matmul", *also("combination", "sdpa")])
def test_tied_up_projection_for_keys_and_values(core):
    absorbed(MLA(up="tied", V=N, core=core, bias=True), [*inputs(S=3), padded(2, 3, 7)])


def test_values_are_the_keys():
    """K = V up to the rotary part, as one tensor."""

    class Same(MLA):
        def spoil(self, k, v):
            return k, k[..., :N]

    absorbed(Same(V=N), inputs())


def test_values_are_the_latent_itself():
    """No up-projection of V at all: one value row for all heads."""

    class Plain(MLA):
        def forward(self, x, c, r):
            k, _ = self.expand(c)
            return self.finish(self.attend(self.query(x), self.join(k, r), c[:, None].expand(-1, H, -1, -1), None), x)

    absorbed(Plain(), inputs())


def test_keys_are_the_latent_itself():
    class Plain(MLA):
        def forward(self, x, c, r):
            _, v = self.expand(c)
            q = F.linear(x, self.w_q).view(*x.shape[:2], H, L + R).transpose(1, 2)
            return self.finish(self.attend(q, self.join(c[:, None].expand(-1, H, -1, -1), r), v, None), x)

    absorbed(Plain(N=L), inputs())


SCALED = {
    "a number": lambda c: c * 0.37,
    "a quotient": lambda c: c / 3,
    "a sign": lambda c: -c,
    "several": lambda c: 2.0 * (-c) / 7.0,
    "a constant tensor": lambda c: c * torch.tensor(0.37, dtype=c.dtype),
}


@pytest.mark.singly
@pytest.mark.parametrize("core", ["sdpa", "two_products"])
@pytest.mark.parametrize("name", usual(SCALED, ("several", "a constant tensor")))
def test_latent_scaled_by_constants(name, core):
    class Scaled(MLA):
        def latent(self, c):
            return SCALED[name](c)

        def rotary(self, r):
            return r * 1.3

    absorbed(Scaled(core=core, bias=True), inputs(S=3))


def test_constants_on_the_expanded_parts():
    class Scaled(MLA):
        def spoil(self, k, v):
            return k * 0.25, -v * 3.0

    absorbed(Scaled(bias=True), inputs(S=3))


@full("combination")
def test_constants_on_one_part_of_the_keys():
    class Scaled(MLA):
        def join(self, k, r):
            return super().join(k * 0.25, r * -2.0)

    absorbed(Scaled(bias=True), inputs())


def test_a_weight_per_head_on_keys_and_values():
    class Gain(MLA):
        def __init__(self):
            super().__init__()
            self.gain, self.width = nn.Parameter(seeded(H, 1, 1, seed=50)), nn.Parameter(seeded(V, seed=51))

        def spoil(self, k, v):
            return k * self.gain, v * self.gain * self.width

    absorbed(Gain(), inputs(S=3))


@pytest.mark.parametrize("where", ["after", *also("combination", "before")])
def test_a_norm_of_the_latent(where):
    """Its weight vector may be applied before the cache or, on the history, after it."""

    class Norm(MLA):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(seeded(L, seed=52))

        def latent(self, c):
            return F.rms_norm(c, (L,), self.gain) if where == "before" else c * self.gain

    program = absorbed(Norm(), inputs())
    assert any("rms_norm" in c for c in calls(program)) is (where == "before")


@pytest.mark.parametrize("core", ["two_products", *also("combination", "sdpa")])
def test_rope_on_the_shared_key_history(core):
    """The raw rotary key is cached and turned at each step, all of it: one row per token still."""

    class Raw(MLA):
        def rotary(self, r):
            T = r.shape[1]
            angle = torch.arange(T, dtype=r.dtype)[:, None] * 0.5 ** torch.arange(R // 2, dtype=r.dtype)
            a, b = r.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    absorbed(Raw(core=core), inputs(S=3))


@pytest.mark.parametrize("core", usual((c for c in EXACT if c != "two_products"), ("padded_values",)))
def test_no_rotary_part_at_all(core):
    program = absorbed(MLA(R=0, core=core), [*inputs(S=3, R=0), None, causal(3, 7)], lowering="aten")
    assert calls(program).count("cat.default") == (core == "padded_values")  # zeros are joined to V again


@full("combination")
def test_no_rotary_part_with_the_operator():
    program = absorbed(MLA(R=0), inputs(R=0), lowering="op")
    call = next(n for n in program.gm.graph.nodes if str(n.target) == OP)
    assert call.args[2] is None


@full("combination")
def test_no_rope_but_a_shared_part():
    absorbed(MLA(), inputs(S=3))


@pytest.mark.singly
@pytest.mark.parametrize("core", usual(EXACT, ("bmm",)))
@pytest.mark.parametrize("B", [1, *also("combination", 2)])
def test_one_head(core, B):
    """One head saves nothing unless the latent is narrow."""
    absorbed(MLA(H=1, L=4, core=core), [*inputs(B=B, S=3, L=4), causal(3, 7)])


@pytest.mark.singly
@pytest.mark.parametrize("core", usual(EXACT, FEW))
@pytest.mark.parametrize("S", [1, 2])
@pytest.mark.parametrize("B", [1, 2])
def test_batch_and_queries_of_one(B, S, core):
    absorbed(MLA(core=core, bias=True), [*inputs(B=B, S=S), padded(B, S, 7)])


@full("combination")
def test_one_of_everything():
    absorbed(MLA(H=1, L=3), inputs(B=1, S=1, L=3))


def test_one_cached_token():
    module = MLA()
    program = export(module, inputs(T=1))
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED]
    assert_equal(module, outcome.program, inputs(T=1))


def test_a_latent_narrower_than_a_head():
    absorbed(MLA(L=3), inputs(S=3, L=3))


@pytest.mark.parametrize("core", usual((c for c in EXACT if c != "two_products"), ("bmm",)))
def test_all_sizes_equal(core):
    """Nothing may be told apart by its size."""
    n = 4
    module = MLA(H=n, L=n, N=n, R=n, V=n, core=core, up="two")
    absorbed(module, [*inputs(B=n, S=n, T=n, L=n, R=n), causal(n, n)])


@pytest.mark.parametrize("up", usual(UPS, ("joint",)))
def test_everything_symbolic(up):
    module = MLA(up=up, bias=up != "einsum")
    dynamic = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN})
    program = absorbed(module, inputs(B=2, S=3, T=9), dynamic)
    for B, S, T in ((1, 1, 5), (3, 4, 4)):
        assert_equal(module, program, inputs(B, S, T))


@pytest.mark.parametrize("core", ["matmul", *also("combination", "sdpa", "bmm")])
def test_rope_before_nope(core):
    absorbed(MLA(order="rope_nope", core=core), inputs(S=3))


def test_the_rotary_part_in_the_middle():
    class Middle(MLA):
        def join(self, k, r):
            return torch.cat([k[..., :2], r[:, None].expand(-1, H, -1, -1), k[..., 2:]], -1)

        def query(self, x):
            q = super().query(x)
            return torch.cat([q[..., :2], q[..., N:], q[..., 2:N]], -1)

    absorbed(Middle(bias=True), inputs(S=3))


@full("combination")
@pytest.mark.singly
@pytest.mark.parametrize("share", ["expand", "repeat", "interleave", "assign"])
@pytest.mark.parametrize("core", ["matmul", "bmm"])
def test_shared_key_spellings(core, share):
    absorbed(MLA(share=share, core=core, up="block"), [*inputs(S=3), causal(3, 7)])


@full("combination")
def test_shared_key_assigned_to_zeros():
    class Zeros(MLA):
        def join(self, k, r):
            whole = k.new_zeros(*k.shape[:-1], N + R)
            whole[..., :N] = k
            whole[..., N:] = r[:, None]
            return whole

    absorbed(Zeros(), inputs())


def test_shared_key_assigned_to_a_static_empty():
    class Empty(MLA):
        def join(self, k, r):
            whole = torch.empty(2, H, 7, N + R, dtype=k.dtype)
            whole[:, :, :, :N], whole[:, :, :, N:] = k, r[:, None]
            return whole

    absorbed(Empty(), inputs())


def test_split_latent_from_rows():
    """One cache of rows, [rope | latent]."""

    class Rows(MLA):
        def forward(self, x, rows):
            r, c = rows.split([R, L], -1)
            return super().forward(x, c, r)

    absorbed(Rows(), [inputs()[0], seeded(2, 7, L + R, seed=3)])


def test_cache_with_a_head_axis():
    class Cached(MLA):
        def forward(self, x, c, r):
            return super().forward(x, c[:, 0], r.squeeze(1))

    absorbed(Cached(), [inputs()[0], seeded(2, 1, 7, L, seed=3), seeded(2, 1, 7, R, seed=4)])


@full("combination")
def test_cache_grown_by_cat():
    class Grown(MLA):
        def forward(self, x, c_old, r_old, c, r):
            c, r = torch.cat([c_old, c], 1), torch.cat([r_old, r], 1)
            return super().forward(x, c, r), c, r

    program = absorbed(Grown(), [*inputs(), *inputs(T=1)[1:]])
    assert calls(program).count("cat.default") == 2  # both caches: the query is read in parts


@pytest.mark.parametrize("how", ["index", *also("combination", "slice", "index_copy")])
def test_cache_written_in_place(how):
    class Static(MLA):
        def __init__(self):
            super().__init__()
            self.register_buffer("c", seeded(2, 9, L, seed=60))
            self.register_buffer("r", seeded(2, 9, R, seed=61))

        def forward(self, x, c, r, position):
            if how == "slice":
                self.c[:, 4:5], self.r[:, 4:5] = c, r
            elif how == "index":
                self.c[:, position], self.r[:, position] = c, r
            else:
                self.c.index_copy_(1, position, c)
                self.r.index_copy_(1, position, r)
            mask = (torch.arange(9) <= position)[None, None, None]
            return super().forward(x, self.c, self.r, mask)

    data = [*inputs(T=1), torch.tensor([4])]
    program = export(Static(), data)
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED]
    assert len(outcome.program.mutations) == 2
    assert_equal(Static(), outcome.program, data)


def test_values_padded_to_the_width_of_the_keys():
    absorbed(MLA(core="padded_values", bias=True), [*inputs(S=3), padded(2, 3, 7)])


def test_values_padded_with_a_joined_zero_block():
    class Joined(MLA):
        def attend(self, q, k, v, mask):
            wide = torch.cat([v, v.new_zeros(*v.shape[:-1], k.shape[-1] - V)], -1)
            return F.scaled_dot_product_attention(q, k, wide, scale=self.scale)[..., :V]

    absorbed(Joined(bias=True), inputs(S=3))


@full("combination")
def test_values_padded_with_static_zeros():
    class Joined(MLA):
        def attend(self, q, k, v, mask):
            wide = torch.cat([v, torch.zeros(2, H, 7, k.shape[-1] - V, dtype=v.dtype)], -1)
            return F.scaled_dot_product_attention(q, k, wide, scale=self.scale)[..., :V]

    absorbed(Joined(), inputs(S=3))


def test_padded_values_that_are_returned_padded():
    class Wide(MLA):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, F.pad(v, (2, 3)), scale=self.scale)

    absorbed(Wide(bias=True), inputs(S=3))


def test_grouped_query_heads():
    """MLA whose up-projection makes fewer K and V heads than there are queries."""

    class Grouped(MLA):
        def query(self, x):
            q = super().query(x)
            return torch.cat([q, q.flip(1) * 0.5], 1)

        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)

    absorbed(Grouped(bias=True), [*inputs(S=3), padded(2, 3, 7)])


@pytest.mark.parametrize("core", ["bmm", *also("combination", "sdpa", "matmul")])
def test_grouped_query_heads_repeated(core):
    class Grouped(MLA):
        def query(self, x):
            q = super().query(x)
            return torch.cat([q, q.flip(1) * 0.5], 1)

        def attend(self, q, k, v, mask):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return CORES[self.core](q, k, v, mask, self.scale)

    absorbed(Grouped(core=core, bias=True), [*inputs(S=3), padded(2, 3, 7)])


def test_three_dimensional_tensors_throughout():
    """Batch and heads are one axis from the up-projection on."""

    class Flat(MLA):
        def forward(self, x, c, r):
            B, T = c.shape[:2]
            kv = self._joint(c).view(B, T, H, N + V).transpose(1, 2).reshape(B * H, T, N + V)
            k = torch.cat([kv[..., :N], r.unsqueeze(1).expand(B, H, T, R).reshape(B * H, T, R)], -1)
            q = self.query(x).reshape(B * H, -1, N + R)
            p = torch.bmm(q, k.mT)
            out = torch.bmm((p * self.scale).softmax(-1), kv[..., N:])
            return out.view(B, H, -1, V).transpose(1, 2).flatten(2)

    absorbed(Flat(bias=True), inputs(S=3))


@full("combination")
def test_fused_attention_of_three_dimensions():
    class Flat(MLA):
        def attend(self, q, k, v, mask):
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale).unflatten(0, (-1, H))

    absorbed(Flat(), inputs(S=3))


@full("combination")
def test_queries_scaled_per_position():
    """A factor that depends on the position of the query stays where it is, on the query."""

    class Scaled(MLA):
        def query(self, x):
            return super().query(x) * (1 + torch.arange(x.shape[1], dtype=x.dtype) / 3)[:, None]

    absorbed(Scaled(), inputs(S=3))


def test_queries_normed_and_rotated():
    class Rotated(MLA):
        def query(self, x):
            q = F.rms_norm(super().query(x), (N + R,))
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            a, b = q[..., N:].chunk(2, -1)
            return torch.cat([q[..., :N], a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    absorbed(Rotated(), inputs(S=3))


@pytest.mark.parametrize("core", ["matmul", *also("combination", "sdpa")])
def test_separate_latents_for_keys_and_values(core):
    class Separate(MLA):
        def forward(self, x, c, r, e):
            k, _ = self.expand(c)
            _, v = self.expand(e)
            return self.finish(self.attend(self.query(x), self.join(k, r), v, None), x)

    absorbed(Separate(up="two", core=core, bias=True), [*inputs(S=3), seeded(2, 7, L, seed=5)])


@full("combination")
def test_cross_attention_to_an_encoder():
    """No cache at all: the rows are what another module computed, narrower than K and V."""
    absorbed(MLA(R=0, L=6), inputs(R=0, L=6, S=4))


@full("combination")
def test_a_cache_of_integers_with_a_constant_scale():
    class Quantized(MLA):
        def latent(self, c):
            return c.to(self.w.dtype) * 0.05

    c = (seeded(2, 7, L, seed=3) * 20).to(torch.int8)
    absorbed(Quantized(), [inputs()[0], c, inputs()[2]])


def test_a_cache_of_integers_with_a_scale_per_token():
    class Quantized(MLA):
        def forward(self, x, c, r, scale):
            return super().forward(x, c.to(self.w.dtype) * scale, r)

    c = (seeded(2, 7, L, seed=3) * 20).to(torch.int8)
    absorbed(Quantized(), [inputs()[0], c, inputs()[2], seeded(2, 7, 1, seed=4)])


@pytest.mark.parametrize("symbolic", [False, *also("combination", True)])
def test_a_cache_that_two_layers_share(symbolic):
    """The queries of the second layer depend on the rows too, through the first layer's output."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = MLA(), MLA(bias=True)
            self.o = nn.Linear(H * V, D, dtype=torch.float64)

        def forward(self, x, c, r):
            return self.b(x + self.o(self.a(x, c, r)), c, r)

    dynamic = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN})
    absorbed(Shared(), inputs(S=3), dynamic if symbolic else None, sites=2)


def test_a_latent_in_another_dtype_than_the_attention():
    class Mixed(MLA):
        def latent(self, c):
            return c.double()

        def rotary(self, r):
            return r.double()

    x, c, r = inputs()
    absorbed(Mixed(), [x, c.float(), r.float()])


def test_output_gate_and_projection_after():
    class Gated(MLA):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(seeded(H * V, D, seed=70))
            self.o = nn.Parameter(seeded(D, H * V, seed=71))

        def finish(self, out, x):
            return F.linear(super().finish(out, x) * F.linear(x, self.gate).sigmoid(), self.o)

    absorbed(Gated(), inputs(S=3))


def test_absorbing_twice_finds_nothing_new():
    """The rewritten graph is attention over rows: handed in again, it is left as it is."""
    program = absorbed(MLA(core="matmul"), inputs())
    again = optimized(program, forms="absorbed")
    assert again.absorbed == 0
    assert_untouched(program, again)
