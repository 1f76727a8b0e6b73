"""What each operator is said to do with the numbers it reads."""

from __future__ import annotations

import pytest
import torch

from mla_compile.passes.canonical.views import canonicalize
from mla_compile.passes.ir.moves import (
    Assign,
    Copy,
    Dropout,
    Expand,
    Fill,
    Join,
    Permute,
    Regroup,
    Reorder,
    Repeat,
    Select,
    Slice,
    Stack,
    Write,
    WriteOne,
    WriteRows,
)
from mla_compile.passes.ir.operators import decode
from tests.support.programs import seeded, trace

aten = torch.ops.aten
X, Y = seeded(2, 3, 4, 5), seeded(2, 3, 4, 5, seed=1)

READ = {
    "clone": (lambda x, y, at: x.clone(), lambda x, y, at: Copy(x)),
    "cast": (lambda x, y, at: x.float(), lambda x, y, at: Copy(x)),
    "dropout": (lambda x, y, at: aten.dropout(x, 0.3, False), lambda x, y, at: Dropout(x, active=False)),
    "dropout of nothing": (lambda x, y, at: aten.dropout(x, 0.0, True), lambda x, y, at: Dropout(x, active=False)),
    "active dropout": (lambda x, y, at: aten.dropout(x, 0.3, True), lambda x, y, at: Dropout(x, active=True)),
    "native dropout": (lambda x, y, at: aten.native_dropout(x, 0.3, None)[0], lambda x, y, at: Dropout(x, active=True)),
    "mask of a dropout": (lambda x, y, at: aten.native_dropout(x, 0.3, True)[1], lambda x, y, at: None),
    "view": (lambda x, y, at: x.view(6, -1), lambda x, y, at: Regroup(x, None, [6, -1])),
    "unsqueeze": (lambda x, y, at: x.unsqueeze(1), lambda x, y, at: Regroup(x, None)),
    "bytes": (lambda x, y, at: x.view(torch.int64), lambda x, y, at: None),
    "permute": (lambda x, y, at: x.mT, lambda x, y, at: Permute(x, None)),
    "unfold": (lambda x, y, at: x.unfold(-2, 2, 2), lambda x, y, at: Reorder(x, None)),
    "unfold that overlaps": (lambda x, y, at: x.unfold(-2, 2, 1), lambda x, y, at: None),
    "unfold with a remainder": (lambda x, y, at: x.unfold(-1, 2, 2), lambda x, y, at: None),
    "expand": (lambda x, y, at: x.expand(7, -1, -1, -1, -1), lambda x, y, at: Expand(x, None, [7, -1, -1, -1, -1])),
    "tile": (lambda x, y, at: x.tile(2, 1), lambda x, y, at: Repeat(x, None)),
    "interleaved": (lambda x, y, at: x.repeat_interleave(2, -1), lambda x, y, at: Repeat(x, None)),
    "interleaved all": (lambda x, y, at: x.repeat_interleave(2), lambda x, y, at: None),
    "slice": (
        lambda x, y, at: aten.slice(x, -1, -3, 2**63 - 1, 2),
        lambda x, y, at: Slice(x, 3, (-3, 2**63 - 1, 2), range(2, 5, 2)),
    ),
    "slice by default": (lambda x, y, at: aten.slice(x), lambda x, y, at: Slice(x, 0, (None, None, 1), range(2))),
    "narrow": (lambda x, y, at: x.narrow(-1, 1, 2), lambda x, y, at: Slice(x, 3, (1, 3, 1), range(1, 3))),
    "split": (lambda x, y, at: x.split([2, 3], -1)[1], lambda x, y, at: Slice(x, 3, (2, 5, 1), range(2, 5))),
    "select": (lambda x, y, at: x.select(-2, -1), lambda x, y, at: Select(x, 2, 3)),
    "unbind": (lambda x, y, at: x.unbind(1)[2], lambda x, y, at: Select(x, 1, 2)),
    "cat": (lambda x, y, at: torch.cat([x, y], -1), lambda x, y, at: Join((x, y), 3)),
    "cat with nothing": (lambda x, y, at: torch.cat([x.new_empty(0), x]), lambda x, y, at: Join((x,), 0)),
    "stack": (lambda x, y, at: torch.stack([x, y], -1), lambda x, y, at: Stack((x, y), 4)),
    "copy": (lambda x, y, at: aten.copy(x, y), lambda x, y, at: Assign(x, y)),
    "slice_scatter": (
        lambda x, y, at: aten.slice_scatter(x, y.narrow(1, 0, 2), 1, 1),
        lambda x, y, at: Write(x, y, 1, (1, None, 1), range(1, 3)),
    ),
    "select_scatter": (lambda x, y, at: aten.select_scatter(x, y[0], 0, -1), lambda x, y, at: WriteOne(x, y, 0, 1)),
    "index_copy": (lambda x, y, at: aten.index_copy(x, -2, at, y[:, :, :2]), lambda x, y, at: WriteRows(x, y, 2, at)),
    "index_put": (lambda x, y, at: aten.index_put(x, [None, at], y[:, :2]), lambda x, y, at: WriteRows(x, y, 1, at)),
    "index_put by two": (lambda x, y, at: aten.index_put(x, [at // 2, at], y[:, 0]), lambda x, y, at: None),
    "index_put that adds": (lambda x, y, at: aten.index_put(x, [None, at], y[:, :2], True), lambda x, y, at: None),
    "index_put by a mask": (lambda x, y, at: aten.index_put(x, [x > 0], y.new_zeros(())), lambda x, y, at: None),
    "empty": (lambda x, y, at: aten.empty_like(x), lambda x, y, at: Fill(None)),
    "zeros": (lambda x, y, at: x.new_zeros(2), lambda x, y, at: Fill(0)),
    "full": (lambda x, y, at: aten.full([2], 3.0), lambda x, y, at: Fill(3.0)),
    "full_like": (lambda x, y, at: aten.full_like(x, 3.0), lambda x, y, at: Fill(3.0)),
    "new_full": (lambda x, y, at: x.new_full((2,), 3.0), lambda x, y, at: Fill(3.0)),
    "scalar_tensor": (lambda x, y, at: aten.scalar_tensor(3.0), lambda x, y, at: Fill(3.0)),
    "a product": (lambda x, y, at: x * y, lambda x, y, at: None),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_record(name):
    fn, expected = READ[name]
    graph = trace(fn, [X, Y, torch.tensor([2, 0])], []).gm.graph
    canonicalize(graph)
    x, y, at = graph.find_nodes(op="placeholder")
    (result,) = graph.output_node().args[0]
    found, wanted = decode(result), expected(x, y, at)
    assert type(found) is type(wanted)
    for field in {*vars(wanted)} - {"index"} if wanted is not None else ():  # its map: test_index_map.py
        got, want = getattr(found, field), getattr(wanted, field)
        if isinstance(want, torch.fx.Node) and got is not want:  # a part of it
            got = decode(got).x
        assert got == want
    assert decode(x) is None
    assert decode(None) is None
