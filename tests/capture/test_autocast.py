"""Captured under autocast, a graph has autocast's casts in it and computes the same without autocast, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.capture.autocast import write_casts
from mla_compile.capture.capture import from_dynamo, from_exported, from_graph_module
from mla_compile.capture.emit import to_exported, to_graph_module, to_plain_graph_module
from mla_compile.errors import CaptureError
from tests.support.tiers import also

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16)

X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
W = torch.randn(7, 7, generator=torch.Generator().manual_seed(1))


def conditional(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x, w: (x.sin() @ w,), lambda x, w: (x.cos() @ w,), (x, w))


def switched_in_a_branch(x: torch.Tensor, w: torch.Tensor) -> Any:
    def branch(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return (x.sin() @ w,)

    return torch.cond(x.sum() > 0, branch, branch, (x, w))


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(5, 7)
    y.copy_(x @ w)
    return y.add_(F.linear(x, w))


@torch.autocast("cpu", torch.float16)
def decorated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def switched(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ w
        with torch.autocast("cpu", enabled=False):
            b = a.float() @ w
            with torch.autocast("cpu", torch.float16):
                c = b @ w
        d = torch.cat([a, b @ w, b])
    return a, b, c, d, decorated(x, w)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cast down": F.linear,
    "an overloaded operator": lambda x, w: x @ w,
    "cast down, already so": lambda x, w: F.linear(F.linear(x, w), w),
    "float64 is left alone": lambda x, w: (F.linear(x.double(), w.double()), F.linear(x.half(), w.half())),
    "made of others that cast": lambda x, w: torch.einsum("bd,cd->bc", x, w),
    "made of others, in two steps": lambda x, w: torch.tensordot(x, w, 1),
    "made of others that do not": lambda x, w: F.cosine_similarity(x[:, None], w[None], -1),
    "attention with a mask": lambda x, w: F.scaled_dot_product_attention(x[None], x[None], x[None], torch.ones(5, 5)),
    "cast to the widest": lambda x, w: (torch.cat([x, F.linear(x, w)]), torch.stack([x, F.linear(x, w)])),
    "cast up": lambda x, w: (torch.cdist(x @ w, x @ w), (x @ w).prod(-1)),
    "norms": lambda x, w: F.layer_norm(F.rms_norm(x @ w, (7,)), (7,), w[0]),
    "views": lambda x, w: (x @ w).reshape(7, 5).unflatten(0, (1, 7)).mT.flatten()[None].softmax(-1),
    "in place": written,
    "switched within": switched,
}


def compiled(function: Callable[..., Any], emitted: list[Any]) -> Callable[..., Any]:
    """``function`` through the capture and out again; the emitted graphs run with autocast off."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        emitted.append(to_graph_module(from_dynamo(gm, inputs)))
        return torch.autocast("cpu", enabled=False)(emitted[-1])

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def assert_equal(got: Any, want: Any) -> None:
    for one, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def all_of_them(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    return [function(x, w) for function in FUNCTIONS.values()]


NAMES = ["all of them", *also("combination", *FUNCTIONS)]
"""All functions in one graph, or each in a graph of its own."""


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_computes_what_autocast_does(name: str) -> None:
    function, emitted = FUNCTIONS.get(name, all_of_them), []
    fast = compiled(function, emitted)
    with torch.no_grad():
        for dtype, enabled in (*((dtype, True) for dtype in DTYPES), (DTYPES[0], False)):
            with torch.autocast("cpu", dtype, enabled=enabled):
                assert_equal(fast(X, W), function(X, W))
    assert len(emitted) == 3  # Dynamo has looked at autocast again each time


def some_of_them(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    """One that casts down, one made of others, one that casts up, one that writes, one that switches."""
    names = ("cast down", "made of others that cast", "cast up", "in place", "switched within")
    return [FUNCTIONS[name](x, w) for name in names]


@pytest.mark.singly
@pytest.mark.parametrize("function", [some_of_them, *also("combination", all_of_them)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("within", [True, False])
def test_programs_and_plain_graphs_too(function: Callable[..., Any], dtype: torch.dtype, within: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype, enabled=within):
                return function(x, w)

    with torch.no_grad():
        exported = torch.export.export(Model(), (X, W))
        with torch.autocast("cpu", dtype, enabled=not within):
            want = Model()(X, W)
            program = to_exported(from_exported(exported))
            graph = to_plain_graph_module(from_graph_module(exported.module(), (X, W)))
            assert_equal(graph(X, W), want)
        assert_equal(program.module()(X, W), want)
        assert_equal(graph(X, W), want)


def test_the_graph_before_and_after() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch._C._nn.linear(x, w)
        return torch.einsum("ij,ij->i", y, w[:5])

    def calls(graph: fx.Graph) -> list[str]:
        return [str(n.target) for n in graph.nodes if n.op == "call_function"]

    with FakeTensorMode() as mode, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        gm = make_fx(function, pre_dispatch=True)(mode.from_tensor(X), mode.from_tensor(W))
        assert calls(gm.graph) == ["aten.linear.default", "aten.slice.Tensor", "aten.einsum.default"]
        assert gm.graph.output_node().args[0].meta["val"].dtype == torch.bfloat16
        write_casts(gm)
    targets = calls(gm.graph)
    assert targets[:4] == ["aten._to_copy.default", "aten._to_copy.default", "aten.linear.default", "aten.slice.Tensor"]
    # einsum is written as the product that autocast acts on, and keeps its name for signatures that know it.
    assert "aten.bmm.default" in targets
    assert "aten.einsum.default" not in targets
    assert gm.graph.output_node().args[0].name == "einsum"
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in (product, *product.all_input_nodes))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (F.linear, torch.bfloat16),
        (lambda x, w: torch.einsum("bd,cd->bc", x, w), torch.bfloat16),
        (lambda x, w: F.softmax(F.linear(x, w), -1), torch.float32),
        (lambda x, w: F.layer_norm(F.linear(x, w), (7,)), torch.float32),
        (lambda x, w: F.rms_norm(F.linear(x, w), (7,)), torch.float32),
        (lambda x, w: F.linear(x, w).sum(-1), torch.float32),
        (lambda x, w: F.linear(x, w).relu(), torch.bfloat16),
    ],
)
def test_the_casts_of_cuda_are_known_without_a_gpu(function: Callable[..., Any], dtype: torch.dtype) -> None:
    with FakeTensorMode() as mode, torch.no_grad():
        inputs = (torch.empty(5, 7, device="cuda"), torch.empty(7, 7, device="cuda"))
        enabled, lower = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") does nothing where there is no GPU
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            gm = make_fx(function, pre_dispatch=True)(*inputs)
            write_casts(gm)
        finally:
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", lower)
        assert gm.graph.output_node().args[0].meta["val"].dtype == dtype
        with mode:
            assert gm(*inputs).dtype == dtype  # without autocast
    (product,) = (n for n in gm.graph.nodes if n.target in (aten.linear.default, aten.einsum.default))
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in product.all_input_nodes)


