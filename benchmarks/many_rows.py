"""Products of many rows with a weight of 16 bits, those of experts, and prompts: torch beside the library's operators.

    python -m benchmarks.many_rows
    python -m benchmarks.many_rows --models v2lite --prompts 512 --rows 128

Products: the output projection of each model. Experts: 64 of DeepSeek-V2-Lite's sizes, six for each token. Prompts: one
layer with a small MLP and an empty ``DynamicCache``, in eager mode and optimized with ``products="torch"`` and
``products="native"``. In turns in one process, after results were compared.
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
from torch import Tensor

import mla_compile
from mla_compile.kernels import grouped, linear

OUT = Path(__file__).parent / "results" / "many_rows.json"
EXPERTS, CHOSEN, WIDTH, HIDDEN = 64, 6, 2 * 1408, 2048  # of DeepSeek-V2-Lite: gate and up projection
TOLERANCE = 0.02  # relative, in norm; of a prompt's logits five times that, since the original rounds more


def same(what: str, got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    """Raise SystemExit where results differ."""
    if not (got.float() - want.float()).norm() <= tolerance * want.float().norm():
        raise SystemExit(f"{what}: results differ; nothing is timed on wrong ones")


def row(args: argparse.Namespace, calls: dict[str, Any], **about: Any) -> dict[str, Any]:
    """What was measured, in turns."""
    times = common.in_turns(
        {n: partial(common.timed, call) for n, call in calls.items()}, args.rounds, args.budget, least=3
    )
    ms = {form: asdict(Times.of(t)) for form, t in times.items()}
    return {**about, "ms": ms, "torch_over_native": common.median_ratio(times["torch"], times["native"])}


def ways(dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with which graphs call the operators on this machine."""
    cpu = torch.device("cpu")
    most = max((n for n in (1, 2, 4, 8, 16, 32) if linear.pays(cpu, dtype, dtype, n)), default=0)
    return {"most": most, "wide": linear.many_rows(cpu, dtype, dtype) == torch.float32}


def products(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """The output projection with each number of rows."""
    d, given = MODELS[name].dims, ways(DTYPES[dtype])
    weight, found = torch.randn(d.D, d.H * d.V).to(DTYPES[dtype]), []
    for rows in args.rows:
        x = torch.randn(rows, d.H * d.V).to(DTYPES[dtype])
        calls = {"torch": partial(F.linear, x, weight), "native": partial(linear.run, x, weight, **given)}
        same(f"{name} {dtype} {rows}", calls["native"](), F.linear(x.float(), weight.float()))
        about = {"kind": "product", "model": name, "dtype": dtype, "O": d.D, "K": d.H * d.V, "rows": rows}
        found.append(row(args, calls, **about))
    return found


def experts(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """Products of experts after each number of tokens, which choose their experts at random."""
    if name != "v2lite":
        return []
    weight, given, found = torch.randn(EXPERTS, WIDTH, HIDDEN).to(DTYPES[dtype]), ways(DTYPES[dtype]), []
    for tokens in args.tokens:
        chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()
        x = torch.randn(tokens * CHOSEN, HIDDEN).to(DTYPES[dtype])
        calls = {
            "torch": partial(torch._grouped_mm, x, weight.mT, ends),
            "native": partial(grouped.run, x, weight, ends, **given),
        }
        same(f"experts {dtype} {tokens}", calls["native"](), torch._grouped_mm(x, weight.mT, ends))
        about = {"kind": "experts", "model": name, "dtype": dtype, "O": WIDTH, "K": HIDDEN, "rows": tokens}
        found.append(row(args, calls, **about))
    return found


def prompts(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """Prompts of each length."""
    from transformers import DynamicCache

    torch._dynamo.reset()
    model, found = common.build(name, DTYPES[dtype], 1, 2 * max(args.prompts)), []
    calls = {p: mla_compile.optimize(model, products=p, strict=True) for p in ("torch", "native")}
    for tokens in args.prompts:
        ids = torch.arange(tokens)[None] % 250

        def prompt(call: Any, ids: Tensor = ids) -> Tensor:
            return call(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True).logits

        given = {form: partial(prompt, call) for form, call in ({"eager": model} | calls).items()}
        results = {form: (call(), call())[1] for form, call in given.items()}  # the first call is compiled
        same(f"{name} {dtype} prompt", results["native"], results["eager"], 5 * TOLERANCE)
        found.append(row(args, given, kind="prompt", model=name, dtype=dtype, rows=tokens))
    return found


def describe(found: dict[str, Any]) -> list[str]:
    """One row as text."""
    times = [str(Times(**found["ms"][form])) if form in found["ms"] else "" for form in ("eager", "torch", "native")]
    return [
        found["model"],
        found["kind"],
        found["dtype"],
        str(found["rows"]),
        *times,
        f"{found['torch_over_native']:.2f}",
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=common.names(list(MODELS)), default=["v2lite", "minicpm3"])
    parser.add_argument("--dtypes", type=common.names(["bfloat16", "float16"]), default=["bfloat16", "float16"])
    parser.add_argument("--rows", type=common.words(int), default=[8, 32, 128, 512])
    parser.add_argument("--tokens", type=common.words(int), default=[1, 4, 32, 512])
    parser.add_argument("--prompts", type=common.words(int), default=[128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    about = {
        "benchmark": "many_rows",
        "machine": common.machine(),
        "bfloat16_instructions": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    }
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            for dtype in args.dtypes:
                for kind in (products, experts, prompts):
                    rows += kind(args, name, dtype)
                    common.write(args.out, about, rows)
                    gc.collect()
    head = ("model", "", "dtype", "rows or tokens", "eager ms", "torch ms", "native ms", "torch / native")
    print(common.table([describe(found) for found in rows], head))


if __name__ == "__main__":
    main()
