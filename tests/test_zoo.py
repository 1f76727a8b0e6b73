"""Every style of the zoo, through every door: the numbers and the caches stay, and the verdict is the expected one.

Each file of ``tests/zoo`` is a way to write MLA, or something that looks like it (see :mod:`tests.zoo.base`). By
default half of the styles go through one door, and ``pytest -m "" tests/test_zoo.py`` takes each through all: a step
through ``torch.export``, a prompt and a step through ``optimize``, and a prompt and 3 steps, of which the second is
traced again for any length, through ``torch.compile``. ``MLA_ZOO=long`` does that with more seeds, 8 steps, more prompt
lengths in a row on one compiled module, and both sets of dims at every door. ``-k STYLE`` picks a style.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile import backend
from mla_compile.core.records import SiteReport
from mla_compile.errors import CaptureError, MlaCompileWarning
from tests.support.tiers import also
from tests.zoo.base import (
    Dims,
    Expected,
    InPart,
    NoAttention,
    NotCaptured,
    NotExported,
    Outcome,
    counted,
    told,
    verdict_of,
)

# What torch says of how some styles are written, whoever compiles them.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "flex_attention called without torch.compile",
        "`torch.jit.script",
        "Mismatch dtype between input and weight",
        "The tensor attribute self.up.weight was assigned during export",
    )
]

LONG = os.environ.get("MLA_ZOO") == "long"
DECODE_STEPS = 8 if LONG else 3
TOLERANCE = 1e-9

ODD = Dims()
EQUAL = Dims(B=4, D=4, H=4, L=4, Q=4, N=4, R=4, V=4, seed=1)  # and prompts of 4: axes that could be taken for another
SEEDS = (0, 1, 2) if LONG else (0,)
LENGTHS = (4, 1, 9) if LONG else (4,)

ZOO = Path(__file__).parent / "zoo"
STYLES = sorted(p.stem for p in ZOO.glob("*.py") if p.stem != "base")
# By default half of the styles go through one door. Export is the quickest, so it takes the styles that can be exported
# but a few for each other door. They are chosen by a hash, so that a new style does not move the others.
_EXPORTED = {s: not re.search(r"^EXPORTED = Not", (ZOO / f"{s}.py").read_text(), re.MULTILINE) for s in STYLES}
_HASH = {s: zlib.crc32(s.encode()) % 80 for s in STYLES}
_BY_DEFAULT = {
    "optimize": {s for s in STYLES if _HASH[s] == 0 or not _EXPORTED[s]},
    "compile": {s for s in STYLES if _HASH[s] == 1 and _EXPORTED[s]},
    "export": {s for s in STYLES if _HASH[s] > 1 and _HASH[s] % 2 == 0 and _EXPORTED[s]},
}
Sites = Callable[[], list[SiteReport]]


def through(door: str) -> pytest.MarkDecorator:
    """Every style; those that another door shows by default are of the full tier."""
    by_default = _BY_DEFAULT[door]
    return pytest.mark.parametrize("style", [s if s in by_default else also("family", s)[0] for s in STYLES])


def load(style: str) -> Any:
    return importlib.import_module(f"tests.zoo.{style}")


def through_optimize(module: nn.Module, forms: str) -> tuple[Any, Sites]:
    fast = mla_compile.optimize(module, codegen="eager", strict=True, forms=forms, verify=True)
    return fast, lambda: list(fast.mla_report.sites)


def through_backend(module: nn.Module, forms: str) -> tuple[Any, Sites]:
    before = {id(r): r for r in backend.reports()}
    compiled = torch.compile(module, backend="mla", options={"codegen": "eager", "strict": True, "forms": forms})
    return compiled, lambda: [s for r in backend.reports() if id(r) not in before for s in r.sites]


@through("optimize")
def test_optimized(style: str) -> None:
    """Rewrites are checked against float64 here, and with ``torch.export`` for a quarter of the styles."""
    steps = DECODE_STEPS if LONG or _HASH[style] == 0 else 1
    for dims in variants(ODD, EQUAL):
        run(load(style), dims, through_optimize, "auto", load(style).EXPECTED, steps)


@through("compile")
def test_torch_compile(style: str) -> None:
    """``forms="absorbed"``: the prompt is absorbed too, and what is illegal has no excuse in its price."""
    expected = getattr(load(style), "COMPILED", load(style).EXPECTED)
    by_price = any(e.verdict == "kept" for e in (expected if isinstance(expected, tuple) else (expected,)))
    for dims in variants(EQUAL, ODD):
        run(load(style), dims, through_backend, "auto" if by_price else "absorbed", expected, DECODE_STEPS)


def variants(*dims: Dims) -> Iterator[Dims]:
    for seed in SEEDS:
        for d in dims if LONG else dims[:1]:
            yield Dims(**{**vars(d), "seed": d.seed + seed})


def run(
    style: Any,
    dims: Dims,
    door: Callable[[nn.Module, str], tuple[Any, Sites]],
    forms: str,
    outcome: Expected,
    steps: int,
) -> None:
    """Sessions of the original and the other one after another, step by step."""
    torch._dynamo.reset()
    original, module = style.build(dims).eval(), style.build(dims).eval()
    expected = counted(outcome, dims)
    if isinstance(outcome, NotCaptured):
        with torch.no_grad(), pytest.raises(Exception, match=outcome.reason):  # Dynamo wraps ours, as strict
            style.session(door(module, forms)[0])(random_inputs(dims, LENGTHS[0])[0])
        return
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        fast, sites = door(module, forms)
        for length in LENGTHS:
            want, got = style.session(original), style.session(fast)
            inputs = random_inputs(dims, length)
            compare(style, "prompt", got(inputs[0]), want(inputs[0]))
            seen = len(sites())
            for i, x in enumerate(inputs[1 : 1 + steps]):
                where = f"decode step {i} after a prompt of {length}"
                compare(style, where, got(x), want(x))
                compare_states(style, where, state(fast, got), state(original, want))
                new = Counter(told(s) for s in sites()[seen:])
                if length == LENGTHS[0] and i == 0:
                    assert new == expected, describe(sites()[seen:])
                # With lengths that are open less can be shown of an operator, which is then named.
                assert set(new) <= {*expected, "unsupported_op"}, describe(sites()[seen:])
                seen = len(sites())
        if not {"absorbed", "kept"} & {verdict_of(said) for said in expected}:  # neither is the prompt
            assert not any(s.verdict == "absorbed" for s in sites()), describe(sites())


@through("export")
def test_exported(style: str) -> None:
    """A decode step as it was called, through torch.export."""
    zoo = load(style)
    exported_as = getattr(zoo, "EXPORTED", zoo.EXPECTED)
    for dims in variants(ODD, EQUAL):
        module, args, kwargs = recorded_step(zoo, dims)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", MlaCompileWarning)
            if isinstance(exported_as, NotExported):
                with pytest.raises(Exception, match=exported_as.reason):  # whatever torch raises
                    torch.export.export(module, args, kwargs)
                continue
            original = copy.deepcopy(module)  # a program shares the buffers of its module
            exported = torch.export.export(module, args, kwargs)
            if isinstance(exported_as, NotCaptured):
                with pytest.raises(CaptureError, match=exported_as.reason):
                    mla_compile.optimize(exported)
                continue
            fast = mla_compile.optimize(exported, verify=LONG or _HASH[style] % 4 == 0)
            report = fast.graph_module.meta["mla_report"]
            got_args, got_kwargs = copy.deepcopy((args, kwargs))
            loaded = fast.module()
            torch.manual_seed(dims.seed)
            with counting(exported, fast) as ours:
                got = loaded(*got_args, **got_kwargs)
            torch.manual_seed(dims.seed)
            with counting(exported, fast) as before:
                want = original(*args, **kwargs)
        if style not in MORE_FLOPS:
            assert ours.get_total_flops() <= before.get_total_flops()
        assert Counter(told(s) for s in report.sites) == counted(exported_as, dims), describe(report.sites)
        compare_states(zoo, "results", dict(tensors(got)), dict(tensors(want)))
        compare_states(zoo, "inputs", dict(tensors((got_args, got_kwargs))), dict(tensors((args, kwargs))))
        left = dict(loaded.named_buffers())
        compare_states(zoo, "buffers", left, {n: b for n, b in original.named_buffers() if n in left})


MORE_FLOPS = {"recomputed_without_a_cache"}  # as many queries as keys, where time in memory decides


@contextlib.contextmanager
def counting(*programs: torch.export.ExportedProgram) -> Iterator[FlopCounterMode]:
    """Counts FLOPs unless one program calls operators that take functions, which no counter of torch looks into."""
    counter = FlopCounterMode(display=False)
    nodes = [n for program in programs for n in program.graph.nodes]
    higher = any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in nodes)
    with contextlib.nullcontext() if higher else counter:
        yield counter


def recorded_step(style: Any, dims: Dims) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module and its arguments as they were before the third decode step."""
    module = style.build(dims).eval()
    calls: list[Any] = []

    def record(_: nn.Module, args: Any, kwargs: Any) -> None:
        hooks, module._forward_pre_hooks = module._forward_pre_hooks, type(module._forward_pre_hooks)()
        calls.append(copy.deepcopy((module, args, kwargs)))
        module._forward_pre_hooks = hooks

    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        step = style.session(module)
        for x in random_inputs(dims, 4)[:4]:
            step(x)
    hook.remove()
    found, args, kwargs = calls[-1]
    found._forward_pre_hooks_with_kwargs.clear()
    return found, args, kwargs