def test_an_operator_that_registered_its_own_casts() -> None:
    @torch.library.custom_op("mla_compile_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autocast("cpu", torch.bfloat16)
    emitted: list[Any] = []
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert_equal(compiled(doubled, emitted)(X), doubled(X))
    assert doubled(X).dtype == torch.float32


REFUSED = {
    "a graph within the graph": (conditional, "in a nested graph"),
    "a switch in a graph within the graph": (switched_in_a_branch, "switched in a nested graph"),
    "batched tensors": (lambda x, w: torch.vmap(torch.mv, (None, 0))(w, x), "torch.func"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(name: str) -> None:
    function, match = REFUSED[name]
    errors: list[str] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with pytest.raises(CaptureError, match=match) as caught:
            from_dynamo(gm, inputs)
        errors.append(str(caught.value))
        return gm

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=function is not switched_in_a_branch):
        torch.compile(function, backend=backend)(X, W)
    assert len(errors) == 1
    assert "autocast" in errors[0]


def test_a_graph_that_cannot_be_traced_leaves_autocast_as_it_was() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    entered = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.float16, True, None))
    y = graph.call_method("reshape", (x, 3))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
    graph.output(y)
    with pytest.raises(CaptureError, match="shape"):
        from_graph_module(fx.GraphModule(nn.Module(), graph), (X,))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.is_autocast_cache_enabled()


def test_a_plain_graph_that_rejects_its_inputs_leaves_autocast_as_it_was() -> None:
    gm = fx.symbolic_trace(lambda x, w: x @ w)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = to_plain_graph_module(from_graph_module(gm, (X, W)))
        assert_equal(graph(X, W), X @ W)
        with pytest.raises(RuntimeError):
            graph(X[:2], W)
        assert torch.is_autocast_enabled("cpu")
