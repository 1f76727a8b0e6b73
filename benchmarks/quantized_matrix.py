"""Which quantized formats of which model families are absorbed: real runs of tiny models, a table of docs/support.md.

    python -m benchmarks.quantized_matrix                                         # every family, format and way
    python -m benchmarks.quantized_matrix --families youtu --formats NF4 GPTQ     # some cells again; the others stay

A cell is a format on all projections of the attention of a one-layer model: a prompt and a decode step through one way,
batch 4, with ``codegen="eager"`` and ``forms="absorbed"``. It holds the codes of the attention sites, and the errors of
the result and of the original against the model with the dequantized weights in float64. Formats whose kernels need a
GPU are computed by a reference. The data is written after each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import machine, names, write

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor, nn

import mla_compile
from benchmarks import quantized_layers as q
from benchmarks.support_matrix import Cell, Sites, cache_of, compiled, prompted, stepped
from tests.support import models

OUT = Path(__file__).parent / "results" / "quantized_matrix.json"
BATCH, TOKENS = 4, 10
ALLOWED, ULP = 1.5, 2  # errors of the original, and units in the last place: what the check of a site allows
# Widths that groups of 32 columns, blocks of 64 in a row, and tiles of 32 rows divide.
SIZES = {"num_hidden_layers": 1, "q_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 32, "v_head_dim": 32}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None},
    "kimi_linear": {"q_lora_rank": None, "layer_types": ["full_attention"]},
    "deepseek_v32": {"index_head_dim": 40},
    "longcat_flash": {"num_hidden_layers": None, "head_dim": 32},
}


@dataclass(frozen=True)
class Format:
    """``make`` replaces a dense layer, in ``dtype``; with ``autocast`` calls are made under it."""

    make: Callable[[nn.Linear], q.Made]
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False


FORMATS = {
    "bfloat16": Format(q.dense),
    "float16": Format(q.dense, torch.float16),
    "torchao int8": Format(q.torchao("Int8WeightOnlyConfig")),
    "torchao int4": Format(q.torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=q.GROUP)),
    "torchao float8": Format(q.torchao("Float8WeightOnlyConfig")),
    "torchao W8A8": Format(q.torchao("Int8DynamicActivationInt8WeightConfig")),
    "NF4": Format(q.nf4),
    "LLM.int8()": Format(q.bitsandbytes_int8),
    "GPTQ": Format(q.by_hand(q.GPTQ)),
    "AWQ": Format(q.by_hand(q.AWQ)),
    "FP8 blocks": Format(q.float8_blocks),
    "compressed-tensors INT4": Format(q.compressed_tensors),
    "LoRA": Format(q.lora(q.dense)),
    "QLoRA": Format(q.lora(q.nf4)),
    "autocast": Format(q.dense, torch.float32, autocast=True),
}


def absorbing(model: Any) -> tuple[Any, Sites]:
    """The door ``optimize``, told to absorb whatever the costs are."""
    fast = mla_compile.optimize(model, codegen="eager", forms="absorbed", verify=False)
    return fast, lambda: fast.mla_report.sites


WAYS: dict[str, tuple[Callable[[Any], tuple[Any, Sites]], str]] = {
    "optimize": (absorbing, "dynamic"),
    "backend": (lambda model: compiled(model, forms="absorbed"), "dynamic"),
    "StaticCache": (absorbing, "static"),
}


def quantized(family: str, form: Format) -> tuple[Any, Any]:
    """The model with quantized attentions, and the one in float64 with what they stand for."""
    sizes = {k: v for k, v in {**SIZES, **OTHERS.get(family, {})}.items() if v is not None}
    model = models.build(family, attn="sdpa", dtype=form.dtype, **sizes)
    made: dict[str, Tensor] = {}
    for where, attention in list(model.named_modules()):
        layers = {n: m for n, m in attention.named_children() if type(m) is nn.Linear}
        if "kv_b_proj" in layers:
            for name, layer in layers.items():
                own, made[f"{where}.{name}.weight"] = form.make(layer)
                setattr(attention, name, own.eval())
    # Everything else as the model has it, in its own precision.
    exact = models.build(family, attn="sdpa", dtype=form.dtype, **sizes).double()
    weights = dict(exact.named_parameters())
    for name, weight in made.items():
        weights[name].data = weight
    return model, exact


def decoded(call: Any, model: Any, kind: str, ids: Tensor) -> Tensor:
    """Logits behind the prompt and of a step."""
    cache = cache_of(kind, model)
    return torch.cat([prompted(call, cache, ids), stepped(call, cache, ids)], 1)


def run(family: str, form: Format, way: str) -> Cell:
    """One cell."""
    wrap, kind = WAYS[way]
    model, exact = quantized(family, form)
    ids = models.prompt(BATCH, TOKENS, 0)["input_ids"]
    truth = decoded(exact, exact, kind, ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=form.autocast):
        try:
            expected = decoded(model, model, kind, ids).double()
        except Exception as error:
            raise RuntimeError(f"the original does not run: {error}") from error
        call, sites = wrap(model)
        result = decoded(call, model, kind, ids).double()
    size = truth.square().mean().sqrt()
    error, own = (float((x - truth).square().mean().sqrt() / size) for x in (result, expected))
    told = sites()
    eps = torch.finfo(torch.bfloat16 if form.autocast else form.dtype).eps
    return {
        "expected": 2 * sum(hasattr(m, "kv_b_proj") for m in model.modules()),  # in the graphs of prompt and step
        "codes": dict(Counter(str(s.code) for s in told)),
        "parts": dict(Counter(str(k.code) for s in told for k in s.kept)),
        "reasons": {str(x.code): f"{x.reason} ({x.blame})" for s in told for x in (s, *s.kept) if x.blame is not None},
        "error": error,
        "original": own,
        "allowed": ALLOWED * own + ULP * eps,
        "failed": None,
    }


def measured(family: str, name: str, way: str) -> Cell:
    """One cell; a run that fails is a result too."""
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            result = run(family, FORMATS[name], way)
    except Exception as error:  # noqa: BLE001  libraries raise anything; the cell says what
        words = (str(error).strip().splitlines() or [""])[0][:160]
        result = {"failed": f"{type(error).__name__}: {words}"}
    about = {"family": family, "format": name, "way": way, "verdict": verdict(result)}
    return {**about, **result, "seconds": round(time.perf_counter() - start, 1)}


def verdict(c: Cell) -> str:
    """``yes``, ``in part``, a code, ``wrong`` or ``fails``: one word for the table."""
    if c["failed"]:
        return "fails"
    if not c["error"] <= c["allowed"]:
        return "wrong"
    if not c["codes"].get("absorbed"):
        return str(max(c["codes"], key=c["codes"].get, default="no attention"))
    whole = set(c["codes"]) == {"absorbed"} and not c["parts"] and c["codes"]["absorbed"] >= c["expected"]
    return "yes" if whole else "in part"


def main(argv: Iterable[str] | None = None) -> int:
    """Command line; exit code 1 where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=names(list(models.FAMILIES)), default=list(models.FAMILIES))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(None if argv is None else list(argv))
    cells: dict[tuple[str, str, str], Cell] = {}
    if args.out.exists():
        cells = {(c["family"], c["format"], c["way"]): c for c in json.loads(args.out.read_text())["rows"]}
    for family in args.families:
        for name in args.formats:
            for way in args.ways:
                cells[family, name, way] = c = measured(family, name, way)
                said = c["failed"] or f"{c['error']:.1e} {c['original']:.1e} {c['codes']}"
                print(f"{family:14} {name:24} {way:12} {c['verdict']:8} {c['seconds']:6.1f} s  {said}", flush=True)
                order = [(f, n, w) for f in models.FAMILIES for n in FORMATS for w in WAYS]
                about = {"benchmark": "quantized_matrix", "machine": machine()}
                write(args.out, about, [cells[k] for k in order if k in cells])
    return int(any(c["verdict"] == "wrong" for c in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
