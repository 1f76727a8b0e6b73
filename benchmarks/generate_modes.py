"""Every cache and every way to generate of transformers, with an optimized model: a table of results/README.md.

    python -m benchmarks.generate_modes
    python -m benchmarks.generate_modes --families minicpm3 --modes "quantized cache, fp8"     # some cells again

A cell is ``generate()`` of a tiny model of two layers, a padded batch of two, and of ``optimize`` of it, with
``codegen="eager"`` and ``forms="absorbed"``: whether the tokens are equal, the codes of the attention sites of all
graphs, and how many graphs were compiled. Caches that want another package are run where it is installed. The data is
written after each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, names, write

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor

import mla_compile
from benchmarks.support_matrix import Cell
from tests.support import models, serving

OUT = Path(__file__).parent / "results" / "generate_modes.json"
FAMILIES = ("deepseek_v3", "minicpm3")
NEW = 10
Generate = Callable[[Any, dict[str, Tensor]], Tensor]


def told(**settings: Any) -> Generate:
    """``generate`` with these settings; what is drawn is drawn from one seed."""

    def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **settings})

    return run


def quantized(**settings: Any) -> Generate:
    """``generate`` with a quantized cache of these settings."""
    return told(cache_implementation="quantized", cache_config=settings)


def continued(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """A second turn on the cache of the first."""
    first = told(return_dict_in_generate=True)(model, inputs)
    ids = torch.cat([first.sequences, torch.full((len(first.sequences), 3), 7)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), ids.shape[1] - inputs["input_ids"].shape[1])], 1)
    again = {"input_ids": ids, "attention_mask": mask.long()}
    return told(past_key_values=first.past_key_values)(model, again)


def alone(run: Generate) -> Generate:
    """One sequence: transformers assists no batch."""
    return lambda model, inputs: run(model, {k: v[:1] for k, v in inputs.items()})


def assisted(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Tokens proposed by a smaller model of the same vocabulary."""
    helper = models.build("deepseek_v2", num_hidden_layers=1)
    return told(assistant_model=helper)(model, inputs)


def together(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Requests of several lengths at once, where the model can; else each by itself."""
    ids = serving.prompts((7, 2, 12))
    served = hasattr(model, "mla_batching")
    found = serving.tokens(model, ids, NEW) if served else [serving.alone(model, one, NEW) for one in ids]
    return torch.tensor(found)


GROUPS = {"nbits": 4, "q_group_size": 16, "residual_length": 4}
MODES: dict[str, Generate] = {
    "greedy": told(),
    "sampling": told(do_sample=True, temperature=0.7, top_p=0.9),
    "several sequences": told(do_sample=True, num_return_sequences=3),
    "beams": told(num_beams=3),
    "sampled beams": told(num_beams=3, do_sample=True),
    "prompt lookup": alone(told(prompt_lookup_num_tokens=3)),
    "assisted by a model": alone(assisted),
    "prompt in chunks": told(prefill_chunk_size=4),
    "a second turn": continued,
    "no cache": told(use_cache=False),
    "attentions returned": told(output_attentions=True, return_dict_in_generate=False),
    "static cache": told(cache_implementation="static"),
    "offloaded cache": told(cache_implementation="offloaded"),
    "offloaded static cache": told(cache_implementation="offloaded_static"),
    "quantized cache, fp8": quantized(backend="fp8"),
    "quantized cache, quanto": quantized(backend="quanto", **GROUPS),
    "quantized cache, hqq": quantized(backend="hqq", axis_key=1, axis_value=1, **GROUPS),
    "continuous batching": together,
}


def run(family: str, mode: str) -> Cell:
    """One cell."""
    generate, inputs = MODES[mode], models.prompt()
    # With tied embeddings a tiny random model says the last token again, whatever its attention does.
    model = models.build(family, **({"tie_word_embeddings": False} if generate is together else {}))
    try:
        expected = generate(model, inputs)
    except Exception as error:
        raise RuntimeError(f"the original does not run: {type(error).__name__}: {error}") from error
    make = mla_compile.continuous_batching if generate is together else mla_compile.optimize
    fast = make(model, codegen="eager", forms="absorbed", verify=False)
    result = generate(fast, inputs)
    sites = fast.mla_report.sites
    batching = getattr(fast, "mla_batching", None)
    return {
        "equal": bool(torch.equal(result, expected)),
        "codes": dict(Counter(str(s.code) for s in sites)),
        "reasons": {str(s.code): f"{s.reason} ({s.blame})" for s in sites if s.blame is not None},
        "graphs": fast.forward.compiler.graphs if batching is None else len(batching.graphs),
        "failed": None,
    }


def measured(family: str, mode: str) -> Cell:
    """One cell; a run that fails is a result too."""
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = run(family, mode)
    except Exception as error:  # noqa: BLE001  libraries raise anything; the cell says what
        words = (str(error).strip().splitlines() or [""])[0][:160]
        result = {"failed": words if "the original" in words else f"{type(error).__name__}: {words}"}
    about = {"family": family, "mode": mode, "verdict": verdict(result)}
    return {**about, **result, "seconds": round(time.perf_counter() - start, 1)}


def verdict(c: Cell) -> str:
    """``yes``, ``in part``, ``no``, ``wrong`` or ``fails``: one word for the table."""
    if c["failed"]:
        return "fails"
    if not c["equal"]:
        return "wrong"
    if not c["codes"].get("absorbed"):
        return "no"
    return "yes" if set(c["codes"]) == {"absorbed"} else "in part"


def main(argv: Iterable[str] | None = None) -> int:
    """Command line; exit code 1 where a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=names(list(models.FAMILIES)), default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(None if argv is None else list(argv))
    cells: dict[tuple[str, str], Cell] = {}
    if args.out.exists():
        cells = {(c["family"], c["mode"]): c for c in json.loads(args.out.read_text())["rows"]}
    for mode in args.modes:
        for family in args.families:
            cells[family, mode] = c = measured(family, mode)
            said = c["failed"] or f"{c['graphs']} graphs {c['codes']}"
            print(f"{family:14} {mode:24} {c['verdict']:8} {c['seconds']:6.1f} s  {said}", flush=True)
            order = [(f, m) for m in MODES for f in models.FAMILIES]
            about = {"benchmark": "generate_modes", "machine": machine()}
            write(args.out, about, [cells[k] for k in order if k in cells])
    return int(any(c["verdict"] == "wrong" for c in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
