"""Layers of one kind are compiled once: how often Inductor is called, and that the results are those of the whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

import mla_compile
from mla_compile.dynamo import code
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.errors import MlaCompileWarning
from mla_compile.repeats import find
from mla_compile.runtime.latent import LatentTensor
from tests.dynamo import test_sizes
from tests.support import models
from tests.support.tiers import full

LAYERS = 3
"""As many as are a repetition."""
Made = list[tuple[fx.GraphModule, str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that code was asked for; they run as they are."""
    graphs: list[fx.GraphModule] = []

    def whole(_: CodeGenerator, gm: fx.GraphModule, inputs: Any, layers: int = 1) -> Any:
        values = [
            node.meta.get("val", node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")
        ]
        assert len(inputs) == len(values)
        for given, value in zip(inputs, values, strict=True):
            assert not isinstance(value, torch.Tensor) or (given.shape, given.dtype) == (value.shape, value.dtype)
        graphs.append(gm)
        return gm

    monkeypatch.setattr(CodeGenerator, "whole", whole)
    return graphs


def optimized(model: Any, **options: Any) -> Any:
    return mla_compile.optimize(model, strict=True, verify=False, **options)


def kinds(family: str) -> dict[str, Any]:
    """Enough layers of each kind that a family has."""
    config = models.FAMILIES | models.SPARSE
    dense = "first_k_dense_replace" in config[family].kwargs
    return {"num_hidden_layers": LAYERS + 1, "first_k_dense_replace": 1} if dense else {"num_hidden_layers": LAYERS}


@full("family")
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("minicpm3", "dynamic"),
        ("deepseek_v3", "static"),
    ],
)
def test_tokens_of_layers_that_are_compiled_once(family: str, cache: str, made: list[fx.GraphModule]) -> None:
    model = models.build(family, **kinds(family))
    inputs = models.prompt()
    want, want_logits = models.greedy(model, inputs, steps=3, cache=cache)
    fast = optimized(model)
    got, logits = models.greedy(fast, inputs, steps=3, cache=cache)
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-4)
    report = fast.mla_report
    count = model.config.num_hidden_layers
    assert (report.absorbed, report.absorbed % count) == (len(report.sites) - report.kept, 0)
    assert report.absorbed
    # In front of the layers (with the first where that is dense), a kind of layer, behind them: for each graph.
    assert len(made) % 3 == 0
    assert max(map(attentions, made)) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> test_sizes.Model:
    """A model whose layers, short as they are, are compiled once."""
    monkeypatch.setattr(find, "LEAST_LENGTH", 8)
    torch.manual_seed(0)
    return test_sizes.Model(LAYERS).eval().requires_grad_(False)


def test_small_layers_at_any_length(made: list[fx.GraphModule], small: test_sizes.Model) -> None:
    """Parts whose inputs are sizes, and caches that grow."""
    fast = torch.compile(small, backend="mla", options={"strict": True, "verify": False})
    mine: list[Any] = [None] * LAYERS
    theirs: list[Any] = [None] * LAYERS
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(1, 1 if step else 7, test_sizes.D)
            (got, mine), (want, theirs) = fast(x, mine), small(x, theirs)
            torch.testing.assert_close(got, want)
    assert max(map(attentions, made)) == 1
    assert len(made) < 2 * LAYERS
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for gm in made for node in gm.graph.nodes)


def attentions(gm: fx.GraphModule) -> int:
    return sum("attention" in str(node.target) for node in gm.graph.nodes if node.op == "call_function")


@full("family")
def test_two_kinds_that_take_turns(made: list[fx.GraphModule]) -> None:
    """Full and shared indexers: every second layer chooses its keys itself."""
    layers = {"num_hidden_layers": 8, "indexer_types": ["full", "shared"] * 4}
    model = models.build("glm_moe_dsa", **layers)
    inputs = models.prompt()
    want, want_logits = models.greedy(model, inputs, steps=4, cache="static")
    got, logits = models.greedy(optimized(model), inputs, steps=4, cache="static")
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-4)
    assert max(map(attentions, made)) <= 3


