"""Attention over a latent whose weights are no softmax is named, with what is there in its place; what only looks like
it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from mla_compile import backend
from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from tests.passes.decide.test_negatives import rotate, spoiled
from tests.support.modules import CORES, MLA, D, H, L, N, R, V, causal, inputs
from tests.support.programs import assert_untouched, codes, export, optimized, seeded
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough


class Weighed(MLA):
    """MLA whose scores, scaled, go through ``fn`` to be the weights of the values."""

    def __init__(self, fn, **options):
        super().__init__(**options)
        self.fn = fn
        self.shift = nn.Parameter(seeded(H, 1, 1, seed=17))

    def attend(self, q, k, v, mask):
        return (self.fn((q @ k.mT) * self.scale, self.shift) @ v).transpose(1, 2).flatten(2)


def hidden(s):
    return s.masked_fill(~causal(*s.shape[-2:]), float("-inf"))


MAPS = {
    "sigmoid": ("sigmoid", lambda s, b: s.sigmoid()),
    "sigmoid of biased scores": ("sigmoid", lambda s, b: torch.sigmoid(s + b)),
    "sigmoid, masked": ("sigmoid", lambda s, b: s.sigmoid().masked_fill(~causal(*s.shape[-2:]), 0.0)),
    "sigmoid of masked scores": ("sigmoid", lambda s, b: hidden(s).sigmoid()),
    "sigmoid, a triangle": ("sigmoid", lambda s, b: s.sigmoid().tril(s.shape[-1] - s.shape[-2])),
    "sigmoid in float32": ("sigmoid", lambda s, b: s.float().sigmoid().to(s.dtype)),
    "relu": ("relu", lambda s, b: F.relu(s) / s.shape[-1]),
    "relu, normalized": ("relu", lambda s, b: F.relu(s) / (F.relu(s).sum(-1, keepdim=True) + 1e-3)),
    "relu, normalized by torch": ("relu", lambda s, b: F.normalize(F.relu(s), p=1.0, dim=-1)),
    "squared relu": ("relu", lambda s, b: F.relu(s).square()),
    "squared relu, a power": ("relu", lambda s, b: F.relu(s) ** 2 / s.shape[-1]),
    "squared relu, a product": ("relu", lambda s, b: F.relu(s) * F.relu(s)),
    "a clamp": ("clamp", lambda s, b: s.clamp(min=0)),
    "silu": ("silu", lambda s, b: F.silu(s + b) / s.shape[-1]),
    "gelu": ("gelu", lambda s, b: F.gelu(s)),
    "softplus": ("softplus", lambda s, b: F.softplus(s)),
    "elu": ("elu", lambda s, b: F.elu(s) + 1.0),
    "tanh": ("tanh", lambda s, b: torch.tanh(s)),
    "a square": ("pow", lambda s, b: s**2),
}


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize(
    "name",
    usual(
        MAPS,
        (
            "sigmoid of biased scores",
            "sigmoid of masked scores",
            "relu, normalized",
            "squared relu",
            "a clamp",
            "silu",
            "tanh",
            "a square",
        ),
    ),
)
def test_the_function_is_named(name, S):
    function, fn = MAPS[name]
    program = export(Weighed(fn), inputs(S=S))
    outcome = optimized(program)
    assert codes(outcome) == [Code.NOT_SOFTMAX]
    assert_untouched(program, outcome)
    (site,) = outcome.report.sites
    assert site.verdict == "refused"
    assert function in site.reason
    assert function in site.blame.op
    assert site.fix


def sigmoids(q, k, v):
    return (q @ k.mT * 0.4).sigmoid() @ v


def in_labels(q, k, v):
    weights = torch.einsum("bhsd,bhtd->bsht", q, k).sigmoid()
    return torch.einsum("bsht,bhtv->bhsv", weights, v)


def batch_and_heads_merged(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(F.relu(torch.bmm(q, k.mT)), v).unflatten(0, (-1, H))


def two_products(q, k, v):
    scores = q[..., :N] @ k[..., :N].mT + q[..., N:] @ k[..., N:].mT
    return scores.sigmoid() @ v


def values_first(q, k, v):
    return (v.mT @ (k @ q.mT).sigmoid()).mT


CORES_WITHOUT = {
    "matmul": sigmoids,
    "einsum": in_labels,
    "bmm": batch_and_heads_merged,
    "two products": two_products,
    "the values first": values_first,
}


class Other(MLA):
    def __init__(self, weigh, **options):
        super().__init__(**options)
        self.weigh = weigh

    def attend(self, q, k, v, mask):
        return self.weigh(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.singly
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("up", ["joint", "einsum", *also("combination", "two", "param", "lora")])
@pytest.mark.parametrize("name", usual(CORES_WITHOUT, ("einsum", "bmm", "the values first")))
def test_however_it_is_written(name, up, bias):
    assert codes(optimized(export(Other(CORES_WITHOUT[name], up=up, bias=bias), inputs(S=3)))) == [Code.NOT_SOFTMAX]


def test_a_part_would_do():
    """Keys are rotated after the up-projection; V alone is an image of the rows."""

    class Rotated(Other):
        def spoil(self, k, v):
            return rotate(k), v

    assert codes(optimized(export(Rotated(sigmoids), inputs(S=3)))) == [Code.NOT_SOFTMAX]


def test_keys_that_are_cached():
    class Cached(Other):
        def forward(self, x, c, r, past_k, past_v):
            k, v = self.expand(c)
            k, v = torch.cat([past_k, self.join(k, r)], 2), torch.cat([past_v, v], 2)
            return self.attend(self.query(x), k, v, None), k, v

    new = [seeded(2, 1, w, seed=i) for i, w in enumerate((D, L, R))]
    past = [seeded(2, H, 6, w, seed=7 + i) for i, w in enumerate((N + R, V))]
    assert codes(optimized(export(Cached(sigmoids), [*new, *past]))) == [Code.NOT_SOFTMAX]


def test_beside_an_attention_that_is_absorbed():
    class Both(Other):
        def attend(self, q, k, v, mask):
            o = super().attend(q, k, v, mask)
            return torch.cat([o, CORES["matmul"](q, k, v, mask, self.scale).transpose(1, 2).flatten(2)], -1)

    found = codes(optimized(export(Both(sigmoids), inputs())))
    assert sorted(map(str, found)) == ["keys_used_elsewhere", "not_softmax"]


# What is not named.


class Function(nn.Module):
    def __init__(self, fn, *weights):
        super().__init__()
        self.fn = fn
        self.w = nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, *x):
        return self.fn(*x, *self.w)


def split_heads(x, heads=2):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def self_attention(x, w_q, w_k, w_v):
    q, k, v = (split_heads(x @ w) for w in (w_q, w_k, w_v))
    return sigmoids(q, k, v)


def linear_attention(q, c, w_k, w_v):
    k, v = split_heads(c @ w_k), split_heads(c @ w_v)
    return (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)


def retention(q, c, w_k, w_v):
    k, v = split_heads(c @ w_k), split_heads(c @ w_v)
    decay = 0.9 ** (torch.arange(7)[None] - torch.arange(4)[:, None]).abs().to(q.dtype)
    return (q @ k.mT * decay) @ v


def gated_state(q, c, w_k, w_v):
    """A function of the state, which is summed over the tokens."""
    k, v = split_heads(c @ w_k), split_heads(c @ w_v)
    return q @ torch.relu(k.mT @ v)


def weights_from_inputs(x, c, w_k, w_v):
    """An MLP of each sequence's own, whose weights a small network makes of a code."""
    up, down = ((c[:, 0] @ w).unflatten(-1, (2, 7, -1)) for w in (w_k, w_v))
    return F.relu(x @ up.mT) @ down


