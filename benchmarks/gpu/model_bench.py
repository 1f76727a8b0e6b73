"""A whole decode step of one layer in the shape of DeepSeek-V2-Lite and of DeepSeek-V3: eager, Inductor, backend="mla".

Built from transformers' configs with random weights (benchmarks/common.py), a small dense MLP, a StaticCache whose
capacity is 32 times what the first row uses. Logits are compared before anything is timed. Times are what a caller
waits for, from an idle device to an idle one, with and without mode="reduce-overhead" (Inductor's CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import MODELS, build, median_ratio, table
from benchmarks.gpu import timing
from benchmarks.gpu.common import Case, Row, Run, Store, _short
from benchmarks.gpu.kernels_bench import measured_floors
from mla_compile.backend import mla
from mla_compile.kernels.tuned import TABLE

CAPACITY = 32769
USED = (1024, 32768)
SIZES = (("v3", 1), ("v2lite", 1), ("v3", 16), ("v2lite", 16))
TOLERANCE = 8e-2  # logits in bfloat16, relative to their largest value, as in benchmarks/decode_cpu.py
VARIANTS = ("eager", "inductor", "inductor graphs", "mla", "mla graphs")
COMPILED, KNOWN = 120.0, 15.0  # seconds of a row: two compilations of a layer on a fresh machine; none
ROUNDS, SECONDS = 25, 3.0


class Bench:
    """One model with one batch, its cache, and the variants that could be compiled."""

    def __init__(self, run: Run, name: str, batch: int, capacity: int, graphs: bool) -> None:
        self.run, self.name, self.batch, self.capacity, self.graphs = run, name, batch, capacity, graphs
        self.clock = timing.Clock(run.device)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with run.device:
            self.model: Any = build(name, torch.bfloat16, 1, capacity + 16)
        self.absent: dict[str, str] = {}

    @cached_property
    def cache(self) -> Any:
        """A StaticCache full of random latents; how much of it counts is set by :meth:`use`."""
        from transformers import StaticCache

        cache: Any = StaticCache(config=self.model.config, max_cache_len=self.capacity)
        d, device = MODELS[self.name].dims, self.run.device
        for layer in cache.layers:
            latent, rope = (
                torch.randn(self.batch, 1, self.capacity, width, device=device).to(torch.bfloat16)
                for width in (d.L, d.R)
            )
            layer.lazy_initialization(latent[:, :, :0], rope[:, :, :0])
            layer.keys.copy_(latent)
            layer.values.copy_(rope)
        return cache

    def use(self, tokens: int) -> None:
        """The cache holds ``tokens`` tokens: the next step is the one after them."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(tokens)

    @cached_property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """Eager, Inductor and ours, both with CUDA graphs or both without. Without a GPU nothing is compiled."""
        if self.run.dry:
            own = torch.compile(self.model, backend=mla, options={"codegen": "eager"})
            return {"eager": self.model, "inductor": torch.compile(self.model, backend="eager"), "mla": own}
        how = {"mode": "reduce-overhead"} if self.graphs else {}
        made: dict[str, Callable[..., Any]] = {"eager": self.model}
        # Not by its name: a checkout that is not installed has no entry point.
        for name, backend in (("mla", mla), ("inductor", "inductor")):
            made[f"{name} graphs" if self.graphs else name] = torch.compile(self.model, backend=backend, **how)
        return made

    def inputs(self, tokens: int) -> dict[str, Any]:
        """What generate() passes for one new token after ``tokens``."""
        self.use(tokens)
        device = self.run.device
        prepared: dict[str, Any] = self.model.prepare_inputs_for_generation(
            torch.full((self.batch, 1), 7, device=device), next_sequence_length=1, past_key_values=self.cache,
            attention_mask=torch.ones(self.batch, tokens + 1, dtype=torch.long, device=device),
            position_ids=torch.full((self.batch, 1), tokens, device=device), use_cache=True,
        )  # fmt: skip
        return prepared

    def step(self, variant: str, inputs: dict[str, Any]) -> Tensor:
        """Logits of one step; a graph's output is valid until the next step."""
        if self.run.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = self.calls[variant](**inputs).logits
        return logits

    def floor(self, tokens: int) -> float:
        """Seconds to read the weights of a step and the latents in use, each once, at the copy's rate."""
        bandwidth, _ = measured_floors(self.run.store)
        embeddings = {m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters() if p not in embeddings)
        d = MODELS[self.name].dims
        return float(weights + self.batch * (tokens + 1) * (d.L + d.R) * 2) / bandwidth

    def measure(self, tokens: int) -> Row:
        """All variants in turns; one that fails to run or differs is left out, and the row failed where it is ours."""
        row: Row = {"batch": self.batch, "capacity": self.capacity, "used": tokens}
        logits: dict[str, Tensor] = {}
        for variant in self.calls:
            if variant in self.absent:
                continue
            try:
                inputs = self.inputs(tokens)
                for _ in range(3 if variant.endswith("graphs") else 2):  # compile, record, replay
                    self.use(tokens)
                    logits[variant] = self.step(variant, inputs).float().clone()
            except Exception as error:  # noqa: BLE001  (the other variants are still worth their time)
                self.absent[variant] = _short(error)
                timing.release()  # eager at 32768 tokens expands K and V and may run out of memory
        base = next((v for v in VARIANTS if v in logits), None)
        if base is None:
            raise RuntimeError(f"no variant ran: {self.absent}")
        want = logits[base]
        row["error_against"] = base
        row["errors"] = {v: float((x - want).abs().max() / want.abs().max()) for v, x in logits.items() if v != base}
        problems = [f"{v}: {why}" for v, why in self.absent.items() if v.startswith("mla")]
        for variant, error in row["errors"].items():
            if not error <= TOLERANCE:
                problems.append(f"{variant} differs from {base} by {error:.1e}, allowed {TOLERANCE:.0e}")
                del logits[variant]
        inputs = self.inputs(tokens)
        calls = {v: (lambda v=v: self.step(v, inputs)) for v in logits}
        seconds = self.clock.wall(
            calls, ROUNDS, 0.05 if self.run.dry else min(SECONDS, max(0.1, self.run.left)), lambda: self.use(tokens)
        )
        row["us"] = {v: timing.spread(s) for v, s in seconds.items()}
        mine = next((v for v in seconds if v.startswith("mla")), "")
        row["mla_faster_than"] = {v: median_ratio(s, seconds[mine]) for v, s in seconds.items() if mine and v != mine}
        row["floor_us"] = 1e6 * self.floor(tokens)
        row |= self.told()
        return {**row, "status": "failed", "error": "; ".join(problems)} if problems else row

    def told(self) -> Row:
        """What the compiler says: sites absorbed, graph breaks, graphs that were not captured."""
        from mla_compile.backend import reports

        counters = torch._dynamo.utils.counters
        return {
            "sites": [report.summary() for report in reports()[-2:]],
            "graph_breaks": dict(counters["graph_break"]),
            "cudagraph_skips": counters["inductor"].get("cudagraph_skips", 0),
            "absent": dict(self.absent),
        }


