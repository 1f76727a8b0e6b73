"""Prompts through one attention of DeepSeek-V3's sizes: the time, and the most memory that a call takes.

    python -m benchmarks.prompt_memory                                      # what fits in 12 GiB; an hour or more
    python -m benchmarks.prompt_memory --pieces 2048x2048 --threads 2
    python -m benchmarks.prompt_memory --pieces 32768x32768 --forms mla

The last S of T tokens are computed after T - S cached ones by the attention of transformers (SDPA): as it is, with
Inductor, with values that its author padded to the width of the keys (torch's fused attention for CPUs takes no other),
and with ``backend="mla"`` with all heads at once and with ``expanded_bytes`` as it is by default.

Memory: each call in a process of its own, the peak of the resident memory (``VmHWM``, set back when the compiled code
begins) less what was resident then, that is weights and inputs. Times: in turns in one process, after results were
compared. A form that will take more than ``--limit`` is left out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import MODELS, Times

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor, nn

from mla_compile.backend import mla

OUT = Path(__file__).parent / "results" / "prompt_memory.json"
PIECES = "1024x1024,2048x2048,4096x4096,8192x8192,16384x16384,32768x32768,2048x32768"
FORMS = ("eager", "inductor", "padded", "whole", "mla")
HEAD = ("queries", "tokens", "dtype", "form", "peak GiB", "ms")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
BYTES = 2**30


class Layer(nn.Module):
    """The attention over hidden states x [1,S,D] and rows of cached tokens, latent [1,1,P,L] and rotary [1,1,P,R]."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        model = common.build("v3", dtype, layers=1, max_tokens=65536)
        self.attention, self.config = model.model.layers[0].self_attn, model.config
        self.rotary = model.model.rotary_emb

    def forward(  # noqa: D102
        self, x: Tensor, cos: Tensor, sin: Tensor, latent: Tensor | None, rope: Tensor | None, mask: Any
    ) -> Any:
        from transformers import DynamicCache

        cache = None
        if latent is not None:
            cache = DynamicCache(config=self.config)
            cache.update(latent, rope, 0)
        return self.attention(x, (cos, sin), mask, past_key_values=cache)[0]


def inputs(layer: Layer, S: int, T: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, cos, sin, cached latents and rotary keys, and the mask where there are cached tokens."""
    random = torch.Generator().manual_seed(7)
    d = MODELS["v3"].dims
    x = torch.randn(1, S, d.D, generator=random).to(dtype)
    cos, sin = layer.rotary(x, torch.arange(T - S, T)[None])
    if S == T:
        return x, cos, sin, None, None, None
    rows = [torch.randn(1, 1, T - S, n, generator=random).to(dtype) for n in (d.L, d.R)]
    mask = torch.arange(T) <= torch.arange(T - S, T)[:, None]
    return x, cos, sin, *rows, mask[None, None]


def padded(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Transformers' SDPA on values of the width of the keys."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    width = value.shape[-1]
    value = nn.functional.pad(value, (0, query.shape[-1] - width))
    out, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out[..., :width], None


def form(name: str, layer: Layer, begun: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """The layer in one form; ``begun`` is called whenever its code begins."""
    from transformers import AttentionInterface

    AttentionInterface.register("padded", padded)
    layer.config._attn_implementation = "padded" if name == "padded" else "sdpa"
    layer.attention.config._attn_implementation = layer.config._attn_implementation

    def backend(gm: Any, examples: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        limit = BYTES if name == "mla" else None
        ours = name in ("whole", "mla")
        code = mla(gm, examples, options={"expanded_bytes": limit}) if ours else compile_fx(gm, examples)

        def call(*values: Any) -> Any:
            begun()
            return code(*values)

        return call

    if name == "eager":

        def eager(*values: Any) -> Any:
            begun()
            return layer(*values)

        return eager
    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)


def expected_gib(name: str, S: int, T: int, size: int) -> float:
    """What a form will take at the least, GiB: what has heads, and twice the scores where torch writes them out."""
    d = MODELS["v3"].dims
    tensors = d.H * size * (S * (d.N + d.R + d.V) + T * (d.N + d.R + d.N + d.V))
    scores = 2 * d.H * S * T * max(4, size) if name in ("eager", "inductor", "whole") else 0
    return float((tensors / 16 if name == "mla" else tensors) + scores) / 2**30


def peak(name: str, S: int, T: int, dtype: str, threads: int) -> dict[str, Any]:
    """Peak memory and seconds of the first call, its compilation left out, in this process."""
    torch.set_num_threads(threads)
    layer = Layer(common.DTYPES[dtype])
    values = inputs(layer, S, T, common.DTYPES[dtype])
    at: dict[str, float] = {}

    def begun() -> None:
        at.update(base=forgotten_peak(), start=time.perf_counter())

    with torch.no_grad():
        form(name, layer, begun)(*values)
    seconds = time.perf_counter() - at["start"]
    return {"peak_bytes": resident("VmHWM") - at["base"], "base_bytes": at["base"], "seconds": seconds}


def forgotten_peak() -> int:
    """Sets the process's peak of resident memory back to what is resident now, in bytes, and returns that."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(entry: str) -> int:
    """``VmRSS`` (resident memory) or ``VmHWM`` (the peak of it) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))


def measured_alone(name: str, S: int, T: int, dtype: str, threads: int) -> dict[str, Any]:
    """:func:`peak` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.prompt_memory", "--pieces", f"{S}x{T}", "--forms", name]
    words += ["--dtypes", dtype, "--threads", str(threads), "--alone"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} of {S} of {T} tokens: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def times(names: list[str], S: int, T: int, dtype: str, rounds: int, budget: float) -> dict[str, Any]:
    """All forms in turns, compared before; raises SystemExit where their results differ."""
    layer = Layer(common.DTYPES[dtype])
    values = inputs(layer, S, T, common.DTYPES[dtype])
    calls: dict[str, Callable[[], Any]] = {}
    truth: Tensor | None = None
    for name in names:
        run = form(name, layer)
        result = run(*values).float()
        calls[name] = _as_it_is(run, layer, name, values)
        truth = result if truth is None else truth
        error = float((result - truth).norm() / truth.norm())
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} of {S} of {T} tokens differs by {error}; nothing is timed on wrong results")
    taken = common.in_turns({n: (lambda c=c: common.timed(c)) for n, c in calls.items()}, rounds, budget, least=3)
    return {name: {**asdict(Times.of(t)), "of_inductor": _ratio(t, taken)} for name, t in taken.items()}


