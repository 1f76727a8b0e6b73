"""Buffers of K and V that the modules of an optimized model own: kept as rows, through all that happens to a module."""

from __future__ import annotations

import copy
import functools
import gc
import io
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import mla_compile
from mla_compile.core.places import tensors_of
from mla_compile.errors import CaptureError, MlaCompileWarning, StaleWeightError
from mla_compile.runtime.latent import LatentTensor
from mla_compile.runtime.own_buffers import KeptBuffer, empty_buffers
from tests.support.tiers import also, full
from tests.zoo import own_cache_module
from tests.zoo.base import CAPACITY, Buffered, Dims

ODD = Dims()
STEPS, START = (1,), 4
"""A decode step behind four rows that nothing was written to: one graph, where other lengths take another."""
PROMPTED = (4, 1, 1, 1)
"""A prompt and steps."""


class Attention(Buffered):
    """Buffers with room for one more sequence than is used, the values persistent."""

    def __init__(self, dims: Dims = ODD) -> None:
        super().__init__(dims)
        k, v = self.empty()
        self.register_buffer("k_cache", k, persistent=False)
        self.register_buffer("v_cache", v)

    def forward(self, x: Tensor, start: int) -> Tensor:
        B, S, _ = x.shape
        positions = torch.arange(start, start + S)
        q, k, v = self.step(x, positions)
        self.k_cache[:B, :, start : start + S] = k
        self.v_cache[:B, :, start : start + S] = v
        return self.over(q, self.k_cache[:B, :, : start + S], self.v_cache[:B, :, : start + S], positions)


class Replaced(Attention):
    """Copies with the new tokens take the place of the buffers."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        B, end = len(x), start + x.shape[1]
        positions = torch.arange(start, end)
        q, k, v = self.step(x, positions)
        part = torch.select_scatter(self.k_cache[:B], k[:, :, 0], 2, start)
        self.k_cache = torch.slice_scatter(self.k_cache, part, 0, 0, B)
        self.v_cache = torch.slice_scatter(self.v_cache, self.v_cache[:B].index_copy(2, positions, v), 0, 0, B)
        return self.over(q, self.k_cache[:B, :, :end], self.v_cache[:B, :, :end], positions)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Attention, count: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        with torch.no_grad():
            for number, one in enumerate(self.layers):
                one.up.weight.mul_(1 + 0.1 * number)

    def forward(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, start)
        return x


class Wrapper(nn.Module):
    """Has a model whose layers own the buffers; a method calls it too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(count=2)

    def forward(self, x: Tensor, start: int) -> Tensor:
        return self.model(x, start)

    def step(self, x: Tensor, start: int) -> Tensor:
        return self.model(x, start)


class Stepped(Model):
    """A method calls the layers that own the buffers one by one, as the forward does."""

    def __init__(self) -> None:
        super().__init__(count=2)

    def step(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, start)
        return x


def optimized(model: nn.Module, **options: Any) -> Any:
    return mla_compile.optimize(model, codegen="eager", strict=True, **options)


def inputs(seed: int = 0, batch: int = ODD.B, steps: tuple[int, ...] = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, ODD.D, generator=generator, dtype=ODD.dtype) for count in steps]


def fresh_session(model: Model) -> Model:
    twin = copy.deepcopy(model)
    for cache in caches(twin):
        cache.zero_()
    return twin


@torch.no_grad()
def session(model: Any, xs: list[Tensor], start: int = START) -> list[Tensor]:
    found = []
    for x in xs:
        found.append(model(x, start))
        start += x.shape[1]
    return found


def same(got: list[Tensor], want: list[Tensor], case: str = "") -> None:
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, step=step: f"{case} step {step}: {m}")


def caches(model: nn.Module) -> list[Tensor]:
    return [getattr(layer, name) for layer in model.layers for name in ("k_cache", "v_cache")]


def are_rows(model: nn.Module) -> bool:
    return all(isinstance(cache, LatentTensor) and cache.recipe is not None for cache in caches(model))


