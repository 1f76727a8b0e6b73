"""Finds library attention operators, and adds a stand-in for each that can be written as plain attention."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.flex import is_flex
from mla_compile.passes.fused.flex import plain_flex
from mla_compile.passes.fused.library import INERT, OF_TORCH_BY_NAME, Fused, operator_of
from mla_compile.passes.fused.plain import Plain, UntoldError, capped, write
from mla_compile.passes.fused.written import functionalized
from mla_compile.passes.ir.graph import SPELLED, TOLD, args_of, argument, is_tensor, packet, shape, val
from mla_compile.passes.ir.schema import called_name, named_arguments
from mla_compile.passes.ir.sizes import same, same_sizes
from mla_compile.passes.ir.stand_in import CORE, REFUSED, STANDS_FOR, WAITS, stand_in
from mla_compile.passes.ir.walk import reachable

aten = torch.ops.aten


def has_fused(graph: fx.Graph) -> bool:
    """Whether ``graph`` has a known attention operator of a library, or a call of flex_attention."""
    return has_flex(graph) or any(_known(node) is not None for node in graph.nodes)


def has_flex(graph: fx.Graph) -> bool:
    return any(map(is_flex, graph.nodes))


def add_plain_attention(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Add a stand-in for the result of every known operator; return how many were added.

    An operator that is not a plain attention stays, with the reason in its metadata (``REFUSED``).
    """
    found = 0
    alive = set(reachable([graph.output_node()], lambda n: n.all_input_nodes))
    for call in list(graph.nodes):
        name = "flex_attention" if is_flex(call) else called_name(call)
        try:
            told = plain_flex(call, alive, fake_mode) if is_flex(call) else _library(call, fake_mode)
        except UntoldError as why:
            call.meta[REFUSED] = why.code, f"{name}: {why}"
            continue
        if told is not None:
            _stand_for(told[0], name, told[1], fake_mode)
            found += 1
    return found


def _library(call: fx.Node, fake_mode: FakeTensorMode | None) -> tuple[fx.Node, Plain] | None:
    """Return the result of a library's operator and the plain attention that computes it; None for other nodes."""
    known = _known(call)
    if known is None:
        return None
    plain = _plain(_told(call, known, fake_mode), known)
    return _only_result(call), plain


def _stand_for(result: fx.Node, name: str, plain: Plain, fake_mode: FakeTensorMode | None) -> None:
    written = write(result, plain, fake_mode)
    for node in written.core:
        node.meta[SPELLED] = name
        if plain.first and (plain.left, plain.right) != (None, None):
            node.meta[TOLD] = _seen_from_the_first(plain)
    new = written.builder.call(stand_in, written.out)
    result.replace_all_uses_with(new)
    result.meta[WAITS] = new.meta[STANDS_FOR] = result.name
    new.meta[CORE] = tuple(n.name for n in written.core)


def _known(node: fx.Node) -> Fused | None:
    if _is_triangular(node):
        return OF_TORCH_BY_NAME
    return operator_of(called_name(node)) if node.op == "call_function" else None


def _is_triangular(node: fx.Node) -> bool:
    """Whether ``node`` is torch's attention with a causal mask and different numbers of queries and keys.

    Another mask or dropout is not allowed.
    """
    if packet(node) is not aten.scaled_dot_product_attention:
        return False
    plain = argument(node, 3, "attn_mask") is None and argument(node, 4, "dropout_p", 0.0) == 0.0
    q, k, _ = args_of(node)[:3]
    return plain and argument(node, 5, "is_causal", False) is True and not same_sizes(shape(q)[-2:-1], shape(k)[-2:-1])


def _seen_from_the_first(plain: Plain) -> str:
    count = shape(plain.q)[-2]
    one = same(count, 1) and plain.right == 0
    who = "the query sees only that key" if one else "keys beyond the number of queries are not seen"
    return f"the operator's diagonal begins at the first key: {who}"


def _only_result(call: fx.Node) -> fx.Node:
    if is_tensor(call):
        return call
    read = [n for n in call.users if n.users]
    if not all(packet(n) is operator.getitem for n in read):
        raise UntoldError("its results are used as a whole")
    others = sorted({args_of(n)[1] for n in read} - {0})
    if others:
        # After the operator's own results, the call returns new values of arguments that the operator may write into.
        own = len(_schema(call).returns)
        of = {1: "the log-sum-exp, besides the output,", own: "an argument that it may write into"}
        raise UntoldError(f"{of.get(min(others[0], own), f'result {others[0]}')} is used")
    if not read:
        raise UntoldError("its output is not used")
    return read[0]


def _told(call: fx.Node, known: Fused, fake_mode: FakeTensorMode | None) -> dict[str, object]:
    """Return the arguments that affect the result. The keys are the words of ``known.words``."""
    found: dict[str, Any] = {}
    for name, given, default in _arguments(call, fake_mode):
        word = known.words.get(name)
        if word == "appended":
            if given is not None:
                why = "new keys and values are appended, per head, inside the operator"
                raise UntoldError(why, "expanded_cache")
        elif word is not None:
            found[word] = given
        elif name not in INERT and given is not None and (isinstance(given, fx.Node) or given != default):
            raise UntoldError(f"{name} is given")
    return found


def _arguments(call: fx.Node, fake_mode: FakeTensorMode | None) -> list[tuple[str, Any, object]]:
    """Return the name, value and default of each argument.

    Arguments that the operator may mutate are listed with their values before the call.
    """
    try:
        functional = not isinstance(call.target, torch._ops.OpOverload)
        told = functionalized(call, fake_mode) if functional else named_arguments(call)
    except ValueError as name:
        raise UntoldError(f"{name}, which it may write into, is a part of another tensor") from name
    arguments = _schema(call).arguments
    return [(a.name.rstrip("_"), told.get(a.name, a.default_value), a.default_value) for a in arguments]


