"""A decode step over pages: the rows of many requests lie in one pool, and each request has a list of its pages.

Before, for every growing cache, in a step of one token::

    rows = cat([past, new], tokens);  decode_attention(q, latent_rows, rope_rows, ...);  return ..., rows

After: the new rows are written into the pool, and the attention looks up the rows of each request::

    page, offset = block_table[b, (len - 1) // size], (len - 1) % size
    index_put_(pages, [page, offset], new)
    paged_decode_attention(q, latent_pages, rope_pages, block_table, seq_lens, ...)

In the traced step, all sequences of a batch have the same length. :func:`find_pages` proves that each sequence may have
its own length, because no result depends on the common length: no attention hides a cached row, only attentions and
indexers read a cache, and nothing reads the length of a cache.

If C ranks share the pages, rows are distributed round robin, so that each rank has 1/C of the rows. Each rank writes
and reads only its own rows, and the results of all ranks are merged (:mod:`mla_compile.passes.cache.exchange`)::

    own = (len - 1) // C;  page, offset = block_table[b, own // size], own % size
    index_put_(pages, [page, offset], where((len - 1) % C == rank, new, pages[page, offset]))
    paged_decode_attention(q', latent_pages, rope_pages, block_table, own_lens, ...)

The writes are in place, although the rest of the graph is functional, because a pool is far too large to be copied.
No other node reads the overwritten contents.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from mla_compile.core.program import Program
from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.exchange import Exchange
from mla_compile.passes.cache.packed import float8_values, pack, packed_width, place_of_scale
from mla_compile.passes.cache.paged_lists import INDEX, INDICES, PagedList, choose_over_pages, list_of, made_anew
from mla_compile.passes.ir.graph import Builder, args_of, argument, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Join, Regroup
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same, same_sizes
from mla_compile.passes.ir.walk import remove_dead_code

aten = torch.ops.aten
TABLE, LENGTHS = "block_table", "seq_lens"
_fresh_names = itertools.count()


@dataclass(frozen=True)
class PagedRows:
    """One cache of a step.

    ``past``: the placeholder of old rows. ``joined``: the node of all rows. ``new``: the node of the new rows.
    ``attentions``: each attention that reads the rows, and the position of the rows among its arguments: 1 for the
    latent, 2 for the rotary keys. ``lists``: the choices that indexers make among the rows.
    """

    past: fx.Node
    joined: fx.Node
    new: fx.Node
    width: int
    attentions: tuple[tuple[fx.Node, int], ...]
    lists: tuple[PagedList, ...] = ()

    @property
    def is_latent(self) -> bool:
        """Whether these rows are the latent of attentions."""
        return any(place == 1 for _, place in self.attentions)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return val(self.joined).dtype


@dataclass(frozen=True)
class Unpaged:
    """Why a step cannot run over pages."""

    reason: str


def read_batch_from(program: Program, tokens: str) -> int:
    """Make the graph read the number of sequences from the token ids [B,1], not from other tensors.

    Returns the number of replaced reads.
    """
    source, found = program.node(tokens), 0
    B = shape(source)[0]
    for node in program.gm.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        read, dim = args_of(node)
        if read is not source and not isinstance(B, int) and same(shape(read)[dim], B):
            node.args = (source, 0)
            found += 1
    return found


def find_pages(program: Program, caches: Sequence[str]) -> tuple[PagedRows, ...] | Unpaged:
    """Return the caches of a decode step in the order of ``caches``, or why they cannot become pages.

    ``program`` takes one token of each sequence. It was rewritten, and then :func:`read_batch_from` was applied.
    ``caches`` names placeholders of rows [B,T,width] or [B,1,T,width]. The program's last outputs are these caches,
    extended by the new rows.
    """
    returned = program.outputs[len(program.outputs) - len(caches) :]
    found: list[PagedRows] = []
    for name, present in zip(caches, returned, strict=True):
        rows = _grown(program.node(name), present)
        if isinstance(rows, Unpaged):
            return rows
        found.append(rows)
    attentions = program.gm.graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_attention.default)
    known = {node: {place for rows in found for at, place in rows.attentions if at is node} for node in attentions}
    for node in attentions:
        told = _not_on_pages(node, known[node], [one for rows in found for one in rows.lists])
        if told is not None:
            return Unpaged(told)
    gone = made_anew(one for rows in found for one in rows.lists)
    for rows in found:
        told = _length_read(rows, gone)
        if told is not None:
            return Unpaged(told)
    return tuple(found)


def _grown(past: fx.Node, present: object) -> PagedRows | Unpaged:
    joined = _same(present) if isinstance(present, fx.Node) else None
    how = decode(joined) if joined is not None and joined.op == "call_function" else None
    if joined is None or not isinstance(how, Join) or len(how.parts) != 2 or _same(how.parts[0]) is not past:
        return Unpaged(f"the cache {past.name} does not grow by new rows behind the old ones")
    axes = [k for k, n in enumerate(shape(joined)) if not same(n, 1)]
    new = how.parts[1]
    if len(axes) != 3 or axes.index(how.dim) != 1 or not same(shape(new)[how.dim], 1):
        return Unpaged(f"the cache {past.name} is {list(val(joined).shape)} with new rows, expected [B,T,width] by one")
    width = shape(joined)[axes[2]]
    if not isinstance(width, int):
        return Unpaged(f"the rows of {past.name} have no fixed width")
    attentions: list[tuple[fx.Node, int]] = []
    lists: list[PagedList] = []
    for node, reader in _readers(joined):
        if reader.op == "output":
            continue
        if packet(reader) is INDEX:
            one = list_of(reader, node)
            if isinstance(one, str):
                return Unpaged(f"an indexer chooses among the rows of {past.name}, and {one}")
            lists.append(one)
            continue
        places = [k for k in (1, 2) if argument(reader, k, "") is node] if _is_attention(reader) else []
        if len(places) != 1:
            return Unpaged(f"the rows of {past.name} are also read by {reader.name}, {packet(reader) or reader.op}")
        attentions.append((reader, places[0]))
    if not attentions and not lists:
        return Unpaged(f"no attention reads the rows of {past.name} directly")
    return PagedRows(past, joined, new, width, tuple(attentions), tuple(lists))


def _is_attention(node: fx.Node) -> bool:
    return packet(node) is torch.ops.mla_compile.decode_attention


def _not_on_pages(node: fx.Node, places: set[int], lists: Sequence[PagedList]) -> str | None:
    """Explain why an attention cannot read pages; None if it can. ``lists``: choices that can be made over pages."""
    if 1 not in places or (argument(node, 2, "rope") is not None and 2 not in places):
        return f"{node.name} attends to rows that are not a growing cache"
    for position, name in ((3, "values"), (4, "mask"), (5, "seq_lens"), (7, "kv_scale"), (INDICES, "indices")):
        given = argument(node, position, name)
        if given is not None and not any(given in one.indices for one in lists):
            hides = (
                "hides some of the rows that are cached" if name in ("mask", "seq_lens", "indices") else f"reads {name}"
            )
            return f"{node.name} {hides}, which attention over pages cannot"
    return None


def _length_read(rows: PagedRows, gone: Collection[fx.Node]) -> str | None:
    """Name a node that reads a cache or its length; None if there is none.

    Over pages, the lengths of requests differ. Nodes in ``gone`` are ignored, because the rewrite removes them.
    """
    for node, reader in _readers(rows.past):
        if reader is not rows.joined and reader.op != "output" and reader not in gone:
            return f"{reader.name} ({packet(reader) or reader.op}) reads {node.name}, the cache or its length"
    return None


def _same(node: fx.Node) -> fx.Node:
    """Return the tensor of which ``node`` is a copy, or a view that only adds or drops axes of size 1."""
    while node.op == "call_function":
        how = decode(node)
        if not isinstance(how, (Copy, Regroup)) or val(how.x).dtype != val(node).dtype:
            return node
        if not same_sizes(_long_axes(how.x), _long_axes(node)):
            return node
        node = how.x
    return node


def _long_axes(node: fx.Node) -> list[Size]:
    return [n for n in shape(node) if not same(n, 1)]


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield a pair for each reader of ``node``: the tensor that is read, and the reader.

    The tensor is ``node``, a copy of ``node``, or a view that only adds or drops axes of size 1.
    """
    for user in node.users:
        if user.op == "call_function" and user is not node and _same(user) is _same(node):
            yield from _readers(user)
        else:
            yield node, user


