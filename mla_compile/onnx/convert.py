"""Convert an ExportedProgram to an ONNX graph in the requested form, with the passes of the pipeline.

Passes that only an export needs (:mod:`mla_compile.onnx.table`) run before and after the pipeline. Then torch's own
exporter translates the graph, and each attention operator becomes one node.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import fx

from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.core.program import Program
from mla_compile.errors import ExportError, brief
from mla_compile.onnx.op import translations
from mla_compile.onnx.table import AFTER, BEFORE, ExportState
from mla_compile.options import Options
from mla_compile.passes.ir.graph import packet
from mla_compile.pipeline.analyses import copy_with_origins
from mla_compile.pipeline.manager import Analyses, run_passes
from mla_compile.report.report import Report
from mla_compile.runtime.folds import folded_values

aten = torch.ops.aten
_DECODE = torch.ops.mla_compile.decode_attention
_ATTENTION = (_DECODE, torch.ops.mla_compile.weigh_alike)
_MOVES = (aten.permute, aten.reshape, aten.view, aten.squeeze, aten.unsqueeze, aten._to_copy, operator.getitem)


@dataclass(frozen=True)
class Converted:
    """An ONNX graph, the program that it was translated from, and the report on its attentions.

    ``weights``: names for the baked weights. ``state``: the original program's weights by name.
    """

    model: ir.Model
    program: torch.export.ExportedProgram
    report: Report
    weights: Mapping[str, str]
    state: Mapping[str, torch.Tensor]


def convert(exported: torch.export.ExportedProgram, options: Options, opset: int) -> Converted:
    """Convert a program to the form ``options.forms``, for decoding.

    Raises :class:`ExportError` if no attention is absorbed, and for an operator that ONNX lacks.
    """
    return _converted(exported, options, opset, decodes=True)


def convert_prompt(exported: torch.export.ExportedProgram, opset: int) -> Converted:
    """Convert a program with every attention expanded. Raises :class:`ExportError` for an operator that ONNX lacks."""
    return _converted(exported, Options(forms="expanded", verify=False), opset, decodes=False)


def _converted(exported: torch.export.ExportedProgram, options: Options, opset: int, *, decodes: bool) -> Converted:
    given = ExportState(Analyses(copy_with_origins(capture.from_exported(exported))))
    run_passes(BEFORE, given)
    # Weights stay quantized in these passes, because baking dequantizes them. ONNX cannot make groups of heads run one
    # after the other, so an expanded attention is not split into groups.
    plain = replace(options, dequantize="step", expanded_bytes=None)
    outcome = pipeline.run(given.program, plain, frozen=True)
    # The program may already have contained mla_compile's operator. The translation takes longer than all passes, so a
    # program with nothing to export is refused before it.
    if decodes and not any(packet(node) is _DECODE for node in outcome.program.gm.graph.nodes):
        _require_absorbed(outcome.report)
    state = ExportState(Analyses(outcome.program))
    with torch.no_grad():  # otherwise the second trace would request a gradient, which the operator lacks
        run_passes(AFTER, state)
        names = _names(state.program, state.origins)
        finished = emit.to_exported(state.program, folded_values(state.program))
        report = replace(outcome.report, passes=(*given.records, *outcome.report.passes, *state.records))
        return Converted(_to_onnx(finished, opset), finished, report, names, exported.state_dict)


def _require_absorbed(report: Report) -> None:
    """Raise :class:`ExportError` with the reasons if no attention was absorbed."""
    if any(site.verdict == "absorbed" for site in report.sites):
        return
    reasons = dict.fromkeys(f"{site.code}: {site.reason}" for site in report.sites)
    raise ExportError(
        "no attention of this model can be decoded in absorbed form, so there is nothing to export: "
        + ("; ".join(reasons) or "no attention was found")
    )


def _names(program: Program, origins: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return names for baked weights, derived from the names of the weights in the model."""
    exported = program.capture.original
    assert isinstance(exported, torch.export.ExportedProgram)
    targets = {s.arg.name: s.target for s in exported.graph_signature.input_specs if s.target is not None}
    return {new: _baked_name(new, [targets.get(n, n) for n in nodes], program) for new, nodes in origins.items()}


def _baked_name(new: str, targets: Sequence[str], program: Program) -> str:
    """Name a baked weight after its first factor and its side of the attention.

    Weights called ``w_kc`` multiply queries, and weights called ``w_v`` multiply the attention's output.
    """
    given: set[fx.Node] = set()
    (product,) = program.node(new).users
    after = any(packet(n) in _ATTENTION for n in _nearest(product, given))
    folded = len(targets) > 1
    side = ("w_v_w_o" if folded else "w_v") if after else ("w_q_w_kc" if folded else "w_kc")
    return f"{targets[0]}.{side}"


def _nearest(node: fx.Node, seen: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the operands of a node. If an operand only moves elements, also yield the operand's operands."""
    for source in node.all_input_nodes:
        if source not in seen and isinstance(source.meta.get("val"), (torch.Tensor, tuple, list)):
            seen.add(source)
            yield source
            if packet(source) in _MOVES:
                yield from _nearest(source, seen)


def _to_onnx(exported: torch.export.ExportedProgram, opset: int) -> ir.Model:
    said = io.StringIO()
    try:
        with _quiet(), contextlib.redirect_stdout(said):
            program = torch.onnx.export(
                exported, dynamo=True, opset_version=opset, custom_translation_table=translations(), verbose=False
            )
    except torch.onnx.errors.OnnxExporterError as error:  # report the root cause, because this message is pages long
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(f"the graph has no form in ONNX opset {opset}: {brief(cause)}") from error
    assert program is not None
    return program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings, for example about missing operator libraries."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
