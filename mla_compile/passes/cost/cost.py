"""Chooses the cheapest form of an MLA site on a device. The counts are in :mod:`~mla_compile.passes.cost.formulas`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Literal, get_args

import sympy

from mla_compile.core import quantities
from mla_compile.core.choices import Fold, Forms
from mla_compile.core.dims import Dims
from mla_compile.errors import OptionError, nearest
from mla_compile.passes.cost import formulas
from mla_compile.passes.cost.formulas import Form

ChosenForm = Literal["expanded", "chained", "folded"]  # the last two may be sparse

LONG_CONTEXT = 32768
"""The number of cached tokens T that is assumed if T is unknown.

The choice of a form matters most in a long context, where the cost ratio of two forms hardly depends on T.
"""

_REMEMBERED = 4096
"""The most estimates that each cache keeps. The layers and calls of a model have only a few different sizes."""


@dataclass(frozen=True)
class DeviceModel:
    """A rough description of a machine: peak dense FLOP/s, memory bytes/s, and seconds lost per kernel or op."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    launch_s: float


DEVICES: Mapping[str, DeviceModel] = MappingProxyType(
    {
        # These are orders of magnitude, not measurements: a mid-size server CPU, and a data-centre GPU in bfloat16 at
        # about half of its peak. Only ratios matter for the choice of a form. Another machine needs its own model.
        "cpu": DeviceModel("cpu", flops_per_s=5e11, bytes_per_s=5e10, launch_s=2e-6),
        "cuda": DeviceModel("cuda", flops_per_s=5e14, bytes_per_s=3e12, launch_s=2e-6),
    }
)


@dataclass(frozen=True)
class Choice:
    """The form chosen for one call.

    ``seconds`` holds the estimates for ``expanded``, ``chained`` and, if a fold was chosen, ``folded``. ``sparse``:
    whether attention reads only the keys chosen for each query. The estimates of the absorbed forms take this into
    account.
    """

    form: ChosenForm
    seconds: Mapping[str, float]
    reason: str
    fold_query: bool = False
    fold_output: bool = False
    sparse: bool = False

    @property
    def absorbed(self) -> bool:
        """Whether the form is one of the two absorbed forms."""
        return self.form != "expanded"


def default_device(kind: str) -> DeviceModel:
    """Return the description for a ``torch.device.type``. An unknown kind is treated like ``cuda``."""
    return DEVICES.get(kind, DEVICES["cuda"])


def choose(
    dims: Dims,
    *,
    B: int,
    S: int,
    T: int | None,
    element_bytes: int,
    device: DeviceModel,
    forms: Forms = "auto",
    fold: Fold = "auto",
    can_fold_query: bool = False,
    can_fold_output: bool = False,
    made: int | None = None,
    chosen: int | None = None,
) -> Choice:
    """Choose the cheapest form for B sequences of S queries against T cached tokens.

    If T is None, a long context is assumed. ``made``: the number of tokens for which K and V are made, if attention
    reads only a slice of these tokens; 0 if the cache holds K and V. ``chosen``: the number of keys per query, if a
    sparse index list limits the keys.

    The time is the sum over all stages of max(FLOPs / peak, bytes / bandwidth), plus launches. First, the expanded and
    the chained form are compared, which have equally many launches. Then the chained form is compared with folding the
    query side, and with folding the output side. Folding needs fewer launches. A side is folded only if the caller
    allows this and the side's width (Q or D) is known. Raises :class:`OptionError` for an unknown ``forms`` or
    ``fold``.
    """
    _check_option("forms", forms, get_args(Forms))
    _check_option("fold", fold, get_args(Fold))
    context = LONG_CONTEXT if T is None else T
    return _choose(
        dims,
        B,
        S,
        context,
        _made(context, made),
        None if chosen is None else min(chosen, context),
        element_bytes,
        device,
        forms,
        fold,
        can_fold_query=can_fold_query and dims.Q is not None,
        can_fold_output=can_fold_output and dims.D is not None,
    )


