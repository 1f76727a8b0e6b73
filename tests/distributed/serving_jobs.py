"""What the ranks of tests of continuous batching run: every function is called on each of them, with its rank first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile.batching import door
from mla_compile.batching.graphs import StepGraphs
from mla_compile.batching.steps import Steps
from tests.distributed.context_jobs import spread
from tests.distributed.jobs import EAGER, by_heads, by_transformers, small, told_to_differ
from tests.support import models
from tests.support.serving import alone, greedy, pages, prompts, tokens

LENGTHS = (21, 5, 1, 33, 7)
ROOM = 48
"""Tokens that the pages of one request have room for where FLOPs are counted."""
# With tied embeddings a tiny random model says the last token again, whatever its attention does.
CONFIG: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": False}


def served(rank: int, family: str, directory: str | None, verify: bool, fails_on: int) -> dict[str, Any]:
    """Requests to all ranks together and to one process, then some that fail: at last on rank ``fails_on`` alone."""
    whole, one = (models.build(family, **CONFIG) for _ in range(2))
    model = by_heads(whole) if directory is None else by_transformers(whole, directory)
    fast = mla_compile.continuous_batching(model, verify=verify, **EAGER)
    ids = prompts(LENGTHS)
    got = tokens(fast, ids, new=8, max_batch_tokens=16)
    batching = fast.mla_batching
    return {
        "tokens": got == [alone(one, prompt, 8) for prompt in ids],
        "sites": [(str(s.code), s.dims.H, s.decode_flops_after) for s in batching.report.sites],
        "bytes": batching.bytes_of_token,
        "fails": _failures(fast, one, rank, fails_on),
    }


def shared_pages(rank: int, family: str, how: str, verify: bool, fails_on: int) -> dict[str, Any]:
    """The same with pages that ranks share, which requests outgrow, fork in, and begin alike in."""
    whole, one = (models.build(family, **CONFIG) for _ in range(2))
    model, over = spread(whole, how)
    fast = mla_compile.continuous_batching(model, context_parallel=over, verify=verify, **EAGER)
    ids = prompts(LENGTHS)
    ids.append(ids[3][:32] + ids[4])  # of another request two blocks of 8 rows on 2 ranks
    got = tokens(fast, ids, new=8, page=8, max_batch_tokens=16)
    many = prompts((17, 18, 19, 20), seed=9)
    crowded = tokens(fast, many, new=12, page=4, blocks=96 // (4 * over.size()), safety_margin=0.0)
    config = greedy(6)
    config.num_return_sequences = 2
    forked = fast.generate_batch(ids[:2], generation_config=config, continuous_batching_config=pages(page=4))
    batching = fast.mla_batching
    return {
        "tokens": got == [alone(one, prompt, 8) for prompt in ids],
        "crowded": crowded == [alone(one, prompt, 12) for prompt in many],
        "forked": [x.generated_tokens == alone(one, ids[int(n.split("_")[1])], 6) for n, x in forked.items()],
        "codes": [str(site.code) for site in batching.report.sites],
        "said": [text for text in batching.report.messages if "share" in text],
        "bytes": batching.bytes_of_token,
        "flops": _flops_of_token(batching.steps),
        "received": dict(next(graph.received for graph in batching.graphs if graph.name == "decode")),
        "fails": _failures(fast, one, rank, fails_on),
    }


def _flops_of_token(steps: StepGraphs) -> float:
    """What attention of a decode step takes on this rank for each token that the pages have room for."""
    B, M, page = 2, 3, 8
    assert M * steps.tokens_of_page(page) == ROOM
    decode = steps.decode(steps.make_pools(B * M, page, torch.device("cpu")))
    ids, lengths = torch.zeros(B, 1, dtype=torch.long), torch.tensor([1, 20], dtype=torch.int32)
    table = torch.arange(B * M, dtype=torch.int32).reshape(B, M)
    with FlopCounterMode(display=False) as counter:
        decode.call(ids, lengths[:, None].long() - 1, table, lengths, decode.pools)
    counted = counter.get_flop_counts()["Global"][torch.ops.mla_compile.paged_decode_attention]
    return counted / (B * ROOM)


def other_meshes(rank: int) -> str:
    """Weights that ranks 0 and 2 hold together, or 1 and 3, and a context of three of the four."""
    weights = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    context = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2], [1, 2, 3])][rank > 0]
    model = by_heads(small(), weights)
    return _said(lambda: mla_compile.continuous_batching(model, context_parallel=context, **EAGER))


def _failures(fast: Any, one: Any, rank: int, fails_on: int) -> dict[str, list[Any]]:
    """For each request what it is told, or whether its tokens are those of one process."""
    ids = [*prompts((9, 6)), [models.VOCAB]]
    want = [alone(one, prompt, 3) for prompt in ids[:2]]
    honest, poisoned = Steps._prompt, True

    def fails(self: Steps, part: Any) -> torch.Tensor:
        logits = honest(self, part)
        if poisoned and part.ids.tolist() == ids[1]:
            raise ValueError("this prompt is poison")
        return logits

    def answers() -> list[Any]:
        out = fast.generate_batch(ids, generation_config=greedy(3), continuous_batching_config=pages())
        got = [one.generated_tokens for one in out.values()]
        return [one.error or got[at] == want[at] for at, one in enumerate(out.values())]

    Steps._prompt = fails  # type: ignore[method-assign]
    logging.disable()  # errors of requests, which are meant
    try:
        found = {"on all ranks": answers()}
        poisoned = rank == fails_on
        found["on one rank"] = answers()
        poisoned = False
        return found | {"on none": answers()}
    finally:
        Steps._prompt = honest  # type: ignore[method-assign]
        logging.disable(logging.NOTSET)


def _said(job: Callable[[], Any]) -> str:
    """What is raised, and of which kind."""
    try:
        job()
    except mla_compile.MlaCompileError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def another_verdict(rank: int, which: int) -> str:
    """Rank ``which`` finds that rewritten attentions differ from the original."""
    model = by_heads(small())
    with told_to_differ() if rank == which else contextlib.nullcontext():
        return _said(lambda: mla_compile.continuous_batching(model, **EAGER))


def a_rank_that_cannot(rank: int, which: int) -> str:
    """Rank ``which`` fails before its first graph."""
    model, honest = by_heads(small()), door.wire

    def fails(given: Any) -> Any:
        honest(given)
        raise mla_compile.ExportError("this rank has had enough")

    if rank == which:
        door.wire = fails
    try:
        return _said(lambda: mla_compile.continuous_batching(model, **EAGER))
    finally:
        door.wire = honest