def are_plain(model: nn.Module) -> bool:
    return not any(isinstance(cache, LatentTensor) and cache.recipe is not None for cache in caches(model))


def filled(count: int = 1, **options: Any) -> tuple[Model, Any]:
    """A model and its optimized form, after one session each."""
    model = Model(count=count)
    fast = optimized(model, **options)
    same(session(fast, inputs()), session(copy.deepcopy(model), inputs()))
    assert are_rows(fast)
    return model, fast


def test_rows_stand_for_the_buffers_and_the_original_has_its_own():
    model = Model()
    held = caches(model)
    fast = optimized(model)
    xs = inputs(steps=PROMPTED)
    same(session(fast, xs, 0), session(copy.deepcopy(model), xs, 0))
    assert {str(site.code) for site in fast.mla_report.sites} == {"absorbed"}
    assert are_rows(fast)
    assert fast.forward.compiler.graphs == 2
    assert all(a is b and not a.any() for a, b in zip(caches(model), held, strict=True))
    assert type(fast.layers) is nn.ModuleList
    assert fast.layers[0].up is model.layers[0].up
    assert fast.layers[0] is not model.layers[0]
    # The memory is that of the rows: L + R values for each of K's and V's H (N + R + V).
    rows = {id(row): row.numel() for cache in caches(fast) for row in cache.shown_rows()}
    d = ODD
    assert sum(rows.values()) == (d.B + 1) * CAPACITY * (d.L + d.R)
    assert sum(cache.numel() for cache in held) == (d.B + 1) * CAPACITY * d.H * (d.N + d.R + d.V)


OUTSIDE = {
    "zero_": lambda cache: cache.zero_(),
    "init.zeros_": nn.init.zeros_,
    "an item": lambda cache: cache.__setitem__(slice(None), 0),
    "fill_": lambda cache: cache.fill_(0.0),
    "copy_": lambda cache: cache.copy_(torch.zeros(cache.shape, dtype=cache.dtype)),
    "mul_": lambda cache: cache.mul_(0),
}


def test_copies_that_replace_the_buffers_are_rows():
    model, own = Model(Replaced), Model(Replaced)
    fast = optimized(own)
    for seed in range(2):
        same(session(fast, inputs(seed)), session(model, inputs(seed)))
        assert are_rows(fast)
        same([cache + 0 for cache in caches(fast)], caches(model))
        for one in (model, fast):
            for cache in caches(one):
                cache.zero_()
    assert are_plain(own)
    assert not any(cache.any() for cache in caches(own))


def test_whoever_reads_a_buffer_finds_k_and_whoever_empties_it_rows_again():
    model, fast = filled()
    mine = copy.deepcopy(model)
    session(mine, inputs())
    for got, want in zip(caches(fast), caches(mine), strict=True):
        same([got[:, :, :3], got.sum(), got + 1, got.clone()], [want[:, :, :3], want.sum(), want + 1, want.clone()])
    assert are_rows(fast)
    for name, reset in OUTSIDE.items():
        with torch.no_grad():
            for cache in caches(fast):
                reset(cache)
        assert not any(cache.any() for cache in caches(fast)), name
        same(session(fast, inputs(1)), session(copy.deepcopy(model), inputs(1)), name)
        assert are_rows(fast), name
    # Weights that change under the rows are noticed.
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    with pytest.raises(StaleWeightError, match="zero_"):
        session(fast, inputs(12))
    for cache in caches(fast):
        cache.zero_()
    same(session(fast, inputs(12)), session(copy.deepcopy(model), inputs(12)))
    assert are_rows(fast)
    assert fast.forward.compiler.graphs == 1


RESETS = (
    lambda cache: cache.zero_(),
    lambda cache: cache.fill_(0.0),
    lambda cache: cache.__setitem__(slice(None), 0),
    lambda cache: cache.copy_(torch.zeros_like(cache)),
)