@lru_cache(maxsize=_REMEMBERED)
def _choose(
    dims: Dims,
    B: int,
    S: int,
    T: int,
    made: int,
    chosen: int | None,
    element_bytes: int,
    device: DeviceModel,
    forms: Forms,
    fold: Fold,
    *,
    can_fold_query: bool,
    can_fold_output: bool,
) -> Choice:
    def time_of(form: Form) -> float:
        return seconds(form, dims, B=B, S=S, T=T, made=made, J=chosen, element_bytes=element_bytes, device=device)

    # Folding is left out of the first comparison, because absorption has to pay without folding.
    expanded, dense = time_of("expanded"), time_of("chained")
    chained = dense if chosen is None else min(dense, time_of("sparse"))
    sparse = chained < dense or (chosen is not None and S == 1)
    saved = dense - chained  # the time that sparse attention saves, also in the folded forms
    estimates = {"expanded": expanded, "chained": chained}
    told = _told(S, T, made, device, chained, expanded, chosen if sparse else None)
    if forms == "expanded" or (forms == "auto" and expanded <= chained):
        cheaper = "expanding K and V is cheaper" if made else "reading K and V, which the cache holds, is cheaper"
        why = 'forms="expanded"' if forms == "expanded" else cheaper
        return Choice("expanded", MappingProxyType(estimates), f"{why}: {told}")

    why = 'forms="absorbed"' if forms == "absorbed" else "absorbing is cheaper"
    reason = f"{why}: {told}"
    fold_query = can_fold_query and _folds(fold, time_of("folded_query"), dense)
    fold_output = can_fold_output and _folds(fold, time_of("folded_output"), dense)
    if not (fold_query or fold_output):
        return Choice("chained", MappingProxyType(estimates), reason, sparse=sparse)
    folded: Form = "folded" if fold_query and fold_output else "folded_query" if fold_query else "folded_output"
    estimates["folded"] = time_of(folded) - saved
    sides = " and ".join(["W_q W_k"] * fold_query + ["W_v W_o"] * fold_output)
    reason += f"; with {sides} folded about {quantities.seconds(estimates['folded'])}"
    return Choice("folded", MappingProxyType(estimates), reason, fold_query, fold_output, sparse)


def seconds(
    form: Form,
    dims: Dims,
    *,
    B: int,
    S: int,
    T: int,
    element_bytes: int,
    device: DeviceModel,
    made: int | None = None,
    J: int | None = None,
) -> float:
    """Return the roofline estimate of one call, in seconds.

    ``J``: the number of chosen keys, for the sparse form. Projections whose width (Q, D) is unknown are left out of all
    forms.
    """
    known = {name: size for name, size in vars(dims).items() if size is not None}
    stages = tuple(s for s in formulas.stages(form) if s.projection is None or s.projection in known)
    letters = {"B": B, "S": S, "T": T, **({} if J is None else {"J": J}), **known}
    return _stage_seconds(stages, letters, element_bytes, device, made)


def break_even_S(dims: Dims, T: int | None = None) -> float:
    """Return the number of queries per call up to which absorbing needs fewer FLOPs, at T cached tokens.

    If T is None, a long context is assumed. The result is ``inf`` if absorbing always needs fewer FLOPs.
    """
    formula = formulas.break_even_queries(long_context=T is None)
    numerator, denominator = sympy.fraction(sympy.together(formula))
    letters: dict[str, float] = {} if T is None else {"T": T}
    below, above = formulas.evaluate(denominator, dims, **letters), formulas.evaluate(numerator, dims, **letters)
    if below < 0:  # sympy may write the fraction with both signs flipped
        below, above = -below, -above
    return above / below if below != 0 and above > 0 else math.inf


def decode_flops(dims: Dims, form: Form) -> int:
    """Return the FLOPs of a decode step per context token: 2H(2L+R) absorbed, 2H(L(N+V)+N+R-A+V) expanded."""
    return int(formulas.evaluate(formulas.marginal_flops(form), dims))


def decode_bytes(dims: Dims, form: Form, element_bytes: int) -> int:
    """Return the bytes that a decode step moves per context token."""
    return int(formulas.evaluate(formulas.marginal_bytes(form), dims, E=element_bytes))


@dataclass(frozen=True)
class AbsorbedColumns:
    """Keys or values of an attention, or some of their columns, that weights make from narrow rows.

    ``columns``: the number of columns per head. ``made``: how many of the ``heads`` heads have their own columns (with
    GQA, one per group). ``width``: the number of values in a row. ``rows``: the number of rows of a token (1 if all
    heads share one row).
    """

    side: Literal["keys", "values"]
    heads: int
    width: int
    columns: int
    made: int
    rows: int = 1

    @property
    def letters(self) -> dict[str, int]:
        return {"H": self.heads, "L": self.width, "N": self.columns, "K": self.made, "Z": self.rows}


@dataclass(frozen=True)
class SiteCost:
    """The sizes that decide between the forms in one call: numbers, or expressions of the graph's shape symbols.

    ``parts``: the parts that are absorbed, if the attention is not absorbed as a whole. ``chosen``: the number of keys
    chosen for each query.
    """

    dims: Dims
    B: int | sympy.Expr
    S: int | sympy.Expr
    T: int | sympy.Expr
    parts: tuple[AbsorbedColumns, ...] = ()
    chosen: int | sympy.Expr | None = None


def part_break_even(parts: Sequence[AbsorbedColumns]) -> float:
    """Return the number of queries per call up to which absorbing all ``parts`` needs fewer FLOPs in a long context."""
    per_token = sympy.diff(sum(part_gain(p) for p in parts), formulas.T)
    # If there is no solution, the gain per token does not depend on S, so the same form is cheaper for every S.
    (solution,) = sympy.solve(per_token, formulas.S) or (sympy.oo,)
    return float(solution) if solution > 0 else math.inf


