"""The linear-map analysis against the numbers: every rule, chains of rules, and what must end the walk."""

from __future__ import annotations

import functools
import math
import operator
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.core.program import Program
from mla_compile.passes.ir.graph import packet
from mla_compile.passes.ir.moves import Dropout
from mla_compile.passes.ir.operators import CONTRACTIONS, decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.linear.rules import MOVES, RULES
from mla_compile.passes.linear.stops import unexplained
from tests.support.programs import canonical, error, evaluate, found_reasons, linear_map, seeded, trace
from tests.support.tiers import also

aten = torch.ops.aten
B, T, L, H, N = 2, 5, 8, 3, 4


def check(fn, inputs, weights, *, sources=1, projected=True, program=None):
    """The map of ``fn`` reaches the inputs and nothing else, and evaluates to what ``fn`` returns."""
    program = program or trace(fn, inputs, weights)
    lmap = linear_map(program)
    # Tensors of which not all heads are written yet have no map, and need none.
    assert {name for name in found_reasons if not name.startswith("select_scatter")} == set()
    found = {p.source.name for p in lmap.pieces if p.source is not None}
    names = [n.name for n in program.gm.graph.find_nodes(op="placeholder")][: len(inputs)]
    assert found <= set(names)
    assert len(found) == sources
    assert any(p.weight is not None for p in lmap.pieces) is projected
    with torch.no_grad():
        expected = fn(*inputs, *weights)
    assert error(evaluate(program, lmap, *inputs, *weights), expected.double()) < 1e-12
    return lmap


def z(*shape, seed=1):
    return seeded(*(shape or (B, T, L)), seed=seed)


def W(*shape, seed=2):
    return seeded(*shape, seed=seed)


def _written_heads(k, dim, heads):
    for at, x in heads.items():
        k = aten.select_scatter(k, x, dim, at)
    return k


def _written_parts(k, heads, rest):
    """As ``k[:, h, :, :n] = head`` and ``k[:, h, :, n:] = rest`` are, once they are functional."""
    for h, x in enumerate(heads):
        for part, start, stop in ((x, 0, x.shape[-1]), (rest, x.shape[-1], k.shape[-1])):
            k = aten.select_scatter(k, aten.slice_scatter(k.select(1, h), part, 2, start, stop), 1, h)
    return k


