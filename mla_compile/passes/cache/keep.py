"""Decide which caches of K and V become caches of latent rows, and rewrite the signature of the program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from mla_compile.core.program import Program
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.cache.find import CacheOfRows, Past, find_caches
from mla_compile.passes.cache.rewrite import LatentCache, keep_latents
from mla_compile.passes.ir.graph import BESIDE, bytes_hint, is_tensor
from mla_compile.passes.ir.operators import is_contraction
from mla_compile.passes.ir.walk import ancestors, remove_dead_code
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.rewrite.narrow import narrow
from mla_compile.passes.sources.readers import images_of, narrower_readers
from mla_compile.passes.sources.records import Side, Verdict


class KeptRows(NamedTuple):
    """The result of :func:`keep_rows`.

    ``sides``: name of each attention whose cache was rewritten -> the sides that now read rows. ``torn``: the
    attentions whose rewrite is invalid. If there are any, the program must be discarded. ``plain``: whether K and V are
    cached in addition to the rows.
    """

    sides: dict[str, frozenset[Side]]
    torn: set[str]
    plain: bool

    def expanded(self, verdicts: Iterable[Verdict]) -> set[str]:
        """Return the attentions that expand rows in each call, because ``verdicts`` do not absorb these attentions.

        The result is empty if ``plain``.
        """
        read = {v.site.node.name for v in verdicts if _reads_rows(v, self.sides)}
        return set() if self.plain else self.sides.keys() - read


def _reads_rows(verdict: Verdict, rows: Mapping[str, frozenset[Side]]) -> bool:
    """Whether an attention reads its rows directly, instead of expanding the rows in every call."""
    plan, sides = verdict.plan if verdict.absorb else None, rows.get(verdict.site.node.name)
    if sides is None or plan is None:
        return False
    absorbed = {side for side, terms in plan.sides if terms}
    # Rows may be wider than K and V. If only one side reads rows, `find_caches` has already compared the widths.
    return sides <= absorbed and (len(absorbed) < 2 or plan.saves_cache)


def keep_rows(
    program: Program,
    sites: Sequence[AttentionSite],
    maps: Maps,
    refused: Collection[str],
    analysed: Callable[[], Maps],
    *,
    assume: bool,
    packs: bool,
) -> KeptRows:
    """Rewrite the caches of all attentions of a canonical program, except the ``refused`` attentions.

    ``maps``: linear maps whose sources are whole tensors, not slices, because whole buffers become rows.
    ``analysed``: a function that analyses the rewritten graph.
    ``assume``: whether inputs that may hold a cache are assumed to hold what the program returned.
    ``packs``: whether rows are kept in float8.
    """
    graph = program.gm.graph
    returned: dict[fx.Node, tuple[int, ...]] = {}
    written = _own_buffers(program, assume=assume)
    handed_back = _handed_back(program)
    for index, value in enumerate(program.outputs):
        own = index >= len(program.mutations) or program.mutations[index] in written
        if own and isinstance(value, fx.Node) and index not in handed_back:
            returned[value] = (*returned.get(value, ()), index)
    pasts = _pasts(program)
    named = program.named()
    replaced = sorted(program.capture.own.difference(program.mutations))
    assumed = [node for node in map(named.__getitem__, (*written, *replaced)) if node not in pasts]
    if assume:
        assumed += _own_inputs(program)
    sites = [site for site in sites if site.node.name not in refused]
    new = dict(zip(program.mutations, program.outputs, strict=False))
    overwritten = {new[name]: named[name] for name in written}
    caches = find_caches(graph, sites, maps, pasts, returned, assumed, overwritten, packs=packs)
    # If an attention reads the old value of an input that is overwritten, the input stays K.
    caches = [one for one in caches if one.write is not None or not any(p.name in program.mutations for p in one.pasts)]
    torn: set[str] = set()
    if caches:
        # ``cache.inputs`` follows the order of the signature, not the order of the attentions.
        names = [node.name for node in program.placeholders]
        made = _projections(caches, maps)
        twins = [name for name in new if BESIDE in named[name].meta] if program.capture.plain else []
        beside = {name: named[name].meta[BESIDE] for name in twins}
        plain = {new[name]: new[buffer] for name, buffer in beside.items()}
        program.cache = keep_latents(graph, caches, pasts, program.fake_mode, plain)
        _narrow(program, made, analysed)
        inputs = program.cache.inputs
        program.cache.inputs = {name: inputs[name] for name in names if name in inputs}
        torn = _torn(program, program.cache, caches)
        if not torn:
            _write_rows(program, program.cache, handed_back)
    sides: dict[str, frozenset[Side]] = {}
    for kept in caches:
        for site, read in kept.sides.items():
            sides[site.name] = sides.get(site.name, frozenset()) | read
    return KeptRows(sides, torn, program.capture.plain)


def _projections(caches: Iterable[CacheOfRows], maps: Maps) -> dict[fx.Node, fx.Node]:
    """Map each product that makes cached values from new rows to the node of these rows."""
    found: dict[fx.Node, fx.Node] = {}
    for cache in caches:
        rows = [[one.node for one in part] for part in cache.parts if not isinstance(part, fx.Node)]
        made = [(cache.node, dict.fromkeys(node for own in rows for node in own))]
        if cache.write is not None and cache.write.stacked:
            # Each stacked tensor is paired only with its own rows, because later layers' rows depend on earlier layers.
            each = [part.parts for part in cache.recipe.each(cache.write.stacked)]
            made = [
                (part, {own[p.rows]: None for p in blocks})
                for new, own in zip(cache.write.new, rows, strict=True)
                for part, blocks in zip(new, each, strict=True)
            ]
        for end, sources in made:
            for source in sources:
                at_source = maps.with_sources([source])
                for node in (end, *ancestors(end, [source])):
                    if is_contraction(node) and images_of(node, [source], at_source):
                        found[node] = source
    return found


def _narrow(program: Program, made: Mapping[fx.Node, fx.Node], analysed: Callable[[], Maps]) -> None:
    """Narrow products that made both K and V to the columns that are still read.

    K or V is now computed from rows instead.
    """
    graph = program.gm.graph
    maps = analysed()
    alive = frozenset(graph.nodes)
    alone: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
    for node, source in made.items():
        if node in alive and source in alive:
            parts = narrower_readers(node, [source], maps, lambda n: n.all_input_nodes, alive, ())
            if parts and sum(bytes_hint(n) for n in parts if is_tensor(n)) < bytes_hint(node):
                alone += ((part, (source,)) for part in parts)
    narrow(alone, maps)
    remove_dead_code(graph)


def _torn(program: Program, cache: LatentCache, caches: Iterable[CacheOfRows]) -> set[str]:
    """Return the attentions whose written buffers cannot become rows.

    Either the new value of such a buffer has a different recipe than the old value, or K and V share rows but would
    write different values to these rows.
    """
    written: dict[str, fx.Node] = {}
    torn: set[str] = set()
    for kept in caches:
        for index in kept.outputs:
            if index < len(program.mutations):
                name = program.mutations[index]
                values = [program.outputs[at] for at in cache.outputs[index]]
                alike = cache.recipes.get(name) == cache.recipes[index]
                if not alike or any(
                    written.setdefault(row, value) is not value
                    for row, value in zip(cache.inputs[name], values, strict=True)
                ):
                    torn.update(site.name for site in kept.sides)
    return torn


def _pasts(program: Program) -> dict[fx.Node, Past]:
    """Return the recipe of each input that carries rows, and the recipe's weights as nodes of this graph."""
    # Weights are matched by identity: two weights with equal values may change independently.
    names: dict[int, str] = {id(tensor): name for name, tensor in program.weights.items() if tensor is not None}
    found: dict[fx.Node, Past] = {}
    for name, tensor in program.capture.latents.items():
        if name in program.mutations and name not in program.capture.own:
            continue  # This is the caller's tensor, and the caller may hold other tensors that share its rows.
        if tensor.recipe is None:
            continue
        leaves = [names.get(id(leaf)) or _carried(program, leaf, names) for leaf in tensor.leaves]
        if None in leaves:
            continue
        rows, node = tensor.shown_rows(), program.named()
        found[node[name]] = Past(
            tensor.recipe,
            tuple(node[leaf] for leaf in leaves if leaf is not None),
            tuple(map(id, rows)),
            tuple(r.dtype for r in rows),
        )
    return found


