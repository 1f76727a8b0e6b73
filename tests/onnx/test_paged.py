"""Profile ``ort-paged``: packed sequences over pages of rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxscript import ir

import mla_compile
from mla_compile import ExportError
from mla_compile.onnx import paged
from tests.support import models


class PagedAttention(OpRun):
    """``com.microsoft::PagedAttention`` with latent rows, as its schema describes it."""

    op_domain = "com.microsoft"

    def _run(
        self, query, key, value, key_cache, value_cache, cumulative, past, table,
        num_heads=None, kv_num_heads=None, kv_cache_layout=None, v_head_size=None, scale=None,
    ):  # fmt: skip
        assert value is None
        assert value_cache is None
        assert (kv_num_heads, kv_cache_layout) == (1, "LATENT")
        pages, width, block = key_cache.copy(), key.shape[1], key_cache.shape[1]
        out = np.zeros((len(query), num_heads, v_head_size), query.dtype)
        q = query.reshape(len(query), num_heads, width).astype(np.float64)
        for b, before in enumerate(past):
            for i, token in enumerate(range(cumulative[b], cumulative[b + 1])):
                at = before + i
                pages[table[b, at // block], at % block, 0] = key[token]
                rows = pages[table[b]].reshape(-1, width)[: at + 1].astype(np.float64)
                scores = scale * q[token] @ rows.T
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[token] = (p / p.sum(-1, keepdims=True)) @ rows[:, :v_head_size]
        return out.reshape(len(query), -1), pages


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = models.build("minicpm3", num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("paged") / "m"
    done = mla_compile.export_onnx(model, folder, profile="ort-paged", dtype="float16")
    assert "CUDA devices only" in str(done.verification)
    assert done.verification.error < 1e-2
    return folder, model


def test_paged_graph_packs_sequences_of_any_length(exported):
    """Two prompts and then a step of each, packed, through pages that lie in any order."""
    folder, model = exported
    graph = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    run = ReferenceEvaluator(graph, new_ops=[PagedAttention])
    prompts, block = [[5, 9, 17, 33, 21], [8, 100, 3]], 4
    pages = {v.name: np.full((6, block, 1, 80), np.nan, np.float16) for v in graph.graph.input[5:]}
    table = np.array([[4, 1, 0], [2, 5, 3]], np.int32)
    expected = [model(torch.tensor([p])).logits[0] for p in prompts]

    def call(rows, past):
        counts = [len(row) for row in rows]
        positions = [list(range(n, n + c)) for n, c in zip(past, counts, strict=True)]
        feeds = {
            "input_ids": np.array([[token for row in rows for token in row]]),
            "position_ids": np.array([[position for row in positions for position in row]]),
            "cumulative_sequence_length": np.array([0, *np.cumsum(counts)], np.int32),
            "past_seqlens": np.array(past, np.int32),
            "block_table": table,
        }
        logits, *new = run.run(None, {**feeds, **pages})
        pages.update(zip(pages, new, strict=True))
        return logits[0].astype(np.float32)

    logits = call(prompts, [0, 0])
    assert np.abs(logits - torch.cat(expected).numpy()).max() < 2e-2 * float(torch.cat(expected).abs().max())
    following = [int(e[-1].argmax()) for e in expected]
    more = [model(torch.tensor([[*p, t]])).logits[0, -1] for p, t in zip(prompts, following, strict=True)]
    logits = call([[t] for t in following], [5, 3])
    assert np.abs(logits - torch.stack(more).numpy()).max() < 2e-2 * float(torch.stack(more).abs().max())


@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_mask_may_read_how_many_tokens_there_are_and_not_which(of_tokens):
    """Token 7 sees nothing: an evaluation with other tokens would not show it."""
    steps = [
        "seen = Cast<to=9>(attention_mask)",
        "rows = Unsqueeze(seen, middle)",
        "B = Shape<start=0, end=1>(input_ids)",
        "S = Shape<start=1, end=2>(input_ids)",
        "T = Shape<start=1, end=2>(attention_mask)",
        "shape = Concat<axis=0>(B, one, S, T)",
        "wide = Expand(rows, shape)",
        "hidden = Equal(input_ids, seven)",
        "shown = Not(hidden)",
        "columns = Unsqueeze(shown, ends)",
        "mask = And(wide, columns)" if of_tokens else "mask = Identity(wide)",
    ]
    text = """<ir_version: 10, opset_import: ["": 21]>
    mask (int64[B,S] input_ids, int64[B,T] attention_mask) => (bool[B,1,S,T] mask)
    <int64[1] one = {1}, int64 seven = {7}, int64[2] middle = {1, 2}, int64[2] ends = {1, 3}> {STEPS}"""
    model = onnx.parser.parse_model(text.replace("STEPS", "\n".join(steps)))
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph
    tokens, attention_mask = graph.inputs
    if not of_tokens:
        paged._check_causal(graph, graph.outputs[0], tokens, attention_mask, [], causal=True)
        return
    with pytest.raises(ExportError, match=r"more than lengths and padding \(input_ids\)"):
        paged._check_causal(graph, graph.outputs[0], tokens, attention_mask, [], causal=True)


@pytest.mark.parametrize(
    ("caches", "latent", "rope"),
    [
        (3, 0, 1),  # an indexer's keys
        (1, None, 0),  # keys without latent rows
    ],
)
def test_caches_of_another_kind_have_no_pages(caches, latent, rope):
    graph, found = ir.Graph([], [], nodes=[]), [SimpleNamespace(latent=latent, rope=rope)]
    with pytest.raises(ExportError, match="keeps latent rows only, and this model has caches of another kind"):
        paged.in_pages(graph, [None] * caches, found)
