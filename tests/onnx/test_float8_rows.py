"""Rows in float8 are multiplied by their scales in front of the attention, which then reads other floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_compile.onnx.float8_rows import unpack_rows
from tests.support.programs import seeded, trace

B, T, H, L = 2, 7, 3, 8


@pytest.mark.parametrize("scales", [(), (B, T), (B, T, 1), (B, T, 4)])
def test_a_scale_is_one_of_all_rows_of_each_row_or_of_its_groups(scales: tuple[int, ...]) -> None:
    def attend(query: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        return torch.ops.mla_compile.decode_attention(query, rows, kv_scale=scales, scale=0.3)[0]

    query, rows = seeded(B, 1, H, L, dtype=torch.float32), seeded(B, T, L).to(torch.float8_e4m3fn)
    given = query, rows, torch.linspace(0.5, 1.5, math.prod(scales)).view(scales)
    program = trace(attend, given, [])
    (want,) = program.gm(*given)
    unpack_rows(program.gm.graph, program.fake_mode)
    program.gm.recompile()
    (node,) = program.gm.graph.find_nodes(op="call_function", target=torch.ops.mla_compile.decode_attention.default)
    assert "kv_scale" not in node.kwargs
    assert [x.meta["val"].dtype for x in node.args] == [torch.float32] * 2
    torch.testing.assert_close(program.gm(*given)[0], want, rtol=1e-5, atol=1e-6)
