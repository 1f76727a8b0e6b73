"""``optimize`` and ``explain``: programs and graphs in, the same kind out; anything else is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_compile import InputError, OptionError, WeightError, explain, optimize
from tests.support.tiers import also, full
from tests.support.toy import Buffered, Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


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


def test_an_argument_of_the_forward_may_be_called_like_an_option() -> None:
    class Cached(Toy):
        def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
            return super().forward(x, *cache)

    x, *rows = decode_inputs()
    assert explain(Cached().eval(), x, cache=rows).absorbed == 1
    assert explain(Cached().eval(), x, rows, cache="expanded", forms="expanded").kept == 1
    with pytest.raises(OptionError, match="cache is 'latnt'"):
        explain(Toy().eval(), x, *rows, cache="latnt")


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


@full("inductor")  # the test above shows that nothing of ours is left in a program
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
        run = fast.module()
        with torch.no_grad():
            for count in (2, 500):
                inputs = decode_inputs(queries=count)
                torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fold", ["auto", *also("combination", "always")])  # the test above folds in a program
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
