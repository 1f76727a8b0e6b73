"""Error of the absorbed attention against a float64 run of the original, over the error of the original itself.

    python benchmarks/precision.py                        # float32, bfloat16, float16; three models; both lowerings
    python benchmarks/precision.py --models v3 --dtypes bfloat16 --seeds 10 -v
    python benchmarks/precision.py --dtypes bfloat16 --cores sdpa --lowerings op --folds never,always --heads 16 \
        --lengths 1024 --seeds 2 --out benchmarks/results/precision_folds.json      # the data of docs/numerics.md

``--level layer`` (the default) is one attention layer on a cache: query projections, attention, W_o. ``--level site``
is only what absorption rewrites, from the queries to the output before W_o, where nothing that both forms share hides a
difference. Inputs and weights are rounded to the dtype first: what is measured is the arithmetic. The error is the RMS
of the difference over the RMS of the float64 result; the ratio is absorbed / original, per seed, length and scale.

Scales: ``plain`` (unit rows and queries, scores of about 1), ``sharp`` (queries 8 times larger, softmax near one-hot),
``outlier`` (a few latent columns 30 times larger, as in trained models), ``offset`` (rows share a large common part,
which cancels).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import DTYPES, MODELS, machine, names, table, words, write

import torch  # isort: skip  # after common, which sets the environment
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.core.dims import Dims
from mla_compile.options import Options
from mla_compile.runtime.folds import folded_values

MEDIAN, WORST = 1.0, 1.2  # what is required of the ratio
SCALES = ("plain", "sharp", "outlier", "offset")


class Attention(nn.Module):
    """Attention over a cached latent; as a layer also the query projections and the output projection."""

    def __init__(self, d: Dims, core: str, layer: bool, generator: torch.Generator | None, gain: float = 1.0) -> None:
        super().__init__()
        self.d, self.core = d, core

        def weight(rows: int, columns: int) -> nn.Parameter:
            values = torch.empty(rows, columns)
            if generator is not None:
                values.normal_(generator=generator).mul_(columns**-0.5)
            return nn.Parameter(values, requires_grad=False)

        D = d.D or 0
        self.up = weight(d.H * (d.N + d.V), d.L)
        self.query_down = weight(d.Q, D) if layer and d.Q else None
        self.query = weight(d.H * (d.N + d.R), d.Q or D) if layer else None
        self.out = weight(D, d.H * d.V) if layer else None
        if self.query is not None:
            self.query.mul_(gain)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """Hidden state [B,1,D] (or queries [B,1,H*(N+R)]), latent [B,T,L], rope [B,T,R] -> [B,1,D] (or [B,1,H*V])."""
        d, (B, T, _) = self.d, latent.shape
        if self.query_down is not None:
            x = F.linear(x, self.query_down)
            x = F.rms_norm(x, (x.shape[-1],))
        q = x if self.query is None else F.linear(x, self.query)
        q = q.view(B, 1, d.H, d.N + d.R).transpose(1, 2)
        kv = F.linear(latent, self.up).view(B, T, d.H, d.N + d.V).transpose(1, 2)
        k, v = kv.split([d.N, d.V], -1)
        k = torch.cat([k, rope[:, None].expand(-1, d.H, -1, -1)], -1)
        scale = (d.N + d.R) ** -0.5
        if self.core == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) * scale
            out = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)
        out = out.transpose(1, 2).reshape(B, 1, -1)
        return out if self.out is None else F.linear(out, self.out)


def draw(d: Dims, scale: str, T: int, B: int, layer: bool, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden state (or queries), latent and rotary rows of one scale, in float32."""
    x = torch.randn(B, 1, (d.D or 0) if layer else d.H * (d.N + d.R), generator=generator)
    latent = torch.randn(B, T, d.L, generator=generator)
    rope = torch.randn(B, T, d.R, generator=generator)
    if scale == "sharp" and not layer:
        x = x * 8
    elif scale == "outlier":
        latent[..., :: d.L // 4] *= 30
    elif scale == "offset":
        latent = latent + 10 * torch.randn(1, 1, d.L, generator=generator)
    return x, latent, rope


def compiled(module: Attention, inputs: tuple[Tensor, ...], lowering: str, fold: str) -> Callable[..., Tensor]:
    """The module with its attention absorbed, run without Inductor: the same kernels as in the original."""
    traced = make_fx(module, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
    options = Options.parse({"lowering": lowering, "forms": "absorbed", "fold": fold, "strict": True})
    outcome = pipeline.run(capture.from_graph_module(traced), options)
    if outcome.absorbed != 1:
        raise SystemExit(f"not absorbed: {outcome.report.summary()}")
    if fold == "always" and not outcome.program.folds:
        raise SystemExit("nothing was folded: folds need the projections beside the attention, --level layer")
    return emit.to_plain_graph_module(outcome.program, folded_values(outcome.program))


def error(value: Tensor, truth: Tensor) -> float:
    """RMS of the difference over the RMS of the truth."""
    return float((value.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per model, seed, scale, dtype, core, length and lowering."""
    layer = args.level == "layer"
    for name in args.models:
        d = MODELS[name].dims
        d = replace(d, H=min(d.H, args.heads or d.H))
        for seed in range(args.seeds):
            for gain in dict.fromkeys(8.0 if layer and s == "sharp" else 1.0 for s in args.scales):
                base = Attention(d, "sdpa", layer, torch.Generator().manual_seed(seed), gain)
                scales = [s for s in args.scales if (8.0 if layer and s == "sharp" else 1.0) == gain]
                for dtype in args.dtypes:
                    own = _converted(base, d, layer, DTYPES[dtype])
                    exact = _converted(own, d, layer, torch.float64)
                    for scale in scales:
                        for T in args.lengths:
                            drawn = draw(d, scale, T, args.batch, layer, torch.Generator().manual_seed(1000 + seed))
                            inputs = tuple(x.to(DTYPES[dtype]) for x in drawn)
                            truth = exact(*(x.double() for x in inputs))
                            key = {"model": name, "H": d.H, "dtype": dtype, "scale": scale, "T": T, "seed": seed}
                            for own.core in args.cores:
                                yield from _rows(key | {"core": own.core}, own, inputs, truth, args)


def _converted(module: Attention, d: Dims, layer: bool, dtype: torch.dtype) -> Attention:
    copy = Attention(d, module.core, layer, None)
    for mine, theirs in zip(copy.parameters(), module.parameters(), strict=True):
        mine.data = theirs.to(dtype)
    return copy


def _rows(
    key: dict[str, Any], module: Attention, inputs: tuple[Tensor, ...], truth: Tensor, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    original = error(module(*inputs), truth)
    for lowering in args.lowerings:
        for fold in args.folds:
            absorbed = error(compiled(module, inputs, lowering, fold)(*inputs), truth)
            gc.collect()  # graphs are cycles, and hold the folded weights
            errors = {"original": original, "absorbed": absorbed, "ratio": absorbed / original}
            yield key | {"lowering": lowering, "fold": fold} | errors


def summarize(rows: list[dict[str, Any]], by: tuple[str, ...]) -> list[list[str]]:
    """Median and worst ratio of every group."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[k]) for k in by), []).append(row)
    lines = []
    for group, members in groups.items():
        ratios = [m["ratio"] for m in members]
        median, worst = statistics.median(ratios), max(ratios)
        fine = "ok" if median <= MEDIAN and worst <= WORST else "NOT MET"
        errors = [f"{statistics.median(m[k] for m in members):.2e}" for k in ("original", "absorbed")]
        lines.append([*group, str(len(members)), *errors, f"{median:.3f}", f"{worst:.3f}", fine])
    return lines


def main() -> int:
    """Command line; exit code 1 where the requirement is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    real = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--level", choices=["layer", "site"], default="layer")
    parser.add_argument("--models", type=names(list(MODELS)), default=real)
    parser.add_argument("--dtypes", type=names(list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--cores", type=names(["sdpa", "eager"]), default=["sdpa", "eager"])
    parser.add_argument("--scales", type=names(SCALES), default=list(SCALES))
    parser.add_argument("--lowerings", type=names(["op", "aten"]), default=["op", "aten"])
    parser.add_argument("--folds", type=names(["never", "always"]), default=["never"], help="always: --level layer")
    parser.add_argument("--heads", type=int, help="at most so many: the folds of DeepSeek-V3 take 10 GB otherwise")
    parser.add_argument("--lengths", type=words(int), default=[2, 17, 128, 1024])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("-v", "--verbose", action="store_true", help="also by scale and length")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.out = args.out or Path(__file__).parent / "results" / f"precision_{args.level}.json"
    with torch.no_grad():
        rows = list(cases(args))
    columns = ("cases", "original", "absorbed", "median ratio", "worst ratio", "")
    if args.verbose:
        by: tuple[str, ...] = ("dtype", "core", "scale", "T")
        print(table(summarize(rows, by), (*by, *columns)) + "\n")
    by = ("model", "dtype", "core", "lowering", *(["fold"] if len(args.folds) > 1 else []))
    print(table(summarize(rows, by), (*by, *columns)))
    total = summarize([row for row in rows if row["fold"] == "never"] or rows, ("dtype",))
    print("\n" + table(total, ("dtype", *columns)))
    about = {"benchmark": "precision", "level": args.level, "machine": machine(), "required": [MEDIAN, WORST]}
    write(args.out, about, rows)
    print(f"written to {args.out}")
    return int(any(line[-1] != "ok" for line in total))


if __name__ == "__main__":
    sys.exit(main())
