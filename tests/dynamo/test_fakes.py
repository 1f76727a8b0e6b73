"""What a trace remembers of an operator is what the operator makes, and only what follows from sizes is remembered."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo import utils as dynamo_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import mla_compile
from mla_compile.core.alike import known_of
from mla_compile.dynamo import entry, fakes
from tests.support import models
from tests.support.tiers import full


class Other(Tensor):
    """A class that may do anything."""


REAL = torch.ones(())


class Layer(nn.Module):
    """Views, splits, writes, copies, constants and choices, each of which reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.up(x).view(*x.shape[:2], 2, 4).transpose(1, 2).split(2, -1)
        q, k = torch.cat([q, k], -1).to(torch.float64).float(), torch.stack((k, k), -1).flatten(-2).contiguous()
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).reshape(x.shape)
        y = y + torch.arange(8, device=x.device).expand(2, 8)[0] * 2 + x.new_ones(8)[None, ::2].repeat(1, 2)
        chosen, places = y.topk(2, -1)
        y = y.masked_fill(y == chosen[..., :1], 0.0).index_fill(1, x.new_zeros(1, dtype=torch.long), 1.0)
        y[:, :1] += F.one_hot(places, 8).sum(-2)[:, :1]
        y.mul_(2).unsqueeze_(0)
        return (
            x + y.squeeze(0) + y.mT.mean() + x.norm(dim=-1, keepdim=True) + torch.einsum("btd,btd->bt", x, x)[..., None]
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose results came from memory; each result is compared with what the operator makes."""
    found: list[str] = []
    run, remember, makers = dynamo_utils.run_node, fakes.remember_results, list[Any]()

    def maker(result: Any, given: Any) -> Any:
        made = maker_of(result, given)
        return made and (lambda tensors: makers.append(made) or made(tensors))

    def remembering(output: Any) -> None:
        remember(output)
        ours = dynamo_utils.run_node

        def both(tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
            before = len(makers)
            result = ours(tracer, node, args, kwargs, module)
            if len(makers) > before:
                found.append(str(node.target))
                given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
                assert facts(result, given) == facts(run(tracer, node, args, kwargs, module), given), node.format_node()
            return result

        dynamo_utils.run_node = both

    maker_of = fakes._maker
    monkeypatch.setattr(fakes, "_maker", maker)
    monkeypatch.setattr(entry, "remember_results", remembering)
    return found


def facts(result: Any, given: list[Tensor]) -> Any:
    """The metadata of the results, and whose memory they are in."""
    memories = [fakes._memory(tensor) for tensor in given]
    leaves = pytree.tree_leaves(result)
    where = [memories.index(fakes._memory(one)) if fakes._memory(one) in memories else None for one in leaves]
    return known_of(tuple(leaves)), where, [one.fake_device for one in leaves]


def optimized(model: nn.Module) -> Any:
    return mla_compile.optimize(model.eval().requires_grad_(False), codegen="eager")


@pytest.mark.filterwarnings("ignore:nothing was absorbed")
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_are_those_of_the_operators(compared: list[str], dynamic: bool):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    fast = optimized(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(compared) > 30
    assert dynamo_utils.run_node.__module__ == "torch._dynamo.utils"


@full("family")
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_results_are_those_of_the_operators_of_whole_models(compared: list[str], family: str):
    model = models.build(family, num_hidden_layers=3)
    inputs = models.prompt()
    want, _ = models.greedy(model, inputs, steps=3)
    got, _ = models.greedy(optimized(model), inputs, steps=3)
    assert torch.equal(got, want)
    assert len(compared) > 200


@pytest.fixture
def x() -> Any:
    with FakeTensorMode(shape_env=ShapeEnv()):
        yield torch.empty(4, 6)


def key(target: Any, *args: Any, **kwargs: Any) -> Any:
    node = fx.Graph().create_node("call_method" if isinstance(target, str) else "call_function", target)
    return fakes._key(node, args, kwargs)[0]


def test_what_is_told_apart(x: Tensor):
    keys = [
        key(torch.add, x, 1), key(torch.add, x, 1.0), key(torch.add, x, True), key(torch.mul, x, 1), key("add", x, 1),
        key(torch.add, x, other=1), key(torch.add, x.T, 1), key(torch.add, x.mT[:, 1:], 1), key(torch.add, x[:, 1:], 1),
        key(torch.add, x.double(), 1), key(torch.add, x.clone().requires_grad_(), 1), key(torch.add, x[:3], 1),
        key(torch.cat, [x, x]), key(torch.cat, (x, x)), key(torch.add, x.to("meta"), 1),
    ]  # fmt: skip
    with torch.no_grad():
        keys.append(key(torch.add, x, 1))
    with torch.inference_mode():
        keys.append(key(torch.add, x, 1))
        made = torch.empty_like(x)
    keys += [key(torch.add, made, 1), key(operator.getitem, x, slice(2)), key(operator.getitem, x, slice(3))]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(torch.add, torch.empty_like(x), 1) == keys[0]


def test_what_is_never_remembered(x: Tensor):
    def own(value: Tensor) -> Tensor:
        return value

    calls = [
        (own, x), (torch.ops.aten.add.Tensor, x, x), (torch.arange, 3), ("add_", x, 1), (torch.relu_, x),
        (torch._C._set_grad_enabled, False), (torch.add, x, torch.tensor(1)), (torch.add, x, REAL),
        (torch.add, x, REAL.as_subclass(Other)), (operator.getitem, x, slice(torch.tensor(2))),
        ("to", x, Other),
    ]  # fmt: skip
    assert [key(*call) for call in calls] == [None] * len(calls)
    with torch.autocast("cpu"):
        assert key(torch.add, x, 1) is None
    with torch.inference_mode():
        made = torch.empty_like(x)
    makers = [
        fakes._maker(x, [x]),  # the argument itself, perhaps written to
        fakes._maker(None, [x]),
        fakes._maker(3, [x]),
        fakes._maker(x[1:], []),  # in memory that nobody else shows
        fakes._maker((y := x + 1, y.T), [x]),
        fakes._maker(x.T, [x, x[1:]]),  # a view of either
        fakes._maker(made.T, [made]),  # a view of a tensor of inference mode outside of it
        fakes._maker(x * x.new_ones((), requires_grad=True), [x]),
    ]
    assert makers == [None] * len(makers)
    assert fakes._maker(operator.add(x, 1), [x]) is not None


def test_where_a_view_begins_is_not_asked():
    """Whether anything is cut off before it would otherwise have a graph of its own."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.empty(7, 6), symbolic_context=None, static_shapes=False)
    with mode:
        view = x[x.shape[0] // 4 * 2 - 2 :]
        before = len(env.guards)
        assert fakes._maker(view, [x]) is not None
        assert fakes._maker(view, []) is None
    assert len(env.guards) == before


def test_the_order_of_named_arguments_makes_no_difference(x: Tensor):
    for named in ({"input": x, "other": x.T}, {"other": x.T, "input": x}):
        node = fx.Graph().create_node("call_function", torch.swapaxes)
        _, (first, second) = fakes._key(node, (), named)
        assert (first.shape, second.shape) == ((4, 6), (6, 4))
