"""Autocast around a call or within the model: absorbed, with the original's dtypes and no more error than it has."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import DynamicCache, StaticCache

from mla_compile import explain, optimize
from mla_compile.runtime.latent import LatentTensor
from tests.support.models import build, prompt
from tests.support.tiers import also, full
from tests.support.toy import H, L, N, R, Toy, V, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten"}
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Within(Toy):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, rows)


class Decorated(Toy):
    @torch.autocast("cpu", torch.float16)
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        return super().forward(x, rows)


class Nested(Toy):
    """The attention in float16 within bfloat16."""

    def attend(self, x: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().attend(x, rows, mask)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, rows)


class SwitchedOff(Toy):
    """Autocast is off in the attention, whatever is around it."""

    def attend(self, x: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().attend(x, rows, mask)


class KeepsHeads(Toy):
    """The same attention with a cache of K and V per head."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, ...]:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, H, N + R).transpose(1, 2)
        latent, rope = self.down(x).split([L, R], dim=-1)
        k, v = self.up(latent).view(B, S, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(B, S, H * V)), k, v


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    assert got.shape == truth.shape
    return float((got.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())


def assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def assert_like(got: Any, want: Any, truth: Any, ratio: float = 1.25) -> list[float]:
    """Same dtypes; errors against float64 at most ``ratio`` times the original's. Returns how many times."""
    ratios = []
    for g, w, t in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), pytree.tree_leaves(truth), strict=True):
        assert g.dtype == w.dtype
        ratios.append(error(g, t) / max(error(w, t), 1e-6))
    assert max(ratios) <= ratio, ratios
    return ratios


CASES = {
    "bfloat16 around": (Toy, torch.bfloat16),
    "float16 around": (Toy, torch.float16),
    "within": (Within, None),
    "a decorator": (Decorated, None),
    "nested": (Nested, None),
    "another one around": (Decorated, torch.bfloat16),
    "off within": (SwitchedOff, torch.bfloat16),
}


def tried(*names: str) -> list[Any]:
    """These by default, and the other cases in the full tier."""
    return [*names, *also("combination", *(name for name in CASES if name not in names))]


# Each number of queries once: the form is all that five could change. A test below has each dtype around the model.
@pytest.mark.singly
@pytest.mark.parametrize("name", tried("nested", "another one around", "off within"))
@pytest.mark.parametrize("queries", [1, 5])
def test_absorbed_with_no_more_error(name: str, queries: int) -> None:
    kind, dtype = CASES[name]
    ratios = []
    model = kind().eval()
    fast = optimize(model, forms="absorbed", **FAST)
    for seed in range(5):
        exact = Toy(seed).double()
        model.load_state_dict(exact.state_dict())
        x, rows = decode_inputs(queries=queries, seed=seed)
        with torch.no_grad(), autocast(dtype):
            ratios.append(assert_like(fast(x, rows), model(x, rows), exact(x.double(), rows.double()))[0])
    assert fast.mla_report.absorbed == fast.forward.compiler.graphs == 1
    assert statistics.median(ratios) <= 1.01


@pytest.mark.parametrize("name", tried("off within"))
def test_through_the_backend(name: str) -> None:
    kind, dtype = CASES[name]
    model, exact = kind().eval(), Toy().double()
    torch._dynamo.reset()
    fast = torch.compile(model, backend="mla", options=FAST)
    x, rows = decode_inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # it would say so, if nothing were absorbed
        for state in (dtype, None):
            with autocast(state):
                assert_like(fast(x, rows), model(x, rows), exact(x.double(), rows.double()))


def test_the_rewritten_graph_is_not_cast_a_second_time() -> None:
    model = Toy().eval()
    inputs = decode_inputs(queries=6)
    options = {**FAST, "forms": "absorbed", "appends": "copy"}
    fast = optimize(model, **options)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = fast(*inputs)
        graph = optimize(torch.export.export(model, inputs).module(), inputs, **options)
        assert_equal(graph(*inputs), got)
    # The products with W_kc and W_v are float32 on purpose: under autocast they would be others than here.
    assert_equal(graph(*inputs), got)
    for node in [n for n in graph.graph.nodes if n.target in (torch.amp._enter_autocast, torch.amp._exit_autocast)][
        ::-1
    ]:
        graph.graph.erase_node(node)
    graph.recompile()
    assert_equal(graph(*inputs), got)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError):
        assert_equal(graph(*inputs), got)


def test_each_state_of_autocast_is_compiled_once() -> None:
    model = Toy().eval()
    fast = optimize(model, **FAST)
    exact = Toy().double()
    x, rows = decode_inputs()
    truth = exact(x.double(), rows.double())
    states: list[torch.dtype | None] = [None, torch.bfloat16, torch.float16, None, torch.bfloat16, torch.float16]
    with torch.no_grad():
        for dtype in states:
            with autocast(dtype):
                assert_like(fast(x, rows), model(x, rows), truth)
        with torch.autocast("cpu", enabled=False):
            assert_like(fast(x, rows), model(x, rows), truth)
    assert fast.forward.compiler.graphs == 3
    assert fast.mla_report.absorbed == 3