@pytest.mark.parametrize("options", [{"layers": "whole"}, {"triton.cudagraphs": True}, {"freezing": True}], ids=str)
def test_one_piece_where_that_is_asked_for(
    options: dict[str, Any], made: list[fx.GraphModule], small: test_sizes.Model
) -> None:
    """A CUDA graph and folded constants belong to the weights of one layer."""
    with torch.no_grad():
        torch.compile(small, backend="mla", options=options)(torch.ones(1, 4, test_sizes.D), [None] * LAYERS)
    assert len(made) == 1
    assert attentions(made[0]) == LAYERS


@full("inductor")
def test_inductor_compiles_one_layer_of_many() -> None:
    """With real code, sizes that change and caches that grow."""
    model = models.build("minicpm3", num_hidden_layers=LAYERS)
    want, _ = models.greedy(model, models.prompt(), steps=6)
    fast = optimized(model)
    with mock.patch.object(CodeGenerator, "whole", autospec=True, side_effect=CodeGenerator.whole) as whole:
        got, _ = models.greedy(fast, models.prompt(), steps=6)
    assert torch.equal(got, want)
    assert len(whole.call_args_list) >= 6, "three parts of a prompt, three of a step"
    assert max(attentions(call.args[1]) for call in whole.call_args_list) == 1


@pytest.mark.filterwarnings("ignore:Using `torch.compile\\(module\\)` when there are global hooks")
def test_global_hooks_see_no_module_of_ours(made: list[fx.GraphModule], small: test_sizes.Model) -> None:
    """Hooks of the user's that are set after the compilation, which Dynamo does not look for again."""
    given = torch.ones(1, 4, test_sizes.D), [None] * LAYERS
    call, seen = torch.compile(small, backend="mla", options={"strict": True}), list[str]()
    with torch.no_grad():
        want, _ = call(*given)
        with torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__)):
            got, _ = call(*given)
    assert torch.equal(got, want)
    assert max(map(attentions, made)) == 1, "the layers are no parts"
    assert set(seen) <= {type(module).__name__ for module in small.modules()} | {"OptimizedModule"}


def test_a_failure_in_the_parts_leaves_the_graph_whole(
    monkeypatch: pytest.MonkeyPatch, made: list[fx.GraphModule], small: test_sizes.Model
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(code, "split", broken)
    given = torch.ones(1, 4, test_sizes.D), [None] * LAYERS
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match="compiled as a whole .*ZeroDivisionError: of ours"):
        torch.compile(small, backend="mla")(*given)
    assert len(made) == 1
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="of ours"):
        torch.compile(small, backend="mla", options={"strict": True})(*given)


def test_weights_that_are_subclasses_expand_the_rows_of_a_cache() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = test_sizes.Model(layers=1)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    fast = torch.compile(model, backend="mla", options={"strict": True, "codegen": "eager", "cache": "latent"})
    got: list[Any] = [None]
    want: list[Any] = [None]
    with torch.no_grad():
        for tokens in (7, 1):
            x = torch.randn(1, tokens, test_sizes.D)
            (y, got), (z, want) = fast(x, got), model(x, want)
            torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    assert all(isinstance(k, LatentTensor) for k, _ in got)


def test_weights_that_are_subclasses_are_given_to_the_parts_as_plain_tensors(made: list[fx.GraphModule]) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = models.build("minicpm3", num_hidden_layers=LAYERS)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    ids = models.prompt()["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
        got = torch.compile(model, backend="mla", options={"strict": True})(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert [attentions(gm) for gm in made] == [0, 1, 0]
    handed = [value for gm in made for value in gm.graph.output_node().args[0]]
    assert len(handed) <= 8, "what the layers are given is not returned by what is in front of them"
