from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mla_compile import CaptureError, InputError, MlaCompileWarning, OptionError, WeightError, explain, optimize
from tests.support.models import build, greedy, prompt
from tests.support.toy import Buffered, D, L, Toy, decode_inputs

ROOT = Path(__file__).resolve().parents[2]
FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a user could see changed: the object's own attributes and the values of its tensors."""
    return {"own": dict(vars(model)), "values": {k: v.clone() for k, v in model.state_dict().items()}}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    assert vars(model) == before["own"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before["values"][name])


def test_an_optimized_module_is_the_same_model_with_absorbed_decode() -> None:
    model = Toy().eval()
    before = state(model)
    fast = optimize(model, **FAST)
    assert type(fast) is Toy
    assert fast.up.weight is model.up.weight
    assert fast.mla_report.sites == ()
    with torch.no_grad():
        got, want = fast(*decode_inputs()), model(*decode_inputs())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert fast.mla_report.absorbed == 1
    assert_untouched(model, before)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_runs_the_absorbed_decode(cache: str) -> None:
    model, inputs = build("deepseek_v3"), prompt()
    want, logits = greedy(model, inputs, steps=4, cache=cache)
    fast = optimize(model, **FAST)
    got, again = greedy(fast, inputs, steps=4, cache=cache)
    assert torch.equal(got, want)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert fast.mla_report.absorbed >= 2
    assert fast.config is model.config
    assert "forward" not in vars(model)


def test_generate_does_not_compile_a_second_time() -> None:
    fast = optimize(build("minicpm3"), **FAST)
    assert fast.get_compiled_call(None) == fast.__call__
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    with torch.no_grad():
        fast.generate(
            **prompt(), max_new_tokens=3, do_sample=False, cache_implementation="static", compile_config=config
        )
    assert fast.mla_report.absorbed


def test_changes_of_the_shared_weights_are_seen() -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    inputs = decode_inputs()
    with torch.no_grad():
        fast(*inputs)
        model.up.weight.mul_(3)
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
        model.up = nn.Linear(L, model.up.out_features, bias=False)
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_many_models_do_not_push_each_other_over_the_recompile_limit() -> None:
    inputs = decode_inputs()
    with torch.no_grad(), warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=2):
        warnings.simplefilter("error")
        for seed in range(10):
            model = Toy(seed).eval()
            fast = optimize(model, **FAST)
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
            assert fast.mla_report.absorbed == 1


def test_models_with_graph_breaks_do_not_either() -> None:
    class Broken(Toy):
        def attend(self, x: Any, rows: Any, mask: Any) -> Any:
            torch._dynamo.graph_break()
            return super().attend(x, rows, mask)

    if "isolate_recompiles" not in torch.compile.__kwdefaults__:
        pytest.skip("this torch counts recompilations of inner functions together")
    inputs = decode_inputs()
    with torch.no_grad(), warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=2):
        warnings.simplefilter("error")
        for seed in range(5):
            model = Broken(seed).eval()
            fast = optimize(model, **FAST)
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
            assert fast.mla_report.absorbed == 1


def test_with_gradients_the_original_runs_and_says_so_once() -> None:
    model = Toy()
    fast = optimize(model.eval(), **FAST)
    with pytest.warns(MlaCompileWarning, match="no_grad"):
        y, _ = fast(*decode_inputs())
    y.sum().backward()
    assert model.up.weight.grad is not None
    assert fast.mla_report.sites == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(*decode_inputs())
        optimize(Toy().train(), **FAST)(*decode_inputs())


def test_hooks_of_the_two_objects_are_apart_and_run() -> None:
    model = Toy().eval()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("both"))
    fast = optimize(model, **FAST)
    fast.register_forward_hook(lambda *_: calls.append("fast"))
    with torch.no_grad():
        fast(*decode_inputs())
        assert calls == ["both", "fast"]
        model(*decode_inputs())
    assert calls == ["both", "fast", "both"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), optimize])
