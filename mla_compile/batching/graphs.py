"""The graphs that a server runs: a decode step of many requests over pages, and a piece of one prompt.

Both graphs are traced once for all sizes: the numbers of requests, pages and tokens are symbols. A graph is compiled on
its first call. If Inductor specialises, the graph is compiled again for other sizes. Prompts have a second graph if the
cheaper form depends on the length. The numbers of requests and pages are rounded up (:func:`bucket`), so that only a
few sizes occur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mla_compile.batching.compiled import Compiled
from mla_compile.batching.table import OVER_PAGES, POSITIONS, TOKENS, PagesState, cache_inputs
from mla_compile.batching.traced import Traced, trace
from mla_compile.capture.autocast import without_autocast
from mla_compile.capture.causal_lm import CausalLM
from mla_compile.core.program import Call, Program
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo.ranks import Meeting
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.passes.cache.packed import error_of
from mla_compile.passes.cache.page_rows import rows_of_pages, write_to_pages
from mla_compile.passes.cache.pages import pool_rows
from mla_compile.passes.ir.collectives import received_bytes
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.sizes import hint
from mla_compile.pipeline.manager import Analyses, run_passes
from mla_compile.pipeline.outcome import Outcome
from mla_compile.report.report import Report
from mla_compile.runtime.choice import picker
from mla_compile.runtime.folds import FoldedWeights

if TYPE_CHECKING:
    from mla_compile.batching.replay import Replayed

_POOLS = 4
LEAST = 2
"""The smallest bucket.

