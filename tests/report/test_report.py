"""The report: what a person reads, what a program reads, and that nothing is lost between the two."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mla_compile.codes import CODES, Code
from mla_compile.core.dims import Dims
from mla_compile.core.records import VERDICTS, Location, PassRecord, SiteReport
from mla_compile.errors import InputError
from mla_compile.report.grouping import grouped, module_pattern
from mla_compile.report.report import SCHEMA, Report

V3 = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)
FILE = "/lib/site-packages/transformers/models/deepseek_v3/modeling_deepseek_v3.py"


def absorbed(layer: int, **changes: object) -> SiteReport:
    fields = {
        "index": layer,
        "where": Location(
            node=f"scaled_dot_product_attention_{layer}",
            op="aten.scaled_dot_product_attention",
            module=f"model.layers.{layer}.self_attn",
            file=FILE,
            line=77,
            code="    attn_output = attention(query, key, value)",
        ),
        "verdict": "absorbed",
        "form": "chained",
        "code": "absorbed",
        "reason": "K and V are linear images of one latent (512 wide) and a rotary key all heads share (64)",
        "dims": V3,
        "cache_values_expanded": 40960,
        "cache_values_latent": 576,
        "decode_flops_before": 33_636_352,
        "decode_flops_after": 278_528,
        "decode_bytes_before": 164_992,
        "decode_bytes_after": 1152,
        "break_even_S": 512 / 3,
        "precision_ratio": 0.5 + layer / 100,
        "fold_error": 1e-7 * (layer + 1),
        "notes": ("the mask is carried as it is",),
    }
    return SiteReport(**{**fields, **changes})


REFUSED = SiteReport(
    index=3,
    where=Location("softmax_3", "aten.softmax", "model.layers.3.self_attn", FILE, 91, "p = scores.softmax(-1)"),
    verdict="refused",
    code=Code.POSITION_DEPENDENT,
    reason="aten.mul with cos lies between the up-projection and the scores",
    blame=Location("mul_7", "aten.mul", "model.layers.3.self_attn", FILE, 52, "k = (k * cos) + (rotate(k) * sin)"),
    dims=V3,
    cache_values_expanded=40960,
    cache_values_latent=576,
)
NOT_MLA = SiteReport(
    index=4, where=Location("sdpa", "aten.sdpa"), verdict="not_mla", code=Code.NOT_MLA, reason="K is a graph input"
)
REPORT = Report(
    sites=(absorbed(0), absorbed(1), absorbed(2), REFUSED, NOT_MLA),
    graph="decode",
    passes=(PassRecord("normalize", 12, 0.25), PassRecord("absorb", 3, 0.5)),
    messages=("Dynamo stopped recompiling after 8 graphs",),
)

TEXT = """\
mla_compile: 5 attention sites in graph decode: 3 absorbed, 1 refused (position_dependent), 1 not
MLA; cache values per token 122,880 -> 1,728; passes 0.75 s

absorbed (chained)  model.layers.{0-2}.self_attn  (3 sites)
  source          deepseek_v3/modeling_deepseek_v3.py:77
                  attn_output = attention(query, key, value)
  why             K and V are linear images of one latent (512 wide) and a rotary key all heads
                  share (64)
  dims            H=128 L=512 R=64 N=128 V=128 Q=1536 D=7168
  cache           40,960 -> 576 values per token, 71.1 times less
  decode          33,636,352 -> 278,528 FLOPs per context token, 121 times less
                  164,992 -> 1,152 bytes per context token, 143 times less
  absorbing pays  below 171 queries per call, in FLOPs on a long context
  precision       error against float64 is 0.52 x the original's
  folded weights  relative rounding error 3e-07
  note            the mask is carried as it is

refused: position_dependent  model.layers.3.self_attn
  source        deepseek_v3/modeling_deepseek_v3.py:91
                p = scores.softmax(-1)
  why           aten.mul with cos lies between the up-projection and the scores
  because of    aten.mul at deepseek_v3/modeling_deepseek_v3.py:52
                k = (k * cos) + (rotate(k) * sin)
  to change it  apply RoPE to a separate key shared by all heads and leave the up-projected part
                unrotated
  see           docs/refusals.md#position_dependent
  dims          H=128 L=512 R=64 N=128 V=128 Q=1536 D=7168
  cache         40,960 values per token (absorbed: 576)

not MLA  sdpa
  why  K is a graph input

