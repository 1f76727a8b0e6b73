"""The operators of mla_compile: schemas, fake functions, FLOP formulas and the choice of a kernel by device.

``mla_compile::decode_attention(query, latent, rope, values, mask, *, scale, causal, ...) -> (out, lse)``: attention of
H query heads over one key per token, ``[latent, rope]``, which all heads share. The values are ``values`` if given, and
otherwise the latent.
``mla_compile::paged_decode_attention(query, latent_pages, rope_pages, block_table, seq_lens, *, ...)``: the same
attention over pages of rows. The arguments of both operators are fields of
:class:`mla_compile.kernels.call.DecodeCall`, which documents their shapes and dtypes.
``mla_compile::decode_schedule(query, latent, rope, values, mask, *, scale, ..., block_table) -> schedule``: the kernel
launches that prepare either attention operator on a GPU. They run once for all calls that share the schedule
(:mod:`mla_compile.kernels.shared`).
``mla_compile::weigh_alike(out, lse, values, lowest, mask=None, indices=None, fill=0) -> out``: the result for queries
whose index list names no visible key (:mod:`mla_compile.kernels.alike`).
``mla_compile::index_scores(query, keys, weights, scale) -> scores``: the scores by which the indexer of a sparse
attention chooses keys (:class:`mla_compile.kernels.call.IndexCall`).
``mla_compile::linear(x, weight, bias=None, most=4, scales=None, zeros=None, packed=None, *, wide=False) -> y``:
a product with a weight that is read as it is stored (:mod:`mla_compile.kernels.linear`).
``mla_compile::pack_codes(codes, scales, zeros=None) -> words``: a weight in four bits, as the kernel for a few rows
reads it (:mod:`mla_compile.kernels.packed`).
``mla_compile::grouped_linear(x, weight, ends, most=4, *, wide=False) -> y``: a product of sorted rows with one
weight for each group (:mod:`mla_compile.kernels.grouped`).
``mla_compile::few_rows_of_heads(x, weight) -> y``: a product of a few rows with a separate weight for each head.
``mla_compile::copy_after(x, before) -> y``: a contiguous copy of ``x``, made after ``before`` is computed. The operator
does not read ``before``. The argument only fixes the order of calls that do not depend on each other.
``mla_compile::call_layer(rows, weights, layer) -> y``: the result of another library's layer
(:mod:`mla_compile.core.layers`).
``mla_compile::layer_weight(weights, layer) -> W``: the rounded weight of that layer.

:func:`mla_compile.kernels.decode.run` chooses among the CPU kernel, the CUDA kernels and the reference. Other devices
run the reference until ``_register_op`` registers a kernel for their dispatch key. Schemas are registered once per
process, even if this module is imported several times or under another name. Wrong arguments and requests for a
gradient raise :class:`InputError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Size, Tensor
from torch.utils.flop_counter import register_flop_formula

from mla_compile.core import layers
from mla_compile.kernels import alike, checks, decode, grouped, index, linear, packed, reference, shared
from mla_compile.kernels.call import ALIKE, DENSE, INDEX, PAGED, SCHEDULE, DecodeCall, IndexCall

_OperatorCall = TypeVar("_OperatorCall", DecodeCall, IndexCall)
# Tensors come before the star: torch.library.register_autograd accepts no keyword-only tensors.
_DENSE_TENSORS = (
    "Tensor query, Tensor latent, Tensor? rope=None, Tensor? values=None, Tensor? mask=None, Tensor? seq_lens=None, "
    "Tensor? sinks=None, Tensor? kv_scale=None, Tensor? indices=None, "
)
_PAGED_TENSORS = (
    "Tensor query, Tensor latent_pages, Tensor? rope_pages, Tensor block_table, Tensor seq_lens, Tensor? sinks=None, "
    "Tensor? kv_scale=None, Tensor? indices=None, "
)
_NUMBERS = (
    "*, float scale, bool causal=False, float softcap=0.0, int window=0, int num_splits=0, bool deterministic=False"
)
_ATTENTION = f"({{}}Tensor? schedule=None, {_NUMBERS}) -> (Tensor out, Tensor lse)"
_INDEX_SCHEMA = "(Tensor query, Tensor keys, Tensor weights, float scale) -> Tensor"
_LINEAR_SCHEMA = (
    f"(Tensor x, Tensor weight, Tensor? bias=None, int most={linear.FEW}, Tensor? scales=None, Tensor? zeros=None, "
    "Tensor? packed=None, *, bool wide=False) -> Tensor"
)
_GROUPED_SCHEMA = f"(Tensor x, Tensor weight, Tensor ends, int most={linear.FEW}, *, bool wide=False) -> Tensor"
_PACK_SCHEMA = "(Tensor codes, Tensor scales, Tensor? zeros=None) -> Tensor"
_HEADS_SCHEMA = "(Tensor x, Tensor weight) -> Tensor"
_SCHEDULE_SCHEMA = f"({_DENSE_TENSORS}{_NUMBERS}, Tensor? block_table=None) -> Tensor"
_ALIKE_SCHEMA = (
    "(Tensor out, Tensor lse, Tensor values, float lowest, Tensor? mask=None, Tensor? indices=None, float fill=0.0)"
    " -> Tensor"
)


AFTER = "mla_compile::copy_after"


def _copy_after(x: Tensor, before: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _fake_copy_after(x: Tensor, before: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake(call: DecodeCall) -> tuple[Tensor, Tensor]:
    checks.check(call)
    B, S, H, _ = call.query.shape
    out = call.query.new_empty(B, S, H, call.summed.shape[2])
    return out, call.query.new_empty(B, S, H, dtype=reference.compute_dtype(call.latent))


def _fake_schedule(call: DecodeCall) -> Tensor:
    checks.check(call)
    return call.query.new_empty(shared.elements(call), dtype=torch.int64)


def _fake_alike(
    out: Tensor,
    lse: Tensor,
    values: Tensor,
    lowest: float,
    mask: Tensor | None = None,
    indices: Tensor | None = None,
    fill: float = 0.0,
) -> Tensor:
    alike.check(out, lse, values, mask, indices)
    return torch.empty_like(out)


def _fake_index(call: IndexCall) -> Tensor:
    checks.check_index(call)
    dtype = reference.compute_dtype(call.keys)
    return call.query.new_empty(*call.query.shape[:2], call.keys.shape[1], dtype=dtype)


def _flops(
    query: Size, latent: Size, rope: Size | None = None, values: Size | None = None, *rest: object, **named: object
) -> int:
    """Return 2BSHT(L+R) for the scores plus 2BSHT times the width of the values.

    If ``indices`` choose k keys, T is k. Masked keys are included, as in torch's own formulas.
    """
    B, S, H, K = query
    width = (latent if values is None else values)[2]
    return int(2 * B * S * H * _looked_at(latent[1], rest[4:], named) * (K + width))


def _paged_flops(
    query: Size, latent_pages: Size, rope_pages: Size | None, block_table: Size, *rest: object, **named: object
) -> int:
    """Like :func:`_flops`, with T = maxpages * page, the capacity of the table.

    A formula receives shapes only, so it does not know the lengths.
    """
    B, S, H, K = query
    return int(2 * B * S * H * _looked_at(block_table[1] * latent_pages[1], rest[3:], named) * (K + latent_pages[2]))


def _index_flops(query: Size, keys: Size, *_: object, **__: object) -> int:
    """Return 2BSJTD for the products of J indexer heads of width D plus 2BSJT for their weighted sum."""
    B, S, J, D = query
    return int(2 * B * S * J * keys[1] * (D + 1))


def _linear_flops(x: Size, weight: Size, *_: object, **__: object) -> int:
    """Return 2KO for each row, if the weight is [O,K]. If it is [E,O,K], each row is multiplied by one of the E."""
    return int(2 * math.prod(x) * weight[-2])


def _heads_flops(x: Size, weight: Size, *_: object, **__: object) -> int:
    """Return 2KO for each row of each head, if the weights are [G,O,K]."""
    return int(2 * math.prod(x) * weight[1])


def _looked_at(T: int, rest: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Return the number of keys that each query is compared with.

    ``rest``: the positional arguments from ``indices`` on.
    """
    indices = rest[0] if rest else named.get("indices")
    return T if indices is None else int(indices[2])