# One buffer of two layers by each of them, or all four alike.
@pytest.mark.parametrize("resets", [RESETS, *also("combination", *(((reset,) * 4,) for reset in RESETS[1::2]))])
def test_a_forward_that_empties_its_buffers(resets):
    """Beside a bias, which stands where something was written alone: what is empty is attended to as zeros."""

    class Emptying(Attention):
        def __init__(self, empty_k: Callable[[Tensor], Any], empty_v: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.empty_k, self.empty_v = empty_k, empty_v
            self.up = self.random.linear(ODD.L, ODD.H * (ODD.N + ODD.V), bias=True)

        def forward(self, x: Tensor, start: int) -> Tensor:
            if start == START:
                self.empty_k(self.k_cache)
                self.empty_v(self.v_cache)
            return super().forward(x, start)

    def made() -> Model:
        left = iter(resets)
        return Model(lambda: Emptying(next(left), next(left)), count=2)

    model, fast = made(), optimized(made())
    for seed in range(2):
        same(session(fast, inputs(seed)), session(model, inputs(seed)))
        same([cache + 0 for cache in caches(fast)], caches(model))
    assert are_rows(fast)
    assert fast.forward.compiler.graphs == 1


@full("combination")
@pytest.mark.parametrize("number", [0.5, -0.0, float("nan")])
def test_a_buffer_filled_with_something_else_is_k(number):
    class Filling(Attention):
        def forward(self, x: Tensor, start: int) -> Tensor:
            if start == 0:
                self.v_cache.fill_(number)
            return super().forward(x, start)

    model, fast = Model(Filling), optimized(Model(Filling))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs(steps=PROMPTED), 0), session(model, inputs(steps=PROMPTED), 0))
    for got, want in zip(caches(fast), caches(model), strict=True):
        torch.testing.assert_close(got + 0, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@full("combination")
def test_new_tensors_and_new_sizes_take_rows_again():
    model, fast = filled()
    for batch in (5, 1):
        for one in (model, fast):
            for layer in one.layers:
                layer.k_cache, layer.v_cache = layer.empty(batch)
        same(session(fast, inputs(2, batch)), session(model, inputs(2, batch)))
        assert are_rows(fast)


@full("combination")
def test_one_emptied_buffer_of_two_is_right():
    model, fast = filled(count=2)
    session(model, inputs())
    for one in (model, fast):
        one.layers[0].k_cache = torch.zeros_like(one.layers[0].k_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs(3, steps=(1, 1)), 7), session(model, inputs(3, steps=(1, 1)), 7))


@full("combination")
def test_rows_that_two_buffers_share_are_each_of_them():
    model, fast = filled(count=2)
    session(model, inputs())
    for one in (model, fast):
        one.layers[0].k_cache.zero_()
        one.layers[1].v_cache.zero_()
    same([cache + 0 for cache in caches(fast)], caches(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs(3, steps=(1, 1)), 7), session(model, inputs(3, steps=(1, 1)), 7))
    same([cache + 0 for cache in caches(fast)], caches(model))


@full("combination")
def test_a_call_that_writes_to_one_of_two_buffers():
    class Both(Attention):
        """With ``start`` below zero only the keys are written, and the values are those of the call itself."""

        def forward(self, x: Tensor, start: int) -> Tensor:
            if start >= 0:
                return super().forward(x, start)
            B, S, _ = x.shape
            positions = torch.arange(S)
            q, k, v = self.step(x, positions)
            self.k_cache[:B, :, :S] = k
            return self.over(q, self.k_cache[:B, :, :S], v, positions)

    model, fast = Model(Both), optimized(Model(Both))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        for start in (0, -1, 7):
            xs = inputs(start + 20, steps=(3,))
            same(session(fast, xs, start), session(model, xs, start))
            same([cache + 0 for cache in caches(fast)], caches(model))


