"""ONNX: export of the absorbed decode graph, and what runs it.

``export_onnx`` writes a model directory; :class:`Session` loads it and ``generate`` decodes with it; ``python -m
mla_compile.onnx.build`` builds the native library for CUDA sessions. Names are imported on first use: importing this
package imports neither onnx nor onnxruntime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_compile.onnx.export import export_onnx
    from mla_compile.onnx.exported import Exported, Verification
    from mla_compile.onnx.generation import Generation, generate
    from mla_compile.onnx.manifest import Manifest
    from mla_compile.onnx.sampling import Sampling
    from mla_compile.onnx.session import Session
    from mla_compile.onnx.state import State

_OWNERS = {
    "Exported": "exported",
    "Generation": "generation",
    "Manifest": "manifest",
    "Sampling": "sampling",
    "Session": "session",
    "State": "state",
    "Verification": "exported",
    "export_onnx": "export",
    "generate": "generation",
}

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


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when the name is first used (PEP 562)."""
    if name not in _OWNERS:
        raise AttributeError(f"module 'mla_compile.onnx' has no attribute {name!r}")
    return getattr(import_module(f"mla_compile.onnx.{_OWNERS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