def not_shared(found: Sequence[PagedRows]) -> str | None:
    """Explain why ranks cannot share these pages; None if they can."""
    attentions = (node for rows in found for node, _ in rows.attentions)
    having = (n for n in attentions if argument(n, 6, "sinks") is not None or n.kwargs.get("window"))
    return next((f"{node.name} has sinks or a window" for node in having), None)


def step_over_pages(
    program: Program,
    found: Sequence[PagedRows],
    pools: Sequence[torch.Tensor],
    tokens: str,
    *,
    packed: bool,
    sharing: Sharing | None = None,
) -> tuple[str, ...]:
    """Rewrite the step. Return the names of the new inputs: the block table, the lengths, then one pool per cache.

    The caches are no longer inputs or outputs. ``pools`` are [P,page,width], as :func:`pool_rows` defines. With
    ``sharing``, the pools hold only this rank's rows, but the lengths still count all rows. In this case,
    :func:`not_shared` must have returned None.
    """
    graph, fake_mode = program.gm.graph, program.fake_mode
    assert fake_mode is not None
    B = val(program.node(tokens)).shape[0]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with fake_mode:
        table = torch.empty(B, _fresh(program, 6), dtype=torch.int32, device=pools[0].device)
        lengths = torch.empty(B, dtype=torch.int32, device=pools[0].device)
        shown = [torch.empty(pool.shape, dtype=pool.dtype, device=pool.device) for pool in pools]
    named = [(TABLE, table), (LENGTHS, lengths), *((f"pages_{k}", value) for k, value in enumerate(shown))]
    inputs = [_placeholder(graph, first, name, value) for name, value in named]
    table_node, lengths_node, *pages = inputs
    builder = Builder(first, fake_mode)
    where = _slots(builder, table_node, lengths_node, pools[0].shape[1], sharing)
    own_lengths = lengths_node if sharing is None else builder.trace(sharing.owned, [lengths_node])
    for rows, pool in zip(found, pages, strict=True):
        _write(rows, pool, where, Builder(rows.joined, fake_mode), packed=packed)
    for rows, pool in zip(found, pages, strict=True):
        for one in rows.lists:
            builder = Builder(one.scores, fake_mode)
            ranks = None if sharing is None else Exchange(builder, sharing)
            choose_over_pages(one, pool, table_node, own_lengths, builder, ranks)
    for node in {at: None for rows in found for at, _ in rows.attentions}:
        _attend(node, found, pages, table_node, own_lengths, Builder(node, fake_mode), packed=packed, sharing=sharing)
    graph.output_node().args = (program.outputs[: len(program.outputs) - len(found)],)
    remove_dead_code(graph)
    for rows in found:
        graph.erase_node(rows.past)
    graph.lint()
    program.gm.recompile()
    return tuple(node.name for node in inputs)


