"""Export a traced program with its author's inputs and outputs: a decode graph, and usually a second, expanded graph.

A cache is an input to which an output appends: ``output = Concat(input, new rows)``. Inputs keep their names. An output
that appends is named ``present_{input}``, and any other output ``output_{position}``. The meaning of other inputs is
unknown, so no manifest is written. The author of the program has to run the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from mla_compile.errors import ExportError
from mla_compile.onnx import artifact
from mla_compile.onnx.assemble import finish
from mla_compile.onnx.convert import Converted, convert, convert_prompt
from mla_compile.onnx.engine import cpu_session, errors, onnxruntime
from mla_compile.onnx.exported import Exported, Progress, Verification
from mla_compile.onnx.interface import GrowingCache, attention_nodes, find_append, widen_masks
from mla_compile.onnx.profile import RUN_HERE, Profile
from mla_compile.onnx.rewrites import in_place
from mla_compile.onnx.verify import TOLERANCE
from mla_compile.options import Options

if TYPE_CHECKING:
    from onnxruntime import OrtValue

_TYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def export(
    program: torch.export.ExportedProgram,
    stage: Path,
    profile: Profile,
    options: Options,
    *,
    prefill: bool,
    say: Progress,
) -> Exported:
    """Write everything except the report into ``stage``.

    ``options`` apply to the decode graph only. Raises :class:`ExportError` for profiles with a ``runner``.
    """
    if profile.runner:
        raise ExportError(
            f"profile {profile.name!r} needs inputs whose meaning is known, and a traced program does not tell it; "
            f"pass the module, or use {RUN_HERE}"
        )
    say("rewriting the decode graph")
    decode = convert(program, options, profile.opset)
    _finish(decode, profile)
    graphs = {"decode.onnx": decode.model}
    if prefill and any(site.verdict == "absorbed" for site in decode.report.sites):
        say("converting the expanded graph")
        expanded = convert_prompt(program, profile.opset)
        _finish(expanded, profile)
        graphs["prefill.onnx"] = expanded.model
    say("writing weights")
    dtype = _dtype(decode.model.graph)
    artifact.write_graphs(graphs, stage)
    for name in graphs:
        onnx.checker.check_model(str(stage / name), full_check=True)
    verification = Verification(reason="verify=False")
    if options.verify:
        say("comparing with the original")
        why_not = ""
        if profile.layout == "in place":
            why_not = "the example inputs hold caches that grow, not buffers"
        elif dtype == "bfloat16":
            why_not = "ONNX Runtime has no bfloat16 operators for the CPU"
        made = [decode.program] if why_not else [stage / name for name in graphs]
        verification = _compare(program, made, dtype, why_not)
    return Exported(stage, profile.name, decode.report, verification)


def _dtype(graph: ir.Graph) -> str:
    """Return the dtype of the rows that the attention reads. If there is no attention, return the outputs' dtype."""
    nodes = attention_nodes(graph)
    values = [nodes[0].inputs[1]] if nodes else list(graph.outputs)
    return next((_TYPES[v.dtype] for v in values if v is not None and v.dtype in _TYPES), "")


def _finish(converted: Converted, profile: Profile) -> None:
    graph = converted.model.graph
    widen_masks(graph)
    appends: dict[int, GrowingCache] = {}
    for past in graph.inputs:
        for index in range(len(graph.outputs)):
            if index not in appends and (append := find_append(graph, past, index)) is not None:
                appends[index] = append
                break
    if profile.layout == "in place":
        if not appends:
            raise ExportError("no output of the program continues one of its inputs, so there is no cache to write")
        in_place(graph, list(appends.values()), *_counts(graph, next(iter(appends.values()))))
    for index, value in enumerate(graph.outputs):
        value.name = f"present_{appends[index].past.name}" if index in appends else f"output_{index}"
    finish(converted, profile, strip="")


def _counts(graph: ir.Graph, append: GrowingCache) -> tuple[tuple[ir.Value, int], tuple[ir.Value, int] | int]:
    """Return the (input, axis) that has an entry per token, and the (input, axis) that has an entry per new token.

    If the number of new tokens is fixed, the second result is this number.
    """

    def one_with(value: ir.Value, what: str) -> tuple[ir.Value, int]:
        wanted = value.shape[1] if value.shape is not None else None
        for source in graph.inputs:
            for axis, dim in enumerate(source.shape or ()):
                if source is not append.past and dim == wanted and isinstance(dim, ir.SymbolicDim):
                    return source, axis
        raise ExportError(
            f"profile 'inplace' needs an input with one entry for each of {what} ({wanted}), as an attention mask has "
            f"for all and input_ids for the new ones; the inputs are {', '.join(str(v.name) for v in graph.inputs)}"
        )

    new = append.new.shape[1] if append.new.shape is not None else None
    return one_with(append.present, "all tokens"), new if isinstance(new, int) else one_with(append.new, "new tokens")


def _compare(
    program: torch.export.ExportedProgram,
    made: Sequence[Path | torch.export.ExportedProgram],
    dtype: str,
    why_not: str,
) -> Verification:
    """Compare graphs or rewritten programs (``made``) with the original program on its example inputs."""
    if program.example_inputs is None:
        return Verification(reason="the program has no example inputs")
    args, kwargs = program.example_inputs
    with torch.no_grad():
        expected = [t for t in pytree.tree_leaves(program.module()(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    values = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    worst = 0.0
    for one in made:
        if isinstance(one, Path):
            got = _run(one, values)
        else:
            with torch.no_grad():
                leaves = pytree.tree_leaves(one.module()(*args, **kwargs))
            got = [t.double().cpu().numpy() for t in leaves if isinstance(t, torch.Tensor)]
        for have, want in zip(got, expected, strict=True):
            reference = want.detach().double().cpu().numpy()
            largest = np.abs(reference).max(initial=0.0) or 1.0
            worst = max(worst, float(np.abs(have.astype(np.float64) - reference).max(initial=0.0)) / largest)
    allowed = TOLERANCE[dtype or "float32"]
    if not worst <= allowed:
        raise ExportError(
            f"the exported graph differs from the program by {worst:.2e} of the largest value, allowed are "
            f"{allowed:.0e}; nothing was written. Report this, or export with verify=False"
        )
    return Verification(worst, allowed, reason=why_not)


def _run(file: Path, values: Sequence[torch.Tensor]) -> list[npt.NDArray[np.generic]]:
    ort = onnxruntime()
    try:
        session = cpu_session(ort, str(file))
        names = [value.name for value in session.get_inputs()]
        given = {name: _held(ort, value.detach().cpu()) for name, value in zip(names, values, strict=True)}
        return [value.numpy() for value in session.run_with_ort_values(None, given)]
    except errors(ort) as error:
        raise ExportError(f"onnxruntime {ort.__version__} does not run the exported {file.name}: {error}") from error


def _held(ort: ModuleType, value: torch.Tensor) -> OrtValue:
    """Convert a tensor for ONNX Runtime. Float8 is passed as bytes, because numpy has no float8."""
    if value.dtype == torch.float8_e4m3fn:
        held = value.contiguous().view(torch.uint8).numpy()
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(held, ir.DataType.FLOAT8E4M3FN)
    return ort.OrtValue.ortvalue_from_numpy(value.numpy())