@full("combination")
@pytest.mark.parametrize("fault", ["later", "emptied", "swapped"])
def test_k_and_v_that_are_no_longer_written_to_alike(fault):
    class Both(Attention):
        """With ``start`` below zero something else becomes of the values than of the keys, whose rows they share."""

        def forward(self, x: Tensor, start: int) -> Tensor:
            if start >= 0:
                return super().forward(x, start)
            (B, S, _), start = x.shape, -start
            positions = torch.arange(start, start + S)
            q, k, v = self.step(x, positions)
            if fault == "emptied":
                self.v_cache.zero_()
            later = int(fault == "later")
            self.k_cache[:B, :, start : start + S] = k
            self.v_cache[:B, :, start + later : start + later + S] = v
            k, v = self.k_cache[:B, :, : start + S].clone(), self.v_cache[:B, :, : start + S].clone()
            if fault == "swapped":
                kept = self.v_cache[:B].clone()
                self.v_cache[:B] = self.k_cache[:B, ..., : kept.shape[-1]]
                self.k_cache[:B, ..., : kept.shape[-1]] = kept
            return self.over(q, k, v, positions)

    model, fast = Model(Both), optimized(Model(Both))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        for start in (0, 3, -6, 9):
            xs = inputs(start + 20, steps=(3,))
            same(session(fast, xs, start), session(model, xs, start))
            same([cache + 0 for cache in caches(fast)], caches(model))


@full("combination")
def test_a_call_that_writes_all_of_a_buffer_later():
    """In a trace the rows were gone with their sizes: the guards on these could not be made."""

    class Whole(Attention):
        def forward(self, x: Tensor, start: int) -> Tensor:
            if start > 4:
                self.k_cache.copy_(0.5 * self.k_cache)
            return super().forward(x, start)

    model, fast = Model(Whole), optimized(Model(Whole))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        xs = inputs(steps=PROMPTED)
        same(session(fast, xs, 0), session(model, xs, 0))
        same([cache + 0 for cache in caches(fast)], caches(model))


