"""One spelling of every view, permutation, slice and join: which, and that nothing else changes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.passes.canonical.views import canonicalize
from mla_compile.passes.ir.graph import operator_name
from mla_compile.passes.report.site import locate
from tests.support.programs import calls, codes, decide, seeded, trace

aten = torch.ops.aten
X = (2, 3, 4, 5)

SPELLINGS = {
    # permutations
    "transpose": (lambda x: x.transpose(-1, 1), "permute(x, [0, 3, 2, 1])"),
    "swapaxes": (lambda x: aten.swapaxes(x, 0, -2), "permute(x, [2, 1, 0, 3])"),
    "swapdims": (lambda x: aten.swapdims(x, 2, 2), "permute(x, [0, 1, 2, 3])"),
    "t": (lambda x: x[0, 0].t(), "permute(x, [1, 0])"),
    "T": (aten.numpy_T, "permute(x, [3, 2, 1, 0])"),
    "mT": (aten.mT, "permute(x, [0, 1, 3, 2])"),
    "mH": (aten.mH, "permute(x, [0, 1, 3, 2])"),
    "H": (lambda x: aten.matrix_H(x[0, 0]), "permute(x, [1, 0])"),
    "adjoint": (aten.adjoint, "permute(x, [0, 1, 3, 2])"),
    "movedim": (lambda x: aten.movedim(x, -1, 1), "permute(x, [0, 3, 1, 2])"),
    "moveaxis": (lambda x: aten.moveaxis(x, [0, 1], [-1, -2]), "permute(x, [2, 3, 1, 0])"),
    "permute": (lambda x: x.permute(0, -1, 1, -2), "permute(x, [0, -1, 1, -2])"),
    # other axes, the same numbers
    "view": (lambda x: x.view(6, -1), "view(x, [6, -1])"),
    "_unsafe_view": (lambda x: aten._unsafe_view(x, [6, 20]), "view(x, [6, 20])"),
    "_reshape_alias": (lambda x: aten._reshape_alias(x, [6, 20], [20, 1]), "view(x, [6, 20])"),
    "view_as": (lambda x: aten.view_as(x, x.new_zeros(6, 20)), "view(x, [6, 20])"),
    "unflatten": (lambda x: aten.unflatten(x, -2, [2, -1]), "view(x, [2, 3, 2, -1, 5])"),
    "reshape": (lambda x: aten.reshape(x, [6, -1]), "reshape(x, [6, -1])"),
    "reshape_as": (lambda x: aten.reshape_as(x.mT, x), "reshape(x, [2, 3, 4, 5])"),
    "flatten": (lambda x: aten.flatten(x.mT, 1, -2), "reshape(x, [2, 15, 4])"),
    "flatten all": (aten.flatten, "reshape(x, [120])"),
    "flatten of a number": (lambda x: aten.flatten(x[0, 0, 0, 0]), "reshape(x, [1])"),
    "unsqueeze": (lambda x: x.unsqueeze(-2), "unsqueeze(x, -2)"),
    "squeeze": (lambda x: x[:1, :, :1].squeeze(), "squeeze(x, [0, 2])"),
    "squeeze one": (lambda x: x[:, :1].squeeze(-3), "squeeze(x, [1])"),
    "squeeze several": (lambda x: x[:1, :, :1].squeeze((0, 1)), "squeeze(x, [0])"),
    "squeeze nothing": (aten.squeeze, "squeeze(x)"),
    # copies of axes
    "expand": (lambda x: x[:1].expand(3, -1, -1, -1), "expand(x, [3, -1, -1, -1])"),
    "expand_as": (lambda x: aten.expand_as(x[:, :1], x.new_zeros(7, 2, 3, 4, 5)), "expand(x, [7, -1, 3, -1, -1])"),
    "broadcast_to": (lambda x: aten.broadcast_to(x, [7, 2, 3, 4, 5]), "expand(x, [7, 2, 3, 4, 5])"),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), "repeat(x, [1, 2, 1, 1])"),
    "tile": (lambda x: aten.tile(x, [2, 1]), "repeat(x, [1, 1, 2, 1])"),
    "repeat_interleave": (
        lambda x: aten.repeat_interleave(x, 2, -2, output_size=8),
        "repeat_interleave(x, 2, -2)",
    ),
    # parts
    "narrow": (lambda x: aten.narrow(x, -1, 1, 3), "slice(x, -1, 1, 4)"),
    "narrow from the end": (lambda x: aten.narrow(x, 1, -2, 1), "slice(x, 1, -2, -1)"),
    "narrow to the end": (lambda x: aten.narrow(x, 1, -2, 2), "slice(x, 1, -2, None)"),
    "slice": (lambda x: aten.slice(x, 1, 0, 2), "slice(x, 1, 0, 2)"),
    "split": (lambda x: aten.split(x, 3, -1)[1], "split_with_sizes(x, [3, 2], -1)"),
    "split at sizes": (lambda x: aten.split(x, [1, 4], -1)[1], "split_with_sizes(x, [1, 4], -1)"),
    "chunk": (lambda x: aten.chunk(x, 2, -1)[1], "split_with_sizes(x, [3, 2], -1)"),
    "tensor_split": (lambda x: aten.tensor_split(x, 3, -1)[1], "split_with_sizes(x, [2, 2, 1], -1)"),
    "tensor_split at": (lambda x: aten.tensor_split(x, [1, 2], 2)[2], "split_with_sizes(x, [1, 1, 2], 2)"),
    "unsafe_split": (lambda x: aten.unsafe_split(x, 3, -1)[0], "split_with_sizes(x, [3, 2], -1)"),
    "unsafe_chunk": (lambda x: aten.unsafe_chunk(x, 2, 0)[0], "split_with_sizes(x, [1, 1], 0)"),
    "unbind": (lambda x: aten.unbind(x, -2)[3], "select(x, -2, 3)"),
    # joins
    "cat": (lambda x: torch.cat([x, x], -1), "cat([x, x], -1)"),
    "concat": (lambda x: aten.concat([x, x], -1), "cat([x, x], -1)"),
    "concatenate": (lambda x: aten.concatenate([x, x]), "cat([x, x], 0)"),
    "hstack": (lambda x: aten.hstack([x, x]), "cat([x, x], 1)"),
    "hstack of vectors": (lambda x: aten.hstack([x[0, 0, 0], x[0, 0, 0]]), "cat([x, x], 0)"),
    "vstack": (lambda x: aten.vstack([x, x]), "cat([x, x], 0)"),
    "row_stack": (lambda x: aten.row_stack([x, x]), "cat([x, x], 0)"),
    "dstack": (lambda x: aten.dstack([x, x]), "cat([x, x], 2)"),
    "column_stack": (lambda x: aten.column_stack([x, x]), "cat([x, x], 1)"),
    "column_stack of vectors": (lambda x: aten.column_stack([x[0, 0, 0]] * 2), "column_stack([x, x])"),
    "stack": (lambda x: torch.stack([x, x], -1), "stack([x, x], -1)"),
}  # fmt: skip


def said(node):
    """A node as text, with ``x`` for whatever tensors it reads."""

    def one(a):
        if isinstance(a, torch.fx.Node):
            return "x"
        return f"[{', '.join(map(one, a))}]" if isinstance(a, (list, tuple)) else str(a)

    return f"{node.target.overloadpacket.__name__}({', '.join(map(one, node.args))})"


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors of dimension other than 2")
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    fn, expected = SPELLINGS[name]
    program = trace(fn, [seeded(*X)], [])
    graph = program.gm.graph
    names = [n.name for n in graph.nodes if n.target is not aten.unbind.int]
    canonicalize(graph)
    assert [n.name for n in graph.nodes] == names
    (result,) = graph.output_node().args[0]
    node = result.args[0] if result.target is operator.getitem else result
    assert said(node) == expected
    graph.lint()
    program.gm.recompile()
    (got,) = program.gm(seeded(*X))
    want = fn(seeded(*X))
    assert torch.equal(got, want)
    assert got.stride() == want.stride()
    value = result.meta["val"]
    assert (value.shape, value.stride(), value.dtype) == (got.shape, got.stride(), got.dtype)
    assert canonicalize(graph) == 0


DYNAMIC = {
    "flatten heads": (lambda x: aten.flatten(x, 2), ["sym_size.int", "sym_size.int", "reshape.default"]),
    "flatten tokens": (lambda x: aten.flatten(x, 0, 1), ["reshape.default"]),
    "unflatten": (lambda x: aten.unflatten(x, -1, [2, 4]), ["sym_size.int", "sym_size.int", "view.default"]),
    "reshape_as": (
        lambda x: aten.reshape_as(aten.flatten(x, 2), x),
        ["sym_size.int", "sym_size.int", "reshape.default", "reshape.default"],
    ),
    "expand_as": (
        lambda x: aten.expand_as(x[:1], x),
        ["slice.Tensor", "sym_size.int", "sym_size.int", "expand.default"],
    ),
    "narrow": (lambda x: aten.narrow(x, 1, 0, x.shape[0]), ["sym_size.int", "slice.Tensor"]),
    "narrow further on": (
        lambda x: aten.narrow(x, 1, 1, x.shape[0]),
        ["sym_size.int", "<built-in function add>", "slice.Tensor"],
    ),
    "narrow from the end": (lambda x: aten.narrow(x, 1, -x.shape[0], x.shape[0]), None),
    "split of tokens": (lambda x: aten.chunk(x, 2, 1)[0], None),
    "split of features": (lambda x: aten.chunk(x, 2, -1)[0], ["split_with_sizes.default"]),
}  # fmt: skip


def symbolic(fn):
    """``fn`` of a batch and tokens of any size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    x = mode.from_tensor(seeded(2, 7, 3, 8), symbolic_context=StatelessSymbolicContext(dims))
    with mode:
        gm = make_fx(fn, pre_dispatch=True)(x)
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    return Program(gm, fake_mode=mode)