def _schema(call: fx.Node) -> Any:
    return (call.target if isinstance(call.target, torch._ops.OpOverload) else args_of(call)[0])._schema


@dataclass(frozen=True)
class _Sight:
    """How many keys a query sees before and after the diagonal; None: all keys on that side."""

    left: int | None
    right: int | None


def _plain(told: dict[str, Any], known: Fused) -> Plain:
    q, k, v = (told[name] for name in "qkv")
    _check_shapes(q, k, v, known)
    _check_dropout(told.get("dropout"))
    scale, softcap = told.get("scale"), told.get("softcap") or 0.0
    if isinstance(scale, fx.Node) or isinstance(softcap, fx.Node):
        raise UntoldError("its scale is not a constant")
    width = shape(q)[-1]
    if scale is None and not isinstance(width, int):
        raise UntoldError("its head width is not a constant")
    starts_q, starts_k, used, bias = (told.get(name) for name in ("starts_q", "starts_k", "used", "bias"))
    if (starts_q is None) is not (starts_k is None):
        raise UntoldError("only the queries or only the keys are packed")
    packed = None if starts_q is None or starts_k is None else (starts_q, starts_k)
    if packed and (len(shape(q)) != 3 or bias is not None):
        raise UntoldError("packed sequences in a form that is not known")
    if any(len(shape(x)) != 1 for x in (starts_q, starts_k, used) if x is not None):
        raise UntoldError("lengths that are not one number for each sequence")
    if bias is not None and not val(bias).dtype.is_floating_point:
        raise UntoldError("its mask is not additive")
    _check_sinks(told.get("sinks"), q, heads_first=known.heads_first, packed=packed is not None)
    sight = _sight(told)
    first = known.diagonal == "first" or (told.get("diagonal") == _FROM_THE_FIRST_KEY and packed is None)
    aligned = known.diagonal == "last" and told.get("diagonal") != _FROM_THE_FIRST_KEY
    diagonal = (sight.left, sight.right) != (None, None) and not first
    if diagonal and not aligned and not _as_many(q, k, known, starts_q, starts_k):
        raise UntoldError("a diagonal that is not known to end at the last key, with more keys than queries")
    if used is not None and not aligned:
        raise UntoldError("lengths of the keys beside a diagonal that is not known to end at the last key")
    return Plain(
        q,
        k,
        v,
        heads_first=known.heads_first,
        scale=float(scale) if scale is not None else width**-0.5,
        modify=partial(capped, float(softcap)) if softcap else None,
        left=sight.left,
        right=sight.right,
        first=first,
        starts=packed,
        used=used,
        bias=bias,
        sinks=told.get("sinks"),
    )


def _check_shapes(q: fx.Node, k: fx.Node, v: fx.Node, known: Fused) -> None:
    ranks = {len(shape(x)) for x in (q, k, v)}
    if len(ranks) != 1 or not 3 <= min(ranks) <= 5:
        raise UntoldError(f"queries, keys and values with {' and '.join(map(str, sorted(ranks)))} axes")
    if val(q).dtype.itemsize < 2 or len({val(x).dtype for x in (q, k, v)}) != 1:
        raise UntoldError("queries, keys and values in dtypes that have scales of their own")
    rank = min(ranks)
    if rank < 4:
        return  # packed sequences, or no heads
    heads = [shape(x)[1 if known.heads_first else -2] for x in (q, k, v)]
    if not same(heads[0], heads[1]) and not all(isinstance(h, int) for h in heads):
        raise UntoldError("numbers of heads that are not constants")


def _check_sinks(sinks: fx.Node | None, q: fx.Node, *, heads_first: bool, packed: bool) -> None:
    if sinks is None:
        return
    heads = shape(q)[-3 if heads_first and not packed else -2]
    if len(shape(q)) + packed != 4 or not same_sizes(shape(sinks), [heads]) or not val(sinks).dtype.is_floating_point:
        raise UntoldError("sinks that are not one number for each head")


def _check_dropout(p: object) -> None:
    if p:
        raise UntoldError(f"attention dropout of {p} is active", "dropout")


_FROM_THE_FIRST_KEY, _FROM_THE_LAST_KEY = 1, 2


def _sight(told: dict[str, Any]) -> _Sight:
    left, right = told.get("window") or (told.get("left"), told.get("right"))
    sides = [None if side is None or (isinstance(side, int) and side < 0) else side for side in (left, right)]
    if not all(side is None or isinstance(side, int) for side in sides):
        raise UntoldError("its window is not a constant")
    diagonal = told.get("diagonal", 0)
    if diagonal not in (0, _FROM_THE_FIRST_KEY, _FROM_THE_LAST_KEY):
        raise UntoldError(f"a mask of the unknown type {diagonal}")
    if isinstance(told.get("causal"), fx.Node):
        raise UntoldError("its causal flag is not a constant")
    return _Sight(sides[0], 0 if told.get("causal") or diagonal else sides[1])


def _as_many(q: fx.Node, k: fx.Node, known: Fused, starts_q: object, starts_k: object) -> bool:
    """Whether there are as many queries as keys. If sequences are packed, this must hold for each sequence."""
    if starts_q is not None:
        return starts_q is starts_k
    dim = -2 if known.heads_first else 1
    return same_sizes([shape(q)[dim]], [shape(k)[dim]])
