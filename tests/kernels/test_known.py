"""Kinds of calls that are checked once: calls of other kinds are still refused, and the tables stay small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_compile.errors import InputError
from mla_compile.kernels import decode, known, linear

X, WEIGHT, CODES = torch.ones(2, 64), torch.ones(8, 64), torch.ones(8, 64, dtype=torch.int8)
SCALES, ZEROS = torch.ones(8, 2), torch.ones(8, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ((X, WEIGHT), (X[:, 1:], WEIGHT)),
        ((X, WEIGHT), (X, WEIGHT.double())),
        ((X, WEIGHT), (X.to("meta"), WEIGHT)),
        ((X, WEIGHT, torch.ones(8)), (X, WEIGHT, torch.ones(9))),
        ((X, CODES, None, 4, SCALES, ZEROS), (X, CODES, None, 4, SCALES, ZEROS.int())),
        ((X, CODES, None, 4, SCALES, ZEROS), (X, CODES, None, 4, SCALES[:7], ZEROS)),
    ],
)
def test_other_kinds_of_products_are_refused(right: tuple[Any, ...], wrong: tuple[Any, ...]):
    for _ in range(2):
        linear.run(*right)
        with pytest.raises(InputError, match="mla_compile::linear"):
            linear.run(*wrong)


def test_other_kinds_of_attention_are_refused():
    query, latent, lengths = torch.ones(2, 1, 3, 16), torch.ones(2, 5, 16), torch.tensor([5, 4], dtype=torch.int32)
    for _ in range(2):
        decode.decode_attention(query, latent, scale=0.1, seq_lens=lengths)
        with pytest.raises(InputError, match="seq_lens is not contiguous"):
            decode.decode_attention(query, latent, scale=0.1, seq_lens=torch.ones(4, dtype=torch.int32)[::2])
        with pytest.raises(InputError, match="softcap"):
            decode.decode_attention(query, latent, scale=0.1, softcap=-1.0)


def test_a_full_table_is_emptied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known, "REMEMBERED", 3)
    table: dict[object, int] = {}
    for kind in range(5):
        assert known.remember(table, kind, -kind) == -kind
    assert table == {3: -3, 4: -4}
