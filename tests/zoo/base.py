"""What the styles of the zoo share: dims, seeded weights, expected outcomes and the ways a session carries its cache.

A style is a file of this folder with

* a docstring: who writes this, and why absorbing it is legal or not;
* ``EXPECTED``: what must become of its attentions in a decode step (:class:`Absorbed`, :class:`Refused`, ...);
* ``build(dims)``: the module, seeded by ``dims`` and in its dtype;
* ``session(module)``: a new decode session with an empty cache. It returns the step: x [B,S,D] of the next tokens in,
  y [B,S,D] out. ``module`` may be the compiled or the optimized one. Where the caller holds the cache, the step has it
  as its attribute ``cache``, so that the test can compare what is in it (see :class:`Carry`). Caches in attributes or
  buffers of the module are compared without that.
* optionally ``EXPORTED``: where the outcome of torch.export's door differs, that outcome, or :class:`NotExported` with
  the reason why torch.export cannot take the module;
* optionally ``COMPILED``: where the outcome of ``torch.compile`` differs, that outcome;
* optionally ``LENGTH``: the capacity of a static cache, where it is not :data:`CAPACITY`;
* optionally ``LEGAL = True`` where absorption would be right and is refused all the same, for the reason in the
  docstring;
* optionally ``TOLERANCE``, the relative error allowed, where the style itself computes below float64.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.codes import CODES, Code
from mla_compile.core.records import SiteReport

CAPACITY = 24
"""Tokens that fit into a static cache; no session of the test is longer."""


@dataclass(frozen=True)
class Dims:
    """The sizes of one layer, in the letters of the project, and what its weights are made of."""

    B: int = 2
    D: int = 11
    H: int = 3
    L: int = 7
    Q: int = 9
    N: int = 6
    R: int = 4
    V: int = 5
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def random(self) -> Random:
        return Random(self)


class Random:
    """Seeded weights, one after the other."""

    def __init__(self, dims: Dims) -> None:
        self.dtype = dims.dtype
        self.generator = torch.Generator().manual_seed(dims.seed)

    def tensor(self, *shape: int, scale: float | None = None) -> Tensor:
        """Normal numbers; ``scale`` keeps the size of rows of the last axis by default."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (values * (shape[-1] ** -0.5 if scale is None else scale)).to(self.dtype)

    def weight(self, *shape: int, scale: float | None = None) -> nn.Parameter:
        return nn.Parameter(self.tensor(*shape, scale=scale))

    def linear(self, wide: int, out: int, bias: bool = False, scale: float = 1.0) -> nn.Linear:
        layer = nn.Linear(wide, out, bias=bias, dtype=self.dtype)
        with torch.no_grad():
            layer.weight.copy_(self.tensor(out, wide) * scale)
            if bias:
                layer.bias.copy_(self.tensor(out, scale=1.0))
        return layer

    def norm(self, width: int) -> nn.RMSNorm:
        layer = nn.RMSNorm(width, eps=1e-6, dtype=self.dtype)
        with torch.no_grad():
            layer.weight.copy_(1 + self.tensor(width, scale=0.3))
        return layer