torch specialises a size of 1, so code for any number of requests is compiled with at least two requests.
"""


def bucket(count: int) -> int:
    """Return the power of two, at least 2, to which ``count`` requests or pages are padded."""
    return max(LEAST, 1 << (count - 1).bit_length())


@dataclass
class Graph:
    """One compiled graph, a description of what it computes, and the sizes that have been run.

    ``buckets``: tuples of the sizes so far, rounded up to powers of two. ``limit``: the number of compilations allowed.
    ``replayed``: recordings for these sizes, if any. ``received``: maps each collective to the bytes per request that a
    decode step receives from other ranks.
    """

    name: str
    computes: str
    limit: int
    buckets: set[tuple[int, ...]] = field(default_factory=set)
    compiled: Compiled | None = field(default=None, repr=False)
    replayed: Replayed | None = field(default=None, repr=False)
    received: Mapping[str, int] = field(default_factory=dict)

    @property
    def compilations(self) -> int:
        """The number of compilations. It exceeds one if the code for one size does not fit another size."""
        return 0 if self.compiled is None else self.compiled.count

    def __str__(self) -> str:
        sizes = sorted(self.buckets) or "none"
        told = f"{self.name}: {self.computes}; compilations: {self.compilations} of {self.limit}; sizes so far: {sizes}"
        if self.received:
            each = ", ".join(f"{name} {count:,}" for name, count in self.received.items())
            told += f"; bytes from other ranks for each request: {each}"
        return told if self.replayed is None else f"{told}; recordings: {self.replayed.count}"


@dataclass(frozen=True)
class Decode:
    """The decode step over one set of pools.

    ``call(ids [B,1], positions [B,1], block_table [B,M] int32, seq_lens [B] int32, pools)`` returns logits [B,1,vocab]
    and writes each request's new rows at ``seq_lens[b] - 1``.
    """

    call: Callable[..., torch.Tensor]
    pools: tuple[torch.Tensor, ...]


class StepGraphs:
    """The graphs of a served model. They are traced and rewritten on creation, and compiled on their first call.

    Weights are read in every call, so in-place changes take effect. Raises :class:`CaptureError` if the model's steps
    cannot run over pages. ``report`` covers the attentions of all graphs.
    """

    def __init__(
        self, lm: CausalLM, options: Options, like: StepGraphs | None = None, ranks: Meeting | None = None
    ) -> None:
        """``like``: reuse the traces of these graphs and run them uncompiled. ``ranks``: the ranks that must agree."""
        self.lm = lm
        self.options = options if like is None else replace(options, codegen="eager")
        self._traced: Traced = trace(lm, options, ranks) if like is None else like._traced
        decode, prompt = self._traced.decode, self._traced.prompt
        self.rows, self.sharing = self._traced.rows, self._traced.sharing
        self._decode = decode.program
        reports = [decode.report, replace(prompt.report, graph="a piece of a prompt")]
        self.report = Report.merged(reports)
        if self.packed:
            error = max(error_of(rows.width) for rows in self.rows if rows.is_latent)
            told = f"pages hold latent rows in float8 with a scale each: a relative error of {error:.1%}, measured"
            self.report = replace(self.report, messages=(*self.report.messages, told))
        if self.sharing is not None:
            told = f"each of {self.sharing.size} ranks keeps its share of the rows in its pages"
            self.report = replace(self.report, messages=(*self.report.messages, told))
        self.graphs: list[Graph] = []
        self._decodes: dict[tuple[object, ...], tuple[Graph, Callable[..., torch.Tensor]]] = {}
        self._prompts: list[Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]] = []
        self._pays: Callable[[Mapping[str, torch.Tensor]], bool] | None = None
        self._compile_prompts(prompt)

    @property
    def packed(self) -> bool:
        """Whether latent rows are kept in float8."""
        return self.options.cache_dtype == "fp8"

    def bytes_of_row(self) -> int:
        """Return the bytes of one row, summed over the pools of all layers.

        Each of n ranks that share a context has every n-th row.
        """
        kinds = (pool_rows(rows, packed=self.packed) for rows in self.rows)
        return sum(width * dtype.itemsize for width, dtype in kinds)

    def tokens_of_page(self, page: int) -> int:
        """Return the number of tokens in a page that has ``page`` rows on each rank."""
        return page if self.sharing is None else page * self.sharing.size

    @property
    def vocabulary(self) -> int:
        """The width of the logits."""
        return int(self._decode.outputs[0].meta["val"].shape[-1])

    def bytes_to_read_token(self) -> int:
        """Return the bytes per earlier token for reading a prompt: rows of all layers, and K and V of one layer."""
        sizes = [site.values_read_before for site in self.report.sites if site.values_read_before]
        rows = sum(rows.width * rows.dtype.itemsize for rows in self.rows)
        return rows + max(sizes, default=0) * self.lm.dtype.itemsize

    def make_pools(self, pages: int, page: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Make one pool of zeros [pages,page,width] per cache. Each rank makes its own pools."""
        kinds = (pool_rows(rows, packed=self.packed) for rows in self.rows)
        return tuple(torch.zeros(pages, page, width, dtype=dtype, device=device) for width, dtype in kinds)

    @one_at_a_time()
    def decode(self, pools: Sequence[torch.Tensor], replays: type[Replayed] | None = None) -> Decode:
        """Return the decode step over these pools. Its first call compiles it, and records it if ``replays`` is given.

        Code for the last few pool sizes is kept, but a recorded step is always built anew.
        """
        key = tuple((tuple(pool.shape), pool.dtype, pool.device) for pool in pools)
        kept = None if replays else self._decodes.pop(key, None)
        made = kept or self._decode_over(pools, replays)
        if replays is None:
            self._decodes[key] = made
        if len(self._decodes) > _POOLS:
            del self._decodes[next(iter(self._decodes))]
        graph, run = made
        self.graphs = [*(g for g in self.graphs if g.name != "decode"), graph]
        return Decode(run, tuple(pools))

    def _decode_over(
        self, pools: Sequence[torch.Tensor], replays: type[Replayed] | None
    ) -> tuple[Graph, Callable[..., torch.Tensor]]:
        program = self._decode.copy()
        # The passes need the copy's nodes, so the caches are found again in the copy.
        state = PagesState(Analyses(program), self.lm, pools, self.packed, self.sharing)
        run_passes(OVER_PAGES, state)
        names = state.names
        graph = Graph("decode", "one token of each of B requests over block tables of M pages, (B, M)", 12)
        ids = program.node(TOKENS)
        B = hint(shape(ids)[0], val(ids).shape[0])
        graph.received = {name: count // B for name, count in received_bytes(program.gm.graph).items()}
        call = self._compiled(program, graph, decode=True, replays=replays, changing=(TOKENS, POSITIONS, *names[:2]))

        def run(
            ids: torch.Tensor,
            positions: torch.Tensor,
            table: torch.Tensor,
            lengths: torch.Tensor,
            pools: Sequence[torch.Tensor],
        ) -> torch.Tensor:
            graph.buckets.add(tuple(table.shape))
            given = dict(zip(names, (table, lengths, *pools), strict=True))
            logits: torch.Tensor = call({TOKENS: ids, POSITIONS: positions, **given})[0]
            return logits

        return graph, run

    def read(self, ids: torch.Tensor, start: int, table: torch.Tensor, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """Read S >= 2 tokens ``ids`` [S] of one request. Write rows to pages, and return the last logits [vocab].

        ``start``: the position of the first token. ``table`` [M]: the request's pages. All ranks that share a context
        must call this method.
        """
        kinds = list(zip(self.rows, pools, strict=True))
        past = [rows_of_pages(pool, table, start, rows, self.sharing) for rows, pool in kinds]
        at = torch.arange(start, start + len(ids), device=ids.device)
        logits, new = self.prompt(ids[None], at[None], past)
        for (rows, pool), values in zip(kinds, new, strict=True):
            write_to_pages(pool, table, start, values, rows, self.sharing)
        return logits[0]

    def prompt(
        self, ids: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the last logits [1,vocab] of S >= 2 tokens [1,S], and the new rows [S,width] of each cache.

        ``past``: for each cache, the rows of earlier tokens, [tokens,width].
        """
        inputs = self._prompt_inputs(ids, positions, past)
        pays, number = self._pays, 0
        if pays is not None:  # the first graph is the expanded form, the second the absorbed form
            number = int(pays(inputs))
        logits, *presents = self._prompts[number](inputs)
        count = ids.shape[1]
        new = [rows.reshape(-1, rows.shape[-1])[-count:] for rows in presents]
        return logits[:, -1], new

    def warm_up_prompt(self, tokens: int, held: int, device: torch.device) -> None:
        """Compile the graphs of a prompt piece of ``tokens`` (at least two) tokens after ``held`` earlier tokens."""
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        past = [rows[0] for rows in self.lm.empty(1, held)]
        inputs = self._prompt_inputs(ids, torch.arange(held, held + tokens, device=device)[None], past)
        for run in self._prompts:
            run(inputs)

    def _prompt_inputs(
        self, ids: torch.Tensor, positions: torch.Tensor, past: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        given = [rows.reshape(_like(entry.shape, len(rows))) for entry, rows in zip(self.lm.caches, past, strict=True)]
        names = [node.name for node in cache_inputs(self._decode, len(given))]
        return {TOKENS: ids, POSITIONS: positions, **dict(zip(names, given, strict=True))}

    def _compile_prompts(self, outcome: Outcome) -> None:
        what = "a piece of one prompt of S tokens after P, "
        if not outcome.variants:
            form = "absorbed" if outcome.absorbed else "expanded"
            self.graphs.append(Graph("prompt", f"{what}{form}, (S, P)", 8))
            self._prompts.append(self._compiled(outcome.program, self.graphs[-1]))
            return
        for name, how, program in (("expanded", "long", outcome.base), ("absorbed", "short", outcome.program)):
            self.graphs.append(Graph(f"prompt, {name}", f"{what}{how}, (S, P)", 8))
            self._prompts.append(self._compiled(program, self.graphs[-1]))
        pays, order = picker(outcome.base, outcome.variants), [node.name for node in outcome.base.placeholders]
        self._pays = lambda inputs: pays([inputs.get(name) for name in order])

    def _compiled(
        self,
        program: Program,
        graph: Graph,
        *,
        decode: bool = False,
        replays: type[Replayed] | None = None,
        changing: Sequence[str] = (),
    ) -> Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]:
        """Return a callable that takes a dict of inputs. It supplies weights and folds itself.

        If ``replays`` is given, calls are recorded. The inputs named in ``changing`` differ from call to call.
        """
        program.gm.recompile()
        folds = FoldedWeights(program) if program.folds else None
        order = [node.name for node in program.placeholders]
        own = {name: tensor for name, tensor in program.weights.items() if tensor is not None}
        folded = [order.index(fold.placeholder) for fold in program.folds]
        made: list[Call] = []

        def run(inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
            values: list[torch.Tensor | None] = [inputs[name] if name in inputs else own.get(name) for name in order]
            if folds is not None:
                for at, value in zip(folded, folds.values(values), strict=True):
                    values[at] = value
            if not decode:
                S, P = inputs[TOKENS].shape[1], next(v for k, v in inputs.items() if k not in (TOKENS, POSITIONS))
                held = P.numel() // P.shape[-1]
                graph.buckets.add((bucket(S), bucket(held) if held else 0))
            with without_autocast(), torch.no_grad():
                if not made:
                    with one_at_a_time():
                        if not made:
                            call = self._generate(program, graph)
                            if replays is not None:
                                call = graph.replayed = replays(call, [order.index(name) for name in changing])
                            made.append(call)
                result: Sequence[torch.Tensor] = made[0](*values)
                return result

        return run

    def _generate(self, program: Program, graph: Graph) -> Call:
        """Compile one graph with symbolic sizes."""
        if any(n.meta["val"].is_cpu for n in program.placeholders):
            native.load()
        if self.options.codegen == "eager":
            return program.gm.forward  # not `gm(...)`, which a tracer in another thread may intercept
        patches = {name.replace("-", "_"): value for name, value in self.options.inductor.items()}
        graph.compiled = Compiled(program, patches, graph.limit, graph.name)
        return graph.compiled


def _like(shape: Sequence[int | None], tokens: int) -> list[int]:
    """Return the shape [1,...] of one sequence's cache, with ``tokens`` along the growing axis."""
    return [1, *(tokens if n is None else n for n in shape[1:])]
