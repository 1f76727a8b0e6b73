"""The page of ``explain``: it draws the traced graph, its charts hold the report's numbers, its text is only text."""

from __future__ import annotations

import functools
import importlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torch import nn

import mla_compile
from mla_compile.core.drawing import Drawing
from mla_compile.passes.report.draw import MOST
from mla_compile.report.explained import CONTEXTS, explained
from mla_compile.report.facts import facts_of
from mla_compile.report.page.write import render
from mla_compile.report.report import Report
from tests.support.explaining import LLAMA, Long, call
from tests.support.toy import Toy, decode_inputs

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Elements as (tag, attributes), and text by the element that holds it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []  # every element is closed, in order

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]

    def marked(self, name: str) -> list[dict[str, str]]:
        return [a for _, a in self.elements if name in a]


@functools.cache
def seen(kind: type[nn.Module]) -> Report:
    """What a model of this class is found to be, explained once for all tests."""
    return mla_compile.explain(kind(), *decode_inputs(cached=300))


def rendered(report: Report) -> str:
    return render(explained(facts_of(report.sites, report.messages, "Toy"), "fp32", 4))


def labels(drawing: Drawing) -> list[str]:
    return [f"{node.role}: {node.label} {'x'.join(node.shape)}" for node in drawing.nodes]


def test_the_drawing_before_and_after():
    """Nodes of the graph as it was traced and as it was rewritten, and which of them reads which."""
    (site,) = seen(Toy).sites
    assert site.drawing is not None
    assert site.drawing.after is not None
    assert labels(site.drawing.before) == [
        "cache: args_1 2x300x22",
        "weight: up.weight 88x16",
        "input: linear 2x1x22",
        "op: cat 2x301x22",
        "input: transpose 2x4x1x18",
        "latent: split_with_sizes [0] 2x301x16",
        "latent: split_with_sizes [1] 2x301x6",
        "op: linear 2x301x88",
        "op: view, transpose 2x4x301x22",
        "op: split_with_sizes [0] 2x4x301x12",
        "op: split_with_sizes [1] 2x4x301x10",
        "op: unsqueeze, expand 2x4x301x6",
        "op: cat 2x4x301x18",
        "attention: scaled_dot_product_attention 2x4x1x10",
    ]
    after = site.drawing.after
    (core,) = [i for i, node in enumerate(after.nodes) if node.role == "attention"]
    assert after.nodes[core].label == "decode_attention"
    above = reaching(after, core)
    assert {after.nodes[i].label for i in above if after.nodes[i].role == "weight"} == {"up.weight"}
    assert sum(after.nodes[i].role == "latent" for i in above) == 2
    assert not any(node.label == "linear" and node.role == "op" for node in after.nodes)  # nothing is expanded
    assert after.nodes[-1].shape == site.drawing.before.nodes[-1].shape


def reaching(drawing: Drawing, end: int) -> set[int]:
    found, queue = {end}, [end]
    while queue:
        reader = queue.pop()
        more = {s for s, r in drawing.edges if r == reader} - found
        found |= more
        queue += more
    return found


@pytest.mark.thorough
def test_every_drawing_is_whole(explained_tiny):
    """Edges go one way, everything leads to the last node, and names are names of nodes."""
    drawings = [d for s in explained_tiny.facts.sites for d in (s.drawing.before, s.drawing.after)]
    assert len(drawings) == 4
    for drawing in drawings:
        assert all(source < reader for source, reader in drawing.edges)
        assert reaching(drawing, len(drawing.nodes) - 1) == set(range(len(drawing.nodes)))
        names = [node.name for node in drawing.nodes]
        assert len(set(names)) == len(names)
        assert {"cache", "weight", "latent", "attention"} <= {node.role for node in drawing.nodes}


def test_drawings_are_neither_compared_nor_in_the_json():
    report = seen(Toy)
    again = Report.from_dict(json.loads(report.to_json()))
    assert "drawing" not in report.to_json()
    assert report.sites == again.sites
    assert again.sites[0].drawing is None


@pytest.mark.thorough
def test_the_charts_hold_the_numbers_of_the_report(explained_tiny):
    found = Page(render(explained_tiny, "tiny"))
    bars = {a["data-name"]: float(a["data-value"]) for a in found.all("g") if a.get("class", "").startswith("bar")}
    assert bars == {row.kind: row.values for row in explained_tiny.cache}
    points = [(float(a["data-at"]), float(a["data-value"])) for a in found.all("circle")]
    wanted = [(T, value) for row in explained_tiny.costs for T, value in zip(CONTEXTS, row.flops, strict=True)]
    wanted += [(T, value) for row in explained_tiny.costs for T, value in zip(CONTEXTS, row.bytes, strict=True)]
    assert points[: len(wanted)] == wanted
    assert len(points) == len(wanted) + 6  # the chart over queries
    for row in explained_tiny.cache:
        assert f"{row.values:,}" in found.texts
    assert len(found.all("svg", role="img")) == 4 + 2  # charts, and one site before and after
    assert sum(a.get("id", "").endswith("-d") for a in found.all("desc")) == 6


