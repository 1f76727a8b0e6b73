"""Products of a few rows with a weight: torch, the library's own, and the floor; alone and in a decode step.

    python -m benchmarks.few_rows
    python -m benchmarks.few_rows --models v2lite --contexts 512 --rows 1

Alone: the projections around an attention of each model, and W_kc and W_v with float32 rows for each head, for each
number of rows, over as many copies of the weight as come from memory and not from a cache. Steps: one layer of a model
of transformers in a ``DynamicCache`` that holds random rows, optimized with ``products="torch"`` and
``products="native"``. The floor is the time in which this process reads the weight, or in a step all weights and the
cache, once. In turns in one process, after results were compared.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import DTYPES, MODELS, Times

import torch  # isort: skip  # after common, which sets the environment
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile.kernels import linear

OUT = Path(__file__).parent / "results" / "few_rows.json"
MEMORY = 200e6  # bytes of weights that are read in turn
WARM_UP = 4  # steps: the first is compiled for its length, the second for any length
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}  # relative, in norm; of a step's logits ten times that


def projections(name: str) -> dict[str, tuple[int, int]]:
    """[O,K] of the weights around an attention."""
    d = MODELS[name].dims
    rows = {"kv_a": (d.L + d.R, d.D), "out": (d.D, d.H * d.V)}
    if d.Q is None:
        return {"q": (d.H * (d.N + d.R), d.D), **rows}
    return {"q_a": (d.Q, d.D), "q_b": (d.H * (d.N + d.R), d.Q), **rows}


def each(product: Any, x: Tensor, weights: list[Tensor]) -> float:
    """Seconds of a product with one of the weights."""
    return common.timed(lambda: [product(x, w) for w in weights]) / len(weights)


def alone(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """Each projection with each number of rows; raises SystemExit where results differ."""
    measured = []
    for weight, (O, K) in projections(name).items():  # noqa: E741
        random = torch.Generator().manual_seed(0)
        bytes_ = O * K * DTYPES[dtype].itemsize
        copies = [torch.randn(O, K, generator=random).to(DTYPES[dtype])]
        copies += [copies[0].clone() for _ in range(int(MEMORY / bytes_))]
        for rows in args.rows:
            x = torch.randn(rows, K, generator=random).to(DTYPES[dtype])
            got, want = linear.run(x, copies[0]).float(), F.linear(x.double(), copies[0].double()).float()
            if not (got - want).norm() <= TOLERANCE[dtype] * want.norm():
                raise SystemExit(f"{name} {weight} {dtype}: results differ; nothing is timed on wrong ones")

            forms = {"torch": partial(each, F.linear, x, copies), "native": partial(each, linear.run, x, copies)}
            times = common.in_turns(forms, args.rounds, args.budget, least=3)
            measured.append({
                "kind": "product", "model": name, "weight": weight, "O": O, "K": K, "rows": rows, "dtype": dtype,
                "ms": {form: asdict(Times.of(t)) for form, t in times.items()},
                "floor_ms": 1e3 * bytes_ / args.bandwidth,
                "torch_over_native": common.median_ratio(times["torch"], times["native"]),
            })  # fmt: skip
    return measured


def converted(x: Tensor, weight: Tensor) -> Tensor:
    """The product for each head as torch has it."""
    return torch.bmm(x, weight.to(x.dtype).mT)


def of_heads(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """W_kc and W_v with each number of rows, as slices of an up-projection; raises SystemExit where results differ."""
    d, measured = MODELS[name].dims, []
    random = torch.Generator().manual_seed(0)
    first = torch.randn(d.H, d.N + d.V, d.L, generator=random).to(DTYPES[dtype])
    copies = [first, *(first.clone() for _ in range(int(MEMORY / first.nbytes)))]
    sides = {"W_kc": [c[:, : d.N].mT for c in copies], "W_v": [c[:, d.N :] for c in copies]}
    for weight, each_copy in sides.items():
        H, O, K = each_copy[0].shape  # noqa: E741
        for rows in args.rows:
            x = torch.randn(H, rows, K, generator=random)
            got, want = linear.run_of_heads(x, each_copy[0]), converted(x.double(), each_copy[0]).float()
            if not (got - want).norm() <= TOLERANCE["float32"] * want.norm():
                raise SystemExit(f"{name} {weight} {dtype}: results differ; nothing is timed on wrong ones")
            forms = {
                "torch": partial(each, converted, x, each_copy),
                "native": partial(each, linear.run_of_heads, x, each_copy),
            }
            times = common.in_turns(forms, args.rounds, args.budget, least=3)
            measured.append({
                "kind": "product", "model": name, "weight": weight, "O": H * O, "K": K, "rows": rows, "dtype": dtype,
                "ms": {form: asdict(Times.of(t)) for form, t in times.items()},
                "floor_ms": 1e3 * each_copy[0].numel() * DTYPES[dtype].itemsize / args.bandwidth,
                "torch_over_native": common.median_ratio(times["torch"], times["native"]),
            })  # fmt: skip
    return measured


def steps(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """A step after each context; raises SystemExit where logits differ."""
    torch._dynamo.reset()
    model = common.build(name, DTYPES[dtype], 1, 2 * max(args.contexts))
    calls = {p: mla_compile.optimize(model, products=p, strict=True) for p in ("torch", "native")}
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    read = sum(p.numel() * p.element_size() for p in model.parameters() if p not in embeddings)
    d, ids, measured = MODELS[name].dims, torch.full((1, 1), 7), []
    for tokens in args.contexts:
        caches = {products: common.filled_cache(model, 1, tokens) for products in calls}
        logits: dict[str, Tensor] = {}

        def step(products: str, caches: Any = caches, logits: dict[str, Tensor] = logits) -> float:
            def call() -> None:
                out = calls[products](input_ids=ids, past_key_values=caches[products], use_cache=True)
                logits[products] = out.logits.float()

            return common.timed(call)

        for _ in range(WARM_UP):
            for products in calls:
                step(products)
        if not (logits["native"] - logits["torch"]).norm() <= 10 * TOLERANCE[dtype] * logits["torch"].norm():
            raise SystemExit(f"{name} {dtype} {tokens}: logits differ; nothing is timed on wrong ones")
        times = common.in_turns({p: partial(step, p) for p in calls}, args.rounds, args.budget, least=3)
        cached = tokens * (d.L + d.R) * DTYPES[dtype].itemsize
        measured.append({
            "kind": "step", "model": name, "context": tokens, "dtype": dtype,
            "ms": {form: asdict(Times.of(t)) for form, t in times.items()},
            "floor_ms": 1e3 * (read + cached) / args.bandwidth,
            "torch_over_native": common.median_ratio(times["torch"], times["native"]),
        })  # fmt: skip
    return measured


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    what = f"{row['weight']} {row['O']}x{row['K']}, {row['rows']}" if row["kind"] == "product" else str(row["context"])
    times = [str(Times(**t)) for t in row["ms"].values()]
    over = f"{row['ms']['native']['median'] / row['floor_ms']:.2f}"
    return [row["model"], row["kind"], what, row["dtype"], *times, f"{row['torch_over_native']:.2f}",
            f"{row['floor_ms']:.2f}", over]  # fmt: skip


HEAD = (
    "model",
    "",
    "rows or context",
    "dtype",
    "torch ms",
    "native ms",
    "torch / native",
    "floor ms",
    "native / floor",
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=common.names(list(MODELS)), default=["v2lite", "minicpm3", "v3"])
    parser.add_argument("--dtypes", type=common.names(list(TOLERANCE)), default=list(TOLERANCE))
    parser.add_argument("--rows", type=common.words(int), default=[1, 2, 4])
    parser.add_argument("--contexts", type=common.words(int), default=[512, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.bandwidth = common.read_bandwidth()
    about = {"benchmark": "few_rows", "machine": common.machine(), "read_bandwidth_GBps": args.bandwidth / 1e9}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            for dtype in args.dtypes:
                for kind in (alone, of_heads, steps):
                    for row in kind(args, name, dtype):
                        rows.append(row)
                        print("  " + "  ".join(describe(row)), flush=True)
                    common.write(args.out, about, rows)
                    gc.collect()
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
