"""Which inputs of a graph come from before a graph break: what Dynamo computed in the graph that the break ended."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType

from torch import fx
from torch._dynamo.convert_frame import output_codes
from torch._dynamo.source import GetItemSource, LocalSource

from mla_compile.passes.ir.graph import HANDED_OVER


def mark_handed_over(gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
    """Marks those of ``placeholders``, which stand for the inputs of Dynamo's graph ``gm``, that a break hands over.

    Behind a break Dynamo compiles the rest of a function, or a function that it could not look into, while code that it
    made itself is running. What is handed on are local variables, and items of tuples; what is read from a dict or from
    an object may be there since an earlier call.
    """
    if not any(code in output_codes for code in _running()):
        return
    for node, origin in zip(placeholders, gm.graph.find_nodes(op="placeholder"), strict=True):
        source = getattr(origin, "_dynamo_source", None)
        if type(source) is GetItemSource and isinstance(source.index, int):
            source = source.base
        if isinstance(source, LocalSource):
            node.meta[HANDED_OVER] = True


def _running() -> Iterable[CodeType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
