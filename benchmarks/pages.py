"""The tables of the documentation, written from data and code: run it after either changed.

    python -m benchmarks.pages            # write
    python -m benchmarks.pages --check    # exit 1 where a page is not what the data says; in CI

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in README.md, a page of docs/, or
benchmarks/results/README.md, which shows the measurements beside their data. Everything else is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import compiled, executed
from mla_compile.codes import CODES, Code
from mla_compile.workbench.step_formulas import LABELS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"<!-- begin ([^>]+?) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
NAMES = {"v2lite": "DeepSeek-V2-Lite", "minicpm3": "MiniCPM3", "v3": "DeepSeek-V3"}
FORMS = {"inductor": "`torch.compile`", "optimize": "`optimize`", "saved": "`load` of a saved folder"}
PROGRAMS = {
    "ours": "mla bfloat16", "llama_bfloat16": "llama.cpp bfloat16", "inductor": "Inductor", "eager": "eager",
    "ours_int8": "mla int8", "ours_int4": "mla int4", "llama_q8_0": "llama.cpp Q8_0",
    "llama_q4_k_m": "llama.cpp Q4_K_M",
}  # fmt: skip
SCALES = ("plain", "sharp", "outlier", "offset")
WORDS = {"absorbed": "absorbed", "kept": "kept", "refused": "refused", "not_mla": "not MLA"}


def data(name: str) -> dict[str, Any]:
    """One file of measurements."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(c) for c in row) + " |" for row in rows)])


def where(about: Mapping[str, Any]) -> str:
    """The machine of a measurement, in a line."""
    m = about["machine"]
    words = [m["cpu"], m["isa"], f"{m['threads']} thread{'s' if m['threads'] > 1 else ''}", f"torch {m['torch']}"]
    words += [f"transformers {m['transformers']}"] if "transformers" in m else []
    return ", ".join([*words, m["date"][:10]])


# The codes of a report.


def all_codes() -> str:
    """Every code, by verdict, with a link to its section, which has the meaning."""
    codes = {verdict: [f"[`{c}`](#{c})" for c, i in CODES.items() if i.verdict == verdict] for verdict in WORDS}
    return table(("verdict", "codes"), ((word, ", ".join(codes[verdict])) for verdict, word in WORDS.items()))


def one_code(code: str) -> str:
    """Verdict, meaning and advice of one code, in the words of a report."""
    info = CODES[Code(code)]
    return f"**{WORDS[info.verdict]}**: {info.meaning}." + (f"\n\nTo change it: {info.fix}." if info.fix else "")


# Decisions.


def decisions() -> str:
    """Every record, by number, with its status where it is not accepted."""
    lines = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title, status = re.findall(r"^(?:# \d+: |Status: )(.+)$", path.read_text(), re.MULTILINE)[:2]
        note = "" if status == "accepted" else f", {status}"
        lines.append(f"{int(path.name[:3])}. [{title}](decisions/{path.name}){note}")
    return "\n".join(lines)


# Measurements.


def _decode(rows: Iterable[Mapping[str, Any]], contexts: Sequence[int]) -> str:
    lines = []
    for r in (r for r in rows if r["context"] in contexts and r["kind"] == "dynamic"):
        ms, times = {k: v["median"] for k, v in r["ms"].items()}, r["faster_than"]
        cells = [f"{ms[k]:.1f}" if k in ms else "" for k in ("eager", "inductor", "mla")]
        cells += [f"{times[k]:.1f}x" if k in times else "" for k in ("eager", "inductor")]
        lines.append((NAMES[r["model"]], r["dtype"], r["context"], *cells))
    return table(
        ("sizes", "dtype", "cached tokens", "eager ms", "Inductor ms", "mla ms", "vs eager", "vs Inductor"), lines
    )


def _growing() -> list[dict[str, Any]]:
    return [*data("decode_cpu_dynamic")["rows"], *data("decode_cpu_dynamic_v3")["rows"]]


def decode_all() -> str:
    """Every measured step with a cache that grows."""
    return _decode(_growing(), sorted({r["context"] for r in _growing()})) + f"\n\n{where(data('decode_cpu_dynamic'))}."


def decode_some() -> str:
    """What the README shows."""
    return _decode((r for r in _growing() if r["dtype"] == "bfloat16"), (512, 8192))


def decode_line() -> str:
    """The result in one sentence: DeepSeek-V3, the longest cache."""
    rows = [r for r in _growing() if (r["model"], r["dtype"], r["kind"]) == ("v3", "bfloat16", "dynamic")]
    best = max(rows, key=lambda r: r["context"])
    ms, times = {k: v["median"] for k, v in best["ms"].items()}, best["faster_than"]
    return (
        f"**A bfloat16 decode step of one DeepSeek-V3 layer with {best['context']:,} cached tokens "
        f"takes {ms['mla']:.1f} ms\non 2 CPU cores instead of {ms['inductor']:.1f} ms with Inductor "
        f"({times['inductor']:.1f}x) and {ms['eager']:,.1f} ms with eager PyTorch ({times['eager']:.1f}x). "
        "Not yet run on a GPU.**"
    )


