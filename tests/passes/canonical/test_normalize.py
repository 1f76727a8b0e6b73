"""Writes with indices get the axes that they are written along; writes with masks stay as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.programs import canonical, export, run, seeded

aten = torch.ops.aten


def written(module: nn.Module, *given: torch.Tensor) -> list[list[int]]:
    """The shapes of what is written with indices, in a canonical graph whose shapes are those of what it computes."""
    program = export(module, given)
    graph = canonical(program)
    for got, node in zip(run(program, *given), graph.output_node().all_input_nodes, strict=True):
        assert got.shape == node.meta["val"].shape
    return [
        list(write.args[2].meta["val"].shape)
        for write in graph.find_nodes(op="call_function", target=aten.index_put.default)
    ]


class Divided(nn.Module):
    """A rank's part of an embedding whose rows are divided among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(8, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < 0) | (ids >= 8)
        own = ids - 0
        own[elsewhere] = 0
        rows = F.embedding(own, self.weight)
        rows[elsewhere] = 0.0
        return rows


def test_a_write_by_a_mask_keeps_the_axes_of_its_value():
    """Of one token of one sequence: Inductor gives a result the axes that its value has more."""
    assert written(Divided(), torch.tensor([[3]])) == [[], []]


def test_a_write_by_numbers_gets_those_that_it_lacks():
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.index_put(k, [None, None, at], x)

    assert written(Cached(), seeded(2, 1, 5), torch.tensor([4]), seeded(1, 2, 7, 5)) == [[1, 2, 1, 5]]


class Joined(nn.Module):
    """Rows of c and r side by side, as `rows[:, :, :4] = c` writes them into new memory."""

    def forward(self, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        c = torch.cat([c, c[:, :1]], 1)
        r = torch.cat([r, r[:, :1]], 1)
        rows = c.new_empty(*c.shape[:2], 7)
        rows[:, :, :4] = c
        rows[:, :, 4:] = r
        return rows * 2


def test_columns_are_written_once_for_all_tokens_of_a_growing_cache():
    tokens = torch.export.Dim("tokens", min=2)
    program = export(Joined(), [seeded(2, 5, 4), seeded(2, 5, 3)], dynamic={"c": {1: tokens}, "r": {1: tokens}})
    writes = canonical(program).find_nodes(op="call_function", target=aten.slice_scatter.default)
    assert [node.args[2] for node in writes] == [2, 2]
    given = seeded(2, 9, 4), seeded(2, 9, 3)
    torch.testing.assert_close(run(program, *given)[0], Joined()(*given))


def test_a_write_of_some_tokens_of_a_growing_cache_stays():
    class Newest(nn.Module):
        def forward(self, c: torch.Tensor) -> torch.Tensor:
            rows = c.new_zeros(2, c.shape[1] + 1, 4)
            rows[:, 1:][..., :3] = c[..., :3]
            return rows * 2

    program = export(Newest(), [seeded(2, 5, 4)], dynamic={"c": {1: torch.export.Dim("tokens", min=2)}})
    writes = canonical(program).find_nodes(op="call_function", target=aten.slice_scatter.default)
    assert [node.args[2] for node in writes] == [2, 1]
    given = seeded(2, 9, 4)
    torch.testing.assert_close(run(program, given)[0], Newest()(given))
