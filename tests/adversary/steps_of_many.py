"""Tampering with a decode step: lengths that are read, rows that are hidden or moved, caches that something else reads.

:class:`Tiny` is a language model of one or two latent attentions, whose every stage goes through :meth:`Layer._at`;
each entry of ``TAMPERINGS`` puts something else there. Whether each request may have a length of its own then is for
numbers to say (:mod:`tests.adversary.pages`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 32


@dataclass(frozen=True)
class Sizes:
    """``core``: ``sdpa`` or ``matmul``. ``axis``: rows are held with an axis for their one head. ``shared``: the second
    layer attends to the rows of the first."""

    D: int
    H: int
    L: int
    N: int
    R: int
    V: int
    layers: int
    core: str
    axis: bool
    shared: bool


@dataclass(frozen=True)
class Now:
    """One kind of rows in a call: ids and positions [B,S], those of the past [B,P,W], the new ones, and all [B,T,W]."""

    ids: Tensor
    positions: Tensor
    past: Tensor
    new: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Tampering:
    """``run(now, x)`` at ``stage``; ``legal``: it must be decoded over pages.

    ``mixes``: sequences of a batch meet. Such a model has other tokens in a batch than alone before anything is done to
    it, and no proof is about that: the comparison with the model before anybody is served has to find it.
    """

    stage: str
    run: Callable[[Now, Tensor], Tensor]
    legal: bool = False
    mixes: bool = False


@dataclass(frozen=True)
class Mutant:
    """``layers``: where the tampering is. ``which``: the rows it acts on, 0 the latent, 1 the rotary keys."""

    sizes: Sizes
    tampering: str
    layers: tuple[int, ...]
    which: tuple[int, ...]
    seed: int


class Layer(nn.Module):
    """Latent attention over x [B,S,D]."""

    def __init__(self, sizes: Sizes, tampering: Tampering | None, which: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.sizes, self.tampering, self.which = sizes, tampering, which
        s, generator = sizes, torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) * 1.4 / shape[-1] ** 0.5
            return nn.Parameter(values, requires_grad=False)

        self.q, self.down = weight(s.H * (s.N + s.R), s.D), weight(s.L + s.R, s.D)
        self.up, self.out = weight(s.H * (s.N + s.V), s.L), weight(s.D, s.H * s.V)

    def _at(self, stage: str, now: Now, x: Tensor, which: int | None = None) -> Tensor:
        own = self.tampering is not None and self.tampering.stage == stage and which in (None, *self.which)
        return self.tampering.run(now, x) if own and self.tampering is not None else x

    def forward(
        self, x: Tensor, ids: Tensor, positions: Tensor, past: list[Tensor], other: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """y, all rows, and those that are held. ``other``: rows that are attended to instead."""
        s = self.sizes
        before = Now(ids, positions, past[0], past[0], past[0])
        turned = self._at("positions", before, positions)
        c, r = F.linear(x, self.down).split([s.L, s.R], -1)
        new = [F.rms_norm(c, (s.L,)), _turned(r, turned)]
        nows: list[Now] = []
        for k, one in enumerate(past):
            own = self._at("new", Now(ids, positions, one, new[k], one), new[k], k)
            joined = torch.cat([one, own], 1)
            rows = self._at("rows", Now(ids, positions, one, own, joined), joined, k)
            nows.append(Now(ids, positions, one, own, rows))
        all_rows = [now.rows for now in nows]
        c, r = (
            self._at("read", now, rows, k) for k, (now, rows) in enumerate(zip(nows, other or all_rows, strict=True))
        )
        k, v = F.linear(c, self.up).unflatten(-1, (s.H, s.N + s.V)).transpose(1, 2).split([s.N, s.V], -1)
        k = self._at("keys", nows[0], torch.cat([k, r[:, None].expand(-1, s.H, -1, -1)], -1))
        q = F.linear(x, self.q).unflatten(-1, (s.H, s.N + s.R))
        q = torch.cat([q[..., : s.N], _turned(q[..., s.N :], turned)], -1).transpose(1, 2)
        o = self._attend(self._at("queries", nows[0], q), k, self._at("values", nows[0], v), nows[0])
        y = self._at("output", nows[0], F.linear(o.transpose(1, 2).flatten(2), self.out))
        return y, all_rows, [self._at("held", now, now.rows, k) for k, now in enumerate(nows)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, now: Now) -> Tensor:
        S, T, scale = q.shape[2], k.shape[2], q.shape[-1] ** -0.5
        later = None
        if S > 1:
            later = torch.zeros(S, T, dtype=q.dtype).masked_fill(torch.ones(S, T).triu(T - S + 1) > 0, -torch.inf)
        stage = "" if self.tampering is None else self.tampering.stage
        if self.sizes.core == "sdpa" and stage not in ("scores", "probs"):
            return F.scaled_dot_product_attention(q, k, v, later, scale=scale)
        scores = self._at("scores", now, q @ k.mT * scale)
        scores = scores if later is None else scores + later
        return self._at("probs", now, scores.softmax(-1)) @ v


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [B,S,...,R], R even."""
    angle = positions.to(x.dtype).view(*positions.shape, *[1] * (x.dim() - 2))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Tiny(nn.Module):
    """A language model in the convention of transformers; each layer of its cache has attributes ``c`` and ``r``."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self.mutant, sizes = mutant, mutant.sizes
        generator = torch.Generator().manual_seed(mutant.seed)
        self.embed = nn.Embedding(VOCAB, sizes.D, dtype=torch.float64).requires_grad_(False)
        self.embed.weight.copy_(torch.randn(VOCAB, sizes.D, generator=generator, dtype=torch.float64))
        tampering = TAMPERINGS[mutant.tampering]
        self.layers = nn.ModuleList(
            Layer(sizes, tampering if k in mutant.layers else None, mutant.which, mutant.seed + k + 1)
            for k in range(sizes.layers)
        )

    def get_input_embeddings(self) -> nn.Module:
        """As in transformers."""
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """``logits`` [B,S,VOCAB] and ``past_key_values``."""
        x, s = self.embed(input_ids), self.mutant.sizes
        caches, before = [], None
        for k, layer in enumerate(self.layers):
            if past_key_values is None:
                past = [x.new_zeros(len(x), 0, s.L), x.new_zeros(len(x), 0, s.R)]
            else:
                past = [past_key_values.layers[k].c, past_key_values.layers[k].r]
                past = [rows.squeeze(1) for rows in past] if s.axis else past
            P = past[0].shape[1]
            positions = position_ids
            if positions is None:
                positions = torch.arange(P, P + x.shape[1]).expand(len(x), -1)
            y, before, held = layer(x, input_ids, positions, past, before if s.shared else None)
            x = x + y
            held = [rows.unsqueeze(1) for rows in held] if s.axis else held
            caches.append(SimpleNamespace(c=held[0], r=held[1]))
        return SimpleNamespace(logits=x @ self.embed.weight.t(), past_key_values=SimpleNamespace(layers=caches))


def _length(x: Tensor) -> Any:
    """The tokens of rows [B,T,W] as a number to compute with."""
    return x.shape[1]


def _keys(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1])


def _hide(x: Tensor, hidden: Tensor) -> Tensor:
    return x.masked_fill(hidden, -torch.inf)


def _distance(now: Now, x: Tensor) -> Tensor:
    """Scores [B,H,S,T]: how far each key is before its query, told by positions."""
    return now.positions[:, None, :, None] - _keys(x)


POSITIONS: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "one later": lambda now, p: p + 1,
    "twice as far": lambda now, p: p * 2,
    "all zero": lambda now, p: p * 0,
    "those of the tokens": lambda now, p: now.ids,
    "of the cache's length": lambda now, p: p * 0 + _length(now.past),
    "counted from the cache": lambda now, p: torch.arange(p.shape[1]).expand_as(p) + _length(now.past),
    "relative to the end": lambda now, p: p - _length(now.past),
    "no farther than the cache is long": lambda now, p: p.clamp(max=_length(now.past)),
    "of what is cached": lambda now, p: p + now.past.mean().sign().long(),
}
NEW: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "scaled": lambda now, x: x * 1.7,
    "squashed": lambda now, x: x.tanh(),
    "by their position": lambda now, x: x * (1 + 0.1 * now.positions[..., None]),
    "by the length of the cache": lambda now, x: x * (1 + 0.1 * _length(now.past)),
    "by the token": lambda now, x: x * (1 + 0.1 * now.ids[..., None]),
    "plus the mean of the cache": lambda now, x: x + now.past.sum(1, keepdim=True) * 0.1,
    "mixed with the row before": lambda now, x: x + 0.5 * torch.cat([now.past, x], 1)[:, -x.shape[1] - 1 : -1].mean(),
    "the first again": lambda now, x: torch.where(torch.cat([now.past, x], 1)[:, :1] > 0, x, -x),
    "zeros": lambda now, x: x * 0,
}
ROWS: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "rolled": lambda now, x: x.roll(1, 1),
    "in the opposite order": lambda now, x: x.flip(1),
    "new rows in front": lambda now, x: torch.cat([now.new, now.past], 1),
    "scaled": lambda now, x: x * 1.1,
    "decaying": lambda now, x: torch.cat([0.9 * now.past, now.new], 1),
    "squashed": lambda now, x: x.tanh(),
    "the first row written": lambda now, x: torch.cat([now.new[:, :1], x[:, 1:]], 1),
    "the first row twice": lambda now, x: torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1),
    "the row before the last written": lambda now, x: torch.slice_scatter(x, now.new[:, :1] * 2, 1, -2, -1),
    "summed": lambda now, x: x.cumsum(1),
    "less their mean": lambda now, x: x - x.mean(1, keepdim=True),
    "normed over the tokens": lambda now, x: x / x.norm(dim=1, keepdim=True),
    "where they are positive": lambda now, x: x.relu(),
    "sorted": lambda now, x: x.sort(1)[0],
    "by the length": lambda now, x: x * (1 + 0.01 * _length(x)),
    "by their place": lambda now, x: x * (1 + 0.1 * torch.arange(x.shape[1]))[:, None],
    "through float32": lambda now, x: x.float().to(x.dtype),
}
HELD: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "without the new": lambda now, x: torch.cat([now.past, now.past[:, :1] * 0 + now.new[:, :1] * 0], 1),
    "of zeros": lambda now, x: torch.zeros_like(x),
    "scaled": lambda now, x: torch.cat([now.past, now.new * 2], 1),
}
READ: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "without the first": lambda now, x: x[:, 1:],
    "the last three": lambda now, x: x[:, -3:],
    "the first three": lambda now, x: x[:, :3],
    "every second": lambda now, x: x[:, ::2],
    "the past alone, and zeros": lambda now, x: torch.cat([now.past, now.new * 0], 1),
    "the new ones alone": lambda now, x: torch.cat([now.past * 0, now.new], 1),
    "the newest twice": lambda now, x: torch.cat([x, x[:, -1:]], 1),
    "of positions": lambda now, x: x.index_select(1, torch.arange(x.shape[1]).flip(0)),
    "of the token's place": lambda now, x: x.gather(1, now.positions[..., None].expand(-1, -1, x.shape[2])),
}
SCORES: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "causal by positions": lambda now, x: _hide(x, _distance(now, x) < 0),
    "strictly causal": lambda now, x: _hide(x, (_distance(now, x) < 1) & (_keys(x) > 0)),
    "a window by positions": lambda now, x: _hide(x, _distance(now, x) > 2),
    "a window by the length": lambda now, x: _hide(x, _keys(x) < _length(now.rows) - 3),
    "a window by both": lambda now, x: _hide(x, (_distance(now, x) > 2) | (_keys(x) >= _length(now.rows))),
    "blocks of three": lambda now, x: _hide(x, _keys(x) // 3 != (now.positions // 3)[:, None, :, None]),
    "a window and the first": lambda now, x: _hide(x, (_distance(now, x) > 2) & (_keys(x) > 0)),
    "the first hidden": lambda now, x: _hide(x, (_keys(x) == 0) & (_keys(x) < _length(now.rows) - 1)),
    "every second hidden": lambda now, x: _hide(x, (_keys(x) % 2 == 1)),
    "half hidden": lambda now, x: _hide(x, _keys(x) < _length(now.rows) // 2),
    "by the distance": lambda now, x: x - 0.1 * _distance(now, x),
    "by the distance from the end": lambda now, x: x - 0.1 * (_length(now.rows) - _keys(x)),
    "by place": lambda now, x: x + 0.1 * _keys(x),
    "by the length": lambda now, x: x * (1.0 + 0.1 * _length(now.rows)),
    "by the position": lambda now, x: x * (1.0 + 0.1 * now.positions[:, None, :, None]),
    "from the rows": lambda now, x: x + now.rows[:, None, None, :, 0],
    "rolled": lambda now, x: x.roll(1, -1),
    "capped": lambda now, x: 3 * (x / 3).tanh(),
    "less the largest": lambda now, x: x - x.amax(-1, keepdim=True),
    "less the mean": lambda now, x: (x - x.mean(-1, keepdim=True)) * 2,
    "divided by their norm": lambda now, x: x / x.norm(dim=-1, keepdim=True),
    "the lowest hidden": lambda now, x: _hide(x, x < x.amax(-1, keepdim=True) - 1),
    "where the rows are positive": lambda now, x: _hide(x, (now.rows[..., 0] < 0)[:, None, None] & (_keys(x) > 0)),
    "by tokens that are seen": lambda now, x: _hide(x, (now.ids % 2 == 0)[:, None, :, None] & (_keys(x) > 0)),
}
PROBS: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "by the length": lambda now, x: x * _length(now.rows),
    "without the first": lambda now, x: x * (_keys(x) > 0),
    "rolled": lambda now, x: x.roll(1, -1),
    "squared": lambda now, x: x.square(),
    "less one over the length": lambda now, x: x - 1 / _length(now.rows),
    "the largest alone": lambda now, x: torch.where(x == x.amax(-1, keepdim=True), x, 0.0),
}
QUERIES: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "by the length": lambda now, x: x * (1 + 0.1 * _length(now.rows)),
    "by the length of the past": lambda now, x: x / (1 + _length(now.past)),
    "by the position": lambda now, x: x * (1 + 0.1 * now.positions[:, None, :, None]),
    "plus what is cached": lambda now, x: x + now.past.sum(),
    "by the newest row": lambda now, x: x * now.rows[:, -1:, :1, None],
    "by the new row": lambda now, x: x * now.new[:, None, :, :1],
}
OUTPUT: dict[str, Callable[[Now, Tensor], Tensor]] = {
    "plus the mean of the rows": lambda now, x: x + now.rows.mean(),
    "plus each mean": lambda now, x: x + now.rows.mean((1, 2))[:, None, None],
    "plus the first row": lambda now, x: x + now.rows[:, :1, :1],
    "plus the newest row": lambda now, x: x + now.rows[:, -1:, :1],
    "plus the row at its position": lambda now, x: x + now.rows[..., :1].gather(1, now.positions[..., None]),
    "plus the length": lambda now, x: x + 0.1 * _length(now.rows),
    "plus the length by a tensor": lambda now, x: x + torch.ones_like(now.rows[..., :1]).sum(1, keepdim=True),
    "plus the past": lambda now, x: x + now.past.sum(),
    "by the position": lambda now, x: x * (1 + now.positions[..., None]).log(),
}
MIXES: dict[str, tuple[str, Callable[[Now, Tensor], Tensor]]] = {
    "positions of the first": ("positions", lambda now, p: p[:1].expand_as(p)),
    "largest position": ("positions", lambda now, p: p.amax().expand_as(p)),
    "new rows of another": ("new", lambda now, x: x.roll(1, 0)),
    "new rows of the first": ("new", lambda now, x: x[:1].expand_as(x)),
    "rows of another": ("read", lambda now, x: x.roll(1, 0)),
    "queries of another": ("queries", lambda now, x: x.flip(0)),
    "output plus that of another": ("output", lambda now, x: x + x.roll(1, 0)),
    "output normed over the batch": ("output", lambda now, x: x - x.mean(0)),
    "output by their number": ("output", lambda now, x: x * x.shape[0]),
    "scores of another": ("scores", lambda now, x: x.roll(1, 0)),
}
NOTHING: dict[str, tuple[str, Callable[[Now, Tensor], Tensor]]] = {
    "positions plus zero": ("positions", lambda now, p: p + 0),
    "new rows scaled": ("new", lambda now, x: x * 1.7),
    "new rows by their position": ("new", lambda now, x: x * (1 + 0.1 * now.positions[..., None])),
    "new rows copied": ("new", lambda now, x: x.clone()),
    "rows copied": ("read", lambda now, x: x.clone()),
    "queries by the position": ("queries", lambda now, x: x * (1 + 0.1 * now.positions[:, None, :, None])),
    "queries by the token": ("queries", lambda now, x: x * (1 + 0.1 * now.ids[:, None, :, None])),
    "scores scaled": ("scores", lambda now, x: x * 1.3),
    "output gated": ("output", lambda now, x: x * (x.sum(-1, keepdim=True)).sigmoid()),
}
_TABLES = {
    "positions": POSITIONS, "new": NEW, "rows": ROWS, "held": HELD, "read": READ, "scores": SCORES, "probs": PROBS,
    "queries": QUERIES, "output": OUTPUT,
}  # fmt: skip
TAMPERINGS: dict[str, Tampering] = {
    **{f"{stage}: {name}": Tampering(stage, run) for stage, table in _TABLES.items() for name, run in table.items()},
    **{f"mixed: {name}": Tampering(*how, mixes=True) for name, how in MIXES.items()},
    **{f"nothing: {name}": Tampering(*how, legal=True) for name, how in NOTHING.items()},
}
LEGAL_ONES = sorted(name for name, one in TAMPERINGS.items() if one.legal)


def mutants(count: int, seed: int) -> list[Mutant]:
    """After one that changes nothing, all tamperings come once before one comes twice.

    In every second mutant all widths are equal.
    """
    rng = random.Random(seed)
    names: list[str] = []
    found = []
    for number in range(count):
        names = names or [*rng.sample(sorted(TAMPERINGS), len(TAMPERINGS)), rng.choice(LEGAL_ONES)]
        name = names.pop()
        layers = rng.choice((1, 1, 2))
        n = rng.choice((2, 4))
        widths = (n,) * 6 if number % 2 else (8, rng.choice((2, 3)), 5, 4, rng.choice((2, 4)), rng.choice((4, 6)))
        # Where the rows of the first layer serve both, nothing reads those of the second, which then are no pages.
        shared = layers == 2 and rng.random() < 0.3 and not TAMPERINGS[name].legal
        sizes = Sizes(*widths, layers, rng.choice(("sdpa", "matmul")), rng.random() < 0.5, shared)
        where = (0,) if shared else rng.choice(((0,), (layers - 1,), tuple(range(layers))))
        found.append(Mutant(sizes, name, where, rng.choice(((0,), (1,), (0, 1))), rng.randrange(99)))
    return found
