"""Exports of attentions whose keys an indexer chooses: the rows of the lists are gathered, nothing else changes."""

from __future__ import annotations

import functools
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
from mla_compile import OptionError
from mla_compile.onnx import Session, generate
from tests.support import models
from tests.support.tiers import also, full

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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports each model once: ``exported(family, core, profile)`` is its directory, the model, the result.

    Of ``deepseek_v32_small`` there is one layer.
    """
    root = tmp_path_factory.mktemp("exported")

    @functools.cache
    def export(family: str, core: str, profile: str) -> tuple[Path, Any, Any]:
        directory = root / "_".join((family, core, profile))
        small = {"num_hidden_layers": 1} if family.endswith("_small") else {}
        name = family.removesuffix("_small")
        model = models.build(name, attn_implementation=core, first_k_dense_replace=3, **small)  # experts scatter too
        done = mla_compile.export_onnx(model, directory, profile=profile, prefill=False)
        return directory, model, done

    return export


@pytest.mark.parametrize(
    ("family", "core", "profile"),
    [
        ("deepseek_v32_small", "sdpa", "inplace"),
        *also("family", ("deepseek_v32", "eager", "portable"), ("glm_moe_dsa", "eager", "inplace")),
    ],
)
def test_tokens_are_those_of_generate(exported, family, core, profile):
    """The decode graph reads the prompts too: shorter and longer than a list, padded, in parts."""
    directory, model, done = exported(family, core, profile)
    assert done.verification.error < 1e-5
    assert done.verification.equal_tokens == done.verification.tokens
    session = Session(directory, providers=["cpu"], prefill_chunk=4 if profile == "inplace" else None)
    ends = session.manifest.eos_token_ids
    for inputs in (models.prompt(1, 3, 0), models.prompt(3, 11, pad=5)):
        expected, _ = models.greedy(model, inputs, STEPS)
        given = [i[m.bool()].tolist() for i, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        for row, tokens in zip(generate(session, given, max_new_tokens=STEPS), expected.tolist(), strict=True):
            last = next((n for n, token in enumerate(tokens, 1) if token in ends), STEPS)
            assert row == tokens[:last]


ONE_LAYER = ("IndexScores", "ListedAttention")
THREE_LAYERS = (*ONE_LAYER, "ListedAttention", *ONE_LAYER)  # the second has the list of the first


@pytest.mark.parametrize(
    ("family", "core", "profile", "kinds"),
    [
        ("deepseek_v32_small", "sdpa", "inplace", ONE_LAYER),
        *also("family", ("glm_moe_dsa", "eager", "inplace", THREE_LAYERS)),
    ],
)
def test_no_mask_over_all_keys_is_made(exported, family, core, profile, kinds):
    directory = exported(family, core, profile)[0]
    assert [kind for kind in ours(directory) if kind != "WeighAlike"] == [*kinds]
    assert ours(directory).count("WeighAlike") == (kinds.count("ListedAttention") if core == "eager" else 0)
    nodes = nodes_of(directory)
    assert not {"ScatterElements", "ScatterND"} & {n.op_type for n in nodes}
    masks = [n.input[3] for n in nodes if n.op_type == "ListedAttention"]
    assert all(made_from(nodes, [mask]) and "TopK" not in made_from(nodes, [mask]) for mask in masks)
    (site, *_) = json.loads((directory / "report.json").read_text())["report"]["sites"]
    assert site["chosen"] == 8
    report = (directory / "report.txt").read_text()
    assert "8 chosen keys of each query" in report
    assert "all heads in one operator" in report


@full("combination")
def test_the_option_keeps_the_mask_and_so_do_prompts(tmp_path):
    model = models.build("deepseek_v32", num_hidden_layers=1)
    mla_compile.export_onnx(model, tmp_path / "m", sparse="never", verify=False)
    assert ours(tmp_path / "m") == ["DecodeAttention"]
    nodes = nodes_of(tmp_path / "m")
    (mask,) = [n.input[3] for n in nodes if n.op_type == "DecodeAttention"]
    assert {"ScatterElements", "TopK"} <= made_from(nodes, [mask])
    assert ours(tmp_path / "m", "prefill.onnx") == []


def test_rows_that_no_list_names_are_not_read(exported, tmp_path):
    """Past the list, what the cache holds may be anything."""
    directory, *_ = exported("deepseek_v32_small", "sdpa", "inplace")
    graph = onnx.load(directory / "decode.onnx", load_external_data=False).graph
    (listed,) = [n.input[7] for n in graph.node if n.op_type == "ListedAttention"]
    model_with_list = onnx.load(directory / "decode.onnx")
    model_with_list.graph.output.append(onnx.helper.make_tensor_value_info(listed, onnx.TensorProto.INT32, [None] * 3))
    onnx.save(model_with_list, tmp_path / "listed.onnx")
    session = ort.InferenceSession(str(tmp_path / "listed.onnx"), providers=["CPUExecutionProvider"])
    T = 40
    random = np.random.default_rng(0)
    feeds = {v.name: random.standard_normal((1, T, v.shape[2])).astype(np.float32) for v in session.get_inputs()[3:]}
    feeds |= {
        "input_ids": np.array([[7]]), "attention_mask": np.ones((1, T), np.int64), "position_ids": np.array([[T - 1]]),
    }  # fmt: skip
    logits, indices = session.run(["logits", listed], feeds)
    assert indices.shape == (1, 1, 8)
    others = np.setdiff1d(np.arange(T - 1), indices)
    for name in ("past_latent.0", "past_k_rope.0"):
        feeds[name][:, others] = np.nan
    assert np.array_equal(session.run(["logits"], feeds)[0], logits)
    feeds["past_latent.0"][:, indices[indices < T - 1][0]] = np.nan
    assert np.isnan(session.run(["logits"], feeds)[0]).any()


@full("family")
def test_half_precision(tmp_path):
    model = models.build("deepseek_v32", dtype=torch.float16, num_hidden_layers=1)
    done = mla_compile.export_onnx(model, tmp_path / "m", prefill=False)
    assert ours(tmp_path / "m") == ["IndexScores", "ListedAttention"]
    assert 0 < done.verification.error < 1e-2
    done = mla_compile.export_onnx(model, tmp_path / "b", dtype="bfloat16", prefill=False)
    assert "before its translation" in str(done.verification)
    assert ours(tmp_path / "b") == ["IndexScores", "ListedAttention"]


def test_other_options_are_refused(tmp_path):
    with pytest.raises(OptionError, match="sparse is 'sometimes', expected one of auto, never"):
        mla_compile.export_onnx(models.build("deepseek_v32"), tmp_path / "m", sparse="sometimes")
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
        """query [B,2,S,6]; new [B,S,8]; index_query [B,S,12,8]; weights [B,S,12]; mask bool [B,1,S,T]; rows [B,P,8]."""
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
    indexer = normal(B, S, 12, 8), normal(B, S, 12)
    return normal(B, 2, S, 6), normal(B, S, 8), *indexer, mask, normal(B, P, 8), normal(B, P, 8)


def test_keys_that_a_list_names_twice_count_once():
    """In the program that a graph is a translation of; the next test runs the graph."""
    torch.manual_seed(3)
    module, values = Repeated().eval().requires_grad_(False), given(2, 3, 14)
    program = torch.export.export(module, values, strict=False)
    fast = mla_compile.optimize(program, lowering="op", forms="absorbed")
    (node,) = [n for n in fast.graph.nodes if n.target == torch.ops.mla_compile.decode_attention.default]
    told = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)) | node.kwargs
    assert told["indices"] is not None
    got = fast.module()(*values)[0]
    expected = module.double()(*(v.double() if v.is_floating_point() else v for v in values))[0]
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@full("combination")  # of masks that are proved to be lists, or not, and the functions of operators
@pytest.mark.parametrize(
    ("kind", "profile"),
    [(Repeated, "inplace"), *((kind, "portable") for kind in (First, Soft, PerHead, Flagged, Added, Moved))],
)
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
    # Where there are fewer keys than a list has room for, runtimes differ in which hidden ones they list.
    few = ((2, 1, 1), (2, 3, 0), (2, 4, 0)) if proved else ()
    for B, S, P in ((1, 1, 30), (3, 5, 9), *few):
        values = given(B, S, P)
        with torch.no_grad():
            expected = double(*(v.double() if v.is_floating_point() else v for v in values))[0]
        feeds = {n: v.numpy() for n, v in zip(names, values, strict=True)}
        if profile == "inplace":
            for name in names[5:]:
                feeds[name] = np.pad(feeds[name], ((0, 0), (0, S + 7), (0, 0)), constant_values=np.nan)
        got = torch.from_numpy(session.run(None, feeds)[0])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max(), (B, S, P)