def _carried(program: Program, leaf: torch.Tensor, names: dict[int, str]) -> str | None:
    """Add a weight of an input's recipe that the graph does not read yet, and return the name of the new node.

    For example, another graph makes K and V from an encoder's memory once, and this graph reads this cache in every
    call. Returns None if there are several processes, or if the weight is not a plain tensor.
    """
    group = torch.distributed
    alone = not (group.is_available() and group.is_initialized()) or group.get_world_size() == 1
    if not alone or type(leaf) not in (torch.Tensor, torch.nn.Parameter) or program.fake_mode is None:
        return None
    graph, gm = program.gm.graph, program.gm
    target = f"carried_{len(names)}"
    while hasattr(gm, target):
        target += "_"
    setattr(gm, target, leaf)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.create_node("get_attr", target)
    with torch.no_grad():
        node.meta["val"] = program.fake_mode.from_tensor(leaf.detach(), static_shapes=True)
    program.weights[node.name] = leaf
    names[id(leaf)] = str(node.name)
    return str(node.name)


def _own_inputs(program: Program) -> list[fx.Node]:
    """Return the inputs that may hold a cache: floating-point tensors that are neither weights nor written to."""
    return [
        node
        for node in program.placeholders
        if node.name not in program.weights
        and node.name not in program.mutations
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].dtype.is_floating_point
    ]


