"""From an attention whose keys and values are linear images of narrow rows to the recipe for its absorbed form.

The proof obligations, checked here one by one on the aligned maps:

* every key-token atom is a token of every source (else tokens are mixed);
* no weight or bias depends on a token or batch atom (else it depends on the position);
* a column of the rows or of the values is not another one repeated;
* every lead atom is either a token of all sources (batch) or of none (a head), so that one row serves all heads;
* the keys come from at most two row tensors, the values from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from mla_compile.dims import Dims
from mla_compile.passes.align import Term, align
from mla_compile.passes.atoms import Atom, Axis, axis_size, flatten
from mla_compile.passes.graph import Size
from mla_compile.passes.linear_map import LinearMap, Piece, Stop
from mla_compile.passes.site import AttentionSite


@dataclass(frozen=True)
class Rows:
    """The rows of one source: ``node`` as [batch, keys, width]; ``axes`` are its axes in the site's and own atoms."""

    node: fx.Node
    axes: tuple[Axis, ...]
    width: Axis

    @property
    def size(self) -> int:
        size = axis_size(self.width)
        assert isinstance(size, int)
        return size


@dataclass(frozen=True)
class AbsorbPlan:
    """Everything a rewrite needs; it decides nothing any more.

    ``latent`` are the rows that a weight expands (and the values' rows where they are the same), ``rope`` the rows that
    all heads share as they are, ``values`` the values' rows where they are not the latent.
    """

    site: AttentionSite
    keys: tuple[Term, ...]
    vals: tuple[Term, ...]
    batch: Axis
    heads: Axis
    latent: Rows
    rope: Rows | None
    values: Rows | None
    dims: Dims

    @property
    def value_rows(self) -> Rows:
        return self.values or self.latent

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        return tuple(r.node for r in (self.latent, self.rope, self.values) if r is not None)

    def sizes(self) -> tuple[Size, Size, Size]:
        """B, S, T."""
        return axis_size(self.batch), axis_size(self.site.queries), axis_size(self.site.keys)


def make_plan(site: AttentionSite, keys: list[LinearMap], values: LinearMap) -> AbsorbPlan | Stop:
    """The recipe for ``site``, or the first obligation that fails."""
    if not any(p.projected for p in (*pieces_of(keys), *pieces_of([values]))):
        return Stop(site.node, "not_mla", "no weight lies between the attention and the rows it reads")
    aligned = align(site, keys, values)
    if isinstance(aligned, Stop):
        return aligned
    site, key_terms, value_terms = aligned
    terms = [t for t in (*key_terms, *value_terms) if t.piece.source is not None]
    roles = _roles(site, terms)
    if isinstance(roles, Stop):
        return roles
    batch, heads = roles
    stop = _tokens_are_blind(site, (*key_terms, *value_terms), batch)
    if stop is not None:
        return stop
    rows = _rows(site, [t for t in key_terms if t.piece.source], [t for t in value_terms if t.piece.source], batch)
    if isinstance(rows, Stop):
        return rows
    latent, rope, vals = rows
    dims = _dims(site, key_terms, value_terms, heads, latent, rope, vals)
    return AbsorbPlan(site, key_terms, value_terms, batch, heads, latent, rope, vals, dims)


def _roles(site: AttentionSite, terms: list[Term]) -> tuple[Axis, Axis] | Stop:
    """Which lead atoms are batch and which are heads."""
    batch: list[Atom] = []
    heads: list[Atom] = []
    for atom in site.lead:
        kinds = {t.kind(atom) for t in terms}
        if kinds == {"token"}:
            batch.append(atom)
        elif "token" not in kinds:
            heads.append(atom)
        else:
            return Stop(site.node, "per_head_rope", "some of the rows differ from head to head, the latent does not")
    if not heads and len(batch) > 1:
        return Stop(site.node, "head_dependent_latent", "every head has rows of its own")
    return tuple(batch), tuple(heads)


