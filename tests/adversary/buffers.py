"""Tampering with memory of K and V: rows of another recipe, other positions, writes that do more, other reads.

The base is :class:`tests.support.generated_own.OwnMLA`, a layer that holds K and V in memory of its own, and legal;
each entry of ``TAMPERINGS`` changes one stage of it, in some of its calls. Whether the rows can still stand for the
memory is for numbers to say (:mod:`tests.adversary.sessions`); ``legal`` marks what changes nothing, and must stay
rows. Casts between floating dtypes are left out where K and V are absorbed, as everywhere (``allowed``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.adversary.check import EXACT, THROUGH_FLOAT32
from tests.support.generated_own import EMPTIED, OwnCase, OwnMLA
from tests.support.generator import LEGAL

CALLS = ("always", "always", "prompt", "step", "later")
WHICH = ((0,), (1,), (0, 1))


@dataclass(frozen=True)
class Tampering:
    """``run(module, ...)`` at ``stage``.

    ``new``: x, K or V [B,H,S,W] of the new tokens, in place of it. ``start``: the first of their positions. ``write``:
    a cache, x and start, in place of the write. ``read``: what is read of a cache [B,H,T,W], and the cache.
    ``output``: y. ``layers``: two layers, one after the other, in place of one; before the first call, or after it.
    """

    stage: str
    run: Callable[..., Any]
    legal: bool = False
    allowed: float = EXACT


@dataclass(frozen=True)
class Mutant:
    """``calls``: in which calls of a session the tampering acts. ``which``: on K, on V, or both."""

    own: OwnCase
    tampering: str
    calls: str
    which: tuple[int, ...]


class Tampered(OwnMLA):
    """The layer of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.own)
        self.mutant = mutant
        generator = torch.Generator().manual_seed(7)
        widths = {cache.shape[-1] for cache in self.zeros()}
        self.mixes = {w: torch.randn(w, w, generator=generator, dtype=torch.float64) for w in widths}

    def forward(self, x: Tensor, start: int, keep: Tensor) -> Tensor:  # type: ignore[override]  # another protocol
        """As the base's."""
        y = super().forward(x, start, keep)
        acts = self._acts("output", 0, x.shape[1], start)
        return TAMPERINGS[self.mutant.tampering].run(self, y) if acts else y  # type: ignore[no-any-return]

    def mix(self, x: Tensor) -> Tensor:
        """Another weight."""
        return x @ self.mixes[x.shape[-1]]

    def other(self, cache: Tensor) -> Tensor:
        """V's memory for K's."""
        held = self.held()
        return held[-1] if cache is held[0] else held[0]  # type: ignore[no-any-return]

    def place(self, cache: Tensor, start: int, count: int) -> Tensor:
        """The tokens ``start``.. of all sequences of a cache."""
        return cache.narrow(self.tokens, start, count)

    def _acts(self, stage: str, index: int, count: int, start: int) -> bool:
        mutant = self.mutant
        if TAMPERINGS[mutant.tampering].stage != stage or not (index in mutant.which or self.count == 1):
            return False
        if mutant.calls == "later":
            return start > self.case.T
        return mutant.calls == "always" or (count == self.case.T) == (mutant.calls == "prompt")

    def _write(self, cache: Tensor, new: Tensor, start: int) -> Tensor:
        # What is tampered with is the memory, into which copies go as well.
        made = super()._write(cache, new, start)
        return cache if made is cache else cache.copy_(made)

    def _written(self, index: int, new: Tensor, start: int) -> Tensor:
        run, count, length = TAMPERINGS[self.mutant.tampering].run, new.shape[2], start + new.shape[2]
        cache = self.held()[index]
        if self._acts("new", index, count, start):
            new = run(self, new)
        if self._acts("start", index, count, start):
            start = run(self, start)
        if self._acts("write", index, count, start):
            run(self, cache, new, start)
        else:
            self._write(cache, new, start)
        read = self._read(self.held()[index], len(new), length)
        return run(self, read, cache) if self._acts("read", index, count, start) else read  # type: ignore[no-any-return]


