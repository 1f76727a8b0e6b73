"""A model that is changed after ``optimize``: compiled code follows, also where weights are folded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from mla_compile import MlaCompileWarning, optimize
from tests.support.tiers import also
from tests.support.toy import H, L, N, Toy, V, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


class Adapted(nn.Module):
    """LoRA as peft attaches it: the old layer inside a new one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.base = base
        self.a = nn.Parameter(torch.randn(3, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, 3, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Triple(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 3 * weight


def attach_adapter(model: Any) -> None:
    model.up = Adapted(model.up)


def add_hook(model: Any) -> None:
    model.up.register_forward_hook(lambda _module, _args, out: 2 * out)


def add_pre_hook(model: Any) -> None:
    model.down.register_forward_pre_hook(lambda _module, args: (2 * args[0],))


def parametrize_weight(model: Any) -> None:
    parametrize.register_parametrization(model.up, "weight", Triple())


def replace_forward_of_a_layer(model: Any) -> None:
    before = model.up.forward
    model.up.forward = lambda x: 2 * before(x)


def add_bias(model: Any) -> None:
    model.up.bias = nn.Parameter(torch.linspace(-1, 1, model.up.out_features))


def replace_layer(model: Any) -> None:
    model.up = nn.Sequential(nn.Linear(L, L, bias=False), nn.SiLU(), nn.Linear(L, H * (N + V), bias=False))


def load_other_weights(model: Any) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def swap_two_heads(model: Any) -> None:
    model.up.weight.data = model.up.weight.data.view(H, N + V, L).flip(0).reshape(-1, L)


def to_double(model: Any) -> None:
    model.to(torch.float64)


def to_half(model: Any) -> None:
    model.to(torch.bfloat16)


TOGETHER = [
    ([add_hook, load_other_weights, swap_two_heads, add_bias, parametrize_weight], "always"),
    ([to_half], "always"),  # of larger numbers the rounding would be larger
    ([add_pre_hook, replace_forward_of_a_layer, replace_layer, to_double], "auto"),
]
"""One after another, on one model."""


def assert_follows(fast: nn.Module, model: nn.Module) -> None:
    weight = next(model.parameters())
    inputs = [t.to(weight.dtype) for t in decode_inputs()]
    close = {"rtol": 2e-2, "atol": 3e-2} if weight.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
    got, want = fast(*inputs), model(*inputs)
    torch.testing.assert_close(got, want, **close)


def result(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(*(t.to(dtype) for t in decode_inputs()))[0].double()


@pytest.mark.parametrize(
    ("edits", "fold"),
    [
        *TOGETHER,
        *also(
            "combination",
            *(([edit], "always") for edit in (attach_adapter, parametrize_weight, swap_two_heads)),
            *(([edit], "auto") for edit in (add_hook, load_other_weights, replace_layer)),
        ),
    ],
)
def test_an_edit_of_the_model_is_followed(edits: list[Any], fold: str) -> None:
    model = Toy().eval()
    fast = optimize(model, fold=fold, **FAST)
    with torch.no_grad():
        assert_follows(fast, model)
        for edit in edits:
            old = result(model)
            edit(model)
            assert edit in (to_double, to_half) or not torch.allclose(result(model), old, rtol=1e-3, atol=1e-3)
            assert_follows(fast, model)
    assert fast.mla_report.absorbed >= 1


def test_an_edit_through_the_optimized_module_is_one_of_the_model() -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **FAST)
    with torch.no_grad():
        assert_follows(fast, model)
        for edit in (attach_adapter, to_double, add_hook):
            edit(fast)
            assert_follows(fast, model)


def test_a_hook_that_is_removed_is_gone() -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    with torch.no_grad():
        handle = model.up.register_forward_hook(lambda _module, _args, out: 2 * out)
        assert_follows(fast, model)
        handle.remove()
        assert_follows(fast, model)
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "the user's setting was not put back"


@pytest.fixture
def doubled_layers() -> Iterator[None]:
    handle = register_module_forward_hook(lambda module, _args, out: 2 * out if isinstance(module, nn.Linear) else None)
    yield
    handle.remove()


def test_under_a_hook_for_all_modules_the_original_runs_and_says_so(request: pytest.FixtureRequest) -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    with torch.no_grad():
        assert_follows(fast, model)
        request.getfixturevalue("doubled_layers")
        with pytest.warns(MlaCompileWarning, match="global module hook"):
            got = fast(*decode_inputs())
        torch.testing.assert_close(got, model(*decode_inputs()), rtol=0, atol=0)


def test_a_model_moved_to_meta_computes_nothing_and_needs_no_fold() -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **FAST)
    inputs = decode_inputs()
    with torch.no_grad():
        fast(*inputs)
        model.to("meta")
        with pytest.warns(MlaCompileWarning, match="meta device"):
            y, _ = fast(*(t.to("meta") for t in inputs))
    assert y.is_meta
    assert y.shape == inputs[0].shape


def test_weights_frozen_or_not_and_compiled_elsewhere_too() -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    with torch.no_grad():
        assert_follows(fast, model)
        model.requires_grad_(False)
        assert_follows(fast, model)
        model.up.weight.requires_grad_()
        assert_follows(fast, model)
        other = torch.compile(model, backend="eager")
        assert_follows(other, model)
        assert_follows(fast, model)
    buffer = io.BytesIO()
    torch.save(fast.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({name: -value for name, value in torch.load(buffer).items()})
        assert_follows(fast, model)
