"""Formulas of a decode step on several machines: FLOPs, bytes, and what goes over the links.

There are four ways to share B users with T tokens each among P machines:

* ``replicated``: each has H/P heads of all users; the latent row has no heads to split, so each holds all rows.
* ``context``: groups of C (dcp) split the tokens; each has HC/P heads and T/C tokens of all users.
* ``data``: each has all heads of B/P users, hence all weights of the heads; the rest of the model stays split.
* ``experts``: each has B/P users and all weights but routed experts, of which it has its part. A token goes to each of
  the machines that have one of its k experts, and the sums come back; a machine of another node passes it on to the
  others there. Every layer is taken to have experts.

The machines lie on Q nodes, between which a slower network runs. What all machines exchange goes over it once for each
node, in equal parts from all machines of a node.

Where the rest of the model is split, so is its vocabulary: embeddings are summed over the machines, and each gets the
logits of all. With whole users on each (``data``) the tokens of all are gathered, and each gets the logits of its own.

Where queries choose the keys that they attend to (DeepSeek-V3.2, arXiv 2512.02556), an attention reads J rows, and what
chooses them looks at all T tokens before it. It is counted apart: its heads are not split (each machine needs the whole
list), and in a split context each chooses among its own tokens and the lists are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import sympy

from mla_compile.passes.decide import formulas
from mla_compile.passes.decide.formulas import B, E, G, H, J, L, R, T

Layout = Literal["replicated", "context", "data", "experts"]
LABELS: dict[Layout, str] = {
    "replicated": "cache replicated",
    "context": "cache sharded by context",
    "data": "data-parallel attention",
    "experts": "data parallel, experts split",
}

P, C = sympy.symbols("P C", positive=True)  # machines that share a model, and that share a context
Q = sympy.Symbol("Q", positive=True)  # nodes that the machines lie on
K, V_ = sympy.symbols("K V", positive=True)  # widths of a key head and a value head without latent rows
D, A = sympy.symbols("D A", positive=True)  # model width; bytes of an activation on a link
N_v = sympy.Symbol("N_v", nonnegative=True)  # width of the logits
A_x = sympy.Symbol("A_x", positive=True)  # bytes of an activation on its way to an expert
W, W_h, X = sympy.symbols("W W_h X", positive=True)  # weights: outside experts, of heads, of experts
n, k = sympy.symbols("n k", positive=True)  # routed experts in a layer, and how many a token takes
E_w, E_h, E_x = sympy.symbols("E_w E_h E_x", positive=True)  # bytes per weight: outside experts, of heads, of experts
F, Y = sympy.symbols("F Y", positive=True)  # to choose keys: FLOPs per token, and values read per token in all layers
M = sympy.Symbol("M", positive=True)  # 1 where an attention chooses its keys, else 0
U, Z = sympy.symbols("U Z", positive=True)  # bytes of W_kc and W_v: dequantized and kept, and what then is not read

MEANING = {
    B: "users",
    T: "tokens of context per user",
    H: "query heads",
    G: "key heads",
    L: "latent width",
    R: "rotary width",
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
    Z: "bytes of W_kc and W_v as stored, where they are dequantized",
    Q: "nodes that the machines lie on",
    A: "bytes per activation on a link",
    A_x: "bytes per activation on its way to an expert",
    W: "weights outside routed experts",
    W_h: "weights from, into and out of heads",
    X: "weights of routed experts",
    n: "routed experts per layer",
    k: "routed experts per token",
    J: "tokens that a query attends to",
    F: "FLOPs per token of context to choose them",
    Y: "values read per token of context to choose them, all layers",
    M: "1 where an attention chooses, 0 where it takes another's list",
}


@cache
def core(latent: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """FLOPs and bytes of one layer's decode attention on a machine that has all of it."""
    if latent:
        (stage,) = (s for s in formulas.stages("sparse") if s.name == "attention")
        return 2 * stage.multiply_adds.subs(formulas.DECODE), E * stage.activations.subs(formulas.DECODE)
    return 2 * B * T * H * (K + V_), E * (B * T * G + B * H) * (K + V_)


def cache_values(latent: bool) -> sympy.Expr:
    """Cached values per token and layer."""
    return formulas.cache_values("mla") if latent else G * (K + V_)