def decode_static(file: str = "decode_cpu_static_32k") -> str:
    """Steps with a cache of fixed size, beside the time in which their bytes can be read and their FLOPs done."""
    about = data(file)
    rows = (
        (
            NAMES[r["model"]], r["dtype"], r["context"],
            f"{r['ms']['eager']['median']:.0f}" if "eager" in r["ms"] else "",
            f"{r['ms']['mla']['median']:.1f}", f"{r['floor_ms']:.1f}", f"{r['over_floor']:.1f}x",
            f"{r['roofline_ms']:.1f}", f"{r['over_roofline']:.1f}x",
        )
        for r in about["rows"]
    )  # fmt: skip
    head = (
        "sizes", "dtype", "cached tokens", "eager ms", "mla ms",
        "floor ms", "over the floor", "roofline ms", "over the roofline",
    )  # fmt: skip
    return table(head, rows) + f"\n\n{where(about)}."


def op_alone() -> str:
    """The op against batched products."""
    about = data("decode_attention_cpu")
    rows = (
        (
            r["B"], r["H"], r["T"], f"{r['L']}+{r['R']}", r["dtype"],
            *(f"{r[k]['median_ms']:.2f}" if k in r else "" for k in ("op", "bmm")),
        )
        for r in about["rows"]
    )  # fmt: skip
    head = ("B", "H", "T", "L+R", "dtype", "op ms", "torch.bmm ms")
    return table(head, rows) + f"\n\n{about['threads']} threads, torch {about['torch']}."


def features() -> str:
    """The op with one feature at a time, over its plain call."""
    about = data("attention_features")
    rows = []
    for r in about["rows"]:
        ratios = (f"{x:.2f}" for name, x in r["over_plain"].items() if name != "plain")
        rows.append((r["heads"], r["tokens"], r["dtype"], _quartiles(r["ms"]["plain"]), *ratios))
    names = [name for name in about["rows"][0]["ms"] if name != "plain"]
    return table(("heads", "keys", "dtype", "plain ms", *names), rows) + f"\n\n{where(about)}."


def few_rows() -> str:
    """Products of a few rows with a weight, and the steps that they are part of."""
    about = data("few_rows")
    alone, steps = [], []
    for r in about["rows"]:
        times = [*map(_quartiles, r["ms"].values()), f"{r['torch_over_native']:.1f}x", f"{r['floor_ms']:.2f}"]
        times.append(f"{r['ms']['native']['median'] / r['floor_ms']:.2f}")
        if r["kind"] == "step":
            steps.append((NAMES[r["model"]], r["dtype"], r["context"], *times))
        elif r["weight"] == "out":
            alone.append((f"{r['O']} x {r['K']}", r["dtype"], r["rows"], *times))
    ends = ("torch ms", "own ms", "torch / own", "floor ms", "own / floor")
    products = table(("output projection", "dtype", "rows", *ends), alone)
    return f"{table(('sizes', 'dtype', 'cached tokens', *ends), steps)}\n\n{products}\n\n{where(about)}."


def many_rows() -> str:
    """Products of many rows with a weight of 16 bits, and prompts."""
    about = data("many_rows")
    alone, whole = [], []
    for r in about["rows"]:
        times = (*map(_quartiles, r["ms"].values()), f"{r['torch_over_native']:.1f}x")
        if r["kind"] == "prompt":
            whole.append((NAMES[r["model"]], r["dtype"], r["rows"], *times))
        else:
            weight = f"{r['O']} x {r['K']}"
            what = f"64 experts, {weight}, 6 for each token" if r["kind"] == "experts" else weight
            alone.append((what, r["dtype"], r["rows"], *times))
    ends = ("torch ms", "own ms", "torch / own")
    products = table(("weight", "dtype", "rows or tokens", *ends), alone)
    prompts = table(("sizes", "dtype", "prompt", "eager ms", *ends), whole)
    with_or_without = "with" if about["bfloat16_instructions"] else "without"
    return f"{prompts}\n\n{products}\n\n{where(about)}, {with_or_without} instructions for bfloat16."


