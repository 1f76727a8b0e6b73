"""Plan the absorbed form of an attention whose keys and values are linear images of narrow rows.

The proof obligations, checked here one by one on the refined maps:

* Every atom of the keys is a token of every source. Otherwise, tokens are mixed.
* No weight or bias depends on a token atom, because it would depend on the position. A weight may depend on a batch
  atom, such as a group of heads with separate rows.
* No column of the rows represents several columns of K or V. Keys made by a weight are an exception, because
  ``q W^T`` sums over repeated columns.
* Every lead atom is either a token of all sources (batch) or of none (a head). So one row serves all heads. Groups of
  heads with separate latents are an exception: they may share other rows.
* The keys come from at most two row tensors, and the values from one. The joined sources of a sum count as one.

A plan for a *part* of an attention (:mod:`mla_compile.passes.decide.partial`) need not meet the last two obligations.
Each head may have separate rows, there may be any number of row tensors, and one side may stay unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from mla_compile.core.dims import Dims
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.attention.visible import visible
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, fixed_size, flatten
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import Maps, Term
from mla_compile.passes.sources.records import AbsorbPlan, Rows, Side, groups_of, pieces_of, selected
from mla_compile.passes.sources.refine import refine, value_features


def make_plan(site: AttentionSite, maps: Maps, *, by_hand: bool = False) -> AbsorbPlan | Stop:
    """Return the plan for ``site``, or the first obligation that fails.

    ``by_hand``: whether the rows may be used as keys and values directly, with no weight in between.
    """
    found = _obligations(site, maps, ("keys", "values"), part=False, by_hand=by_hand)
    if isinstance(found, Stop):
        return found
    site, key_terms, value_terms, batch, heads = found.site, found.keys, found.values, found.batch, found.heads
    if by_hand and not all(isinstance(a.size, int) for a in heads):
        return Stop(site.node, "not_mla", "tokens that the code writes like heads share rows")
    of_keys, of_values = found.sources(key_terms), found.sources(value_terms)
    # The operator takes one tensor each of latent, rotary and value rows. If there are more tensors, only a plan for a
    # part is possible, which rewrites each product separately.
    if _row_tensors(key_terms) not in (1, 2) or _row_tensors(value_terms) != 1:
        return Stop(site.node, "too_many_sources", f"keys read {len(of_keys)} row tensors, values {len(of_values)}")
    shared = set(of_values) <= set(of_keys)
    latents = of_values if shared else [_latent(key_terms, of_keys, of_values[0])]
    latent = found.joined(latents)
    others = [n for n in of_keys if n not in latents]
    rope = found.joined(others) if others else None
    vals = None if shared else found.joined(of_values)
    dims = _dims(site, key_terms, value_terms, heads, latent, rope, vals)
    dims = replace(dims, G=fixed_size(groups_of((*key_terms, *value_terms), batch)))
    seen = visible(site, batch)
    return AbsorbPlan(site, key_terms, value_terms, batch, heads, latent, rope, vals, dims, seen)


def make_part_plan(site: AttentionSite, maps: Maps, sides: Collection[Side]) -> AbsorbPlan | Stop:
    """Return the plan for the given ``sides`` of ``site``; the other side stays unchanged."""
    found = _obligations(site, maps, sides, part=True)
    if isinstance(found, Stop):
        return found
    site, key_terms, value_terms = found.site, found.keys, found.values
    of_keys, of_values = found.sources(key_terms), found.sources(value_terms)
    shared = [n for n in of_keys if not found.rows[n].heads]
    # The operator reads one shared row per token. Per-head rows are possible only for keys, because their scores can be
    # added to the mask.
    fits = len(of_values) == 1 and not found.rows[of_values[0]].heads and bool(shared)
    if fits:
        value: fx.Node | None = of_values[0]
        latent = _latent(key_terms, shared, of_values[0])
        rope = next((found.rows[n] for n in shared if n is not latent), None)
    else:
        sources = [t.piece.source for t in (*value_terms, *key_terms) if t.piece.projected]
        expanded = [n for n in sources if n is not None]
        # This latent is used for cost estimates only. The rewrite of the products looks up the rows of each term.
        latent = next((n for n in expanded if not found.rows[n].heads), expanded[0])
        value = rope = None
    vals = None if value is None or value is latent else found.rows[value]
    named = {latent, value, None if rope is None else rope.node}
    extra = tuple(r for n, r in found.rows.items() if n not in named)
    dims = _part_dims(site, key_terms, found.heads, found.rows[latent], (*key_terms, *value_terms))
    if isinstance(dims, Stop):
        return dims
    seen = visible(site, found.batch)
    return AbsorbPlan(
        site, key_terms, value_terms, found.batch, found.heads, found.rows[latent], rope, vals, dims, seen, extra, fits,
        part=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _Found:
    """What the obligations establish: the refined terms, the roles of the lead atoms, and the rows of each source."""

    site: AttentionSite
    keys: tuple[Term, ...]
    values: tuple[Term, ...]
    batch: Axis
    heads: Axis
    rows: dict[fx.Node, Rows] = field(default_factory=dict)

    def sources(self, terms: Sequence[Term]) -> list[fx.Node]:
        return list(dict.fromkeys(t.piece.source for t in terms if t.piece.source is not None))

    def joined(self, sources: Sequence[fx.Node]) -> Rows:
        """Return the joined rows of ``sources``, with all columns side by side."""
        first, *others = (self.rows[n] for n in sources)
        if not others:
            return first
        width = Atom(first.size + sum(r.size for r in others))
        return Rows(first.node, first.axes, (width,), first.heads, (first, *others))


def _row_tensors(terms: Sequence[Term]) -> int:
    """Return how many row tensors ``terms`` read. Tensors that add up to the same columns count as one."""
    together: list[set[fx.Node]] = []
    columns: dict[tuple[int | None, int], set[fx.Node]] = {}
    for t in terms:
        if t.piece.source is not None:
            columns.setdefault((t.product, t.start), set()).add(t.piece.source)
    for sources in columns.values():
        meeting = [one for one in together if one & sources]
        together = [one for one in together if not one & sources] + [sources.union(*meeting)]
    return len(together)


def _obligations(
    site: AttentionSite, maps: Maps, sides: Collection[Side], *, part: bool, by_hand: bool = False
) -> _Found | Stop:
    keys = [maps.map(p.k.node) for p in site.products] if "keys" in sides else None
    values = maps.map(site.v.node) if "values" in sides else None
    if not by_hand and not any(p.projected for p in pieces_of([*(keys or ()), *([] if values is None else [values])])):
        return Stop(site.node, "not_mla", "no weight lies between the attention and the rows it reads")
    refined = refine(site, keys, values)
    if isinstance(refined, Stop):
        return refined
    site, key_terms, value_terms = refined
    terms = [t for t in (*key_terms, *value_terms) if t.piece.source is not None]
    roles = _roles(site, terms, part=part)
    if isinstance(roles, Stop):
        return roles
    batch, heads = roles
    stop = _tokens_are_blind(site, (*key_terms, *value_terms))
    if stop is not None:
        return stop
    found = _Found(site, key_terms, value_terms, batch, heads)
    stop = _read_rows(found, terms)
    return found if stop is None else stop


def _roles(site: AttentionSite, terms: list[Term], *, part: bool) -> tuple[Axis, Axis] | Stop:
    """Split the lead atoms into batch and heads, or return why that fails."""
    batch: list[Atom] = []
    heads: list[Atom] = []
    groups = groups_of(terms, site.lead)
    for atom in site.lead:
        kinds = {t.kind(atom) for t in terms}
        # Groups of heads with separate latents may share other rows, such as a rotary key.
        if kinds == {"token"} or (kinds == {"token", "broadcast"} and atom in groups):
            batch.append(atom)
        elif "token" not in kinds or part:
            heads.append(atom)
        else:
            return Stop(site.node, "per_head_rope", "some rows differ from head to head, but the latent does not")
    # The model selects positions along these axes after the softmax. Like heads, all positions must share rows.
    for atom in (a for p in site.products for a in selected(site, p)):
        if any(t.kind(atom) == "token" for t in terms):
            return Stop(site.node, "head_dependent_latent", "keys that are selected together have rows of their own")
    # If every head has separate rows, nothing is shared: absorption would make each key as wide as the latent.
    if not heads and len(batch) > 1:
        return Stop(site.node, "head_dependent_latent", "every head has rows of its own")
    return tuple(batch), tuple(heads)


def _tokens_are_blind(site: AttentionSite, terms: Sequence[Term]) -> Stop | None:
    """Check the first three obligations, which each term has to meet separately."""
    for t in terms:
        node = t.piece.path[-1].node if t.piece.path else site.node
        for atom in site.keys:
            if t.piece.source is not None and t.kind(atom) != "token":
                return Stop(node, "token_mixing", "a key or value is not the image of the row of its own token alone")
        known = {*t.piece.source_atoms, *(t.piece.weight.atoms if t.piece.weight else ())}
        # Repeated columns of K add up in q . K. Repeated columns of V would each have to be written to the output.
        summed = t.product is not None and t.piece.weight is not None  # q W^T sums over the repeated columns
        if t.piece.source is not None and not summed and not known.issuperset(t.features):
            return Stop(node, "unsupported_op", "one column of the rows stands for several")
        # A weight that differs from token to token cannot be moved past the sum over tokens.
        tokens = {t.at[a] for a in site.keys if a in t.at}
        for factor in (t.piece.weight, t.piece.bias):
            if factor is not None and any(a in tokens for a in factor.atoms):
                return Stop(node, "position_dependent", "a weight that differs from token to token")
    return None


def _read_rows(found: _Found, terms: Sequence[Term]) -> Stop | None:
    """Fill ``found.rows`` with the rows of every source. All terms that read a source must agree on its layout."""
    by_source: dict[fx.Node, list[Term]] = {}
    for t in terms:
        assert t.piece.source is not None
        by_source.setdefault(t.piece.source, []).append(t)
    for node, using in by_source.items():
        # A tensor that is read in two ways would need two layouts in memory.
        own = {tuple(a for a in found.heads if t.kind(a) == "token") for t in using}
        layouts = {_row_axes(t, (*found.batch, *found.site.keys, *heads)) for t in using for heads in own}
        if len(layouts) != 1 or len(own) != 1:
            return Stop(found.site.node, "unsupported_op", "two maps that read the axes of one row tensor differently")
        (axes,), (heads,) = layouts, own
        outer = {*found.batch, *found.site.keys, *heads}
        found.rows[node] = Rows(node, axes, tuple(a for a in flatten(axes) if a not in outer), heads)
    return None


def _latent(keys: Sequence[Term], of_keys: Sequence[fx.Node], value: fx.Node) -> fx.Node:
    """Return the rows of the values if the keys also read them; otherwise rows that a weight expands into keys."""
    if value in of_keys:
        return value
    expanded = [n for n in of_keys if any(t.piece.projected for t in keys if t.piece.source is n)]
    return (expanded or of_keys)[0]


def _row_axes(term: Term, outer: Axis) -> tuple[Axis, ...]:
    """Return the source's axes. Use the site's atoms in ``outer`` if possible, and the piece's atoms otherwise."""
    site_atom = {term.at[a]: a for a in outer if a in term.at}
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
    of_latent = {r.node for r in latent.each}
    own = _columns(site, [t for t in keys if t.piece.source is None or t.piece.source in of_latent])
    rotary = 0 if rope is None else rope.size
    # R is the total width of all rows that the scores read, minus the width of one latent.
    widths = {r.node: r.size for rows in (latent, rope) if rows is not None for r in rows.each}
    read = {(t.product, t.piece.source): widths[t.piece.source] for t in keys if t.piece.source is not None}
    total = sum(_copies(site, product) * size for (product, _), size in read.items())
    again = max(0, total - latent.size - rotary)
    summed = len(keys) > len({(t.product, t.start) for t in keys})
    return Dims(
        H=fixed_size(heads),
        # Two latents are treated as one with their mean width, rounded up, because the cost formulas have a single L.
        L=latent.size if vals is None else (latent.size + vals.size + 1) // 2,
        R=rotary + again,
        N=own,
        V=_columns(site, values),
        A=max(0, own + rotary + again - _columns(site, keys)) if summed or again else 0,
    )