def pool_rows(rows: PagedRows, *, packed: bool) -> tuple[int, torch.dtype]:
    """Return width and dtype of a pool for ``rows``. If ``packed``, the pool of latent rows holds float8 as bytes."""
    if packed and rows.is_latent:
        return packed_width(rows.width), torch.uint8
    return rows.width, rows.dtype


def _fresh(program: Program, hint: int) -> torch.SymInt:
    """Return a new symbolic size that equals no other size."""
    env = program.fake_mode.shape_env if program.fake_mode is not None else None
    assert env is not None, "a step is traced for any number of sequences"
    source = ConstantSource(f"pages_of_a_request_{next(_fresh_names)}")  # equal sources would be one symbol
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    made = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(made, torch.SymInt)
    return made


def _placeholder(graph: fx.Graph, before: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.placeholder(name)
    node.meta["val"] = value
    return node


@dataclass(frozen=True)
class _Slots:
    """The page [B] and offset [B] of each request's newest row.

    If ranks share the pages, ``mine`` [B,1] tells whether this rank owns the row.
    """

    page: fx.Node
    offset: fx.Node
    mine: fx.Node | None = None


def _slots(builder: Builder, table: fx.Node, lengths: fx.Node, page: int, sharing: Sharing | None) -> _Slots:
    def where(table_BM: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last = lengths_B.long() - 1
        own = last if sharing is None else last // sharing.size
        at = (own // page)[:, None]
        found = table_BM.gather(1, at).squeeze(1).long(), own % page
        return found if sharing is None else (*found, (last % sharing.size == sharing.rank)[:, None])

    return _Slots(*builder.trace_all(where, [table, lengths]))


def _write(rows: PagedRows, pool: fx.Node, where: _Slots, builder: Builder, *, packed: bool) -> None:
    new, slot = builder.call(aten.reshape.default, rows.new, [-1, rows.width]), [where.page, where.offset]
    if packed and rows.is_latent:
        new = pack(new, rows.width, builder.call)
    if where.mine is not None:  # a rank that does not own the row writes back the old value
        new = builder.call(aten.where.self, where.mine, new, builder.call(aten.index.Tensor, pool, slot))
    builder.call(aten.index_put_.default, pool, slot, new)


def _attend(
    node: fx.Node,
    found: Sequence[PagedRows],
    pages: Sequence[fx.Node],
    table: fx.Node,
    lengths: fx.Node,
    builder: Builder,
    *,
    packed: bool,
    sharing: Sharing | None,
) -> None:
    pool = {place: k for k, rows in enumerate(found) for at, place in rows.attentions if at is node}
    latent, scale = pages[pool[1]], None
    rope = pages[pool[2]] if 2 in pool else None
    if packed:
        rows = found[pool[1]]
        scale = _scales(latent, rows.width, builder)
        latent = float8_values(latent, rows.width, builder.call)
    kwargs: dict[str, object] = {n: node.kwargs[n] for n in ("scale", "softcap", "window") if n in node.kwargs}
    if (indices := argument(node, INDICES, "indices")) is not None:
        kwargs["indices"] = indices
    query, ranks = args_of(node)[0], None if sharing is None else Exchange(builder, sharing)
    attended = builder.call(
        torch.ops.mla_compile.paged_decode_attention.default,
        query if ranks is None else ranks.queries(query), latent, rope, table, lengths, argument(node, 6, "sinks"),
        scale, **kwargs,
    )  # fmt: skip
    if ranks is None:
        node.replace_all_uses_with(attended)
        node.graph.erase_node(node)
    else:
        ranks.replace(node, attended)


def _scales(pool: fx.Node, width: int, builder: Builder) -> fx.Node:
    """Return a view of the scales [P,page] of packed rows. In a whole pool, scales are aligned to four bytes."""
    at = place_of_scale(width)
    own = builder.call(aten.slice.Tensor, pool, 2, at.start, at.stop)
    return builder.call(aten.squeeze.dim, builder.call(aten.view.dtype, own, torch.float32), -1)
