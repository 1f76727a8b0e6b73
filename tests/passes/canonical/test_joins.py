"""K and V of cached and of new tokens that are projected apart and joined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.passes.canonical.joins import join_rows
from tests.support.modules import MLA, inputs, padded
from tests.support.programs import absorbed, calls, refused, seeded, trace
from tests.support.tiers import also

P = 5  # cached tokens


class Apart(MLA):
    """Calls ``made(self, c, r)`` for K and V of the cached rows and of each length in ``new``, and joins them."""

    def __init__(self, made=None, *, new=(2,), dim=2, nested=False, **options):
        super().__init__(**options)
        self.made, self.lengths, self.dim, self.nested = made or Apart.plain, [P, *new], dim, nested
        self.more = nn.Parameter(seeded(self.L, self.L, seed=11) / self.L)

    def plain(self, c, r):
        k, v = self.expand(self.latent(c))
        return self.join(k, r), v

    def forward(self, x, c, r, mask=None):
        parts = [
            self.made(self, *rows) for rows in zip(c.split(self.lengths, 1), r.split(self.lengths, 1), strict=True)
        ]
        k, v = (self.joined(list(both)) for both in zip(*parts, strict=True))
        return self.finish(self.attend(self.query(x), *self.heads_first(k, v), mask), x)

    def heads_first(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if self.dim == 2 else (k.transpose(1, 2), v.transpose(1, 2))

    def joined(self, parts: list[Tensor]) -> Tensor:
        while self.nested and len(parts) > 2:
            parts = [torch.cat(parts[:2], self.dim), *parts[2:]]
        return torch.cat(parts, self.dim)


def tokens_first(self, c, r):
    k, v = Apart.plain(self, c, r)
    return k.transpose(1, 2), v.transpose(1, 2)


def scaled(self, c, r):
    k, v = Apart.plain(self, 1.5 * c, r)
    return k / 1.5, v.float().double() * seeded(self.V, seed=3)


def normed(self, c, r):
    return Apart.plain(self, F.rms_norm(c, (self.L,)), r)


def twice_projected(self, c, r):
    return Apart.plain(self, F.linear(c, self.more), r)


def gated(self, c, r):
    k, v = Apart.plain(self, c, r)
    return k, v * torch.sigmoid(c[..., :1]).unsqueeze(1)


def data(new, **options):
    return inputs(S=2, T=P + sum(new), **options)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (tokens_first, {"dim": 1, "up": "einsum"}),
        (scaled, {"up": "param", "bias": True}),
        (Apart.plain, {"share": "assign"}),
        (Apart.plain, {"new": (1, 3), "nested": True}),
        *also(
            "combination",
            (Apart.plain, {}),
            (Apart.plain, {"new": (1,)}),
            (Apart.plain, {"up": "block", "bias": True}),
            (twice_projected, {"up": "two"}),
            (Apart.plain, {"new": (1, 3)}),
            (Apart.plain, {"new": (3, 1), "share": "assign", "order": "rope_nope"}),
            (Apart.plain, {"up": "lora", "share": "interleave"}),
            (Apart.plain, {"up": "per_head", "core": "bmm"}),
            (Apart.plain, {"up": "int8", "core": "einsum"}),
            (Apart.plain, {"share": "repeat"}),
            (normed, {"up": "merged"}),
            (gated, {}),
        ),
    ],
)
def test_parts_are_absorbed(made, options):
    new = options.get("new", (2,))
    absorbed(Apart(made, **options), [*data(new), padded(2, 2, P + sum(new))])


def test_any_number_of_cached_tokens():
    lengths = {1: torch.export.Dim("past")}

    class Step(MLA):
        def forward(self, x, past, c, r):
            k, v = (torch.cat(both, 2) for both in zip(self.expand(past), self.expand(c), strict=True))
            return self.finish(self.attend(self.query(x), self.join(k, r), v, None), x), torch.cat([past, c], 1)

    x, rows, r = inputs(S=2, T=9)
    shapes = {"x": None, "past": lengths, "c": None, "r": {1: lengths[1] + 2}}
    program = absorbed(Step(), [x, rows[:, :7].clone(), rows[:, 7:].clone(), r], shapes)
    (joined,) = [
        n for n in program.gm.graph.nodes if n.target is torch.ops.aten.cat.default and n.meta["val"].dim() == 3
    ]
    assert any(user.op == "output" for user in joined.users), "the attention reads the rows that the model caches"


def other_weights(self, c, r):
    k, v = Apart.plain(self, c, r)
    return (k, v) if c.shape[1] == P else (k, (c @ self.more @ self.w[-self.V :].T).unsqueeze(1).expand_as(v))


def other_factors(self, c, r):
    k, v = Apart.plain(self, c, r)
    return (k, v) if c.shape[1] == P else (2 * k, 2 * v)


def other_heads(self, c, r):
    k, v = Apart.plain(self, c, r)
    return (k, v) if c.shape[1] == P else (k.flip(1), v.flip(1))


def of_first_token(self, c, r):
    """Each part has a factor of its first token, which broadcasts along its tokens."""
    k, v = Apart.plain(self, c, r)
    factor = torch.sigmoid(c[:, :1, :1]).unsqueeze(1)
    return k * factor, v * factor


def neighbours(self, c, r):
    k, v = Apart.plain(self, c, r)
    return k + k.roll(1, 2), v + v.roll(1, 2)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (other_weights, "unsupported_op"),
        (other_factors, "unsupported_op"),
        (other_heads, "unsupported_op"),
        (of_first_token, "unsupported_op"),
        (neighbours, "token_mixing"),
    ],
)
def test_other_parts_are_left(made, code):
    refused(Apart(made), [*data((2,)), padded(2, 2, P + 2)], code)


def _keys(q, old, new, w):
    return (q @ torch.cat([old @ w, new @ w], 1).mT).softmax(-1) @ torch.cat([old, new], 1)


def _keys_beside(q, old, new, w):
    made = new @ w
    out = (q @ torch.cat([old @ w, made], 1).mT).softmax(-1) @ torch.cat([old, new], 1)
    return torch.cat([out, made], 1)


def _keys_transposed_beside(q, old, new, w):
    """Joined along the tokens, the transposed parts would need the projections of the parts themselves."""
    k = torch.cat([x + x.permute(0, 2, 1) for x in (old @ w, new @ w)], 1)
    return (q @ k.mT).softmax(-1) @ torch.cat([old, new], 1)


@pytest.mark.parametrize(
    ("function", "tokens", "moved"),
    [(_keys, (5, 2), 1), (_keys_beside, (5, 2), 0), (_keys_transposed_beside, (6, 6), 0)],
)
def test_nothing_is_computed_twice(function, tokens, moved):
    data = [seeded(2, 3, 6), *(seeded(2, count, 6, seed=k) for k, count in enumerate(tokens, 1))]
    program = trace(function, data, [seeded(6, 6, seed=3)])
    weights = {program.gm.graph.find_nodes(op="placeholder")[-1]}
    before = calls(program).count("matmul.default")
    assert join_rows(program.gm.graph, weights, program.fake_mode) == moved
    assert calls(program).count("matmul.default") == before - moved
