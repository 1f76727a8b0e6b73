"""What each feature of ``mla_compile::decode_attention`` costs on a CPU, beside the plain call over as many rows.

    python -m benchmarks.attention_features
    python -m benchmarks.attention_features --heads 16 --tokens 8192 --threads 2

One query token over [B=1,T] rows of 512+64, each feature set so that as many keys are read as by the plain call: full
lengths, pages of 64 rows in random order, a window as long as the cache, a mask that hides a tenth of the keys here and
there. Rows of float8 have a scale each. In turns in one process, after every result was compared with the reference in
float64.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Times

import torch  # isort: skip  # after common, which sets the environment

from mla_compile.kernels import decode, reference
from mla_compile.kernels.call import DecodeCall

OUT = Path(__file__).parent / "results" / "attention_features.json"
L, R, PAGE, SCALE = 512, 64, 64, 192**-0.5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # relative, of the result in norm
FEATURES = ("plain", "lengths", "window", "mask", "added mask", "pages", "sinks", "soft cap", "float8", "float8 pages")


def calls(H: int, T: int, dtype: torch.dtype) -> dict[str, DecodeCall]:
    """A call for each of :data:`FEATURES`, all over the same rows."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, H, L + R, generator=random).to(dtype)
    rows = torch.randn(1, T, L + R, generator=random).to(dtype)
    latent, rope = rows[..., :L].contiguous(), rows[..., L:].contiguous()
    scales = latent.float().abs().amax(-1) / 448
    packed = (latent.float() / scales[..., None]).to(torch.float8_e4m3fn)
    length = torch.tensor([T], dtype=torch.int32)
    table = torch.randperm(T // PAGE, generator=random).to(torch.int32)[None]
    at = table[0].long().argsort()  # page of the pool <- block of the request

    def pages(x: torch.Tensor) -> torch.Tensor:
        bytes_ = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        return bytes_.view(T // PAGE, PAGE, *x.shape[2:])[at].contiguous().view(x.dtype)

    mask = torch.rand(1, 1, 1, T, generator=random) < 0.9
    paged = {"block_table": table, "seq_lens": length}
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "lengths": {"seq_lens": length},
        "window": {"window": T, "causal": True},
        "mask": {"mask": mask},
        "added mask": {"mask": torch.randn(1, 1, 1, T, generator=random)},
        "pages": {"latent": pages(latent), "rope": pages(rope), **paged},
        "sinks": {"sinks": torch.randn(H, generator=random)},
        "soft cap": {"softcap": 30.0},
        "float8": {"latent": packed, "kv_scale": scales},
        "float8 pages": {"latent": pages(packed), "rope": pages(rope), "kv_scale": pages(scales), **paged},
    }
    return {name: DecodeCall(**{"query": query, "latent": latent, "rope": rope, "scale": SCALE, **of})
            for name, of in given.items()}  # fmt: skip


def exact(call: DecodeCall) -> torch.Tensor:
    """The result of a call in float64."""
    wide = {name: x.double() for name, x in call._asdict().items()
            if isinstance(x, torch.Tensor) and x.is_floating_point() and name != "kv_scale"}  # fmt: skip
    return reference.decode_attention(call._replace(**wide))[0]


def measure(H: int, T: int, dtype: str, rounds: int, budget: float) -> dict[str, Any]:
    """All features in turns; raises SystemExit where one is wrong."""
    kind = common.DTYPES[dtype]
    made = calls(H, T, kind)
    for name, call in made.items():
        want = exact(call)
        error = float((decode.run(call)[0].double() - want).norm() / want.norm())
        if not error <= TOLERANCE[kind]:
            raise SystemExit(f"{name}, {dtype}, H={H}, T={T}: wrong by {error:.1e}; nothing is timed on wrong results")
    runs = {name: partial(common.timed, partial(decode.run, call)) for name, call in made.items()}
    times = common.in_turns(runs, rounds, budget)
    return {
        "heads": H, "tokens": T, "dtype": dtype,
        "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
        "over_plain": {name: common.median_ratio(times[name], times["plain"]) for name in made},
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text: the plain call in ms, the others over it."""
    ratios = [f"{row['over_plain'][name]:.2f}" for name in FEATURES[1:]]
    return [row["dtype"], str(row["heads"]), str(row["tokens"]), str(Times(**row["ms"]["plain"])), *ratios]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=common.words(int), default=[16, 128])
    parser.add_argument("--tokens", type=common.words(int), default=[8192, 32768])
    parser.add_argument("--dtypes", type=common.names(list(common.DTYPES)), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for dtype in args.dtypes:
            for heads in args.heads:
                for tokens in args.tokens:
                    rows.append(measure(heads, tokens, dtype, args.rounds, args.budget))
                    print("  " + "  ".join(describe(rows[-1])), flush=True)
                    common.write(args.out, {"benchmark": "attention_features", "machine": common.machine()}, rows)
    print("\n" + common.table([describe(row) for row in rows], ("dtype", "heads", "tokens", "plain ms", *FEATURES[1:])))


if __name__ == "__main__":
    main()
