"""Which model families decode absorbed through which door: real runs of tiny models, the data of docs/support.md.

    python -m benchmarks.support_matrix                                    # every family, every way
    python -m benchmarks.support_matrix --families minicpm3 --ways onnx    # some cells again; the others stay

A cell is one family through one way: a prompt and two decode steps with the result and with the original, float32,
batch 1. It holds the codes of the attention sites and the largest difference of the logits over their RMS. Models are
those of ``tests/models.py``, built from transformers configs with seeded weights. Graphs run with ``codegen="eager"``:
what is shown is what the passes do, and Inductor adds compile time to it. The data is written after each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, names, write

import torch  # isort: skip  # after common, which sets the environment
import transformers
from torch import Tensor
from transformers.integrations.executorch import register_dynamic_cache_export_support

import mla_compile
from mla_compile.report import Report, SiteReport
from tests import models

OUT = Path(__file__).parent / "results" / "support_matrix.json"
PROMPT, STEPS, ROOM = 9, 2, 16
LIMIT = 1e-3  # largest accepted difference of float32 logits over their RMS
Cell = dict[str, Any]


def cache_of(kind: str, model: Any) -> Any:
    """An empty cache of transformers."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    return transformers.DynamicCache(config=model.config)


def logits_of(call: Callable[..., Any], model: Any, kind: str, ids: Tensor) -> Tensor:
    """Logits [1,1+STEPS,vocabulary] of a prompt and of decode steps through ``call``; the tokens are given."""
    cache = cache_of(kind, model)
    result = [call(ids[:, :PROMPT], past_key_values=cache).logits[:, -1:]]
    for position in range(PROMPT, PROMPT + STEPS):
        where = torch.tensor([[position]])
        result.append(call(ids[:, position : position + 1], past_key_values=cache, position_ids=where).logits)
    return torch.cat(result, 1)


def live(wrap: Callable[[Any], tuple[Any, Callable[[], Report]]], attn: str, kind: str) -> Callable[[str], Cell]:
    """A way that calls a compiled model: ``wrap`` gives the callable and its report so far."""

    def run(family: str) -> Cell:
        model = models.build(family, attn=attn)
        ids = models.prompt(1, PROMPT + STEPS, 0)["input_ids"]
        expected = logits_of(model, model, kind, ids)
        call, report = wrap(model)
        actual = logits_of(call, model, kind, ids)
        return cell((report().sites, difference(actual, expected)), family)

    return run


def optimized(model: Any) -> tuple[Any, Callable[[], Report]]:
    """The door ``optimize``."""
    fast = mla_compile.optimize(model, codegen="eager", verify=False)
    return fast, lambda: fast.mla_report


def compiled(model: Any) -> tuple[Any, Callable[[], Report]]:
    """The door ``torch.compile(backend="mla")``."""
    from mla_compile import backend

    before = len(backend.reports())
    step = torch.compile(model, backend="mla", options={"codegen": "eager"})
    return step, lambda: Report.merged(backend.reports()[before:])


def exported(family: str) -> Cell:
    """A decode step through torch.export: the cache is an input, and an output."""
    model = models.build(family, attn="sdpa")
    ids = models.prompt(1, PROMPT + 1, 0)["input_ids"]

    def filled() -> Any:
        cache = cache_of("dynamic", model)
        model(ids[:, :PROMPT], past_key_values=cache)
        return cache

    given = {"input_ids": ids[:, PROMPT:], "position_ids": torch.tensor([[PROMPT]])}
    expected = model(**given, past_key_values=filled()).logits
    register_dynamic_cache_export_support()  # else torch.export does not know the class
    program = torch.export.export(model, (), {**given, "past_key_values": filled()}, strict=False)
    fast = mla_compile.optimize(program, verify=False)
    actual = fast.module()(**given, past_key_values=filled()).logits
    return cell((fast.graph_module.meta["mla_report"].sites, difference(actual, expected)), family)


def onnx(family: str) -> Cell:
    """The portable ONNX profile; export_onnx itself compares prompts and steps in ONNX Runtime with the model."""
    with tempfile.TemporaryDirectory() as folder:
        done = mla_compile.export_onnx(models.build(family), Path(folder) / "model")
    return cell((done.report.sites, done.verification.error), family)


WAYS: dict[str, Callable[[str], Cell]] = {
    "optimize, DynamicCache, sdpa": live(optimized, "sdpa", "dynamic"),
    "optimize, DynamicCache, eager": live(optimized, "eager", "dynamic"),
    "optimize, StaticCache, sdpa": live(optimized, "sdpa", "static"),
    "backend, DynamicCache, sdpa": live(compiled, "sdpa", "dynamic"),
    "backend, StaticCache, sdpa": live(compiled, "sdpa", "static"),
    "export": exported,
    "onnx": onnx,
}


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the root mean square of what is expected."""
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


def cell(found: tuple[Sequence[SiteReport], float | None], family: str) -> Cell:
    """What a run showed. ``absorbed`` and ``codes`` count sites of all its graphs, prompts' included."""
    sites, error = found
    codes = Counter(str(s.code) for s in sites)
    kept = Counter(str(k.code) for s in sites for k in s.kept)
    reasons = {str(x.code): f"{x.reason} ({x.blame})" for s in sites for x in (s, *s.kept) if x.blame is not None}
    return {
        "expected": models.FAMILIES[family].mla_sites,
        "absorbed": codes["absorbed"],
        "codes": dict(codes),
        "parts": dict(kept),
        "reasons": reasons,
        "error": error,
        "failed": None,
    }


def measured(family: str, way: str) -> Cell:
    """One cell; a run that fails is a result too."""
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            result = WAYS[way](family)
    except Exception as error:  # noqa: BLE001  torch.export and transformers raise anything; the cell says what
        words = (str(error).strip().splitlines() or [""])[0][:160]
        result = {"expected": models.FAMILIES[family].mla_sites, "failed": f"{type(error).__name__}: {words}"}
    about = {"family": family, "way": way, "verdict": verdict(result)}
    return {**about, **result, "seconds": round(time.perf_counter() - start, 1)}


def verdict(c: Cell) -> str:
    """``yes``, ``in part``, ``no``, ``wrong`` or ``fails``: one word for the table."""
    if c["failed"]:
        return "fails"
    if c["error"] is not None and not c["error"] < LIMIT:
        return "wrong"
    if not c["absorbed"]:
        return "no"
    others = set(c["codes"]) - {"absorbed", "cost_prefill"}
    return "in part" if others or c["parts"] or c["absorbed"] < c["expected"] else "yes"


def main(argv: Iterable[str] | None = None) -> int:
    """Command line; exit code 1 where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=names(list(models.FAMILIES)), default=list(models.FAMILIES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(None if argv is None else list(argv))
    cells: dict[tuple[str, str], Cell] = {}
    if args.out.exists():
        cells = {(c["family"], c["way"]): c for c in json.loads(args.out.read_text())["rows"]}
    for family in args.families:
        for way in args.ways:
            cells[family, way] = c = measured(family, way)
            print(
                f"{family:14} {way:32} {c['verdict']:8} {c['seconds']:6.1f} s  {c['failed'] or c['codes']}", flush=True
            )
            order = [(f, w) for f in models.FAMILIES for w in WAYS if (f, w) in cells]
            about = {"benchmark": "support_matrix", "machine": machine(), "limit": LIMIT}
            write(args.out, about, [cells[k] for k in order])
    return int(any(c["verdict"] == "wrong" for c in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