class Layer(nn.Module):
    """The usual weights of an MLA layer. Styles write their own forward over them, or add weights of their own."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = d = dims
        self.random = r = dims.random()
        self.q = r.linear(d.D, d.H * (d.N + d.R), scale=2.0)  # scores that are not all alike
        self.down = r.linear(d.D, d.L + d.R)
        self.norm = r.norm(d.L)
        self.up = r.linear(d.L, d.H * (d.N + d.V))
        self.out = r.linear(d.H * d.V, d.D)
        self.scale = (d.N + d.R) ** -0.5


class Usual(Layer):
    """The usual decode step, in parts that a style replaces. Caches are rows [B,T,L] and [B,T,R] that callers carry."""

    def forward(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> Any:
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        o = self.attend(self.queries(x, start), self.join(k, r), v)
        return self.finish(o), c, r

    def append(self, x: Tensor, c_past: Tensor, r_past: Tensor) -> tuple[Tensor, Tensor]:
        start, S = c_past.shape[1], x.shape[1]
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, rope(r, torch.arange(start, start + S))], 1)

    def expand(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """[B,H,T,N] and [B,H,T,V]."""
        d = self.dims
        kv = self.up(c).view(c.shape[0], c.shape[1], d.H, d.N + d.V).transpose(1, 2)
        k, v = kv.split([d.N, d.V], -1)
        return k, v

    def join(self, k: Tensor, r: Tensor) -> Tensor:
        return torch.cat([k, r[:, None].expand(-1, k.shape[1], -1, -1)], -1)

    def queries(self, x: Tensor, start: int) -> Tensor:
        """[B,H,S,N+R]."""
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        return torch.cat([q[..., : d.N], rope(q[..., d.N :], torch.arange(start, start + x.shape[1]))], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B,H,S,V]."""
        mask = causal(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)

    def finish(self, o: Tensor) -> Tensor:
        return self.out(o.transpose(1, 2).flatten(2))