@pytest.mark.parametrize("name", DYNAMIC)
def test_symbolic_sizes(name):
    """Sizes are read from the operand; what cannot be written stays as it is."""
    fn, expected = DYNAMIC[name]
    program = symbolic(fn)
    graph = program.gm.graph
    before = str(graph)
    assert (canonicalize(graph) > 0) is (expected is not None)
    assert str(graph) == before if expected is None else calls(program) == expected, calls(program)
    graph.lint()
    program.gm.recompile()
    for sizes in ((2, 7, 3, 8), (3, 9, 3, 8)):
        (got,) = program.gm(seeded(*sizes))
        want = fn(seeded(*sizes))
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
    assert canonicalize(graph) == 0


def test_complex_numbers_are_conjugated():
    program = trace(lambda x: aten.mH(torch.complex(x, x)), [seeded(*X)], [])
    assert canonicalize(program.gm.graph) == 0


def test_the_users_own_spelling_is_reported():
    program = trace(lambda x: aten.unbind(aten.swapaxes(x, 1, 2), 0)[1], [seeded(*X)], [])
    canonicalize(program.gm.graph)
    names = [operator_name(n) for n in program.gm.graph.nodes if n.op == "call_function" and n.users]
    assert names == ["swapaxes", "unbind [1]"]
    (result,) = program.gm.graph.output_node().args[0]
    assert locate(result.args[0]).op == "aten.swapaxes"


def attention(q, x, w):
    """Keys, values and scores moved about by operators that once had one reader each."""
    kv = aten.movedim(aten.unflatten(x @ w, -1, [3, 9]), 2, 1)
    k, v = aten.tensor_split(aten.swapaxes(kv, 1, 3), [4], 1)
    scores = aten.swapaxes(aten.moveaxis(q @ aten.mT(aten.movedim(k, [1, 3], [3, 1])), 1, 0), 0, 1)
    return scores.softmax(-1) @ aten.swapdims(v, 1, 3)


def test_any_spelling_is_understood_by_all():
    _, outcome = decide(attention, [seeded(2, 3, 1, 4), seeded(2, 6, 5)], (5, 27))
    assert codes(outcome) == [Code.ABSORBED]
