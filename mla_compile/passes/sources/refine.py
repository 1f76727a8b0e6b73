"""Refine a site and its linear maps until both are written in the same atoms.

The site knows that an axis of K is "batch, then head". The map of K knows which factors of this axis are tokens of a
source and which are columns of a weight. The atoms of site and map are split until they agree.
"""

from __future__ import annotations

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.axes import Atom, Axis, Split, axis_size, common_factors, flatten
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Term


def refine(
    site: AttentionSite, keys: list[LinearMap] | None, values: LinearMap | None
) -> tuple[AttentionSite, tuple[Term, ...], tuple[Term, ...]] | Stop:
    """Return the site with split atoms, the terms of the keys and the terms of the values.

    A side has no terms if its maps are None.
    """
    wanted: list[tuple[Operand, Axis, LinearMap, int | None]]
    while True:  # terminates: each round splits a site atom at a boundary that a map has and the site lacked
        terms: list[Term] = []
        split: Split = {}
        wanted = []
        if keys is not None:
            wanted += [(p.k, p.features, m, n) for n, (p, m) in enumerate(zip(site.products, keys, strict=True))]
        if values is not None:
            wanted.append((site.v, value_features(site), values, None))
        for operand, features, lmap, product in wanted:
            found = _terms(operand, features, lmap, product)
            if isinstance(found, Stop):
                return found
            if isinstance(found, dict):
                split = found
                break
            terms += found
        if not split:
            return site, tuple(t for t in terms if t.product is not None), tuple(t for t in terms if t.product is None)
        site = site.split(split)


def value_features(site: AttentionSite) -> Axis:
    """Return the feature axis of the values: atoms that the output has and the scores lack."""
    outer = {*site.lead, *site.queries}
    return tuple(a for a in flatten(site.out.axes) if a not in outer)


def _terms(operand: Operand, features: Axis, lmap: LinearMap, product: int | None) -> list[Term] | Split | Stop:
    """Return the terms of one operand, or the atoms of the site that have to be split first."""
    at = [k for k, own in enumerate(operand.axes) if own and set(own) == set(features)]
    # An operand without a feature axis is allowed: the scores are then an outer product.
    if len(at) != 1 and features:
        return Stop(operand.node, "unsupported_op", "heads and features share an axis")
    feature_axis = at[0] if at else None
    # If the operand is joined along another axis, each joined tensor has its own map, so no single map makes all rows.
    # Joined heads get a separate code, because they can still be split into groups.
    if lmap.axis is not None and lmap.axis != feature_axis:
        made = [(p.weight, p.axes[lmap.axis]) for p in lmap.pieces]
        if any(f is not None and a in f.atoms for f, own in made for a in own):
            return Stop(operand.node, "head_dependent_latent", "heads that are made of different rows are joined")
        return Stop(operand.node, "token_mixing", "rows of several tensors are joined after the up-projection")
    terms: list[Term] = []
    # The terms of a sum make the same columns, and add up in the scores or in the output.
    for segment, piece in ((s, p) for s in lmap.segments for p in s.piece.summands):
        if not piece.defined:
            return Stop(operand.node, "unsupported_op", "part of the tensor is never written")
        pairs: dict[Atom, Atom] = {}
        for k, own in enumerate(operand.axes):
            if k == feature_axis:
                continue
            if not piece.axes[k]:  # the piece has size 1 here, and broadcasts along the whole axis
                continue
            splits = common_factors(own, piece.axes[k])
            if splits is None:
                return Stop(operand.node, "unsupported_op", "axes whose factors do not line up")
            if splits[0]:
                return splits[0]
            piece = piece.split(splits[1])
            pairs.update(zip(own, piece.axes[k], strict=True))
        own_features = piece.axes[feature_axis] if feature_axis is not None else ()
        width = axis_size(own_features)
        if not isinstance(width, int):
            return Stop(operand.node, "unsupported_op", "a feature axis of symbolic width")
        stop = segment.stop if lmap.axis is not None else width
        terms.append(Term(piece, pairs, own_features, segment.start, stop, product))
    return terms
