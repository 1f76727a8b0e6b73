"""One schedule per graph: which attentions share one. Fake tensors stand for those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile import ops, pipeline
from mla_compile.capture import capture
from mla_compile.options import Options
from mla_compile.passes.ir.walk import first_equals
from mla_compile.passes.rewrite.schedule import share_schedules
from tests.support.programs import OP
from tests.support.tiers import also
from tests.support.toy import D, L, R, Toy

SCHEDULE = "mla_compile.decode_schedule.default"
B, S, H, T, K = 2, 2, 4, 40, 16
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attend(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """A layer: its mask and its lengths are its own nodes, of the same computation."""
    shown = mask.logical_not().unsqueeze(1).unsqueeze(2)
    return ops.decode_attention(query, rows, None, None, shown, lens.to(torch.int32), scale=0.5, **how)


def step(*layers: Layer) -> Callable[..., Tensor]:
    def run(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> Tensor:
        for layer in layers:
            query = query + layer(query, rows, mask, lens)[0]
        return query

    return run


def inputs(device: str) -> tuple[Tensor, ...]:
    return (
        torch.ones(B, S, H, K, device=device),
        torch.ones(B, T, K, device=device),
        torch.zeros(B, T, dtype=torch.bool, device=device),
        torch.full((B,), 30, device=device),
    )


def shared(*layers: Layer, device: str = "cuda") -> tuple[fx.GraphModule, int]:
    """The rewritten graph of a step on a device, and how many schedules the pass says that it has made."""
    with FakeTensorMode() as mode:
        gm = make_fx(step(*layers))(*inputs(device))
    made = share_schedules(gm.graph, mode)
    gm.graph.lint()
    gm.recompile()
    assert made == len(named(gm.graph, SCHEDULE))
    return gm, made


def named(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [n for n in graph.nodes if str(n.target) == name]


def test_layers_of_one_mask_and_one_length_share_a_schedule():
    gm, made = shared(attend, attend, attend)
    assert made == 1
    (schedule,) = named(gm.graph, SCHEDULE)
    attentions = named(gm.graph, OP)
    assert schedule.next is attentions[0]
    assert schedule.meta["val"].shape == (6 * B * 3,)
    assert [n.kwargs["schedule"] for n in attentions] == [schedule] * 3
    assert {n.args[4:6] for n in attentions} == {(schedule.kwargs["mask"], schedule.kwargs["seq_lens"])}
    assert len([n for n in gm.graph.nodes if n.target is torch.ops.aten.logical_not.default]) == 1
    given = (torch.randn(B, S, H, K), torch.randn(B, T, K), torch.rand(B, T) < 0.3, torch.tensor([25, 40]))
    torch.testing.assert_close(gm(*given), step(attend, attend, attend)(*given))


def other_mask(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows, mask.logical_not(), lens)


def other_length(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows, mask, lens - 1)


def no_length(query: Tensor, rows: Tensor, mask: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return ops.decode_attention(query, rows, None, None, mask.logical_not().unsqueeze(1).unsqueeze(2), scale=0.5)


def fewer_tokens(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows.narrow(1, 0, 20), mask.narrow(1, 0, 20), lens)


def more_heads(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attend(torch.cat([query, query], 2), rows, mask, lens)
    return out.narrow(2, 0, H), lse


def half_precision(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows.half(), mask, lens)


def causal(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows, mask, lens, causal=True)


def window(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, rows, mask, lens, window=9)


OTHERS = [other_mask, other_length, no_length, fewer_tokens, more_heads, half_precision, causal, window]


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_in_what_is_prepared_is_not_shared(other: Layer):
    assert shared(attend, other)[1] == 0
    gm, made = shared(attend, other, other, attend)
    assert made == 2
    used = [n.kwargs["schedule"] for n in named(gm.graph, OP)]
    assert used[0] is used[3]
    assert used[1] is used[2]
    assert used[0] is not used[1]


def test_a_scale_or_sinks_of_a_layers_own_are_no_difference():
    def other(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        shown = mask.logical_not().unsqueeze(1).unsqueeze(2)
        sinks = torch.zeros(H, device=query.device)
        return ops.decode_attention(query, rows, None, None, shown, lens.to(torch.int32), sinks, scale=0.3)

    assert shared(attend, other)[1] == 1


def lengths_alone(query: Tensor, rows: Tensor, _: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return ops.decode_attention(query, rows, seq_lens=lens.to(torch.int32), scale=0.5)


def test_nothing_is_scheduled_where_nothing_would_be_shared():
    assert shared(attend)[1] == 0
    assert shared(attend, attend, device="cpu")[1] == 0
    assert shared(lengths_alone, lengths_alone)[1] == 0

    def scheduled(query: Tensor, rows: Tensor, mask: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        shown = mask.logical_not().unsqueeze(1).unsqueeze(2)
        own = ops.decode_schedule(query, rows, mask=shown, scale=0.5)
        return ops.decode_attention(query, rows, mask=shown, schedule=own, scale=0.5)

    with FakeTensorMode() as mode:
        gm = make_fx(step(scheduled, scheduled))(*inputs("cuda"))
    assert share_schedules(gm.graph, mode) == 0


def test_tokens_may_be_symbolic():
    env = ShapeEnv()
    tokens = env.create_symintnode(env.create_symbol(40, ConstantSource("tokens")), hint=40)

    def layer(query: Tensor, rows: Tensor, mask: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return ops.decode_attention(query, rows, mask=mask.unsqueeze(1).unsqueeze(2), scale=0.5)

    with FakeTensorMode(shape_env=env) as mode:
        query, _, _, lens = inputs("cuda")
        rows = torch.empty(B, tokens, K, device="cuda")
        mask = torch.empty(B, tokens, dtype=torch.bool, device="cuda")
        gm = make_fx(step(layer, layer), tracing_mode="real")(query, rows, mask, lens)
        guards = len(env.guards)
        assert share_schedules(gm.graph, mode) == 1
    (schedule,) = named(gm.graph, SCHEDULE)
    (size,) = schedule.meta["val"].shape
    assert size.node.hint == 6 * B * 3
    assert len(env.guards) == guards


def test_random_numbers_are_not_equal():
    def drawn(x: Tensor) -> Tensor:
        return torch.rand_like(x) + torch.rand_like(x) + x.sin() + x.sin()

    graph = make_fx(drawn)(torch.ones(3)).graph
    first = first_equals(graph)
    randoms = [n for n in graph.nodes if "rand" in n.name]
    sines = [n for n in graph.nodes if "sin" in n.name]
    assert [first[n] for n in randoms] == randoms
    assert [first[n] for n in sines] == [sines[0]] * 2


class Layers(nn.Module):
    """Two layers of one padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Toy(), Toy()])

    def forward(self, x: Tensor, first: Tensor, second: Tensor, shown: Tensor) -> Tensor:
        for layer, rows in zip(self.layers, (first, second), strict=True):
            x = x + layer.attend(x, rows, shown.unsqueeze(1).unsqueeze(1))
        return x


