"""``export_onnx``: a model in, a directory out that any ONNX Runtime decodes from, in absorbed form."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mla_compile.errors import ExportError, InputError, OptionError, nearest
from mla_compile.onnx.exported import DTYPES, Exported, Progress


def export_onnx(
    model: Any,
    path: str | Path,
    *,
    profile: str = "portable",
    prefill: bool = True,
    dtype: str | torch.dtype | None = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    fold: str = "auto",
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes a directory of ONNX graphs that decode in absorbed form; the model stays as it was.

    Args:
        model: a causal language model of transformers (its inputs and its cache are wired here); any other module
            with ``example_inputs``; an ``ExportedProgram``; or a ``GraphModule``, also one that ``optimize`` made,
            with ``example_inputs``.
        path: the directory to write. It is there when everything in it was verified, or not at all.
        profile: ``portable`` (opset 21), ``inplace`` (opset 24: caches are buffers written in place), ``genai`` (runs
            under onnxruntime-genai), ``ort-paged`` (com.microsoft PagedAttention, CUDA).
        prefill: also a graph of the expanded form, for prompts, with the same caches.
        dtype: "float32", "float16", "bfloat16"; ``None`` keeps the model's. The model is copied, not converted.
        example_inputs: as ``args`` (or a dict: ``kwargs``) of ``torch.export.export``, for a module that is not wired
            here.
        dynamic_shapes: as in ``torch.export.export``, beside ``example_inputs``.
        fold: as in ``optimize``; "auto" multiplies weights ahead where the cost model gains.
        verify: run prompts and steps through the graphs and through the original before anything is written.
        overwrite: replace a directory that an earlier export wrote, once the new one is complete.
        progress: called with the name of each stage.

    Returns:
        The directory, the profile, the report, and how the graphs were verified.

    Raises:
        OptionError: an option that cannot be.
        InputError: ``model`` is no model.
        CaptureError: the model cannot be traced.
        ExportError: the model cannot be exported or has no attention to absorb, or the path cannot be written.
    """
    require_packages()
    from mla_compile.onnx import artifact, causal_lm, lm_export, program_export
    from mla_compile.onnx.profile import profile as named

    chosen = named(profile)
    kind = _dtype(dtype)
    if fold not in ("auto", "never", "always"):
        raise OptionError(
            f"fold is {fold!r}, expected one of auto, never, always{nearest(str(fold), ['auto', 'never', 'always'])}"
        )
    target = Path(path).absolute()
    say = progress or (lambda _: None)
    with artifact.staged(target, overwrite) as stage:
        if isinstance(model, torch.nn.Module) and not isinstance(model, fx.GraphModule) and example_inputs is None:
            lm = causal_lm.wire(_cast(model, kind))
            exported = lm_export.export(lm, stage, chosen, prefill=prefill, fold=fold, check=verify, say=say)
        else:
            if kind is not None:
                raise OptionError("dtype is for modules that are wired here; cast the model before tracing it")
            program = _traced(model, example_inputs, dynamic_shapes)
            exported = program_export.export(program, stage, chosen, prefill=prefill, fold=fold, check=verify, say=say)
        (stage / artifact.REPORT).write_text(json.dumps(exported.to_dict(), indent=2, allow_nan=False) + "\n")
        (stage / "report.txt").write_text(exported.text())
        say("moving the finished directory into place")
    return Exported(target, exported.profile, exported.report, exported.verification)


def require_packages() -> None:
    """Raises :class:`ExportError` where a package that export needs is missing."""
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


def _traced(model: Any, example_inputs: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
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
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # tracing runs the user's model, which raises what it likes
        first = next(iter(str(error).strip().splitlines()), "no message")
        raise ExportError(f"{type(model).__name__} cannot be traced: {type(error).__name__}: {first}") from error
