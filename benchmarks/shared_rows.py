"""Attention layers of DeepSeek-V4's published sizes: decode steps in turns, and the memory that a prompt takes.

    python -m benchmarks.shared_rows                                        # 4k, 32k and 128k tokens, one thread
    python -m benchmarks.shared_rows --kinds sparse --tokens 4096 --rounds 3
    python -m benchmarks.shared_rows --prompts 2048,4096

One attention of transformers (64 heads of 512, hidden states of 4,096, the compressor and the indexer with it) over its
own cache, whose rows are random: as it is, with Inductor, and optimized. ``sparse`` has a row for 4 tokens, of which an
indexer picks 512; ``heavy`` one for 128; both have a window of 128. A sample is four steps in a row, of which one emits
a row where there is one for 4 tokens. Dynamo's limit of variants is raised for all: with the one it has Inductor falls
back to what runs uncompiled. Results are compared before anything is timed. What eager code cannot hold is skipped.

Memory of prompts: as in :mod:`benchmarks.prompt_memory`, the first call of a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Times
from benchmarks.prompt_memory import forgotten_peak, resident

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor, nn

import mla_compile

OUT = Path(__file__).parent / "results" / "shared_rows.json"
KINDS = {"sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
FORMS = ("eager", "inductor", "mla")
HEAD = ("layer", "tokens", "eager ms", "Inductor ms", "mla ms", "eager/mla", "Inductor/mla")
PEAKS = ("layer", "tokens", "form", "peak GiB", "s")
STEPS, WARM_UP = 4, 12
TOLERANCE = 3e-2


class Layer(nn.Module):
    """One attention with what its model does before it: the rotary embedding and the mask; x [1,S,D]."""

    def __init__(self, kind: str, longest: int) -> None:
        super().__init__()
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

        self.config = DeepseekV4Config(
            num_hidden_layers=1, layer_types=[KINDS[kind]], mlp_layer_types=["moe"], max_position_embeddings=longest,
            attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(0)
        self.attention, self.rotary = DeepseekV4Attention(self.config, 0), DeepseekV4RotaryEmbedding(self.config)
        random = torch.Generator().manual_seed(0)
        for weight in self.attention.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5)
        self.eval().requires_grad_(False).to(torch.bfloat16)

    def forward(self, x: Tensor, positions: Tensor, cache: Any) -> Tensor:  # noqa: D102
        from transformers.masking_utils import create_sliding_window_causal_mask

        turned = {name: self.rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        # Without a mask the attention drops the indexer's list and reads every compressed row.
        mask = create_sliding_window_causal_mask(self.config, x, None, cache, position_ids=positions)
        out: Tensor = self.attention(x, turned, positions, mask, cache=cache)[0]
        return out


def filled(layer: Layer, tokens: int) -> Any:
    """A cache of that many tokens, a multiple of both rates; nothing waits to be compressed."""
    from transformers import DynamicCache

    cache, config = DynamicCache(config=layer.config), layer.config
    random = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=random).to(torch.bfloat16)

    (held,) = cache.layers
    window = rows(1, config.sliding_window - 1, config.head_dim)
    held.lazy_initialization(window, window)
    held.keys = held.values = window
    held.cumulative_length = tokens
    for name in held.compressed_kv:
        width = config.head_dim if name == "compressor" else config.index_head_dim
        both = width * (1 if len(held.compressed_kv) == 1 else 2)
        held.compressed_kv[name] = rows(tokens // held.compress_rate, width)
        held.entry_count[name] = tokens // held.compress_rate
        held.buffer_kv[name], held.buffer_gate[name] = rows(0, both), rows(0, both)
        if hasattr(held, "overlap_kv"):
            held.overlap_kv[name], held.overlap_gate[name] = (rows(held.compress_rate, width) for _ in range(2))
    return cache


class Session:
    """A form of a layer, decoding on from ``tokens`` tokens."""

    def __init__(self, call: Callable[..., Tensor], layer: Layer, tokens: int) -> None:
        self.call, self.cache, self.at = call, filled(layer, tokens), tokens
        self.random = torch.Generator().manual_seed(2)

    def step(self) -> Tensor:
        """The attention of one new token."""
        x = torch.randn(1, 1, 4096, generator=self.random).to(torch.bfloat16)
        out = self.call(x, torch.tensor([[self.at]]), self.cache)
        self.at += 1
        return out

    def sample(self) -> float:
        """Seconds of one of some steps in a row."""
        return common.timed(lambda: [self.step() for _ in range(STEPS)]) / STEPS


def form(name: str, layer: Layer) -> Callable[..., Tensor]:
    """The layer as it is, compiled, or optimized."""
    if name == "eager":
        return layer
    return torch.compile(layer) if name == "inductor" else mla_compile.optimize(layer)


def fits(layer: Layer, tokens: int) -> bool:
    """Whether the copies that eager code makes for each head fit in the free memory."""
    (held,) = filled(layer, 0).layers
    rows = tokens / held.compress_rate + layer.config.sliding_window
    copies = 3 * rows * layer.config.num_attention_heads * layer.config.head_dim * 2
    return bool(copies < 0.8 * common.available_bytes())


def steps(kind: str, layer: Layer, calls: dict[str, Callable[..., Tensor]], tokens: int, args: Any) -> dict[str, Any]:
    """All forms in turns; raises SystemExit where their results differ."""
    names = [n for n in calls if n != "eager" or fits(layer, tokens)]
    sessions = {n: Session(calls[n], layer, tokens) for n in names}
    # Of eager code, which is as slow as it will be, only as many steps as the others are compared with.
    results = {n: torch.stack([s.step() for _ in range(STEPS)]).float() for n, s in sessions.items()}
    truth = results[names[0]]
    errors = {n: float((r - truth).norm() / truth.norm()) for n, r in results.items()}
    if not all(error <= TOLERANCE for error in errors.values()):
        raise SystemExit(f"{kind}, {tokens} tokens: results differ by {errors}; nothing is timed on wrong results")
    for name, session in sessions.items():
        for _ in range(0 if name == "eager" else WARM_UP - STEPS):
            session.step()
    times = common.in_turns({n: s.sample for n, s in sessions.items()}, args.rounds, args.budget, least=3)
    return {
        "layer": kind, "tokens": tokens, "error": errors, "ms": {n: asdict(Times.of(t)) for n, t in times.items()},
        "over_mla": {n: common.median_ratio(times[n], times["mla"]) for n in names if "mla" in names},
    }  # fmt: skip


def peak(kind: str, name: str, tokens: int) -> dict[str, Any]:
    """Peak memory and seconds of a prompt in this process, weights and inputs left out."""
    from transformers import DynamicCache

    layer = Layer(kind, tokens)
    call = form(name, layer)

    def prompt(count: int) -> float:
        x = torch.randn(1, count, 4096, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        cache = DynamicCache(config=layer.config)
        return common.timed(lambda: call(x, torch.arange(count)[None], cache))

    for count in (256, 384):  # compiled, the second time for any length
        prompt(count)
    base = forgotten_peak()
    seconds = prompt(tokens)
    return {"peak_bytes": resident("VmHWM") - base, "seconds": seconds}


def measured_alone(kind: str, name: str, tokens: int, threads: int) -> dict[str, Any]:
    """:func:`peak` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.shared_rows", "--kinds", kind, "--forms", name]
    words += ["--prompts", str(tokens), "--threads", str(threads), "--alone"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}, {name} of {tokens} tokens: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def describe(row: dict[str, Any]) -> list[str]:
    """One row of steps as text."""
    cells = [str(Times(**row["ms"][n])) if n in row["ms"] else "left out" for n in FORMS]
    over = [f"{row['over_mla'][n]:.1f}" if n in row["over_mla"] else "" for n in ("eager", "inductor")]
    return [row["layer"], str(row["tokens"]), *cells, *over]