def rewritten(device: str, lowering: str) -> pipeline.Outcome:
    with torch.device("meta"):
        module = Layers().eval()
    with FakeTensorMode(), torch.device(device), torch.no_grad():
        for linear in module.modules():
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(torch.empty(linear.weight.shape), requires_grad=False)
        given = (torch.empty(2, 1, D), *torch.empty(2, 2, 200, L + R).unbind(0), torch.ones(2, 200, dtype=torch.bool))
        exported = torch.export.export(module, given, strict=False)
    options = Options.parse({"forms": "absorbed", "lowering": lowering}, verify=False)
    return pipeline.run(capture.from_exported(exported), options, draw=True)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_a_model_on_a_gpu_gets_one_schedule():
    outcome = rewritten("cuda", "op")
    assert outcome.absorbed == 2
    graph = outcome.program.gm.graph
    (schedule,) = named(graph, SCHEDULE)
    assert [n.kwargs["schedule"] for n in named(graph, OP)] == [schedule] * 2
    assert {record.name: record.changes for record in outcome.report.passes}["schedule"] == 1


@pytest.mark.parametrize(("device", "lowering"), [("cuda", "aten"), *also("combination", ("cpu", "op"))])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_no_schedule_on_a_cpu_and_none_in_plain_aten(device: str, lowering: str):
    outcome = rewritten(device, lowering)
    assert outcome.absorbed == 2
    assert not named(outcome.program.gm.graph, SCHEDULE)


def test_onnx_gets_no_schedule():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from mla_compile.onnx.tidy import without_schedules

    gm, _ = shared(attend, attend)
    assert without_schedules(gm.graph) == 1
    gm.graph.lint()
    assert not named(gm.graph, SCHEDULE)
    assert all(n.kwargs["schedule"] is None for n in named(gm.graph, OP))
