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

from mla_compile.codes import Code
from mla_compile.core.records import Location, PassRecord
from mla_compile.errors import InputError
from mla_compile.report.report import SCHEMA, Report
from tests.support.reports import FILE, NOT_MLA, REFUSED, REPORT, absorbed

TEXT = """\
mla_compile: 5 attention sites in graph decode: 3 absorbed, 1 refused (position_dependent), 1 not
MLA; attention reads 122,880 -> 1,728 values per key; capture and passes 0.75 s

absorbed (chained)  model.layers.{0-2}.self_attn  (3 sites)
  source          deepseek_v3/modeling_deepseek_v3.py:77
                  attn_output = attention(query, key, value)
  why             K and V are linear images of one latent (512 wide) and a rotary key all heads
                  share (64)
  dims            H=128 L=512 R=64 N=128 V=128 Q=1536 D=7168
  reads           40,960 -> 576 values per key, 71.1 times less
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
  reads         40,960 values per key (absorbed: 576)

not MLA: MHA, GQA or MQA  sdpa
  why  K is a graph input

note: Dynamo stopped recompiling after 8 graphs

seconds: normalize 0.25, absorb 0.50
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
        "attention reads 122,880 -> 1,728 values per key; capture and passes 0.75 s"
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
    assert record["schema"] == SCHEMA == "mla_compile.report/2"
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
        "dims": {"H": 128, "L": 512, "R": 64, "N": 128, "V": 128, "Q": 1536, "D": 7168, "A": 0, "G": 1},
        "values_read_before": 40960,
        "values_read_after": 576,
        "values_held_before": None,
        "values_held_after": None,
        "decode_flops_before": None,
        "decode_flops_after": None,
        "decode_bytes_before": None,
        "decode_bytes_after": None,
        "break_even_S": None,
        "precision_ratio": None,
        "fold_error": None,
        "chosen": None,
        "choosing_flops": None,
        "choosing_bytes": None,
        "choosing_fused": None,
        "notes": [],
        "graph": "",
        "stands_for": 1,
    }


def test_json_is_strict_where_the_break_even_is_infinite():
    text = Report((absorbed(0, break_even_S=math.inf, precision_ratio=math.nan),)).to_json()
    site = json.loads(text, parse_constant=pytest.fail)["sites"][0]
    assert (site["break_even_S"], site["precision_ratio"]) == ("inf", "nan")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "schema is None, expected 'mla_compile.report/2'"),
        ({"schema": "mla_compile.report/3"}, "schema is 'mla_compile.report/3'"),
        ({"schema": SCHEMA}, r"does not follow it: KeyError\('sites'\)"),
        ({**REPORT.to_dict(), "sites": [{"where": {}}]}, "does not follow it: TypeError"),
        ({**REPORT.to_dict(), "sites": [{**REFUSED.to_dict(), "code": "no_such"}]}, "'no_such' is not a valid Code"),
    ],
    ids=["empty", "newer", "no sites", "broken site", "unknown code"],
)
def test_from_dict_refuses_what_is_no_report(record, message):
    with pytest.raises(InputError, match=message):
        Report.from_dict(record)


def test_merged():
    other = Report(
        sites=(absorbed(0),),
        graph="prefill",
        passes=(PassRecord("normalize", 1, 0.5), PassRecord("fold", 2, 1.0)),
        messages=REPORT.messages,
    )
    both = Report.merged([REPORT, other])
    assert [site.index for site in both.sites] == [0, 1, 2, 3, 4, 5]
    assert both.sites[5] == dataclasses.replace(absorbed(0), index=5, graph="prefill")
    assert both.graph == "decode, prefill"
    assert both.passes == (PassRecord("normalize", 13, 0.75), PassRecord("absorb", 3, 0.5), PassRecord("fold", 2, 1.0))
    assert both.messages == REPORT.messages
    assert Report.merged([]) == Report(())


def test_figures_are_those_of_the_model_however_many_graphs_have_an_attention():
    """A layer is one layer in the graph of a prompt, of a step and of a longer step."""
    kept = dataclasses.replace(absorbed(0), verdict="kept", code=Code.COST_PREFILL)
    step = absorbed(0, values_held_before=40960, values_held_after=576)
    graphs = [Report((site, NOT_MLA), graph=f"0/{i}") for i, site in enumerate((kept, absorbed(0), step))]
    assert Report.merged(graphs).summary() == (
        "6 attention sites of 2 attentions in graphs 0/0, 0/1, 0/2: 2 absorbed, 1 kept (cost_prefill), 3 not MLA; "
        "attention reads 40,960 -> 576 values per key; the cache holds 40,960 -> 576 values per token"
    )
    two = Report((step, dataclasses.replace(step, index=1)), graph="0/0")  # two attentions of one module
    assert "the cache holds 81,920 -> 1,152 values per token" in two.summary()


@pytest.mark.thorough
def test_the_report_costs_no_rich_until_it_is_drawn():
    """Compiling a graph makes a report each time; drawing one is rare."""
    script = "import sys, mla_compile as m; print('rich' in sys.modules, str(m.Report(())), 'rich' in sys.modules)"
    root = Path(__file__).resolve().parents[2]  # where the package is found when it is not installed
    out = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "mla_compile:", "no", "attention", "sites", "True"]