@full("combination")
def test_views_of_buffers_that_became_k():
    """The views that a compiler was shown were made anew at each look, and it took two for one tensor."""
    model, fast = Model(count=2), optimized(Model(count=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        prompt = inputs(steps=(4,))
        same(session(fast, prompt, 0), session(model, prompt, 0))
        for one in (model, fast):
            first, second = one.layers
            second.k_cache, second.v_cache = first.k_cache[:], first.v_cache[:]
        with torch.no_grad():
            same([fast(x, 4) for x in inputs(1, steps=(1, 1))], [model(x, 4) for x in inputs(1, steps=(1, 1))])
        same([cache + 0 for cache in caches(fast)], caches(model))
        # Emptied, they still are one memory, of which rows cannot take the place in one layer alone.
        for one in (model, fast):
            for cache in caches(one):
                cache.zero_()
        same(session(fast, inputs(2)), session(model, inputs(2)))
        same([cache + 0 for cache in caches(fast)], caches(model))


@full("combination")
def test_positions_are_written_again_and_batches_change():
    model, fast = filled()
    session(model, inputs())
    for batch, start, steps in ((1, 2, (1, 1)), (3, 0, (2, 1, 3)), (2, 6, (1,)), (2, 20, (4,))):
        xs = inputs(batch, batch, steps)
        same(session(fast, xs, start), session(model, xs, start))
    assert are_rows(fast)


def test_what_writes_elsewhere_makes_k_of_the_rows():
    model, fast = filled()
    session(model, inputs())
    with torch.no_grad():
        for one in (model, fast):
            for cache in caches(one):
                cache[0, :, 1] = 0.5
    assert are_plain(fast)
    with pytest.warns(MlaCompileWarning, match="nothing was absorbed"):
        got = session(fast, inputs(4))
    same(got, session(model, inputs(4)))
    for cache in caches(fast):
        cache.zero_()
    same(session(fast, inputs(5)), session(Model(), inputs(5)))
    assert are_rows(fast)


def test_a_buffer_in_use_stays_as_it_is():
    model = Model()
    session(model, inputs())
    fast = optimized(model)
    with pytest.warns(MlaCompileWarning, match="expanded_cache"):
        got = session(fast, inputs(6), START + 1)
    same(got, session(copy.deepcopy(model), inputs(6), START + 1))
    assert are_plain(fast)
    assert "optimize()" in fast.mla_report.sites[0].fix


def test_a_buffer_that_is_read_before_it_is_written_to():
    class Late(Attention):
        def forward(self, x: Tensor, start: int) -> Tensor:
            if x.shape[1] > 1:
                return super().forward(x, start)
            positions = torch.arange(start, start + 1)
            q, k, v = self.step(x, positions)
            y = self.over(q, self.k_cache[: x.shape[0]], self.v_cache[: x.shape[0]], positions - 1)
            self.k_cache[: x.shape[0], :, start : start + 1] = k
            self.v_cache[: x.shape[0], :, start : start + 1] = v
            return y

    fast = optimized(Model(Late))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        xs = inputs(steps=(4, 1))
        same(session(fast, xs, 0), session(Model(Late), xs, 0))
    assert are_plain(fast)


def test_copies_have_rows_of_their_own():
    model, fast = filled()
    session(model, inputs())
    twin = copy.deepcopy(fast)
    assert are_rows(twin)
    assert {id(leaf) for cache in caches(twin) for leaf in cache.leaves} == {id(one.up.weight) for one in twin.layers}
    same([cache + 0 for cache in caches(twin)], caches(model))
    mine = copy.deepcopy(model)
    same(session(twin, inputs(8)), session(mine, inputs(8)))
    for one, other in ((fast, model), (twin, mine)):
        same([cache + 0 for cache in caches(one)], caches(other))
        assert are_rows(one)
    same(session(fast, inputs(7)), session(model, inputs(7)))


def test_saved_states_hold_k():
    model, fast = filled()
    session(model, inputs())
    assert fast.state_dict().keys() == model.state_dict().keys()
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    same([saved["layers.0.v_cache"]], [model.layers[0].v_cache])
    assert type(saved["layers.0.v_cache"]) is Tensor
    fast.load_state_dict(saved)  # V in the place of its rows; those of K are of the weights before
    same([layer.v_cache + 0 for layer in fast.layers], [layer.v_cache for layer in model.layers])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        with pytest.raises(StaleWeightError, match="zero_"):
            session(fast, inputs(16))
    for cache in caches(fast):
        cache.zero_()
    same(session(fast, inputs(16)), session(fresh_session(model), inputs(16)))
    assert are_rows(fast)


@full("combination")
def test_a_pickled_model_goes_on_where_it_was():
    import pickle

    model, fast = filled()
    session(model, inputs())
    again = pickle.loads(pickle.dumps(fast))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(again, inputs(9, steps=(1, 1)), 7), session(model, inputs(9, steps=(1, 1)), 7))


@full("combination")
def test_a_model_that_is_moved_goes_on_where_it_was():
    model, fast = filled()
    session(model, inputs())
    fast.to(torch.float32).to(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        got = session(fast, inputs(11, steps=(1, 1)), 7)
    want = session(model, inputs(11, steps=(1, 1)), 7)  # the weights are shared, and were moved with it
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@full("combination")
def test_two_optimized_models_share_no_rows():
    model = Model()
    one, other = optimized(model), optimized(model)
    a, b = session(one, inputs(13)), session(other, inputs(14))
    same(a, session(Model(), inputs(13)))
    same(b, session(Model(), inputs(14)))
    assert are_rows(one)
    assert are_rows(other)


def test_inference_mode_in_and_out():
    model, fast = Model(), None
    fast = optimized(model)
    xs, plain = inputs(15, steps=(1, 1, 1)), Model()
    with torch.inference_mode():
        got = session(fast, xs[:1])
    got += session(fast, xs[1:2])  # where a tensor of inference was written to
    with torch.inference_mode():
        got += session(fast, xs[2:])
    same(got, [y for x in xs for y in session(plain, [x])])
    assert are_rows(fast)


@full("combination")
def test_float8_rows():
    model = Model()
    fast = optimized(model, cache_dtype="fp8")
    got, want = session(fast, inputs()), session(Model(), inputs())
    assert are_rows(fast)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() / b.norm() < 0.1
    assert {row.dtype for cache in caches(fast) for row in cache.shown_rows()} == {torch.uint8, torch.float64}


@full("combination")
def test_explain_says_the_same():
    model = Model()
    for S, start, fold in ((4, 0, "auto"), (1, 4, "auto"), (1, 4, "always")):
        report = mla_compile.explain(model, inputs(steps=(S,))[0], start, fold=fold)
        assert {str(site.code) for site in report.sites} == {"absorbed"}
    assert not any(cache.any() for cache in caches(model))
    fast = optimized(model, example_inputs=(inputs(steps=(4,))[0], 0))
    assert {str(site.code) for site in fast.mla_report.sites} == {"absorbed"}
    session(model, inputs())
    report = mla_compile.explain(model, inputs(steps=(1,))[0], 7)
    assert {str(site.code) for site in report.sites} == {"expanded_cache"}


def test_backend_mla_says_to_use_optimize():
    model = Model()
    session(model, inputs())  # what is in the buffers now came from no compiled call
    compiled = torch.compile(model, backend="mla", options={"codegen": "eager", "strict": True})
    with pytest.warns(MlaCompileWarning, match="expanded_cache"):
        same(session(compiled, inputs()), session(copy.deepcopy(model), inputs()))
    assert "optimize()" in mla_compile.explain(compiled._orig_mod, inputs(steps=(1,))[0], 7).sites[0].fix


@full("combination")
def test_graphs_broken_between_layers():
    class Broken(Model):
        def forward(self, x: Tensor, start: int) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, start)
                torch._dynamo.graph_break()
            return x

    model = Broken(count=2)
    fast = optimized(model)
    same(session(fast, inputs()), session(Broken(count=2), inputs()))
    assert are_rows(fast)


def test_a_buffer_read_after_a_break_is_that_of_this_call():
    class Looked(Attention):
        def forward(self, x: Tensor, start: int) -> Tensor:
            cache = self.k_cache
            y = super().forward(x, start)
            torch._dynamo.graph_break()
            return y + cache.mean() + self.v_cache[: x.shape[0], :, : start + 1].sum()

    fast = optimized(Model(Looked))
    model = Model(Looked)
    same(session(fast, inputs()), session(model, inputs()))
    same(session(fast, inputs(1)), session(model, inputs(1)))
    assert are_rows(fast)


# What else can reach a buffer: then it stays as it was, and the numbers are those of the original.


def in_a_list(model: Model) -> None:
    model.all_caches = caches(model)


def as_views(model: Model) -> None:
    model.views = [cache[0] for cache in caches(model)]


def of_one_memory(model: Model) -> None:
    pool = torch.zeros(8, *model.layers[0].k_cache.shape, dtype=ODD.dtype)
    for index, layer in enumerate(model.layers):
        layer.k_cache = pool[index]
    for layer in model.layers:
        layer.v_cache = torch.zeros(2, *layer.v_cache.shape, dtype=ODD.dtype)[0]


def in_a_default(model: Model) -> None:
    for layer in model.layers:
        layer.peek = lambda layer=layer: layer.k_cache.sum()


def in_a_closure(model: Model) -> None:
    def peek() -> Tensor:
        return torch.stack([cache.sum() for cache in caches(model)])

    model.peek = peek
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, y: y + peek().sum())