@pytest.mark.thorough
def test_layers_count_as_what_they_stand_for(explained_tiny):
    text = render(explained_tiny, "tiny")
    assert "All 5 attentions are decoded in absorbed form: 26 values are read per key and layer" in text
    assert "\N{MULTIPLICATION SIGN} 5 attentions" in text
    assert "kv_b_proj.weight" in text
    assert "modeling_deepseek_v3.py" in text


def test_the_break_even_is_where_the_lines_cross():
    """Few heads' worth of queries: the vertical line of the chart stands where expanding gets cheaper."""
    from mla_compile.passes.cost import cost
    from mla_compile.report.explained import query_flops

    report = seen(Toy)
    (site,) = explained(facts_of(report.sites, (), ""), "fp32", 4).choices
    assert site.break_even == tuple(cost.break_even_S(site.dims, T) for T in CONTEXTS)
    even = int(site.break_even[1])
    (_, expanded), (_, absorbed) = query_flops(site.dims, (even, even + 1), 32768)
    assert expanded[0] >= absorbed[0]
    assert expanded[1] <= absorbed[1]
    assert f"break-even: {even + 1}" in rendered(report)


def test_text_is_only_text(explained_models, monkeypatch):
    """A class and a line of source that would be markup, and characters that no page holds."""
    Path("odd.py").write_text(
        "import torch\nfrom torch import nn\nfrom tests.support.toy import Toy\n"
        "class Up(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.tanh(super().forward(x))  # </code><script>alert(1)</script><img src=x>\n"
        "class Odd(Toy):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up = Up(16, 88)\n"
        "Odd.__name__ = '</title><script>alert(2)</script>'\n"
    )
    monkeypatch.syspath_prepend(explained_models)
    report = mla_compile.explain(importlib.import_module("odd").Odd(), *decode_inputs(cached=300))
    report.to_html("odd.html", title="</title><script>alert(3)</script>\ud800 & 'quotes'")
    found = Page(Path("odd.html").read_text(encoding="utf-8"))
    assert not [tag for tag, _ in found.elements if tag in ("script", "img", "link", "iframe", "object", "base")]
    assert not [name for _, a in found.elements for name in a if name.startswith("on") or name in ("src", "href")]
    assert any("<script>alert(1)</script><img src=x>" in text for text in found.texts)
    assert any("</title><script>alert(3)</script>" in text for text in found.texts)


@pytest.mark.thorough
def test_nothing_comes_from_elsewhere(explained_tiny):
    text = render(explained_tiny, "tiny")
    assert not re.search(r"https?:|//|@import|<script|<link|javascript:", text)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert len(text.encode()) < 100_000
    found = Page(text)
    assert found.all("meta", name="viewport")
    ids = [a["id"] for a in found.marked("id")]
    assert len(set(ids)) == len(ids)
    for a in found.marked("aria-labelledby"):
        assert set(a["aria-labelledby"].split()) <= set(ids)


def test_equal_models_give_equal_bytes():
    again = mla_compile.explain(Toy(), *decode_inputs(cached=300))
    assert rendered(again) == rendered(seen(Toy))


def test_a_long_way_is_cut():
    report = seen(Long)
    (site,) = report.sites
    assert site.verdict == "refused"
    assert MOST - 10 <= len(site.drawing.before.nodes) <= MOST  # views are one node
    assert [node.name for node in site.drawing.before.nodes if node.blamed] == [site.blame.node]
    assert len(render(explained(facts_of(report.sites, (), ""), "fp32", 4))) < 200_000


def test_a_refusal_shows_what_stands_in_the_way(explained_models):
    done = call("python:explained_models:refused", "--html", "page.html")
    assert done.exit_code == 1, done.output
    found = Page(Path("page.html").read_text(encoding="utf-8"))
    assert any(
        text.startswith("Nothing is absorbed: the one attention is refused (nonlinear): ") for text in found.texts
    )
    (blamed,) = [a for a in found.all("g") if "blamed" in a.get("class", "")]
    assert blamed["data-node"] == "tanh"
    assert "return torch.tanh(super().forward(latent))" in found.texts
    assert "apply it to the latent, before the up-projection" in found.texts


@pytest.mark.thorough
def test_other_families_have_a_page_too(explained_models):
    Path("config.json").write_text(json.dumps(LLAMA))
    done = call("config.json", "--html", "page.html", "--json")
    assert done.exit_code == 1, done.output
    said = json.loads(done.stdout)
    found = Page(Path("page.html").read_text(encoding="utf-8"))
    assert "This is GQA, not Multi-head Latent Attention: there is no latent to absorb." in found.texts
    assert explained_models.name in found.texts  # a config.json is called what its directory is
    assert set(said) == {
        "schema", "dtype", "contexts", "model", "family", "notes", "weights", "stored", "cached_by_its_code", "sites",
        "cache", "costs", "choices", "report",
    }  # fmt: skip
    values = [float(a["data-value"]) for a in found.all("circle")]
    assert values == [*said["costs"][0]["flops"], *said["costs"][0]["bytes"]]
    assert "blamed" not in "".join(a.get("class", "") for a in found.all("g"))


def test_a_report_without_drawings_has_a_page():
    report = seen(Toy)
    bare = Report.from_dict(report.to_dict())
    text = render(explained(facts_of(bare.sites, (), "bare"), "bf16", 2))
    assert "No drawing" in text
    assert "No attention was found" in render(explained(facts_of((), (), "none"), "bf16", 2))