note: Dynamo stopped recompiling after 8 graphs
"""


def test_text():
    assert REPORT.text(width=100) == TEXT
    assert str(REPORT) == TEXT


def test_text_keeps_to_the_width():
    lines = REPORT.text(width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert any("unrotated" in line for line in lines)


def test_text_shows_source_that_looks_like_markup():
    site = dataclasses.replace(REFUSED, where=Location("n", "op", "m", "a/b.py", 1, "[bold]x[/bold] = y[red]"))
    assert "[bold]x[/bold] = y[red]" in Report((site,)).text()


def test_a_terminal_gets_the_same_words_in_colour():
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(REPORT)
    drawn = capture.get()
    assert "\x1b[1;31mrefused: position_dependent\x1b[0m" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert [line.rstrip() for line in plain.splitlines()] == TEXT.splitlines()


def test_a_sites_own_fix_goes_before_the_generic_one():
    own = Report((dataclasses.replace(REFUSED, fix="move the rotation"),)).text()
    assert "to change it  move the rotation\n" in own
    assert "apply RoPE" not in own


def test_absorbing_that_always_pays():
    assert "absorbing pays  for any number of queries" in Report((absorbed(0, break_even_S=math.inf),)).text()


def test_empty_report():
    assert Report(()).summary() == "no attention sites"
    assert Report((), graph="g").text() == "mla_compile: no attention sites in graph g\n"


def test_counts_and_summary():
    assert (REPORT.absorbed, REPORT.kept, REPORT.refused, REPORT.not_mla) == (3, 0, 1, 1)
    assert REPORT.seconds == 0.75
    assert REPORT.summary() == (
        "5 attention sites in graph decode: 3 absorbed, 1 refused (position_dependent), 1 not MLA; "
        "cache values per token 122,880 -> 1,728; passes 0.75 s"
    )


def test_summary_names_each_code_once():
    kept = [dataclasses.replace(NOT_MLA, verdict="kept", code=code) for code in ("cost_prefill", "training")]
    assert Report((kept[0], kept[1], kept[0])).summary() == "3 attention sites: 3 kept (cost_prefill, training)"


def test_json_round_trip():
    report = dataclasses.replace(
        REPORT, sites=(*REPORT.sites, absorbed(5, break_even_S=math.inf, precision_ratio=None), absorbed(6, notes=()))
    )
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert Report.from_dict(json.loads(report.to_json(indent=None))) == report


def test_json_schema():
    """Programs read these keys: adding one is fine, losing or renaming one needs a new schema."""
    record = json.loads(REPORT.to_json())
    assert record["schema"] == SCHEMA == "mla_compile.report/1"
    assert sorted(record) == ["counts", "graph", "messages", "passes", "schema", "sites"]
    assert record["counts"] == {"absorbed": 3, "kept": 0, "refused": 1, "not_mla": 1}
    assert record["passes"][0] == {"name": "normalize", "changes": 12, "seconds": 0.25}
    assert record["sites"][3] == {
        "index": 3,
        "where": {
            "node": "softmax_3",
            "op": "aten.softmax",
            "module": "model.layers.3.self_attn",
            "file": FILE,
            "line": 91,
            "code": "p = scores.softmax(-1)",
        },
        "verdict": "refused",
        "code": "position_dependent",
        "reason": "aten.mul with cos lies between the up-projection and the scores",
        "form": None,
        "parts": [],
        "kept": [],
        "fix": None,
        "blame": {
            "node": "mul_7",
            "op": "aten.mul",
            "module": "model.layers.3.self_attn",
            "file": FILE,
            "line": 52,
            "code": "k = (k * cos) + (rotate(k) * sin)",
        },
        "dims": {"H": 128, "L": 512, "R": 64, "N": 128, "V": 128, "Q": 1536, "D": 7168},
        "cache_values_expanded": 40960,
        "cache_values_latent": 576,
        "decode_flops_before": None,
        "decode_flops_after": None,
        "decode_bytes_before": None,
        "decode_bytes_after": None,
        "break_even_S": None,
        "precision_ratio": None,
        "fold_error": None,
        "notes": [],
    }


def test_json_is_strict_where_the_break_even_is_infinite():
    text = Report((absorbed(0, break_even_S=math.inf, precision_ratio=math.nan),)).to_json()
    site = json.loads(text, parse_constant=pytest.fail)["sites"][0]
    assert (site["break_even_S"], site["precision_ratio"]) == ("inf", "nan")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "schema is None, expected 'mla_compile.report/1'"),
        ({"schema": "mla_compile.report/2"}, "schema is 'mla_compile.report/2'"),
        ({"schema": SCHEMA}, r"does not follow it: KeyError\('sites'\)"),
        ({**REPORT.to_dict(), "sites": [{"where": {}}]}, "does not follow it: TypeError"),
        ({**REPORT.to_dict(), "sites": [{**REFUSED.to_dict(), "code": "no_such"}]}, "'no_such' is not a valid Code"),
    ],
    ids=["empty", "newer", "no sites", "broken site", "unknown code"],
)
def test_from_dict_refuses_what_is_no_report(record, message):
    with pytest.raises(InputError, match=message):
        Report.from_dict(record)


def test_site_refuses_an_unknown_code_or_verdict():
    with pytest.raises(ValueError, match="'nope' is not a valid Code"):
        dataclasses.replace(REFUSED, code="nope")
    with pytest.raises(ValueError, match="verdict is 'maybe', expected one of absorbed, kept, refused, not_mla"):
        dataclasses.replace(REFUSED, verdict="maybe")


def test_merged():
    other = Report(
        sites=(absorbed(0),),
        graph="prefill",
        passes=(PassRecord("normalize", 1, 0.5), PassRecord("fold", 2, 1.0)),
        messages=REPORT.messages,
    )
    both = Report.merged([REPORT, other])
    assert [site.index for site in both.sites] == [0, 1, 2, 3, 4, 5]
    assert both.sites[5] == dataclasses.replace(absorbed(0), index=5)
    assert both.graph == "decode, prefill"
    assert both.passes == (PassRecord("normalize", 13, 0.75), PassRecord("absorb", 3, 0.5), PassRecord("fold", 2, 1.0))
    assert both.messages == REPORT.messages
    assert Report.merged([]) == Report(())


def test_sites_of_equal_layers_are_one_group_with_the_worst_measurements():
    (group,) = grouped([absorbed(layer) for layer in (0, 1, 2, 5)])
    assert group.where == "model.layers.{0-2,5}.self_attn"
    assert [site.index for site in group.sites] == [0, 1, 2, 5]
    assert group.precision_ratio == 0.55
    assert group.fold_error == pytest.approx(6e-7)


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "another"},
        {"form": "folded"},
        {"dims": dataclasses.replace(V3, H=64)},
        {"break_even_S": 3.0},
        {"notes": ()},
        {"where": dataclasses.replace(absorbed(1).where, line=78)},
        {"where": dataclasses.replace(absorbed(1).where, module="model.layers.1.cross_attn")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sites_that_differ_are_told_apart(change):
    assert len(grouped([absorbed(0), absorbed(1)])) == 1
    assert len(grouped([absorbed(0), absorbed(1, **change)])) == 2


def test_groups_keep_the_order_of_first_appearance():
    folded = [absorbed(layer, form="folded") for layer in (1, 3)]
    groups = grouped([absorbed(0), folded[0], absorbed(2), folded[1]])
    assert [group.where for group in groups] == ["model.layers.{0,2}.self_attn", "model.layers.{1,3}.self_attn"]


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["layers.7.attn"], "layers.7.attn"),
        (["layers.7.attn", "layers.7.attn"], "layers.7.attn"),
        (["h.0", "h.1", "h.10", "h.9"], "h.{0-1,9-10}"),
        (["layers.0.attn.0", "layers.0.attn.1", "layers.1.attn.0", "layers.1.attn.1"], "layers.{0-1}.attn.{0-1}"),
        (["layers.0.attn.0", "layers.1.attn.1"], "layers.0.attn.0, layers.1.attn.1"),
        (["L['self'].layers[0].attn", "L['self'].layers[1].attn"], "L['self'].layers[{0-1}].attn"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["block1.attn", "block2.attn"], "block1.attn, block2.attn"),
        ([""], ""),
    ],
)
def test_module_pattern(paths, pattern):
    assert module_pattern(paths) == pattern


def test_location_in_words():
    assert str(REFUSED.blame) == "aten.mul at deepseek_v3/modeling_deepseek_v3.py:52 in model.layers.3.self_attn"
    assert str(Location("mul_7", "aten.mul")) == "aten.mul"
    assert Location("n", "op", file="C:\\src\\models\\m.py", line=4).source == "models/m.py:4"
    assert Location("n", "op", file="m.py").source == "m.py"
    assert Location("n", "op").source is None


def test_codes_are_stable():
    """Scripts match on these strings: a code may be added here, never renamed or removed."""
    assert {str(code): CODES[code].verdict for code in Code} == {
        "absorbed": "absorbed",
        "cost_prefill": "kept",
        "cost_latent_wide": "kept",
        "forms_expanded": "kept",
        "keys_used_elsewhere": "kept",
        "values_used_elsewhere": "kept",
        "per_head_rope": "kept",
        "verify_failed": "kept",
        "too_many_sources": "kept",
        "training": "kept",
        "position_dependent": "refused",
        "nonlinear": "refused",
        "token_mixing": "refused",
        "head_dependent_latent": "refused",
        "softmax_axis": "refused",
        "dropout": "refused",
        "mask_depends_on_keys": "refused",
        "unsupported_weight": "refused",
        "unsupported_op": "refused",
        "graph_break": "refused",
        "expanded_cache": "refused",
        "not_mla": "not_mla",
    }
    assert set(CODES) == set(Code)


def test_every_refusal_says_what_to_change():
    assert all(info.verdict in VERDICTS and info.meaning for info in CODES.values())
    assert all(info.fix for info in CODES.values() if info.verdict == "refused")


def test_a_code_is_its_string():
    assert Code.TRAINING == "training"
    assert f"{Code.TRAINING} {Code.TRAINING!s}" == "training training"
    assert json.dumps(Code.TRAINING) == '"training"'


def test_the_report_costs_no_rich_until_it_is_drawn():
    """Compiling a graph makes a report each time; drawing one is rare."""
    script = "import sys, mla_compile as m; print('rich' in sys.modules, str(m.Report(())), 'rich' in sys.modules)"
    root = Path(__file__).resolve().parents[2]  # where the package is found when it is not installed
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "mla_compile:", "no", "attention", "sites", "True"]