def _register() -> torch.library.Library:
    library = torch.library.Library("mla_compile", "FRAGMENT")
    attention, paged = _ATTENTION.format(_DENSE_TENSORS), _ATTENTION.format(_PAGED_TENSORS)
    for name, schema, run, fake, flops in (
        (DENSE, attention, _of(DecodeCall, decode.run), _of(DecodeCall, _fake), _flops),
        (PAGED, paged, _of(DecodeCall.paged, decode.run), _of(DecodeCall.paged, _fake), _paged_flops),
        (INDEX, _INDEX_SCHEMA, _of(IndexCall, index.run), _of(IndexCall, _fake_index), _index_flops),
    ):
        _register_op(library, name, schema, run, fake)
        _refuse_gradient(library, name)
        register_flop_formula(getattr(torch.ops.mla_compile, name.split("::")[1]))(flops)
    # The schedule needs no autograd formula: integers have no gradient.
    _register_op(library, SCHEDULE, _SCHEDULE_SCHEMA, _of(DecodeCall, decode.schedule), _of(DecodeCall, _fake_schedule))
    _register_op(library, ALIKE, _ALIKE_SCHEMA, alike.weigh_alike, _fake_alike)
    _refuse_gradient(library, ALIKE)
    _register_op(library, linear.LINEAR, _LINEAR_SCHEMA, linear.run, linear.fake)
    _refuse_gradient(library, linear.LINEAR)
    register_flop_formula(torch.ops.mla_compile.linear)(_linear_flops)
    _register_op(library, packed.PACK, _PACK_SCHEMA, packed.pack, packed.fake)
    _register_op(library, grouped.GROUPED, _GROUPED_SCHEMA, grouped.run, grouped.fake)
    _refuse_gradient(library, grouped.GROUPED)
    register_flop_formula(torch.ops.mla_compile.grouped_linear)(_linear_flops)
    _register_op(library, linear.HEADS, _HEADS_SCHEMA, linear.run_of_heads, linear.fake_of_heads)
    _refuse_gradient(library, linear.HEADS)
    register_flop_formula(torch.ops.mla_compile.few_rows_of_heads)(_heads_flops)
    _register_op(library, AFTER, "(Tensor x, Tensor before) -> Tensor", _copy_after, _fake_copy_after)
    _refuse_gradient(library, AFTER)
    _register_op(library, layers.CALL, layers.SCHEMA, layers.run, layers.fake)
    _refuse_gradient(library, layers.CALL)
    register_flop_formula(torch.ops.mla_compile.call_layer)(layers.flops)
    _register_op(library, layers.WEIGHT, layers.WEIGHT_SCHEMA, layers.run_weight, layers.fake_weight)
    return library


