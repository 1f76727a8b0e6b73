"""Multiply weights ahead of time if the verdict says so.

Before::

    q = linear(c', W_q); q~ = einsum(q, W_kc)          o = einsum(o~, W_v); y = linear(o, W_o)

After::

    q~ = einsum(c', fold)  with fold = W_q W_kc        y = einsum(o~, fold)  with fold = W_v W_o

Folds are additional inputs of the program. They are computed in float32 or wider, and rounded once to the model's
dtype. The runtime updates them (:class:`mla_compile.core.program.FoldedWeight`). No pattern matching is needed: the
linear map from c' to q~ *is* the folded weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.core.program import FoldedWeight, Program
from mla_compile.passes.decide.fold_sides import narrowest_cut, output_projection
from mla_compile.passes.ir.arrange import SizeSources, aligned, arrange, same_layout
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.collectives import gathered
from mla_compile.passes.ir.expr import Expr, Factor, wide
from mla_compile.passes.ir.graph import Builder, args_of, new_input, val
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.rewrite.project import project
from mla_compile.passes.rewrite.records import Absorbed, Folded
from mla_compile.passes.sources.records import Verdict

aten = torch.ops.aten


def fold(
    program: Program, maps: Maps, sites: Sequence[Absorbed], verdicts: Sequence[Verdict]
) -> dict[str, list[Folded]]:
    """Fold as the verdicts say; return the folded products by the name of each site's original node."""
    done: dict[str, list[Folded]] = {}
    folder = _Folder(program, maps)
    for site, verdict in zip(sites, verdicts, strict=True):
        assert verdict.choice is not None
        entry = done.setdefault(verdict.site.node.name, [])
        if verdict.choice.fold_query:
            entry += [f for node in site.queries if (f := folder.query(node, val(site.out).dtype)) is not None]
        if verdict.choice.fold_output and (f := folder.output(site)) is not None:
            entry.append(f)
    remove_dead_code(program.gm.graph)
    return done


class _Folder:
    def __init__(self, program: Program, maps: Maps) -> None:
        self.program = program
        self.maps = maps
        # Folds of one shape are measured once, because their errors are alike and folding in float64 is slow.
        self.measured: dict[tuple[object, ...], float | None] = {}

    def query(self, node: fx.Node, dtype: torch.dtype) -> Folded | None:
        """Replace ``node`` (q W_kc) by one product of a fold and the rows from which q is projected."""
        (piece, *others) = self.maps.map(node).pieces
        cut = None if others else narrowest_cut(piece, 1)
        return None if cut is None else self._replace(node, cut, "query", dtype)

    def output(self, site: Absorbed) -> Folded | None:
        """Replace the output projection of ``site`` by one product of a fold and the attended latent."""
        projection = output_projection(site.out)
        if projection is None or site.latent is None:
            return None
        return self._replace(projection, site.latent, "output", val(projection).dtype)

    def _replace(self, node: fx.Node, source: fx.Node, side: str, dtype: torch.dtype) -> Folded | None:
        (piece, *others) = self.maps.with_sources([source], per_row=True).map(node).pieces
        # With fewer than two weights, there is nothing to multiply ahead of time.
        if others or piece.source is not source or piece.weight is None or piece.path[-1].contractions < 2:
            return None
        if gathered(n for f in (piece.weight, piece.bias) if f is not None for n in f.expr.leaves()):
            return None
        # The size of a symbolic atom can be read only if the atom is a whole axis.
        if any(len(axis) > 1 and not all(isinstance(a.size, int) for a in axis) for axis in piece.source_axes):
            return None
        builder = Builder(node, self.program.fake_mode)
        folded, error = self._input(piece.weight, dtype)
        source_atoms = flatten(piece.source_axes)
        out: list[Atom] = list(flatten(piece.axes))
        sizes = SizeSources(builder, [(source, piece.source_axes)])
        x = arrange(builder, sizes, source, piece.source_axes, [(a,) for a in source_atoms])
        x = builder.cast(x, wide(dtype))
        new = project(builder, x, source_atoms, folded, piece.weight.atoms, out)
        if piece.scale != 1.0:
            new = builder.call(aten.mul.Tensor, new, piece.scale)
        if piece.bias is not None:
            bias, _ = self._input(piece.bias, dtype)
            bias = aligned(builder, bias, piece.bias.atoms, out)
            new = builder.call(aten.add.Tensor, new, bias)
        new = arrange(builder, sizes, new, tuple((a,) for a in out), piece.axes)
        node.replace_all_uses_with(same_layout(builder, new, node))
        return Folded(side, error)

    def _input(self, factor: Factor, dtype: torch.dtype) -> tuple[fx.Node, float | None]:
        """Add a program input that holds ``factor`` in ``dtype``; return the input and the relative rounding error."""
        node, closed, names = add_input(self.program, factor.expr, dtype, "folded")
        key = (factor.expr.shape, dtype)
        if key not in self.measured:
            self.measured[key] = self._rounding(closed, names, dtype)
        return node, self.measured[key]

    def _rounding(self, closed: Expr, names: Sequence[str], dtype: torch.dtype) -> float | None:
        # Weights on the meta device, or unknown to the program, have no values to measure.
        live = {n: w for n in names if (w := self.program.weights.get(n)) is not None and w.device.type != "meta"}
        if len(live) != len(names):
            return None
        with torch.no_grad():
            exact = closed.evaluate_named(live, torch.float64)
            rounded = closed.evaluate_named(live, wide(dtype)).to(dtype).double()
        return float((rounded - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def add_input(
    program: Program, expr: Expr, dtype: torch.dtype, name: str, *, stored: bool = False
) -> tuple[fx.Node, Expr, tuple[str, ...]]:
    """Add an input that holds ``expr`` in ``dtype``.

    Return the input, the expression in terms of the program's inputs, and the names of these inputs.
    ``stored``: whether ``expr`` only decodes stored weights (:attr:`mla_compile.core.program.FoldedWeight.stored`).
    """
    closed, names = _closed(expr)
    exact = wide(dtype)

    def compute(live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return closed.evaluate_named(live, exact).to(dtype).contiguous()

    # The new input is last, because callers pass all other inputs by position.
    value = expr.value.new_empty(expr.shape, dtype=dtype)
    node = new_input(program.gm.graph, f"{name}_{len(program.folds)}", value)
    program.folds.append(FoldedWeight(node.name, compute, names, (closed.formula(names), dtype) if stored else None))
    return node, closed, names


def keep(program: Program, node: fx.Node, name: str, dtype: torch.dtype) -> fx.Node:
    """Return a new input that holds ``node`` in ``dtype``. The node only decodes or packs stored weights."""
    return add_input(program, Expr.leaf(node, program.fake_mode), dtype, name, stored=True)[0]


def _closed(expr: Expr) -> tuple[Expr, tuple[str, ...]]:
    """Return ``expr`` in terms of the program's inputs, and their names. These inputs are never removed."""
    names: dict[str, None] = {}
    memo: dict[fx.Node, Expr] = {}

    def of_node(node: fx.Node) -> Any:
        if node not in memo:
            if node.op in ("placeholder", "get_attr"):
                names[node.name] = None
                memo[node] = Expr.leaf(node, expr.fake_mode)
            else:
                args = fx.map_arg(args_of(node), of_node)
                kwargs = fx.map_arg(node.kwargs, of_node)
                assert callable(node.target)
                memo[node] = Expr(node.meta["val"], expr.fake_mode, None, node.target, args, kwargs)
        return memo[node]

    return expr.with_leaves(of_node), tuple(names)