LINEAR = {
    # contractions
    "linear": (F.linear, [W(12, L)]),
    "linear with bias": (F.linear, [W(12, L), W(12)]),
    "inner": (torch.inner, [W(12, L)]),
    "matmul": (lambda z, w: z @ w, [W(L, 12)]),
    "matmul, weight on the left": (lambda z, w: w @ z.transpose(1, 2), [W(12, L)]),
    "matmul per head": (lambda z, w: z.unsqueeze(1) @ w, [W(H, L, N)]),
    "matmul per head, batch axis of size 1": (lambda z, w: z[:, None] @ w[None], [W(H, L, N)]),
    "mm": (lambda z, w: torch.mm(z.view(-1, L), w), [W(L, 12)]),
    "bmm": (lambda z, w: torch.bmm(z.reshape(1, -1, L).expand(H, -1, -1), w), [W(H, L, N)]),
    "addmm": (lambda z, b, w: torch.addmm(b, z.view(-1, L), w), [W(12), W(L, 12)]),
    "einsum": (lambda z, w: torch.einsum("btl,hnl->bhtn", z, w), [W(H, N, L)]),
    "einsum, weight first": (lambda z, w: torch.einsum("hnl,btl->bthn", w, z), [W(H, N, L)]),
    "einsum, no arrow": (lambda z, w: torch.einsum("btl,ln", z, w), [W(L, N)]),
    "einsum, ellipsis": (lambda z, w: torch.einsum("...l,lhn->...hn", z, w), [W(L, H, N)]),
    "einsum, one operand": (lambda z, w: torch.einsum("btn->nbt", z @ w), [W(L, N)]),
    "einsum, one operand with ellipsis": (lambda z, w: torch.einsum("...tn->...nt", z @ w), [W(L, N)]),
    "einsum, elementwise": (lambda z, w, s: torch.einsum("btn,n->btn", z @ w, s), [W(L, N), W(N)]),
    "einsum, size-1 label broadcasts": (lambda z, w: torch.einsum("btl,hln->bhtn", z, w), [W(1, L, N)]),
    "two projections in a row": (lambda z, a, b: z @ a @ b, [W(L, 6), W(6, 12)]),
    "a sum of maps that see the rows as groups and as a whole": (
        lambda z, w, u: F.linear(z, w) - torch.einsum("btij,ijo->bto", z.view(B, T, 2, 4), u),
        [W(6, L), W(2, 4, 6)],
    ),
    "a sum of columns from two weights and one map": (
        lambda z, w, u, v: torch.cat([z @ w, z @ u], -1) + z @ v,
        [W(L, 6), W(L, 4), W(L, 10)],
    ),
    "a sum of maps that see heads and columns": (
        lambda z, w, u: (F.linear(z, w).view(B, T, 2, 3) * 0.5).flatten(2) + F.linear(z, u),
        [W(6, L), W(6, L, seed=3)],
    ),
    "projection of one factor": (lambda z, a, b: (z @ a).view(B, T, H, N) @ b, [W(L, H * N), W(N, 6)]),
    "projection of both factors": (
        lambda z, a, b: torch.einsum("bthn,hnk->btk", (z @ a).view(B, T, H, N), b),
        [W(L, H * N), W(H, N, 6)],
    ),
    "projection with a bias before": (lambda z, a, c, b: F.linear(F.linear(z, a, c), b), [W(12, L), W(12), W(6, 12)]),
    "conv1d": (lambda z, w, b: F.conv1d(z.mT, w, b), [W(12, L, 1), W(12)]),
    "conv2d": (lambda z, w: F.conv2d(z.mT.view(B, L, T, 1), w), [W(12, L, 1, 1)]),
    "conv of one place, dilated": (lambda z, w: F.conv1d(z.mT, w, dilation=2), [W(12, L, 1)]),
    # heads projected one by one
    "heads stacked": (lambda z, a, b: torch.stack([z @ a, z @ b], 1), [W(L, N), W(L, N, seed=3)]),
    "heads stacked, bias and scale": (
        lambda z, a, b, c: torch.stack([z @ a * 0.5, F.linear(z, b, c)], -1),
        [W(L, N), W(N, L), W(N)],
    ),
    "heads unsqueezed and joined": (
        lambda z, a, b: torch.cat([(z @ a)[:, None], (z @ b)[:, None]], 1),
        [W(L, N), W(L, N, seed=3)],
    ),
    "heads beside the rows, stacked": (
        lambda z, a, b: torch.stack([torch.cat([z @ a, z], -1), torch.cat([z @ b, z], -1)], 1),
        [W(L, N), W(L, N, seed=3)],
    ),
    "heads beside zeros, joined": (
        lambda z, a, b: torch.cat([F.pad(z @ a, (0, 3))[:, None], F.pad(z @ b, (0, 3))[:, None]], 1),
        [W(L, N), W(L, N, seed=3)],
    ),
    "heads written one by one": (
        lambda z, a, b: _written_heads(z.new_zeros(B, 2, T, N), 1, {1: z @ a, 0: z @ b}),
        [W(L, N), W(L, N, seed=3)],
    ),
    "heads written last but one, over others": (
        lambda z, a, b: _written_heads(
            _written_heads(z.new_zeros(B, T, 2, N), 2, {0: z @ a, 1: z @ a}), -2, {0: z @ b, -1: z @ b}
        ),
        [W(L, N), W(L, N, seed=3)],
    ),
    "parts of heads written one by one": (
        lambda z, a, b: _written_parts(z.new_empty(B, 2, T, N + L), [z @ a, z @ b], z),
        [W(L, N), W(L, N, seed=3)],
    ),
    "a head written and read": (
        lambda z, a, b: _written_heads(z.new_zeros(B, 3, T, N), 1, {2: z @ a, 0: z @ b}).select(1, 2),
        [W(L, N), W(L, N, seed=3)],
    ),
    "heads joined, then viewed": (
        lambda z, a, b, c: torch.cat([z @ a, F.linear(z, b, c)], -1).view(B, T, 2, N).transpose(1, 2),
        [W(L, N), W(N, L), W(N)],
    ),
    "heads joined, then parts": (
        lambda z, a, b: torch.cat([z @ a, z @ b], -1).view(B, T, 2, N)[..., 1:3],
        [W(L, N), W(L, N, seed=3)],
    ),
    "joined columns projected": (lambda z, a, b, c: torch.cat([z @ a, z @ b], -1) @ c, [W(L, 3), W(L, N), W(3 + N, 5)]),
    "joined columns in strides": (lambda z, a, b: torch.cat([z @ a, z @ b], -1)[..., 1::2], [W(L, 3), W(L, N)]),
    "joined columns repeated": (lambda z, a, b: torch.cat([z @ a, z @ b], -1).repeat(1, 1, 2), [W(L, 3), W(L, N)]),
    "joined along two axes": (
        lambda z, a, b: torch.cat([torch.stack([z @ a, z @ b], 1), torch.stack([z @ b, z @ a], 1)], -1),
        [W(L, N), W(L, N, seed=3)],
    ),
    # axes
    "view, transpose, split": (
        lambda z, w: F.linear(z, w).view(B, T, H, N + 2).transpose(1, 2).split([N, 2], -1)[1],
        [W(H * (N + 2), L)],
    ),
    "split by size": (lambda z, w: F.linear(z, w).split(5, -1)[2], [W(12, L)]),
    "chunk": (lambda z, w: F.linear(z, w).chunk(3, -1)[1], [W(12, L)]),
    "chunk, aten": (lambda z, w: aten.chunk(F.linear(z, w), 3, -1)[1], [W(12, L)]),
    "tensor_split": (lambda z, w: F.linear(z, w).tensor_split(5, -1)[0], [W(12, L)]),
    "unsafe_split": (lambda z, w: aten.unsafe_split(F.linear(z, w), 5, -1)[1], [W(12, L)]),
    "unbind": (lambda z, w: F.linear(z, w).view(B, T, 2, 6).unbind(2)[1], [W(12, L)]),
    "split into one part": (lambda z, w: F.linear(z, w).split(12, -1)[0], [W(12, L)]),
    "select": (lambda z, w: F.linear(z, w).view(B, T, 2, 6)[:, :, -1], [W(12, L)]),
    "narrow": (lambda z, w: aten.narrow(F.linear(z, w), -1, 3, 6), [W(12, L)]),
    "narrow from the end": (lambda z, w: aten.narrow(F.linear(z, w), -1, -4, 4), [W(12, L)]),
    "slice": (lambda z, w: F.linear(z, w)[..., 3:-2], [W(12, L)]),
    "strided slice": (lambda z, w: F.linear(z, w)[..., 1::3], [W(12, L)]),
    "slice to one column": (lambda z, w: F.linear(z, w)[..., 3:4], [W(12, L)]),
    "slice of heads": (lambda z, w: F.linear(z, w).view(B, T, H, N)[:, :, 1:], [W(H * N, L)]),
    "slice across heads and features": (lambda z, w, b: F.linear(z, w.flatten(0, 1), b)[..., 3:9], [W(H, N, L), W(12)]),
    "slice of a slice": (lambda z, w: F.linear(z, w)[..., 2:11][..., ::2], [W(12, L)]),
    "reshape that merges": (lambda z, w: F.linear(z, w).view(B, T, H, N).reshape(B, T, -1), [W(12, L)]),
    "reshape that merges tokens": (lambda z, w: F.linear(z, w).reshape(B * T, 12), [W(12, L)]),
    "reshape of another order": (
        lambda z, w: F.linear(z, w).view(B, T, H, N).permute(0, 2, 1, 3).reshape(B * H, T, N),
        [W(12, L)],
    ),
    "unflatten": (lambda z, w: aten.unflatten(F.linear(z, w), -1, [H, N]), [W(12, L)]),
    "flatten": (lambda z, w: aten.flatten(z.unsqueeze(1) @ w, 0, 1), [W(H, L, N)]),
    "view_as": (lambda z, w: aten.view_as(F.linear(z, w), z.new_empty(B, T, H, N)), [W(12, L)]),
    "reshape_as": (lambda z, w: aten.reshape_as(F.linear(z, w), z.new_empty(B * T, 12)), [W(12, L)]),
    "unsqueeze, squeeze": (lambda z, w: F.linear(z, w)[:, None].squeeze(1).unsqueeze(-1).squeeze(), [W(12, L)]),
    "t": (lambda z, w: (z.view(-1, L) @ w).t(), [W(L, 6)]),
    "T": (lambda z, w: aten.numpy_T(z.view(-1, L) @ w), [W(L, 6)]),
    "mT": (lambda z, w: aten.mT(z @ w), [W(L, 6)]),
    "swapaxes": (lambda z, w: aten.swapaxes(z @ w, 0, -1), [W(L, 6)]),
    "movedim": (lambda z, w: aten.movedim((z @ w).view(B, T, 2, 3), [3, 0], [0, 2]), [W(L, 6)]),
    "moveaxis": (lambda z, w: aten.moveaxis((z @ w).view(B, T, 2, 3), 1, -2), [W(L, 6)]),
    "tensordot": (lambda z, w: aten.tensordot(z, w, [2], [1]), [W(4, L, 3)]),
    "tensordot of the weight": (lambda z, w: aten.tensordot(w, z, [1], [2]), [W(4, L, 3)]),
    "batch norm of features": (
        lambda z, w, m, v, g, b: F.batch_norm((z @ w).mT, m, v.square(), g, b, False, 0.1, 0.3),
        [W(L, 6), W(6), W(6), W(6), W(6)],
    ),
    "unfold into heads": (lambda z, w: F.linear(z, w).unfold(-1, N, N).transpose(1, 2), [W(H * N, L)]),
    "expand of a new axis": (lambda z, w: (z @ w)[:, None].expand(B, H, T, 6), [W(L, 6)]),
    "expand with -1": (lambda z, w: (z @ w)[:, :, None].expand(-1, -1, H, -1), [W(L, 6)]),
    "expand of leading axes": (lambda z, w: (z @ w).expand(4, B, T, 6), [W(L, 6)]),
    "expand_as": (lambda z, w: aten.expand_as((z @ w)[:, None], z.new_empty(B, H, T, 6)), [W(L, 6)]),
    "repeat": (lambda z, w: (z @ w)[:, None].repeat(1, H, 1, 1), [W(L, 6)]),
    "repeat along features": (lambda z, w: (z @ w).repeat(1, 1, 3), [W(L, 4)]),
    "repeat of leading axes": (lambda z, w: (z @ w).repeat(3, 1, 1, 1), [W(L, 4)]),
    "tile": (lambda z, w: (z @ w)[:, None].tile(1, H, 1, 1), [W(L, 6)]),
    "tile of the last axis": (lambda z, w: (z @ w).tile(3), [W(L, 4)]),
    "repeat_interleave": (lambda z, w: (z @ w).view(B, T, 2, 3).repeat_interleave(2, dim=2), [W(L, 6)]),
    "repeat, a bias for each copy, projection": (
        lambda z, b, w: F.linear(z.repeat(1, 1, 2) + b, w),
        [W(2 * L), W(6, 2 * L)],
    ),
    "repeat then view": (lambda z, w: (z @ w).repeat(1, 1, 3).view(B, T, 3, 4).transpose(1, 2), [W(L, 4)]),
    # values
    "clone, contiguous": (lambda z, w: (z @ w).transpose(0, 1).contiguous().clone(), [W(L, 6)]),
    "detach, alias": (lambda z, w: aten.alias(aten.detach(z @ w)), [W(L, 6)]),
    "type_as": (lambda z, w: aten.type_as(z @ w, z), [W(L, 6)]),
    "cast there and back": (lambda z, w: (z @ w).to(torch.float64).double(), [W(L, 6)]),
    "inactive dropout": (lambda z, w: F.dropout(z @ w, 0.3, training=False), [W(L, 6)]),
    "dropout of 0": (lambda z, w: F.dropout(z @ w, 0.0, training=True), [W(L, 6)]),
    "neg": (lambda z, w: -F.linear(z, w), [W(6, L)]),
    "neg with bias": (lambda z, w, b: -F.linear(z, w, b), [W(6, L), W(6)]),
    "mul by a number": (lambda z, w, b: 1.7 * F.linear(z, w, b), [W(6, L), W(6)]),
    "div by a number": (lambda z, w, b: F.linear(z, w, b) / 3, [W(6, L), W(6)]),
    "mul before": (lambda z, w: F.linear(z * 0.3, w), [W(6, L)]),
    "mul by a weight vector": (lambda z, w, g, b: F.linear(z, w, b) * g, [W(6, L), W(6), W(6)]),
    "weight vector first": (lambda z, w, g: g * F.linear(z, w), [W(6, L), W(6)]),
    "mul by a vector of the source": (lambda z, g, w: F.linear(z * g, w), [W(L), W(6, L)]),
    "mul by a factor per head": (lambda z, w, g: F.linear(z, w).view(B, T, H, N) * g, [W(12, L), W(H, 1)]),
    "mul by a 0-d weight": (lambda z, w, g: F.linear(z, w) * g, [W(6, L), torch.tensor(0.3, dtype=torch.float64)]),
    "div by a weight vector": (lambda z, w, g: F.linear(z, w) / g, [W(6, L), W(6)]),
    "outer product with a factor per head": (lambda z, w, g: (z @ w)[:, :, None] * g[:, None], [W(L, 6), W(H)]),
    "add a bias": (lambda z, w, b: F.linear(z, w) + b, [W(6, L), W(6)]),
    "bias first": (lambda z, w, b: b + F.linear(z, w), [W(6, L), W(6)]),
    "sub a bias": (lambda z, w, b: F.linear(z, w) - b, [W(6, L), W(6)]),
    "add a bias with alpha": (lambda z, w, b: torch.add(F.linear(z, w), b, alpha=-0.4), [W(6, L), W(6)]),
    "add a bias per head": (lambda z, w, b: F.linear(z, w).view(B, T, H, N) + b, [W(12, L), W(H, N)]),
    "add to a broadcast axis": (lambda z, w, b: (z @ w)[:, :, None] + b, [W(L, N), W(1, N)]),
    "add one column's bias": (lambda z, w, b: (z @ w)[..., :1].expand(B, T, N) + b, [W(L, N), W(N)]),
    "lora": (lambda z, w, a, b: F.linear(z, w) + 0.5 * F.linear(F.linear(z, a), b), [W(12, L), W(2, L), W(12, 2)]),
    "lora with alpha": (lambda z, w, a, b: torch.add(z @ w, z @ a @ b, alpha=2), [W(L, 6), W(L, 2), W(2, 6)]),
    "difference of two maps": (lambda z, w, a, c: 2 * F.linear(z, w, c) - 3 * (z @ a), [W(6, L), W(L, 6), W(6)]),
    "sum after the head view": (
        lambda z, w, a: F.linear(z, w).view(B, T, H, N) + F.linear(z, a).view(B, T, H, N),
        [W(12, L), W(12, L)],
    ),
    "lora merged": (lambda z, w, a, b: F.linear(z, w + 0.5 * (b @ a)), [W(12, L), W(2, L), W(12, 2)]),
    "dequantized": (
        lambda z, w, s: F.linear(z, w.to(torch.float64) * s[:, None]),
        [torch.arange(96, dtype=torch.int8).view(12, L) - 40, W(12)],
    ),
    "pad": (lambda z, w: F.pad(z @ w, (2, 3)), [W(L, 6)]),
    "pad, constant_pad_nd": (lambda z, w: aten.constant_pad_nd(z @ w, [0, 3], 0.0), [W(L, 6)]),
    "pad then slice": (lambda z, w: F.pad(z @ w, (2, 3))[..., 3:7], [W(L, 6)]),
    "pad then scale": (lambda z, w, g: F.pad(z @ w, (0, 2)) * g, [W(L, 6), W(8)]),
    "cat of two projections": (lambda z, a, b: torch.cat([z @ a, z @ b], -1), [W(L, 6), W(L, 4)]),
    "concat of heads": (
        lambda z, a, b: torch.concat([z[:, None] @ a, z[:, None] @ b], 1),
        [W(2, L, N), W(3, L, N)],
    ),
    "cat with zeros": (lambda z, a: torch.cat([z.new_zeros(B, T, 2), z @ a], -1), [W(L, 6)]),
    "cat of one": (lambda z, a: torch.cat([z @ a], -1), [W(L, 6)]),
    "cat then slice across": (lambda z, a, b: torch.cat([z @ a, z @ b], -1)[..., 3:8], [W(L, 6), W(L, 4)]),
    "cat then bias and scale": (
        lambda z, a, b, g, c: torch.cat([z @ a, z @ b], -1) * g + c,
        [W(L, 6), W(L, 4), W(10), W(10)],
    ),
    "cat then view": (
        lambda z, a, b: torch.cat([z[:, None] @ a, z[:, None] @ b], -1).reshape(B * H, T, 7),
        [W(H, L, 3), W(H, L, 4)],
    ),
    "cat then transpose and select": (
        lambda z, a, b: torch.cat([z[:, None] @ a, z[:, None] @ b], -1).transpose(1, 3)[:, :, :, 1],
        [W(H, L, 3), W(H, L, 4)],
    ),
    "cat then expand": (
        lambda z, a, b: torch.cat([z @ a, z @ b], -1)[:, None].expand(B, H, T, 10),
        [W(L, 6), W(L, 4)],
    ),
    "cat then project the heads": (
        lambda z, a, b, m: torch.einsum("bhtn,hg->bgtn", torch.cat([z[:, None] @ a, z[:, None] @ b], -1), m),
        [W(H, L, 3), W(H, L, 4), W(H, 2)],
    ),
    "copies into slices": (
        lambda z, a, b: aten.slice_scatter(
            aten.slice_scatter(z.new_empty(B, T, 10), z @ a, -1, 0, 6), z @ b, -1, 6, 10
        ),
        [W(L, 6), W(L, 4)],
    ),
    "copy broadcasts": (
        lambda z, a: aten.slice_scatter(
            z.new_zeros(B, H, T, 9), aten.copy(z.new_empty(B, H, T, 4), (z @ a)[:, None]), -1, 5, 9
        ),
        [W(L, 4)],
    ),
    "a slice overwritten in the middle": (
        lambda z, a, b: aten.slice_scatter(z @ a, z @ b, -1, 2, 5),
        [W(L, 8), W(L, 3)],
    ),
    "everything overwritten": (lambda z, a: aten.slice_scatter(z.new_empty(B, T, 6), z @ a, -1, 0, 6), [W(L, 6)]),
    "nothing overwritten": (lambda z, a, b: aten.slice_scatter(z @ a, z @ b[:, :0], -1, 3, 3), [W(L, 6), W(L, 4)]),
}