def _of(call: Callable[..., _OperatorCall], run: Callable[[_OperatorCall], object]) -> Callable[..., object]:
    """Return a function that stores a schema's arguments in a record (``call``) and passes the record to ``run``."""
    return lambda *tensors, **numbers: run(call(*tensors, **numbers))


def _register_op(
    library: torch.library.Library, name: str, schema: str, run: Callable[..., object], fake: Callable[..., object]
) -> None:
    short = name.split("::")[1]
    # flexible_layout: the kernels take any strides, so Inductor need not copy a strided cache before the call.
    library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    for key in ("CompositeExplicitAutograd", "CPU", "CUDA"):
        library.impl(short, run, key)
    torch.library.register_fake(name, fake, lib=library)


def _refuse_gradient(library: torch.library.Library, name: str) -> None:
    def no_gradient(*_: object, **__: object) -> NoReturn:
        checks.refuse_gradient(name)

    torch.library.register_autograd(name, no_gradient, setup_context=no_gradient, lib=library)


if not hasattr(torch.ops.mla_compile, "call_layer"):
    _LIBRARY = _register()

decode_attention = torch.ops.mla_compile.decode_attention.default
paged_decode_attention = torch.ops.mla_compile.paged_decode_attention.default
decode_schedule = torch.ops.mla_compile.decode_schedule.default
index_scores = torch.ops.mla_compile.index_scores.default
