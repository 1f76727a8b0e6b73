"""Run one step of the scheduler. Some requests of the step decode, and others read a piece of their prompt.

Requests with one new token run together, each over its own pages. Every piece of a prompt runs separately, because
packed pieces would attend across requests. If a request makes the model fail, only this request fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from mla_compile.batching.graphs import LEAST, Decode, StepGraphs, bucket
from mla_compile.batching.pages import TRASH, LatentPages
from mla_compile.batching.replay import Replayed
from mla_compile.core.counting import count
from mla_compile.errors import RankError, brief

logger = logging.getLogger("mla_compile")
Fails = Callable[[Exception, RequestState], None]
"""A function of an error and the state of the request that ends with this error."""


@dataclass(frozen=True)
class _Part:
    """One request's part of a step: its tokens, the position ``past`` of the first token, and its blocks."""

    future: FutureRequestState | None  # None in a warm-up
    ids: torch.Tensor  # [S]
    past: int
    table: list[int]


class Steps:
    """Replaces the model in transformers: takes the packed tokens of a step and returns logits."""

    def __init__(
        self, graphs: StepGraphs, pages: LatentPages, vocabulary: int, replays: type[Replayed] | None = None
    ) -> None:
        """``replays`` records and replays decode steps if the device can."""
        self._graphs, self._pages, self._vocabulary = graphs, pages, vocabulary
        self._decode: Decode = graphs.decode(pages.pools, replays)
        self.batch: Callable[[], list[FutureRequestState]] = list
        self.fails: Fails = _raise
        self.alike: Callable[[bool], bool] = lambda _: True
        """Takes whether this step succeeded on this rank. Returns whether all ranks had the same outcome."""

    def _supports_logits_to_keep(self) -> bool:
        """Tell transformers that only the logits of each request's last token are returned."""
        return True

    def room(self) -> int:
        """Return the maximum number of tokens of one request."""
        return self._pages.room()

    def warm_up(self, told: Callable[[str], None] = lambda _: None, requests: int = 1, tokens: int = LEAST) -> None:
        """Compile the graphs by running them on dummy requests.

        Compiled code usually serves all sizes. If Inductor specialises, code is compiled for up to ``requests``
        requests per step, for all possible numbers of pages per request, and for prompt pieces of up to ``tokens``
        tokens. If ``requests`` is 1, only the smallest sizes are compiled. ``told`` is called with a description of
        each size.
        """
        device = self._pages.device
        ids = torch.zeros(1, dtype=torch.long, device=device)
        most = bucket(self._pages.num_blocks) if requests > 1 else LEAST
        for B, M in [*((B, LEAST) for B in _buckets(requests)), *((LEAST, M) for M in _buckets(most)[1:])]:
            told(f"a decode step of {B} requests, {M} pages each")
            self._decoded([_Part(None, ids, 0, [TRASH] * M)] * B)
        # torch specialises sizes of 0 and 1, and complex rotations are compiled for an even or an odd number of tokens.
        pieces, behind = ([LEAST, 3, *_buckets(tokens)[1:]], (0, 1, LEAST)) if requests > 1 else ([LEAST], (0,))
        for S, P in [(S, P) for S in pieces for P in behind]:
            told(f"{S} tokens of a prompt behind {P} others")
            self._graphs.warm_up_prompt(S, P, device)

    def __call__(self, input_ids: torch.Tensor, logits_indices: torch.Tensor, **_: object) -> SimpleNamespace:
        """Return ``logits`` [1,n,vocab]: first the rows of requests that get a token, in order, then unused rows."""
        futures, done = self.batch(), dict[int, torch.Tensor]()
        decoding: list[tuple[int, _Part]] = []
        start = 0
        for number, future in enumerate(list(futures)):
            ids = input_ids[0, start : start + future.query_length].long()
            start += future.query_length
            past = future.state.position_offset - future.query_length
            part = _Part(future, ids, past, self._pages.table(future.state.request_id))
            if not future.query_length:  # this prompt waits to be forked before its last token is read
                done[number] = torch.zeros(self._vocabulary, device=ids.device)
            elif future.query_length == 1:
                decoding.append((number, part))
            else:
                self._alone(number, part, done, self._prompt)
        for number, logits in self._together(decoding):
            done[number] = logits
        kept = [(number, future) for number, future in enumerate(list(futures)) if number in done]
        futures[:] = [future for _, future in kept]
        rows = [done[number] for number, future in kept if future.has_new_token]
        logits = input_ids.new_zeros(1, len(logits_indices), self._vocabulary, dtype=torch.float32)
        if rows:
            logits[0, : len(rows)] = torch.stack(rows)
        return SimpleNamespace(logits=logits)

    def _together(self, decoding: Sequence[tuple[int, _Part]]) -> list[tuple[int, torch.Tensor]]:
        if not decoding:
            return []
        try:
            logits = self._on_all_ranks(lambda: self._decoded([part for _, part in decoding]))
        except RankError:
            raise
        except Exception:  # one request may have caused the error, and the other requests must go on
            # A repeated step writes the same rows, so the requests can be retried one by one.
            count("fallbacks", reason="a decode step failed")
            logger.warning("a decode step failed; its requests are run one by one", exc_info=True)
            alone: dict[int, torch.Tensor] = {}
            for number, part in decoding:
                self._alone(number, part, alone, lambda one: self._decoded([one])[0])
            return list(alone.items())
        return [(number, row) for (number, _), row in zip(decoding, logits, strict=False)]

    def _alone(
        self, number: int, part: _Part, done: dict[int, torch.Tensor], run: Callable[[_Part], torch.Tensor]
    ) -> None:
        assert part.future is not None
        try:
            done[number] = self._on_all_ranks(lambda: run(part))
        except RankError:
            raise
        except Exception as error:  # reported to the sender of this request
            logger.warning("request %s failed", part.future.state.request_id, exc_info=True)
            self.fails(error, part.future.state)

    def _on_all_ranks(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of ``run`` if all ranks succeed, and raise its error if all ranks fail.

        Raises :class:`RankError` on all ranks if only some ranks fail, because later collectives would not match.
        """
        told = "a step failed on some ranks and not on others"
        try:
            result = run()
        except Exception as error:
            if not self.alike(False):  # noqa: FBT003
                raise RankError(f"{told}: {brief(error)}") from error
            raise
        if not self.alike(True):  # noqa: FBT003
            raise RankError(f"{told}: another rank")
        return result

    def _decoded(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Decode one token of each request and return logits [B',vocab]. B' is the bucket."""
        device = self._pages.device
        B, M = bucket(len(parts)), bucket(max(len(part.table) for part in parts))
        spare = B - len(parts)
        table = [[*part.table, *[0] * (M - len(part.table))] for part in parts] + [[TRASH] + [0] * (M - 1)] * spare
        past = [part.past for part in parts] + [0] * spare
        ids = torch.cat([*(part.ids for part in parts), torch.zeros(spare, dtype=torch.long, device=device)])
        positions = torch.tensor(past, dtype=torch.long).to(device, non_blocking=True)
        lengths = torch.tensor([n + 1 for n in past], dtype=torch.int32).to(device, non_blocking=True)
        blocks = torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)
        logits = self._decode.call(ids[:, None], positions[:, None], blocks, lengths, self._pages.pools)
        return logits[:, -1].float()

    def _prompt(self, part: _Part) -> torch.Tensor:
        """Read a piece of a prompt: write its rows to pages and return the logits [vocab] of its last token."""
        blocks = torch.tensor(part.table, dtype=torch.long).to(self._pages.device, non_blocking=True)
        return self._graphs.read(part.ids, part.past, blocks, self._pages.pools).float()


def _buckets(most: int) -> list[int]:
    return [1 << n for n in range(LEAST.bit_length() - 1, bucket(most).bit_length())]


def _raise(error: Exception, _: object) -> None:
    raise error
