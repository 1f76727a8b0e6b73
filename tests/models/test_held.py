"""What a layer of a cache holds, from what prompts of three lengths left in it."""

from __future__ import annotations

import torch

from mla_compile.models.held import SHORT, HeldRows, _of


def test_a_window_beside_rows_that_each_stand_for_several_tokens():
    """Rows of 4 for the last 96 tokens and for every 128, an indexer's keys of 6, and a state of one size."""

    def after(tokens: int) -> dict[str, torch.Tensor]:
        filled = {
            "keys": torch.zeros(1, 1, 96, 4),
            "values": torch.zeros(1, 1, 96, 4),
            "memory": torch.zeros(1, 1, tokens // 128, 4),
            "index_keys": torch.zeros(1, tokens, 6),
            "state": torch.zeros(1, 2, 5),
        }
        left = tokens % 128
        return filled | ({"waiting": torch.zeros(1, left, 4)} if left else {})

    before, short, long = (after(n) for n in (SHORT - 1, SHORT, 2 * SHORT))
    assert _of(before, short, long, shared=True) == HeldRows(
        every=128, window=96, shared=True, more={"index_keys": 6}, waiting={"waiting": 16}, state={"state": 40}
    )
    del before["waiting"]
    for held in (before, short, long):
        del held["memory"]
    assert _of(before, short, long, shared=False) == HeldRows(
        every=0, window=96, more={"index_keys": 6}, state={"state": 40}
    )
