"""Formats each source line of a trace once, because the layers of a model share their source lines."""

from __future__ import annotations

import traceback
from typing import Any

from torch.fx.experimental.symbolic_shapes import uninteresting_files


def remember_lines(output: Any) -> None:
    """Give the nodes of Dynamo's ``output`` the usual ``stack_trace`` of torch, but from cached lines."""
    # Each entry also holds the code object, because a new object could get the ``id`` of a deleted one.
    known: dict[object, tuple[str, object]] = {}
    tracer = output.current_tracer
    create = tracer.create_node

    def create_node(kind: str, *given: Any, **named: object) -> Any:
        node, lines, frame = create(kind, *given, **named), list[str](), output.current_tx
        while frame is not None and kind != "output":
            key = id(frame.f_code), frame.lineno, frame.current_instruction.positions
            if key not in known:
                known[key] = _line(frame), frame.f_code
            lines.append(known[key][0])
            frame = getattr(frame, "parent", None)
        node.meta |= {"stack_trace": "".join(reversed(lines))} if lines else {}
        return node

    tracer.create_node = create_node


def _line(frame: Any) -> str:
    """Format a frame as a traceback does.

    The result is empty for frames in torch's own files, which torch omits, too.
    """
    summary = frame.frame_summary()
    if frame.is_co_filename_from_nn_modules() or summary.filename in uninteresting_files():
        return ""
    return "".join(traceback.StackSummary.from_list([summary]).format())