def graph_network(x, w_a, w_b, w_c):
    """Nodes of a graph, joined where they are alike."""
    a, b = x @ w_a, x @ w_b
    return torch.sigmoid(a @ b.mT) @ (x @ w_c)


def images(x, c, w_k, w_v):
    """One head: a relation between two sets of features."""
    return F.relu(x @ (c @ w_k).mT) @ (c @ w_v)


def indexer(q, c, w, w_k):
    scores = torch.einsum("bshd,btd->bsht", q, c @ w_k).relu()
    return torch.einsum("bsht,bsh->bst", scores, w)


def routed(x, w_r, w_e):
    return torch.einsum("bte,btej->btj", (x @ w_r).sigmoid(), torch.einsum("bti,eij->btej", x, w_e))


def gated(q, c, w_k, w_v):
    k, v = split_heads(c @ w_k), split_heads(c @ w_v)
    return torch.sigmoid(q @ k.mT).sum(-1, keepdim=True) * v.mean(2, keepdim=True)


def convolved(x, w_a, w_b):
    return F.conv1d(F.relu(F.conv1d(x.mT, w_a)), w_b).mT


Q, C = seeded(2, 2, 4, 5, seed=3), seeded(2, 7, 6, seed=4)
UP = [seeded(6, 10, seed=5), seeded(6, 10, seed=6)]
SILENT = {
    "attention of ordinary heads": (self_attention, [C], [*UP, UP[0] + 1]),
    "an MLP": (lambda x, a, b: F.relu(x @ a) @ b, [C], [seeded(6, 9), seeded(9, 6)]),
    "a gated MLP": (lambda x, a, b, c: (F.silu(x @ a) * (x @ b)) @ c, [C], [seeded(6, 9), seeded(6, 9), seeded(9, 6)]),
    "a router": (routed, [C], [seeded(6, 3), seeded(3, 6, 6)]),
    "a router over rows": (lambda x, v, w: (x @ w).sigmoid() @ v, [C, seeded(2, 3, 5)], [seeded(6, 3)]),
    "gates": (gated, [Q, C], UP),
    "linear attention": (linear_attention, [Q, C], UP),
    "retention": (retention, [Q, C], UP),
    "a function of a state": (gated_state, [Q, C], UP),
    "weights made of inputs": (weights_from_inputs, [Q, C], [seeded(6, 70), seeded(6, 70, seed=1)]),
    "a network on a graph": (graph_network, [C], [seeded(6, 4), seeded(6, 4, seed=1), seeded(6, 8)]),
    "one head": (images, [seeded(2, 4, 10), C], UP),
    "an indexer": (indexer, [Q.transpose(1, 2), C, seeded(2, 4, 2)], [seeded(6, 5)]),
    "a convolution": (convolved, [C], [seeded(9, 6, 2), seeded(6, 9, 2)]),
    "products alone": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, [Q, Q, Q], []),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_no_attention_over_a_latent_is_not_named(name):
    fn, given, weights = SILENT[name]
    program = export(Function(fn, *weights), given)
    outcome = optimized(program)
    assert codes(outcome) == []
    assert_untouched(program, outcome)


