"""A cache that holds K and V per head keeps their latent rows instead.

Before (K and V per head are what the caller keeps between calls)::

    k_new, v_new = linear(c_new, W); K = cat([past_k, k_new]); V = cat([past_v, v_new])
    return attention(q, K, V), K, V

After::

    c = cat([past_c, c_new]); K, V = linear(c, W)
    return attention(q, K, V), c

The attention then is one whose K and V are expanded from rows, which the other passes absorb. This is legal where what
the past holds was made from rows by the same recipe (:mod:`mla_compile.passes.recipe`): known of tensors that carry
their recipe, or taken for granted (``assume``) where a program is given a new signature, and only its own outputs, or a
cache converted for it, are to come back as its past.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.arrange import Sizes, arrange
from mla_compile.passes.graph import Builder, argument, axis, packet, remove_dead_code, shape, val
from mla_compile.passes.judge import choose_sources
from mla_compile.passes.linear_map import LinearMap, LinearMaps, Piece, Stop
from mla_compile.passes.plan import pieces_of
from mla_compile.passes.recipe import Ingredient, Recipe, expand, make_recipe
from mla_compile.passes.site import AttentionSite, Operand

aten = torch.ops.aten


@dataclass(frozen=True)
class Past:
    """What is known of an input that holds K or V: its recipe, the weights it was made with, and which rows it has.

    ``rows`` name them: inputs that share a name share the rows.
    """

    recipe: Recipe
    leaves: tuple[fx.Node, ...]
    rows: tuple[Hashable, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Kept:
    """One K or V of a cache, as it may be kept: the tensor, its parts in order of time, and how rows make it."""

    node: fx.Node
    recipe: Recipe
    leaves: tuple[fx.Node, ...]
    parts: tuple[fx.Node | tuple[Ingredient, ...], ...]
    outputs: tuple[int, ...]

    @property
    def pasts(self) -> tuple[fx.Node, ...]:
        return tuple(p for p in self.parts if isinstance(p, fx.Node))


@dataclass
class LatentCache:
    """What became of the inputs and outputs of a graph.

    Attributes:
        inputs: placeholders that are gone -> the names of the placeholders of their rows.
        outputs: index in the flat output -> where in the flat output its rows are; the value at the index is None.
        recipes: of every such input (by name) and output (by index), with the names of the weights it reads.
        rows: the names of the placeholders of rows, in order.
        grows: index in the flat output -> the placeholder that is its past.
    """

    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recipes: dict[str | int, tuple[Recipe, tuple[str, ...]]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    grows: dict[int, str] = field(default_factory=dict)


def find_caches(
    graph: fx.Graph,
    sites: Sequence[AttentionSite],
    maps: LinearMaps,
    pasts: Mapping[fx.Node, Past],
    returned: Mapping[fx.Node, tuple[int, ...]],
    assume: Iterable[fx.Node] = (),
) -> list[Kept]:
    """The K and V of ``sites`` that can be kept as rows.

    ``returned``: the values that the caller gets, and at which indices of the output. ``assume``: inputs taken to hold
    what this graph itself returned.
    """
    found: dict[fx.Node, Kept] = {}
    allowed = set(assume)
    for site in sites:
        tensors: dict[fx.Node, int] = {}
        for operand in (*(p.k for p in site.products), site.v):
            tensors.update(_cached(operand, site, maps, pasts, returned, allowed))
        if tensors and not any(t in found for t in tensors):
            kept = _keep(tensors, maps, pasts, returned, allowed)
            if kept and _saves(kept):
                found.update((k.node, k) for k in kept)
    return [k for k in found.values() if not _seen_through_a_view(graph, k)]


def _cached(
    operand: Operand,
    site: AttentionSite,
    maps: LinearMaps,
    pasts: Mapping[fx.Node, Past],
    returned: Mapping[fx.Node, tuple[int, ...]],
    assume: set[fx.Node],
) -> dict[fx.Node, int]:
    """The tensor that ``operand`` shows and the caller keeps, with its axis of tokens."""
    pieces = maps.map(operand.node).pieces
    ways = [dict.fromkeys((p.source, *(v.node for v in p.path))) for p in pieces if p.source is not None]
    for node in reversed(ways[0]) if ways else ():
        if node is None or not all(node in way for way in ways):
            continue
        grows = _grows(node, pasts, assume)
        # An assumed past comes back as what is returned here; one that carries its recipe needs no such promise.
        known = node in pasts or (grows and all(p in pasts for p in _joined(node) or () if p.op == "placeholder"))
        if node not in returned and not known:
            continue
        tokens = _token_axis(node, operand, site, maps)
        if grows:
            at = axis(argument(node, 1, "dim", 0), len(shape(node)))
            if tokens is not None and tokens != at:
                continue
            tokens = at
        return {node: tokens if tokens is not None else _likely_token_axis(node)}
    return {}


def _joined(node: fx.Node) -> list[fx.Node] | None:
    if packet(node) not in (aten.cat, aten.concat):
        return None
    parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    return parts


def _token_axis(node: fx.Node, operand: Operand, site: AttentionSite, maps: LinearMaps) -> int | None:
    """The axis of ``node`` that the keys of the attention run along; None where its size of 1 hides it."""
    where = next((k for k, own in enumerate(operand.axes) if own and set(own) == set(site.keys)), None)
    if where is None:
        return None
    piece: Piece = maps.with_stops({node}).map(operand.node).pieces[0]
    own = piece.axes[where]
    return next((k for k, a in enumerate(piece.source_axes) if a and set(a) == set(own)), None)


def _likely_token_axis(node: fx.Node) -> int:
    """One token in a cache: the axis before the features where that has size 1 (most caches are [B, H, T, F])."""
    ones = [k for k, s in enumerate(shape(node)) if s == 1]
    rank = len(shape(node))
    return rank - 2 if rank - 2 in ones or not ones else ones[-1]


def _keep(
    tensors: Mapping[fx.Node, int],
    maps: LinearMaps,
    pasts: Mapping[fx.Node, Past],
    returned: Mapping[fx.Node, tuple[int, ...]],
    assume: set[fx.Node],
) -> list[Kept] | None:
    """All cached tensors of one attention, their rows chosen together; None where one of them cannot be kept."""
    parts = {n: [n] if n in pasts else (_joined(n) if _grows(n, pasts, assume) else [n]) or [] for n in tensors}
    new = [p for own in parts.values() for p in own if p not in pasts and p not in assume]
    cuts, _ = choose_sources(pieces_of([maps.map(p) for p in new]))
    at_cuts = maps.with_stops(cuts)
    kept: list[Kept] = []
    for node, tokens in tensors.items():
        made = {p: at_cuts.map(p) for p in parts[node] if p in new}
        one = _keep_one(node, tokens, parts[node], made, pasts, returned)
        if one is None:
            return None
        kept.append(one)
        for part, lmap in made.items():  # kept call by call, and joined when it is read
            own = _keep_one(part, tokens, [part], {part: lmap}, pasts, returned) if part in returned else None
            if own is not None and part is not node:
                kept.append(own)
    return kept


def _grows(node: fx.Node, pasts: Mapping[fx.Node, Past], assume: set[fx.Node]) -> bool:
    return any(p in pasts or p in assume for p in _joined(node) or ())


def _keep_one(
    node: fx.Node,
    tokens: int,
    parts: Sequence[fx.Node],
    new: Mapping[fx.Node, LinearMap],
    pasts: Mapping[fx.Node, Past],
    returned: Mapping[fx.Node, tuple[int, ...]],
) -> Kept | None:
    known: set[tuple[Recipe, tuple[fx.Node, ...]]] = set()
    taken: list[fx.Node | tuple[Ingredient, ...]] = []
    dtypes: set[tuple[torch.dtype, ...]] = set()
    for part in parts:
        if part in new:
            made = make_recipe(new[part], tokens)
            if isinstance(made, Stop) or not any(p.weight is not None for p in made[0].parts):
                return None
            recipe, ingredients, leaves = made
            known.add((recipe, leaves))
            taken.append(ingredients)
            dtypes.add(tuple(val(i.node).dtype for i in ingredients))
            continue
        if part in pasts:
            past = pasts[part]
            known.add((past.recipe, past.leaves))
            dtypes.add(past.dtypes)
        taken.append(part)
    if len(known) != 1 or len(dtypes) != 1:
        return None
    ((recipe, leaves),) = known
    return Kept(node, recipe, leaves, tuple(taken), returned.get(node, ()))


def _saves(kept: Sequence[Kept]) -> bool:
    """Whether the rows hold fewer values per token than the tensors they make."""
    rows: dict[Hashable, int] = {}
    for k in kept:
        ingredients = next((p for p in k.parts if not isinstance(p, fx.Node)), None)
        for index, width in enumerate(k.recipe.widths):
            rows[(k.node, index) if ingredients is None else ingredients[index].node] = width
    return sum(rows.values()) < sum(_values(k.recipe) for k in kept) or all(k.node in k.parts for k in kept)


def _values(recipe: Recipe) -> int:
    total = 1
    for kind in recipe.kinds:
        total *= 1 if kind == "row" else kind
    return total


def _seen_through_a_view(graph: fx.Graph, kept: Kept) -> bool:
    """Whether the caller also gets a view of what it keeps: a write to one would no longer show in the other."""
    from mla_compile.program import view_source

    if not kept.outputs:
        return False
    for value in graph.output_node().all_input_nodes:
        root = view_source(value)
        while root is not None and root is not kept.node:
            root = view_source(root)
        if root is kept.node:
            return True
    return False


def keep_latents(
    graph: fx.Graph, caches: Sequence[Kept], pasts: Mapping[fx.Node, Past], fake_mode: FakeTensorMode | None
) -> LatentCache:
    """Rewrites the graph for ``caches``; its output is one flat tuple, to which the rows are appended."""
    return _Rewriter(graph, pasts, fake_mode).run(caches)


class _Rewriter:
    def __init__(self, graph: fx.Graph, pasts: Mapping[fx.Node, Past], fake_mode: FakeTensorMode | None) -> None:
        self.graph = graph
        self.pasts = pasts
        self.fake_mode = fake_mode
        self.done = LatentCache()
        self.inputs: dict[Hashable, fx.Node] = {}
        self.joined: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.arranged: dict[fx.Node, fx.Node] = {}
        self.appended: dict[fx.Node, int] = {}

    def run(self, caches: Sequence[Kept]) -> LatentCache:
        values: list[object] = list(self.graph.output_node().args[0])  # type: ignore[arg-type]
        for cache in caches:
            rows = [self._rows(cache, index) for index in range(len(cache.recipe.widths))]
            anchor = cache.node if cache.node.op != "placeholder" else self._after(cache.node)
            builder = Builder(anchor, self.fake_mode)
            self._read_sizes_from_rows(cache.node, cache.recipe, rows[0])
            expanded = expand(cache.recipe, rows, cache.leaves, builder.call)
            names = tuple(n.name for n in cache.leaves)
            for index in cache.outputs:
                values[index] = None
                for row in rows:
                    if row not in self.appended:
                        self.appended[row] = len(values)
                        values.append(row)
                self.done.outputs[index] = tuple(self.appended[row] for row in rows)
                self.done.recipes[index] = cache.recipe, names
                if cache.pasts:
                    self.done.grows[index] = cache.pasts[0].name
            cache.node.replace_all_uses_with(expanded, lambda user: user.op != "output")
            for past in cache.pasts:
                self.done.recipes[past.name] = cache.recipe, names
        self.graph.output_node().args = (tuple(values),)  # type: ignore[arg-type]  # nodes and constants
        remove_dead_code(self.graph)
        for node in dict.fromkeys(p for c in caches for p in c.pasts):
            self._let_go(node)
        remove_dead_code(self.graph)
        return self.done

    def _let_go(self, node: fx.Node) -> None:
        """Removes an input; whoever else reads it gets it expanded from its rows."""
        recipe, weights = self.done.recipes[node.name]
        by_name = {n.name: n for n in self.graph.find_nodes(op="placeholder")}
        by_name.update({n.name: n for n in self.graph.find_nodes(op="get_attr")})
        rows = [by_name[name] for name in self.done.inputs[node.name]]
        self._read_sizes_from_rows(node, recipe, rows[0])
        if node.users:
            builder = Builder(self._after(node), self.fake_mode)
            node.replace_all_uses_with(expand(recipe, rows, [by_name[name] for name in weights], builder.call))
        self.graph.erase_node(node)

    def _read_sizes_from_rows(self, node: fx.Node, recipe: Recipe, rows: fx.Node) -> None:
        """Whoever only asks for the length of K need not have it computed."""
        for user in list(node.users):
            if packet(user) is aten.sym_size and (dim := axis(argument(user, 1, "dim"), len(recipe.kinds))) >= 0:
                own = sum(kind == "row" for kind in recipe.kinds[:dim])
                if recipe.kinds[dim] == "row":
                    user.args = (rows, own)

    def _after(self, node: fx.Node) -> fx.Node:
        """Where something that reads ``node`` may stand."""
        following: fx.Node = node.next
        if node.op in ("placeholder", "get_attr"):
            following = next(n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr"))
        return following

    def _rows(self, cache: Kept, index: int) -> fx.Node:
        """All rows of one source: those of the past, then the new ones."""
        ingredients = next((p for p in cache.parts if not isinstance(p, fx.Node)), None)
        parts: list[fx.Node] = []
        for part in cache.parts:
            if isinstance(part, fx.Node):
                parts.append(self._past(part, cache, index, ingredients))
            else:
                parts.append(self._new(part[index]))
        key = tuple(parts)
        if key not in self.joined:
            builder = Builder(self._after(max(parts)), self.fake_mode)
            # A copy where nothing is joined: the rows outlive this call and share no memory with anything else.
            self.joined[key] = (
                builder.call(aten.cat.default, parts, cache.recipe.token_axis)
                if len(parts) > 1
                else parts[0]
                if not cache.outputs
                else builder.call(aten.clone.default, parts[0])
            )
        return self.joined[key]

    def _new(self, ingredient: Ingredient) -> fx.Node:
        if ingredient.node not in self.arranged:
            builder = Builder(self._after(ingredient.node), self.fake_mode)
            sizes = Sizes(builder, [(ingredient.node, ingredient.axes)])
            self.arranged[ingredient.node] = arrange(
                builder, sizes, ingredient.node, ingredient.axes, ingredient.target
            )
        return self.arranged[ingredient.node]

    def _past(self, node: fx.Node, cache: Kept, index: int, ingredients: tuple[Ingredient, ...] | None) -> fx.Node:
        """The placeholder of the rows behind an input."""
        past = self.pasts.get(node)
        name: Hashable
        if past is not None:
            name, dtype = past.rows[index], past.dtypes[index]
        else:
            assert ingredients is not None, "an assumed past is one that grows"
            # Inputs that grow by the same rows hold the same rows: K and V of one attention.
            name, dtype = ("grows by", ingredients[index].node), val(ingredients[index].node).dtype
        if name not in self.inputs:
            example = val(node)
            wanted = cache.recipe.row_shape(example.shape, cache.recipe.widths[index])
            with self.fake_mode or torch.no_grad(), torch.no_grad():
                fake = torch.empty(wanted, dtype=dtype, device=example.device)
            with self.graph.inserting_after(list(self.graph.find_nodes(op="placeholder"))[-1]):
                placeholder = self.graph.placeholder(f"rows_{len(self.inputs)}")
            placeholder.meta["val"] = fake
            self.inputs[name] = placeholder
            self.done.rows.append(placeholder.name)
        own = self.done.inputs.get(node.name, ())
        if len(own) <= index:
            self.done.inputs[node.name] = (*own, self.inputs[name].name)
        return self.inputs[name]
