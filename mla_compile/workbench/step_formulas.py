"""Formulas for a pass on several machines (a decode step, or reading prompts): FLOPs, bytes, link traffic.

A pass computes S tokens of each of B users: one token, one token and its drafts, or all tokens of a prompt. A step
reads each user's cache once. If keys are chosen, a step reads J rows per user, as if all S tokens chose equal keys. A
prompt attends causally, in the form that takes fewer FLOPs: expanded, or absorbed with each token's J keys.

There are four ways to share B users with T tokens each among P machines:

* ``replicated``: each machine has H/P heads of all users. The latent row has no heads to split, so each machine holds
  all rows.
* ``context``: groups of C (dcp) machines split the tokens; each machine has HC/P heads and T/C tokens of all users.
* ``data``: each machine has all heads of B/P users, and thus all weights of the heads. The rest of the model is split.
* ``experts``: each machine has B/P users, all weights outside routed experts, and a share of the routed experts. A
  token is sent to each machine that has one of the token's k experts, and the sums are sent back. On another node, one
  machine receives the token and distributes it. Every layer is assumed to have experts.

The machines form Q nodes, which a slower network connects. Data that all machines exchange crosses this network once
per node, and each machine of a node sends an equal share.

In all layouts except ``experts``, the vocabulary is split: embeddings are summed over the machines, and each machine
gets all logits. In ``data``, the tokens of all users are gathered, and each machine gets only its own users' logits.

Queries may choose the keys that they attend to (DeepSeek-V3.2, arXiv 2512.02556). Attention then reads J rows, but all
T tokens are scored first to choose these rows. The cost of scoring is counted separately. The heads that score are not
split, because each machine needs the whole top-k list. In ``context``, each machine chooses among its own tokens, and
the lists are merged.

Prompts are not split by context. In ``context``, machines compute their heads over the whole prompt, like in
``replicated``, and keep only their share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import sympy

from mla_compile.passes.cost import formulas
from mla_compile.passes.cost.formulas import B, E, G, H, J, L, N, R, S, T

Layout = Literal["replicated", "context", "data", "experts"]
LABELS: dict[Layout, str] = {
    "replicated": "cache replicated",
    "context": "cache sharded by context",
    "data": "data-parallel attention",
    "experts": "data parallel, experts split",
}

P, C = sympy.symbols("P C", positive=True)  # machines that share a model; machines that share a context
Q = sympy.Symbol("Q", positive=True)  # nodes of machines
K, V_ = sympy.symbols("K V", positive=True)  # widths of a key head and a value head without latent rows
O = sympy.Symbol("O", positive=True)  # noqa: E741  tokens per user whose logits are computed
D, A = sympy.symbols("D A", positive=True)  # model width; bytes of an activation on a link
N_v = sympy.Symbol("N_v", nonnegative=True)  # width of the logits
A_x = sympy.Symbol("A_x", positive=True)  # bytes of an activation sent to an expert
W, W_h, X = sympy.symbols("W W_h X", positive=True)  # weights outside experts, of heads, of experts
n, k = sympy.symbols("n k", positive=True)  # routed experts per layer, and experts per token
E_w, E_h, E_x = sympy.symbols("E_w E_h E_x", positive=True)  # bytes per weight: outside experts, of heads, of experts
F, Y = sympy.symbols("F Y", positive=True)  # choosing keys: FLOPs per token, and values read per token
Y_b, Y_m = sympy.symbols("Y_b Y_m", nonnegative=True)  # bytes per user that are not rows: at T, and at most
M = sympy.Symbol("M", positive=True)  # 1 if an attention chooses its keys, else 0
U, Z = sympy.symbols("U Z", positive=True)  # bytes of W_kc and W_v: dequantized; stored, but no longer read

MEANING = {
    B: "users",
    S: "tokens per user in a pass",
    O: "tokens of these whose logits are computed",
    T: "tokens of context per user",
    H: "query heads",
    G: "key heads",
    L: "latent width",
    R: "rotary width",
    N: "unrotated key width per head",
    K: "key width per head",
    V_: "value width per head",
    D: "model width",
    N_v: "vocabulary",
    P: "machines that share the model (tp)",
    C: "machines that share a context (dcp)",
    E: "bytes per cached value",
    E_w: "bytes per weight outside routed experts",
    E_h: "bytes per weight from, into and out of heads",
    E_x: "bytes per weight of routed experts",
    U: "bytes of dequantized W_kc and W_v",
    Z: "bytes of W_kc and W_v as stored, if they are dequantized",
    Q: "nodes that hold the machines",
    A: "bytes per activation on a link",
    A_x: "bytes per activation sent to an expert",
    W: "weights outside routed experts",
    W_h: "weights from, into and out of heads",
    X: "weights of routed experts",
    n: "routed experts per layer",
    k: "routed experts per token",
    J: "tokens that a query attends to",
    F: "FLOPs per token of context for choosing them",
    Y: "values read per token of context for choosing them, all layers",
    Y_b: "bytes of a user's tokens without a row and of state, all layers",
    Y_m: "the most of these bytes up to T tokens",
    M: "1 if an attention chooses its keys, 0 if it uses another's list",
}


def _attention(form: formulas.Form) -> formulas.Stage:
    found = next(stage for stage in formulas.stages(form) if stage.name == "attention")
    # Assume that no rotary columns are added to other key columns: ``formulas.A`` is the number of added columns.
    alone = {what: getattr(found, what).subs(formulas.A, 0) for what in ("multiply_adds", "activations")}
    return replace(found, **alone)


@cache
def core(*, latent: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Return FLOPs and bytes of one layer's decode attention on a single machine."""
    if latent:
        stage, rows = _attention("chained"), {T: J}
        return 2 * stage.multiply_adds.subs(rows), E * stage.activations.subs(rows)
    return 2 * B * S * T * H * (K + V_), E * (B * T * G + B * S * H) * (K + V_)


