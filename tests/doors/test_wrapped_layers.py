"""Wrappers around forwards that Dynamo does not follow: taken off, called as one operator, or named."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mla_compile import MlaCompileWarning, backend, explain, optimize, register_quantized_linear
from mla_compile.passes.quantized.registry import registered
from tests.support.tiers import also

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}
B, H, L, N, V, T = 2, 3, 16, 12, 10, 9


class Small(nn.Module):
    """The smallest attention with a latent, and layers before and behind it."""

    def __init__(self, linear: Callable[..., nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.down = linear(L, L, bias=False)
        self.k, self.v = linear(L, H * N, bias=False), linear(L, H * V, bias=False)
        self.out = linear(H * V, L)

    def forward(self, q: Tensor, x: Tensor) -> Tensor:
        c = F.rms_norm(self.down(x), (L,))
        k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.k(c), self.v(c)))
        done: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return done


GIVEN = torch.randn(B, H, 1, N), torch.randn(B, T, L)


def codes(model: Any) -> list[str]:
    return [str(site.code) for site in model.mla_report.sites]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def test_hooks_of_accelerate_that_move_nothing_are_taken_off() -> None:
    model = Small().eval()
    want = model(*GIVEN)
    model = pytest.importorskip("accelerate").dispatch_model(model, {"": "cpu"}, force_hooks=True)
    report = explain(model, *GIVEN)
    fast = optimize(model, **FAST)
    for one in (fast, copy.deepcopy(fast), optimize(fast, **FAST)):
        torch.testing.assert_close(one(*GIVEN), want)
        assert codes(one) == [str(s.code) for s in report.sites] == ["absorbed"]
    assert hasattr(model.k, "_hf_hook")
    assert "_hf_hook" not in vars(fast.k)
    assert fast.k.weight is model.k.weight


def test_hooks_of_accelerate_that_load_weights_are_named() -> None:
    model = Small().eval()
    want = model(*GIVEN)
    model = pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
    fast = optimize(model, **FAST)
    with pytest.warns(MlaCompileWarning, match="wrapped_forward.*accelerate .*remove_hook_from_module"):
        torch.testing.assert_close(fast(*GIVEN), want)
    assert set(codes(fast)) == {"wrapped_forward"}
    assert "accelerate loads weights before each call" in str(fast.mla_report.sites[0].reason)


def disabled(layer: nn.Linear) -> None:
    layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]


def not_followed(layer: nn.Linear) -> None:
    """As compressed-tensors writes it: other data for the time of a call."""

    @functools.wraps(type(layer).forward)
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        weight, data = self.weight, self.weight.data
        weight.data = data * 1
        try:
            return type(self).forward(self, x)
        finally:
            weight.data = data

    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


@pytest.mark.parametrize("wrap", [disabled, not_followed])
def test_a_layer_that_is_not_followed_is_one_operator(wrap: Callable[[nn.Linear], None]) -> None:
    model = Small().eval()
    want = model(*GIVEN)
    wrap(model.down)
    wrap(model.out)
    fast = optimize(model, **FAST)
    for one in (fast, copy.deepcopy(fast)):
        torch.testing.assert_close(one(*GIVEN), want)
        assert codes(one) == ["absorbed"]
    model.out.weight.mul_(2)
    torch.testing.assert_close(fast(*GIVEN), model(*GIVEN))
    assert not torch.equal(fast(*GIVEN), want)


def test_hooks_of_such_a_layer_run_as_often_as_before() -> None:
    model, count = Small().eval(), torch.zeros(1)
    disabled(model.out)
    model.out.register_forward_hook(lambda _module, _args, y: count.add_(1) + y - count)
    fast = optimize(model, **FAST)
    for _ in range(3):
        torch.testing.assert_close(fast(*GIVEN), model(*GIVEN))
    assert count == 6


class Doubled(nn.Linear):
    """A weight in a format of its own: half of it is stored, and no compiler may look into the forward."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias)


def test_a_class_of_layers_is_absorbed_once_it_is_registered() -> None:
    model = Small(Doubled).eval()
    want = model(*GIVEN)
    fast = optimize(model, **FAST)
    with pytest.warns(MlaCompileWarning, match="nothing was absorbed"):
        torch.testing.assert_close(fast(*GIVEN), want)
    assert codes(fast) == ["unknown_product"]
    register_quantized_linear(Doubled, lambda layer: (2 * layer.weight, layer.bias))
    try:
        fast = optimize(model, **{**FAST, "verify": True})
        torch.testing.assert_close(fast(*GIVEN), want)
        assert codes(fast) == ["absorbed"]
    finally:
        del registered.layers[Doubled]


