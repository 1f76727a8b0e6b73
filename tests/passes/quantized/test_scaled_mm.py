"""Float8 products that have kernels on a GPU alone: traced for one, and their stand-ins computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.ir.stand_in import stand_in
from mla_compile.passes.quantized.read import add_stand_ins

pytestmark = pytest.mark.thorough

FP8 = torch.float8_e4m3fn
M, K, N = 16, 256, 384


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Rows [M, K] times a weight stored as float8 [N, K], with scales [N/128, K/128] or [N, K/128]."""
    groups = x.float().unflatten(-1, (-1, 128))
    own = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    rows = (groups / own).to(FP8).flatten(-2)
    # The kernel wants the rows' scales column by column.
    own = own.squeeze(-1).t().clone(memory_format=torch.contiguous_format).t()
    return torch._scaled_mm(rows, weight.t(), own, scales.t(), out_dtype=torch.bfloat16)


def by_lists(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The second version of the operator, with a scale for each row, which is recipe 1."""
    own = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    rows = (x.float() / own).to(FP8)
    return torch.ops.aten._scaled_mm_v2(rows, weight.t(), [own], [1], [0], [scales.t()], [1], [0], None, torch.bfloat16)


def traced(
    size: tuple[int, int], product: Callable[..., Tensor] = product
) -> tuple[fx.Graph, list[fx.Node], FakeTensorMode]:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(N, K, dtype=FP8, device="cuda")
        scales = torch.empty(N // size[0], K // size[1], device="cuda")
        graph = make_fx(product)(x, weight, scales).graph
    weights = graph.find_nodes(op="placeholder")[1:]
    for node in graph.nodes:
        if node.all_input_nodes and set(node.all_input_nodes) <= set(weights):
            weights.append(node)
    return graph, weights, mode


@pytest.mark.parametrize(("size", "product"), [((128, 128), product), ((1, 128), product), ((1, K), by_lists)])
def test_scales(size, product):
    if product is by_lists and not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        pytest.skip("this torch has one version of the operator")
    graph, weights, mode = traced(size, product)
    assert add_stand_ins(graph, weights, mode, exact=False) == 1
    (plain,) = graph.find_nodes(op="call_function", target=stand_in)
    torch.manual_seed(0)
    x = torch.randn(M, K, dtype=torch.bfloat16) * 10 ** torch.randn(M, 1)
    weight, scales = torch.randn(N, K).to(FP8), torch.rand(N // size[0], K // size[1]) + 0.5
    values = dict(zip(graph.find_nodes(op="placeholder"), (x, weight, scales), strict=True))
    for node in graph.nodes:  # what the stand-in is computed from: the product itself is none of it
        if (
            node.op == "call_function"
            and all(n in values for n in node.all_input_nodes)
            and "scaled_mm" not in str(node.target)
        ):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
    dense = weight.double() * scales.double().repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    truth = x.double() @ dense.T
    error = (values[plain].double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max() < 2**-8  # the product returns bfloat16


def test_blocks_of_another_size_are_left():
    graph, weights, mode = traced((128, 128))
    (call,) = (n for n in graph.nodes if "scaled_mm" in n.name)
    call.update_arg(2, graph.find_nodes(op="placeholder")[2])  # the scales of the weight for those of the rows
    assert add_stand_ins(graph, weights, mode, exact=False) == 0