@pytest.mark.parametrize(
    ("cache", "states"),
    [
        ("latent", "010"),
        ("latent", "10"),
        # A cache that stays what the model made, which no state is written down for.
        *also("combination", ("expanded", "10"), ("expanded", "00111")),
        # Longer, behind more of one state.
        *also("combination", *(("latent", states) for states in ("101", "11000", "00111", "01010"))),
    ],
)
def test_a_cache_of_heads_may_be_filled_under_autocast_and_read_without_and_the_other_way_round(
    cache: str, states: str
) -> None:
    model = KeepsHeads().eval()
    exact = copy.deepcopy(model).double()
    fast = optimize(model, cache=cache, **FAST)
    held: dict[Any, Any] = dict.fromkeys((model, fast, exact), ())
    found: set[type] = set()
    for step, on in enumerate(states):
        x, _ = decode_inputs(queries=9 if step == 0 else 1, seed=step)
        made = {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cache that another graph filled is expanded, and it is said so
            for one in (model, fast, exact):
                with autocast(torch.bfloat16 if on == "1" and one is not exact else None):
                    made[one], *held[one] = one(x.to(next(one.parameters()).dtype), tuple(held[one]))
        assert made[fast].dtype == made[model].dtype
        assert error(made[fast], made[exact]) <= 1.25 * error(made[model], made[exact]) + 1e-6
        for ours, theirs in zip(held[fast], held[model], strict=True):
            assert ours.dtype == theirs.dtype
            found.add(type(ours))
            with autocast(torch.bfloat16 if on == "0" else None):  # whoever reads it now
                shown = ours.expanded() if isinstance(ours, LatentTensor) else ours
            assert shown.dtype == ours.dtype
            assert error(shown, theirs.double()) <= 2 * HALF[torch.bfloat16]
    assert (LatentTensor in found) == (cache == "latent")


@full("family")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kept", [DynamicCache, StaticCache])
def test_a_model_of_transformers(kept: Callable[..., Any], dtype: torch.dtype) -> None:
    one_layer = {"num_hidden_layers": 1}
    model = build("minicpm3", **one_layer)
    exact, fast = build("minicpm3", dtype=torch.float64, **one_layer), optimize(model, **FAST)
    made: dict[Any, list[torch.Tensor]] = {}
    caches = {}
    for one in (model, fast, exact):
        given = {"config": model.config, "max_cache_len": 32} if kept is StaticCache else {}
        caches[one] = cache = kept(**given)
        made[one] = []
        with torch.no_grad(), autocast(None if one is exact else dtype):
            ids = prompt()["input_ids"]
            for token in (3, 17, 101):
                made[one].append(one(ids, past_key_values=cache, use_cache=True).logits)
                ids = torch.full((2, 1), token)
    for got, want, truth in zip(made[fast], made[model], made[exact], strict=True):
        assert_like(got, want, truth, 1.5)  # of one product's rounding, the next makes more or less
    assert [layer.keys.dtype for layer in caches[fast].layers] == [layer.keys.dtype for layer in caches[model].layers]
    assert fast.mla_report.absorbed >= 1


@full("combination")  # under autocast, a graph of symbolic sizes that has both forms
def test_a_number_of_queries_that_varies_picks_the_form_in_each_call() -> None:
    model, exact = Toy().eval(), Toy().double()
    fast = optimize(model, dynamic=True, **FAST)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for queries in (2, 90, 3):
            x, rows = decode_inputs(queries=queries)
            assert_like(fast(x, rows), model(x, rows), exact(x.double(), rows.double()))
    assert fast.mla_report.absorbed >= 1


def test_folded_weights() -> None:
    model, exact = Toy().eval(), Toy().double()
    fast = optimize(model, fold="always", **FAST)
    x, rows = decode_inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert_like(fast(x, rows), model(x, rows), exact(x.double(), rows.double()), 1.5)
    (site,) = fast.mla_report.sites
    assert site.form == "folded"


def test_explain_says_what_would_be_done_under_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = explain(Toy().eval(), *decode_inputs())
    assert report.absorbed == 1
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", tried("nested"))
def test_programs_and_graphs(name: str) -> None:
    kind, dtype = CASES[name]
    model, exact = kind().eval(), Toy().double()
    inputs = decode_inputs()
    truth = exact(*(x.double() for x in inputs))
    with torch.no_grad():
        exported = torch.export.export(model, inputs)
        with autocast(dtype):
            want = model(*inputs)
            program, graph = optimize(exported), optimize(exported.module(), inputs)
            assert_like(graph(*inputs), want, truth)
        for rewritten, report in (
            (program.module(), program.graph_module.meta["mla_report"]),
            (graph, graph.meta["mla_report"]),
        ):
            assert_like(rewritten(*inputs), want, truth)
            assert report.absorbed == 1
    assert "outside of autocast" in program.graph_module.meta["mla_report"].messages[0]
    assert not torch.is_autocast_enabled("cpu")


@full("inductor")  # whose graph has its casts in it, as the tests above run it
@pytest.mark.parametrize("name", ["bfloat16 around", "nested", "off within"])
def test_through_inductor(name: str) -> None:
    kind, dtype = CASES[name]
    model, exact = kind().eval(), Toy().double()
    fast = optimize(model)
    x, rows = decode_inputs()
    with torch.no_grad():
        for state in (dtype, None):
            with autocast(state):
                assert_like(fast(x, rows), model(x, rows), exact(x.double(), rows.double()))
    assert fast.mla_report.absorbed == fast.forward.compiler.graphs
