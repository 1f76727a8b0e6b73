"""The decode_attention op on CPU against what one would write without it, one query token per sequence.

* ``bmm``: batched products for the scores, a softmax in float32, a batched product for the sum, in the rows' dtype
* ``bmm32``: the same with rows and query cast to float32 first, which is what gives half precision the op's accuracy
* ``sdpa``: scaled_dot_product_attention on rows expanded over the heads (keys [latent, rope], concatenated beforehand)

All run interleaved in one process. Nothing is timed before the op's error against a float64 reference is within bounds.

    python benchmarks/decode_attention_cpu.py --heads 16 128 --tokens 512 8192 --dtypes float32 bfloat16 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads disturb each other on a shared machine

import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}  # relative RMS error of the op
SCALE = 192**-0.5


def bmm(query: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
    """Two products for the scores, softmax, one product for the sum."""
    L = latent.shape[2]
    q = query.squeeze(1)
    scores = torch.bmm(q[..., :L], latent.transpose(1, 2))
    scores = torch.baddbmm(scores, q[..., L:], rope.transpose(1, 2)) * SCALE
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(latent.dtype), latent)


def bmm32(query: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
    """The same in float32."""
    return bmm(query.float(), latent.float(), rope.float()).to(latent.dtype)


def sdpa(query: Tensor, keys: Tensor, L: int) -> Tensor:
    """Torch's attention, every head given a view of the same rows."""
    H = query.shape[2]
    k = keys[:, None].expand(-1, H, -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), k, k[..., :L], scale=SCALE)


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns until ``seconds`` have passed, five rounds at least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["op"]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def measure(B: int, H: int, T: int, L: int, R: int, dtype: str, seconds: float, with_sdpa: bool) -> dict[str, Any]:
    """One row of the table: median and quartiles in ms of each way, and the ratios to the op."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    query, latent, rope = random(B, 1, H, L + R), random(B, T, L), random(B, T, R)
    out = ops.decode_attention(query, latent, rope, scale=SCALE)[0].double()
    want = reference.decode_attention(DecodeCall(query.double(), latent.double(), rope.double(), scale=SCALE))[0]
    error = float((out - want).norm() / want.norm())
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"wrong before fast: relative error {error:.1e} at B={B} H={H} T={T} L={L} R={R} {dtype}")
    calls: dict[str, Callable[[], Any]] = {
        "op": lambda: ops.decode_attention(query, latent, rope, scale=SCALE),
        "bmm": lambda: bmm(query, latent, rope),
    }
    if kind != torch.float32:
        calls["bmm32"] = lambda: bmm32(query, latent, rope)
    if with_sdpa:
        keys = torch.cat([latent, rope], -1)
        calls["sdpa"] = lambda: sdpa(query, keys, L)
    plain = bmm(query, latent, rope).double().unsqueeze(1)
    row: dict[str, Any] = {"B": B, "H": H, "T": T, "L": L, "R": R, "dtype": dtype, "error": error}
    row["bmm_error"] = float((plain - want).norm() / want.norm())
    for name, values in interleaved(calls, seconds).items():
        low, median, high = statistics.quantiles(values, n=4)
        row[name] = {"median_ms": median, "quartiles_ms": [low, high], "best_ms": min(values)}
    flops = 2 * B * H * T * (2 * L + R)
    row["gflops"] = flops / row["op"]["median_ms"] / 1e6
    row["gbytes"] = B * T * (L + R) * latent.element_size() / row["op"]["median_ms"] / 1e6
    return row


def main() -> None:
    """Prints one line per case; ``--json`` also writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 40, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--latent", type=int, nargs="+", default=[512], help="L")
    parser.add_argument("--rope", type=int, nargs="+", default=[64], help="R")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=sorted(TOLERANCE))
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sdpa", action="store_true", help="also time SDPA on expanded rows (slow)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print("dtype     B   H     T   L  R |  op ms (quartiles)       GFLOP/s  GB/s error  | time of the others / op")
    for dtype in args.dtypes:
        for B in args.batch:
            for H in args.heads:
                for L in args.latent:
                    for R in args.rope:
                        for T in args.tokens:
                            row = measure(B, H, T, L, R, dtype, args.seconds, args.sdpa)
                            rows.append(row)
                            print(line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "torch": torch.__version__, "rows": rows}, indent=1))


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    op = row["op"]
    head = f"{row['dtype']:8} {row['B']:2} {row['H']:3} {row['T']:6} {row['L']:3} {row['R']:2} |"
    spread = "({:.3f}-{:.3f})".format(*op["quartiles_ms"])
    ours = f"{op['median_ms']:8.3f} {spread:18} {row['gflops']:6.0f} {row['gbytes']:5.1f} {row['error']:.1e} |"
    others = [f"{n} {row[n]['median_ms'] / op['median_ms']:.2f}" for n in ("bmm", "bmm32", "sdpa") if n in row]
    return f"{head}{ours} {'  '.join(others)}  (bmm error {row['bmm_error']:.1e})"


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
