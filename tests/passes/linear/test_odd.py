"""The linear-map analysis on what is seldom written: odd spellings of the same, sizes of other inputs as arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.core.program import Program
from tests.passes.linear.test_analysis import B, H, L, N, T, W, check, z
from tests.support.programs import found_reasons, linear_map, seeded, trace

aten = torch.ops.aten


LINEAR = {
    "a slice across factors of the columns": (
        lambda z, w, g: (F.linear(z, w).view(B, T, H, N) * g).flatten(2)[..., 3:9],
        [W(H * N, L), W(H, N)],
    ),
    "a slice of everything": (lambda z, w: aten.slice(F.linear(z, w), -1, 0, 2**63 - 1), [W(6, L)]),
    "a batch norm that was decomposed": (
        lambda z, w, g, b, m, v: aten._native_batch_norm_legit_no_training((z @ w).mT, g, b, m, v, 0.1, 1e-5)[0],
        [W(L, N), W(N), W(N, seed=3), W(N, seed=4), W(N, seed=5).abs()],
    ),
    "heads joined, the first of them in groups of columns": (
        lambda z, a, g, b: torch.cat([((z @ a).view(B, T, 2, 2) * g).flatten(2)[:, None], (z @ b)[:, None]], 1),
        [W(L, 4), W(2, 2), W(L, 4, seed=3)],
    ),
    "a bias along the tokens of a product from the left": (
        lambda z, b, w: torch.addmm(b, w, aten.t(z.reshape(-1, L))),
        [W(B * T), W(6, L)],
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_rule(name):
    fn, weights = LINEAR[name]
    check(fn, [z()], weights)


STOPS = {
    "a kernel from the inputs": ("token_mixing", lambda z, p, w: F.conv1d((z @ w).mT, p), [z(3, 6, 1)], [W(L, 6)]),
    "a diagonal": ("token_mixing", lambda z, w: torch.einsum("btt->bt", w @ z.mT), [], [W(T, L)]),
    "an einsum that only sums": ("token_mixing", lambda z, w: torch.einsum("btn->bt", z @ w), [], [W(L, 6)]),
    "tensordot of two activations": (
        "unsupported_op",
        lambda z, p, w: aten.tensordot(z @ w, p, [2], [1]),
        [z(3, 6)],
        [W(L, 6)],
    ),
    "a batch norm by the numbers of the batch": (
        "unsupported_op",
        lambda z, w: F.batch_norm((z @ w).mT, None, None, training=True),
        [],
        [W(L, 6)],
    ),
    "a batch norm by numbers from the inputs": (
        "unsupported_op",
        lambda z, p, w: F.batch_norm((z @ w).mT, p, p.abs()),
        [z(6)],
        [W(L, 6)],
    ),
    "a batch norm of the tokens": (
        "position_dependent",
        lambda z, w, m: F.batch_norm(z @ w, m, m.abs()),
        [],
        [W(L, 6), W(T)],
    ),
    "columns of numbers joined": (
        "unsupported_op",
        lambda z, w: torch.cat([z @ w, torch.full((B, T, 2), 0.5, dtype=z.dtype)], -1),
        [],
        [W(L, 6)],
    ),
    "a weight copied over columns": (
        "unsupported_op",
        lambda z, w, b: aten.copy(z @ w, b.expand(B, T, 6)),
        [],
        [W(L, 6), W(6)],
    ),
    "a slice across a bias that heads share": (
        "unsupported_op",
        lambda z, w, b: (F.linear(z, w).view(B, T, H, N) + b).flatten(2)[..., 3:9],
        [],
        [W(H * N, L), W(N)],
    ),
    "rows repeated by a tensor": (
        "unsupported_op",
        lambda z, w: torch.repeat_interleave(z @ w, torch.tensor([1, 1, 2, 1, 1]), 1, output_size=6),
        [],
        [W(L, 6)],
    ),
    "columns written over heads of other sources": (
        "unsupported_op",
        lambda z, p, w, u: aten.slice_scatter(torch.cat([z[:, None] @ w, p[:, None] @ w], 1), z[:, None] @ u, -1, 0, 2),
        [z(B, T, L, seed=5)],
        [W(H, L, N), W(2 * H, L, 2)],
    ),
    "heads of other sources written over columns": (
        "unsupported_op",
        lambda z, p, w, u: aten.slice_scatter(z[:, None] @ u, torch.cat([z[:, None] @ w, p[:, None] @ w], 1), -1, 0, N),
        [z(B, T, L, seed=5)],
        [W(H, L, N), W(2 * H, L, 6)],
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop(name):
    code, fn, more, weights = STOPS[name]
    lmap = linear_map(trace(fn, [z(), *more], weights))
    assert list(found_reasons.values())[-1] == code
    assert not any(p.source is not None and p.source.op == "placeholder" and p.weight is not None for p in lmap.pieces)


def symbolic(fn, inputs, weights):
    """``fn`` traced with inputs of any size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    free = [
        mode.from_tensor(x, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.dim())) for x in inputs
    ]
    with mode:
        gm = make_fx(fn, pre_dispatch=True)(*free, *(mode.from_tensor(w, static_shapes=True) for w in weights))
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")][len(inputs) :]
    return Program(gm, weights=dict(zip(names, weights, strict=True)), fake_mode=mode)


SYMBOLIC_STOPS = {
    "columns up to a size": ("unsupported_op", lambda z, p, w: (z @ w)[..., : p.shape[0]]),
    "columns narrowed to a size": ("unsupported_op", lambda z, p, w: aten.narrow(z @ w, -1, 0, p.shape[0])),
    "the column of a size": ("unsupported_op", lambda z, p, w: (z @ w).select(-1, p.shape[0])),
    "as many copies as a size": ("unsupported_op", lambda z, p, w: (z @ w).repeat(1, 1, p.shape[0])),
    "parts of a size": (
        "unsupported_op",
        lambda z, p, w: aten.split_with_sizes(z @ w, [p.shape[0], 6 - p.shape[0]], -1)[0],
    ),
    "tokens last, joined": ("token_mixing", lambda z, p, w: torch.cat([w.mT @ z.mT, w.mT @ z.mT * 2], -1)),
    "a size added": ("position_dependent", lambda z, p, w: z @ w + p.shape[0]),
    "a factor for each token": ("position_dependent", lambda z, p, w: (z @ w) * torch.arange(z.shape[1])[:, None]),
}


@pytest.mark.parametrize("name", SYMBOLIC_STOPS)
def test_sizes_as_arguments(name):
    code, fn = SYMBOLIC_STOPS[name]
    lmap = linear_map(symbolic(fn, [z(), seeded(3)], [W(L, 6)]))
    assert list(found_reasons.values())[-1] == code
    assert all(p.source.op != "placeholder" for p in lmap.pieces)


def test_copies_of_a_symbolic_number_are_reshaped():
    """Broadcast, no weight has a part in them."""

    def fn(z, p, w):
        wide = (z @ w)[:, None].expand(-1, 2 * p.shape[0], -1, -1)
        return wide.reshape(z.shape[0], p.shape[0], 2, z.shape[1], 6)

    lmap = linear_map(symbolic(fn, [z(), seeded(3)], [W(L, 6)]))
    assert found_reasons == {}
    assert [p.source.name for p in lmap.pieces] == ["z_1"]


def test_a_weight_whose_size_is_known_at_run_time_only():
    """Pruned by a mask."""
    keep = torch.tensor([True, False, True, True])
    linear_map(symbolic(lambda z, w, keep: F.linear(z, w[keep]), [z()], [W(4, L), keep]))
    assert list(found_reasons.values()) == ["unsupported_weight"]
