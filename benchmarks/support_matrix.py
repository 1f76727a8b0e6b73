"""Which model families decode absorbed through which door: real runs of tiny models, the data of docs/support.md.

    python -m benchmarks.support_matrix                                    # every family, every way
    python -m benchmarks.support_matrix --families minicpm3 --ways onnx    # some cells again; the others stay

A cell is one family through one way: a prompt and two decode steps with the result and with the original, float32,
batch 1. It holds the codes of the attention sites and the largest difference of the logits over their RMS. Models are
those of ``tests/support/models.py``, built from transformers configs with seeded weights. Graphs run with
``codegen="eager"``: what is shown is what the passes do, and Inductor adds compile time to it. The data is written
after each cell.
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
from torch import Tensor, nn

import mla_compile
from mla_compile import backend
from mla_compile.report.report import SiteReport
from tests.support import models

OUT = Path(__file__).parent / "results" / "support_matrix.json"
PROMPT, STEPS, ROOM = 9, 2, 16
LIMIT = 1e-3  # largest accepted difference of float32 logits over their RMS
Cell = dict[str, Any]


def cache_of(kind: str, model: Any) -> Any:
    """An empty cache of transformers."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    return transformers.DynamicCache(config=model.config)


def prompted(call: Callable[..., Any], cache: Any, ids: Tensor) -> Tensor:
    """Logits [B,1,vocabulary] behind a prompt through ``call``."""
    return call(ids[:, :PROMPT], past_key_values=cache).logits[:, -1:]


def stepped(call: Callable[..., Any], cache: Any, ids: Tensor) -> Tensor:
    """Logits [B,steps,vocabulary] of decode steps through ``call`` for the tokens of ``ids`` behind the prompt."""
    calls = ((ids[:, p : p + 1], torch.full((len(ids), 1), p)) for p in range(PROMPT, ids.shape[1]))
    return torch.cat([call(token, past_key_values=cache, position_ids=where).logits for token, where in calls], 1)


Sites = Callable[[], Sequence[SiteReport]]


def live(wrap: Callable[[Any], tuple[Any, Sites]], attn: str, kind: str) -> Callable[[str], Cell]:
    """A way that calls a compiled model: ``wrap`` gives it and its sites so far. Those of the steps' graphs count."""

    def run(family: str) -> Cell:
        model = models.build(family, attn=attn)
        ids = models.prompt(1, PROMPT + STEPS, 0)["input_ids"]
        cache, own = cache_of(kind, model), cache_of(kind, model)
        expected = torch.cat([prompted(model, cache, ids), stepped(model, cache, ids)], 1)
        call, sites = wrap(model)
        first = prompted(call, own, ids)
        prompt = sites()
        error = difference(torch.cat([first, stepped(call, own, ids)], 1), expected)
        steps = sites()[len(prompt) :] or prompt  # a graph with any number of queries serves both
        return {**cell((steps, error), family), "prompt": dict(Counter(str(s.code) for s in prompt))}

    return run


def optimized(model: Any) -> tuple[Any, Sites]:
    """The door ``optimize``."""
    fast = mla_compile.optimize(model, codegen="eager", verify=False)
    return fast, lambda: fast.mla_report.sites


def compiled(model: Any, **options: Any) -> tuple[Any, Sites]:
    """The door ``torch.compile(backend="mla")``, which keeps the newest reports of the process."""
    before = backend.reports()

    def sites() -> Sequence[SiteReport]:
        return [s for r in backend.reports() if not any(r is old for old in before) for s in r.sites]

    return torch.compile(model, backend="mla", options={"codegen": "eager", **options}), sites


class Step(nn.Module):
    """A decode step whose cache is plain tensors: torch cannot decompose a program that takes a DynamicCache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, where: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Token [1,1], position [1,1], two tensors per layer -> logits, the same tensors one row longer."""
        cache = cache_of("dynamic", self.model)
        for layer, (first, second) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(first, second, layer)
        logits = self.model(ids, past_key_values=cache, position_ids=where).logits
        return (logits, *(t for layer in cache.layers for t in (layer.keys, layer.values)))


def exported(family: str) -> Cell:
    """A decode step through torch.export."""
    model = models.build(family, attn="sdpa")
    ids = models.prompt(1, PROMPT + 1, 0)["input_ids"]
    cache = cache_of("dynamic", model)
    model(ids[:, :PROMPT], past_key_values=cache)
    given = (ids[:, PROMPT:], torch.tensor([[PROMPT]]), *(t for x in cache.layers for t in (x.keys, x.values)))
    program = torch.export.export(Step(model), given, strict=False)
    fast = mla_compile.optimize(program, verify=False)
    error = difference(fast.module()(*given)[0], Step(model)(*given)[0])
    return cell((fast.graph_module.meta["mla_report"].sites, error), family)


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
    """What a run showed. ``codes`` counts the sites of its decode graphs, of which there may be several."""
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
    others = set(c["codes"]) - {"absorbed"}
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
