"""The demo: when two results agree, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from mla_compile.errors import InputError
from mla_compile.workbench import demo
from mla_compile.workbench.demo import Decoded, DemoSettings


def _logits(tokens: list[int], gap: float = 1.0) -> torch.Tensor:
    """Logits [len(tokens), 8] whose best entry is the token, ``gap`` above token 7."""
    logits = torch.zeros(len(tokens), 8)
    logits[:, 7] = 5.0 - gap
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return logits


def test_equal_tokens_agree():
    one, other = (Decoded(torch.tensor([1, 2, 3]), _logits([1, 2, 3])) for _ in range(2))
    result = demo.compare(one, other, 0.0)
    assert result.ok
    assert result.first_difference is None
    assert result.logits_error == 0.0


def test_equal_tokens_with_other_logits_do_not_agree():
    other = _logits([1, 2, 3])
    other[2] *= 1.01
    result = demo.compare(
        Decoded(torch.tensor([1, 2, 3]), _logits([1, 2, 3])), Decoded(torch.tensor([1, 2, 3]), other), 1e-3
    )
    assert not result.ok
    assert result.logits_error == pytest.approx(0.01, rel=1e-4)


def test_a_different_token_is_a_difference():
    """The original prefers 2 by a whole unit; the other picks 7, with logits that differ by much less than that."""
    original, other = (
        Decoded(torch.tensor([1, 2]), _logits([1, 2])),
        Decoded(torch.tensor([1, 7]), _logits([1, 2]) + 1e-4),
    )
    result = demo.compare(original, other, 1e-3)
    assert result.first_difference == 1
    assert not result.tie
    assert not result.ok


def test_a_tie_within_rounding_is_excused_and_nothing_after_it_is_compared():
    original = Decoded(torch.tensor([1, 2, 3]), _logits([1, 2, 3], gap=1e-5))
    other = Decoded(torch.tensor([1, 7, 5]), _logits([1, 7, 5]) * torch.tensor([[1.0], [1.0], [-9.0]]))
    other.logits[:2] = original.logits[:2]
    other.logits[1, 7] += 2e-5
    result = demo.compare(original, other, 1e-3)
    assert result.first_difference == 1
    assert result.tie
    assert result.ok


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32"),
        ({"layers": 0}, "layers is 0"),
        ({"contexts": ()}, "contexts is"),
        ({"contexts": (512, 0)}, "contexts is"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, says: str):
    with pytest.raises(InputError, match=says):
        DemoSettings(**wrong)
