"""What must not be absorbed: each near miss keeps its graph, and the code says why.

Where only one side is illegal, the other may be absorbed by itself; what is illegal is then computed as it was.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile.backend as backend
from mla_compile.codes import CODES, Code
from mla_compile.errors import MlaCompileWarning
from tests.support.modules import MLA, H, L, N, R, V, causal, inputs
from tests.support.programs import (
    assert_computed_as_before,
    assert_equal,
    assert_untouched,
    codes,
    export,
    one_side,
    optimized,
    refused,
    seeded,
)
from tests.support.tiers import also, full
from tests.support.usual import usual


def spoiled(fn, **options):
    """MLA whose expanded K and V go through ``fn``."""

    class Spoiled(MLA):
        def spoil(self, k, v):
            return fn(k, v)

    return Spoiled(**options)


def rotate(k, *, full=False):
    """RoPE by halves with a table computed from positions; ``k`` is [B,H,T,width] with an even width."""
    width = k.shape[-1] // 2
    angle = torch.arange(k.shape[-2], dtype=k.dtype)[:, None] * 0.7 ** torch.arange(width, dtype=k.dtype)
    cos, sin = angle.cos(), angle.sin()
    first, second = k[..., :width], k[..., width : 2 * width]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def rotate_complex(k):
    width = k.shape[-1] // 2
    angle = torch.arange(k.shape[-2], dtype=k.dtype)[:, None] * 0.7 ** torch.arange(width, dtype=k.dtype)
    turned = torch.view_as_complex(k.reshape(*k.shape[:-1], width, 2).contiguous()) * torch.polar(
        angle.new_ones(()), angle
    )
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.singly
@pytest.mark.parametrize("rotation", [rotate, rotate_complex])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("core", ["sdpa", "matmul"])
def test_rope_on_the_whole_k_after_the_up_projection(core, S, rotation):
    module = spoiled(lambda k, v: (rotation(k), v), core=core)
    outcome = one_side(module, inputs(S=S), "values", Code.POSITION_DEPENDENT)
    (kept,) = outcome.report.sites[0].kept
    assert kept.blame.op == ("aten.mul" if rotation is rotate else "aten.view_as_complex")
    assert "self.spoil" in kept.blame.code


@full("combination")
def test_rope_on_the_part_without_rotation_only():
    module = spoiled(lambda k, v: (torch.cat([rotate(k[..., :N]), k[..., N:]], -1), v))
    one_side(module, inputs(), "values", Code.POSITION_DEPENDENT)


def test_rope_on_both_keys_and_values():
    module = spoiled(lambda k, v: (rotate(k), rotate(v)), V=6)
    refused(module, inputs(), Code.POSITION_DEPENDENT, forms=("absorbed", "auto"))


def test_rope_with_positions_from_the_caller():
    class Positions(MLA):
        def forward(self, x, c, r, cos, sin):
            k, v = self.expand(c)
            k = k * cos + torch.cat([-k[..., N // 2 :], k[..., : N // 2]], -1) * sin
            return self.finish(self.attend(self.query(x), self.join(k, r), v, None), x)

    data = [*inputs(), seeded(7, N, seed=5), seeded(7, N, seed=6)]
    one_side(Positions(), data, "values", Code.POSITION_DEPENDENT)


def test_a_position_embedding_added_after_the_up_projection():
    table = nn.Parameter(seeded(7, N + R, seed=5))

    class Learned(MLA):
        def __init__(self):
            super().__init__()
            self.table = table

        def spoil(self, k, v):
            return k + self.table, v

    one_side(Learned(), inputs(), "values", Code.POSITION_DEPENDENT)


def test_a_position_embedding_beside_the_expanded_part():
    """The last columns of K are a table row per position: constant, but not the same for every key."""

    class Learned(MLA):
        def __init__(self):
            super().__init__(R=0, N=8)
            self.table = nn.Parameter(seeded(7, 2, seed=5))

        def join(self, k, r):
            return torch.cat([k[..., :6], k.new_zeros(2, H, 7, 2) + self.table], -1)

    one_side(Learned(), inputs(R=0), "values", Code.UNSUPPORTED_OP)


@full("combination")
def test_alibi_as_a_factor_of_the_keys():
    module = spoiled(lambda k, v: (k * torch.arange(7, dtype=k.dtype)[:, None], v))
    one_side(module, inputs(), "values", Code.POSITION_DEPENDENT)


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(lambda k: F.rms_norm(k, (k.shape[-1],)), id="rms_norm"),
        pytest.param(lambda k: F.layer_norm(k, (k.shape[-1],)), id="layer_norm", marks=full("combination")),
        pytest.param(lambda k: k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6), id="rms_norm written out"),
        pytest.param(lambda k: F.normalize(k, dim=-1), id="l2", marks=full("combination")),
    ],
)
def test_a_norm_after_the_up_projection(norm):
    module = spoiled(lambda k, v: (norm(k), v))
    program = export(module, inputs())
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert site.parts == ("values",)
    assert site.kept[0].code is Code.NONLINEAR
    assert_computed_as_before(program, outcome, "values")
    assert_equal(module, outcome.program, inputs())


@pytest.mark.parametrize(
    "fn",
    [torch.abs, *also("combination", F.silu, lambda x: x.clamp(-1, 1), torch.relu, torch.tanh, F.gelu, torch.exp)],
)
def test_a_nonlinearity_after_the_up_projection(fn):
    one_side(spoiled(lambda k, v: (fn(k), v)), inputs(), "values", Code.NONLINEAR)


def test_a_nonlinearity_after_both_up_projections():
    refused(spoiled(lambda k, v: (F.silu(k), F.silu(v))), inputs(), Code.NONLINEAR)


@pytest.mark.parametrize("up", ["joint", *also("combination", "two")])
def test_a_nonlinearity_on_the_values_only(up):
    one_side(spoiled(lambda k, v: (k, F.silu(v)), up=up), inputs(), "keys", Code.NONLINEAR)


@full("combination")
def test_keys_rounded_to_eight_bits():
    module = spoiled(lambda k, v: ((k * 20).to(torch.int8).to(k.dtype) / 20, v))
    one_side(module, inputs(), "values", Code.NONLINEAR)


@full("combination")
def test_keys_rounded_to_float8():
    one_side(spoiled(lambda k, v: (k.to(torch.float8_e4m3fn).to(k.dtype), v)), inputs(), "values", Code.NONLINEAR)


def test_keys_stored_in_a_cache_of_eight_bits():
    class Cache(MLA):
        def spoil(self, k, v):
            cache = torch.empty(k.shape, dtype=torch.int8)
            cache[:] = k * 20
            return cache.to(k.dtype) / 20, v

    one_side(Cache(), inputs(), "values", Code.NONLINEAR)


MIXING = {
    "cumsum": lambda k: k.cumsum(2),
    "roll": lambda k: k.roll(1, 2),
    "flip": lambda k: k.flip(2),
    "matmul over tokens": lambda k: torch.ones(7, 7, dtype=k.dtype).tril() @ k,
    "einsum over tokens": lambda k: torch.einsum("st,bhtn->bhsn", torch.ones(7, 7, dtype=k.dtype), k),
    "conv": lambda k: F.conv1d(
        k.flatten(0, 1).mT, torch.ones(N + R, 1, 3, dtype=k.dtype), padding=1, groups=N + R
    ).mT.unflatten(0, (2, H)),
    "gather": lambda k: k.gather(2, torch.tensor([1, 0, 2, 3, 4, 6, 5])[:, None].expand_as(k)),
    "pooled pairs": lambda k: torch.cat([k[:, :, :1], (k[:, :, 1:] + k[:, :, :-1]) / 2], 2),
    "attention among the keys": lambda k: (k @ k.mT) @ k,
    "the mean taken off": lambda k: k - k.mean(2, keepdim=True),
}


@pytest.mark.parametrize("name", usual(MIXING, ("cumsum", "gather", "pooled pairs", "attention among the keys")))
def test_tokens_mixed_between_latent_and_keys(name):
    module = spoiled(lambda k, v: (MIXING[name](k), v))
    program = export(module, inputs())
    for forms in ("auto", "absorbed") if name == "conv" else ("absorbed",):
        outcome = optimized(program, forms=forms)
        (site,) = outcome.report.sites
        assert site.parts == ("values",)
        code = site.kept[0].code
        assert code in (Code.TOKEN_MIXING, Code.POSITION_DEPENDENT, Code.UNSUPPORTED_OP, Code.NONLINEAR)
        assert_computed_as_before(program, outcome, "values")
        assert_equal(module, outcome.program, inputs())
    if name in ("cumsum", "roll", "flip", "matmul over tokens", "einsum over tokens", "conv", "index"):
        assert code is Code.TOKEN_MIXING


def test_a_token_twice_is_no_row_of_its_own():
    module = spoiled(lambda k, v: (k[:, :, :1].expand(-1, -1, 7, -1), v))
    one_side(module, inputs(), "values", Code.TOKEN_MIXING)


def test_softmax_over_the_queries():
    class Queries(MLA):
        def attend(self, q, k, v, mask):
            return (q @ k.mT).softmax(-2) @ v

    refused(Queries(), inputs(S=3), Code.SOFTMAX_AXIS)


def test_softmax_over_the_heads():
    class Heads(MLA):
        def attend(self, q, k, v, mask):
            return (q @ k.mT).softmax(1) @ v

    refused(Heads(), inputs(S=3), Code.SOFTMAX_AXIS)


@pytest.mark.parametrize("core", ["sdpa", "written out"])
def test_dropout_is_active(core):
    class Dropout(MLA):
        def attend(self, q, k, v, mask):
            if core == "sdpa":
                return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
            return F.dropout((q @ k.mT).softmax(-1), 0.2, training=True) @ v

    program = export(Dropout(), inputs())
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.DROPOUT]
    assert_untouched(program, outcome)


def test_dropout_of_the_keys_is_active():
    program = export(spoiled(lambda k, v: (F.dropout(k, 0.2, training=True), v)), inputs())
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert site.parts == ("values",)
    assert [k.code for k in site.kept] == [Code.DROPOUT]
    assert_computed_as_before(program, outcome, "values")


@pytest.mark.parametrize("S", [1, 3])
def test_a_latent_wider_than_what_it_saves(S):
    wide = 2 * H * (N + V)
    refused(MLA(L=wide), inputs(S=S, L=wide), Code.COST_LATENT_WIDE)


def test_a_latent_of_every_head():
    class PerHead(MLA):
        def __init__(self):
            super().__init__(R=0)
            self.k = nn.Parameter(seeded(H, L, N, seed=30))
            self.v = nn.Parameter(seeded(H, L, V, seed=31))

        def forward(self, x, c):
            k, v = c @ self.k, c @ self.v  # c [B,H,T,L]
            return self.finish(self.attend(self.query(x), k, v, None), x)

    for core in ("sdpa", "matmul"):
        module = PerHead()
        module.core = core
        refused(module, [inputs()[0], seeded(2, H, 7, L, seed=3)], Code.HEAD_DEPENDENT_LATENT)


def test_a_mask_computed_from_the_expanded_keys():
    class Masked(MLA):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, (k.norm(dim=-1) > 1.0)[:, :, None])

    one_side(Masked(), inputs(), "values", Code.MASK_DEPENDS_ON_KEYS)


def test_a_bias_computed_from_the_expanded_values():
    class Masked(MLA):
        def attend(self, q, k, v, mask):
            return (q @ k.mT + v.sum(-1)[:, :, None]).softmax(-1) @ v

    one_side(Masked(up="two"), inputs(), "keys", Code.MASK_DEPENDS_ON_KEYS)


def test_a_cache_of_expanded_keys():
    class Expanded(MLA):
        def forward(self, x, c, r, k_old, v_old):
            k, v = self.expand(c)
            k = torch.cat([k_old, self.join(k, r)], 2)
            v = torch.cat([v_old, v], 2)
            return self.finish(self.attend(self.query(x), k, v, None), x), k, v

    for T in (1, 2):
        old = [seeded(2, H, 9, N + R, seed=3), seeded(2, H, 9, V, seed=4)]
        refused(Expanded(), [*inputs(T=T), *old], Code.EXPANDED_CACHE)


def test_a_static_cache_of_expanded_keys():
    class Static(MLA):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(2, H, 9, N + R, dtype=torch.float64))
            self.register_buffer("v", torch.zeros(2, H, 9, V, dtype=torch.float64))

        def forward(self, x, c, r, position):
            k, v = self.expand(c)
            self.k.index_copy_(2, position, self.join(k, r))
            self.v.index_copy_(2, position, v)
            mask = (torch.arange(9) <= position)[None, None, None]
            return self.finish(self.attend(self.query(x), self.k, self.v, mask), x)

    program = export(Static(), [*inputs(T=1), torch.tensor([3])])
    outcome = optimized(program, forms="absorbed")
    (code,) = codes(outcome)
    assert code in (Code.EXPANDED_CACHE, Code.TOKEN_MIXING)
    assert_untouched(program, outcome)


def test_keys_that_enter_the_graph():
    class Inputs(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    refused(Inputs(), [seeded(2, H, s, w) for s, w in ((1, N), (7, N), (7, V))], Code.EXPANDED_INPUTS)


class Heads(nn.Module):
    """MHA, GQA and MQA over the hidden state, with a cache of K and V, with and without RoPE."""

    def __init__(self, kv_heads, rope):
        super().__init__()
        self.rope, self.kv_heads, self.heads, self.width = rope, kv_heads, 4, 6
        self.q = nn.Linear(24, self.heads * self.width, dtype=torch.float64)
        self.k = nn.Linear(24, kv_heads * self.width, dtype=torch.float64)
        self.v = nn.Linear(24, kv_heads * self.width, dtype=torch.float64)

    def forward(self, x, k_old=None, v_old=None):
        B, S, _ = x.shape
        q, k, v = (f(x).view(B, S, -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rope:
            q, k = rotate(q), rotate(k)
        if k_old is not None:
            k, v = torch.cat([k_old, k], 2), torch.cat([v_old, v], 2)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=k_old is None and S > 1)


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_mha_gqa_and_mqa(kv_heads, rope):
    module = Heads(kv_heads, rope)
    x = seeded(2, 5, 24)
    old = [seeded(2, kv_heads, 9, 6, seed=1), seeded(2, kv_heads, 9, 6, seed=2)]
    for data in ([x], [x[:, :1], *old]) if kv_heads == 2 else ([x[:, :1], *old],):
        program = export(module, data)
        outcome = optimized(program)
        (site,) = outcome.report.sites
        assert_untouched(program, outcome)
        assert site.code in (Code.NOT_MLA, Code.COST_LATENT_WIDE), (site.reason, site.blame)


def test_attention_from_learned_latent_tokens():
    """Called "latent attention" too: queries that are weights, K and V straight from the input."""

    class Perceiver(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(seeded(5, 24, seed=1))
            self.heads = Heads(4, rope=False)

        def forward(self, x):
            q, k, v = (
                f(y).view(-1, y.shape[-2], 4, 6).transpose(1, 2)
                for f, y in ((self.heads.q, self.latents), (self.heads.k, x), (self.heads.v, x))
            )
            return F.scaled_dot_product_attention(q.expand(x.shape[0], -1, -1, -1), k, v)

    program = export(Perceiver(), [seeded(2, 9, 24)])
    outcome = optimized(program)
    (site,) = outcome.report.sites
    assert CODES[site.code].verdict != "absorbed"
    assert_untouched(program, outcome)


def test_weights_that_cannot_take_part_in_arithmetic():
    class Sparse(MLA):
        def __init__(self):
            super().__init__(R=0)
            self.wide = nn.Parameter(self.w.detach().to_sparse(), requires_grad=False)
            del self.w

        def _joint(self, c):
            return torch.mm(self.wide, c.reshape(-1, L).mT).mT.reshape(*c.shape[:-1], -1)

    module, data = Sparse(), inputs(R=0)
    program = export(module, data)
    outcome = optimized(program, forms="absorbed")
    (code,) = codes(outcome)
    assert code is Code.UNSUPPORTED_WEIGHT
    assert_untouched(program, outcome)


@pytest.mark.thorough
def test_training_mode():
    """With gradients enabled the backend leaves the graph to the compiler as it came, and gradients are right."""
    module = MLA().train()
    data = [d.requires_grad_() for d in inputs(S=2)]
    before = len(backend.reports())
    compiled = torch.compile(module, backend=backend.mla, options={"codegen": "eager"})
    with pytest.warns(MlaCompileWarning, match="gradients are enabled"):
        compiled(*data).square().sum().backward()
    grads = [d.grad.clone() for d in data] + [p.grad.clone() for p in module.parameters()]
    assert len(backend.reports()) == before
    for t in (*data, *module.parameters()):
        t.grad = None
    module(*data).square().sum().backward()
    for got, expected in zip(grads, [t.grad for t in (*data, *module.parameters())], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_the_same_module_is_absorbed_without_gradients():
    module, data = MLA(), inputs()
    with torch.no_grad():
        compiled = torch.compile(module, backend=backend.mla, options={"codegen": "eager", "lowering": "aten"})
        torch.testing.assert_close(compiled(*data), module(*data), rtol=1e-10, atol=1e-10)
    assert [site.code for site in backend.reports()[-1].sites] == [Code.ABSORBED]


def test_every_refusal_has_a_reason_and_a_place():
    outcome = optimized(export(spoiled(lambda k, v: (F.silu(k), F.silu(v)), core="matmul"), inputs()))
    (site,) = outcome.report.sites
    assert "silu" in site.reason
    assert site.blame.op == "aten.silu"
    assert site.blame.line is not None
    assert site.fix == CODES[Code.NONLINEAR].fix


@pytest.mark.parametrize(
    ("step", "op"),
    [
        (lambda s: s.cumsum(-1), "aten.cumsum"),
        (lambda s: s.sort(dim=-1).values, "aten.sort"),
        (lambda s: s.roll(1, -1), "aten.roll"),
    ],
)
def test_scores_that_cannot_be_followed_are_reported(step, op):
    """No rule of ours knows what becomes of such scores; the report says so and names the operator."""

    class Odd(MLA):
        def attend(self, q, k, v, mask=None):
            return F.softmax(step(q @ k.mT * self.scale), -1) @ v

    outcome = refused(Odd(core="matmul"), inputs(), Code.UNSUPPORTED_OP)
    (site,) = outcome.report.sites
    assert site.where.op == "aten.softmax"
    assert site.blame.op == op
    assert site.blame.line is not None


def test_a_softmax_that_is_no_attention_is_not_reported():
    """A router between two attentions: its logits are a projection, so no product of activations lies before it."""

    class Routed(MLA):
        def finish(self, out, x):
            y = super().finish(out, x)
            gate = F.softmax(F.linear(y, self.w.flatten()[: 4 * y.shape[-1]].view(4, -1)), -1)  # [B,S,4]
            experts = torch.stack([y, -y, 2 * y, 3 * y], -2)  # [B,S,4,D]
            return (gate.unsqueeze(-2) @ experts).squeeze(-2)

    outcome = optimized(export(Routed(core="matmul"), inputs()))
    assert codes(outcome) == [Code.ABSORBED]


def test_a_mask_alone_does_not_make_it_illegal():
    """The positive twin of the tests above: the same modules without what is wrong with them are absorbed."""
    for module in (spoiled(lambda k, v: (k, v)), MLA(up="two"), MLA(core="matmul")):
        outcome = optimized(export(module, [*inputs(S=3), causal(3, 7)]), forms="absorbed")
        assert codes(outcome) == [Code.ABSORBED]


class Feed(nn.Module):
    """A layer ``x + f(x)`` that widens its rows, normed, then an attention; ``y``: rows of something else."""

    def __init__(self, width, queries, pooled=False):
        super().__init__()
        self.queries, self.pool = queries, nn.Conv1d(24, 24, 2, 2) if pooled else None
        self.up, self.down = nn.Linear(24, 60), nn.Linear(60, 24)
        self.q, self.k, self.v = nn.Linear(24, 4 * width), nn.Linear(24, 4 * width), nn.Linear(24, 4 * width)
        self.probe = nn.Parameter(seeded(2, 1, 24))
        self.double()

    def forward(self, x, y, scale):
        if self.pool is None:
            x = F.layer_norm(x + self.down(torch.relu(self.up(x))), (24,))
        else:
            x = F.layer_norm(self.pool(x.mT).mT, (24,))
        rows = {"the same rows": x, "other rows": y, "a parameter": self.probe}[self.queries]
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in (self.q(rows) * scale, self.k(x), self.v(x)))
        return F.scaled_dot_product_attention(q, k, v)


def feed(width, queries, pooled=False):
    data = [seeded(2, 5, 24), seeded(2, 3, 24, seed=1), torch.tensor(0.3, dtype=torch.float64)]
    program = export(Feed(width, queries, pooled), data)
    return program, optimized(program, forms="absorbed")


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("pooled", [False, True], ids=["residual", "convolution"])
@pytest.mark.parametrize("queries", ["the same rows", "other rows", "a parameter"])
def test_hidden_states_are_no_latent(queries, pooled):
    """K and V are as wide as they are; the queries' scale is known at run time only."""
    program, outcome = feed(6, queries, pooled)
    assert codes(outcome) == [Code.NOT_MLA]
    assert_untouched(program, outcome)