def cases(run: Run) -> Iterator[Case]:
    """Models by batch, with CUDA graphs first; two fillings of one cache each, so that nothing is compiled twice."""
    sizes, capacity, used = (SIZES, CAPACITY, USED) if not run.dry else ((("tiny", 2),), 33, (5, 32))
    made: dict[tuple[str, int, bool], Bench] = {}  # the one that was measured last
    tiles = TABLE.read_text()

    def call(key: tuple[str, int, bool], tokens: int) -> Row:
        name, batch, graphs = key
        with torch.no_grad():
            if key not in made:
                made.clear()
                timing.release()
                made[key] = Bench(run, name, batch, capacity, graphs)
            return made[key].measure(tokens)

    for graphs in (True, False) if not run.dry else (True,):
        for name, batch in sizes:
            for tokens in used:
                key = f"{name} b{batch} {tokens} of {capacity}{' graphs' if graphs else ''}"
                compiles = COMPILED if tokens == used[0] else KNOWN
                first = graphs and (name, batch) == sizes[0]
                yield Case(key, lambda k=(name, batch, graphs), n=tokens: call(k, n), compiles, first, tiles)  # type: ignore[misc]


def summary(store: Store) -> str:
    """Microseconds of a step for each variant, and how much faster backend="mla" is."""
    lines = []
    for key, row in store.rows("models").items():
        if "us" not in row:
            continue
        ms = [f"{row['us'][v]['median'] / 1e3:.3f}" if v in row["us"] else "" for v in VARIANTS]
        gain = [f"{g:.2f}x {v}" for v, g in row["mla_faster_than"].items()]
        lines.append([key, *ms, f"{row['floor_us'] / 1e3:.3f}", ", ".join(gain)])
    return table(lines, ["layer", *(f"{v} ms" for v in VARIANTS), "floor ms", "mla is faster than"])
