"""Buffers of K and V under ``torch.compile(model, backend="mla")``: rows beside them, as long as they are true."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import mla_compile.backend
from mla_compile.errors import MlaCompileWarning
from mla_compile.runtime.beside import _Beside, rows_beside
from mla_compile.runtime.latent import LatentTensor
from tests.doors.test_own_buffers import ODD, START, Attention, Model, caches, fresh_session, inputs, same, session
from tests.support.compiling import flops_of
from tests.support.tiers import also

PROMPTED = (4, 1, 1, 1)
NO_ROWS = cast("LatentTensor", None)
FELL_BACK = "the original graph runs in this call"


@pytest.fixture
def one_graph() -> Any:
    """Positions are no constants of a graph from the first step on: a prompt and another graph take twice the time."""
    with torch.compiler.config.patch(dynamic_sources="L['start']"):
        yield


@pytest.fixture
def codes() -> Any:
    """A function that returns the codes of the sites of all graphs of this test, in the order of their compilation."""
    torch._dynamo.reset()
    mla_compile.backend._recent.clear()
    return lambda: [{str(site.code) for site in report.sites} for report in mla_compile.backend.reports()]


def compiled(model: torch.nn.Module, codegen: str = "eager", **options: Any) -> Any:
    return torch.compile(model, backend="mla", options={"codegen": codegen, "strict": True, **options})


def silent(fast: Any, xs: list[Tensor], start: int = START) -> list[Tensor]:
    """A session in which nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", MlaCompileWarning)
        return session(fast, xs, start)


class Indexed(Attention):
    """The positions are a tensor, and the whole buffer is attended to."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[1])
        q, k, v = self.step(x, positions)
        self.k_cache[: len(x)].index_copy_(2, positions, k)
        self.v_cache[: len(x), :, positions] = v
        return self.over(q, self.k_cache[: len(x)], self.v_cache[: len(x)], positions)


class Rescaled(Attention):
    """What the buffer holds is multiplied by a number, and so are its rows."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        self.k_cache.mul_(0.5)
        self.v_cache.mul_(0.5)
        return super().forward(x, start)


