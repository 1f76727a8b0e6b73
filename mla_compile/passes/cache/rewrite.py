"""Rewrites a graph to keep rows instead of the caches of K and V that :mod:`mla_compile.passes.cache.find` found."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.core.program import results_of
from mla_compile.passes.cache.expansion import expand
from mla_compile.passes.cache.find import CacheOfRows, Past
from mla_compile.passes.cache.packed import pack
from mla_compile.passes.cache.recipe import Ingredient, Recipe
from mla_compile.passes.ir.arrange import SizeSources, arrange
from mla_compile.passes.ir.axes import Axis
from mla_compile.passes.ir.graph import (
    BESIDE,
    OURS,
    ROWS,
    Builder,
    argument,
    axis,
    latest_of,
    materialize,
    new_input,
    packet,
    restride,
    val,
)
from mla_compile.passes.ir.moves import Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.walk import first_equals, remove_dead_code
from mla_compile.passes.linear.rows import pick, picked_of
from mla_compile.passes.sources.along_tokens import Writing, make, moved, nodes_of
from mla_compile.passes.sources.selections import NO_PARTS, parts_of, place_of
from mla_compile.passes.sources.writes import is_zeros

aten = torch.ops.aten


@dataclass
class LatentCache:
    """The changes to a graph's inputs and outputs.

    Attributes:
        inputs: name of a removed placeholder -> the names of the placeholders that hold its rows.
        outputs: index of K or V in the flat output -> the indices of its rows. The value at the old index is now None.
        recipes: name of an input or index of an output (as above) -> its recipe, and the names of the recipe's weights.
        rows: the names of the placeholders of rows, in order.
        grows: index in the flat output -> the placeholder of the past.
        begun: the indices of the buffers of full length in the flat output. Later calls may write to these buffers.
        written: input that was written to in place -> the placeholders of rows that are written to instead.
        handed_back: place among the returned values -> the input to return at this place. The graph returns None there.
    """

    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recipes: dict[str | int, tuple[Recipe, tuple[str, ...]]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    grows: dict[int, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)
    handed_back: dict[int, str] = field(default_factory=dict)


def keep_latents(
    graph: fx.Graph,
    caches: Sequence[CacheOfRows],
    pasts: Mapping[fx.Node, Past],
    fake_mode: FakeTensorMode | None,
    plain: Mapping[fx.Node, fx.Node],
) -> LatentCache:
    """Rewrite the graph to keep ``caches`` as rows, and append the rows to the flat tuple that the graph returns.

    ``plain``: K or V -> another node with the same values. Readers of K or V read this node and expand no rows.
    """
    return _Rewriter(graph, pasts, fake_mode, plain).run(caches)


class _Rewriter:
    def __init__(
        self,
        graph: fx.Graph,
        pasts: Mapping[fx.Node, Past],
        fake_mode: FakeTensorMode | None,
        plain: Mapping[fx.Node, fx.Node],
    ) -> None:
        self.graph = graph
        self.pasts = pasts
        self.fake_mode = fake_mode
        self.plain = plain
        self.done = LatentCache()
        self.inputs: dict[Hashable, fx.Node] = {}
        self.zeros: dict[Hashable, fx.Node] = {}
        self.same = first_equals(graph)  # K and V may each compute the same mask of written positions
        self.joined: dict[tuple[Hashable, ...], fx.Node] = {}
        self.arranged: dict[tuple[fx.Node, tuple[Axis, ...], bool], fx.Node] = {}
        self.appended: dict[fx.Node, int] = {}

    def run(self, caches: Sequence[CacheOfRows]) -> LatentCache:
        values: list[object] = list(results_of(self.graph))
        # In graph order, so that nodes shared by K and V are added before the first reader.
        for cache in sorted(caches, key=lambda one: one.node):
            rows = [self._rows(cache, index) for index in range(len(cache.recipe.widths))]
            builder = Builder(self._after(cache.node), self.fake_mode)
            self._read_sizes_from_rows(cache.node, cache.recipe, rows[0])
            expanded = self.plain.get(cache.node)
            self._read_apart(cache, rows, expanded)
            if expanded is None:
                self._read_parts(cache.recipe, cache, cache.node, rows)
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
                if cache.write is not None:
                    self.done.begun.add(index)
            self._replace(cache.node, expanded)
            for past in cache.pasts:
                self.done.recipes[past.name] = cache.recipe, names
        self.graph.output_node().args = (tuple(values),)  # type: ignore[arg-type]  # nodes and constants
        self._make_once()
        remove_dead_code(self.graph)
        # Dead code was removed first, so that only real readers of an input remain.
        by_name = {n.name: n for op in ("placeholder", "get_attr") for n in self.graph.find_nodes(op=op)}
        for node in dict.fromkeys(p for c in caches for p in c.pasts):
            self._let_go(node, by_name)
        remove_dead_code(self.graph)
        return self.done

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let all readers of ``node`` except the output read ``new``, which may have other strides."""
        readers = [user for user in node.users if user.op != "output"]
        node.replace_all_uses_with(new, lambda user: user.op != "output")
        for reader in readers:
            restride(reader, self.fake_mode)

    def _make_once(self) -> None:
        """Merge equal nodes, because K and V may both have sliced or unpacked the same rows."""
        for node, first in first_equals(self.graph).items():
            if first is not node and OURS in node.meta:
                node.replace_all_uses_with(first)

    def _read_apart(self, cache: CacheOfRows, rows: Sequence[fx.Node], plain: fx.Node | None) -> None:
        """Let readers of one layer, or of another part that is written separately, expand only this part."""
        apart = NO_PARTS if cache.write is None else cache.write.apart
        if not apart.nodes:
            return
        for node in self.graph.find_nodes(op="call_function", target=aten.select.int):
            place = place_of(node)
            if not place.at and place.node in apart.nodes:
                self._replace(node, place.node)
        others = () if plain is None else parts_of(plain).nodes
        for k, (part, recipe) in enumerate(zip(apart.nodes, cache.recipe.each(apart.axes), strict=True)):
            if others:
                self._replace(part, others[k])
                continue
            self._read_parts(recipe, cache, part, rows)
            own = (rows[block.rows] for block in recipe.parts)
            builder = Builder(self._after(max(part, *own)), self.fake_mode)
            self._replace(part, expand(recipe, rows, cache.leaves, builder.call))

    def _read_parts(self, recipe: Recipe, cache: CacheOfRows, node: fx.Node, rows: Sequence[fx.Node]) -> None:
        """Let nodes that read only some tokens, batch entries or stacked parts of a cache expand nothing else."""
        own = {block.rows for block in recipe.parts}
        for user in list(node.users):
            how, shown, part = decode(user), rows, recipe
            picked = picked_of(user)
            if picked is not None and recipe.kinds[picked.dim] == "row":
                builder, along = Builder(user, self.fake_mode), recipe.row_axis(picked.dim)
                shown = [pick(builder.call, user, r, along) if k in own else r for k, r in enumerate(rows)]
            elif isinstance(how, Slice) and recipe.kinds[how.dim] == "row" and how.bounds is not None:
                builder, along = Builder(user, self.fake_mode), recipe.row_axis(how.dim)
                shown = [
                    builder.call(aten.slice.Tensor, r, along, *how.bounds) if k in own else r
                    for k, r in enumerate(rows)
                ]
            elif isinstance(how, Select) and how.dim in recipe.stacked and how.index is not None:
                part = recipe.part(how.dim, how.index)
            else:
                continue
            self._read_parts(part, cache, user, shown)
            self._replace(user, expand(part, shown, cache.leaves, Builder(user, self.fake_mode).call))

    def _let_go(self, node: fx.Node, by_name: Mapping[str, fx.Node]) -> None:
        """Remove an input. Its remaining readers read K or V expanded from the rows."""
        recipe, weights = self.done.recipes[node.name]
        rows = [by_name[name] for name in self.done.inputs[node.name]]
        self._read_sizes_from_rows(node, recipe, rows[0])
        if node.users:
            builder = Builder(self._after(node), self.fake_mode)
            self._replace(node, expand(recipe, rows, [by_name[name] for name in weights], builder.call))
        self.graph.erase_node(node)

    def _read_sizes_from_rows(self, node: fx.Node, recipe: Recipe, rows: fx.Node) -> None:
        """Read sizes from the rows instead of from K, so that readers of a size do not need K."""
        for user in list(node.users):
            if packet(user) is aten.sym_size:
                dim = axis(argument(user, 1, "dim"), len(recipe.kinds))
                if recipe.kinds[dim] == "row":
                    user.args = (rows, recipe.row_axis(dim))

    def _after(self, node: fx.Node) -> fx.Node:
        """Return the node before which the first reader of ``node`` may be inserted."""
        following: fx.Node = node.next
        if node.op in ("placeholder", "get_attr"):
            following = next(n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr"))
        return following

    def _rows(self, cache: CacheOfRows, index: int) -> fx.Node:
        """Return all rows of one source: the past rows, then the new ones."""
        ingredients = next((p for p in cache.parts if not isinstance(p, fx.Node)), None)
        parts: list[fx.Node] = []
        for part in cache.parts:
            if isinstance(part, fx.Node):
                parts.append(self._past(part, cache, index, ingredients))
            else:
                parts.append(self._new(part[index], cache.recipe, index))
        write, made = cache.write, self._made(cache)
        key = (*parts, made)
        if key not in self.joined and write is not None and made is not None:
            # The rows are made as early as possible, because K and V share the rows, and because a layer reads its rows
            # before later layers run.
            builder = Builder(self._after(max(*parts, *nodes_of(made))), self.fake_mode)
            self.joined[key] = make(made, builder, [builder.cast(one, val(parts[0]).dtype) for one in parts])
        elif key not in self.joined:
            builder = Builder(self._after(max(parts)), self.fake_mode)
            # If nothing is joined, returned rows are copied, because they must own their memory after this call.
            self.joined[key] = (
                builder.call(aten.cat.default, parts, cache.recipe.token_axis)
                if len(parts) > 1
                else parts[0]
                if not cache.outputs
                else builder.call(aten.clone.default, parts[0])
            )
        return self.joined[key]

    def _made(self, cache: CacheOfRows) -> Writing | None:
        """Return how the written rows are made; None if the new rows are joined to the past."""
        return None if cache.write is None else moved(cache.write.made, cache.recipe.row_axis, self.same.__getitem__)

    def _new(self, ingredient: Ingredient, recipe: Recipe, index: int) -> fx.Node:
        # The key contains the layout: if several axes have size 1, K and V may lay out the same rows differently.
        key = ingredient.node, ingredient.target, recipe.is_marked(index)
        if key not in self.arranged:
            builder = Builder(self._after(latest_of(ingredient.node)), self.fake_mode)
            node = materialize(ingredient.node, builder, {})
            sizes = SizeSources(builder, [(node, ingredient.axes)])
            rows = arrange(builder, sizes, node, ingredient.axes, ingredient.target)
            if recipe.is_marked(index):
                rows = builder.call(aten.constant_pad_nd.default, rows, [0, 1], 1.0)
            if recipe.is_packed(index):
                rows = pack(rows, recipe.widths[index], builder.call)
            self.arranged[key] = rows
        return self.arranged[key]

    def _past(
        self, node: fx.Node, cache: CacheOfRows, index: int, ingredients: tuple[Ingredient, ...] | None
    ) -> fx.Node:
        """Return the rows that replace ``node``: a placeholder for an input, or zeros for an empty buffer."""
        if is_zeros(node):
            return self._zeros(node, cache, index, ingredients)
        past = self.pasts.get(node)
        name: Hashable
        if past is not None:
            name, dtype = past.rows[index], past.dtypes[index]
        else:
            assert ingredients is not None, "an assumed past is one that grows"
            name = self._grown(node, cache, index)
            dtype = cache.recipe.held_dtype(index, val(ingredients[index].node).dtype)
        if name not in self.inputs:
            example = val(node)
            wanted = cache.recipe.row_shape(example.shape, cache.recipe.held_width(index))
            with self.fake_mode or torch.no_grad(), torch.no_grad():
                fake = torch.empty(wanted, dtype=dtype, device=example.device)
            placeholder = new_input(self.graph, f"rows_{len(self.inputs)}", fake)
            placeholder.meta[ROWS] = True
            if BESIDE in node.meta:
                placeholder.meta[BESIDE] = node.meta[BESIDE]
            self.inputs[name] = placeholder
            self.done.rows.append(placeholder.name)
        own = self.done.inputs.get(node.name, ())
        if len(own) <= index:
            self.done.inputs[node.name] = (*own, self.inputs[name].name)
        return self.inputs[name]

    def _grown(self, node: fx.Node, cache: CacheOfRows, index: int) -> Hashable:
        """Return a key for the rows that replace ``node``.

        Tensors that grow by the same rows at the same positions share their rows and have equal keys. Examples are K
        and V of one attention.
        """
        room = cache.recipe.row_shape(val(node).shape, 0)
        grown = tuple(None if isinstance(part, fx.Node) else part[index].node for part in cache.parts)
        return ("grows by", grown, cache.recipe.token_axis, self._made(cache), *map(str, room))

    def _zeros(
        self, node: fx.Node, cache: CacheOfRows, index: int, ingredients: tuple[Ingredient, ...] | None
    ) -> fx.Node:
        """Return rows of zeros for a buffer that the graph creates or clears."""
        assert ingredients is not None, "a buffer is written to"
        if cache.emptied is not None:
            rows = self._past(cache.emptied, cache, index, ingredients)
            if rows not in self.zeros:
                builder = Builder(self._after(rows), self.fake_mode)
                self.zeros[rows] = builder.call(aten.zeros_like.default, rows)
            return self.zeros[rows]
        name = self._grown(node, cache, index)
        if name not in self.zeros:
            recipe, builder = cache.recipe, Builder(self._after(node), self.fake_mode)
            sizes = [builder.size(node, dim) for dim in recipe.outer]
            dtype = recipe.held_dtype(index, val(ingredients[index].node).dtype)
            self.zeros[name] = builder.call(
                aten.zeros.default, [*sizes, recipe.held_width(index)], dtype=dtype, device=val(node).device
            )
        return self.zeros[name]
