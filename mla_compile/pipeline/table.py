"""The table of the passes over a program, in order: what each pass reads and changes, and its function."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.rewrite import packed_rows
from mla_compile.passes.rewrite.columns import read_parts
from mla_compile.passes.rewrite.lower import lower_to_aten
from mla_compile.passes.rewrite.schedule import share_schedules
from mla_compile.pipeline.analyses import read_weights
from mla_compile.pipeline.decisions import analyse, canonical, judge, latent_cache, split_heads, stand_ins, unfollowed
from mla_compile.pipeline.large import by_heads
from mla_compile.pipeline.manager import Pass
from mla_compile.pipeline.rewrites import (
    absorb,
    append,
    complex_pairs,
    dequantize_once,
    fold_weights,
    index,
    narrow_projections,
    pad_values,
    products,
    project,
    settle,
    share,
    verify,
)
from mla_compile.pipeline.state import PassState


def _over(rewrite: Callable[[fx.Graph, FakeTensorMode | None], int]) -> Callable[[PassState], int]:
    return lambda state: rewrite(state.graph, state.program.fake_mode)


def _lower(state: PassState) -> int:
    return _over(lower_to_aten)(state) if state.options.lowering == "aten" else 0


def _read_packed(state: PassState) -> int:
    return packed_rows.read_packed(state.graph, state.program.fake_mode, state.request.target.reads_float8)


PASSES: tuple[Pass[PassState], ...] = (
    Pass("stand_ins", "the captured graph", "operators of libraries, to plain ones for the time", stand_ins, once=True),
    Pass("normalize", "the captured graph", "checks and empty operators", canonical("normalize")),
    Pass("views", "the captured graph", "the spelling of views, permutations, slices and joins", canonical("views")),
    Pass("scatters", "scatters of whole rows", "these, to writes at positions", canonical("scatters")),
    Pass("split_products", "products beside a softmax", "products that also add", canonical("split_products")),
    Pass("join_rows", "K and V joined from parts", "joins, before their projection", canonical("join_rows")),
    Pass("write_softmax", "exponentials between products", "a decomposed softmax", canonical("write_softmax")),
    Pass("read_heads", "scores of all heads, stacked", "heads that are selected again", canonical("read_heads")),
    Pass("latent_cache", "K and V that the caller keeps", "caches, to rows", latent_cache, once=True),
    Pass("analyse", "the canonical graph", "", analyse),
    Pass("judge", "attentions and linear maps", "", judge),
    Pass("split_heads", "verdicts, heads that differ", "attentions, on a copy that is kept", split_heads),
    Pass("unfollowed", "softmaxes outside attentions, attentions without softmax", "", unfollowed),
    Pass("absorb", "verdicts", "attentions that are legal and worth absorbing", absorb),
    Pass("verify", "the rewritten and the untouched graph", "", verify),
    Pass("index", "index lists", "scores of indexers, to one operator", index),
    # `narrow` and `fold` run before `dequantize`: linear maps do not treat the new inputs of `dequantize` as weights.
    Pass("narrow", "verdicts", "up-projections that are partly read", narrow_projections),
    Pass("fold", "verdicts, absorbed queries and outputs", "products of weights", fold_weights),
    Pass(
        "dequantize", "quantized weights of absorbed attentions", "weights that are dequantized once", dequantize_once
    ),
    Pass("settle", "stand-ins", "stand-ins that are still read, to the operators of libraries", settle),
    Pass("by_heads", "attentions that stay expanded", "large attentions, to groups of heads", by_heads),
    Pass("pad_values", "expanded attentions", "values on a CPU, to the width of the keys", pad_values),
    Pass("complex_pairs", "complex numbers", "these, to pairs of real ones for Inductor", complex_pairs),
    Pass("lower", "operators that absorb adds", 'operators, to plain ATen with lowering="aten"', _lower),
    Pass("lower_projections", "einsums that absorb adds", "einsums of few rows", project),
    Pass("read_parts", "slices that absorb adds", "slices of a join, to its parts", _over(read_parts)),
    Pass(
        "read_packed",
        "rows in float8",
        "reads of copies, to reads of the packed rows",
        _read_packed,
        keeps=(read_weights,),
    ),
    Pass("share", "rows that ranks share", "attention, to each rank's own rows and a merge", share),
    Pass("products", "products with weights", "products with weights on a CPU, to a faster operator", products),
    Pass("schedule", "operators on a GPU, their masks", "launch preparation, shared", _over(share_schedules)),
    Pass("append", "joins of rows that the caller keeps", "joins of old and new rows, to in-place writes", append),
)
