"""Writes in place between the latent and the output, in the module's own code: tracing turns them into new values.

The base is :class:`tests.support.generated_module.GeneratedMLA`; each entry of ``WRITES`` writes at one stage of it.
``legal`` says what the oracle must find: whether K and V as the attention reads them are still images of one row per
token; if not, it is the code of what the write breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.codes import Code
from mla_compile.options import Options
from mla_compile.report.report import SiteReport
from tests.adversary.check import EXACT, same_numbers
from tests.adversary.oracle import BOTH, rank_of
from tests.support.generated_module import GeneratedMLA
from tests.support.generator import Case


@dataclass(frozen=True)
class Write:
    """``run(module, *tensors)`` at ``stage``.

    ``between``: the latent, when the keys were computed and the values were not; ``rows``: k [B,T,H,N] and v;
    ``joined``: k [B,H,T,N+R] and v; ``scores``; ``probs``; ``after``: nothing, when the output was computed.
    """

    stage: str
    run: Callable[..., Any]
    legal: Literal[True] | Code | None = None


def _put(x: Tensor, value: Any, *where: Any) -> None:
    x[where] = value


def _moved(x: Tensor) -> Tensor:
    return x.roll(1, 1).clone()


ALL = slice(None)
WRITES: dict[str, Write] = {
    # Of the latent, or of the cache that it is a view of, when the keys were computed and the values were not.
    "latent scaled after the keys": Write("between", lambda m, c: c.mul_(2.0), True),
    "latent rolled after the keys": Write("between", lambda m, c: c.copy_(_moved(c)), Code.TOKEN_MIXING),
    "first row of the latent zeroed after the keys": Write(
        "between", lambda m, c: _put(c, 0.0, ALL, 0), Code.TOKEN_MIXING
    ),
    "last column of the latent zeroed after the keys": Write("between", lambda m, c: _put(c, 0.0, ALL, ALL, -1), True),
    "latent squashed after the keys": Write("between", lambda m, c: c.tanh_(), Code.NONLINEAR),
    "positions added to the latent after the keys": Write(
        "between", lambda m, c: c.add_(torch.arange(c.shape[1], dtype=c.dtype)[:, None]), Code.POSITION_DEPENDENT
    ),
    # Of the latent when both are computed: the attention must read what they were computed from.
    "latent zeroed before the scores": Write("joined", lambda m, k, v: m.rows[0].zero_(), True),
    "rotary keys zeroed before the scores": Write("joined", lambda m, k, v: m.rows[1].zero_(), True),
    "latent rolled before the scores": Write("joined", lambda m, k, v: m.rows[0].copy_(_moved(m.rows[0])), True),
    "latent zeroed after the attention": Write("after", lambda m: m.rows[0].zero_(), True),
    # Of the expanded keys and values.
    "keys scaled": Write("rows", lambda m, k, v: k.mul_(1.7), True),
    "keys scaled by out=": Write("rows", lambda m, k, v: torch.mul(k, 2.0, out=k), True),
    "keys of one token zeroed": Write("rows", lambda m, k, v: _put(k, 0.0, ALL, 0), Code.TOKEN_MIXING),
    "keys of one head zeroed": Write("rows", lambda m, k, v: _put(k, 0.0, ALL, ALL, 0), True),
    "keys of one head are another's": Write("rows", lambda m, k, v: _put(k, k[:, :, 1].clone(), ALL, ALL, 0), True),
    "keys of one token are the next one's": Write(
        "rows", lambda m, k, v: _put(k, k[:, 1].clone(), ALL, 0), Code.TOKEN_MIXING
    ),
    "one column rotated": Write(
        "rows",
        lambda m, k, v: k[..., 0].mul_(torch.arange(k.shape[1], dtype=k.dtype).cos()[:, None]),
        Code.TOKEN_MIXING,
    ),
    "keys written through a flat view": Write("joined", lambda m, k, v: _flat(k)[:: k.shape[-1] + 1].zero_(), None),
    "keys masked by their sign": Write("rows", lambda m, k, v: k.masked_fill_(k > 0, 0.0), Code.NONLINEAR),
    "keys clamped": Write("rows", lambda m, k, v: k.clamp_(-0.3, 0.3), Code.NONLINEAR),
    "values of one token written by index": Write(
        "rows", lambda m, k, v: v.index_copy_(1, torch.tensor([1]), torch.ones_like(v[:, :1])), Code.TOKEN_MIXING
    ),
    "values accumulated": Write("rows", lambda m, k, v: v.cumsum_(1), Code.TOKEN_MIXING),
    "values of all tokens are the first one's": Write(
        "rows", lambda m, k, v: v.copy_(v[:, :1].clone()), Code.TOKEN_MIXING
    ),
    "values scaled by the keys' norm": Write(
        "rows", lambda m, k, v: v.mul_(k.norm(dim=-1, keepdim=True)), Code.NONLINEAR
    ),
    "keys plus a constant": Write("rows", lambda m, k, v: k.add_(0.5), True),
    "rotary part of the joined keys overwritten": Write("joined", lambda m, k, v: _put(k, 0.3, ..., -1), True),
    "joined keys of one token zeroed": Write("joined", lambda m, k, v: _put(k, 0.0, ALL, ALL, 0), Code.TOKEN_MIXING),
    "joined keys of two heads swapped": Write(
        "joined", lambda m, k, v: _put(k, k[:, [1, 0]].clone(), ALL, slice(0, 2)), True
    ),
    "joined keys of two tokens swapped": Write(
        "joined", lambda m, k, v: _put(k, k[:, :, [1, 0]].clone(), ALL, ALL, slice(0, 2)), Code.TOKEN_MIXING
    ),
    # Of what comes later: absorbed or not, the numbers stay.
    "scores of the first key lowered": Write("scores", lambda m, s: s[..., 0].sub_(1.0)),
    "scores replaced in place": Write("scores", lambda m, s: s.copy_(s.flip(0))),
    "probabilities of the first key zeroed": Write("probs", lambda m, p: _put(p, 0.0, ..., 0)),
    "probabilities renormalised": Write("probs", lambda m, p: p.div_(p.sum(-1, keepdim=True) + 0.1)),
    "input zeroed after the projections": Write("joined", lambda m, k, v: m.x.zero_()),
}


def _flat(k: Tensor) -> Tensor:
    return k.as_strided((k.numel(),), (1,)) if k.is_contiguous() else k[..., 0, :].unsqueeze(-1)[..., 0]


class Aliased(GeneratedMLA):
    """The generated module with one write in place; ``seen`` are the keys and values of the last eager call."""

    def __init__(self, case: Case, write: Write) -> None:
        super().__init__(case)
        self.write = write
        self.seen: tuple[Tensor, Tensor] | None = None

    def forward(
        self, x: Tensor, positions: Tensor, keep: Tensor | None, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """As the base's; the state that is returned is written too where the latent is a view of it."""
        self.x = x
        result = super().forward(x, positions, keep, state)
        self._write("after")
        return result

    def _write(self, stage: str, *tensors: Tensor) -> None:
        if self.write.stage == stage:
            self.write.run(self, *tensors)

    def _cached(self, x: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Any:
        latent, rope, state = super()._cached(x, positions, state)
        self.rows = latent, rope
        return latent, rope, state

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super()._expand(latent)
        if self.write.stage == "between":
            self.write.run(self, latent)
            v = super()._expand(latent)[1]
        return k, v

    def _faulty(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self._write("rows", k, v)
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        self._write("joined", k, v)
        self.seen = k.clone(), v.clone()
        return super()._attend(q, k, v, keep)

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super()._product(q, k)
        self._write("scores", scores)
        return scores

    def _softmax(self, scores: Tensor) -> Tensor:
        probs = super()._softmax(scores)
        self._write("probs", probs)
        return probs


def check_write(
    case: Case, write: Write, calls: int, forms: str = "absorbed"
) -> tuple[SiteReport, dict[tuple[str, ...], int], int]:
    """Runs one call or several, the first after ``case.T`` random tokens, rewritten and in eager mode.

    Returns the report of the last call, the ranks of K and V together and of each that the oracle finds, and the
    largest that is legal;
    raises AssertionError where results, inputs or caches differ.
    """
    module, eager = Aliased(case, write), Aliased(case, write)
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [[case.T if s == 0 else s for s in e.shape] for e in module.empty_state()]
    past = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    states = [past, past]
    for done in range(case.T, case.T + calls * case.chunk, case.chunk):
        x = torch.randn(case.B, case.chunk, case.D, generator=generator, dtype=torch.float64)
        values = [x, torch.arange(done, done + case.chunk), *_keep(case, done, case.chunk)]
        given = [[v.clone() for v in (*values, *state)] for state in states]
        for m in (module, eager):
            m.start = done
        compiled, report = _compiled(module, given[0], forms)
        with torch.no_grad():
            got, expected = compiled(*given[0]), _call(eager, given[1])
        for what, pair in (("result", (got, expected)), ("input", given), ("cache", _caches(module, eager))):
            for k, (a, e) in enumerate(zip(*pair, strict=True)):
                same_numbers(a, e, EXACT, f"{what} {k} after {done} tokens")
        states = [list(r[1 : 1 + len(past)]) for r in (got, expected)]
    limit = case.L + case.R + 1
    ranks = {sides: rank_of(_sides(case, write, sides), limit) for sides in (BOTH, *((s,) for s in BOTH))}
    return report, ranks, limit


def _caches(*modules: Aliased) -> list[list[Tensor]]:
    return [[b for b in m.buffers() if b.is_floating_point()] for m in modules]


def _keep(case: Case, done: int, count: int) -> list[Tensor]:
    if case.mask == "none":
        return []
    length = case.capacity if case.cache in ("index_copy", "slice") else done + count
    return [(torch.arange(length) <= torch.arange(done, done + count)[:, None]).expand(case.B, -1, -1)]


def _call(module: Aliased, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, positions, *rest = values
    keep = rest.pop(0) if module.case.mask != "none" else None
    return module(x, positions, keep, tuple(rest))


def _compiled(module: Aliased, values: list[Tensor], forms: str) -> tuple[Callable[..., Any], SiteReport]:
    def call(*given: Tensor) -> tuple[Tensor, ...]:
        return _call(module, given)

    before = [b.clone() for b in module.buffers()]
    with torch.no_grad():
        traced = make_fx(call, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(
            *(v.clone() for v in values)
        )
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)  # tracing ran the writes
        program = capture.from_graph_module(traced)
        outcome = pipeline.run(program, Options.parse({"forms": forms, "fold": "never"}, codegen="eager"))
    (site,) = outcome.report.sites
    return emit.to_plain_graph_module(outcome.program), site


def _sides(case: Case, write: Write, sides: Sequence[str]) -> Iterator[Tensor]:
    """[K | V] of random first calls, or one of them, one line per token."""
    module = Aliased(case, write)
    for draw in range(400):
        x = torch.randn(case.B, case.T, case.D, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
        with torch.no_grad():
            _call(module, [x, torch.arange(case.T), *_keep(case, 0, case.T), *module.empty_state()])
        assert module.seen is not None
        seen = [t for side, t in zip(BOTH, module.seen, strict=True) if side in sides]
        yield torch.cat([t.transpose(1, 2).flatten(2).flatten(0, 1) for t in seen], 1)
