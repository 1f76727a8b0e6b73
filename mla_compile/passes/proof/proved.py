"""Check whether the code of a refusal is proved for an attention. If not, replace the reason.

A walk ends at an operator that no rule covers. That does not tell what the operator does. To find out, this module
follows the axis of the key tokens from K and V back to the operator. A factor is position-dependent if it has the token
axis and is made from positions. Tokens are mixed if a token of the result reads several positions along the token axis.
If neither can be shown, the report only says that the operator has no rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.dependence.steps import along, reduced, worked_along
from mla_compile.passes.ir.axes import Atom, Axis, flatten
from mla_compile.passes.ir.graph import args_of, is_tensor, operator_name, packet, shape, val
from mla_compile.passes.ir.labels import matmul_labels, product_labels
from mla_compile.passes.ir.moves import Join, Slice, Stack
from mla_compile.passes.ir.operators import decode, is_contraction
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, reachable
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.linear.stops import computed_weight, selected_weight, unexplained
from mla_compile.passes.sources.records import axis_is_broadcast, pieces_of

aten = torch.ops.aten

_SUMS = (aten.add, aten.sub)
_CHOICES = (aten.where, aten.masked_fill)
_REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.logsumexp)
_STATED = (
    "position_dependent",
    "token_mixing",
    "nonlinear",
    "head_dependent_latent",
    "unsupported_weight",
    "unsupported_op",
)
LeadAxis = Literal["heads", "batch", "batch or heads"]
"""What a lead axis holds, as far as can be shown."""

Labelled = tuple[tuple[fx.Node, str], tuple[fx.Node, str], str]


@dataclass(frozen=True)
class Proofs:
    """Facts that can be proved about operators upstream of K and V of one attention."""

    site: AttentionSite
    maps: Maps

    def shown(self, stop: Stop) -> Stop:
        """Return ``stop`` if its code is proved. If not, return a proved stop or one that only names the operator."""
        node = stop.node
        if stop.code not in _STATED or not is_tensor(node) or node.op != "call_function":
            return stop
        if self._mixes_tokens(node):
            return stop if stop.code in ("token_mixing", "nonlinear") else _stop(node, "token_mixing", "mixes tokens")
        if stop.code == "nonlinear" and not _sums(node):
            return stop
        if self._differs_by_position(node):
            how = "has a factor or a term that differs from token to token"
            return stop if stop.code == "position_dependent" else _stop(node, "position_dependent", how)
        if self._multiplies_rows(node):
            return stop if stop.code == "nonlinear" else _stop(node, "nonlinear", "multiplies functions of the rows")
        guessed = stop == unexplained(self.maps, node)
        if stop.code in _STATED[3:]:
            return stop
        return Stop(node, "unsupported_op", f"no rule for {operator_name(node)}" if guessed else stop.detail)

    @cached_property
    def tokens(self) -> dict[fx.Node, set[int]]:
        """For each node upstream of K and V, the axes that hold the key tokens."""
        return self._axes(self.site.keys)

    def role(self, node: fx.Node, dim: int) -> LeadAxis | None:
        """Return whether axis ``dim`` of ``node`` holds batch or heads; None if the axis holds neither.

        An axis that is later merged into the preceding axis is recognised, too.
        """
        if dim in self._of(node) or dim in self._columns.get(node, ()):
            return None
        atoms = [atom for atom, axes in self._lead.items() if dim in axes.get(node, ())]
        if atoms:
            return self.role_of(atoms)
        atoms = [atom for atom, axes in self._lead.items() if dim - 1 in axes.get(node, ())]
        if not atoms:
            return None
        apart = self.role_of(atoms) == "heads" and any(self.role_of([a]) == "batch" for a in self.site.lead)
        return "heads" if apart or self._is_weighed(node, dim) else "batch or heads"

    def role_of(self, axis: Iterable[Atom]) -> LeadAxis:
        """Return "heads" if a weight of queries, keys or values differs along the lead atoms ``axis``.

        Return "batch" if the weights that make heads are constant along ``axis``. If neither can be shown, return
        "batch or heads".
        """
        if any(self._is_weighed(node, dim) for atom in axis for node, dims in self._lead[atom].items() for dim in dims):
            return "heads"
        return "batch" if all(self._shares_weights(atom) for atom in axis) else "batch or heads"

    def _shares_weights(self, atom: Atom) -> bool:
        others = [axes for own, axes in self._lead.items() if own is not atom]
        heads = ((node, dim) for node in self._lead[atom] for axes in others for dim in axes.get(node, ()))
        return any(is_contraction(node) and self._is_weighed(node, dim) for node, dim in heads)

    def _is_weighed(self, node: fx.Node, dim: int) -> bool:
        """Whether a weight that makes ``node`` differs from position to position along axis ``dim``."""
        maps, how = self.maps.unbound, decode(node)
        if maps.is_weight(node):
            return False
        if not isinstance(how, (Join, Stack)) or how.dim != dim:
            return is_contraction(node) and any(map(maps.is_weight, along(node, dim)))
        pieces = [p for p in pieces_of([maps.map(n) for n in how.parts]) if p.projected]
        if isinstance(how, Join):
            return any(p.weight is not None and a in p.weight.atoms for p in pieces for a in p.axes[dim])
        return len(pieces) == len(how.parts) and len({p.source for p in pieces}) == 1

    @cached_property
    def _lead(self) -> dict[Atom, dict[fx.Node, set[int]]]:
        """For each lead atom and each node upstream of queries, keys and values, the axes that hold the atom.

        The search ends at a join along an axis that holds the atom.
        """
        queries = [p.q for p in self.site.products]
        return {atom: self._axes((atom,), queries, whole=True) for atom in self.site.lead}

    @cached_property
    def _columns(self) -> dict[fx.Node, set[int]]:
        read = flatten(axis for o in (*(p.k for p in self.site.products), self.site.v) for axis in o.axes)
        return self._axes(tuple(a for a in read if a not in (*self.site.lead, *self.site.keys)))

    def _axes(self, atoms: Axis, more: Sequence[Operand] = (), *, whole: bool = False) -> dict[fx.Node, set[int]]:
        found: dict[fx.Node, set[int]] = {}
        operands = (*(p.k for p in self.site.products), self.site.v, *more)
        asked = set(atoms)
        pending = deque((o.node, d) for o in operands for d, own in enumerate(o.axes) if asked & set(own))
        while pending and len(found) < 4 * REACH:
            node, dim = pending.popleft()
            if dim not in found.setdefault(node, set()):
                found[node].add(dim)
                how = decode(node) if whole else None
                if not isinstance(how, Join) or how.dim != dim:
                    pending.extend(along(node, dim).items())
        return found

    def _of(self, node: fx.Node) -> set[int]:
        return self.tokens.get(node, set())

    def _mixes_tokens(self, node: fx.Node) -> bool:
        """Whether a token of ``node`` depends on several tokens of an operand that is not a weight."""
        mine = self._of(node)
        if mine & set(worked_along(node)) or _reorders(node, mine):
            return True
        if packet(node) in _REDUCTIONS:
            x, gone = args_of(node)[0], reduced(node)
            return any(d in gone for d in self._of(x)) or self._parts_of_one_axis(x, along_all(node, mine), gone)
        labelled = _labels(node)
        if labelled is None:
            return False
        left, right, out = labelled
        for dim in mine:
            for x, labels in (left, right):
                summed = [labels.index(c) for c in labels if c not in out]
                of_weights = computed_weight(self.maps, x) or selected_weight(self.maps, x)
                made_of_rows = not (self.maps.is_weight(x) or of_weights)
                if made_of_rows and out[dim] not in labels and self._rows_lie_along(x, summed):
                    return True
        return False

    def _rows_lie_along(self, x: fx.Node, dims: Iterable[int]) -> bool:
        """Whether one of the axes ``dims`` of ``x`` runs along the rows of a source, not along columns."""
        pieces = [p for p in self.maps.map(x).pieces if p.source is not None]
        return any(a in flatten(p.source_axes[:-1]) for p in pieces for d in dims for a in p.axes[d])

    def _parts_of_one_axis(self, x: fx.Node, kept: Collection[int], gone: Collection[int]) -> bool:
        """Whether a kept and a reduced axis of ``x`` are parts of one row axis, as for windows of tokens."""
        for piece in self.maps.map(x).pieces:
            for own in piece.source_axes:
                has = [any(a in own for d in dims for a in piece.axes[d]) for dims in (kept, gone)]
                if all(has):
                    return True
        return False

    def _differs_by_position(self, node: fx.Node) -> bool:
        """Whether ``node`` combines rows with an operand that differs along the tokens and is made from positions."""
        if packet(node) is aten.view_as_complex:
            return any(packet(user) is aten.mul and self._differs_by_position(user) for user in node.users)
        tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet(node) in _CHOICES
        if not tagged and _labels(node) is None:
            return False
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        for dim in self._of(node):
            varies = [n for n, at in along(node, dim).items() if not axis_is_broadcast(n, at, self.maps)]
            # At least two operands have to vary: the rows and the factor.
            if min(len(operands), len(varies)) > 1 and any(self._is_positional(node, n) for n in varies):
                return True
        return False

    def _is_positional(self, node: fx.Node, other: fx.Node) -> bool:
        if self.maps.is_weight(other):
            return True
        if packet(node) in _CHOICES:
            return val(other).dtype == torch.bool
        # Rows come from floating-point inputs through projections. Positions and rotary angles do not.
        behind = list(reachable([other], lambda n: [m for m in n.all_input_nodes if not self.maps.is_weight(m)], REACH))
        inputs = [n for n in behind if n.op == "placeholder" and is_tensor(n) and val(n).is_floating_point()]
        if packet(node) in _SUMS:
            return not inputs and len(behind) < REACH
        return not any(_projects(n, self.maps) for n in behind)

    def _multiplies_rows(self, node: fx.Node) -> bool:
        """Whether ``node`` multiplies, token by token, two tensors that are computed from the same rows."""
        labelled = _labels(node)
        operands = [n for n in node.all_input_nodes if is_tensor(n) and not self.maps.is_weight(n)]
        if len(operands) != 2 or (labelled is None and packet(node) not in (aten.mul, aten.div)):
            return False
        each = all(all(n in along(node, dim) for n in operands) for dim in self._of(node))
        return bool(self._of(node)) and each and self.maps.same_rows(*operands)


def along_all(node: fx.Node, dims: Iterable[int]) -> set[int]:
    """Return the operand axes that correspond to the axes ``dims`` of ``node``."""
    return {at for dim in dims for at in along(node, dim).values()}


def _reorders(node: fx.Node, dims: Collection[int]) -> bool:
    """Whether ``node`` joins slices of one tensor in a different order, or repeats positions."""
    how = decode(node)
    if not isinstance(how, Join) or how.dim not in dims:
        return False
    slices = [s for s in map(decode, how.parts) if isinstance(s, Slice) and s.dim == how.dim and s.taken is not None]
    taken = [position for s in slices for position in s.taken or ()]
    return len(slices) == len(how.parts) and len({s.x for s in slices}) == 1 and taken != sorted(set(taken))


def _stop(node: fx.Node, code: str, what: str) -> Stop:
    return Stop(node, code, f"{operator_name(node)} {what}")


def _sums(node: fx.Node) -> bool:
    """Whether ``node`` is linear although no rule covers it: a sum, mean or cumulative sum."""
    return packet(node) in (aten.sum, aten.mean, aten.cumsum)


def _labels(node: fx.Node) -> Labelled | None:
    op, given = packet(node), args_of(node)
    if op in (aten.addmm, aten.baddbmm):
        left, right, out = matmul_labels(len(shape(given[1])), len(shape(given[2])))
        return (given[1], left), (given[2], right), out
    if op is aten.linear:
        labels = "abcdefghijklmnopqrstuvw"[: len(shape(node))]
        return (given[0], labels), (given[1], "z" + labels[-1]), labels[:-1] + "z"
    return product_labels(node) if op in (aten.matmul, aten.bmm, aten.mm, aten.einsum) else None


def _projects(node: fx.Node, maps: Maps) -> bool:
    """Whether ``node`` is a product with a weight that sums over an axis."""
    if not is_contraction(node):
        return False
    labelled = _labels(node)
    if labelled is None:
        return True
    (left, a), (right, b), out = labelled
    return (maps.is_weight(left) or maps.is_weight(right)) and bool({*a, *b} - set(out))
