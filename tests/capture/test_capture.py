from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.utils import _pytree as pytree

from mla_compile import optimize
from mla_compile.capture.capture import from_dynamo, from_exported, from_graph_module
from mla_compile.capture.emit import to_exported, to_graph_module, to_plain_graph_module
from mla_compile.core.program import Program
from mla_compile.errors import CaptureError, InputError
from tests.support.models import build, greedy, prompt
from tests.support.tiers import also, full
from tests.support.toy import Buffered, Toy, decode_inputs

aten = torch.ops.aten
# torch's own copy of an exported program's tree specs
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


class RoundTrip:
    """A backend that captures, emits and runs (or compiles) without changing anything."""

    def __init__(self, inductor: bool = False) -> None:
        self.inductor = inductor
        self.programs: list[Program] = []
        self.emitted: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        program = from_dynamo(gm, inputs)
        assert len(program.placeholders) == len(inputs)
        for node in program.gm.graph.nodes:
            assert "val" in node.meta or node.op == "output" or "_assert" in str(node.target), node
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable, node
        self.programs.append(program)
        self.emitted.append(to_graph_module(program))
        return compile_fx(self.emitted[-1], list(inputs)) if self.inductor else self.emitted[-1]


def run(function: Any, *inputs: Any, inductor: bool = False, **settings: Any) -> tuple[Any, RoundTrip]:
    backend = RoundTrip(inductor)
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True, **settings)(*inputs), backend


def test_weights_are_parameters_and_unwritten_buffers_whatever_they_are_called() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("cache", torch.zeros(3, 4))
            self.plain = torch.ones(4)  # may be a cache that is assigned anew: not a weight

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.cache.add_(1)
            return self.x(weight) * self.scale + self.cache + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])

    model = Model()
    result, backend = run(model, torch.ones(3, 4))
    with torch.no_grad():
        assert torch.equal(result, model.x(torch.ones(3, 4)) * 2 + 2 + torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (program,) = backend.programs
    tensors = [value for value in program.weights.values() if value is not None]
    assert any(value is model.x.weight for value in tensors)
    assert any(value is model.x.bias for value in tensors)
    assert any(value is model.scale for value in tensors)
    assert not any(value is model.cache or value is model.plain for value in tensors)
    assert len(tensors) == 4  # and the constant
    assert len(program.mutations) == 1
    assert torch.equal(model.cache, torch.ones(3, 4))


@pytest.mark.parametrize("inductor", [False, *also("inductor", True)])
def test_what_dynamo_knows_of_its_inputs_is_kept(inductor: bool) -> None:
    captured: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        emitted = to_graph_module(from_dynamo(gm, inputs))
        captured.extend([gm, emitted])
        for ours, theirs in zip(
            emitted.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True
        ):
            assert ours._dynamo_source == theirs._dynamo_source
            assert ours.meta["grapharg"] is theirs.meta["grapharg"]
            assert ours.meta["example_value"] is theirs.meta["example_value"]
            assert ours.meta.get("tensor_dict") == theirs.meta.get("tensor_dict")
        assert emitted.meta["dynamo_compile_id"] == gm.meta["dynamo_compile_id"]
        return compile_fx(emitted, inputs) if inductor else emitted

    model = Toy().eval()
    x, rows = decode_inputs()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x, rows)
        want = model(x, rows)
    assert captured
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("inductor", [False, *also("inductor", True)])
def test_a_returned_view_of_a_written_input_stays_a_view_of_it(inductor: bool) -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = cache.clone()
        cache[1].add_(x)
        row = cache[1]
        row.mul_(2)
        return cache.t(), row, cache[0], old, x + 1

    cache = torch.zeros(3, 4)
    transposed, row, other, old, fresh = run(step, cache, torch.ones(4), inductor=inductor)[0]
    assert torch.equal(cache[1], torch.full((4,), 2.0))
    assert torch.equal(old, torch.zeros(3, 4))
    assert torch.equal(fresh, torch.full((4,), 2.0))
    cache.fill_(7)
    for view in (transposed, row, other):
        assert bool((view == 7).all())
    assert torch.equal(old, torch.zeros(3, 4))


def test_a_value_copied_into_an_input_is_not_the_input() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        cache.copy_(y)
        return y

    cache = torch.zeros(4)
    y, backend = run(step, cache, torch.ones(4))
    assert backend.programs[0].aliases == {}
    cache.fill_(7)
    assert torch.equal(y, torch.full((4,), 2.0))