@functools.cache
def traced(name):
    """The program of a rule, of which both tests here make the canonical one."""
    fn, weights = LINEAR[name]
    return trace(fn, [z()], weights)


@pytest.mark.parametrize("name", LINEAR)
def test_rule(name):
    fn, weights = LINEAR[name]
    check(fn, [z()], weights, program=traced(name))


def test_every_rule_is_tested():
    used = set()
    for name in LINEAR:
        for node in canonical(traced(name)).nodes:
            how = decode(node)
            used.update([packet(node)] if how is None else type(how).__mro__)
    # Names that never reach a functional graph, and what ends a walk or is only captured from modules.
    others = {aten.multiply, aten.true_divide, aten.baddbmm, aten.view, operator.getitem, Dropout}
    others |= {aten.index, aten.index_select}  # explained; tokens that they pick are read as sources
    assert {str(op) for op in {*RULES, *MOVES, *CONTRACTIONS} - used - others} == set()


IDENTITY = {
    "itself": lambda z: z,
    "a latent axis": lambda z: z.unsqueeze(1).expand(B, H, T, L),
    "a scale": lambda z: -2.0 * z.transpose(0, 1),
    "twice itself": lambda z: z + z,
    "merged axes": lambda z: z.reshape(B * T, 2, 4),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_identity(name):
    check(IDENTITY[name], [z()], [], projected=False)


def test_two_sources_side_by_side():
    def keys(c, r, w):
        nope = F.linear(c, w).view(B, T, H, N).transpose(1, 2)
        return torch.cat([nope, r[:, None].expand(B, H, T, 3)], -1)

    lmap = check(keys, [z(), z(B, T, 3)], [W(H * N, L)], sources=2)
    assert [(s.start, s.stop) for s in lmap.segments] == [(0, N), (N, N + 3)]


def test_rows_joined_along_the_last_axis():
    """Channels first: what is joined along the last axis are tokens, which only the projection tells."""
    lmap = linear_map(trace(lambda a, b, w: w @ torch.cat([a, b], -1)[:, None], [z(B, L, 4), z(B, L, 1)], [W(H, 6, L)]))
    (piece,) = lmap.pieces
    assert str(piece.source.target) == "aten.cat.default"
    assert piece.projected


def test_rows_joined_along_two_axes():
    """Tokens along the last axis, then rows of another tensor below them: each is a source as it was joined."""

    def fn(a, b, c, w):
        return torch.cat([w @ torch.cat([a, -a], -1), torch.cat([b, c], -1)], 1)

    lmap = linear_map(trace(fn, [z(B, 5, 4), z(B, 2, 4, seed=5), z(B, 2, 4, seed=6)], [W(3, 5)]))
    assert [s.stop - s.start for s in lmap.segments] == [3, 2]
    assert {str(p.source.target) for p in lmap.pieces} == {"aten.cat.default"}


@pytest.mark.parametrize("down", [False, True], ids=["as they are", "one of them projected"])
def test_columns_of_several_tensors_projected_together(down):
    """The rows that are expanded are the joined ones."""

    def fn(a, b, w, m):
        return torch.cat([a @ m if down else a, b], -1) @ w

    inputs, weights = [z(), z(B, T, 3, seed=5)], [W(L + 3, 15), W(L, L)]
    program = trace(fn, inputs, weights)
    lmap = linear_map(program)
    (piece,) = lmap.pieces
    assert piece.source.target is aten.cat.default
    assert piece.projected
    assert found_reasons == {}


def test_a_bias_in_float16_is_evaluated_where_it_is_added():
    check(lambda z, w, b: F.linear(z, w) + b.double(), [z()], [W(6, L), W(6).half()])


def test_the_way_counts_projections_and_scalings():
    """What lies between a tensor and X is counted from the source on: a tie between rows is broken by it."""
    (piece,) = linear_map(trace(lambda z, a, g, b: (z @ a).mT.mT * g * g @ b, [z()], [W(L, 3), W(3), W(3, 5)])).pieces
    assert [v.contractions for v in piece.path] == [0, 1, 1, 1, 1, 1, 2]
    assert [v.scalings for v in piece.path] == [0, 0, 0, 0, 1, 2, 2]


def test_a_chain_deeper_than_the_stack_of_python():
    def fn(z):
        for _ in range(sys.getrecursionlimit() // 2):
            z = -z
        return z

    check(fn, [z()], [], projected=False)


def test_splits_of_splits_are_no_deeper(monkeypatch):
    """What a part of a split needs is found before its rule asks for it: one map does not wait for another."""
    waiting = []
    apply = LinearMaps._apply

    def counted(self, node, rule):
        waiting.append(node)
        assert len(waiting) == 1
        found = apply(self, node, rule)
        waiting.pop()
        return found

    monkeypatch.setattr(LinearMaps, "_apply", counted)
    check(lambda z, w: F.linear(z, w).split([7, 5], -1)[0].split([3, 4], -1)[1] * 2, [z()], [W(12, L)])


def test_a_split_by_a_size_of_another_input():
    """The size is an operand of the split, and no tensor."""

    def fn(z, other):
        return z.split([other.shape[0], z.shape[-1] - other.shape[0]], -1)[0].clone()

    gm = make_fx(fn, tracing_mode="symbolic", pre_dispatch=True)(z(), z(3))
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    fake = next(n for n in gm.graph.find_nodes(op="placeholder")).meta["val"].fake_mode
    (piece,) = linear_map(Program(gm, weights={}, fake_mode=fake)).pieces
    assert piece.source.op in ("placeholder", "call_function")


STOPS = {
    "rope by cos": ("position_dependent", lambda z, w, p: (z @ w) * p[:, :T], [W(L, 6)], [z(B, T, 6)]),
    "rope by a table of weights": ("position_dependent", lambda z, w, p: (z @ w) * p, [W(L, 6), W(T, 1)], []),
    "rope, complex": (
        "position_dependent",
        lambda z, w, p: torch.view_as_real(torch.view_as_complex((z @ w).view(B, T, 3, 2)) * torch.polar(p.abs(), p)),
        [W(L, 6)],
        [z(1, T, 3)],
    ),
    "a bias per position": ("position_dependent", lambda z, w, p: z @ w + p, [W(L, 6), W(T, 6)], []),
    "a factor per sequence": ("position_dependent", lambda z, w, p: (z @ w) * p, [W(L, 6), W(B, 1, 1)], []),
    "a factor from the inputs": ("position_dependent", lambda z, w, p: (z @ w) * p, [W(L, 6)], [z(B, T, 1)]),
    "a sum of two sources, neither projected": ("unsupported_op", lambda z, w, p: z * w + p, [W(L)], [z()]),
    "a residual connection": ("unsupported_op", lambda z, w, p: z + (z * p) @ w, [W(L, L)], [z()]),
    "a sum of more sources than are told apart": (
        "unsupported_op",
        lambda z, w, *p: functools.reduce(operator.add, p, z @ w),
        [W(L, L)],
        [z(), z(), z(), z()],
    ),
    "a sum of columns and something else": (
        "unsupported_op",
        lambda z, w, p, r: torch.cat([z @ w, p], -1) + r,
        [W(L, 6)],
        [z(B, T, 4), z(T, 10)],
    ),
    "a sum with one column": ("unsupported_op", lambda z, w: z @ w + (z @ w)[..., :1], [W(L, 6)], []),
    "a sum of maps of other factors": (
        "unsupported_op",
        lambda z, w: (z @ w).view(B, T, 2, 3).mul(2).flatten(2) + (z @ w).view(B, T, 3, 2).mul(2).flatten(2),
        [W(L, 6)],
        [],
    ),
    "a sum of maps of rows in other factors": (
        "unsupported_op",
        lambda z, w, u: (
            torch.einsum("btij,ijo->bto", z.view(B, T, 2, 4), w) + torch.einsum("btij,ijo->bto", z.view(B, T, 4, 2), u)
        ),
        [W(2, 4, 6), W(4, 2, 6)],
        [],
    ),
    "a sum of a map and what it is a map of": ("unsupported_op", lambda z, w: z @ w + z, [W(L, L)], []),
    "what is positive": ("nonlinear", lambda z, w: (lambda k: torch.where(k > 0, k, 0.0))(z @ w), [W(L, 6)], []),
    "some tokens hidden": (
        "position_dependent",
        lambda z, w: (z @ w).masked_fill(torch.arange(T)[:, None] > 2, 0.0),
        [W(L, 6)],
        [],
    ),
    "some features hidden": (
        "unsupported_op",
        lambda z, w: torch.where(torch.arange(6) > 2, z @ w, 0.0),
        [W(L, 6)],
        [],
    ),
    "a sum with some tokens averaged": (
        "token_mixing",
        lambda z, w: (lambda k: k + k.cumsum(1))(z @ w),
        [W(L, 6)],
        [],
    ),
    "a sum with the tokens turned": (
        "token_mixing",
        lambda z, w: (lambda k: k + k.transpose(0, 1))(z[:, :2] @ w),
        [W(L, 6)],
        [],
    ),
    "a square": ("nonlinear", lambda z, w: (z @ w) * (z @ w), [W(L, 6)], []),
    "silu": ("nonlinear", lambda z, w: F.silu(z @ w), [W(L, 6)], []),
    "softmax": ("nonlinear", lambda z, w: (z @ w).softmax(-1), [W(L, 6)], []),
    "rms norm": ("nonlinear", lambda z, w: F.rms_norm(z @ w, (6,)), [W(L, 6)], []),
    "rms norm by hand": (
        "nonlinear",
        lambda z, w: (lambda k: k * k.float().square().mean(-1, True).add(1e-6).rsqrt())(z @ w),
        [W(L, 6)],
        [],
    ),
    "its own factor": ("nonlinear", lambda z, w: (lambda k: torch.sigmoid(k) * k)(z @ w), [W(L, 6)], []),
    "a gate of the rows": ("nonlinear", lambda z, w, g: torch.sigmoid(z @ g) * (z @ w), [W(L, 6), W(L, 1)], []),
    "a gate of other rows": (
        "position_dependent",
        lambda z, w, g, x: torch.sigmoid(x @ g) * (z @ w),
        [W(L, 6), W(L, 1)],
        [z()],
    ),
    "layer norm": ("nonlinear", lambda z, w: F.layer_norm(z @ w, (6,)), [W(L, 6)], []),
    "mean": ("nonlinear", lambda z, w: (z @ w).mean(-1), [W(L, 6)], []),
    "rounding to int8": ("nonlinear", lambda z, w: (z @ w).to(torch.int8), [W(L, 6)], []),
    "rounding through a copy": (
        "nonlinear",
        lambda z, w: aten.copy(torch.empty(B, T, 6, dtype=torch.int8), z @ w),
        [W(L, 6)],
        [],
    ),
    "float8": ("nonlinear", lambda z, w: (z @ w).to(torch.float8_e4m3fn), [W(L, 6)], []),
    "the same bits as another number": (
        "nonlinear",
        lambda z, w: (z @ w).half().view(torch.bfloat16),
        [W(L, 6)],
        [],
    ),
    "division rounded down": (
        "position_dependent",
        lambda z, w: torch.div(z @ w, 2.0, rounding_mode="floor"),
        [W(L, 6)],
        [],
    ),
    "a number over it": ("position_dependent", lambda z, w: w / z, [W(L)], []),
    "dropout": ("dropout", lambda z, w: F.dropout(z @ w, 0.5, training=True), [W(L, 6)], []),
    "native dropout": ("dropout", lambda z, w: aten.native_dropout(z @ w, 0.5, True)[0], [W(L, 6)], []),
    "cumsum": ("token_mixing", lambda z, w: (z @ w).cumsum(1), [W(L, 6)], []),
    "roll": ("token_mixing", lambda z, w: (z @ w).roll(1, 1), [W(L, 6)], []),
    "flip": ("token_mixing", lambda z, w: (z @ w).flip(1), [W(L, 6)], []),
    "flip of tokens and features": ("token_mixing", lambda z, w: (z @ w).flip([1, 2]), [W(L, 6)], []),
    "cumsum of features": ("unsupported_op", lambda z, w: (z @ w).cumsum(-1), [W(L, 6)], []),
    "roll of features": ("unsupported_op", lambda z, w: (z @ w).roll(1, 2), [W(L, 6)], []),
    "flip of features": ("unsupported_op", lambda z, w: (z @ w).flip(-1), [W(L, 6)], []),
    "conv": ("token_mixing", lambda z, w, c: F.conv1d((z @ w).mT, c, padding=1), [W(L, 6), W(6, 6, 3)], []),
    "conv of groups": ("token_mixing", lambda z, w, c: F.conv1d((z @ w).mT, c, groups=2), [W(L, 6), W(6, 3, 1)], []),
    "conv with a stride": (
        "token_mixing",
        lambda z, w, c: F.conv1d((z @ w).mT, c, stride=2),
        [W(L, 6), W(6, 6, 1)],
        [],
    ),
    "conv with a stride and padding": (
        "token_mixing",
        lambda z, w, c: F.conv1d((z @ w).mT, c, stride=2, padding=2),
        [W(L, 6), W(6, 6, 1)],
        [],
    ),
    "maps of two sources stacked": (
        "token_mixing",
        lambda z, w, p: torch.stack([z @ w, p @ w], 1),
        [W(L, 6)],
        [z(B, T, L, seed=9)],
    ),
    "a map and its source stacked": ("token_mixing", lambda z, w: torch.stack([z @ w, z], 1), [W(L, L)], []),
    "heads of which one is not written": (
        "unsupported_op",
        lambda z, w: _written_heads(z.new_zeros(B, 3, T, 6), 1, {0: z @ w, 2: z @ w}),
        [W(L, 6)],
        [],
    ),
    "heads written as whole numbers": (
        "unsupported_op",
        lambda z, w: _written_heads(z.new_zeros(B, 2, T, 6, dtype=torch.int8), 1, {0: z @ w, 1: z @ w}),
        [W(L, 6)],
        [],
    ),
    "columns written as whole numbers": (
        "nonlinear",
        lambda z, w: aten.slice_scatter(z.new_zeros(B, T, 6, dtype=torch.int8), z @ w, 2, 0, 6),
        [W(L, 6)],
        [],
    ),
    "heads of two sources written": (
        "token_mixing",
        lambda z, w, p: _written_heads(z.new_zeros(B, 2, T, 6), 1, {0: z @ w, 1: p @ w}),
        [W(L, 6)],
        [z(B, T, L, seed=9)],
    ),
    "heads written across": (
        "unsupported_op",
        lambda z, w: _written_heads(_written_heads(z.new_zeros(B, 2, T, 2), 3, {0: z[:, None, :, 0]}), 1, {0: z @ w}),
        [W(L, 2)],
        [],
    ),
    "heads beside rows of two widths, stacked": (
        "token_mixing",
        lambda z, a, b: torch.stack([torch.cat([z @ a, z], -1), torch.cat([z, z @ b], -1)], 1),
        [W(L, 6), W(L, 6)],
        [],
    ),
    "tokens of two sources, one each": (
        "token_mixing",
        lambda z, w, p: torch.cat([(z @ w)[:, None], (p @ w)[:, None]], 1),
        [W(L, 6)],
        [z(B, T, L, seed=9)],
    ),
    "gather": ("token_mixing", lambda z, w: (z @ w).index_select(1, torch.tensor([1, 0])), [W(L, 6)], []),
    "sum over tokens": ("token_mixing", lambda z, w: (z @ w).sum(1), [W(L, 6)], []),
    "sum over tokens and features": ("nonlinear", lambda z, w: (z @ w).sum((1, 2)), [W(L, 6)], []),
    "the largest of a row": ("unsupported_op", lambda z, w: (z @ w).max(-1)[0], [W(L, 6)], []),
    "einsum that sums tokens": ("token_mixing", lambda z, w: torch.einsum("btl,ln->bn", z, w), [W(L, 6)], []),
    "a part of the tokens": ("unsupported_op", lambda z, w: (z @ w)[:, 1:3], [W(L, 6)], []),
    "one token": ("unsupported_op", lambda z, w: (z @ w)[:, 1], [W(L, 6)], []),
    "every other token": ("unsupported_op", lambda z, w: (z @ w)[:, ::2], [W(L, 6)], []),
    "tokens joined": (
        "token_mixing",
        lambda z, w, p: torch.cat([(z @ w).mT[:, None], p.mT[:, None]], 1),
        [W(L, 6)],
        [z(B, T, 6)],
    ),
    "a row overwritten": (
        "token_mixing",
        lambda z, w, p: aten.slice_scatter(z @ w, p, 1, 0, 1),
        [W(L, 6)],
        [z(B, 1, 6)],
    ),
    "product of two activations": ("token_mixing", lambda z, w: (z @ w) @ z.mT, [W(L, L)], []),
    "padding with ones": ("unsupported_op", lambda z, w: F.pad(z @ w, (0, 1), value=1.0), [W(L, 6)], []),
    "padding of tokens": ("unsupported_op", lambda z, w: F.pad(z @ w, (0, 0, 1, 0)), [W(L, 6)], []),
    "a bias of integers": (
        "unsupported_weight",
        lambda z, w, b: z @ w + b,
        [W(L, 6), torch.arange(6)],
        [],
    ),
    "a reshape through factors": ("unsupported_op", lambda z, w: (z @ w).view(B, 3, T * 2), [W(L, 6)], []),
    "a reshape across sources": (
        "unsupported_op",
        lambda z, w, p: torch.cat([z @ w, p], -1).view(B, T, 2, 5),
        [W(L, 6)],
        [z(B, T, 4)],
    ),
    "projection across sources": (
        "unsupported_op",
        lambda z, w, v, p: torch.cat([z @ w, p], -1) @ v,
        [W(L, 6), W(10, 3)],
        [z(B, T, 4)],
    ),
    "every other column of two sources": (
        "unsupported_op",
        lambda z, w, p: torch.cat([z @ w, p], -1)[..., ::2],
        [W(L, 6)],
        [z(B, T, 4)],
    ),
    "every other column overwritten": (
        "unsupported_op",
        lambda z, w, v: aten.slice_scatter(z @ w, z @ v, 2, 0, 6, 2),
        [W(L, 6), W(L, 3)],
        [],
    ),
    "no column of two sources": (
        "unsupported_op",
        lambda z, w, p: torch.cat([z @ w, p], -1)[..., 3:3],
        [W(L, 6)],
        [z(B, T, 4)],
    ),
    "ones joined": ("unsupported_op", lambda z, w: torch.cat([z @ w, torch.ones(B, T, 2)], -1), [W(L, 6)], []),
    "columns written over a number": (
        "unsupported_op",
        lambda z, w: aten.slice_scatter(torch.full((B, T, 6), 0.5, dtype=z.dtype), z @ w, 2, 0, 3),
        [W(L, 3)],
        [],
    ),
    "columns written over a weight": (
        "unsupported_op",
        lambda z, w, b: aten.slice_scatter(b.expand(B, T, 6), z @ w, 2, 0, 3),
        [W(L, 3), W(6)],
        [],
    ),
    "a weight of more axes": ("position_dependent", lambda z, w, b: (z @ w) * b, [W(L, 6), W(2, 1, 1, 1)], []),
    "matrices of more axes": ("token_mixing", lambda z, w: z @ w, [W(2, 1, L, 6)], []),
    "a vector projected to": ("token_mixing", lambda z, w: z @ w, [W(L)], []),
    "a bias of more axes": ("unsupported_op", lambda z, w, b: torch.addmm(b, z.view(-1, L), w), [W(L, 6), W(1, 6)], []),
    "einsum of two activations": ("token_mixing", lambda z, w: torch.einsum("btl,bsl->bts", z @ w, z), [W(L, L)], []),
    "a map and a constant stacked": (
        "token_mixing",
        lambda z, w, b: torch.stack([z @ w, b.expand(B, T, 6)], 1),
        [W(L, 6), W(6)],
        [],
    ),
    "a weight from the inputs": ("unsupported_weight", lambda z, w, p: F.linear(z @ w, p), [W(L, 6)], [z(5, 6)]),
    "a bias from the inputs": ("unsupported_op", F.linear, [W(6, L)], [z(6)]),
    "a vector for a weight": ("unsupported_op", F.linear, [W(L)], []),
    "an einsum that sums a weight with a column": (
        "unsupported_op",
        lambda z, w: torch.einsum("bte,en->btn", z[..., :1], w),
        [W(L, 6)],
        [],
    ),
    "an einsum that sums a weight": ("unsupported_op", lambda z, w: torch.einsum("btl,ln->bt", z, w), [W(L, 6)], []),
    "constants joined": (
        "unsupported_op",
        lambda z, w, b: torch.cat([z @ w, b.expand(B, T, 3)], -1),
        [W(L, 6), W(3)],
        [],
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop(name):
    code, fn, weights, more = STOPS[name]

    def ordered(*args):  # inputs come first in a trace, z before the weights in the table
        inputs, rest = args[: 1 + len(more)], args[1 + len(more) :]
        return fn(inputs[0], *rest, *inputs[1:])

    program = trace(ordered, [z(), *more], weights)
    lmap = linear_map(program)
    assert code in found_reasons.values()
    assert code == _last_reason(program)
    assert not any(p.source is not None and p.source.op == "placeholder" and p.weight is not None for p in lmap.pieces)


WORDS = {
    "where of tokens": ("position_dependent", lambda x, p: torch.where(p[:, :T, :1] > 0, x, 0.0)),
    "masked_fill of tokens": ("position_dependent", lambda x, p: x.masked_fill(p[:, :T, :1] > 0, 0.0)),
    "masked_fill of features": ("unsupported_op", lambda x, p: x.masked_fill(p[:1, :1] > 0, 0.0)),
    "masked_fill of negatives": ("nonlinear", lambda x, p: x.masked_fill(x < 0, 0.0)),
    "view_as_complex turned": ("position_dependent", lambda x, p: _complex(x) * torch.polar(p, p)[..., :3]),
    "view_as_complex turned and seen": (
        "position_dependent", lambda x, p: (_complex(x) * torch.polar(p, p)[..., :3]) + _complex(x).conj(),
    ),
    "view_as_complex seen": ("unsupported_op", lambda x, p: _complex(x).conj().resolve_conj()),
    "erf": ("unsupported_op", lambda x, p: x.erf() * p),
}  # fmt: skip


def _complex(x):
    return torch.view_as_complex(x.unflatten(-1, (3, 2)))


@pytest.mark.parametrize("name", WORDS)
def test_what_is_said_of_an_operator(name):
    code, fn = WORDS[name]
    program = trace(
        lambda x, p: torch.view_as_real(y).flatten(-2) if (y := fn(x, p)).is_complex() else y,
        [z(B, T, 6), z(B, T, 6)],
        [],
    )
    (node, *_) = (n for n in program.gm.graph.nodes if name.split()[0] in str(n.target))
    assert unexplained(LinearMaps(set(), program.fake_mode), node).code == code


def _last_reason(program):
    """The code of the operator nearest to the result."""
    order = [n.name for n in program.gm.graph.nodes]
    return found_reasons[max(found_reasons, key=order.index)]


def test_a_weight_of_a_layout_or_dtype_without_arithmetic_is_named():
    sparse = trace(lambda z, w: z.view(-1, L) @ w, [z()], [W(L, 6)])
    node = sparse.node("w_1")
    node.meta["val"] = torch.empty(L, 6, layout=torch.sparse_coo)
    linear_map(sparse)
    assert list(found_reasons.values()) == ["unsupported_weight"]


@pytest.mark.parametrize(("dim", "shown", "word"), [(2, (B, T, 3), "columns"), (1, (B, 2, 6), "rows")])
def test_constants_that_are_joined_are_said_to_be_along_what(dim, shown, word):
    from mla_compile.passes.ir.walk import weight_nodes

    program = trace(lambda z, w, more: torch.cat([more, z @ w], dim), [z()], [W(L, 6), W(*shown)])
    (node,) = program.gm.graph.output_node().args[0]
    maps = LinearMaps(weight_nodes(program.gm.graph, program.weights), program.fake_mode)
    maps.map(node)
    assert maps.reasons[node].detail == f"constants are joined to {word} of a linear map"


def test_a_chosen_source_ends_the_walk():
    from mla_compile.passes.ir.walk import weight_nodes

    program = trace(lambda z, a, b: (z @ a) @ b, [z()], [W(L, 3), W(3, 12)])
    first, second = (n for n in program.gm.graph.nodes if n.op == "call_function")
    maps = LinearMaps(weight_nodes(program.gm.graph, program.weights), program.fake_mode)
    assert maps.map(second).pieces[0].source.name == "z_1"
    stopped = maps.with_sources([first])
    lmap = stopped.map(second)
    assert stopped.reasons == {}, "it ends there because it was told to"
    assert lmap.pieces[0].source is first
    assert not isinstance(lmap, Stop)


def test_a_table_of_positions_is_no_weight_whatever_the_source():
    from mla_compile.passes.ir.walk import weight_nodes

    program = trace(lambda z, a, t: (z @ a) * t, [z()], [W(L, 3), W(T, 1)])
    first, second = (n for n in program.gm.graph.nodes if n.op == "call_function")
    maps = LinearMaps(weight_nodes(program.gm.graph, program.weights), program.fake_mode)
    assert maps.with_sources([first]).map(second).pieces[0].source is second
    assert maps.with_sources([first], per_row=True).map(second).pieces[0].source is first


# Chains of random operators. The oracle is the function itself: a map that claims to be linear must reproduce it.


_KINDS = [
    "linear", "left", "permute", "split", "merge", "slice", "select", "unsqueeze", "expand", "mul", "add", "scale",
    "cat", "pad", "lora", "repeat", "scatter", "sum", "added row",
]  # fmt: skip


def _random_chain(rng):
    """A function of rows and weights made of random steps, and these; every shape is small and often equal."""
    sizes = [2, 2, 2] if rng.random() < 0.5 else [2, 3, 4]  # equal sizes on purpose: nothing may be told by size
    weights, steps, rows = [], [], [z(*sizes)]
    shape = list(sizes)

    def weight(*dims):
        weights.append(seeded(*dims, seed=len(weights) + 7))
        return len(weights) - 1

    for _ in range(rng.randint(2, 8)):
        k = rng.randrange(len(shape))
        if rng.random() < 0.6:
            k = len(shape) - 1  # features, where most operators stay linear
        kind = rng.choice(_KINDS)
        if kind == "linear":
            out = rng.choice([2, 3, 4])
            i = weight(out, shape[-1])
            steps.append(lambda x, w, i=i: F.linear(x, w[i]))
            shape[-1] = out
        elif kind == "left" and len(shape) >= 2:
            out = rng.choice([2, 3])
            i = weight(out, shape[-2])
            steps.append(lambda x, w, i=i: w[i] @ x)
            shape[-2] = out
        elif kind == "permute":
            order = rng.sample(range(len(shape)), len(shape))
            steps.append(lambda x, w, o=tuple(order): x.permute(o))
            shape = [shape[d] for d in order]
        elif kind == "split" and shape[k] == 4:
            shape = [*shape[:k], 2, 2, *shape[k + 1 :]]
            steps.append(lambda x, w, s=tuple(shape): x.reshape(s))
        elif kind == "merge" and k + 1 < len(shape):
            shape = [*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :]]
            steps.append(lambda x, w, s=tuple(shape): x.reshape(s))
        elif kind == "slice" and shape[k] > 1:
            a = rng.randrange(shape[k] - 1)
            steps.append(lambda x, w, k=k, a=a: x.narrow(k, a, x.shape[k] - a))
            shape[k] -= a
        elif kind == "select" and len(shape) > 3:
            a = rng.randrange(shape[k])
            steps.append(lambda x, w, k=k, a=a: x.select(k, a))
            del shape[k]
        elif kind == "unsqueeze" and len(shape) < 5:
            shape.insert(k, 1)
            steps.append(lambda x, w, k=k: x.unsqueeze(k))
        elif kind == "expand" and 1 in shape:
            shape = [rng.choice([1, 2, 3]) if s == 1 else s for s in shape]
            steps.append(lambda x, w, s=tuple(shape): x.expand(s))
        elif kind in ("mul", "add"):
            i = weight(*(s if rng.random() < 0.5 and d >= len(shape) - 2 else 1 for d, s in enumerate(shape)))
            op = torch.mul if kind == "mul" else torch.sub
            steps.append(lambda x, w, i=i, op=op: op(x, w[i]))
        elif kind == "scale":
            by = rng.choice([-1.5, 0.5, 2.0])
            steps.append(lambda x, w, by=by: x * by)
        elif kind == "cat":
            out = rng.choice([1, 2])
            i = weight(out, shape[-1])
            steps.append(lambda x, w, i=i: torch.cat([x, F.linear(x, w[i])], -1))
            shape[-1] += out
        elif kind == "pad":
            steps.append(lambda x, w: F.pad(x, (1, 0)))
            shape[-1] += 1
        elif kind == "lora":
            i = weight(shape[-1], shape[-1])
            steps.append(lambda x, w, i=i: F.linear(x, w[i]) - 0.5 * F.linear(F.linear(x, w[i]), w[i].mT))
        elif kind == "sum" and len(rows) < 3:  # of images of two rows
            i, at = weight(shape[-1], 3), len(rows)
            rows.append(z(*shape[:-1], 3, seed=at + 1))
            steps.append(lambda x, w, i=i, at=at: x * 0.5 - F.linear(w[-at], w[i]))
        elif kind == "added row" and len(rows) < 3 and len(shape) > 1:  # that some of the axes share
            at = len(rows)
            rows.append(z(*(1 if rng.random() < 0.3 else s for s in shape), seed=at + 1))
            steps.append(lambda x, w, at=at: torch.add(x, w[-at], alpha=2))
        elif kind == "repeat" and math.prod(shape) < 100:
            counts = [2 if d == k else 1 for d in range(len(shape))]
            steps.append(lambda x, w, c=tuple(counts): x.repeat(c))
            shape[k] *= 2
        elif kind == "scatter" and shape[-1] > 1:
            steps.append(lambda x, w: torch.slice_scatter(x, 2.0 * x[..., :1], -1, 1, 2))

    def fn(z, *more):
        others = len(rows) - 1
        for step in steps:
            z = step(z, (*more[others:], *more[:others][::-1]))
        return z.clone()

    return fn, rows, weights


@pytest.mark.thorough
@pytest.mark.parametrize(("block", "cases"), [(0, 15), *also("draws", *((block, 30) for block in range(1, 9)))])
def test_random_chains_are_what_their_maps_say(block, cases):
    rng = random.Random(block)
    reached = 0
    for case in range(cases):
        fn, rows, weights = _random_chain(rng)
        program = trace(fn, rows, weights)
        lmap = linear_map(program)
        value = evaluate(program, lmap, *rows, *weights)
        assert error(value, fn(*rows, *weights)) < 1e-11, f"case {case}: {program.gm.code}"
        reached += all(p.source is None or p.source.op == "placeholder" for p in lmap.pieces)
        first = program.gm.graph.find_nodes(op="placeholder")[0]
        _assert_linear(lmap, first, fn, rows[0], [*rows[1:], *weights])
    assert reached >= cases // 5, "the walk hardly ever reaches the input: the chains show nothing"


def _assert_linear(lmap, source, fn, data, weights):
    """Where the walk reached z, the function is affine in z, and a row that is a token of z is blind to the others."""
    if any(p.source is None or p.source.op != "placeholder" for p in lmap.pieces):
        return
    other = seeded(*data.shape, seed=9)
    zero = fn(torch.zeros_like(data), *weights)
    both = fn(2.0 * data - 3.0 * other, *weights) - zero
    assert error(both + 1.0, 2.0 * (fn(data, *weights) - zero) - 3.0 * (fn(other, *weights) - zero) + 1.0) < 1e-11
    for axis in range(data.dim()):
        kept = _token_axis([p for p in lmap.pieces if p.source is source], axis)
        if kept is None:
            continue
        changed = data.clone()
        changed.select(axis, 0).add_(1.0)
        differs = (fn(changed, *weights) != fn(data, *weights)).movedim(kept, 0)
        assert not differs[1:].any(), "a row depends on another row of the source"


def _token_axis(pieces, axis):
    """The axis of the result that is exactly axis ``axis`` of the source in every piece, and not of its weights."""
    places = set()
    for p in pieces:
        own = p.source_axes[axis]
        if not own or any(f is not None and set(own) & set(f.atoms) for f in (p.weight, p.bias)):
            return None
        places.add(p.axes.index(own) if own in p.axes else None)
    return places.pop() if len(places) == 1 else None