class Halves(Tensor):
    """Half of each number is stored, in a class of a library's own, which reads numbers that no trace has."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)
        made.stored = stored
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Halves:
        return Halves(inner["stored"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Halves(func(args[0].stored))
        args = tree_map_only(Halves, lambda t: torch.from_numpy(2 * t.stored.numpy()), args)
        return func(*args, **(kwargs or {}))


class Held(nn.Linear):
    """A layer with such a weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = nn.Parameter(Halves(self.weight.detach() / 2), requires_grad=False)


def test_weights_of_a_class_that_is_not_followed_are_one_operator() -> None:
    model = Small(Held).eval()
    want = model(*GIVEN)
    fast = optimize(model, **FAST)
    with pytest.warns(MlaCompileWarning, match="nothing was absorbed"):
        torch.testing.assert_close(fast(*GIVEN), want)
    assert codes(fast) == ["unknown_product"]
    register_quantized_linear(Held, lambda layer: (2 * layer.weight.stored, layer.bias))
    try:
        fast = optimize(model, **{**FAST, "verify": True})
        for one in (fast, copy.deepcopy(fast)):
            torch.testing.assert_close(one(*GIVEN), want)
            assert codes(one) == ["absorbed"]
        model.k.weight = nn.Parameter(Halves(model.k.weight.stored * 3), requires_grad=False)
        torch.testing.assert_close(fast(*GIVEN), model(*GIVEN))
        assert not torch.allclose(fast(*GIVEN), want)
    finally:
        del registered.layers[Held]


class Packed(nn.Linear):
    """The first call lays out the weight anew, as bitsandbytes does for the CPU on which it runs."""

    is_packed = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_packed:
            self.weight.data = self.weight.data.T.contiguous()
            self.is_packed = True
        return F.linear(input, self.weight.T, self.bias)


@pytest.mark.parametrize("codegen", ["eager", *also("inductor", "inductor")])
@pytest.mark.parametrize("door", ["optimize", "backend"])
def test_a_call_that_finishes_the_weights_runs_as_it_came(door: str, codegen: str) -> None:
    model = Small(Packed).eval()
    want = copy.deepcopy(model)(*GIVEN)
    report = explain(model, *GIVEN)
    assert [str(site.code) for site in report.sites] == ["absorbed"]
    assert not model.k.is_packed
    options = {**FAST, "codegen": codegen, "strict": True}
    fast = optimize(model, **options) if door == "optimize" else torch.compile(model, backend="mla", options=options)
    before = backend.reports()
    for _ in range(2):
        torch.testing.assert_close(fast(*GIVEN), want)
    new = [r for r in backend.reports() if not any(r is old for old in before)]
    sites = fast.mla_report.sites if door == "optimize" else [site for r in new for site in r.sites]
    assert [str(site.code) for site in sites] == ["absorbed"]
    torch.testing.assert_close(model(*GIVEN), want)


def test_a_hook_may_wrap_the_forward_of_the_model_itself() -> None:
    """compressed-tensors does so with each module that has parameters of its own."""
    model = Small().eval()
    want = model(*GIVEN)

    def wrap(module: Any, _: object) -> None:
        handle.remove()
        inner = module.forward.__func__
        module.forward = types.MethodType(inner, module)

    handle = model.register_forward_pre_hook(wrap)
    fast = optimize(model, **FAST)
    for _ in range(2):
        torch.testing.assert_close(fast(*GIVEN), want)
        assert codes(fast) == ["absorbed"]


def test_a_hook_that_removes_itself_is_gone_from_both() -> None:
    model, seen = Small().eval(), list[type]()
    handle = model.register_forward_pre_hook(lambda module, _: (seen.append(type(module)), handle.remove())[1])
    fast = optimize(model, **FAST)
    for one in (fast, fast, model):
        one(*GIVEN)
    assert seen == [Small]
    handle = model.register_forward_pre_hook(lambda module, _: (seen.append(type(module)), handle.remove())[1])
    fast = optimize(model, **FAST)
    for one in (model, fast):
        one(*GIVEN)
    assert seen == [Small, Small]


def test_a_weight_that_its_library_rounds_in_each_call_is_rounded_by_it() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = Small().eval()
    weights = quantization.QuantizationArgs(num_bits=4, type="int", strategy="channel", symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, quantization_status="frozen")
    quantization.apply_quantization_config(model, config)
    for layer in (model.down, model.k, model.v, model.out):
        layer.weight_scale.data.copy_(layer.weight.abs().amax(-1, keepdim=True) / 7.5)
    want = model(*GIVEN)
    fast = optimize(model, **{**FAST, "verify": True})
    torch.testing.assert_close(fast(*GIVEN), want)
    assert codes(fast) == ["absorbed"]
    model.k.weight_scale.mul_(2)
    torch.testing.assert_close(fast(*GIVEN), model(*GIVEN))
    assert not torch.allclose(fast(*GIVEN), want)