def describe_peak(row: dict[str, Any]) -> list[str]:
    """One prompt as text."""
    gib = f"{row['peak_bytes'] / 2**30:.2f}"
    return [row["layer"], str(row["tokens"]), row["form"], gib, f"{row['seconds']:.1f}"]


def timed_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of every kind of layer."""
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        torch._dynamo.reset()
        layer = Layer(kind, max(args.tokens) + 1024)
        calls = {name: form(name, layer) for name in args.forms}
        for tokens in args.tokens:
            rows.append(steps(kind, layer, calls, tokens, args))
            print("  " + "  ".join(describe(rows[-1])), flush=True)
            written(args.out, [], rows)
            gc.collect()
    return rows


def written(path: Path, prompts: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """What there is so far."""
    common.write(path, {"benchmark": "shared_rows", "machine": common.machine(), "prompts": prompts}, rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", type=common.names(list(KINDS)), default=list(KINDS))
    parser.add_argument("--forms", type=common.names(FORMS), default=list(FORMS))
    parser.add_argument("--tokens", type=common.words(int), default=[4096, 32768, 131072])
    parser.add_argument("--prompts", type=common.words(int), default=[], help="lengths; no step is timed then")
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="one prompt in this process, its peak as JSON")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        if args.alone:
            print(json.dumps(peak(args.kinds[0], args.forms[0], args.prompts[0])))
            return
        cases = [(kind, tokens, name) for kind in args.kinds for tokens in args.prompts for name in args.forms]
        prompts: list[dict[str, Any]] = []
        for kind, tokens, name in cases:
            found = measured_alone(kind, name, tokens, args.threads)
            prompts.append({"layer": kind, "tokens": tokens, "form": name, **found})
            print("  " + "  ".join(describe_peak(prompts[-1])), flush=True)
            written(args.out, prompts, [])
        rows = [] if prompts else timed_steps(args)
    if prompts:
        print("\n" + common.table([describe_peak(row) for row in prompts], PEAKS))
    else:
        print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
