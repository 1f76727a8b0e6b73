"""Probabilities of one head are read from the scores of that head, where each head is written and read for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.programs import canonical, export, run, seeded

aten = torch.ops.aten
B, H, S, T, N = 2, 3, 4, 5, 6


class Loop(nn.Module):
    """Scores of q [B,H,S,N] and k [B,H,T,N] one head after another, and what ``read`` makes of them."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], write: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.read, self.write = read, write

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.read(self.write([q[:, h] @ k[:, h].mT for h in range(H)]), k)


def written(heads: list[Tensor]) -> Tensor:
    scores = torch.zeros(B, H, S, T, dtype=torch.float64)
    for h, one in enumerate(heads):
        scores[:, h] = one
    return scores


def written_twice(heads: list[Tensor]) -> Tensor:
    scores = written(heads[::-1])
    for h, one in enumerate(heads):
        scores[:, h] = one * 2
    return scores


def not_all_written(heads: list[Tensor]) -> Tensor:
    scores = torch.ones(B, H, S, T, dtype=torch.float64)
    for h, one in enumerate(heads[1:], 1):
        scores[:, h] = one
    return scores


def stacked(heads: list[Tensor]) -> Tensor:
    return torch.stack(heads, 1)


def stacked_last(heads: list[Tensor]) -> Tensor:
    return torch.stack(heads, -1)


def weighed(p: Tensor, k: Tensor) -> Tensor:
    return torch.stack([p[:, h] @ k[:, h] for h in range(H)])


def plain(scores: Tensor, k: Tensor) -> Tensor:
    return weighed((scores / 3).softmax(-1), k)


def masked(scores: Tensor, k: Tensor) -> Tensor:
    """Of masks for all heads, for each, and without an axis for heads."""
    scores = scores.masked_fill(seeded(1, 1, S, T) > 1, -torch.inf) + seeded(H, 1, T)
    return weighed(torch.where(seeded(S, T) > 1, -9.0, scores).softmax(3), k)


def in_float32(scores: Tensor, k: Tensor) -> Tensor:
    return weighed(scores.softmax(-1, dtype=torch.float32).double(), k)


def of_another_head(scores: Tensor, k: Tensor) -> Tensor:
    p = scores.softmax(-1)
    return torch.stack([p[:, (h + 1) % H] @ k[:, h] for h in range(H)])


def heads_last(scores: Tensor, k: Tensor) -> Tensor:
    p = scores.softmax(-2)
    return torch.stack([p[..., h] @ k[:, h] for h in range(H)])


def softmaxes(module: nn.Module) -> list[torch.Size]:
    """The shapes of the softmaxes of the canonical graph, which returns what ``module`` returns."""
    given = seeded(B, H, S, N), seeded(B, H, T, N)
    want = module(*given)
    program = export(module, given)
    graph = canonical(program)
    (got,) = run(program, *given)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    nodes = graph.find_nodes(op="call_function", target=aten.softmax.int)
    assert all(node.meta["val"].stride() == node.meta["val"].contiguous().stride() for node in nodes)
    return [node.meta["val"].shape for node in nodes]


@pytest.mark.parametrize("read", [plain, masked, in_float32, of_another_head])
@pytest.mark.parametrize("write", [written, written_twice, stacked])
@pytest.mark.singly
def test_each_head_has_its_own_softmax(read: Callable[..., Tensor], write: Callable[..., Tensor]) -> None:
    assert softmaxes(Loop(read, write)) == H * [(B, S, T)]


def test_heads_on_the_last_axis() -> None:
    assert softmaxes(Loop(heads_last, stacked_last)) == H * [(B, S, T)]


def over_heads(scores: Tensor, k: Tensor) -> Tensor:
    return weighed(scores.softmax(1), k)


def read_as_a_whole(scores: Tensor, k: Tensor) -> Tensor:
    p = scores.softmax(-1)
    return weighed(p, k) + p.sum()


def returned(scores: Tensor, k: Tensor) -> Tensor:
    return scores.softmax(-1)[:, 1]


def selected_along_queries(scores: Tensor, k: Tensor) -> Tensor:
    return scores.softmax(-1)[:, :, 1].unsqueeze(-2) @ k


def below_the_top_of_all_heads(scores: Tensor, k: Tensor) -> Tensor:
    return weighed((scores - scores.amax()).softmax(-1), k)


def mixed(scores: Tensor, k: Tensor) -> Tensor:
    return weighed((scores + scores.flip(1)).softmax(-1), k)


NEAR = [over_heads, read_as_a_whole, returned, selected_along_queries, below_the_top_of_all_heads, mixed]


@pytest.mark.parametrize("read", NEAR)
def test_heads_that_are_not_separate_stay(read: Callable[..., Tensor]) -> None:
    assert softmaxes(Loop(read, written)) == [(B, H, S, T)]


def test_a_head_that_is_not_written_stays() -> None:
    assert softmaxes(Loop(plain, not_all_written)) == [(B, H, S, T)]


def test_dropout_is_drawn_for_all_heads_at_once() -> None:
    def dropped(scores: Tensor, k: Tensor) -> Tensor:
        return weighed(torch.nn.functional.dropout(scores.softmax(-1), 0.5, training=True), k)

    program = export(Loop(dropped, written), (seeded(B, H, S, N), seeded(B, H, T, N)))
    (softmax,) = canonical(program).find_nodes(op="call_function", target=aten.softmax.int)
    assert softmax.meta["val"].shape == (B, H, S, T)