def as_a_method(model: Model) -> None:
    for layer in model.layers:
        layer.attend = layer.forward
        layer.forward = types.MethodType(lambda self, x, start: self.attend(x, start), layer)


def as_a_partial(model: Model) -> None:
    for layer in model.layers:
        layer.forward = functools.partial(type(layer).forward, layer)


def in_another_object(model: Model) -> None:
    model.registry = types.SimpleNamespace(modules={"attention": list(model.layers)})


def by_a_hook(model: Model) -> None:
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, y, layer=layer: y + layer.k_cache.sum())


HELD = [
    in_a_list,
    as_views,
    of_one_memory,
    in_a_default,
    in_a_closure,
    as_a_method,
    as_a_partial,
    in_another_object,
    by_a_hook,
]
SESSIONS = (in_a_closure,)


class Twice(Model):
    def __init__(self) -> None:
        super().__init__(count=1)
        self.layers.append(self.layers[0])


def test_a_buffer_that_something_else_can_reach_is_found() -> None:
    """Sessions with each of them take long; all of them differ in this alone."""
    model = Model(count=2)
    assert len(empty_buffers(model, dict(tensors_of(model)))) == 4
    for held in HELD:
        model = Model(count=2)
        held(model)
        assert not empty_buffers(model, dict(tensors_of(model))), held.__name__
    twice = Twice()
    assert not empty_buffers(twice, dict(tensors_of(twice)))
    model = Model(count=2)
    model.views = [model.layers[0].k_cache[0], model.layers[1].v_cache.view(-1)]
    found = map(str, empty_buffers(model, dict(tensors_of(model))))
    assert sorted(found) == ["layers.0.v_cache", "layers.1.k_cache"]


