"""One step of the scheduler: a batch of requests, some decoding and some reading a piece of their prompt.

Requests with one new token run together, each over its own pages; every piece of a prompt runs by itself, because its
work is its own and packing several would attend across them. A request that makes the model fail fails alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mla_compile.batching.graphs import LEAST, Decode, StepGraphs, bucket
from mla_compile.batching.pages import TRASH, LatentPages
from mla_compile.batching.replay import Replayed
from mla_compile.core.counting import count
from mla_compile.errors import RankError, brief

logger = logging.getLogger("mla_compile")
Fails = Callable[[Exception, Any], None]
"""Takes an error and the state of the request that it ends."""


@dataclass(frozen=True)
class _Part:
    """What one request reads in a step: its tokens, the first of them at position ``past``, and the blocks it has."""

    future: Any
    ids: torch.Tensor  # [S]
    past: int
    table: list[int]


class Steps:
    """What transformers calls in place of the model: takes the packed tokens of a step, returns logits."""

    def __init__(
        self, graphs: StepGraphs, pages: LatentPages, vocabulary: int, replays: type[Replayed] | None = None
    ) -> None:
        """``replays``: how decode steps are recorded and replayed, where the device can."""
        self._graphs, self._pages, self._vocabulary = graphs, pages, vocabulary
        self._decode: Decode = graphs.decode(pages.pools, replays)
        self.batch: Callable[[], list[Any]] = list
        self.fails: Fails = lambda error, _: _raise(error)
        self.alike: Callable[[bool], bool] = lambda _: True
        """Whether all ranks that run these steps say the same as this one."""

    def _supports_logits_to_keep(self) -> bool:
        """Asked by transformers: the logits are those of each request's last token, and no others."""
        return True

    def room(self) -> int:
        """The most tokens that one request can have."""
        return self._pages.room()

    def warm_up(self, told: Callable[[str], None] = lambda _: None, requests: int = 1, tokens: int = LEAST) -> None:
        """Compiles the graphs, by requests that belong to nobody.

        Code serves all sizes, but for models where it depends on a number; it is made for up to so many ``requests`` in
        a step, with all pages that one can have, and ``tokens`` in a piece of a prompt. ``told`` what is being made.
        """
        device = self._pages.device
        ids = torch.zeros(1, dtype=torch.long, device=device)
        most = bucket(self._pages.num_blocks) if requests > 1 else LEAST
        for B, M in [*((B, LEAST) for B in _buckets(requests)), *((LEAST, M) for M in _buckets(most)[1:])]:
            told(f"a decode step of {B} requests, {M} pages each")
            self._decoded([_Part(None, ids, 0, [TRASH] * M)] * B)
        # torch takes 0 and 1 for constants, and complex rotations are compiled for an even or an odd number.
        pieces, behind = ([LEAST, 3, *_buckets(tokens)[1:]], (0, 1, LEAST)) if requests > 1 else ([LEAST], (0,))
        for S, P in [(S, P) for S in pieces for P in behind]:
            told(f"{S} tokens of a prompt behind {P} others")
            self._graphs.warm_up_prompt(S, P, device)

    def __call__(self, input_ids: torch.Tensor, logits_indices: torch.Tensor, **_: Any) -> SimpleNamespace:
        """``logits`` [1,n,vocab]: of the requests that get a token, in their order, then rows that nobody reads."""
        futures, done = self.batch(), dict[int, torch.Tensor]()
        decoding: list[tuple[int, _Part]] = []
        start = 0
        for number, future in enumerate(list(futures)):
            ids = input_ids[0, start : start + future.query_length].long()
            start += future.query_length
            past = future.state.position_offset - future.query_length
            part = _Part(future, ids, past, self._pages.table(future.state.request_id))
            if not future.query_length:  # a prompt that waits to be forked before its last token
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
        except Exception:  # whatever one request makes the model raise must not end the others
            # What a step writes is the same each time, so the requests may be tried again one by one.
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
        try:
            done[number] = self._on_all_ranks(lambda: run(part))
        except RankError:
            raise
        except Exception as error:  # answered to whoever sent this request
            logger.warning("request %s failed", part.future.state.request_id, exc_info=True)
            self.fails(error, part.future.state)

    def _on_all_ranks(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``run`` returns or raises, where it does the same on all ranks.

        Raises :class:`RankError` on all of them where one fails that others do not: they would no longer meet.
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
        """Logits [B',vocab] of one more token each, B' the bucket."""
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
        """Logits [vocab] of the last token of a piece of a prompt, whose rows are written to its pages."""
        blocks = torch.tensor(part.table, dtype=torch.long).to(self._pages.device, non_blocking=True)
        return self._graphs.read(part.ids, part.past, blocks, self._pages.pools).float()


def _buckets(most: int) -> list[int]:
    return [1 << n for n in range(LEAST.bit_length() - 1, bucket(most).bit_length())]


def _raise(error: Exception) -> None:
    raise error