def layers_once() -> str:
    """Compile times by depth, and steps, of layers that are compiled once."""
    about = data("layers_once")
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    steps = []
    for r in about["rows"]:
        if r["kind"] == "compile":
            seconds.setdefault((r["structure"], r["layers"]), {})[r["form"]] = sum(r["cpu_seconds"])
        else:
            times = map(_quartiles, r["ms"].values())
            steps.append((NAMES[r["model"]], r["dtype"], r["context"], *times, f"{r['once_over_whole']:.2f}"))
    least = {structure: seconds[structure, min(n for s, n in seconds if s == structure)] for structure, _ in seconds}
    compiled = [
        (layers, {"dense": "dense", "v3": "as in V3"}[structure], *(f"{of[form]:.0f}" if form in of else "" for form in
         ("inductor", "whole", "once")), f"{of['once'] / least[structure]['once']:.1f}")
        for (structure, layers), of in seconds.items()
    ]  # fmt: skip
    first = table(("layers", "kinds", "Inductor s", "whole s", "once s", "once / least layers"), compiled)
    second = table(("sizes", "dtype", "cached tokens", "once ms", "whole ms", "once / whole"), steps)
    return f"{first}\n\n{second}\n\n{where(about)}."


def first_token(*, deepest: bool = False) -> str:
    """CPU seconds until the first and the second token, where a process finds caches empty, and filled."""
    about = data("first_token")
    seconds = {(r["layers"], r["form"], r["caches"]): r["cpu_seconds"] for r in about["rows"]}
    depths = sorted({layers for layers, *_ in seconds})
    lines = []
    for layers in depths[-1:] if deepest else depths:
        for form, name in FORMS.items():
            # What the first process of a saved folder takes is the work of save().
            cold = seconds[layers, form, "cold"] if form != "saved" else ()
            warm = seconds[layers, form, "warm"]
            cells = [*(f"{s:.1f}" for s in cold), *("",) * (2 - len(cold)), *(f"{s:.1f}" for s in warm)]
            lines.append((layers, name, *cells))
    head = ("layers", "", "first token, cold s", "second, cold s", "first, warm s", "second, warm s")
    return table(head, lines) + ("" if deepest else f"\n\n{where(about)}.")


def peers_cpu(*, short: bool = False) -> str:
    """Steps and prompts of a whole model in milliseconds: best and median; in the short form medians of some steps."""
    about, rows = data("peers_cpu"), []
    measured = [r for r in about["rows"] if not short or r["kind"] == "step"]
    names = [n for n in PROGRAMS if any(n in r["ms"] for r in measured)][: 4 if short else None]
    for r in measured:
        times = ((r["ms"][n]["best"], r["ms"][n]["median"]) if n in r["ms"] else None for n in names)
        cells = ("" if t is None else f"{t[1]:.0f}" if short else f"{t[0]:.1f} / {t[1]:.1f}" for t in times)
        rows.append((r["kind"], f"{r['tokens']:,}", r["batch"], *cells))
    if not short:
        errors = measured[0]["error"]
        rows.append(("error", "", measured[0]["batch"], *(f"{errors[n]:.2g}" if n in errors else "" for n in names)))
    made = table(("", "tokens", "batch", *(PROGRAMS[n] for n in names)), rows)
    return made if short else f"{made}\n\n{where(about)}."


def index_scores() -> str:
    """The scores of an indexer: as the model writes them, compiled, and as one operator."""
    about = data("index_scores")
    rows = []
    for r in about["rows"]:
        times = map(_quartiles, r["ms"].values())
        ratios = (f"{x:.1f}x" for x in r["over_op"].values())
        rows.append((r["dtype"], r["tokens"], *times, f"{max(r['floor_ms'].values()):.1f}", *ratios))
    head = ("dtype", "keys", "eager", "Inductor", "op", "floor", "eager / op", "Inductor / op")
    return table(head, rows) + f"\n\n{where(about)}."


def _quartiles(times: Mapping[str, Any]) -> str:
    return f"{times['median']:.1f} [{times['low']:.1f}-{times['high']:.1f}]"


def sparse_steps() -> str:
    """Decode steps of a sparse attention."""
    about = data("sparse_steps")
    names = ("eager", "inductor", "mask", "list")
    rows = []
    for r in about["rows"]:
        times = (_quartiles(r["ms"][v]) if v in r["ms"] else "too large" for v in names)
        ratios = (f"{r['over_list'][v]:.1f}x" if v in r["over_list"] else "" for v in names[:3])
        rows.append((r["tokens"], *times, *ratios))
    head = (
        "cached tokens",
        "eager",
        "Inductor",
        "mla, mask",
        "mla, list",
        "eager / list",
        "Inductor / list",
        "mask / list",
    )
    return table(head, rows) + f"\n\n{where(about)}."


SHARED_LAYERS = {"sparse": "a row for 4 tokens, 512 chosen", "heavy": "a row for 128 tokens"}