def _tokens_are_blind(site: AttentionSite, terms: Sequence[Term], batch: Axis) -> Stop | None:
    for t in terms:
        node = t.piece.path[-1].node if t.piece.path else site.node
        for atom in site.keys:
            if t.piece.source is not None and t.kind(atom) != "token":
                return Stop(node, "token_mixing", "a key row is not the image of one row of the source")
        known = {*t.piece.source_atoms, *(t.piece.weight.atoms if t.piece.weight else ())}
        summed = t.product is not None and t.piece.weight is not None  # into the query, repeated columns too
        if t.piece.source is not None and not summed and not known.issuperset(t.features):
            return Stop(node, "unsupported_op", "one column of the rows stands for several")
        tokens = {t.at[a] for a in (*batch, *site.keys) if a in t.at}
        for factor in (t.piece.weight, t.piece.bias):
            if factor is not None and any(a in tokens for a in factor.atoms):
                return Stop(node, "position_dependent", "a weight that differs from token to token")
    return None


def _rows(
    site: AttentionSite, keys: list[Term], values: list[Term], batch: Axis
) -> tuple[Rows, Rows | None, Rows | None] | Stop:
    sources: dict[fx.Node, list[Term]] = {}
    for t in (*keys, *values):
        assert t.piece.source is not None
        sources.setdefault(t.piece.source, []).append(t)
    of_keys = list(dict.fromkeys(t.piece.source for t in keys if t.piece.source))
    of_values = list(dict.fromkeys(t.piece.source for t in values if t.piece.source))
    if len(of_keys) not in (1, 2) or len(of_values) != 1:
        return Stop(site.node, "too_many_sources", f"keys read {len(of_keys)} row tensors, values {len(of_values)}")
    rows: dict[fx.Node, Rows] = {}
    for node, terms in sources.items():
        layouts = {_row_axes(t, site, batch) for t in terms}
        if len(layouts) != 1:
            return Stop(site.node, "unsupported_op", "two maps that read the axes of one row tensor differently")
        (axes,) = layouts
        outer = {*batch, *site.keys}
        rows[node] = Rows(node, axes, tuple(a for a in flatten(axes) if a not in outer))
    value = of_values[0]
    # The latent is what the values read, where the keys read it too; else what a weight expands into keys.
    expanded = [n for n in of_keys if any(t.piece.projected for t in keys if t.piece.source is n)]
    latent = value if value in of_keys else (expanded or of_keys)[0]
    rope = next((rows[n] for n in of_keys if n is not latent), None)
    return rows[latent], rope, None if value is latent else rows[value]


def _row_axes(term: Term, site: AttentionSite, batch: Axis) -> tuple[Axis, ...]:
    """The source's axes, with the site's atoms in place of the piece's for batch and keys."""
    site_atom = {term.at[a]: a for a in (*batch, *site.keys)}
    return tuple(tuple(site_atom.get(a, a) for a in axis) for axis in term.piece.source_axes)


def _dims(
    site: AttentionSite,
    keys: tuple[Term, ...],
    values: tuple[Term, ...],
    heads: Axis,
    latent: Rows,
    rope: Rows | None,
    vals: Rows | None,
) -> Dims:
    def width(terms: list[Term]) -> int:
        return sum(t.stop - t.start for t in terms)

    heads_size, values_size = axis_size(heads), width(list(values))
    assert isinstance(heads_size, int)
    nope = [t for t in keys if t.piece.source is None or t.piece.source is latent.node]
    return Dims(
        H=heads_size,
        L=latent.size if vals is None else (latent.size + vals.size + 1) // 2,
        R=0 if rope is None else rope.size,
        N=width(nope),
        V=values_size,
    )


def pieces_of(maps: list[LinearMap]) -> list[Piece]:
    """Every piece that has a source."""
    return [p for m in maps for p in m.pieces if p.source is not None]
