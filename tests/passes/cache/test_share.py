"""Rows of a buffer of full length that ranks share: what all of them write together is what one would write."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.core.program import Append, Program
from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.share import share_rows
from tests.support.programs import seeded

B, T, W = 2, 11, 3
AT = {
    "one": [[4], [0], [10]],
    "a piece": [[4, 5], [5, 6, 7], [0, 1, 2, 3, 4], [6, 7, 8, 9, 10]],
    "far apart": [[7, 0, 3], [10, 2]],
    "of one rank": [[0, 6], [3, 9]],
}


def copied(buffer: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_copy(buffer, 1, at, new)


def put(buffer: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(buffer, [None, at], new)


def put_twice(buffer: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return put(put(buffer, at, new), at + 1, new)


def programs(write, ranks: int, count: int, dtype: torch.dtype = torch.int64) -> list[Program]:
    """The program that writes, for each rank."""
    given = seeded(B, T, W), torch.zeros(count, dtype=dtype), seeded(B, count, W)
    gm = make_fx(lambda *inputs: (write(*inputs), inputs[2] + 1), tracing_mode="fake", pre_dispatch=True)(*given)
    gm.graph.output_node().args = (tuple(gm.graph.output_node().args[0]),)
    buffer = gm.graph.find_nodes(op="placeholder")[0]
    one = Program(gm, mutations=(buffer.name,), fake_mode=buffer.meta["val"].fake_mode)
    made = [one.copy() for _ in range(ranks)]
    for rank, program in enumerate(made):
        program.know(sharing=Sharing("all", tuple(range(ranks)), rank), shared=frozenset({buffer.name}))
    return made


def written(made: list[Program], buffer: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """What all ranks have then, together."""
    ranks, found = len(made), torch.full((B, -(-T // len(made)) * len(made), W), torch.nan, dtype=buffer.dtype)
    for rank, program in enumerate(made):
        own = torch.full((B, -(-T // ranks), W), torch.nan, dtype=buffer.dtype)
        share = buffer[:, rank::ranks]
        own[:, : share.shape[1]] = share
        found[:, rank::ranks] = program.gm(own, *given)[0]
    return found[:, :T]


@pytest.mark.singly
@pytest.mark.parametrize("write", [copied, put])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", AT)
def test_all_ranks_write_what_one_would(write, ranks: int, case: str):
    for at in AT[case]:
        made = programs(write, ranks, len(at))
        for program in made:
            assert share_rows(program) is None
            assert program.appends == (Append(program.mutations[0], None, 1, 0, shared=True, grows=False),)
            program.gm.recompile()
        buffer, new = seeded(B, T, W, seed=1), seeded(B, len(at), W, seed=2)
        where = torch.tensor(at)
        assert torch.equal(written(made, buffer, where, new), write(buffer, where, new))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_from_the_end(dtype: torch.dtype):
    made = programs(put, 2, 3, dtype)
    for program in made:
        assert share_rows(program) is None
        program.gm.recompile()
    buffer, new = seeded(B, T, W, seed=1), seeded(B, 3, W, seed=2)
    where = torch.tensor([-1, 3, -4], dtype=dtype)
    assert torch.equal(written(made, buffer, where, new), put(buffer, where, new))


@pytest.mark.parametrize(("write", "at"), [(copied, [11]), (copied, [-1, 4]), (put, [4, 11, 5]), (put, [2, -12])])
def test_positions_that_are_not_there_are_an_error_on_every_rank(write, at: list[int]):
    for program in programs(write, 2, len(at)):
        assert share_rows(program) is None
        program.gm.recompile()
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            program.gm(seeded(B, 6, W), torch.tensor(at), seeded(B, len(at), W))


def test_what_is_written_otherwise_is_needed_whole():
    program = programs(put_twice, 2, 1)[0]
    before = program.gm.graph.python_code("self").src
    assert "more than writes at positions" in str(share_rows(program))
    assert program.gm.graph.python_code("self").src == before


def test_a_buffer_that_is_returned_is_needed_whole():
    program = programs(copied, 2, 1)[0]
    (new, other) = program.outputs
    program.gm.graph.output_node().args = ((new, new),)
    assert "is returned" in str(share_rows(program))
    program.gm.graph.output_node().args = ((new, other),)
    assert share_rows(program) is None