def shared_rows() -> str:
    """Decode steps of DeepSeek-V4's attention layers."""
    about = data("shared_rows")
    names = ("eager", "inductor", "mla")
    rows = [
        (
            SHARED_LAYERS[r["layer"]],
            r["tokens"],
            *(_quartiles(r["ms"][v]) for v in names),
            *(f"{r['over_mla'][v]:.1f}x" for v in names[:2]),
        )
        for r in about["rows"]
    ]
    head = ("layer", "cached tokens", "eager", "Inductor", "mla", "eager / mla", "Inductor / mla")
    return table(head, rows) + f"\n\n{where(about)}."


def shared_row_parts() -> str:
    """What those steps consist of."""
    found = data("shared_rows")["parts"]
    names = sorted(found[-1]["ms"], key=found[-1]["ms"].__getitem__, reverse=True)
    rows = (
        (
            SHARED_LAYERS[r["layer"]],
            r["tokens"],
            *(f"{r['ms'].get(part, 0):.2f}" for part in names),
            f"{sum(r['ms'].values()):.1f}",
            f"{r['weights_read_ms']:.1f}",
        )
        for r in found
    )
    return table(("layer", "cached tokens", *names, "all", "the weights read once"), rows)


def sparse_attention() -> str:
    """The operators of such a step alone."""
    about = data("sparse_steps")
    names = ("all", "choosing", "listed", "k")
    rows = (
        (
            r["tokens"],
            *(_quartiles(r["ms"][v]) for v in names),
            f"{r['listed_over_k']:.2f}",
            f"{r['all_over_ours']:.1f}x",
        )
        for r in about["attention"]
    )
    head = (
        "cached tokens",
        "all rows",
        "choosing",
        "2,048 listed rows",
        "2,048 rows",
        "listed / rows",
        "all / (choosing + listed)",
    )
    return table(head, rows)


def sparse_prompts() -> str:
    """Pieces of a prompt whose queries have a list each."""
    about = data("sparse_prompts")
    names = {"expanded": "expanded", "mask": "absorbed, mask", "lists": "absorbed, lists"}
    rows = (
        (r["queries"], r["tokens"], *(_quartiles(r["ms"][v]) for v in names), names[r["picked"]]) for r in about["rows"]
    )
    return table(("queries", "tokens", *names.values(), "picked"), rows) + f"\n\n{where(about)}."


def prompt_memory(file: str = "prompt_memory") -> str:
    """Peak memory and time of prompts, a column for each form."""
    about = data(file)
    names = {"eager": "eager", "inductor": "Inductor", "padded": "Inductor, padded", "mla": "mla"}

    def seconds(row: Mapping[str, Any], name: str) -> str:
        timed = row["ms"].get(name)
        if timed is None:
            return f"{row['peaks'][name]['seconds']:.0f} once"
        return f"{timed['median'] / 1e3:.1f} [{timed['low'] / 1e3:.1f}-{timed['high'] / 1e3:.1f}]"

    rows = [
        (
            r["queries"], r["tokens"], r["dtype"],
            *(f"{r['peaks'][n]['peak_bytes'] / 2**30:.2f}" if n in r["peaks"] else "" for n in names),
            *(seconds(r, n) if n in r["peaks"] else "" for n in names),
        )
        for r in about["rows"]
    ]  # fmt: skip
    head = ("queries", "tokens", "dtype", *(f"{n} GiB" for n in names.values()), *(f"{n} s" for n in names.values()))
    return table(head, rows) + f"\n\n{where(about)}."


def onnx() -> str:
    """The exported attention core in ONNX Runtime; median [quartiles]."""
    about = data("onnx_cpu")
    names = list(dict.fromkeys(k for r in about["rows"] for k in r["times"]))
    rows = ((r["what"], *(r["times"].get(k, "") for k in names)) for r in about["rows"])
    return table(("", *(f"{n} ms" for n in names)), rows) + f"\n\n{where(about)}; {about['threads']} thread used."


def onnx_sparse() -> str:
    """An exported sparse attention: all rows and a mask, and the rows of a list."""
    about = data("onnx_sparse")
    rows = (
        (
            r["profile"],
            r["queries"],
            r["tokens"],
            *(_quartiles(r["ms"][v]) for v in ("mask", "list")),
            f"{r['over_list']:.1f}x",
        )
        for r in about["rows"]
    )
    head = ("profile", "queries", "tokens", "mask", "list", "mask / list")
    return table(head, rows) + f"\n\n{where(about)}; {about['threads']} thread used."