@pytest.mark.parametrize(("queries", "code"), [("the same rows", Code.NOT_MLA), ("other rows", Code.ABSORBED)])
def test_rows_that_make_wider_keys_and_values_are_a_latent_unless_they_make_the_queries(queries, code):
    assert codes(feed(7, queries)[1]) == [code]


def test_an_attention_among_some_rows_of_a_hidden_state():
    """Queries are made of the last rows, keys of others, and neither of a projection of them."""

    class Local(Feed):
        def forward(self, x):
            rows = x[:, 1:]
            q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in (self.q(x[:, 3:]), self.k(rows), self.v(rows)))
            return F.scaled_dot_product_attention(q, k, v)

    refused(Local(6, ""), [seeded(2, 5, 24)], Code.NOT_MLA)


def test_a_softmax_over_one_key_is_no_mystery():
    module = MLA(core="matmul")
    assert codes(optimized(export(module, inputs(S=1, T=1)))) == [Code.ABSORBED]


def test_keys_that_a_residual_connection_is_added_to_are_explained():
    """The walk goes on through the shortcut, behind which the up-projection is."""

    def added(k, v):
        k = torch.tanh(k)
        return k + torch.relu(k.cumsum(2)), v

    one_side(spoiled(added), inputs(), "values", Code.NONLINEAR)


