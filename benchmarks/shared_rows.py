"""Attention layers of DeepSeek-V4's published sizes: decode steps in turns, and the memory that a prompt takes.

    python -m benchmarks.shared_rows                                        # 4k, 32k and 128k tokens, one thread
    python -m benchmarks.shared_rows --kinds sparse --tokens 4096 --rounds 3
    python -m benchmarks.shared_rows --prompts 2048,4096
    python -m benchmarks.shared_rows --parts                                # what our steps consist of

One attention of transformers (64 heads of 512, hidden states of 4,096, the compressor and the indexer with it) over its
own cache, whose rows are random: as it is, with Inductor, and optimized. ``sparse`` has a row for 4 tokens, of which an
indexer picks 512; ``heavy`` one for 128; both have a window of 128. A sample is four steps in a row, of which one emits
a row where there is one for 4 tokens. Dynamo's limit of variants is raised for all: with the one it has Inductor falls
back to what runs uncompiled. Results are compared before anything is timed. What eager code cannot hold is skipped.
With one thread, which is the default, the thread's CPU seconds are counted: other programs on the machine do not add
to them but for the memory that they share.

Parts: each call of a part counts with its best time at its place in the four steps, under torch's profiler, beside
the time in which the layer's weights can be read at the memory's bandwidth.

Memory of prompts: as in :mod:`benchmarks.prompt_memory`, the first call of a process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
PARTS = {
    "mla_compile::linear": "products with weights",
    "aten::mm": "products with weights",
    "mla_compile::decode_attention": "attention",
    "mla_compile::index_scores": "scores of the indexer",
    "aten::topk": "choice of rows",
    "## Call CompiledFxGraph": "loops of Inductor",
}
REST = "guards and the rest"
HEAD_PARTS = ("layer", "tokens", *dict.fromkeys(PARTS.values()), REST, "all", "weights read")
STEPS, WARM_UP = 4, 12
TOLERANCE = 0.1  # rounding decides which rows are the last of a list; another list altogether gives 0.5 and more


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
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(STEPS):
            self.step()
        return (clock() - start) / STEPS


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


def parts(kind: str, layer: Layer, call: Callable[..., Tensor], tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each part of a step, and of reading the weights."""
    from torch.profiler import ProfilerActivity, profile, record_function

    session = Session(call, layer, tokens)
    for _ in range(WARM_UP):
        session.step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(rounds):
            with record_function("round"):
                for _ in range(STEPS):
                    session.step()
    best: dict[tuple[str, int], float] = {}
    for each in (e for e in seen.events() if e.name == "round"):
        count: Counter[str] = Counter()
        for event in _below(each):
            key = event.name, count[event.name]
            count[event.name] += 1
            best[key] = min(best.get(key, math.inf), event.self_cpu_time_total / 1e3 / STEPS)
    ms: Counter[str] = Counter()
    for (name, _), took in best.items():
        ms[next((part for start, part in PARTS.items() if name.startswith(start)), REST)] += took
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    floor = 1e3 * weights / common.read_bandwidth(gib=0.125, rounds=40)
    return {"layer": kind, "tokens": tokens, "ms": dict(ms), "weight_bytes": weights, "weights_read_ms": floor}


def _below(event: Any) -> Iterator[Any]:
    """What the profiler saw within ``event``, in order."""
    for child in event.cpu_children:
        yield child
        yield from _below(child)


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


def describe_parts(row: dict[str, Any]) -> list[str]:
    """The parts of a step as text."""
    ms = [f"{row['ms'].get(part, 0):.2f}" for part in HEAD_PARTS[2:-2]]
    return [row["layer"], str(row["tokens"]), *ms, f"{sum(row['ms'].values()):.2f}", f"{row['weights_read_ms']:.2f}"]


def decoding(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The steps of every kind of layer, or their parts."""
    for kind in args.kinds:
        torch._dynamo.reset()
        layer = Layer(kind, max(args.tokens) + 1024)
        calls = {name: form(name, layer) for name in (("mla",) if args.parts else args.forms)}
        for tokens in args.tokens:
            if args.parts:
                yield parts(kind, layer, calls["mla"], tokens, args.rounds)
            else:
                yield steps(kind, layer, calls, tokens, args)
            gc.collect()


def prompts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The peak of every prompt."""
    for kind, tokens, name in itertools.product(args.kinds, args.prompts, args.forms):
        found = measured_alone(kind, name, tokens, args.threads)
        yield {"layer": kind, "tokens": tokens, "form": name, **found}


def written(path: Path, what: str, rows: list[dict[str, Any]]) -> None:
    """What there is so far; the rows of other kinds that the file has stay."""
    held = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: held.get(key, []) for key in SHOWN} | {what: rows}
    common.write(path, {"benchmark": "shared_rows", "machine": common.machine(), **kept}, kept["rows"])


SHOWN: dict[str, tuple[Callable[[dict[str, Any]], list[str]], Sequence[str]]] = {
    "rows": (describe, HEAD),
    "parts": (describe_parts, HEAD_PARTS),
    "prompts": (describe_peak, PEAKS),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", type=common.names(list(KINDS)), default=list(KINDS))
    parser.add_argument("--forms", type=common.names(FORMS), default=list(FORMS))
    parser.add_argument("--tokens", type=common.words(int), default=[4096, 32768, 131072])
    parser.add_argument("--prompts", type=common.words(int), default=[], help="lengths; no step is timed then")
    parser.add_argument("--parts", action="store_true", help="what our steps consist of")
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="one prompt in this process, its peak as JSON")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64
    what = "prompts" if args.prompts else "parts" if args.parts else "rows"
    show, head = SHOWN[what]
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        if args.alone:
            print(json.dumps(peak(args.kinds[0], args.forms[0], args.prompts[0])))
            return
        for row in prompts(args) if args.prompts else decoding(args):
            rows.append(row)
            print("  " + "  ".join(show(row)), flush=True)
            written(args.out, what, rows)
    print("\n" + common.table([show(row) for row in rows], head))


if __name__ == "__main__":
    main()