def share(expression: sympy.Expr, layout: Layout) -> sympy.Expr:
    """The share of one machine in a layout."""
    taken = {
        "replicated": {H: H / P, G: sympy.Max(1, G / P)},
        "context": {H: H * C / P, G: sympy.Max(1, G * C / P), T: T / C, J: J / C},
        "data": {B: sympy.ceiling(B / P)},
        "experts": {B: sympy.ceiling(B / P)},
    }
    return expression.subs(taken[layout], simultaneous=True)


@cache
def expressions(layout: Layout, latent: bool) -> dict[str, sympy.Expr]:
    """Every quantity of one layout, per machine; attention and network are those of one layer."""
    flops, moved = core(latent)
    touched = X * (1 - (1 - k / n) ** B)  # of experts that at least one of B tokens takes, if all are equally likely
    heads, dense = (1 if layout in ("data", "experts") else 1 / P), (1 if layout == "experts" else 1 / P)
    network, between = _sent(layout, latent)
    vocabulary, vocabulary_between = _sent_for_vocabulary(layout)
    stored, besides = E * T * cache_values(latent), E * T * Y
    return {
        "attention FLOPs": share(flops, layout),
        "attention bytes": share(moved, layout),
        "choosing FLOPs": share(F * B * T, layout),
        "choosing bytes": share(B * besides, layout),
        "cache bytes per user": stored if by_user(layout) else share(stored, layout),
        "bytes to choose by, per user": besides if by_user(layout) else share(besides, layout),
        "weight bytes": (E_w * W - E_h * W_h) * dense + E_x * X / P + (E_h * W_h + U) * heads,
        "weight bytes read": (E_w * W - E_h * W_h) * dense + E_x * touched / P + (E_h * W_h + U - Z) * heads,
        "weight FLOPs": 2 * B * (W + X * k / n) / P,
        "network bytes": network,
        "network bytes between nodes": between,
        "network bytes of the vocabulary": vocabulary,
        "network bytes of the vocabulary between nodes": vocabulary_between,
    }


def by_user(layout: Layout) -> bool:
    """Whether each machine has all heads of its own users, whose caches no other machine holds."""
    return layout in ("data", "experts")


def _sent(layout: Layout, latent: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes that a machine sends for a layer, in all and to other nodes."""
    if layout == "experts":
        # Each of B/P tokens to every other machine that has one of its k experts, all of them equally likely.
        to_experts = [B / P * (count - 1) * (1 - (1 - 1 / count) ** k) * D * (A_x + A) for count in (P, Q)]
        return to_experts[0], to_experts[1]
    times = 1 if layout == "data" else 2
    network = times * 2 * (P - 1) / P * B * D * A  # all-reduce, or all-gather and reduce-scatter, of B tokens
    between = times * 2 * (Q - 1) / P * B * D * A
    if layout == "context":
        row, out = (L + R, L) if latent else (K, V_)
        exchanged = B * ((H * C / P) * (row + out) * A + M * J * 8)  # of what is chosen: score and index
        network += (C - 1) / C * exchanged
        between += (1 - 1 / sympy.Max(1, C * Q / P)) * exchanged
    return network, between


def _sent_for_vocabulary(layout: Layout) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes that a machine sends for the embeddings and the logits of a step, in all and to other nodes."""
    if layout == "experts":  # each has all of the vocabulary
        return sympy.Integer(0), sympy.Integer(0)
    logits = B * N_v * A / (P if layout == "data" else 1)  # of all machines' columns, what one gets
    summed = 2 * B * D * A
    if layout == "data":
        return (P - 1) / P * (summed + logits), (Q - 1) / P * summed + (Q - 1) / Q * logits
    return (P - 1) / P * (summed + logits), (Q - 1) / P * (summed + logits)


def number(layout: Layout, latent: bool, what: str, values: Mapping[str, float]) -> float:
    """The value of one of the :func:`expressions`; ``values`` by the names of the letters of :data:`MEANING`."""
    return float(_function(layout, latent, what)(*(values[str(s)] for s in MEANING)))


@cache
def _function(layout: Layout, latent: bool, what: str) -> Callable[..., float]:
    function: Callable[..., float] = sympy.lambdify(list(MEANING), expressions(layout, latent)[what], modules="math")
    return function