class Biased(Attention):
    """Where nothing was written yet, there is no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bias = torch.nn.Parameter(torch.ones(self.up.out_features, dtype=ODD.dtype))


@pytest.mark.parametrize(
    ("layer", "count", "steps", "codegen"),
    [
        (Attention, 2, PROMPTED, "eager"),
        *((layer, 1, (4, 1), "eager") for layer in (Indexed, Rescaled, Biased)),
        *also("inductor", *((layer, 1, (4, 1), "inductor") for layer in (Attention, Indexed))),
    ],
)
def test_steps_attend_to_rows_and_buffers_hold_what_they_held(layer, count, steps, codegen, codes):
    model = Model(layer, count)
    twin = copy.deepcopy(model)
    fast = compiled(model, codegen)
    for seed in (0, 1):  # the second sequence overwrites the first
        same(silent(fast, inputs(seed, steps=steps), 0), session(twin, inputs(seed, steps=steps), 0))
        same(caches(model), caches(twin))
        assert all(type(cache) is Tensor for cache in caches(model))
    assert codes()[0] == {"cost_prefill"}
    assert codes()[1:] == [{"absorbed"}] * len(codes()[1:])
    assert "optimize(model)" in str(mla_compile.backend.reports()[-1])


def test_the_report_says_what_is_held_and_what_the_original_computes(codes):
    session(compiled(Model()), inputs())
    (site,) = mla_compile.backend.reports()[-1].sites
    H, L, R, N, V = (getattr(site.dims, name) for name in "HLRNV")
    assert (site.values_read_before, site.values_read_after) == (H * (N + R + V), L + R)
    assert (site.values_held_before, site.values_held_after) == (H * (N + R + V), H * (N + R + V) + L + R)
    assert (site.decode_flops_before, site.decode_flops_after) == (2 * H * (N + R + V), 2 * H * (2 * L + R))


def test_a_prompt_computes_no_more_than_before():
    layer = Attention()
    fast = torch.compile(layer.forward, backend="mla", options={"codegen": "eager", "strict": True})
    (prompt,) = inputs(steps=(4,))
    with torch.no_grad():
        fast(prompt, 0)  # compiles
        assert flops_of(fast, prompt, 0) == flops_of(layer.forward, prompt, 0)


# What makes rows untrue: the numbers are those of the original, and one is told why it is slow.


def written(model: Model) -> None:
    model.layers[0].v_cache[:, :, 1].add_(1)


def written_through_a_view(model: Model) -> None:
    model.layers[0].k_cache.view(-1)[:3] = 7


def written_through_data(model: Model) -> None:
    model.layers[0].k_cache.data[0, :, 2] = 7


def written_through_numpy(model: Model) -> None:
    model.layers[0].v_cache.numpy()[:, :, 4:6] = 0


def changed_weight(model: Model) -> None:
    model.layers[0].up.weight.mul_(1.5)


def other_weight(model: Model) -> None:
    model.layers[0].up.weight = torch.nn.Parameter(model.layers[0].up.weight * 2)


def other_memory(model: Model) -> None:
    cache = model.layers[0].k_cache
    cache.data = cache.data + 1


def more_memory(model: Model) -> None:
    cache = model.layers[0].k_cache
    cache.data = torch.cat([cache, torch.ones_like(cache)])


def another_buffer(model: Model) -> None:
    model.layers[0].k_cache = model.layers[0].k_cache + 1


def eager_step(model: Model) -> None:
    session(model, inputs(5), 4)


def one_emptied(model: Model) -> None:
    model.layers[0].k_cache.zero_()


OTHERS = (
    written_through_a_view, written_through_numpy, other_weight, other_memory, more_memory, eager_step, one_emptied,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        *((change, Attention) for change in (written, written_through_data, changed_weight, another_buffer)),
        *also("combination", *((change, Attention) for change in OTHERS)),
        *also("combination", *((change, Indexed) for change in (written, other_weight, eager_step, one_emptied))),
    ],
)
def test_buffers_and_weights_that_change(change, layer, one_graph, codes):
    model = Model(layer)
    twin, fast = copy.deepcopy(model), compiled(model)
    same(silent(fast, inputs(steps=(1, 1, 1))), session(twin, inputs(steps=(1, 1, 1))))
    assert codes() == [{"absorbed"}]
    with torch.no_grad():
        change(model)
        change(twin)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MlaCompileWarning)
        same(session(fast, inputs(2), 7), session(twin, inputs(2), 7))
    # Indexed writes K and V by different operators, so each has rows of its own, and those of the other may be kept.
    said = [str(w.message) for w in caught]
    assert layer is Indexed or any(FELL_BACK in text or "expanded_cache" in text for text in said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs(3), 8), session(twin, inputs(3), 8))


def test_beside_buffers_that_were_emptied_there_are_rows_again(codes):
    model = Model()
    twin, fast = copy.deepcopy(model), compiled(model)
    silent(fast, inputs())
    with torch.no_grad():
        written(model)
    with pytest.warns(MlaCompileWarning, match=f"{FELL_BACK}|expanded_cache"):
        session(fast, inputs(2))
    for cache in caches(model):
        cache.zero_()
    torch._dynamo.reset()
    same(silent(fast, inputs(4)), session(twin, inputs(4)))
    assert codes()[-1] == {"absorbed"}


def test_writes_that_nobody_counts_show_in_a_large_buffer():
    buffer = torch.zeros(2, 16, 512, 64)
    for first in range(0, 512, 8):
        state = _Beside.of(NO_ROWS, buffer, None)
        assert state.describes(buffer)
        buffer.data[1, :, first : first + 8] = first + 1.0
        assert not state.describes(buffer)


def test_a_call_that_fails_leaves_no_rows(one_graph, codes):
    class Failing(Model):
        fails = False

        def forward(self, x: Tensor, start: int) -> Tensor:
            y = super().forward(x, start)
            return failing(y) if self.fails else y

    model = Failing()
    twin, fast = copy.deepcopy(model), compiled(model)
    same(silent(fast, inputs()), session(twin, inputs()))
    assert all(rows_beside(cache) is not None for cache in caches(model))
    model.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        session(fast, inputs(2), 5)
    model.fails = False
    assert all(rows_beside(cache) is None for cache in caches(model))
    with pytest.warns(MlaCompileWarning, match=f"{FELL_BACK}|expanded_cache"):
        same(session(fast, inputs(3), 5), session(twin, inputs(3), 5))


@torch.library.custom_op("mla_test::failing", mutates_args=())
def failing(x: Tensor) -> Tensor:
    raise ValueError("on purpose")


@failing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_several_modules_in_one_graph(codes):
    class Broken(Model):
        def forward(self, x: Tensor, start: int) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, start)
                torch._dynamo.graph_break()
            return x

    model = Broken(count=2)
    twin, fast = copy.deepcopy(model), compiled(model)
    for seed in (0, 1):
        same(silent(fast, inputs(seed)), session(twin, inputs(seed)))
    assert codes()[-1] == {"absorbed"}


def test_a_model_that_is_copied_in_the_middle(codes):
    model = Model()
    fast = compiled(model)
    session(fast, inputs(steps=PROMPTED), 0)
    other = compiled(copy.deepcopy(model))
    with pytest.warns(MlaCompileWarning):
        same(session(other, inputs(2), 7), session(copy.deepcopy(model), inputs(2), 7))
    same(silent(fast, inputs(2), 7), session(fresh_session_of(model, PROMPTED), inputs(2), 7))


def fresh_session_of(model: Model, steps: tuple[int, ...]) -> Model:
    twin = fresh_session(model)
    session(twin, inputs(steps=steps), 0)
    return twin


# Near misses: no rows are kept, and the code says so.


class Overlapping(Attention):
    """A write to one buffer changes the other."""

    def __init__(self) -> None:
        super().__init__()
        size = max(self.k_cache.numel(), self.v_cache.numel())
        memory = torch.zeros(size + 40, dtype=ODD.dtype)
        self.k_cache = memory[: self.k_cache.numel()].view(self.k_cache.shape)
        self.v_cache = memory[40 : 40 + self.v_cache.numel()].view(self.v_cache.shape)


class Filled(Attention):
    """Something is in a buffer when the first call comes."""

    def __init__(self) -> None:
        super().__init__()
        self.k_cache[-1, 0, -1, 0] = 1


class Untracked(Attention):
    """Nobody counts writes to tensors of inference mode."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.k_cache, self.v_cache = self.k_cache.clone(), self.v_cache.clone()