def _as_it_is(run: Callable[..., Any], layer: Layer, name: str, values: Any) -> Callable[[], Any]:
    def call() -> Any:
        layer.attention.config._attn_implementation = "padded" if name == "padded" else "sdpa"
        return run(*values)

    return call


def _ratio(seconds: list[float], taken: dict[str, list[float]]) -> float | None:
    return common.median_ratio(seconds, taken["inductor"]) if "inductor" in taken else None


def describe(row: dict[str, Any]) -> list[list[str]]:
    """One row as text, a line for each form."""
    lines = []
    for name, found in row["peaks"].items():
        ms = row["ms"].get(name)
        one = (
            str(Times(**{k: v for k, v in ms.items() if k != "of_inductor"}))
            if ms
            else f"{found['seconds'] * 1e3:.0f} once"
        )
        lines.append(
            [str(row["queries"]), str(row["tokens"]), row["dtype"], name, f"{found['peak_bytes'] / 2**30:.2f}", one]
        )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", type=common.words(str), default=common.words(str)(PIECES), help="queries x tokens")
    parser.add_argument("--forms", type=common.names(FORMS), default=list(FORMS))
    parser.add_argument("--dtypes", type=common.names(list(TOLERANCE)), default=["float32"])
    parser.add_argument("--limit", type=float, default=10.0, help="GiB that a call may be expected to take")
    parser.add_argument("--timed", type=int, default=2048, help="most tokens that are timed in turns")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--alone", action="store_true", help="one call in this process, its peak as JSON")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for text in args.pieces:
            S, T = map(int, text.split("x"))
            if args.alone:
                print(json.dumps(peak(args.forms[0], S, T, dtype, args.threads)))
                return
            size = common.DTYPES[dtype].itemsize
            names = [name for name in args.forms if expected_gib(name, S, T, size) <= args.limit]
            row: dict[str, Any] = {"queries": S, "tokens": T, "dtype": dtype, "peaks": {}, "ms": {}}
            rows.append(row)
            for name in names:
                row["peaks"][name] = measured_alone(name, S, T, dtype, args.threads)
            if args.timed >= T:
                with torch.no_grad():
                    row["ms"] = times(names, S, T, dtype, args.rounds, args.budget)
            print("\n".join("  " + "  ".join(line) for line in describe(row)), flush=True)
            about = {"benchmark": "prompt_memory", "machine": common.machine(), "expanded_bytes": BYTES}
            common.write(args.out, about, rows)
    print("\n" + common.table([line for row in rows for line in describe(row)], HEAD))


if __name__ == "__main__":
    main()
