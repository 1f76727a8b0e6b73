"""Absorbed decode for unmodified models with Multi-head Latent Attention.

All entry points run the same passes::

    fast = mla_compile.optimize(model)            # a module that shares the model's weights
    step = torch.compile(model, backend="mla")    # torch finds the backend, no import of mla_compile needed
    report = mla_compile.explain(model, *inputs)  # which attentions would be rewritten, and why others would not
    mla_compile.export_onnx(model, "model_dir")   # absorbed decode graphs for any ONNX Runtime

``__all__`` is the whole public interface. Most names are imported on first use, so a program loads only the modules
that it needs. Importing the package registers its operators. Saved graphs that call the operators can then be loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.core.lazy import lazy
from mla_compile.errors import (
    CaptureError,
    ExportError,
    InputError,
    MlaCompileError,
    MlaCompileWarning,
    ModelFileError,
    OptionError,
    WeightError,
)
from mla_compile.version import __version__

if TYPE_CHECKING:
    from mla_compile import backend
    from mla_compile.api import explain, migrate_cache, optimize
    from mla_compile.batching.door import continuous_batching
    from mla_compile.batching.figures import metrics
    from mla_compile.core.records import SiteReport
    from mla_compile.onnx.export import export_onnx
    from mla_compile.options import Options
    from mla_compile.registration import register_quantized_linear
    from mla_compile.report.report import Report
    from mla_compile.saved.door import load, save

__all__ = [
    "CaptureError",
    "ExportError",
    "InputError",
    "MlaCompileError",
    "MlaCompileWarning",
    "ModelFileError",
    "OptionError",
    "Options",
    "Report",
    "SiteReport",
    "WeightError",
    "__version__",
    "backend",
    "continuous_batching",
    "explain",
    "export_onnx",
    "load",
    "metrics",
    "migrate_cache",
    "optimize",
    "register_quantized_linear",
    "save",
]

if not (sys.argv[1:] == ["--version"] and Path(sys.argv[0]).name in ("mla-compile", "-m")):  # --version needs no torch
    import_module("mla_compile.ops")  # registers the operators

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Options": "mla_compile.options",
        "Report": "mla_compile.report.report",
        "SiteReport": "mla_compile.core.records",
        "backend": "mla_compile.backend",
        "continuous_batching": "mla_compile.batching.door",
        "explain": "mla_compile.api",
        "export_onnx": "mla_compile.onnx.export",
        "load": "mla_compile.saved.door",
        "metrics": "mla_compile.batching.figures",
        "migrate_cache": "mla_compile.api",
        "optimize": "mla_compile.api",
        "register_quantized_linear": "mla_compile.registration",
        "save": "mla_compile.saved.door",
    },
)