def _after(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A write, and then ``fn(m, cache, x, start)``."""

    def run(m: Tampered, cache: Tensor, x: Tensor, start: int) -> None:
        m._write(cache, x, start)
        fn(m, cache, x, start)

    return run


def _before(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(m: Tampered, cache: Tensor, x: Tensor, start: int) -> None:
        fn(m, cache, x, start)
        m._write(cache, x, start)

    return run


def _instead(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """All of the cache is written, by what ``fn(m, cache, x, start)`` returns."""
    return lambda m, cache, x, start: cache.copy_(fn(m, cache, x, start))


def _with(m: Tampered, cache: Tensor, x: Tensor, start: int) -> Tensor:
    """The cache as it would be after the write."""
    made = cache.clone()
    m._write(made, x, start)
    return made


def _put(x: Tensor, value: Any, *where: Any) -> None:
    x[where] = value


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], dtype=x.dtype)[:, None]


def _spare(m: Tampered, x: Tensor) -> int:
    """The first sequence that is not used; the last where all are."""
    return min(len(x), m.held()[0].shape[0] - 1)


ALL = slice(None)


class Pair(nn.Module):
    """Two layers; a tampering of the stage ``layers`` has one of them hold memory of the other."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self.first, self.second = Tampered(mutant), Tampered(mutant)
        self.second.w_k.mul_(1.3)
        self.second.w_c.copy_(self.second.w_c.flip(0))
        if mutant.calls == "always":
            self.tamper()

    def tamper(self) -> None:
        """Acts on what the layers hold now."""
        TAMPERINGS[self.first.mutant.tampering].run(self.first, self.second)

    def held(self) -> list[Any]:
        """The memory of both."""
        return [*self.first.held(), *self.second.held()]

    def empty(self) -> None:
        """Before another session."""
        self.first.empty()
        self.second.empty()

    def forward(self, x: Tensor, start: int, keep: Tensor) -> Tensor:
        """As one layer."""
        x = x + self.first(x, start, keep)
        return x + self.second(x, start, keep)  # type: ignore[no-any-return]


NEW: dict[str, Callable[..., Tensor]] = {
    "by another weight": lambda m, x: m.mix(x),
    "by a weight more": lambda m, x: x + 0.1 * m.mix(x),
    "scaled": lambda m, x: x * 1.5,
    "plus a number": lambda m, x: x + 0.5,
    "by place": lambda m, x: x * (1 + _positions(x)),
    "rolled along the tokens": lambda m, x: x.roll(1, 2),
    "in the opposite order": lambda m, x: x.flip(2),
    "of another sequence": lambda m, x: x.roll(1, 0),
    "of another head": lambda m, x: x.roll(1, 1),
    "of another feature": lambda m, x: x.roll(1, 3),
    "the first token's for all": lambda m, x: x[:, :, :1].expand_as(x),
    "the first sequence's for all": lambda m, x: x[:1].expand_as(x),
    "squashed": lambda m, x: x.tanh(),
    "through float32": lambda m, x: x.float().to(x.dtype),
    "through bfloat16": lambda m, x: x.bfloat16().to(x.dtype),
    "rounded": lambda m, x: (4 * x).round() / 4,
    "masked by their sign": lambda m, x: torch.where(x > 0, x, 0.0),
    "masked by their place": lambda m, x: torch.where(_positions(x) % 2 == 0, x, 0.0),
    "summed along the tokens": lambda m, x: x.cumsum(2),
    "divided by their norm": lambda m, x: x / x.norm(dim=-1, keepdim=True),
    "without the last feature": lambda m, x: torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], -1),
    "one in the last feature": lambda m, x: torch.cat([x[..., :-1], torch.ones_like(x[..., -1:])], -1),
    "the mean of the heads": lambda m, x: x.mean(1, keepdim=True).expand_as(x),
    "with the batch for the heads": lambda m, x: x.transpose(0, 1).reshape(x.shape),
    "with the tokens for the heads": lambda m, x: x.transpose(1, 2).reshape(x.shape),
    "of what the cache holds": lambda m, x: x + m.held()[0].mean(),
}
START: dict[str, Callable[..., int]] = {
    "one later": lambda m, start: start + 1,
    "one earlier": lambda m, start: max(start - 1, 0),
    "always the first": lambda m, start: 0,
    "twice as far": lambda m, start: 2 * start,
}
WRITE: dict[str, Callable[..., Any]] = {
    "not written": lambda m, cache, x, start: None,
    "other rows over them": _after(lambda m, cache, x, start: m._write(cache, m.mix(x), start)),
    "other rows under them": _before(lambda m, cache, x, start: m._write(cache, m.mix(x), start)),
    "their double over them": _after(lambda m, cache, x, start: m._write(cache, 2 * x, start)),
    "rolled over them": _after(lambda m, cache, x, start: m._write(cache, x.roll(1, 2), start)),
    "one earlier too": _after(lambda m, cache, x, start: m._write(cache, x, max(start - 1, 0))),
    "one later too": _after(lambda m, cache, x, start: m._write(cache, x, start + 1)),
    "at the end too": _after(lambda m, cache, x, start: m._write(cache, x, m.zeros()[0].shape[m.tokens] - x.shape[2])),
    "the first row again": _after(lambda m, cache, x, start: m._write(cache, x[:, :, :1], 0)),
    "of the next sequence too": _after(lambda m, cache, x, start: _put(cache, cache[0].clone(), _spare(m, x))),
    "ones in a spare sequence": _before(lambda m, cache, x, start: _put(cache, 1.0, _spare(m, x))),
    "of two sequences exchanged": lambda m, cache, x, start: m._write(cache, x.flip(0), start),
    "into one sequence alone": lambda m, cache, x, start: m._write(cache, x[:1], start),
    "some heads": lambda m, cache, x, start: m._write(
        cache, torch.cat([x[:, :1], torch.zeros_like(x[:, 1:])], 1), start
    ),
    "added": lambda m, cache, x, start: m._write(
        cache, x + m._read(cache, len(x), start + x.shape[2])[:, :, start : start + x.shape[2]], start
    ),
    "half of what was there": lambda m, cache, x, start: m._write(
        cache, x + 0.5 * m._read(cache, len(x), x.shape[2])[:, :, : x.shape[2]], start
    ),
    "the cache decays before": _before(lambda m, cache, x, start: cache.mul_(0.9)),
    "the cache decays after": _after(lambda m, cache, x, start: cache.mul_(0.9)),
    "the cache decays": _instead(lambda m, cache, x, start: _with(m, 0.9 * cache, x, start)),
    "emptied before": _before(lambda m, cache, x, start: cache.zero_()),
    "emptied after": _after(lambda m, cache, x, start: cache.zero_()),
    "ones before": _before(lambda m, cache, x, start: cache.fill_(1.0)),
    "half ones before": _before(lambda m, cache, x, start: m.place(cache, 0, m.case.T).fill_(1.0)),
    "half ones after": _after(lambda m, cache, x, start: m.place(cache, 0, 1).fill_(1.0)),
    "ones behind": _after(lambda m, cache, x, start: m.place(cache, start + x.shape[2], 1).fill_(1.0)),
    "zeros over the first": _after(lambda m, cache, x, start: m.place(cache, 0, 1).zero_()),
    "a little added": _after(lambda m, cache, x, start: cache.add_(0.1)),
    "clamped": _after(lambda m, cache, x, start: cache.clamp_(-0.3, 0.3)),
    "squashed in place": _after(lambda m, cache, x, start: cache.tanh_()),
    "rolled in place": _after(lambda m, cache, x, start: cache.copy_(cache.roll(1, m.tokens))),
    "flipped in place": _after(lambda m, cache, x, start: cache.copy_(cache.flip(m.tokens))),
    "sequences rolled in place": _after(lambda m, cache, x, start: cache.copy_(cache.roll(1, 0))),
    "features rolled in place": _after(lambda m, cache, x, start: cache.copy_(cache.roll(1, -1))),
    "in place through float32": _after(lambda m, cache, x, start: cache.copy_(cache.float())),
    "in place through float16": _before(lambda m, cache, x, start: cache.copy_(cache.half())),
    "rounded in place": _after(lambda m, cache, x, start: cache.mul_(4).round_().div_(4)),
    "one number": _after(lambda m, cache, x, start: _put(cache, 0.5, 0, 0, 0, 0)),
    "a row of the past": _after(lambda m, cache, x, start: m.place(cache, 0, 1).mul_(2.0)),
    "the newest over the first": _after(
        lambda m, cache, x, start: m.place(cache, 0, 1).copy_(m.place(cache, start, 1).clone())
    ),
    "the newest scaled": _after(lambda m, cache, x, start: m.place(cache, start, x.shape[2]).mul_(2.0)),
    "the newest mixed": _after(
        lambda m, cache, x, start: m.place(cache, start, 1).copy_(m.mix(m.place(cache, start, 1)))
    ),
    "past rows by another weight": _before(lambda m, cache, x, start: cache.copy_(m.mix(cache))),
    "past rows rotated": _before(lambda m, cache, x, start: cache.copy_(cache.roll(1, -1) * -1)),
    "through a flat view": _after(lambda m, cache, x, start: _put(cache.view(-1), 0.0, slice(None, None, 7))),
    "through a transposed view": _after(lambda m, cache, x, start: cache.transpose(1, -1)[0].mul_(0.5)),
    "through a strided view": _after(
        lambda m, cache, x, start: torch.as_strided(cache, (3,), (1,), 0).copy_(torch.ones(3, dtype=cache.dtype))
    ),
    "by a mask": _after(lambda m, cache, x, start: cache.masked_fill_(cache > 0.5, 0.0)),
    "by a mask of places": _after(
        lambda m, cache, x, start: cache.index_fill_(m.tokens, torch.tensor([0], device=x.device), 0.0)
    ),
    "where nothing was": _instead(lambda m, cache, x, start: torch.where(cache == 0, _with(m, cache, x, start), cache)),
    "where places are even": _instead(
        lambda m, cache, x, start: torch.where(torch.arange(cache.shape[-1]) % 2 == 0, _with(m, cache, x, start), cache)
    ),
    "into V's memory": lambda m, cache, x, start: m._write(m.other(cache), x, start),
    "into V's memory too": _after(lambda m, cache, x, start: m._write(m.other(cache), x, start)),
    "of V's memory": _after(lambda m, cache, x, start: cache.copy_(m.other(cache))),
    "into a copy that is held": lambda m, cache, x, start: m.put(
        [_with(m, one, x, start) if one is cache else one for one in m.held()]
    ),
    "summed by index": _after(
        lambda m, cache, x, start: cache.index_add_(m.tokens, torch.tensor([0]), torch.ones_like(m.place(cache, 0, 1)))
    ),
}
READ: dict[str, Callable[..., Tensor]] = {
    "rolled along the tokens": lambda m, x, cache: x.roll(1, 2),
    "in the opposite order": lambda m, x, cache: x.flip(2),
    "of another sequence": lambda m, x, cache: x.roll(1, 0),
    "of the last sequences": lambda m, x, cache: (
        cache[-len(x) :].transpose(1, 2) if m.own.heads_last else cache[-len(x) :]
    ).narrow(2, 0, x.shape[2]),
    "of one sequence for all": lambda m, x, cache: x[:1].expand_as(x),
    "of another head": lambda m, x, cache: x.roll(1, 1),
    "of another feature": lambda m, x, cache: x.roll(1, 3),
    "a token later": lambda m, x, cache: torch.cat([x[:, :, 1:], x[:, :, :1]], 2),
    "the first for all": lambda m, x, cache: x[:, :, :1].expand_as(x),
    "every second twice": lambda m, x, cache: x[:, :, ::2].repeat_interleave(2, 2)[:, :, : x.shape[2]],
    "sorted": lambda m, x, cache: x.sort(2)[0],
    "halved": lambda m, x, cache: x * 0.5,
    "plus a number": lambda m, x, cache: x + 0.5,
    "by place": lambda m, x, cache: x * (1 + _positions(x)),
    "squashed": lambda m, x, cache: x.tanh(),
    "by another weight": lambda m, x, cache: m.mix(x),
    "through float32": lambda m, x, cache: x.float().to(x.dtype),
    "rounded": lambda m, x, cache: (4 * x).round() / 4,
    "zeros for the first": lambda m, x, cache: torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, 1:]], 2),
    "ones for the last": lambda m, x, cache: torch.cat([x[:, :, :-1], torch.ones_like(x[:, :, :1])], 2),
    "ones where nothing is": lambda m, x, cache: torch.where(x == 0, 1.0, x),
    "plus the mean": lambda m, x, cache: x + cache.mean(),
    "plus the last row": lambda m, x, cache: x + x[:, :, -1:],
    "gathered": lambda m, x, cache: x.index_select(2, torch.arange(x.shape[2]).flip(0)),
    "gathered by numbers": lambda m, x, cache: x.gather(2, x.argsort(2)),
    "with the tokens for the heads": lambda m, x, cache: x.transpose(1, 2).reshape(x.shape),
    "through a flat view of the cache": lambda m, x, cache: cache.view(-1)[: x.numel()].view(x.shape),
    "emptied when it is read": lambda m, x, cache: (x.clone(), cache.zero_())[0],
    "emptied before it is read": lambda m, x, cache: (cache.zero_(), x)[1],
    "halved when it is read": lambda m, x, cache: (x.clone(), cache.mul_(0.5))[0],
    "V's": lambda m, x, cache: m._read(m.other(cache), len(x), x.shape[2]),
}
OUTPUT: dict[str, Callable[..., Tensor]] = {
    "plus the mean of the cache": lambda m, y: y + m.held()[0].mean(),
    "plus a number of the cache": lambda m, y: y + m.held()[0][0, 0, 0, 0],
    "times the largest of V": lambda m, y: y * m.held()[-1].amax(),
    "emptied afterwards": lambda m, y: (y, [cache.zero_() for cache in m.held()])[0],
    "half emptied afterwards": lambda m, y: (y, m.held()[0].zero_())[0],
    "ones afterwards": lambda m, y: (y, m.held()[0].fill_(1.0))[0],
    "some zeros afterwards": lambda m, y: (y, m.place(m.held()[0], 0, 2).zero_())[0],
    "some ones afterwards": lambda m, y: (y, m.place(m.held()[-1], 0, 2).fill_(1.0))[0],
    "decayed afterwards": lambda m, y: (y, [cache.mul_(0.9) for cache in m.held()])[0],
    "rolled afterwards": lambda m, y: (y, m.held()[0].copy_(m.held()[0].roll(1, m.tokens)))[0],
    "replaced by a copy": lambda m, y: (y, m.put([cache.clone() for cache in m.held()]))[0],
    "replaced by a double": lambda m, y: (y, m.put([2 * cache for cache in m.held()]))[0],
    "replaced by new zeros": lambda m, y: (y, m.put(m.zeros()))[0],
    "one replaced by a copy": lambda m, y: (y, m.put([m.held()[0].clone(), *m.held()[1:]]))[0],
    "exchanged": lambda m, y: (y, m.put(m.held()[::-1]))[0],
    "one for both": lambda m, y: (y, m.put([m.held()[0]] * m.count))[0],
    "a view in its place": lambda m, y: (y, m.put([cache[:] for cache in m.held()]))[0],
    "returned as it is": lambda m, y: y + m._read(m.held()[0], len(y), 1).sum((1, 2, 3))[:, None, None],
}
LAYERS: dict[str, Callable[[Tampered, Tampered], Any]] = {
    "one memory": lambda a, b: b.put(a.held()),
    "one memory of K": lambda a, b: b.put([*a.held()[:1], *b.held()[1:]]),
    "one memory of V": lambda a, b: b.put([*b.held()[:-1], *a.held()[-1:]]),
    "views of one memory": lambda a, b: b.put([cache[:] for cache in a.held()]),
    "copies of one memory": lambda a, b: b.put([cache.clone() for cache in a.held()]),
    "each other's": lambda a, b: (held := b.held(), b.put(a.held()), a.put(held)),
    "K of each other": lambda a, b: (
        held := b.held(), b.put([*a.held()[:1], *held[1:]]), a.put([*held[:1], *a.held()[1:]])
    ),
    "halves of one memory": lambda a, b: (
        wide := [torch.cat([cache, cache]) for cache in a.held()],
        a.put([w[: len(w) // 2] for w in wide]),
        b.put([w[len(w) // 2 :] for w in wide]),
    ),
    "memory that is listed": lambda a, b: setattr(b, "more", [a.held()[0], b.held()[-1]]),
    "each its own": lambda a, b: None,
}  # fmt: skip
NOTHING: dict[str, tuple[str, Callable[..., Any]]] = {
    "new rows copied": ("new", lambda m, x: x.clone()),
    "new rows negated twice": ("new", lambda m, x: x.neg().neg()),
    "new rows scaled": ("new", lambda m, x: x * 1.5),
    "new rows of other heads": ("new", lambda m, x: x.contiguous().view(x.shape)),
    "read as a copy": ("read", lambda m, x, cache: x.clone()),
    "read times one": ("read", lambda m, x, cache: x * 1.0),
    "read scaled": ("read", lambda m, x, cache: x * 0.5),
    "read transposed twice": ("read", lambda m, x, cache: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "output plus nothing": ("output", lambda m, y: y + 0.0),
    "output scaled": ("output", lambda m, y: y * 2.0),
}
_TABLES = {
    "new rows": ("new", NEW), "positions:": ("start", START), "written:": ("write", WRITE), "read": ("read", READ),
    "in the end": ("output", OUTPUT), "two layers with": ("layers", LAYERS),
}  # fmt: skip
_ALLOWED = {"float32": THROUGH_FLOAT32, "float16": 1e-3, "bfloat16": 3e-2}
TAMPERINGS: dict[str, Tampering] = {
    **{
        f"{what} {name}": Tampering(stage, run, allowed=_ALLOWED.get(name.split()[-1], EXACT))
        for what, (stage, table) in _TABLES.items()
        for name, run in table.items()
    },
    **{f"nothing: {name}": Tampering(*how, legal=True) for name, how in NOTHING.items()},
}
LEGAL_ONES = sorted(name for name, one in TAMPERINGS.items() if one.legal)


def mutants(cases: list[OwnCase], seed: int) -> list[Mutant]:
    """One of each case. After one that changes nothing, all tamperings come once before one comes twice.

    In every second mutant all sizes are equal.
    """
    rng = random.Random(seed)
    names: list[str] = []
    found = []
    for number, own in enumerate(cases):
        names = names or [*rng.sample(sorted(TAMPERINGS), len(TAMPERINGS)), rng.choice(LEGAL_ONES)]
        name = names.pop()
        calls = "always" if TAMPERINGS[name].legal else rng.choice(CALLS)
        plain = _plain(own, rng, equal=number % 2 == 1, apart=TAMPERINGS[name].legal)
        if TAMPERINGS[name].stage == "layers" and plain.held == "made":
            plain = replace(plain, held="attribute")  # there is nothing to share before the first call
        found.append(Mutant(plain, name, calls, rng.choice(WHICH)))
    return found


def _plain(own: OwnCase, rng: random.Random, *, equal: bool, apart: bool) -> OwnCase:
    """Legal, in float64, with a latent that is narrower than what it is expanded to, of no bias.

    ``apart``: K and V have memory each. What is done to both side by side before they are parted may hide the rows.
    """
    c = own.case
    sizes = {"T": max(c.T, 2), "H": max(c.H, 2), "L": min(c.L, 4), "N": max(c.N, 2), "V": max(c.V, 2)}
    sizes["D"] = max(c.D, 5, c.R + 1)
    rope = c.rope
    if equal:
        n = rng.choice((2, 2, 4))
        sizes = {**dict.fromkeys("BTHNVL", n), "Q": n if c.Q else 0, "R": n if c.R else 0, "D": 2 * n, "groups": 1}
        rope = c.rope if c.R else "none"
    case = replace(
        c, **sizes, rope=rope, fault=LEGAL, dtype="float64", latent_norm=True, bias=False, tied=False, library="",
        pad_values=False, steps=3, chunk=1, forms="absorbed", weight="plain" if equal else c.weight,
    )  # fmt: skip
    # What is not emptied begins again over old rows, as any generated layer does.
    emptied = own.emptied if own.emptied in EMPTIED[:4] else "zero"
    own = replace(own, case=case, emptied=emptied, more=own.more if own.held == "made" else 1)
    return replace(own, joined=own.joined and not apart)