def random_inputs(dims: Dims, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * length + dims.seed)
    counts = [length] + [1] * DECODE_STEPS
    return [torch.randn(dims.B, n, dims.D, generator=generator, dtype=torch.float64).to(dims.dtype) for n in counts]


def compare(style: Any, what: str, got: Tensor, want: Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if want.dtype.is_floating_point and want.dtype.itemsize == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    if not want.numel() or not want.dtype.is_floating_point:
        assert torch.equal(got, want), what
        return
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places"
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()), f"{what}: other infinities"
    if finite.any():
        error = (got[finite] - want[finite]).abs().max() / want[finite].abs().max().clamp(min=1e-12)
        assert error < getattr(style, "TOLERANCE", TOLERANCE), f"{what}: relative error {error:.1e}"


def compare_states(style: Any, what: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        if isinstance(value, Tensor):
            compare(style, f"{what}: {name}", got[name], value)
        else:
            assert got[name] == value, f"{what}: {name}"


def state(module: Any, step: Any) -> dict[str, Any]:
    """All tensors and numbers that a session leaves: attributes and buffers of the module and what the step carries."""
    module = getattr(module, "_orig_mod", module)
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if not k.startswith("_") and k not in _OURS}
        found.update(tensors({**own, **dict(part.named_buffers(recurse=False))}, prefix))
    found.update(tensors(getattr(step, "cache", ()), "cache"))
    return found


