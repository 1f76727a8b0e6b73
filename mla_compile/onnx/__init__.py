"""Export absorbed decode graphs to ONNX, and run them.

``export_onnx`` writes a model directory. :class:`Session` loads the directory, and ``generate`` decodes with the
session. ``python -m mla_compile.onnx.build`` builds the native library for CUDA sessions. Names are imported on first
use, so importing this package imports neither onnx nor onnxruntime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_compile.core.lazy import lazy

if TYPE_CHECKING:
    from mla_compile.onnx.export import export_onnx
    from mla_compile.onnx.exported import Exported, Verification
    from mla_compile.onnx.generation import Generation, generate
    from mla_compile.onnx.manifest import Manifest
    from mla_compile.onnx.sampling import Sampling
    from mla_compile.onnx.session import Session
    from mla_compile.onnx.state import State

__all__ = [
    "Exported",
    "Generation",
    "Manifest",
    "Sampling",
    "Session",
    "State",
    "Verification",
    "export_onnx",
    "generate",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Exported": "mla_compile.onnx.exported",
        "Generation": "mla_compile.onnx.generation",
        "Manifest": "mla_compile.onnx.manifest",
        "Sampling": "mla_compile.onnx.sampling",
        "Session": "mla_compile.onnx.session",
        "State": "mla_compile.onnx.state",
        "Verification": "mla_compile.onnx.exported",
        "export_onnx": "mla_compile.onnx.export",
        "generate": "mla_compile.onnx.generation",
    },
)
