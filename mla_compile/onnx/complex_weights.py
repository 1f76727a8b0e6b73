"""Complex numbers of a program become pairs of real ones, because ONNX has operators for real numbers only."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.core.program import FoldedWeight, Program
from mla_compile.errors import ExportError
from mla_compile.passes.ir.graph import new_input, val
from mla_compile.passes.rewrite import complex_pairs


def split_complex(program: Program) -> int:
    """Replace every complex value of a program, weights included. Return how many were replaced.

    Raises :class:`ExportError` for an operator on complex numbers that has no counterpart on pairs.
    """
    found = complex_pairs.unsplit(program.gm.graph)
    if found is not None:
        node, what = found
        if node.op == "output":
            raise ExportError("the model returns a complex tensor, which ONNX graphs cannot; return its real view")
        where = (node.meta.get("stack_trace") or "").strip().splitlines()
        line = f"; {where[-2].strip()}" if len(where) > 1 else ""
        raise ExportError(f"{what} ({node.name}) has no counterpart in ONNX{line}")

    def pair_of_input(node: fx.Node) -> fx.Node:
        """Add an input that holds a complex weight as a pair."""
        if node.name not in program.weights:
            raise ExportError(f"input {node.name!r} is complex; pass its real view (torch.view_as_real)")
        name = node.name
        placeholder = new_input(node.graph, f"pairs_{len(program.folds)}", torch.view_as_real(val(node)))
        program.folds.append(
            FoldedWeight(placeholder.name, lambda live: torch.view_as_real(live[name].resolve_conj()), (name,))
        )
        return placeholder

    return complex_pairs.split_complex(program.gm.graph, program.fake_mode, pair_of_input)