@pytest.mark.parametrize("held", [*SESSIONS, *also("combination", *(held for held in HELD if held not in SESSIONS))])
def test_a_buffer_that_something_else_holds_stays(held):
    model, plain = Model(), Model()
    held(model)
    held(plain)
    fast = optimized(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs()), session(plain, inputs()))
        same(session(fast, inputs(1)), session(plain, inputs(1)))
    assert are_plain(fast)


@full("combination")
def test_the_other_side_of_a_buffer_that_is_held_is_kept_as_rows():
    model, plain = Model(count=2), Model(count=2)
    for one in (model, plain):
        one.views = [one.layers[0].k_cache[0], one.layers[1].v_cache.view(-1)]
    fast = optimized(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        for seed in range(2):
            same(session(fast, inputs(seed)), session(plain, inputs(seed)))
            same(fast.views, plain.views)
    assert [isinstance(cache, LatentTensor) for cache in caches(fast)] == [False, True, True, False]


@full("combination")
def test_a_layer_used_twice_stays():
    fast = optimized(Twice())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        same(session(fast, inputs()), session(Twice(), inputs()))
    assert are_plain(fast)


def test_buffers_of_other_models_are_left_alone():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 3, 4))
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, start: int) -> Tensor:
            self.state[:, start] = self.up(x)[:, 0]
            return self.state.softmax(-1) @ self.state.mT

    model = Plain()
    fast = optimized(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        fast(torch.randn(2, 1, 4), 0)
    assert fast.state is model.state
    assert fast._modules is model._modules


@full("combination")  # test_robust_fuzz.py gives inputs that do not fit to models without buffers
def test_wrong_inputs_fail_as_they_do_in_the_original():
    fast = optimized(Model())
    with torch.no_grad(), pytest.raises(TypeError, match="start"):
        fast(inputs()[0])
    with torch.no_grad(), pytest.raises(RuntimeError):
        fast(torch.randn(2, 4, ODD.D + 1, dtype=ODD.dtype), 0)
    same(session(fast, inputs()), session(Model(), inputs()))
    assert are_rows(fast)


@full("inductor")
def test_compiled_code_writes_in_place():
    model = Model()
    fast = mla_compile.optimize(model, strict=True)
    plain = Model()
    same(session(fast, inputs()), session(plain, inputs()))
    rows = [row for cache in caches(fast) for row in cache.shown_rows()]
    where = [row.data_ptr() for row in rows]
    same(session(fast, inputs(1)), session(plain, inputs(1)))
    assert [row.data_ptr() for cache in caches(fast) for row in cache.shown_rows()] == where
    assert are_rows(fast)


def test_without_memory_for_rows_the_buffers_stay(monkeypatch):
    def none_left(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(KeptBuffer, "empty", none_left)
    fast = optimized(Model())
    with pytest.warns(MlaCompileWarning) as said:
        same(session(fast, inputs()), session(Model(), inputs()))
    assert "drop the original model" in str(said[0].message)
    assert are_plain(fast)


class Holding(own_cache_module.Attention):
    """As in public code: a module of its own holds the buffers."""

    k_cache, v_cache = (property(lambda self, name=name: getattr(self.cache, name)) for name in "kv")

    def __init__(self, dims: Dims = ODD) -> None:
        super().__init__(dims)

    def forward(self, x: Tensor, start: int) -> Tensor:
        return super().forward(x, torch.arange(start, start + x.shape[1]))


@pytest.mark.singly
@pytest.mark.parametrize("calls", ["forward", "step", *also("combination", "both")])
@pytest.mark.parametrize("kind", [Wrapper, Stepped])
def test_through_a_forward_and_a_method(kind: type[Any], calls: str) -> None:
    model = kind()
    twin, fast = copy.deepcopy(model), optimized(model)
    with torch.no_grad():
        start = START
        for number, x in enumerate(inputs(steps=(1, 1) if calls == "both" else (1,))):
            name = ("forward", "step")[number % 2] if calls == "both" else calls
            one, other = (each if name == "forward" else each.step for each in (fast, twin))
            same([one(x, start)], [other(x, start)])
            start += x.shape[1]
    ours, theirs = (caches(getattr(each, "model", each)) for each in (fast, model))
    assert len(ours) == 4
    assert all(isinstance(cache, LatentTensor) for cache in ours)
    assert {site.verdict for site in fast.mla_report.sites} == {"absorbed"}
    assert not any(cache.any() for cache in theirs)


class InAList(Buffered):
    """Plain tensors in a list in a dict."""

    k_cache, v_cache = (property(lambda self, at=at: self.held["cache"][at]) for at in range(2))
    forward = Attention.forward

    def __init__(self, dims: Dims = ODD) -> None:
        super().__init__(dims)
        self.held = {"cache": list(self.empty())}


# test_layers_of_one_buffer.py shows it of buffers, too
@pytest.mark.parametrize("layer", [*also("combination", Attention), Holding, InAList])
def test_the_memory_of_the_buffers_is_freed_with_the_original(layer: type[nn.Module]):
    """Measured at the storages. Tensors without storages of their own beside them are no caches and no obstacle."""
    model, plain = Model(layer), Model(layer)
    for one in (model, plain):
        one.register_buffer("sparse", torch.eye(3).to_sparse())
        one.head = nn.LazyLinear(2)
    original = [StorageWeakRef(cache.untyped_storage()) for cache in caches(model)]
    fast = optimized(model)
    same(session(fast, inputs()), session(plain, inputs()))
    assert are_rows(fast)
    assert fast.sparse.is_sparse
    assert not any(memory.expired() for memory in original), "the original has lost its buffers"
    del model
    gc.collect()
    assert all(memory.expired() for memory in original)


def test_code_for_a_cache_in_buffers_is_not_saved(tmp_path: Path):
    fast = optimized(Model(), lowering="aten", verify=False)
    with pytest.raises(mla_compile.ExportError, match=r"cannot be saved: it has a cache in buffers of its own"):
        mla_compile.save(fast, tmp_path / "code", lambda model: session(model, inputs()))


def test_a_pass_that_fails_while_buffers_are_looked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise IndexError("no such axis")

    monkeypatch.setattr("mla_compile.passes.cache.keep.keep_latents", fails)
    xs, model = inputs(), Model()
    want = session(copy.deepcopy(model), xs)
    with pytest.warns(MlaCompileWarning) as said:
        same(session(mla_compile.optimize(model, codegen="eager"), xs), want)
    assert "stay as they are, because of a failure: IndexError: no such axis" in str(said[0].message)
    with pytest.raises(CaptureError, match="no such axis"):
        session(optimized(Model()), xs)
