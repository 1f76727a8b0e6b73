"""``explain`` and example inputs: a forward is traced, and nothing of the user's is changed or run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mla_compile import CaptureError, InputError, explain, optimize
from tests.support.compiling import assert_untouched, state
from tests.support.models import build, prompt
from tests.support.toy import Buffered, D, L, Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


def test_example_inputs_fill_the_report_before_anything_runs() -> None:
    """By position or by name."""
    fast = optimize(Toy().eval(), dict(zip(("x", "rows"), decode_inputs(), strict=True)), **FAST)
    assert fast.mla_report.absorbed == 1
    buffered = Buffered().eval()
    fast = optimize(buffered, (decode_inputs()[0], torch.tensor([3])), **FAST)
    assert fast.mla_report.absorbed == 1
    assert not buffered.rows.any()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (torch.ones(1), InputError, "tuple of positional or a dict"),
        ((torch.ones(1),), InputError, "missing a required argument: 'rows'"),
        ({"x": 1, "row": 2}, InputError, "rows"),
        ((torch.ones(2, 1, D), torch.ones(2, 5, L)), InputError, "does not run on these inputs"),
    ],
)
def test_example_inputs_that_do_not_fit_are_input_errors(inputs: Any, error: Any, message: str) -> None:
    model = Toy().eval()
    before = state(model)
    with pytest.raises(error, match=message):
        optimize(model, inputs, **FAST)
    assert_untouched(model, before)


def test_a_model_that_cannot_be_captured_is_a_capture_error() -> None:
    class Hidden(Toy):
        @torch.compiler.disable
        def forward(self, x: Any, rows: Any) -> Any:
            return super().forward(x, rows)

    with pytest.raises(CaptureError, match="Hidden cannot be captured"):
        optimize(Hidden().eval(), decode_inputs(), **FAST)


def test_explain_changes_nothing_and_runs_nothing() -> None:
    model = build("minicpm3", num_hidden_layers=1)
    before = state(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), past_key_values=cache)
    keys = [layer.keys.clone() for layer in cache.layers]
    report = explain(model, input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    assert report.absorbed == 1
    for layer, key in zip(cache.layers, keys, strict=True):
        assert torch.equal(layer.keys, key)
    assert_untouched(model, before)
    ours = Buffered().eval()
    assert explain(ours, decode_inputs()[0], torch.tensor([3])).absorbed == 1
    assert not ours.rows.any()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
def test_explain_says_where_dynamo_made_no_graph_of_an_attention(layout: torch.layout) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(D, 6)
            self.up = nn.Parameter(torch.eye(6, L).to_sparse(layout=layout))

        def queries(self, x: Any) -> Any:  # gets a graph of its own
            return self.q(x)

        def forward(self, x: Any, rows: Any) -> Any:
            k = (self.up @ rows[0].mT).mT
            return (self.queries(x) @ k.mT).softmax(-1) @ k

    report = explain(Sparse(), torch.randn(1, 1, D), torch.randn(1, 5, L))
    assert not report.sites
    assert any("Dynamo broke the graph" in said and "sparse" in said.lower() for said in report.messages)


def test_explain_leaves_no_compiled_code_behind() -> None:
    model = Toy().eval()
    graphs: list[Any] = []
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            assert explain(model, *decode_inputs()).absorbed == 1
        step = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)
        step(*decode_inputs())
    assert len(graphs) == 1


def test_explain_a_model_that_fits_in_no_memory() -> None:
    with torch.device("meta"):
        config = transformers.DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=0)
        model = transformers.DeepseekV3ForCausalLM(config).eval().to(torch.bfloat16)
        ids = torch.ones(1, 1, dtype=torch.long)
        cache = transformers.DynamicCache(config=config)
        latent = torch.empty(1, 1, 4096, config.kv_lora_rank, dtype=torch.bfloat16)
        rope = torch.empty(1, 1, 4096, config.qk_rope_head_dim, dtype=torch.bfloat16)
        cache.update(latent, rope, 0)
    assert sum(p.numel() for p in model.parameters()) > 10e9
    report = explain(model, input_ids=ids, past_key_values=cache)
    assert report.absorbed == 1
    assert report.sites[0].dims is not None
    assert report.sites[0].dims.latent_values == 576


def test_explain_goes_on_with_values_where_the_model_asks_for_them() -> None:
    class Asking(Toy):
        def forward(self, x: Any, rows: Any) -> Any:
            if x.sum().item() > 1e9:
                return None
            return super().forward(x, rows)

    model = Asking().eval()
    assert explain(model, *decode_inputs()).absorbed == 1
    with pytest.raises(CaptureError, match="without values"):
        explain(model.to("meta"), *(t.to("meta") for t in decode_inputs()))


def test_a_module_that_cannot_be_copied():
    """As those of ``fully_shard``."""

    class Once(nn.Module):
        def forward(self, x):
            return x

        def __deepcopy__(self, memo):
            raise AssertionError("one of a kind")

    with pytest.raises(CaptureError, match=r"Once cannot be copied.*one of a kind.*before it is sharded"):
        explain(Once(), torch.ones(2))