class Shown(Attention):
    """The caller gets a view of the keys, through which it may write."""

    def forward(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return super().forward(x, start), self.k_cache[: len(x)]


class Squashed(Attention):
    """What the buffer holds is changed besides being written to."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        self.k_cache.tanh_()
        self.v_cache.tanh_()
        return super().forward(x, start)


# The values of the last two are another buffer, beside which rows may be kept.
ONE = ((1,), START)
BOTH = ((4, 1), 0)
REFUSED = [
    (Overlapping, "a failure", ONE), (Untracked, "expanded_cache", ONE), (Squashed, "refused", ONE),
    (Filled, "expanded_cache", BOTH), (Shown, "expanded_cache", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "told", "calls"), REFUSED)
def test_buffers_beside_which_no_rows_are_kept(layer, told, calls, codes):
    model = layer()
    twin = layer()
    weights = {name: value for name, value in model.state_dict().items() if "cache" not in name}
    twin.load_state_dict(weights, strict=False)
    fast = compiled(model, strict=False)
    with torch.inference_mode():
        steps, start = calls
        want = session(twin, inputs(steps=steps), start)
        with pytest.warns(MlaCompileWarning, match=told):
            got = session(fast, inputs(steps=steps), start)
    for a, b in zip(got, want, strict=True):
        same(*([list(x) if isinstance(x, tuple) else [x] for x in (a, b)]))
    sites = [site for report in mla_compile.backend.reports() for site in report.sites]
    assert {part for site in sites if site.verdict == "absorbed" for part in site.parts or ("both",)} <= {"values"}
    assert layer in (Filled, Shown) or not any(site.verdict == "absorbed" for site in sites)
