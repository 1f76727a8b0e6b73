"""Tensors of which a program returns views."""

from __future__ import annotations

from torch import fx

from mla_compile.core.program import view_source


def seen_through_views(graph: fx.Graph) -> set[fx.Node]:
    """Return the tensors of which the caller gets views.

    If such a tensor became rows, its views would no longer show later writes.
    """
    shown: set[fx.Node] = set()
    for value in graph.output_node().all_input_nodes:
        root = view_source(value)
        while root is not None and root not in shown:
            shown.add(root)
            root = view_source(root)
    return shown
