"""Finds caches that hold K and V per head and that can hold their latent rows instead.

Before (the caller keeps K and V per head between calls)::

    k_new, v_new = linear(c_new, W); K = cat([past_k, k_new]); V = cat([past_v, v_new])
    return attention(q, K, V), K, V

After::

    c = cat([past_c, c_new]); K, V = linear(c, W)
    return attention(q, K, V), c

A buffer of full length is treated in the same way, with a write instead of the ``cat``::

    K = index_copy(buffer, tokens, at, k_new)    becomes    c = index_copy(rows, tokens, at, c_new); K = linear(c, W)

This is also correct at positions that have not been written yet, because rows of zeros make zeros: a bias becomes the
weight of an additional column of the rows, which is 1 only at written positions.

K and V of the attention are then expanded from rows, and other passes absorb the expansion. This is legal if old and
new rows have the same recipe (:mod:`mla_compile.passes.cache.recipe`). A past tensor that carries its recipe proves
this. For the inputs in ``assume``, the caller is responsible: the past must be an output of the rewritten program, or a
cache that was converted for this program.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.cache.readers import Read, alone, grouped, sides_of
from mla_compile.passes.cache.recipe import Ingredient, Recipe, make_recipe
from mla_compile.passes.cache.shown import seen_through_views
from mla_compile.passes.cache.stacked import FullRecipe, stacked
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.moves import Join, Permute, Select, Slice, Stack
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Maps, Piece
from mla_compile.passes.linear.rows import picked_of
from mla_compile.passes.sources.along_tokens import computes
from mla_compile.passes.sources.records import Side, pieces_of
from mla_compile.passes.sources.row_slices import with_slices_of
from mla_compile.passes.sources.selections import Selected, place_of
from mla_compile.passes.sources.sources import choose_sources
from mla_compile.passes.sources.writes import CacheWrite, is_zeros, write_of


@dataclass(frozen=True)
class Past:
    """An input that holds K or V: its recipe, the weights with which it was made, and its rows.

    ``rows`` holds one key for each tensor of rows. Inputs with a common key share the tensor.
    """

    recipe: Recipe
    leaves: tuple[fx.Node, ...]
    rows: tuple[Hashable, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class CacheOfRows:
    """One K or V of a cache that can be kept as rows: the tensor, its parts in order of time, and its recipe.

    ``sides``: output of each attention that reads the tensor -> whether the tensor is read as keys, values or both.
    ``write``: the write of the new part into a buffer of full length, if the new part is not joined to the past.
    ``emptied``: the input that the tensor overwrites, if the write starts from zeros and keeps no old contents.
    """

    node: fx.Node
    recipe: Recipe
    leaves: tuple[fx.Node, ...]
    parts: tuple[fx.Node | tuple[Ingredient, ...], ...]
    outputs: tuple[int, ...]
    sides: Mapping[fx.Node, frozenset[Side]]
    write: CacheWrite | None = None
    emptied: fx.Node | None = None

    @property
    def pasts(self) -> tuple[fx.Node, ...]:
        """The inputs among the parts, or the ``emptied`` input."""
        read = tuple(p for p in self.parts if isinstance(p, fx.Node) and not is_zeros(p))
        return read if self.emptied is None else (self.emptied,)


def find_caches(
    graph: fx.Graph,
    sites: Sequence[AttentionSite],
    maps: Maps,
    pasts: Mapping[fx.Node, Past],
    returned: Mapping[fx.Node, tuple[int, ...]],
    assume: Iterable[fx.Node] = (),
    overwritten: Mapping[fx.Node, fx.Node] | None = None,
    *,
    packs: bool = False,
) -> list[CacheOfRows]:
    """Return the K and V of ``sites`` that can be kept as rows. For some sites, this may be only K or only V.

    ``returned``: the values that the caller gets, and their indices in the output. ``assume``: inputs that are assumed
    to hold what this graph itself returned. ``overwritten``: value -> the input to which it is written in place.
    ``packs``: whether rows that a weight expands are kept in float8.
    """
    search = _Search(maps, pasts, returned, frozenset(assume), overwritten or {}, packs)
    found: dict[fx.Node, CacheOfRows] = {}
    for group in grouped([(site, search.read(site)) for site in sites]):
        read: dict[Side, dict[fx.Node, int]] = {"keys": {}, "values": {}}
        for _, own in group:
            for side in read:
                read[side] |= own[side]
        tensors = read["keys"] | read["values"]
        # Values alone are tried before keys alone, because the usual obstacle is an operator on keys (rotation, norm).
        options = [tensors, alone(read, "values"), alone(read, "keys")]
        # If a weight makes keys or values from a cached tensor, the model already caches latents and also returns K.
        # In this case, either all tensors become rows or none does.
        if any(search.expands(own, site) for site, own in group):
            options = options[:1]
        for chosen in options:
            sides = {t: {site.node: at for site, own in group if (at := sides_of(own, t))} for t in chosen}
            kept = search.keep(chosen, sides, [site for site, _ in group]) if chosen else None
            if kept and _saves(kept, alone=chosen is not tensors):
                found.update((k.node, k) for k in kept)
                break
    shown = seen_through_views(graph)
    return [k for k in found.values() if not k.outputs or k.node not in shown]


@dataclass(frozen=True)
class _Search:
    """The arguments of :func:`find_caches`."""

    maps: Maps
    pasts: Mapping[fx.Node, Past]
    returned: Mapping[fx.Node, tuple[int, ...]]
    assumed: frozenset[fx.Node]
    overwritten: Mapping[fx.Node, fx.Node]
    packs: bool

    def read(self, site: AttentionSite) -> Read:
        """Return the cached tensors that an attention reads."""
        keys = [self.cached(product.k, site) for product in site.products]
        return {"keys": {t: at for one in keys for t, at in one.items()}, "values": self.cached(site.v, site)}

    def expands(self, cached: Read, site: AttentionSite) -> bool:
        """Whether a weight makes keys or values from one of the ``cached`` tensors."""
        sides: list[tuple[Side, Operand]] = [("keys", p.k) for p in site.products] + [("values", site.v)]
        for side, operand in sides:
            ways = [p.path for p in self.maps.map(operand.node).pieces if p.path]
            if any(v.node in cached[side] and v.contractions < way[-1].contractions for way in ways for v in way):
                return True
        return False

    def cached(self, operand: Operand, site: AttentionSite) -> dict[fx.Node, int]:
        """Return the tensor upstream of ``operand`` that the caller keeps, with its token axis.

        The result is empty if there is no such tensor.
        """
        ways = self._ways(operand.node)
        # The walk starts at K: of several tensors that could be the cache, the one nearest to the attention is taken.
        computed = False
        for node in reversed(ways[0]) if ways else ():
            if not all(node in way for way in ways):
                continue
            written = self._written(node, operand, site)
            if written is not None and written[0].node in self.returned:
                return {written[0].node: written[1]}
            # A write that is not returned is no cache. Upstream of such a write, only another write can be a cache.
            if computed := computed or written is not None:
                continue
            grows = self._grows(node)
            # An assumed past must be returned, because it is assumed to hold an output of this graph. A past that
            # carries its recipe does not have to be returned.
            known = node in self.pasts or (
                grows and all(p in self.pasts for p in _parts_of(node, Join) if p.op == "placeholder")
            )
            # A tensor that the caller neither gets back nor passes with its recipe is not a cache.
            if node not in self.returned and not known:
                continue
            tokens = self._token_axis(node, operand, site)
            if grows:
                how = decode(node)
                assert isinstance(how, Join)
                # A tensor joined along another axis, such as the heads, does not grow by tokens.
                if tokens is not None and tokens != how.dim:
                    continue
                tokens = how.dim
            return {node: tokens if tokens is not None else _likely_token_axis(node)}
        return {}

    def _ways(self, node: fx.Node) -> list[dict[fx.Node, None]]:
        """Return, for each source of ``node``, the nodes on the way from the source to ``node``.

        If a source picks tokens of a tensor, the nodes on the way to this tensor are included.
        """
        ways: list[dict[fx.Node, None]] = []
        for piece in self.maps.map(node).pieces:
            if piece.source is not None:
                picked = picked_of(piece.source)
                own = dict.fromkeys((piece.source, *(v.node for v in piece.path)))
                ways += [own] if picked is None else [way | own for way in self._ways(picked.x)]
        return ways

    def _written(self, node: fx.Node, operand: Operand, site: AttentionSite) -> tuple[CacheWrite, int] | None:
        """Return the write of new tokens into the buffer ``node``, and the token axis; None if there is no such write.

        ``node`` may also be a part of the buffer.
        """
        whole, axes, write = node, [*range(len(shape(node)))], self._apart.get(place_of(node))
        if write is None and node in self.returned and isinstance(decode(node), Slice):  # a moving window
            write = self._write(node)
        while write is None and isinstance(shown := decode(whole), (Slice, Permute, Select)):
            if isinstance(shown, Permute) and shown.map is not None:
                axes = [shown.map.read_along(k)[0] for k in axes]
            elif isinstance(shown, Select):
                axes = [k + (k >= shown.dim) for k in axes]
            whole = shown.x
            write = self._apart.get(place_of(whole))
        axes = axes if write is None else [write.outer(k) for k in axes]
        write = write or self._write(whole)
        if write is None or not write.dims:
            return None
        shown_as = self._token_axis(node, operand, site)
        # If a size of 1 hides the token axis, take the last axis along which values are written.
        tokens = write.dims[-1] if shown_as is None else axes[shown_as]
        write = self._token_write(write.node, tokens)
        return None if write is None else (write, tokens)

    def _token_write(self, node: fx.Node, tokens: int) -> CacheWrite | None:
        """Return ``node`` as a write along its axis ``tokens``; None if ``node`` is not such a write."""
        write = self._write(node)
        # K that is assembled from columns is a write as well, but not along tokens.
        if write is None or tokens not in write.dims:
            return None
        stacks = [how for part in write.parts if isinstance(how := decode(part), Stack)]
        dims = {(how.dim, len(how.parts)) for how in stacks}
        if len(stacks) < len(write.parts) or len(dims) > 1 or (dim := write.outer(stacks[0].dim)) in write.dims:
            return write
        # Stacked heads have a common recipe. Stacked K and V have no common recipe, so they are taken apart.
        own = write.inner(tokens)
        one = all(not isinstance(make_recipe(p, self.maps.map(p), own), Stop) for p in write.parts)
        new = tuple(tuple(n for part in parts for n in _parts_of(part, Stack)) for parts in write.new)
        return write if one else replace(write, new=new, stacked=(*write.stacked, dim))

    @cached_property
    def _apart(self) -> dict[Selected, CacheWrite]:
        """A map from parts to writes, for returned tensors that are written part by part."""
        writes = [write for node in self.returned if (write := self._write(node)) is not None]
        return {Selected(part): write for write in writes for part in write.apart.nodes}

    def _write(self, node: fx.Node) -> CacheWrite | None:
        write = write_of(node, self._is_past) or write_of(node, is_zeros)
        return None if write is None or any(map(self._is_past, write.parts)) else write

    def _token_axis(self, node: fx.Node, operand: Operand, site: AttentionSite) -> int | None:
        """Return the axis of ``node`` along which the attention's keys run; None if a size of 1 hides the axis."""
        where = next((k for k, own in enumerate(operand.axes) if own and set(own) == set(site.keys)), None)
        if where is None:
            return None
        return self._axis_of(node, operand.node, where)

    def _axis_of(self, node: fx.Node, shown: fx.Node, where: int) -> int | None:
        piece: Piece = self.maps.with_sources({node}).map(shown).pieces[0]
        own = piece.axes[where]
        at = next((k for k, a in enumerate(piece.source_axes) if a and set(a) == set(own)), None)
        picked = None if piece.source in (None, node) else picked_of(piece.source)
        return at if picked is None or at is None else self._axis_of(node, picked.x, at)

    def _is_past(self, node: fx.Node) -> bool:
        return node in self.pasts or node in self.assumed

    def _grows(self, node: fx.Node) -> bool:
        return any(map(self._is_past, _parts_of(node, Join)))

    def keep(
        self,
        tensors: Mapping[fx.Node, int],
        sides: Mapping[fx.Node, Mapping[fx.Node, frozenset[Side]]],
        sites: Iterable[AttentionSite],
    ) -> list[CacheOfRows] | None:
        """Return how ``tensors`` are kept as rows that are chosen together; None if one tensor cannot be kept."""
        writes = {n: write for n, tokens in tensors.items() if (write := self._token_write(n, tokens)) is not None}
        if any(not self._read_parts(sites).issuperset(write.apart.nodes) for write in writes.values()):
            return None
        parts = {n: self._parts(n, writes.get(n)) for n in tensors}
        buffers = {write.buffer for write in writes.values()}
        new = [p for own in parts.values() for p in own if not self._is_past(p) and p not in buffers]
        # Only gates (rows times one factor each) become virtual sources, so that the factor is applied before the
        # weight.
        gates = with_slices_of([new], self.maps).virtual.gates if new else {}
        maps = self.maps.with_virtual(replace(self.maps.virtual, gates=gates)) if gates else self.maps
        cuts, _ = choose_sources(pieces_of([maps.map(p) for p in new]))
        at_cuts = maps.with_sources(cuts)
        written = [p for write in writes.values() for p in write.parts if p in new]
        marked = {p.source for part in written for p in at_cuts.map(part).pieces if p.bias is not None}
        kept: list[CacheOfRows] = []
        for node, tokens in tensors.items():
            made = {p: at_cuts.map(p) for p in parts[node] if p in new}
            one = self._keep_one(node, sides[node], tokens, parts[node], made, writes.get(node), marked)
            if one is None:
                return None
            kept.append(one)
            for part, lmap in made.items():  # a call may return its new tokens separately as well
                if part in self.returned and part is not node:
                    own = self._keep_one(part, sides[node], tokens, [part], {part: lmap})
                    kept += [] if own is None else [own]
        return kept

    def _read_parts(self, sites: Iterable[AttentionSite]) -> set[fx.Node]:
        """Return the nodes on the paths to keys and values. Each selection is replaced by the selected part."""
        operands = (operand.node for site in sites for operand in (site.v, *(p.k for p in site.products)))
        ways = (p.path for node in operands for p in self.maps.map(node).pieces)
        return {place_of(v.node, shown=True).node for way in ways for v in way}

    def _parts(self, node: fx.Node, write: CacheWrite | None) -> list[fx.Node]:
        """Return the past and the new tokens from which ``node`` is assembled, in order of time."""
        if write is not None:
            return [write.buffer, *write.parts]
        return [node] if node in self.pasts or not self._grows(node) else _parts_of(node, Join)

    def _keep_one(
        self,
        node: fx.Node,
        sides: Mapping[fx.Node, frozenset[Side]],
        tokens: int,
        parts: Sequence[fx.Node],
        new: Mapping[fx.Node, LinearMap],
        write: CacheWrite | None = None,
        marked: Collection[fx.Node | None] = (),
    ) -> CacheOfRows | None:
        known: set[tuple[Recipe, tuple[fx.Node, ...]]] = set()
        taken: list[fx.Node | tuple[Ingredient, ...]] = []
        dtypes: set[tuple[torch.dtype, ...]] = set()
        emptied = self.overwritten.get(node) if write is not None and is_zeros(write.buffer) else None
        every: list[tuple[fx.Node, ...]] = [(p,) for p in parts] if write is None else [(write.buffer,), *write.new]
        for several in every:
            if several[0] not in new:
                taken += several
                continue
            made = self._made(several, new, tokens, write)
            if made is None:
                return None
            recipe, ingredients, leaves = made
            if write is not None:
                marks = tuple(i.node in marked for i in ingredients)
                recipe = replace(recipe, marked=marks) if any(marks) else recipe
                if not _may_hold_rows(write, recipe):
                    return None
            known.add((recipe, leaves))
            dtypes.add(tuple(recipe.held_dtype(k, val(i.node).dtype) for k, i in enumerate(ingredients)))
            taken.append(ingredients)
        for past in (self.pasts[p] for p in (*parts, emptied) if p is not None and p in self.pasts):
            known.add((past.recipe, past.leaves))
            dtypes.add(past.dtypes)
        # Old and new rows can be joined only if they have the same recipe, the same weights and the same dtype.
        if len(known) != 1 or len(dtypes) != 1:
            return None
        ((recipe, leaves),) = known
        outputs = self.returned.get(node, ())
        return CacheOfRows(node, recipe, leaves, tuple(taken), outputs, sides, write, emptied)

    def _made(
        self, parts: Sequence[fx.Node], maps: Mapping[fx.Node, LinearMap], tokens: int, write: CacheWrite | None
    ) -> FullRecipe | None:
        """Return the recipe of the new tokens ``parts``, which ``write`` stacks; None if there is no recipe."""
        own = tokens if write is None else write.inner(tokens)
        made = [make_recipe(p, maps[p], own, packs=self.packs) for p in parts]
        known = [m for m in made if not isinstance(m, Stop) and any(p.weight is not None for p in m[0].parts)]
        if len(known) < len(parts):
            return None
        if write is None or not write.stacked:
            return known[0]
        counts = [shape(write.node)[k] for k in write.stacked]
        return stacked(known, write.stacked, [n for n in counts if isinstance(n, int)])


