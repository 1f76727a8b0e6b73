"""The passes that only an export needs. One table runs before :mod:`mla_compile.pipeline.table`, the other after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mla_compile.onnx.bake import bake_projections
from mla_compile.onnx.complex_weights import split_complex
from mla_compile.onnx.float8_rows import unpack_rows
from mla_compile.onnx.tidy import tidy, without_schedules
from mla_compile.pipeline.manager import GraphState, Pass


@dataclass
class ExportState(GraphState):
    """The input and the results of these passes.

    Attributes:
        origins: the name of each baked weight -> the node names of the weights that it is computed from.
    """

    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _bake(state: ExportState) -> int:
    state.origins |= (made := bake_projections(state.program))
    return len(made)


BEFORE: tuple[Pass[ExportState], ...] = (
    Pass("tidy", "the captured graph", "what ONNX or a runtime on a CPU lacks", lambda s: tidy(s.program)),
)
AFTER: tuple[Pass[ExportState], ...] = (
    Pass(
        "without_schedules",
        "operators on a GPU",
        "shared launch preparation, to none",
        lambda s: without_schedules(s.program.gm.graph),
    ),
    Pass(
        "unpack_rows",
        "rows in float8",
        "these, to products with their scales: the ONNX operator reads no float8",
        lambda s: unpack_rows(s.program.gm.graph, s.program.fake_mode),
    ),
    Pass("bake", "products of activations and weights", "weights, to the layout in which they are multiplied", _bake),
    Pass("split_complex", "complex numbers", "these, to pairs of real ones", lambda s: split_complex(s.program)),
)
