"""``export_onnx``: write a directory from which any ONNX Runtime decodes in absorbed form."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mla_compile.capture import causal_lm
from mla_compile.capture.dtensors import shared_weight
from mla_compile.capture.exporting import traced_program
from mla_compile.core.tracing import one_at_a_time
from mla_compile.errors import ExportError, InputError, OptionError, brief, nearest
from mla_compile.onnx.exported import DTYPES, Exported, Progress
from mla_compile.onnx.profile import find_profile
from mla_compile.options import Options


@one_at_a_time()
def export_onnx(
    model: object,
    path: str | Path,
    *,
    profile: str = "portable",
    prefill: bool = True,
    dtype: str | torch.dtype | None = None,
    example_inputs: object = None,
    dynamic_shapes: object = None,
    fold: str = "auto",
    sparse: str = "auto",
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a directory of ONNX graphs that decode in absorbed form. The model is not changed.

    Args:
        model: a causal language model of transformers, whose inputs and cache are connected automatically; any other
            module with ``example_inputs``; an ``ExportedProgram``; or a ``GraphModule`` with ``example_inputs``,
            including one that ``optimize`` returned.
        path: the directory to write. It appears only after its contents have been verified.
        profile: ``portable`` (opset 21), ``inplace`` (opset 24: caches are buffers written in place), ``genai`` (runs
            under onnxruntime-genai), ``ort-paged`` (com.microsoft PagedAttention, CUDA).
        prefill: whether to write a second graph, in expanded form, which reads prompts and uses the same caches.
        dtype: "float32", "float16" or "bfloat16" converts a copy of the model. ``None`` keeps the model's dtype.
        example_inputs: a tuple for the ``args`` of ``torch.export.export``, or a dict for its ``kwargs``. Needed for a
            module that is not connected automatically.
        dynamic_shapes: the argument of ``torch.export.export`` that belongs to ``example_inputs``.
        fold: as in ``optimize``. "auto" multiplies weights ahead of time if the cost model predicts a gain.
        sparse: as in ``optimize``. "auto" gathers the rows of the keys that an indexer chose, "never" reads all rows
            and the mask. ``ort-paged`` has no operator for index lists, so it always uses "never".
        verify: whether to compare the graphs with the original before ``path`` appears. Language models are compared on
            prompts and decode steps, other models on their example inputs.
        overwrite: whether to replace a directory that an earlier export wrote, once the new directory is complete.
        progress: called with the name of each stage.

    Returns:
        A record of the directory, the profile, the report, and how the graphs were verified.

    Raises:
        OptionError: an option has an invalid value.
        InputError: ``model`` is not a model.
        CaptureError: the model cannot be traced.
        ExportError: the model cannot be exported, is spread over ranks or has no attention to absorb; or ``path``
            exists or cannot be written.
    """
    require_packages()
    if isinstance(model, torch.nn.Module) and (name := shared_weight(model)) is not None:
        raise ExportError(
            f"{type(model).__name__} is spread over ranks: its weight {name} is a DTensor. A file holds a program of "
            "one process; export the model before it is parallelized, or one whose weights are whole (full_tensor())"
        )
    # Imported on use, because these modules import the packages that were just checked.
    from mla_compile.onnx import artifact, lm_export, program_export

    chosen, kind = find_profile(profile), _dtype(dtype)
    options = Options.parse({"fold": fold, "sparse": sparse}, forms="absorbed", verify=verify)
    if not chosen.lists:
        options = replace(options, sparse="never")
    target = Path(path).absolute()
    say = progress or (lambda _: None)
    with artifact.staged(target, overwrite=overwrite) as stage:
        if isinstance(model, torch.nn.Module) and not isinstance(model, fx.GraphModule) and example_inputs is None:
            lm = causal_lm.wire(_cast(model, kind))
            exported = lm_export.export(lm, stage, chosen, options, prefill=prefill, say=say)
        else:
            if kind is not None:
                raise OptionError(
                    "dtype is only for language models passed without example_inputs; cast this model before tracing it"
                )
            program = _traced(model, example_inputs, dynamic_shapes)
            exported = program_export.export(program, stage, chosen, options, prefill=prefill, say=say)
        (stage / artifact.REPORT).write_text(json.dumps(exported.to_dict(), indent=2, allow_nan=False) + "\n")
        (stage / "report.txt").write_text(exported.text())
        say("moving the finished directory into place")
    return Exported(target, exported.profile, exported.report, exported.verification)


def require_packages() -> None:
    """Raise :class:`ExportError` if a package for exporting is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f'exporting needs {", ".join(missing)}: pip install "mla-compile[onnx]"')


def _dtype(wanted: str | torch.dtype | None) -> torch.dtype | None:
    if wanted is None or wanted in DTYPES.values():
        return wanted  # type: ignore[return-value]  # a dtype by the test
    if isinstance(wanted, str) and wanted in DTYPES:
        return DTYPES[wanted]
    hint = nearest(wanted, DTYPES) if isinstance(wanted, str) else ""
    raise OptionError(f"dtype is {wanted!r}, expected one of {', '.join(DTYPES)}{hint}")


def _cast(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtype is None or floating == {dtype}:
        if not floating <= {*DTYPES.values()}:
            names = ", ".join(sorted(str(d) for d in floating))
            raise ExportError(f"the model's weights are {names}; pass dtype, one of {', '.join(DTYPES)}")
        return model
    return copy.deepcopy(model).to(dtype)


def _traced(model: object, example_inputs: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    if isinstance(model, torch.export.ExportedProgram):
        return model
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"export_onnx() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(model).__name__}"
        )
    if example_inputs is None:
        raise InputError("a GraphModule has no example inputs of its own: pass example_inputs, and dynamic_shapes")
    args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    try:
        with torch.no_grad():
            return traced_program(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # tracing runs the user's model, which may raise anything
        raise ExportError(f"{type(model).__name__} cannot be traced: {brief(error)}") from error