def test_an_old_value_is_kept_when_a_pass_has_removed_its_copy() -> None:
    def step(cache: torch.Tensor) -> torch.Tensor:
        old = cache.clone()
        cache.add_(1)
        return old

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        program = from_dynamo(gm, inputs)
        for node in program.gm.graph.find_nodes(op="call_function", target=aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            program.gm.graph.erase_node(node)
        return to_graph_module(program)

    cache = torch.zeros(4)
    with torch.no_grad():
        old = torch.compile(step, backend=backend)(cache)
    assert torch.equal(old, torch.zeros(4))
    assert torch.equal(cache, torch.ones(4))


def test_symbolic_sizes_stay_symbolic_and_need_no_further_graph() -> None:
    model = Toy().eval()
    backend = RoundTrip()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch, cached in ((2, 9), (3, 17), (5, 40)):
            x, rows = decode_inputs(batch, cached)
            torch.testing.assert_close(compiled(x, rows), model(x, rows))
    assert len(backend.programs) == 1
    (program,) = backend.programs
    sizes = [n.meta["val"] for n in program.placeholders if isinstance(n.meta["val"], torch.SymInt)]
    assert len(sizes) >= 2


def test_capture_does_not_touch_the_graph_it_is_given_and_a_copy_does_not_touch_the_program() -> None:
    seen: list[tuple[str, str]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        before = gm.code
        program = from_dynamo(gm, inputs)
        text = str(program.gm.graph)
        copied = program.copy()
        assert [n.name for n in copied.gm.graph.nodes] == [n.name for n in program.gm.graph.nodes]
        for node in list(copied.gm.graph.nodes):
            node.meta.clear()
            if node.op == "call_function":
                node.target = aten.relu.default
        copied.weights.clear()
        assert str(program.gm.graph) == text
        assert program.weights
        assert all("val" in n.meta for n in program.placeholders)
        seen.append((before, gm.code))
        return gm

    with torch.no_grad():
        torch.compile(Toy().eval(), backend=backend)(*decode_inputs())
    ((before, after),) = seen
    assert before == after


def test_where_a_node_came_from_is_kept() -> None:
    backend = RoundTrip()
    with torch.no_grad():
        torch.compile(Toy().eval(), backend=backend)(*decode_inputs())
    (core,) = backend.programs[0].gm.graph.find_nodes(
        op="call_function", target=aten.scaled_dot_product_attention.default
    )
    assert "scaled_dot_product_attention" in core.meta["stack_trace"]
    assert "toy.py" in core.meta["stack_trace"]


def test_a_static_cache_is_written_in_place_without_a_copy_of_it() -> None:
    rows, width, capacity = 4, 256, 1024
    step_bytes: list[int] = []

    def step(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, new)
        return cache.sum(-1)

    cache, new = torch.zeros(rows, capacity, width), torch.ones(rows, 1, width)
    backend = RoundTrip(inductor=True)
    compiled = torch.compile(step, backend=backend)
    address = cache.data_ptr()
    with torch.no_grad():
        compiled(cache, torch.tensor([3]), new)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            compiled(cache, torch.tensor([5]), new)
    step_bytes = [event.cpu_memory_usage for event in profile.key_averages() if event.cpu_memory_usage > 0]
    assert sum(step_bytes) < cache.numel() * 4 / 4
    assert cache.data_ptr() == address
    assert cache.sum().item() == 2 * rows * width
    (emitted,) = backend.emitted
    last = next(n for n in reversed(emitted.graph.nodes) if n.op == "call_function" and n.target is aten.copy_.default)
    assert last.args[0].op == "placeholder"


@full("family")
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_transformers_model_survives_the_round_trip(cache: str) -> None:
    model, inputs = build("minicpm3"), prompt()
    want, logits = greedy(model, inputs, steps=4, cache=cache)
    backend = RoundTrip()
    model.forward = torch.compile(model.forward, backend=backend)
    got, again = greedy(model, inputs, steps=4, cache=cache)
    assert backend.programs
    assert torch.equal(got, want)
    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    assert any(program.mutations for program in backend.programs) == (cache == "static")


def test_an_exported_program_comes_back_with_its_signature() -> None:
    model = Buffered().eval()
    x, _ = decode_inputs()
    position = torch.tensor([3])
    exported = torch.export.export(model, (x, position))
    program = from_exported(exported)
    assert program.mutations == ("b_rows",)
    assert sum(value is not None for value in program.weights.values()) == 4
    back = to_exported(program)
    assert [s.kind for s in back.graph_signature.input_specs] == [
        s.kind for s in program.capture.original.graph_signature.input_specs
    ]
    assert back.module_call_graph[0].signature == exported.module_call_graph[0].signature
    assert back.state_dict.keys() == exported.state_dict.keys()
    with torch.no_grad():
        want = model(x, position)
        got = back.module()(x, position)
    torch.testing.assert_close(got["y"], want["y"])
    assert got["none"] is None


def test_inputs_with_names_of_builtins() -> None:
    """A copied graph calls them otherwise, whoever calls the program does not."""

    class Writes(torch.nn.Module):
        def forward(self, input: torch.Tensor, id: torch.Tensor) -> torch.Tensor:
            input.add_(id)
            return input * 2

    exported = torch.export.export(Writes(), (torch.ones(3), torch.ones(3)))
    again = to_exported(from_exported(exported)).module()
    given = torch.ones(3)
    assert torch.equal(again(given, torch.ones(3)), torch.full((3,), 4.0))
    assert torch.equal(given, torch.full((3,), 2.0))


class Cache:
    """Rows that are appended to what is there, even when a cache is put together again from its tensors."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = torch.cat([torch.tensor([]), rows], dim=-2)


def test_an_exported_program_that_takes_a_cache_object() -> None:
    """As transformers exports a decode step: building a DynamicCache leaves constants in the graph (torch 2.13)."""

    class Cached(Toy):
        def forward(self, x: Any, cache: Any, scale: float) -> Any:
            y, rows = super().forward(x, cache.rows)
            return {"y": y * scale, "cache": Cache(rows)}

    pytree.register_pytree_node(
        Cache,
        lambda cache: ([cache.rows], None),
        lambda leaves, _: Cache(*leaves),
        flatten_with_keys_fn=lambda cache: ([(pytree.GetAttrKey("rows"), cache.rows)], None),
    )
    try:
        model = Cached().eval()
        x, rows = decode_inputs()
        growing = torch.export.Dim("growing", min=2, max=64)
        exported = torch.export.export(
            model, (x, Cache(rows)), {"scale": 2.0}, dynamic_shapes=(None, [{1: growing}], None), strict=False
        )
        text = str(exported)
        back = optimize(exported)
        assert str(exported) == text
        report = back.graph_module.meta["mla_report"]
        assert report.absorbed == 1, report
        assert back.call_spec == exported.call_spec
        assert back.example_inputs is exported.example_inputs
        assert [s.arg.name for s in back.graph_signature.input_specs][-3:] == ["x", "cache_rows", "scale"]
        with torch.no_grad():
            for length in (19, 33):
                x, rows = decode_inputs(cached=length)
                got, want = back.module()(x, Cache(rows), scale=2.0), model(x, Cache(rows), 2.0)
                torch.testing.assert_close(got["y"], want["y"])
                torch.testing.assert_close(got["cache"].rows, want["cache"].rows)
    finally:
        pytree._deregister_pytree_node(Cache)


def test_an_exported_program_keeps_its_symbolic_sizes() -> None:
    model = Toy().eval()
    cached = torch.export.Dim("cached", min=2, max=64)
    exported = torch.export.export(model, decode_inputs(), dynamic_shapes={"x": None, "rows": {1: cached}})
    back = to_exported(from_exported(exported))
    assert back.range_constraints == exported.run_decompositions({}).range_constraints
    x, rows = decode_inputs(cached=33)
    with torch.no_grad():
        torch.testing.assert_close(back.module()(x, rows), model(x, rows))


def test_a_graph_module_comes_back_with_its_structure_its_state_and_its_writes() -> None:
    model = Buffered().eval()
    x, _ = decode_inputs()
    position = torch.tensor([3])
    gm = torch.export.export(model, (x, position)).module()
    back = to_plain_graph_module(from_graph_module(gm))
    assert back.state_dict().keys() == gm.state_dict().keys()
    assert back.up.weight is gm.up.weight
    with torch.no_grad():
        got = back(x, position)
        assert torch.equal(back.rows[:, 3], model.down(x)[:, 0])
        want = model(x, position)
    assert got.keys() == want.keys()
    torch.testing.assert_close(got["y"], want["y"])
    with pytest.raises((RuntimeError, AssertionError)):
        back(x[:1], position)


def test_a_symbolic_trace_is_captured_for_its_example_inputs_and_refuses_other_shapes() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"out": [self.b(self.a(x)).softmax(-1), x], "n": None}

    model = Tied().eval()
    gm = torch.fx.symbolic_trace(model)
    with pytest.raises(InputError, match="example_inputs"):
        from_graph_module(gm)
    with pytest.raises(InputError, match="1 inputs"):
        from_graph_module(gm, (torch.ones(2, 4), torch.ones(1)))
    back = to_plain_graph_module(from_graph_module(gm, (torch.ones(2, 4),)))
    with torch.no_grad():
        got, want = back(torch.ones(2, 4)), model(torch.ones(2, 4))
    torch.testing.assert_close(got["out"][0], want["out"][0])
    assert got["n"] is None
    with pytest.raises(RuntimeError):
        back(torch.ones(3, 4))


def test_what_cannot_be_traced_is_a_capture_error_with_the_reason() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.reshape(7))
    with pytest.raises(CaptureError, match="shape"):
        from_graph_module(gm, (torch.ones(4),))
