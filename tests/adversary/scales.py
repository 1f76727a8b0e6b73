"""Broken scales: up-projections of rounded rows in which one step is another than it looks.

:class:`Rounded` is an attention whose rows are rounded by a scale of their own before the up-projection, in one of
``KINDS``; every step of that goes through :meth:`Rounded._at`, where a mutant puts something else. It has to be
refused, or to be right: no farther from the original than the mutant is from itself without any rounding, all its
other steps kept. Batch and tokens are equal, and so are groups and their features, so that no shape tells one axis
from another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.options import Options
from mla_compile.report.report import SiteReport

B = T = 6
H, N, V, L, R, GROUP = 2, 32, 32, 36, 8, 6
OUT = H * (N + V)
FP8 = torch.float8_e4m3fn
ALLOWED = 1.5  # as in the check of a site
EXACT = 1e-4  # of float32, with scores that are squared


@dataclass(frozen=True)
class Kind:
    """``top``: the largest of the rounded numbers; ``product``: by which operators they meet the weight."""

    top: float
    product: str
    groups: bool = False
    flat: bool = False


KINDS = {
    "int8": Kind(127, "_int_mm"),
    "int8 of flat rows": Kind(127, "_int_mm", flat=True),
    "whole numbers in float": Kind(127, "linear"),
    "fake in groups": Kind(127, "fake", groups=True),
    "float8": Kind(448, "float8"),
    "int4": Kind(7, "_int_mm"),
}

Step = Callable[["Rounded", Tensor], Tensor]


class Rounded(nn.Module):
    """q [B,H,1,N+R], latent [B,T,L], rotary [B,T,R] -> [B,H,1,V]."""

    def __init__(self, kind: Kind, steps: dict[str, Step]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(OUT, L, generator=generator) / L**0.5
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.kind, self.steps = kind, steps
        self.rounds = True

    def _at(self, step: str, x: Tensor) -> Tensor:
        return self.steps[step](self, x) if step in self.steps else x

    def forward(self, q: Tensor, latent: Tensor, rotary: Tensor) -> Tensor:
        """The attention."""
        self.q, self.rotary, self.latent = q, rotary, latent
        kv = self._at("joined", self.up(latent)).view(B, T, H, N + V).transpose(1, 2)
        k, v = kv.split([N, V], -1)
        return F.scaled_dot_product_attention(q, torch.cat([k, rotary[:, None].expand(-1, H, -1, -1)], -1), v)

    def up(self, x: Tensor) -> Tensor:
        """The up-projection of x [B,T,L]."""
        kind = self.kind
        x = x.unflatten(-1, (-1, GROUP)) if kind.groups else x.flatten(0, 1) if kind.flat else x
        self.rows = x
        if "scale" in self.steps:
            scale = self.steps["scale"](self, x)
        else:
            scale = self._at("measured", x).abs().amax(-1, keepdim=True).clamp(min=1e-9)
        scale = self._at("both", scale / kind.top)
        self.own = scale
        quotient = self._at("quotient", x / self._at("down", scale))
        if kind.product == "float8":
            quotient = quotient.clamp(-448, 448)
            digits = self._at("digits", quotient.to(FP8).float() if self.rounds else quotient)
        else:
            whole = quotient.round() if self.rounds else quotient
            digits = self.steps["round"](self, quotient) if "round" in self.steps else whole
            digits = self._at("clamp", digits) if "clamp" in self.steps else digits.clamp(-kind.top, kind.top)
            digits = self._at("digits", digits)
        up, of_weight = self._at("up", scale), self._at("weight", self.scale)
        if kind.product == "_int_mm":
            rows = self._at("bytes", digits.to(torch.int8) if self.rounds else digits).reshape(-1, L)
            total = torch._int_mm(rows, self.weight.t()) if self.rounds else rows @ self.weight.t().float()
            total = self._at("total", total.float().view(*x.shape[:-1], OUT))
            return (total * up * of_weight).view(B, T, OUT)
        if kind.product == "linear":
            return self._at("total", F.linear(digits, self.weight.float())) * up * of_weight
        rows = self._at("total", digits * up)
        return F.linear(rows.reshape(B, T, L), self.weight.float()) * of_weight


def _transposed(x: Tensor) -> Tensor:
    return x.unflatten(0, (B, T)).transpose(0, 1).flatten(0, 1) if len(x) == B * T else x.transpose(0, 1)


def _half(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def _largest(x: Tensor, *dims: int) -> Tensor:
    return x.abs().amax(dims, keepdim=True).clamp(min=1e-9)


def _spread(scale: Tensor, x: Tensor) -> Tensor:
    """A scale [B,T,1], one for each row, with the axes of ``x``."""
    return scale.view(-1, 1) if x.dim() == 2 else scale.view(B, T, *[1] * (x.dim() - 2))


def _positions(x: Tensor) -> Tensor:
    return (1 + torch.arange(len(x)) / len(x)).view(-1, *[1] * (x.dim() - 1))


# What is done to a tensor, anywhere.
ANYWHERE: dict[str, Step] = {
    "rolled by a token": lambda m, x: x.roll(1, -2 if not m.kind.groups else 1),
    "rolled by a sequence": lambda m, x: x.roll(1, 0),
    "batch and tokens swapped": lambda m, x: _transposed(x),
    "reshaped instead of swapped": lambda m, x: _transposed(x).reshape(x.shape).flip(0),
    "the last token's": lambda m, x: x[-1:].expand(x.shape),
    "halved": lambda m, x: x * 0.5,
    "squared": lambda m, x: x.square(),
    "the root of": lambda m, x: x.abs().sqrt(),
    "by position": lambda m, x: x * _positions(x),
    "plus a little": lambda m, x: x + 0.3,
    "negated": lambda m, x: -x,
    "with a row written": lambda m, x: torch.slice_scatter(x, torch.ones_like(x[:1]), 0, 0, 1),
    "of the inputs' size": lambda m, x: x * m.q.abs().mean(),
    "shifted by a feature": lambda m, x: x.roll(1, -1),
    "shifted by a group": lambda m, x: x.roll(1, -2),
}
STEPS = ("measured", "both", "down", "up", "quotient", "digits", "total", "weight", "joined")

# What is done at one step only.
PARTICULAR: dict[str, dict[str, Step]] = {
    "scale of the rotary keys": {"scale": lambda m, x: _spread(_largest(m.rotary, -1), x)},
    "scale of half the row": {"measured": lambda m, x: _half(x)},
    "scale of half the row, given back whole": {"down": lambda m, s: _largest(_half(m.rows), -1) / m.kind.top},
    "scale along the tokens": {"scale": lambda m, x: _largest(x, 0)},
    "scale of the largest, not of the magnitude": {"scale": lambda m, x: x.amax(-1, keepdim=True).clamp(min=1e-9)},
    "scale of the smallest": {"scale": lambda m, x: x.abs().amin(-1, keepdim=True).clamp(min=1e-9)},
    "scale of the mean": {"scale": lambda m, x: x.abs().mean(-1, keepdim=True)},
    "scale of three deviations": {"scale": lambda m, x: x.std(-1, keepdim=True) * 3},
    "scale with a ceiling": {"scale": lambda m, x: _largest(x, -1).clamp(max=0.5)},
    "scale of other rows": {"scale": lambda m, x: _largest(x * 2.5 - 1.0, -1)},
    "scale of all": {"scale": lambda m, x: x.abs().max()},
    "scale missing": {"up": lambda m, s: torch.ones_like(s)},
    "scale missing below": {"down": lambda m, s: torch.ones_like(s)},
    "scale upside down": {"up": lambda m, s: 1 / s},
    "scale twice": {"total": lambda m, x: x * m.own},
    "scale given back of the mean": {"up": lambda m, s: s.mean() * torch.ones_like(s)},
    "clamped to half": {"clamp": lambda m, d: d.clamp(-m.kind.top // 2, m.kind.top // 2)},
    "clamped on one side": {"clamp": lambda m, d: d.clamp(0, m.kind.top)},
    "clamped a little": {"clamp": lambda m, d: d.clamp(-m.kind.top, m.kind.top * 0.75)},
    "clamped before rounding": {"quotient": lambda m, d: d.clamp(-m.kind.top * 0.6, m.kind.top * 0.6)},
    "not clamped, scale too small": {"clamp": lambda m, d: d, "both": lambda m, s: s * 0.4},
    "not clamped, scale much too small": {"clamp": lambda m, d: d, "both": lambda m, s: s / 1000},
    "clamped, scale too small": {"both": lambda m, s: s * 0.4},
    "floor": {"round": lambda m, d: d.floor()},
    "trunc": {"round": lambda m, d: d.trunc()},
    "ceil": {"round": lambda m, d: d.ceil()},
    "cut by a cast": {"round": lambda m, d: d.to(torch.int32).float()},
    "not rounded": {"round": lambda m, d: d},
    "rounded to tens": {"round": lambda m, d: d.round(decimals=-1)},
    "rounded to three numbers": {"round": lambda m, d: (d / m.kind.top).round() * m.kind.top},
    "rounded to seven numbers": {"round": lambda m, d: (d * (3 / m.kind.top)).round() * (m.kind.top / 3)},
    "one bit": {"both": lambda m, s: s * m.kind.top},
    "two bits": {"both": lambda m, s: s * (m.kind.top / 3)},
    "signs": {"round": lambda m, d: d.sign() * m.kind.top},
    "noise": {"round": lambda m, d: (d + (d * 1e4).sin()).round()},
    "zero point dropped": {"round": lambda m, d: (d + 20).round()},
    "zero point of the rows dropped": {"round": lambda m, d: (d - d.amin(-1, keepdim=True)).round()},
    "zero point given back": {"quotient": lambda m, d: d * 0.5 + 3, "total": lambda m, x: x},
    "cast to bytes without a sign": {"bytes": lambda m, b: b.to(torch.uint8).to(torch.int8).to(b.dtype)},
    "wrapped": {"round": lambda m, d: (d * 3).round().to(torch.int8).float() / 3},
    "digits of another token": {"bytes": lambda m, b: b.roll(1, 0)},
    "digits of the last feature zeroed": {"digits": lambda m, d: torch.cat([d[..., :-1], d[..., -1:] * 0], -1)},
    "one digit for all": {"digits": lambda m, d: d[..., :1].expand(d.shape)},
    "weight scale by token": {"weight": lambda m, w: w * (1 + torch.arange(B * T if m.kind.flat else T) / T)[:, None]},
    "weight scale by rows": {"weight": lambda m, w: w * m.latent.abs().mean()},
    "rows written after they were rounded": {"joined": lambda m, y: (m.latent.mul_(2.0), y)[1]},
    "rows written between scale and rounding": {"both": lambda m, s: (m.latent.mul_(2.0), s)[1]},
    "digits written": {"digits": lambda m, d: d.clone().index_fill_(0, torch.tensor([0]), 3.0)},
    "group boundaries off by one": {
        "up": lambda m, s: s.expand(m.rows.shape).flatten(2).roll(1, -1).view(m.rows.shape) if m.kind.groups else s * 2
    },
    "groups of other groups": {"measured": lambda m, x: x.transpose(-1, -2) if m.kind.groups else x * 0.3},
}  # fmt: skip

MUTANTS: dict[str, dict[str, Step]] = {
    **PARTICULAR,
    **{f"{step} {name}": {step: fn} for step in STEPS for name, fn in ANYWHERE.items()},
}


def given(draw: int) -> tuple[Tensor, ...]:
    """Inputs; the rows differ in size, and so do their features."""
    generator = torch.Generator().manual_seed(draw)
    q, latent, rotary = (torch.randn(s, generator=generator) for s in ((B, H, 1, N + R), (B, T, L), (B, T, R)))
    size = 10 ** (torch.rand(B, T, 1, generator=generator) - 0.5)
    return q, latent * size * torch.linspace(0.4, 1.6, L), rotary


def check_scales(kind: str, steps: dict[str, Step]) -> SiteReport | None:
    """What was said of a mutant; None where it does not run. Raises AssertionError where its numbers are others."""
    module = Rounded(KINDS[kind], steps)
    try:
        with torch.no_grad():
            expected = [copy.deepcopy(module)(*given(draw)) for draw in range(2)]
    except (RuntimeError, IndexError):
        return None
    compiled, site = _compiled(module)
    unrounded = Rounded(KINDS[kind], steps)
    unrounded.rounds = False
    for draw, wanted in enumerate(expected):
        with torch.no_grad():
            got, fine = compiled(*given(draw))[0], unrounded(*given(draw))
        assert torch.equal(got.isfinite(), wanted.isfinite()), "NaN in other places"
        if wanted.isfinite().all():
            # Refused, or made of rows that are rounded already: nothing but the order of sums differs.
            allowed = max(ALLOWED * difference(fine, wanted) if site.verdict == "absorbed" else 0.0, EXACT)
            error = difference(got, wanted)
            assert error <= allowed, f"{site.verdict}: {error:.2e} from the original, allowed {allowed:.2e}"
    return site


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the root mean square of ``b``."""
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def _compiled(module: Rounded) -> tuple[nn.Module, SiteReport]:
    with torch.no_grad():
        traced = make_fx(
            lambda *x: (module(*x),), tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*given(0))  # fmt: skip
        outcome = pipeline.run(
            capture.from_graph_module(traced), Options(forms="absorbed", codegen="eager", dequantize="step")
        )
    (site,) = outcome.report.sites
    return emit.to_plain_graph_module(outcome.program), site
