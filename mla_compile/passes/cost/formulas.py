"""Formulas, with sympy, for what one MLA site computes, moves and caches in each form.

The forms (one layer, one call with S queries per sequence against T cached tokens, batch B):

* ``expanded``: K and V of every cached token are computed from the latent, then plain attention follows. This is the
  trained form.
* ``held``: K and V of every cached token are in the cache, and plain attention reads them.
* ``chained``: an absorbed form. It computes q' = (c' W_qc) W_kc^T for query latents c', then attention over the latent
  rows, then W_v, then W_o.
* ``sparse``: the chained form, where each query attends only to J chosen keys (DeepSeek-V3.2, arXiv 2512.02556). The
  cost of choosing the keys is the same in every form and is left out.
* ``folded_query``, ``folded_output``, ``folded``: absorbed forms in which W_qc W_kc^T, W_v W_o, or both products are
  computed ahead of time.

Each form is a sequence of stages, and each stage counts multiply-adds, weight values and activation values. Everything
else in this module (FLOPs, bytes, marginal cost per cached token, break-evens) is derived from the stages.

FLOPs include the scores that a causal mask hides. Bytes include the weights once per call. Each activation is included
when it is written and when it is read. This also holds for K and V, because no compiler fuses a projection into
attention. Scores never leave the kernel. Source of the equations: DeepSeek-V2, arXiv 2405.04434, section 2.1 and
appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import sympy

from mla_compile.core.dims import Dims
from mla_compile.errors import InputError

Form = Literal["expanded", "held", "chained", "sparse", "folded_query", "folded_output", "folded"]
CacheKind = Literal["mha", "gqa", "mqa", "mla", "mla_expanded"]

# The symbols are real, not integer, because solve() must accept break-evens that are not whole numbers.
B, S, T, H, D, L, Q, N, R, V = sympy.symbols("B S T H D L Q N R V", positive=True)
A = sympy.Symbol("A", nonnegative=True)  # columns of the rotary key that are added to other columns of the key
G, d = sympy.symbols("G d", positive=True)  # KV heads of GQA; head width of MHA, GQA and MQA
K, Z = sympy.symbols("K Z", positive=True)  # for a part: how many heads have their own columns (K) or rows (Z)
E = sympy.Symbol("E", positive=True)  # bytes per element
J = sympy.Symbol("J", positive=True)  # the number of keys chosen for each query

DECODE = {S: 1}


@dataclass(frozen=True)
class Stage:
    """A step that has to end before the next step begins.

    ``projection``: the width (Q or D) of a projection outside the attention core. Folding replaces such projections.
    ``makes_kv``: whether the step makes K and V. It makes K and V for the whole buffer, even if attention reads only a
    slice of the buffer.
    """

    name: str
    multiply_adds: sympy.Expr
    weights: sympy.Expr
    activations: sympy.Expr
    launches: int = 1
    projection: Literal["Q", "D"] | None = None
    makes_kv: bool = False


@cache
def stages(form: Form) -> tuple[Stage, ...]:
    """Return the steps of one form, in order."""
    query = Stage("query projection", B * S * Q * H * N, Q * H * N, B * S * (Q + H * N), projection="Q")
    output = Stage("output projection", B * S * H * V * D, H * V * D, B * S * (H * V + D), projection="D")
    if form in ("expanded", "held"):
        columns = N + R - A + V
        made = B * T * (L + R + H * columns)
        # The two launches are the projection, and a copy that lays out V and K (with the shared rotary key) per head.
        expand = Stage("expand K and V", B * T * H * L * (N + V), H * L * (N + V), made, 2, makes_kv=True)
        attend = Stage("attention", B * S * T * H * columns, sympy.Integer(0), B * (S + T) * H * columns)
        return (query, *([expand] if form == "expanded" else []), attend, output)
    absorb = Stage("query into the latent", B * S * H * N * L, H * N * L, B * S * H * (N + L))
    keys, read = (J, S * J) if form == "sparse" else (T, T)  # keys per query, rows read by all queries
    moved = B * read * (L + R) + B * S * H * (2 * L + R)
    attend = Stage("attention", B * S * keys * H * (2 * L + R), sympy.Integer(0), moved)
    leave = Stage("values out of the latent", B * S * H * L * V, H * L * V, B * S * H * (L + V))
    folded_query = Stage("folded query", B * S * Q * H * L, Q * H * L, B * S * (Q + H * L), projection="Q")
    folded_output = Stage("folded output", B * S * H * L * D, H * L * D, B * S * (H * L + D), projection="D")
    before = (folded_query,) if form in ("folded_query", "folded") else (query, absorb)
    after = (folded_output,) if form in ("folded_output", "folded") else (leave, output)
    return (*before, attend, *after)


@cache
def part_stages(*, absorbed: bool) -> tuple[Stage, ...]:
    """Return the stages of a part of an attention: N columns per head that weights make from rows of L values.

    The columns belong to keys or to values. The symbol K is the number of heads that have their own columns (H, or the
    number of groups of GQA). Z is the number of heads that have their own rows (1 if all heads share one row). Costs
    that the expanded and the absorbed form share are left out.
    """
    if not absorbed:
        return (
            Stage("expand", B * T * K * L * N, K * L * N, B * T * (Z * L + K * N), 2, makes_kv=True),
            Stage("attention", B * S * T * H * N, sympy.Integer(0), B * (S * H + T * K) * N),
        )
    return (
        Stage("into or out of the rows", B * S * H * N * L, K * N * L, B * S * H * (N + L)),
        Stage("attention", B * S * T * H * L, sympy.Integer(0), B * T * Z * L + B * S * H * L),
    )


@cache
def part_gain() -> sympy.Expr:
    """Return the multiply-adds that absorbing a part (see :func:`part_stages`) saves per sequence.

    If K = H, the savings of two parts (keys and values) add up to the savings of MLA.
    """
    expanded, absorbed = (sympy.Add(*(s.multiply_adds for s in part_stages(absorbed=a))) for a in (False, True))
    return sympy.collect(sympy.expand((expanded - absorbed) / B), (S, T))


@cache
def written_stages() -> tuple[Stage, ...]:
    """Return the cost of writing out a fused attention: float32 scores and probabilities pass through memory."""
    return (Stage("scores in memory", sympy.Integer(0), sympy.Integer(0), 4 * B * S * T * H, 4),)


@cache
def flops(form: Form, *, projections: bool = False) -> sympy.Expr:
    """Return the FLOPs of one call, 2 per multiply-add.

    ``projections``: also count W_qc and W_o. The expanded and the chained form share these projections, and folding
    replaces them. Count the projections to compare a folded form with another form.
    """
    return 2 * sympy.Add(*(stage.multiply_adds for stage in _counted(form, projections=projections)))


@cache
def moved_bytes(form: Form) -> sympy.Expr:
    """Return the bytes that one call moves within the attention core, at E bytes per element."""
    return E * sympy.Add(*(stage.weights + stage.activations for stage in _counted(form, projections=False)))


@cache
def marginal_flops(form: Form) -> sympy.Expr:
    """Return the FLOPs that one more cached token adds to a decode step of one sequence."""
    return sympy.factor(sympy.diff(flops(form).subs(DECODE).subs(B, 1), T))


@cache
def marginal_bytes(form: Form) -> sympy.Expr:
    """Return the bytes that one more cached token adds to a decode step of one sequence."""
    return sympy.factor(sympy.diff(moved_bytes(form).subs(DECODE).subs(B, 1), T))


@cache
def cache_values(kind: CacheKind) -> sympy.Expr:
    """Return the cached values per token and layer (DeepSeek-V2, table 1). ``mla_expanded`` stores K and V per head."""
    table: dict[CacheKind, sympy.Expr] = {
        "mha": 2 * H * d,
        "gqa": 2 * G * d,
        "mqa": 2 * d,
        "mla": L + R,
        "mla_expanded": H * (N + R + V),
    }
    return table[kind]


@cache
def break_even_queries(*, long_context: bool = False) -> sympy.Expr:
    """Return the number of queries per sequence at which expanded and chained need equally many FLOPs.

    ``long_context``: whether to take the limit T -> oo. If the value is not positive, absorbing pays for any number of
    queries.
    """
    solution = _root(flops("expanded") - flops("chained"), S)
    return sympy.limit(solution, T, sympy.oo) if long_context else solution


@cache
def absorption_gain(form: Literal["chained", "sparse"] = "chained") -> sympy.Expr:
    """Return the multiply-adds that absorbing saves per sequence and head; positive if the absorbed form is cheaper.

    B and H cancel. For the chained form, R cancels too, so the sign depends only on S, T, L, N, V and A.
    """
    return sympy.collect(sympy.expand((flops("expanded") - flops(form)) / (2 * B * H)), (S, T))


def _root(expression: sympy.Expr, letter: sympy.Symbol) -> sympy.Expr:
    """Return the root of a polynomial of degree one in ``letter``. ``sympy.solve`` would take twenty times as long."""
    slope, rest = sympy.Poly(expression, letter).all_coeffs()
    return sympy.factor(-rest / slope)


def evaluate(expression: sympy.Expr, dims: Dims | None = None, **letters: float) -> float:
    """Evaluate a formula for these sizes, e.g. ``evaluate(flops("chained"), dims, B=1, S=1, T=8192)``.

    A whole number is returned as ``int``. Raises :class:`InputError` if a letter of the formula has no value.
    """
    values: dict[str, float] = {"A": 0}
    values |= {} if dims is None else {k: v for k, v in vars(dims).items() if v is not None}
    values.update(letters)
    missing = sorted(s.name for s in expression.free_symbols if s.name not in values)
    if missing:
        raise InputError(f"no value for {', '.join(missing)} in {expression}; pass it by name or in dims")
    result = expression.subs({s: values[s.name] for s in expression.free_symbols})
    return int(result) if result.is_Integer else float(result)


def _counted(form: Form, *, projections: bool) -> tuple[Stage, ...]:
    return tuple(stage for stage in stages(form) if projections or stage.projection is None)