_OURS = ("forward", "mla_report", "dims", "random", "training", "scale")


def tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers within lists, tuples, dicts and the attributes of plain objects."""
    if isinstance(value, (Tensor, int, float)):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from tensors(part, f"{name}.{key}", depth + 1)
    elif pytree.is_namedtuple_instance(value) or (
        hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value) and depth < 6
    ):
        yield from tensors(vars(value), name, depth + 1)


def describe(sites: Any) -> str:
    return "; ".join(f"{told(s)}: {s.reason} [{s.blame.op if s.blame else ''}]" for s in sites) or "no attention found"


def test_the_files_are_complete_and_enough() -> None:
    verdicts = []
    for style in STYLES:
        zoo = load(style)
        assert zoo.__doc__, style
        assert callable(zoo.build), style
        several = zoo.EXPECTED if isinstance(zoo.EXPECTED, tuple) else (zoo.EXPECTED,)
        assert all(isinstance(e, (Outcome, InPart, NoAttention, NotCaptured)) for e in several), style
        best = min(
            (e.verdict for e in several), key=["absorbed", "in part", "kept", "refused", "not_mla", "none"].index
        )
        verdicts.append("legal" if best == "refused" and getattr(zoo, "LEGAL", False) else best)
    count = Counter(verdicts)
    legal = count["absorbed"] + count["kept"] + count["legal"]
    assert legal >= 40
    assert count["in part"] + count["refused"] + count["not_mla"] + count["none"] >= 20
    assert count["absorbed"] >= 0.85 * legal, count
