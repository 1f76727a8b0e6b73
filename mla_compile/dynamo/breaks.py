"""Finds graph inputs whose values were computed before a graph break."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType

from torch import fx
from torch._dynamo.convert_frame import output_codes
from torch._dynamo.source import GetItemSource, LocalSource

from mla_compile.passes.ir.graph import HANDED_OVER


def mark_handed_over(gm: fx.GraphModule, placeholders: Sequence[fx.Node]) -> None:
    """Mark the ``placeholders`` whose values were computed before a graph break, by an earlier graph of the same call.

    ``placeholders`` correspond to the inputs of Dynamo's graph ``gm``. A graph follows a break if code that Dynamo
    generated is running while Dynamo compiles the graph. Values cross the break as local variables and items of tuples.
    A value from a dict or an object may come from an earlier call, so it is not marked.
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
