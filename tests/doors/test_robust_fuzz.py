"""Any options, any inputs: the original's result, the original's own error, or an error of ours; never a traceback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import TorchRuntimeError

from mla_compile import InputError, MlaCompileError, OptionError, Options, explain, optimize
from tests.support.releases import BEFORE_2_13
from tests.support.tiers import also
from tests.support.toy import D, L, R, Toy, decode_inputs

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}
NOT_TENSORS = [None, 3, "x", [], {}, 2.5, nn.Linear(2, 2), (1, 2)]


class Counting(torch.Tensor):
    """A subclass without behaviour of its own."""


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
    "every second": lambda t: torch.stack([t, -t], dim=-1).flatten(-2)[..., ::2],
    "flipped": lambda t: t.flip(-1),
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "wants gradients": lambda t: t.clone().requires_grad_(),
    "subclass": lambda t: t.clone().as_subclass(Counting),
    "parameter": lambda t: nn.Parameter(t.clone()),
    "nan": lambda t: t.masked_fill(torch.arange(t.shape[-1]) == 1, float("nan")),
    "infinite": lambda t: t.masked_fill(torch.arange(t.shape[-1]) == 1, float("inf")),
    "huge": lambda t: t * 1e30,
    "conjugate view": lambda t: torch.view_as_real(torch.complex(t, t).conj().resolve_conj())[..., 0],
}
if BEFORE_2_13:  # whose Dynamo fails on them, whoever compiles
    del LAYOUTS["subclass"]
SPOILED = {
    "integer": lambda t: t.long(),
    "double": lambda t: t.double(),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t > 0,
    "narrow": lambda t: t[..., :-1],
    "flat": lambda t: t.flatten(),
    "deep": lambda t: t[None],
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
}


def outcome(model: nn.Module, inputs: Any) -> Any:
    try:
        with torch.no_grad():
            return model(*inputs)
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared
        return error


def assert_same_outcome(got: Any, want: Any) -> None:
    if isinstance(want, Exception):
        # TorchRuntimeError: what a kernel's fake form says, in any compiled model.
        assert isinstance(got, (type(want), MlaCompileError, TorchRuntimeError)), (got, want)
        return
    assert not isinstance(got, Exception), got
    for a, b in zip(got, want, strict=True):
        assert a.device == b.device
        if not a.is_meta:
            scale = float(b.detach().abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(scale, 1), equal_nan=True)


def drawn(examples: int, check: Callable[..., None], **strategies: Any) -> None:
    """Check some cases."""
    settings(max_examples=examples)(given(**strategies)(check))()


@pytest.mark.parametrize("examples", [3, *also("draws", 8)])
def test_any_layout_and_any_size_gives_what_the_original_gives(examples: int) -> None:
    drawn(
        examples,
        any_layout_and_any_size,
        shape=st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 4)),
        x_layout=st.sampled_from([*LAYOUTS]),
        rows_layout=st.sampled_from([*LAYOUTS]),
        fold=st.sampled_from(["auto", "always"]),
    )


def any_layout_and_any_size(shape: tuple[int, int, int], x_layout: str, rows_layout: str, fold: str) -> None:
    torch._dynamo.reset()
    batch, cached, queries = shape
    x, rows = decode_inputs(batch=batch, cached=cached, queries=queries)
    if batch == 0:
        x_layout = rows_layout = "plain"
    model = Toy().eval()
    inputs = (LAYOUTS[x_layout](x), LAYOUTS[rows_layout](rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = optimize(model, fold=fold, **FAST)
        assert_same_outcome(outcome(fast, inputs), outcome(model, inputs))


@pytest.mark.parametrize("examples", [2, *also("draws", 7)])
def test_inputs_that_do_not_fit_give_the_originals_error_and_the_model_still_works(examples: int) -> None:
    drawn(
        examples,
        inputs_that_do_not_fit,
        which=st.integers(0, 1),
        spoiled=st.one_of(st.sampled_from([*SPOILED]), st.sampled_from(NOT_TENSORS)),
        warm=st.booleans(),
    )


def inputs_that_do_not_fit(which: int, spoiled: Any, warm: bool) -> None:
    torch._dynamo.reset()
    good = decode_inputs()
    bad = list(good)
    known = isinstance(spoiled, str) and spoiled in SPOILED
    bad[which] = SPOILED[spoiled](good[which]) if known else spoiled
    model = Toy().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = optimize(model, **FAST)
        if warm:
            outcome(fast, good)
        assert_same_outcome(outcome(fast, bad), outcome(model, bad))
        assert_same_outcome(outcome(fast, good), outcome(model, good))


def test_explain_of_inputs_that_do_not_fit_is_an_error_of_ours() -> None:
    model = Toy().eval()
    x, rows = decode_inputs()
    for bad in ((), (x,), (None, None), (x, rows, 1), (x, rows[:1]), ([x], rows), (x.to("meta"), rows), ("x", {})):
        with pytest.raises(MlaCompileError):
            explain(model, *bad)


JUNK = st.sampled_from([None, 0, 1, -1, 2.5, "", "auto ", b"auto", [], {}, (), object(), torch.ones(2), len])
VALUES = {
    "forms": ["auto", "absorbed", "expanded"],
    "fold": ["auto", "never", "always"],
    "lowering": ["op", "aten"],
    "codegen": ["inductor", "eager"],
    "verify": [True, False],
    "strict": [True, False],
    "inductor": [{}, {"max_autotune": False}, {"max_autotune": "no"}, {"nothing": 1}, {1: 2}],
    "max_autotune": [True, False],
    "triton.cudagraphs": [False],
    "mode": [None, "default", "reduce-overhead", "max-autotune", "fast"],
    "dynamic": [None, True, False],
    "fullgraph": [True, False],
    "lowring": ["op"],
    "options": [{"fold": "never"}],
    "": [1],
}
ANY = st.sampled_from([*VALUES]).flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(st.sampled_from(VALUES[name]), JUNK))
)


@settings(max_examples=100)
@given(chosen=st.lists(ANY, max_size=4).map(dict))
def test_options_are_taken_as_they_are_or_refused_as_options(chosen: dict[str, Any]) -> None:
    model = Toy().eval()
    valid = all(any(value is v for v in VALUES[name]) for name, value in chosen.items())
    try:
        fast = optimize(model, **chosen)
    except OptionError:
        return
    for name, value in chosen.items():
        if name in Options.names() and name != "inductor":
            assert valid
            assert getattr(fast.forward.options, name) == value


@pytest.mark.parametrize(
    "inputs",
    [
        3,
        "x",
        torch.ones(1),
        [None, None],
        (None,),
        {"x": None},
        {1: 2},
        [torch.ones(2, 1, D)],
        {"rows": torch.ones(L + R)},
    ],
)
def test_example_inputs_of_any_kind_fit_or_are_refused(inputs: Any) -> None:
    model = Toy().eval()
    before = dict(vars(model))
    with pytest.raises(InputError):
        optimize(model, inputs, **FAST)
    assert vars(model) == before


def test_torchscript_and_graphs_without_output_are_input_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    for call in (optimize, explain):
        with pytest.raises(InputError, match="RecursiveScriptModule"):
            call(scripted)
    with pytest.raises(InputError, match="no output node"):
        optimize(torch.fx.GraphModule({}, torch.fx.Graph()), **FAST)