def test_a_function_before_a_softmax_is_no_reason():
    """A soft cap, and a function that is not followed: what is said of them is what was said before."""
    assert codes(optimized(export(Weighed(lambda s, b: torch.tanh(s).softmax(-1)), inputs()))) == [Code.ABSORBED]
    found = codes(optimized(export(Weighed(lambda s, b: F.gelu(s).softmax(-1)), inputs())))
    assert found == [Code.UNSUPPORTED_OP]
    gate = Weighed(lambda s, b: s.sigmoid() * s.softmax(-1))
    assert Code.NOT_SOFTMAX not in codes(optimized(export(gate, inputs())))


def test_absorbed_by_hand_it_has_nothing_to_be_said_of():
    class ByHand(Other):
        def forward(self, x, c, r=None, mask=None):
            w_k, w_v = (w.view(H, -1, L) for w in self.w.split([H * N, H * V]))
            rows = c[:, None]
            scores = self.query(x)[..., :N] @ w_k @ rows.mT
            return (scores.sigmoid() @ rows @ w_v.mT).transpose(1, 2).flatten(2)

    assert codes(optimized(export(ByHand(None, up="two", R=0), inputs(R=0)))) == []


# The doors: Dynamo's graph is looked at for a softmax before it is captured.


@pytest.mark.parametrize("name", ["matmul", *also("combination", "einsum", "bmm")])
def test_the_doors_say_it(name):
    module, call = Other(CORES_WITHOUT[name]).eval(), inputs()
    with torch.no_grad():
        assert [str(s.code) for s in mla_compile.explain(module, *call).sites] == ["not_softmax"]
        for compiled in (
            mla_compile.optimize(module, codegen="eager"),
            torch.compile(module, backend="mla", options={"codegen": "eager"}),
        ):
            backend._recent.clear()
            with pytest.warns(MlaCompileWarning, match="nothing was absorbed .* 1 refused \\(not_softmax\\)"):
                got = compiled(*call)
            torch.testing.assert_close(got, module(*call), rtol=0, atol=0)


def test_spoiled_keys_are_not_named():
    """Nothing of it is an image of narrower rows."""
    module = spoiled(lambda k, v: (F.silu(k), F.silu(v)))
    module.attend = lambda q, k, v, mask: sigmoids(q, k, v)
    assert codes(optimized(export(module, inputs()))) == []