def _median(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return statistics.median(r[key] for r in rows)


def _folds() -> dict[tuple[str, int, str], dict[str, list[dict[str, Any]]]]:
    """Rows of one layer in bfloat16 by model, heads and inputs, then by whether weights were folded."""
    groups: dict[tuple[str, int, str], dict[str, list[dict[str, Any]]]] = {}
    for r in data("precision_folds")["rows"]:
        groups.setdefault((r["model"], r["H"], r["scale"]), {}).setdefault(r["fold"], []).append(r)
    return groups


def folds() -> str:
    """Errors of the three forms of one layer in bfloat16."""
    about = data("precision_folds")
    lines = []
    for (model, heads, scale), rows in _folds().items():
        chained, folded = rows["never"], rows["always"]
        expanded = _median(chained, "original")
        errors = [_median(x, "absorbed") for x in (chained, folded)]
        cells = [f"{e:.2e}" for e in (expanded, *errors)] + [f"{_median(x, 'ratio'):.2f}" for x in (chained, folded)]
        lines.append((f"{NAMES[model]}, {heads} heads", scale, *cells))
    head = ("sizes", "inputs", "expanded", "chained", "folded", "chained / expanded", "folded / expanded")
    lengths, seeds = ({r[k] for r in about["rows"]} for k in ("T", "seed"))
    tokens = ", ".join(map(str, sorted(lengths)))
    return table(head, lines) + f"\n\n{tokens} cached tokens, median of {len(seeds)} seeds; {where(about)}."


def folds_short() -> str:
    """The least and the largest median ratio of the models, by form and inputs."""
    groups = _folds()
    scales = list(dict.fromkeys(scale for *_, scale in groups))
    rows = []
    for name, fold in {"chained": "never", "folded": "always"}.items():
        ratios = [[_median(of[fold], "ratio") for (*_, s), of in groups.items() if s == scale] for scale in scales]
        rows.append((name, *(f"{min(of):.2f} to {max(of):.2f}" for of in ratios)))
    return table(("error over the original's", *scales), rows)


def sites() -> str:
    """Errors of what absorption rewrites, alone: the median and the worst of all inputs and lengths."""
    about = data("precision_site")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in about["rows"]:
        groups.setdefault((r["model"], r["dtype"], r["core"]), []).append(r)
    rows = (
        (
            NAMES[m], t, core, *(f"{_median(g, k):.2e}" for k in ("original", "absorbed")),
            f"{_median(g, 'ratio'):.2f}", f"{max(r['ratio'] for r in g):.2f}",
        )
        for (m, t, core), g in groups.items()
    )  # fmt: skip
    head = ("sizes", "dtype", "attention", "original", "absorbed", "median ratio", "worst ratio")
    return table(head, rows) + f"\n\n{where(about)}."


def support() -> str:
    """One word for each family and way, then what the words hide."""
    about = data("support_matrix")
    cells = {(c["family"], c["way"]): c for c in about["rows"]}
    ways = list(dict.fromkeys(w for _, w in cells))
    notes: list[str] = []
    rows = []
    for family in dict.fromkeys(f for f, _ in cells):
        row = [f"`{family}`"]
        for way in ways:
            c = cells.get((family, way))
            row.append("" if c is None else c["verdict"])
            if c is not None and c["verdict"] != "yes":
                notes.append(f"* `{family}`, {way}: {_note(c)}")
        rows.append(row)
    errors = [c["error"] for c in cells.values() if c.get("error") is not None and c["verdict"] != "wrong"]
    about_line = f"Largest difference of logits over their RMS: {max(errors):.1e}. {where(about)}."
    return "\n\n".join([table(("family", *ways), rows), *(["\n".join(notes)] if notes else []), about_line])


def quantized() -> str:
    """One word for each format and family, of all ways together, then what the words hide."""
    about = data("quantized_matrix")
    cells = {(c["format"], c["family"], c["way"]): c for c in about["rows"]}
    formats, families, ways = (list(dict.fromkeys(c[k] for c in about["rows"])) for k in ("format", "family", "way"))
    notes: dict[str, dict[str, list[str]]] = {}
    rows = []
    for name in formats:
        by_word: dict[str, list[str]] = {}
        for family in families:
            found = {w: cells[name, family, w] for w in ways if (name, family, w) in cells}
            words = (c["verdict"] for c in found.values())
            said = [f"[`{w}`](refusals.md#{w})" if w in list(map(str, CODES)) else w for w in words] or [""]
            by_word.setdefault(said[0] if len(set(said)) == 1 else " / ".join(said), []).append(f"`{family}`")
            for way, c in found.items():
                if c["verdict"] != "yes":
                    notes.setdefault(f"{name}: {_note(c)}", {}).setdefault(way, []).append(f"`{family}`")
        most, *others = sorted(by_word, key=lambda word: -len(by_word[word]))
        rows.append((name, most, "; ".join(f"{', '.join(by_word[word])}: {word}" for word in others)))
    listed = []
    for note, by_way in notes.items():
        same: dict[str, list[str]] = {}  # ways by the families they are true of
        for way, own in by_way.items():
            same.setdefault("all families" if len(own) == len(families) else ", ".join(own), []).append(way)
        listed.append(f"* {note}. {'; '.join(', '.join(w) + ': ' + own for own, w in same.items())}")
    done = [c for c in cells.values() if not c["failed"]]
    ratios = sorted(c["error"] / c["original"] for c in done if c["verdict"] == "yes")
    words = f"median {statistics.median(ratios):.2f}, largest {ratios[-1]:.2f}; {len(done)} of {len(cells)} cells ran"
    line = f"Errors against the dequantized model in float64, divided by the original's: {words}. {where(about)}."
    shown = table(("format", "all families", "except"), rows)
    told = f"Families: {', '.join(f'`{f}`' for f in families)}."
    return "\n\n".join([told, shown, *(["\n".join(listed)] if listed else []), line])


def generated() -> str:
    """One word for each way to generate and family, then what the words hide."""
    about = data("generate_modes")
    cells = {(c["mode"], c["family"]): c for c in about["rows"]}
    modes, families = (list(dict.fromkeys(c[k] for c in about["rows"])) for k in ("mode", "family"))
    notes: dict[str, list[str]] = {}
    rows = []
    for mode in modes:
        found = {f: cells[mode, f] for f in families if (mode, f) in cells}
        words = [found[f]["verdict"] if f in found else "" for f in families]
        graphs = dict.fromkeys(str(c["graphs"]) for c in found.values() if not c["failed"])
        rows.append((mode, *words, " / ".join(graphs)))
        for family, c in found.items():
            if c["verdict"] != "yes":
                notes.setdefault(f"{mode}: {_note({'parts': {}, **c})}", []).append(f"`{family}`")
    listed = "\n".join(f"* {note}. {', '.join(own)}" for note, own in notes.items())
    shown = table(("generate()", *(f"`{f}`" for f in families), "graphs"), rows)
    return "\n\n".join([shown, *([listed] if listed else []), f"{where(about)}."])


def step_masks() -> str:
    """What a step of each family is told in place of its masks, and how many of these calls the Hopper kernel takes."""
    about = data("step_masks")
    ways = {"sdpa": "", "eager": ", eager"}
    cells: dict[str, dict[str, str]] = {}
    taken = 0
    for row in about["rows"]:
        way = f"{row['cache']}{', padded' * row['padded']}{ways[row['attn']]}"
        parts = [re.sub(r" \(.*", "", part) for part in row["told"].split("; ")]
        parts = [re.sub(r"left as (a mask[^:]*): .*", r"\1", part) for part in parts]
        cells.setdefault(row["family"], {})[way] = " and ".join(dict.fromkeys(parts))
        taken += "a mask" not in parts
    columns = list(dict.fromkeys(w for row in cells.values() for w in row))
    rows = [[f"`{family}`", *(row.get(w, "") for w in columns)] for family, row in cells.items()]
    line = f"Masks of keys, lengths and diagonals reach the Hopper kernel: {taken} of {len(about['rows'])} calls."
    return "\n\n".join([table(("family", *columns), rows), f"{line} {where(about)}."])


def _note(c: Mapping[str, Any]) -> str:
    if c["failed"]:
        return f"{c['verdict']}, {c['failed']}"
    counts = {k: n for k, n in {**c["codes"], **c["parts"]}.items() if k != "absorbed"}
    found = [f"{n} x [`{k}`](refusals.md#{k}), {c['reasons'].get(k, '')}".strip(", ") for k, n in counts.items()]
    return f"{c['verdict']}; {'; '.join(found) or 'no attention site was found'}"


def growing() -> str:
    """A step in a cache that grows, with rows copied and with rows appended, and what each moves."""
    about = data("growing_cache")
    rows = []
    for r in about["rows"]:
        ms = {variant: times["median"] for variant, times in r["ms"].items()}
        times = (f"{ms['inductor']:.0f}", f"{ms['copy']:.1f}", f"{ms['in_place']:.1f}")
        moved = (f"{r['moved']['copy'] / 2**20:.1f}", f"{r['moved']['in_place'] / 2**10:.1f}")
        rows.append((NAMES[r["model"]], r["batch"], r["context"], *times, *moved))
    head = ("sizes", "batch", "cached tokens", "Inductor ms", "copy ms", "in place ms", "copied MiB", "appended KiB")
    return table(head, rows) + f"\n\n{where(about)}."


def own_buffers() -> str:
    """A step of code that keeps K and V in buffers of its own, and what they hold."""
    about = data("own_buffers")
    rows = []
    for r in about["rows"]:
        times = map(_quartiles, r["ms"].values())
        held = (f"{r['held'][form] / 2**20:.1f}" for form in ("expanded", "rows"))
        ratios = (f"{x:.1f}x" for x in r["faster_than"].values())
        rows.append((NAMES[r["model"]], r["dtype"], r["context"], *times, *ratios, *held))
    head = ("sizes", "dtype", "cached tokens", "eager ms", "Inductor ms", "mla ms", "vs eager", "vs Inductor",
            "K, V MiB", "rows MiB")  # fmt: skip
    return table(head, rows) + f"\n\n{where(about)}."


def plans() -> str:
    """Layouts of two models on 8 and 16 H200 with a context of 131,072 tokens, each filled with users."""
    rows = []
    for r in (r for r in data("plans")["rows"] if r["kind"] == "layout"):
        layout = LABELS[r["layout"]] + (f" (dcp {r['dcp']})" if r["dcp"] > 1 else "")
        per_gpu = (f"{r[name] / r['tp']:,.0f}" for name in ("tokens_per_s", "most_tokens_per_s"))
        model = {"deepseek-v3": "V3", "deepseek-v3.2": "V3.2"}[r["model"]]
        rows.append((model, r["tp"], layout, r["users"], f"{1e3 * r['step_s']:.1f}", *per_gpu, r["bottleneck"]))
    head = (
        "model",
        "H200",
        "layout",
        "users that fit",
        "floor of a step, ms",
        "tokens/s per GPU, one batch",
        "bound",
        "bounded by",
    )
    return table(head, rows)


def plans_more() -> str:
    """The same layouts with the prompts that they read, and with a token drafted for each step."""
    rows = []
    for r in (r for r in data("plans")["rows"] if r["kind"] == "layout"):
        layout = LABELS[r["layout"]] + (f" (dcp {r['dcp']})" if r["dcp"] > 1 else "")
        model = {"deepseek-v3": "V3", "deepseek-v3.2": "V3.2"}[r["model"]]
        read, more = r["prefill"], r["drafted"]
        speeds = (
            read["tokens_per_s"], read["most_tokens_per_s"], r["served_tokens_per_s"],
            more["tokens_per_s"], more["most_tokens_per_s"],
        )  # fmt: skip
        batch, bound, served, *drafted = (f"{speed / r['tp']:,.0f}" for speed in speeds)
        rows.append(
            (model, r["tp"], layout, f"{read['first_token_s']:.1f}", batch, bound, read["bottleneck"], served,
             more["users"], *drafted)
        )  # fmt: skip
    head = ("model", "H200", "layout", "first token, s", "prompt tokens/s per GPU, one batch", "bound", "bounded by",
            "output tokens/s per GPU beside prompts", "users, a token drafted", "tokens/s per GPU, one batch",
            "bound")  # fmt: skip
    return table(head, rows)


def published(kind: str = "published") -> str:
    """Published figures beside the bound of the best layout."""
    rows = []
    for r in (r for r in data("plans")["rows"] if r["kind"] == kind):
        best, dtypes = r["best"], f"{r['weights']}, {r['cache']}"
        best |= best["prefill"] if kind == "published prompts" else {}
        bound = best["most_tokens_per_s"] / r["tp"]
        made = (f"{r['tokens_per_s']:,.0f}", f"{bound:,.0f}", f"{r['tokens_per_s'] / bound:.0%}")
        who = f"[{r['by']}]({r['url']})"
        rows.append((who, r["context"], dtypes, *made, LABELS[best["layout"]], best["bottleneck"]))
    tokens = "prompt" if kind == "published prompts" else "context"
    return table(("who", tokens, "weights, cache", "published", "bound", "of it", "layout", "bounded by"), rows)


WAYS = {"one_by_one": "one by one", "optimized": "optimized", "padded": "padded", "continuous": "continuous"}


def serving() -> str:
    """Many users, in every way to serve them, and memory over many requests."""
    about, leak = data("serving"), data("serving_leak")["rows"]
    rows = []
    for r in about["rows"]:
        for way, name in WAYS.items():
            if way not in r:
                continue
            f = r[way]
            times = (f"{f['first_token_median_s']:.2f}", f"{f['first_token_p99_s']:.2f}")
            each = (f"{f['token_median_ms']:.0f}", f"{f['token_p99_ms']:.0f}")
            rows.append((r["users"], r["requests"], name, f"{f['tokens_per_second']:.1f}", *times, *each))
    head = ("users", "requests", "way", "tokens/s", "first token s", "p99", "a token ms", "p99")
    r = about["rows"][0]
    told = f"{NAMES[r['model']]}'s sizes, {r['layers']} layers, {r['dtype']}, {r['rate']} requests per user and s; "
    start, end = leak[min(1, len(leak) - 1)], leak[-1]
    memory = (
        f"Memory of a process with a tiny model: {start['rss_mib']:.0f} MiB after {start['requests']} requests, "
        f"{end['rss_mib']:.0f} MiB after {end['requests']}, and {end['blocks_held']} blocks held; some requests were "
        "cancelled, some impossible (`--leak`)."
    )
    return table(head, rows) + f"\n\n{told}{where(about)}.\n\n{memory}"


BEST = (
    ("most tokens/s", "tokens_per_second", max),
    ("soonest first token", "first_token_median_s", min),
    ("fastest token", "token_median_ms", min),
    ("least CPU time", "cpu_s", min),
)
SERVERS = {"mla_compile": "mla-compile serve", "transformers": "transformers serve, GQA", "vllm": "vLLM"}


def servers() -> str:
    """Servers over HTTP, and which of them is best at what."""
    about = data("servers")
    made = about["rows"]
    rows = []
    for r in made:
        times = (f"{r['first_token_median_s']:.2f}", f"{r['first_token_p99_s']:.2f}")
        each = (f"{r['token_median_ms']:.0f}", f"{r['token_p99_ms']:.0f}")
        rows.append(
            (r["users"], SERVERS[r["way"]], f"{r['tokens_per_second']:.1f}", *times, *each, f"{r['cpu_s']:.0f}")
        )
    head = ("users", "server", "tokens/s", "first token s", "p99", "a token ms", "p99", "CPU s")
    best = " ".join(_best(made, *asked) for asked in BEST)
    r, versions = made[0], {r["way"]: f"{r['way']} {r['version']}, ready after {r['ready_s']:.0f} s" for r in made}
    same = ", ".join(f"{way} {n} of 4" for way, n in {r["way"]: r["as_generated"] for r in made}.items())
    told = f"{NAMES[r['model']]}'s sizes, {r['layers']} layers, float32, {r['rate']} requests per user and s; "
    told += f"load of the machine {min(r['load'] for r in made):.0f} to {max(r['load'] for r in made):.0f}; "
    kept = f"{'; '.join(versions.values())}. Greedy answers that are those of `generate()`: {same}."
    return f"{table(head, rows)}\n\n{best}\n\n{told}{where(about)}. {kept}"


def _best(rows: Sequence[Mapping[str, Any]], what: str, figure: str, of: Callable[..., Any]) -> str:
    """Who has the best figure, by numbers of users."""
    first: dict[str, list[int]] = {}
    for users in sorted({r["users"] for r in rows}):
        winner = of((r for r in rows if r["users"] == users), key=lambda r: r[figure])
        first.setdefault(SERVERS[winner["way"]], []).append(users)
    told = "; ".join(f"{server} with {', '.join(map(str, users))} users" for server, users in first.items())
    return f"{what[0].upper()}{what[1:]}: {told}."


BLOCKS: dict[str, Callable[[], str]] = {
    "compiled": compiled.summary,
    "executed": executed.table,
    "decisions": decisions,
    "codes": all_codes,
    **{f"code {c}": lambda c=c: one_code(c) for c in map(str, CODES)},
    "decode": decode_all,
    "decode short": decode_some,
    "decode line": decode_line,
    "decode static": decode_static,
    "decode static_avx2": lambda: decode_static("decode_cpu_static_32k_avx2"),
    "op": op_alone,
    "index_scores": index_scores,
    "shared_rows": shared_rows,
    "shared_row_parts": shared_row_parts,
    "sparse_steps": sparse_steps,
    "sparse_prompts": sparse_prompts,
    "sparse_attention": sparse_attention,
    "features": features,
    "few_rows": few_rows,
    "many_rows": many_rows,
    "layers_once": layers_once,
    "first_token": first_token,
    "first_token short": lambda: first_token(deepest=True),
    "peers_cpu": peers_cpu,
    "peers_cpu short": lambda: peers_cpu(short=True),
    "prompt_memory": prompt_memory,
    "prompt_memory_long": lambda: prompt_memory("prompt_memory_long"),
    "onnx": onnx,
    "onnx_sparse": onnx_sparse,
    "folds": folds,
    "folds short": folds_short,
    "sites": sites,
    "support": support,
    "quantized": quantized,
    "generated": generated,
    "step_masks": step_masks,
    "growing": growing,
    "own_buffers": own_buffers,
    "plans": plans,
    "plans_more": plans_more,
    "published": published,
    "published_prompts": lambda: published("published prompts"),
    "serving": serving,
    "servers": servers,
}


def filled(text: str) -> str:
    """A page with its tables as the data has them now."""
    return _BLOCK.sub(lambda m: f"<!-- begin {m[1]} -->\n{BLOCKS[m[1]]()}\n<!-- end {m[1]} -->", text)


def main() -> int:
    """Command line; exit code 1 where a page differs and ``--check`` was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where something is old")
    check = parser.parse_args().check
    old = []
    for page in (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        if (new := filled(text)) != text:
            old.append(page.relative_to(ROOT))
            if not check:
                page.write_text(new)
    print(f"{'old' if check else 'written'}: {', '.join(map(str, old)) or 'nothing'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