class RowsGiven(nn.Module):
    """K and V are rows that come in as they are; ``heads``: how the queries of H heads meet them."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.mix = nn.Parameter(seeded(1, 7, L, seed=3))

    def forward(self, q, c, r):
        if self.heads == "mixed":  # tokens, by weights that no head has a part in
            c = torch.bmm(self.mix.expand(2, -1, -1), c.mT).sigmoid() @ c
        if self.heads in ("einsum", "mixed"):
            scores = torch.einsum("bhsl,btl->bhst", q[..., :L], c) + torch.einsum("bhsr,btr->bhst", q[..., L:], r)
            return torch.einsum("bhst,btl->bhsl", scores.softmax(-1), c)
        if self.heads == "matmul":
            return (q[..., :L] @ c[:, None].mT + q[..., L:] @ r[:, None].mT).softmax(-1) @ c[:, None]
        k, v = torch.cat([c, r], -1), c
        if self.heads != "own":
            k, v = k[:, None], v[:, None]
        if self.heads == "expanded":
            k, v = (x.expand(-1, H, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("heads", ["einsum", "mixed", "matmul", "broadcast", "expanded", "own"])
def test_rows_that_come_in_are_keys_and_values_only_where_every_head_has_its_own(heads, S):
    lead = (2, H) if heads == "own" else (2,)
    given = [seeded(2, H, S, L + R), seeded(*lead, 7, L, seed=1), seeded(*lead, 7, R, seed=2)]
    code = Code.EXPANDED_INPUTS if heads == "own" else Code.SHARED_ROWS
    assert codes(optimized(export(RowsGiven(heads), given))) == [code]