def test_copies_are_optimized_on_their_own(duplicate: Any) -> None:
    fast = optimize(Toy().eval(), **FAST)
    with torch.no_grad():
        fast(*decode_inputs())
        other = optimize(fast, **FAST) if duplicate is optimize else duplicate(fast)
        assert other.forward is not fast.forward
        assert other.forward.module is other
        if duplicate is not optimize:
            other.up.weight.mul_(2)
            assert not torch.equal(other.up.weight, fast.up.weight)
        got = other(*decode_inputs())
        want = Toy.forward(other, *decode_inputs())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert other.mla_report.absorbed == 1


@pytest.mark.parametrize("inputs", [decode_inputs(), dict(zip(("x", "rows"), decode_inputs(), strict=True))])
def test_example_inputs_fill_the_report_before_anything_runs(inputs: Any) -> None:
    fast = optimize(Toy().eval(), inputs, **FAST)
    assert fast.mla_report.absorbed == 1
    buffered = Buffered().eval()
    optimize(buffered, (decode_inputs()[0], torch.tensor([3])), **FAST)
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


@pytest.mark.parametrize("what", [3, "model", len, torch.ones(1), None])
def test_what_is_no_model_is_an_input_error(what: Any) -> None:
    with pytest.raises(InputError, match=r"takes an nn\.Module"):
        optimize(what)
    with pytest.raises(InputError, match=r"takes an nn\.Module"):
        explain(what)


def test_options_are_checked_before_anything_is_done() -> None:
    model = Toy().eval()
    with pytest.raises(OptionError, match="did you mean 'lowering'"):
        optimize(model, lowerin="aten")
    with pytest.raises(OptionError, match="no-such"):
        optimize(model, mode="no-such")
    exported = torch.export.export(model, decode_inputs())
    with pytest.raises(OptionError, match="max_autotune"):
        optimize(exported, max_autotune=True)
    with pytest.raises(InputError, match="did you mean 'lowering'"):
        explain(model, *decode_inputs(), lowerin="aten")
    with pytest.raises(OptionError, match="lowerin"):
        explain(exported, lowerin="aten")