def _own_buffers(program: Program, *, assume: bool) -> list[str]:
    """Return the names of the written buffers, except buffers of which a view is returned.

    The module owns these buffers. If ``assume``, inputs are included. Buffers of an exported module are excluded,
    because rewriting them would change the program's state.
    """
    signature = getattr(program.capture.original, "graph_signature", None)
    known = None if signature is None else set(signature.user_inputs)
    handed_back = _handed_back(program)
    node = program.named()
    shown = {name for at, name in program.aliases.items() if at + len(program.mutations) not in handed_back}
    return [
        name
        for name in program.mutations
        if node[name].op == "placeholder"
        and (name in program.capture.own or (assume and (known is None or name in known)))
        and name not in shown
        and node[name].meta["val"].dtype.is_floating_point
    ]


def _handed_back(program: Program) -> dict[int, str]:
    """Return a map from output index to buffer name, for outputs that are the module's own buffers.

    The model's code assigns such an output to an attribute.
    """
    count = len(program.mutations)
    new = dict(zip(program.mutations, program.outputs, strict=False))
    return {
        at + count: name
        for at, name in program.aliases.items()
        if name in program.capture.own and program.outputs[at + count] is new[name]
    }


def _write_rows(program: Program, cache: LatentCache, handed_back: dict[int, str]) -> None:
    """Write the returned rows of written buffers in place, so that the program no longer returns them."""
    count, values = len(program.mutations), list(program.outputs)
    mutations: list[str] = []
    new: list[fx.node.Argument] = []
    for index, name in enumerate(program.mutations):
        if index not in cache.outputs:
            mutations.append(name)
            new.append(values[index])
            continue
        pairs = zip(cache.inputs[name], cache.outputs[index], strict=True)
        held = {row: values[at] for row, at in pairs if row not in mutations}
        cache.written[name] = tuple(held)
        mutations += held
        new += held.values()
    if not cache.written:
        return
    for index, name in handed_back.items():
        if name in cache.written:
            cache.handed_back[index - count] = name
            del program.aliases[index - count]
            values[index] = None
    outputs = {k: rows for k, rows in cache.outputs.items() if k >= count}
    unread = {at for rows in cache.outputs.values() for at in rows} - {at for rows in outputs.values() for at in rows}
    place: dict[int, int] = {}
    for index in range(count, len(values)):
        if index not in unread:
            place[index] = len(new)
            new.append(values[index])
    cache.outputs = {place[k]: tuple(place[at] for at in rows) for k, rows in outputs.items()}
    cache.grows = {place[k]: name for k, name in cache.grows.items() if k in place}
    cache.begun = {place[k] for k in cache.begun if k in place}
    cache.recipes = {
        place[k] if isinstance(k, int) else k: recipe
        for k, recipe in cache.recipes.items()
        if not isinstance(k, int) or k in place
    }
    program.mutations = tuple(mutations)
    program.gm.graph.output_node().args = (tuple(new),)
    remove_dead_code(program.gm.graph)
