"""Exports of attentions whose keys an indexer chooses: the rows of the lists are gathered, nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import mla_compile
from mla_compile import ExportError, OptionError
from mla_compile.onnx import Session, generate
from tests.support import models

STEPS = 24  # three times as many as the keys that are chosen


def nodes_of(directory: Path, file: str = "decode.onnx") -> list[onnx.NodeProto]:
    return list(onnx.load(directory / file, load_external_data=False).graph.node)


def ours(directory: Path, file: str = "decode.onnx") -> list[str]:
    return [n.op_type for n in nodes_of(directory, file) if n.domain]


def made_from(nodes: list[onnx.NodeProto], names: list[str]) -> set[str]:
    """The operators that compute ``names``."""
    by_output = {name: node for node in nodes for name in node.output}
    found: dict[str, str] = {}
    while names:
        name = names.pop()
        if name in by_output and name not in found:
            found[name] = by_output[name].op_type
            names += by_output[name].input
    return set(found.values())


def check_tokens(model: Any, session: Session, prompts: list[dict[str, Tensor]]) -> None:
    for inputs in prompts:
        expected, _ = models.greedy(model, inputs, STEPS)
        given = [i[m.bool()].tolist() for i, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        assert generate(session, given, max_new_tokens=STEPS) == expected.tolist()


@pytest.mark.parametrize("core", ["sdpa", "eager"])
@pytest.mark.parametrize("profile", ["portable", "inplace"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_those_of_generate(tmp_path, family, profile, core):
    model = models.build(family, attn_implementation=core)
    done = mla_compile.export_onnx(model, tmp_path / "m", profile=profile, prefill=profile == "portable")
    assert done.verification.error < 1e-5
    assert done.verification.equal_tokens == done.verification.tokens
    # The decode graph reads prompts too: at once, shorter and longer than a list, and in parts.
    prompts = [models.prompt(1, 3, 0), models.prompt(1, 20, 0), models.prompt(3, 11, pad=5)]
    for how in ({}, {"prefill_chunk": 4}) if profile == "inplace" else ({}, {"load_prefill": False}):
        check_tokens(model, Session(tmp_path / "m", providers=["cpu"], **how), prompts)


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_no_mask_over_all_keys_is_made(tmp_path, core):
    model = models.build("glm_moe_dsa", attn_implementation=core)
    for sparse in ("auto", "never"):
        mla_compile.export_onnx(model, tmp_path / sparse, sparse=sparse, verify=False)
    assert ours(tmp_path / "never") == ["DecodeAttention"] * 3
    assert [kind for kind in ours(tmp_path / "auto") if kind != "WeighAlike"] == [
        "IndexScores", "ListedAttention", "ListedAttention", "IndexScores", "ListedAttention",
    ]  # fmt: skip
    assert ours(tmp_path / "auto").count("WeighAlike") == (3 if core == "eager" else 0)
    # Two indexers, the second layer takes the list of the first; what else scatters routes tokens to experts.
    scatters = {s: [n.op_type for n in nodes_of(tmp_path / s)].count("ScatterElements") for s in ("auto", "never")}
    assert scatters["never"] - scatters["auto"] == 2
    for sparse, name in (("auto", "ListedAttention"), ("never", "DecodeAttention")):
        nodes = nodes_of(tmp_path / sparse)
        masks = [n.input[3] for n in nodes if n.op_type == name]
        assert [bool(made_from(nodes, [m]) & {"ScatterElements", "TopK"}) for m in masks] == [sparse == "never"] * 3
    assert ours(tmp_path / "auto", "prefill.onnx") == []
    (site, *_) = json.loads((tmp_path / "auto" / "report.json").read_text())["report"]["sites"]
    assert site["chosen"] == "8"
    report = (tmp_path / "auto" / "report.txt").read_text()
    assert "8 chosen keys of each query" in report
    assert "all heads in one operator" in report


def test_rows_that_no_list_names_are_not_read(tmp_path):
    """Past the list, what the cache holds may be anything."""
    model = models.build("deepseek_v32", num_hidden_layers=1)
    mla_compile.export_onnx(model, tmp_path / "m", prefill=False, verify=False)
    graph = onnx.load(tmp_path / "m" / "decode.onnx", load_external_data=False).graph
    (listed,) = [n.input[7] for n in graph.node if n.op_type == "ListedAttention"]
    model_with_list = onnx.load(tmp_path / "m" / "decode.onnx")
    model_with_list.graph.output.append(onnx.helper.make_tensor_value_info(listed, onnx.TensorProto.INT32, [None] * 3))
    onnx.save(model_with_list, tmp_path / "listed.onnx")
    session = ort.InferenceSession(str(tmp_path / "listed.onnx"), providers=["CPUExecutionProvider"])
    T = 40
    random = np.random.default_rng(0)
    feeds = {
        v.name: random.standard_normal((1, T - 1, v.shape[2])).astype(np.float32) for v in session.get_inputs()[3:]
    }
    feeds |= {
        "input_ids": np.array([[7]]), "attention_mask": np.ones((1, T), np.int64), "position_ids": np.array([[T - 1]]),
    }  # fmt: skip
    logits, indices = session.run(["logits", listed], feeds)
    assert indices.shape == (1, 1, 8)
    others = np.setdiff1d(np.arange(T - 1), indices)
    for name in ("past_latent.0", "past_k_rope.0"):
        feeds[name][:, others] = np.nan
    assert np.array_equal(session.run(["logits"], feeds)[0], logits)
    feeds["past_latent.0"][:, indices[0, 0, 0] % (T - 1)] = np.nan
    assert np.isnan(session.run(["logits"], feeds)[0]).any()


def test_half_precision(tmp_path):
    model = models.build("deepseek_v32", dtype=torch.float16)
    mla_compile.export_onnx(model, tmp_path / "m")
    assert "ListedAttention" in ours(tmp_path / "m")
    done = mla_compile.export_onnx(models.build("glm_moe_dsa"), tmp_path / "b", dtype="bfloat16", prefill=False)
    assert "before its translation" in str(done.verification)
    assert ours(tmp_path / "b").count("ListedAttention") == 3


def test_the_option(tmp_path):
    with pytest.raises(OptionError, match="sparse is 'sometimes', expected one of auto, never"):
        mla_compile.export_onnx(models.build("deepseek_v32"), tmp_path / "m", sparse="sometimes")
    with pytest.raises(ExportError, match="caches of another kind"):  # there is no paged operator for lists
        mla_compile.export_onnx(models.build("deepseek_v32"), tmp_path / "m", profile="ort-paged", dtype="float16")
    assert not any(tmp_path.iterdir())


class Sparse(nn.Module):
    """A sparse attention as somebody may write it: two heads over a latent of 8, the best 4 keys of an indexer."""

    k = 4

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 2 * 10, bias=False)

    def rank(self, scores: Tensor) -> Tensor:
        """[B,S,k]."""
        return scores.topk(min(self.k, scores.shape[-1]), dim=-1).indices

    def seen(self, scores: Tensor) -> Tensor:
        """[B,1,S,T]: bool, or added to the scores."""
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, self.rank(scores), True)[:, None]

    def beside(self, seen: Tensor, mask: Tensor) -> Tensor:
        return seen & mask

    def forward(self, query, new, index_query, weights, mask, rows, keys):
        """query [B,2,S,6]; new [B,S,8]; index_query [B,S,3,8]; weights [B,S,3]; mask bool [B,1,S,T]; rows [B,P,8]."""
        rows, keys = torch.cat([rows, new], 1), torch.cat([keys, new.flip(-1)], 1)
        products = torch.relu(index_query @ keys.transpose(1, 2)[:, None])
        scores = (weights[..., None, :] @ products)[:, :, 0].masked_fill(~mask[:, 0], -torch.inf)
        B, T, _ = rows.shape
        k, v = self.up(rows).view(B, T, 2, 10).transpose(1, 2).split([6, 4], -1)
        mask = self.beside(self.seen(scores), mask)
        return nn.functional.scaled_dot_product_attention(query, k, v, mask, scale=0.4), rows, keys


class Repeated(Sparse):
    """Some keys are named twice."""

    def rank(self, scores):
        return super().rank(scores) // 2


class Flagged(Sparse):
    """Keys that are hidden do not count, whatever the list says."""

    def seen(self, scores):
        ranked = self.rank(scores)
        flags = (scores.gather(-1, ranked) > -torch.inf).int()
        return (torch.zeros_like(scores, dtype=torch.int32).scatter_add(-1, ranked, flags) > 0)[:, None]


class Added(Sparse):
    """The list as numbers that are added."""

    def seen(self, scores):
        return torch.full_like(scores, -torch.inf).scatter(-1, self.rank(scores), 0.0)[:, None]

    def beside(self, seen, mask):
        return seen.masked_fill(~mask, -torch.inf)


class Soft(Added):
    """What is not listed counts less, and is seen."""

    def seen(self, scores):
        return super().seen(scores).clamp(min=-3.0)


class First(Sparse):
    """The first key is seen by all."""

    def seen(self, scores):
        return super().seen(scores) | (torch.arange(scores.shape[-1]) == 0)


class Moved(Sparse):
    """The mask is not where the list says."""

    def seen(self, scores):
        return super().seen(scores).roll(1, -1)


class PerHead(Sparse):
    """Each head has keys of its own."""

    def seen(self, scores):
        return torch.cat([super().seen(scores), super().seen(-scores)], 1)


def given(B: int, S: int, P: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(B + 10 * S + 100 * P)

    def normal(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator)

    mask = torch.arange(P + S) <= torch.arange(P, P + S)[:, None]
    mask = mask.expand(B, 1, S, P + S) & (torch.arange(P + S) >= torch.arange(B)[:, None, None, None])
    mask[..., -1] = True  # padding sees something
    return (
        normal(B, 2, S, 6), normal(B, S, 8), normal(B, S, 3, 8), normal(B, S, 3), mask, normal(B, P, 8), normal(B, P, 8)
    )  # fmt: skip


@pytest.mark.parametrize("profile", ["portable", "inplace"])
@pytest.mark.parametrize("kind", [Sparse, Repeated, Flagged, Added, Soft, First, Moved, PerHead])
def test_programs_against_float64(tmp_path, kind, profile):
    torch.manual_seed(3)
    module = kind().eval().requires_grad_(False)
    batch, new, past, auto = Dim("batch"), Dim("new"), Dim("past", min=0), Dim.AUTO
    tokens, rows = {0: batch, 1: new}, {0: batch, 1: past}
    shapes = ({0: batch, 2: new}, tokens, tokens, tokens, {0: batch, 2: new, 3: auto}, rows, rows)
    program = torch.export.export(module, given(2, 3, 14), dynamic_shapes=shapes, strict=False)
    mla_compile.export_onnx(program, tmp_path / "m", profile=profile, prefill=False)
    proved = kind in (Sparse, Repeated, Flagged, Added)
    assert ("ListedAttention" in ours(tmp_path / "m")) is proved
    assert ("DecodeAttention" in ours(tmp_path / "m")) is not proved
    session = ort.InferenceSession(str(tmp_path / "m" / "decode.onnx"), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_inputs()]
    double = kind().double().eval()
    double.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    for B, S, P in ((1, 1, 30), (2, 1, 1), (3, 5, 9), (2, 3, 0), (2, 4, 0)):
        values = given(B, S, P)
        with torch.no_grad():
            expected = double(*(v.double() if v.is_floating_point() else v for v in values))[0]
        feeds = {n: v.numpy() for n, v in zip(names, values, strict=True)}
        if profile == "inplace":
            for name in names[5:]:
                feeds[name] = np.pad(feeds[name], ((0, 0), (0, S + 7), (0, 0)), constant_values=np.nan)
        got = torch.from_numpy(session.run(None, feeds)[0])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max(), (B, S, P)