def _may_hold_rows(write: CacheWrite, recipe: Recipe) -> bool:
    """Whether the buffer to which ``write`` writes can become a buffer of rows."""
    # Rows have no head axis along which to write. Packed rows have no place for a mark and allow no arithmetic.
    plain = not any(recipe.packed) or not (any(recipe.marked) or computes(write.made))
    return plain and all(recipe.kinds[dim] == "row" for dim in write.dims)


def _parts_of(node: fx.Node, kind: type[Join] | type[Stack]) -> list[fx.Node]:
    how = decode(node)
    return list(how.parts) if isinstance(how, kind) else []


def _likely_token_axis(node: fx.Node) -> int:
    """Guess the token axis of a cache of one token.

    If axis -2 has size 1, as in [B,H,T,F], or no axis has size 1, the guess is axis -2. Otherwise, it is the last axis
    of size 1.
    """
    ones = [k for k, s in enumerate(shape(node)) if s == 1]
    rank = len(shape(node))
    return rank - 2 if rank - 2 in ones or not ones else ones[-1]


def _saves(kept: Sequence[CacheOfRows], *, alone: bool) -> bool:
    """Whether the rows hold fewer values per token than the tensors that they replace.

    If the rows replace only keys or only values (``alone``), they must hold less than half as many values.
    """
    # Rows are counted once for each node, because K and V may be made from the same rows.
    rows: dict[Hashable, int] = {}
    for k in kept:
        ingredients = next((p for p in k.parts if not isinstance(p, fx.Node)), None)
        for index in range(len(k.recipe.widths)):
            rows[(k.node, index) if ingredients is None else ingredients[index].node] = k.recipe.row_values(index)
    # Every head multiplies whole rows. If rows replace only one side, these products cost more than a few values save.
    # If all tensors are inputs that carry rows, the rows are kept in any case.
    held, values = sum(rows.values()) * (2 if alone else 1), sum(k.recipe.values for k in kept)
    return held < values or all(k.node in k.parts for k in kept)