def _columns(site: AttentionSite, terms: Sequence[Term]) -> int:
    """Return how many columns of K or V ``terms`` make; the terms of a sum make the same columns."""
    widths = {(t.product, t.start): t.stop - t.start for t in terms}
    return sum(_copies(site, product) * width for (product, _), width in widths.items())


def _copies(site: AttentionSite, product: int | None) -> int:
    """Return how many scores ``product`` makes per query, key and head. The model selects some of them later."""
    return 1 if product is None else fixed_size(selected(site, site.products[product]))


def _part_dims(
    site: AttentionSite, keys: Sequence[Term], heads: Axis, latent: Rows, terms: Sequence[Term]
) -> Dims | Stop:
    """Return the sizes of a part. N is the number of expanded columns of K (all if K stays), R the number of others."""
    widths = [(axis_size(p.features), _copies(site, n)) for n, p in enumerate(site.products)]
    total = sum(size * copies for size, copies in widths if isinstance(size, int))
    value = axis_size(value_features(site))
    all_known = all(isinstance(axis_size(p.features), int) for p in site.products)
    count = axis_size(heads)
    if not all_known or not isinstance(value, int) or not isinstance(count, int):
        return Stop(site.node, "unsupported_op", "a number of heads or a width that is not a constant")
    expanded = _columns(site, [t for t in keys if t.piece.projected]) if keys else total
    groups = fixed_size(groups_of(terms, site.lead))
    return Dims(H=count, L=latent.size, R=total - expanded, N=expanded, V=value, G=groups)