class Buffered(Usual):
    """K and V per head go into memory of the layer's own; a style says how. The cache of K and V [B,H,T,N+R], [B,H,T,V]
    that :meth:`empty` makes has room for more sequences than are used."""

    def empty(self, *outer: int) -> tuple[Tensor, Tensor]:
        d = self.dims
        outer = outer or (d.B + 1,)
        k, v = (torch.zeros(*outer, d.H, CAPACITY, width, dtype=d.dtype) for width in (d.N + d.R, d.V))
        return k, v

    def hold(self, k: Tensor, v: Tensor) -> None:
        """As registered buffers, which :meth:`reset` empties."""
        self.register_buffer("k_cache", k)
        self.register_buffer("v_cache", v)

    def reset(self) -> None:
        self.k_cache.zero_()
        self.v_cache.zero_()

    def step(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens, heads first."""
        d = self.dims
        c, r = self.down(x).split([d.L, d.R], -1)
        k, v = self.expand(self.norm(c))
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        return q, self.join(k, rope(r, positions)), v

    def over(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keep = torch.arange(k.shape[2]) <= positions[:, None]
        return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=keep))


def at_numbers(module: Any) -> Callable[[Tensor], Tensor]:
    """A session in which the caller counts: ``module(x, start)``, after ``module.reset()``."""
    module.reset()
    start = 0

    def step(x: Tensor) -> Tensor:
        nonlocal start
        y: Tensor = module(x, start)
        start += x.shape[1]
        return y

    return step


def at_positions(module: Any) -> Callable[[Tensor], Tensor]:
    """The same with the positions as a tensor: ``module(x, positions)``."""
    module.reset()
    start = 0

    def step(x: Tensor) -> Tensor:
        nonlocal start
        y: Tensor = module(x, torch.arange(start, start + x.shape[1]))
        start += x.shape[1]
        return y

    return step


def carried(module: Any) -> Carry:
    """The session of :class:`Usual`."""
    return Carry(module, *rows(module, module.dims.L, module.dims.R))


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotation by halves; ``x`` [...,S,R] with one position for each of the S rows."""
    half = x.shape[-1] // 2
    angle = positions.to(x.dtype)[:, None] * 0.5 ** torch.arange(half, dtype=x.dtype, device=x.device)
    a, b, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(S: int, T: int) -> Tensor:
    """[S,T], True where the query may see the key: the last query sees all keys."""
    return torch.arange(T)[None] <= torch.arange(T - S, T)[:, None]


# What may become of a style.


@dataclass(frozen=True)
class Outcome:
    """``sites`` attentions with ``code`` in a decode step; a function of the dims where the number depends on them."""

    code: str
    sites: int | Callable[[Dims], int] = 1

    def __post_init__(self) -> None:
        Code(self.code)  # a ValueError where there is no such code

    @property
    def verdict(self) -> str:
        return CODES[Code(self.code)].verdict

    def counted(self, dims: Dims) -> Counter[str]:
        return Counter({self.code: self.sites if isinstance(self.sites, int) else self.sites(dims)})


class Absorbed(Outcome):
    def __init__(self, sites: int | Callable[[Dims], int] = 1) -> None:
        super().__init__("absorbed", sites)


class _Left(Outcome):
    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.verdict == type(self).__name__.lower(), f"{self.code} is a code of sites that are {self.verdict}"


class Refused(_Left):
    """Refused with this code."""


class Kept(_Left):
    """Legal, and left as it is for this reason."""


class NotMla(Outcome):
    def __init__(self, sites: int | Callable[[Dims], int] = 1) -> None:
        super().__init__("not_mla", sites)


@dataclass(frozen=True)
class InPart:
    """One attention of which only ``sides`` are absorbed (or some of their columns); the rest stays, with ``code``.

    ``some heads`` stand for whichever it is.
    """

    sides: str
    code: str
    verdict = "in part"

    def __post_init__(self) -> None:
        Code(self.code)

    def counted(self, dims: Dims) -> Counter[str]:
        return Counter({f"{self.sides}{_KEPT}{self.code}": 1})


_KEPT = " in part, kept: "


def told(site: SiteReport) -> str:
    """What became of an attention, in the words in which outcomes are counted."""
    if not site.kept:  # the whole, or all of its heads in groups
        return str(site.code)
    parts = dict.fromkeys(re.sub(r"heads? [\d-]+ of \d+", "some heads", part) for part in site.parts)
    return " and ".join(parts) + _KEPT + ", ".join(dict.fromkeys(str(k.code) for k in site.kept))


def verdict_of(said: str) -> str:
    return "absorbed" if _KEPT in said else CODES[Code(said)].verdict


@dataclass(frozen=True)
class NoAttention:
    """Nothing in the graph is a softmax attention, and nothing is reported."""

    verdict = "none"

    def counted(self, dims: Dims) -> Counter[str]:
        return Counter()


@dataclass(frozen=True)
class NotExported:
    """torch.export cannot take the module: ``reason`` is a part of what it says."""

    reason: str


EXPANDED_CACHE = Refused("expanded_cache")
"""What becomes of caches of K and V per head that cannot be kept as rows: those of a module that only its owner could
change. ``torch.export`` leaves them as they are, and ``torch.compile`` where it cannot keep rows beside them."""


@dataclass(frozen=True)
class NotCaptured:
    """No graph can be made of it that we may read: ``reason`` is a part of what is said, the original runs."""

    reason: str
    verdict = "none"

    def counted(self, dims: Dims) -> Counter[str]:
        return Counter()


Expected = Outcome | InPart | NoAttention | NotCaptured | tuple[Outcome | InPart, ...]


def counted(expected: Expected, dims: Dims) -> Counter[str]:
    """Code, or what :func:`told` says of one absorbed in part -> number of attentions."""
    several = expected if isinstance(expected, tuple) else (expected,)
    return sum((e.counted(dims) for e in several), Counter())


# Ways to carry a cache.


class Carry:
    """The caller carries the cache: ``module(x, *cache)`` returns ``(y, *cache)``."""

    def __init__(self, module: Callable[..., Any], *cache: Any) -> None:
        self.module, self.cache = module, cache

    def __call__(self, x: Tensor) -> Tensor:
        y, *cache = self.module(x, *self.cache)
        self.cache = tuple(cache)
        return y


def rows(module: Any, *widths: int, heads: int | None = None) -> tuple[Tensor, ...]:
    """Empty caches [B,0,width], or [B,heads,0,width]."""
    d = module.dims
    lead = (d.B,) if heads is None else (d.B, heads)
    return tuple(torch.zeros(*lead, 0, width, dtype=d.dtype) for width in widths)