def test_explain_changes_nothing_and_runs_nothing() -> None:
    model = build("minicpm3")
    before = state(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), past_key_values=cache)
    keys = [layer.keys.clone() for layer in cache.layers]
    report = explain(model, input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    assert report.absorbed == 2
    assert explain(model, **prompt()).kept == 2
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
        config = transformers.DeepseekV3Config(num_hidden_layers=4)
        model = transformers.DeepseekV3ForCausalLM(config).eval().to(torch.bfloat16)
        ids = torch.ones(1, 1, dtype=torch.long)
        cache = transformers.DynamicCache(config=config)
        for layer in range(4):
            latent = torch.empty(1, 1, 4096, config.kv_lora_rank, dtype=torch.bfloat16)
            rope = torch.empty(1, 1, 4096, config.qk_rope_head_dim, dtype=torch.bfloat16)
            cache.update(latent, rope, layer)
    assert sum(p.numel() for p in model.parameters()) > 10e9
    report = explain(model, input_ids=ids, past_key_values=cache)
    assert report.absorbed == 4
    assert report.sites[0].dims is not None
    assert report.sites[0].dims.latent_values == 576


def test_an_argument_of_the_forward_may_be_called_like_an_option() -> None:
    class Cached(Toy):
        def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
            return super().forward(x, *cache)

    x, *rows = decode_inputs()
    assert explain(Cached().eval(), x, cache=rows).absorbed == 1
    assert explain(Cached().eval(), x, rows, cache="expanded", forms="expanded").kept == 1
    with pytest.raises(OptionError, match="cache is 'latnt'"):
        explain(Toy().eval(), x, *rows, cache="latnt")


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


def test_weights_without_values_cannot_be_folded() -> None:
    exported = torch.export.export(Toy().eval().to("meta"), tuple(t.to("meta") for t in decode_inputs()))
    with pytest.raises(WeightError, match="meta"):
        optimize(exported, fold="always", verify=False)


@pytest.mark.parametrize("fold", ["auto", "always"])
def test_an_exported_program_is_optimized_into_another(fold: str) -> None:
    model = Toy().eval()
    exported = torch.export.export(model, decode_inputs())
    code = exported.graph_module.code
    fast = optimize(exported, fold=fold, verify=False)
    assert isinstance(fast, torch.export.ExportedProgram)
    assert fast.graph_module.meta["mla_report"].absorbed == 1
    assert explain(exported).absorbed == 1
    assert exported.graph_module.code == code
    assert not [n for n in fast.graph.nodes if "mla_compile" in str(n.target)]
    with torch.no_grad():
        torch.testing.assert_close(fast.module()(*decode_inputs()), model(*decode_inputs()), rtol=1e-5, atol=1e-5)


def test_a_package_of_it_loads_where_we_are_not_imported(tmp_path: Path) -> None:
    model = Buffered().eval()
    x, _ = decode_inputs()
    position = torch.tensor([3])
    with torch.no_grad():
        fast = optimize(torch.export.export(model, (x, position)), verify=False)
        package = torch._inductor.aoti_compile_and_package(fast, package_path=str(tmp_path / "toy.pt2"))
        want = model(x, position)["y"]
    torch.save((x, position, want), tmp_path / "data.pt")
    script = (
        "import sys, torch\n"
        f"x, position, want = torch.load({str(tmp_path / 'data.pt')!r})\n"
        f"run = torch._inductor.aoti_load_package({package!r})\n"
        "got = run(x, position)['y']\n"
        "torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)\n"
        "assert 'mla_compile' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_symbolic_number_of_queries_in_an_artifact_takes_one_form_and_says_so() -> None:
    queries = torch.export.Dim("queries", min=2, max=512)
    shapes = {"x": {1: queries}, "rows": None}
    model = Toy().eval()
    for traced, absorbed in ((3, 1), (300, 0)):
        exported = torch.export.export(model, decode_inputs(queries=traced), dynamic_shapes=shapes)
        fast = optimize(exported, verify=False)
        report = fast.graph_module.meta["mla_report"]
        assert report.absorbed == absorbed
        assert any("one form" in message for message in report.messages) == (not absorbed)
        with torch.no_grad():
            for count in (2, 500):
                inputs = decode_inputs(queries=count)
                torch.testing.assert_close(fast.module()(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fold", ["auto", "always"])
def test_a_graph_module_is_optimized_into_another(fold: str) -> None:
    model = Toy().eval()
    gm = torch.export.export(model, decode_inputs()).module()
    fast = optimize(gm, fold=fold, **FAST)
    assert isinstance(fast, torch.fx.GraphModule)
    assert fast.meta["mla_report"].absorbed == 1
    assert fast.out.weight is gm.out.weight
    assert fast.state_dict().keys() == gm.state_dict().keys()
    assert explain(gm).absorbed == 1
    traced = torch.fx.symbolic_trace(model, concrete_args=None)
    with pytest.raises(InputError, match="example_inputs"):
        optimize(traced, **FAST)
    with pytest.raises(InputError, match="got 1 example"):
        optimize(traced, (torch.ones(1),), **FAST)
    again = optimize(traced, decode_inputs(), **FAST)
    with torch.no_grad():
        for candidate in (fast, again):
            torch.testing.assert_close(candidate(*decode_inputs()), model(*decode_inputs()), rtol=1e-5, atol=1e-5)


def test_a_forward_set_on_the_object_is_kept() -> None:
    model = Toy().eval()
    model.forward = lambda x, rows: tuple(2 * t for t in Toy.forward(model, x, rows))  # type: ignore[method-assign]
    with torch.no_grad():
        want = model(*decode_inputs())
        fast = optimize(model, **FAST)
        got = fast(*decode_inputs())
        again = optimize(fast, **FAST)(*decode_inputs())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-5)
    assert fast.mla_report.absorbed == 1