def part_gain(part: AbsorbedColumns) -> sympy.Expr:
    """Return the multiply-adds that absorbing ``part`` saves per sequence, as a function of S and T."""
    return formulas.part_gain().subs({getattr(formulas, name): value for name, value in part.letters.items()})


def choose_parts(
    parts: Sequence[AbsorbedColumns],
    *,
    writes: bool,
    B: int,
    S: int,
    T: int | None,
    element_bytes: int,
    device: DeviceModel,
    forms: Forms = "auto",
    made: int | None = None,
) -> Choice:
    """Decide whether absorbing ``parts`` is cheaper than expanding them.

    Costs that both forms share are left out. ``writes``: whether a fused attention has to be written out first.
    ``made``: as in :func:`choose`.
    """
    context = LONG_CONTEXT if T is None else T
    whole = _made(context, made)
    expanded, chained = (
        sum(_part_seconds(p, B, S, context, whole, element_bytes, device, absorbed=absorbed) for p in parts)
        for absorbed in (False, True)
    )
    if writes:
        # Written-out scores are float32, four bytes, whatever the model's dtype.
        letters = {"B": B, "S": S, "T": context, "H": parts[0].heads}
        chained += _stage_seconds(formulas.written_stages(), letters, 4, device)
    estimates = MappingProxyType({"expanded": expanded, "chained": chained})
    sides = " and ".join(dict.fromkeys(p.side for p in parts))
    told = _told(S, context, whole, device, chained, expanded)
    if forms == "expanded" or (forms == "auto" and expanded <= chained):
        return Choice("expanded", estimates, f"expanding the {sides} is cheaper: {told}")
    why = 'forms="absorbed"' if forms == "absorbed" else f"absorbing the {sides} is cheaper"
    return Choice("chained", estimates, f"{why}: {told}")


@lru_cache(maxsize=_REMEMBERED)
def _part_seconds(
    part: AbsorbedColumns, B: int, S: int, T: int, made: int, element_bytes: int, device: DeviceModel, *, absorbed: bool
) -> float:
    letters = {"B": B, "S": S, "T": T, **part.letters}
    return _stage_seconds(formulas.part_stages(absorbed=absorbed), letters, element_bytes, device, made)


def _stage_seconds(
    stages: tuple[formulas.Stage, ...],
    letters: Mapping[str, int],
    element_bytes: int,
    device: DeviceModel,
    made: int | None = None,
) -> float:
    """Return the sum over stages of the roofline estimate: the larger of compute and memory time, plus the launches."""
    numbers = _stage_numbers(stages, tuple(letters))
    made = letters["T"] if made is None else made
    attended, everything = (numbers(**{**letters, "T": tokens}) for tokens in (letters["T"], made))
    total = 0.0
    for index, stage in enumerate(stages):
        if stage.makes_kv and not made:
            continue
        operations, values = (everything if stage.makes_kv else attended)[index]
        busy = max(operations / device.flops_per_s, values * element_bytes / device.bytes_per_s)
        total += busy + stage.launches * device.launch_s
    return total


def _told(
    S: int, context: int, made: int, device: DeviceModel, chained: float, expanded: float, chosen: int | None = None
) -> str:
    queries = "1 query" if S == 1 else f"{S} queries"
    times = f"absorbed about {quantities.seconds(chained)}, expanded about {quantities.seconds(expanded)}"
    of = "" if chosen is None else f"{chosen:,} chosen ones of "
    return f"{queries} against {of}{_tokens(context, made)} on {device.name}, {times}"


def _tokens(context: int, made: int) -> str:
    if made > context:
        return f"{context:,} of {made:,} cached tokens, all of which are expanded,"
    return f"{context:,} cached tokens" + (" (a long context)" if context == LONG_CONTEXT else "")


def _made(context: int, made: int | None) -> int:
    return 0 if made == 0 else max(context, made or 0)


def _folds(fold: Fold, folded: float, chained: float) -> bool:
    return fold == "always" or (fold == "auto" and folded < chained)


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} is {value!r}, expected one of {', '.join(known)}{nearest(value, known)}")


@cache
def _stage_numbers(
    stages: tuple[formulas.Stage, ...], letters: tuple[str, ...]
) -> Callable[..., tuple[tuple[float, float], ...]]:
    """Return a compiled function of ``letters`` that gives the FLOPs and the number of moved values of each stage."""
    counts = tuple((2 * stage.multiply_adds, stage.weights + stage.activations) for stage in stages)
    function: Callable[..., tuple[tuple[float, float], ...]] = sympy.lambdify(
        [getattr(formulas, name) for name in letters], counts, modules="math"
    )
    return function
