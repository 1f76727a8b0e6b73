"""An optimized module: the same model to everybody who calls, copies, saves or trains it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mla_compile import InputError, MlaCompileWarning, optimize
from tests.support.compiling import assert_untouched, state
from tests.support.models import build, greedy, prompt
from tests.support.tiers import full
from tests.support.toy import L, Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


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


@full("family")  # the next tests generate with one layer, and compare tokens
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_runs_the_absorbed_decode(cache: str) -> None:
    model, inputs = build("deepseek_v3"), prompt()
    want, logits = greedy(model, inputs, steps=4, cache=cache)
    fast = optimize(model, **FAST)
    got, again = greedy(fast, inputs, steps=4, cache=cache)
    assert torch.equal(got, want)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert fast.mla_report.absorbed >= model.config.num_hidden_layers


def test_generate_does_not_compile_a_second_time() -> None:
    model = build("minicpm3", num_hidden_layers=1)
    fast = optimize(model, **FAST)
    assert fast.get_compiled_call(None) == fast.__call__
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    given: dict[str, Any] = {**prompt(), "max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    with torch.no_grad():
        tokens = fast.generate(**given, compile_config=config)
        assert tokens.equal(model.generate(**given, disable_compile=True))
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
        for seed in range(3):
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
        for seed in range(3):
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


def test_copies_are_optimized_on_their_own() -> None:
    fast = optimize(Toy().eval(), **FAST)
    with torch.no_grad():
        fast(*decode_inputs())
        copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))]
        for other in (*copies, optimize(fast, **FAST)):
            assert other.forward is not fast.forward
            assert other.forward.module is other
            if other in copies:
                other.up.weight.mul_(2)
                assert not torch.equal(other.up.weight, fast.up.weight)
            got = other(*decode_inputs())
            want = Toy.forward(other, *decode_inputs())
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert other.mla_report.absorbed == 1


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


def test_what_is_warmed_up_is_not_compiled_when_the_first_user_comes():
    model = build("minicpm3", num_hidden_layers=1)
    fast = optimize(model, codegen="eager", verify=False)
    fast.warm_up(batch=2, prompt=9)
    made = fast.forward.compiler.graphs
    assert made
    inputs = prompt(length=20, pad=0)
    want, logits = greedy(model, inputs, steps=5)
    got, again = greedy(fast, inputs, steps=5)
    assert torch.equal(got, want)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert fast.forward.compiler.graphs == made
    assert fast.mla_report.absorbed
    assert fast.config is model.config
    assert "forward" not in vars(model)
    other = copy.deepcopy(fast)
    assert other.warm_up.__self__ is other.forward
    assert not hasattr(optimize(Toy()), "warm_up")
    with pytest.raises(InputError, match="numbers from 1 on, got batch=0"):
        fast.warm_up(batch=0)