@cache
def prompt_core(*, latent: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Return FLOPs and bytes for prompts. Token i of S attends to i keys, or to at most J keys if keys are chosen."""
    keys, chosen = (S + 1) / 2, J - J * (J - 1) / (2 * S)  # averages over the tokens
    if latent:
        expanded, absorbed = _attention("expanded"), _attention("sparse")
        flops = sympy.Min(expanded.multiply_adds.subs(T, keys), absorbed.multiply_adds.subs(J, chosen))
        once = (stage.activations.subs(T, S) for stage in (expanded, _attention("chained")))
        return 2 * flops, E * sympy.Min(*once)
    return 2 * B * S * keys * H * (K + V_), E * B * S * (G + H) * (K + V_)


def cache_values(*, latent: bool) -> sympy.Expr:
    """Return the cached values per token and layer."""
    return formulas.cache_values("mla") if latent else G * (K + V_)


def share(expression: sympy.Expr, layout: Layout) -> sympy.Expr:
    """Convert a quantity for a machine that does all the work to the share of one machine in a layout."""
    taken = {
        "replicated": {H: H / P, G: sympy.Max(1, G / P)},
        "context": {H: H * C / P, G: sympy.Max(1, G * C / P), T: T / C, J: J / C},
        "data": {B: sympy.ceiling(B / P)},
        "experts": {B: sympy.ceiling(B / P)},
    }
    return expression.subs(taken[layout], simultaneous=True)


@cache
def expressions(layout: Layout, *, latent: bool, prompt: bool = False) -> dict[str, sympy.Expr]:
    """Return every quantity of one layout, per machine. Quantities of attention and network are per layer.

    If ``prompt``, the quantities are for a pass over whole prompts (S is T) instead of a decode step.
    """
    if prompt and layout == "context":
        layout = "replicated"
    flops, moved = prompt_core(latent=latent) if prompt else core(latent=latent)
    touched = X * (1 - (1 - k / n) ** (B * S))  # experts with at least one token, if all experts are equally likely
    heads, dense = (1 if layout in ("data", "experts") else 1 / P), (1 if layout == "experts" else 1 / P)
    network, between = _sent(layout, latent=latent)
    vocabulary, vocabulary_between = _sent_for_vocabulary(layout)
    stored, besides = E * T * cache_values(latent=latent), E * T * Y
    return {
        "attention FLOPs": share(flops, layout),
        "attention bytes": share(moved, layout),
        "choosing FLOPs": share(F * B * S * ((S + 1) / 2 if prompt else T), layout),
        "choosing bytes": share(B * besides, layout),
        "cache bytes per user": stored if by_user(layout) else share(stored, layout),
        "bytes to choose by, per user": besides if by_user(layout) else share(besides, layout),
        "bytes beside rows, per user": Y_b,  # split neither by heads nor by tokens
        "bytes beside rows, per user, at most": Y_m,
        "weight bytes": (E_w * W - E_h * W_h) * dense + E_x * X / P + (E_h * W_h + U) * heads,
        "weight bytes read": (E_w * W - E_h * W_h) * dense + E_x * touched / P + (E_h * W_h + U - Z) * heads,
        "weight FLOPs": _multiplied(layout),
        "network bytes": network,
        "network bytes between nodes": between,
        "network bytes of the vocabulary": vocabulary,
        "network bytes of the vocabulary between nodes": vocabulary_between,
    }


def _multiplied(layout: Layout) -> sympy.Expr:
    """Return the FLOPs of weights.

    A machine applies whole weights to its own users, and split weights to all users.
    """
    own = sympy.ceiling(B / P)
    logits, others, experts = O * D * N_v, S * (W - D * N_v), S * X * k / n
    if layout == "experts":
        return 2 * own * (others + logits) + 2 * B * experts / P
    whole = S * W_h if layout == "data" else sympy.Integer(0)
    return 2 * own * whole + 2 * B * (others + logits + experts - whole) / P


def by_user(layout: Layout) -> bool:
    """Whether each machine has all heads of its own users, and alone holds their caches."""
    return layout in ("data", "experts")


def _sent(layout: Layout, *, latent: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the bytes that a machine sends for a layer: in total, and to other nodes."""
    if layout == "experts":
        # Each of BS/P tokens is sent to every other machine that has one of the token's k experts. All experts are
        # equally likely.
        to_experts = [B * S / P * (count - 1) * (1 - (1 - 1 / count) ** k) * D * (A_x + A) for count in (P, Q)]
        return to_experts[0], to_experts[1]
    times = 1 if layout == "data" else 2
    network = times * 2 * (P - 1) / P * B * S * D * A  # all-reduce, or all-gather and reduce-scatter, of all tokens
    between = times * 2 * (Q - 1) / P * B * S * D * A
    if layout == "context":
        row, out = (L + R, L) if latent else (K, V_)
        exchanged = B * S * ((H * C / P) * (row + out) * A + M * C * J * 8)  # each machine's best keys: score and index
        network += (C - 1) / C * exchanged
        between += (1 - 1 / sympy.Max(1, C * Q / P)) * exchanged
    return network, between


def _sent_for_vocabulary(layout: Layout) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the bytes that a machine sends for embeddings and logits of a pass: in total, and to other nodes."""
    if layout == "experts":  # each machine has the whole vocabulary
        return sympy.Integer(0), sympy.Integer(0)
    logits = B * O * N_v * A / (P if layout == "data" else 1)  # each machine gets its share of the columns
    summed = 2 * B * S * D * A
    if layout == "data":
        return (P - 1) / P * (summed + logits), (Q - 1) / P * summed + (Q - 1) / Q * logits
    return (P - 1) / P * (summed + logits), (Q - 1) / P * (summed + logits)


def number(layout: Layout, what: str, values: Mapping[str, float], *, latent: bool, prompt: bool = False) -> float:
    """Evaluate one of the :func:`expressions`. ``values`` maps the letters of :data:`MEANING` to numbers."""
    return float(_function(layout, what, latent=latent, prompt=prompt)(*(values[str(s)] for s in MEANING)))


@cache
def _function(layout: Layout, what: str, *, latent: bool, prompt: bool) -> Callable[..., float]:
    expression = expressions(layout, latent=latent, prompt=prompt)[what]
    function: Callable[..., float] = sympy.lambdify(list(MEANING), expression, modules="math")
    return function
