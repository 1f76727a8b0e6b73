"""Steps put on the way of keys and values: positions, mixed rows, confused axes, functions, inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.codes import Code
from mla_compile.passes.ir.graph import is_tensor, val
from tests.adversary.places import Edit, Refused, choose
from tests.adversary.registry import ROWS, along, axis, mutation, two_axes, wiring

# A factor, or a summand, that depends on where along an axis it is.


@mutation(*ROWS, "scores", "queries")
def position_factor(rng, x):
    d = axis(rng, x)
    return lambda x: x * along(x, d, 1 + 0.3 * torch.arange(x.shape[d]))


@mutation(*ROWS, "scores")
def position_bias(rng, x):
    d = axis(rng, x)
    return lambda x: x + along(x, d, (0.7 * torch.arange(x.shape[d])).sin())


@mutation(*ROWS, "queries", codes=(Code.POSITION_DEPENDENT,))  # the angles differ, whatever is mixed by them
def rotation(rng, x):
    by, over = axis(rng, x), axis(rng, x)
    if x.shape[over] % 2:
        raise Refused("an odd width")

    def rotate(x):
        angle = along(x, by, 0.4 * torch.arange(x.shape[by]))
        a, b = x.chunk(2, over)
        if by == over:
            angle = angle.narrow(by, 0, a.shape[by])
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], over)

    return rotate


@wiring(*ROWS)
def table(rng, base, edge):
    """A table of constants, as learned positions are, over one axis and the features."""
    x = val(edge.node)
    d, e = axis(rng, x, fixed=True), axis(rng, x, fixed=True)
    shape = [s if k in (d, e) else 1 for k, s in enumerate(x.shape)]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(99)), dtype=torch.float64)
    fn = rng.choice((torch.add, torch.mul, torch.sub))
    return Edit(fn, constants=(numbers,))


# Rows mixed, moved or dropped along an axis.


@mutation(*ROWS, "scores", "probs", "weights")
def roll(rng, x):
    d = axis(rng, x)
    return lambda x: x.roll(1, d)


@mutation(*ROWS, "scores")
def flip_of_a_part(rng, x):
    d = axis(rng, x, fixed=True)
    n = x.shape[d] // 2 + 1
    return lambda x: torch.cat([x.narrow(d, 0, n).flip(d), x.narrow(d, n, x.shape[d] - n)], d)


@mutation(*ROWS, "scores", "probs")
def cumsum(rng, x):
    d = axis(rng, x)
    return lambda x: x.cumsum(d)


@mutation(*ROWS, "probs")
def off_by_one(rng, x):
    """Rows 1.. and the first again, or zero before all but the last: by slices and cat, or by padding."""
    d = axis(rng, x)
    how = rng.choice(("again", "zero", "pad"))
    if how == "again":
        return lambda x: torch.cat([x.narrow(d, 1, x.shape[d] - 1), x.narrow(d, 0, 1)], d)
    if how == "zero":
        return lambda x: torch.cat([torch.zeros_like(x.narrow(d, 0, 1)), x.narrow(d, 0, x.shape[d] - 1)], d)
    before = [0, 0] * (x.dim() - 1 - d) + [1, 0]
    return lambda x: F.pad(x, before).narrow(d, 0, x.shape[d])


@mutation(*ROWS)
def some_rows_again(rng, x):
    """Slices of one axis, each a slice of rows by itself: the first for all, every second twice, a part again."""
    d = axis(rng, x, fixed=True)
    size, how = x.shape[d], rng.choice(("first", "twice", "part"))
    if how == "first":
        return lambda x: x.narrow(d, 0, 1).expand_as(x)
    if how == "twice":
        return lambda x: torch.ops.aten.slice(x, d, 0, None, 2).repeat_interleave(2, d).narrow(d, 0, size)
    n = size // 2 + 1
    return lambda x: torch.cat([x.narrow(d, 0, n), x.narrow(d, 0, size - n)], d)


@wiring(*ROWS, "scores", "queries", "probs")
def other_indices(rng, base, edge):
    """The rows of one axis gathered in another order, some of them twice."""
    x = val(edge.node)
    d = axis(rng, x, fixed=True)
    index = torch.tensor([rng.randrange(x.shape[d]) for _ in range(x.shape[d])])
    how = rng.choice(("index_select", "gather", "index"))
    if how == "gather":
        row = [-1 if k == d else 1 for k in range(x.dim())]
        return Edit(lambda x, i: x.gather(d, i.reshape(row).expand(x.shape)), constants=(index,))
    if how == "index":
        return Edit(lambda x, i: x[(slice(None),) * d + (i,)], constants=(index,))
    return Edit(lambda x, i: x.index_select(d, i), constants=(index,))


@mutation(*ROWS)
def convolution(rng, x):
    d = axis(rng, x)

    def convolve(x):
        last = x.transpose(d, -1)
        flat = F.pad(last.reshape(-1, 1, last.shape[-1]), (1, 0))
        kernel = torch.full((1, 1, 2), 0.5, dtype=x.dtype)
        return F.conv1d(flat, kernel).reshape(last.shape).transpose(d, -1)

    return convolve


@wiring(*ROWS, "queries", "scores", "probs")
def matrix(rng, base, edge):
    """A constant matrix applied along one axis: over features and heads it is one weight more, over tokens a mix."""
    x = val(edge.node)
    d = axis(rng, x, fixed=True)
    n = x.shape[d]
    numbers = torch.randn(n, n, generator=torch.Generator().manual_seed(rng.randrange(99)), dtype=torch.float64)
    left = "abcdefgh"[: x.dim()]
    if rng.random() < 0.5:
        return Edit(lambda x, w: torch.einsum(f"{left},{left[d]}z->{left.replace(left[d], 'z')}", x, w), (), (numbers,))
    return Edit(lambda x, w: (x.transpose(d, -1) @ w).transpose(d, -1), (), (numbers,))


@mutation(*ROWS)
def neighbours(rng, x):
    d = axis(rng, x)
    return lambda x: x + 0.5 * x.roll(1, d)


@mutation(*ROWS, codes=(Code.TOKEN_MIXING,))
def overwritten(rng, x):
    """One entry of an axis is replaced by zeros, by a number, or by its neighbour."""
    d = axis(rng, x, fixed=True)
    j = rng.randrange(1, x.shape[d])
    how = rng.choice(("zeros", "select", "neighbour", "where"))
    if how == "zeros":
        return lambda x: torch.slice_scatter(x, torch.zeros_like(x.narrow(d, j, 1)), d, j, j + 1)
    if how == "select":
        return lambda x: torch.select_scatter(x, torch.full_like(x.select(d, j), 0.7), d, j)
    if how == "neighbour":
        return lambda x: torch.slice_scatter(x, x.narrow(d, j - 1, 1), d, j, j + 1)
    return lambda x: torch.where(along(x, d, torch.arange(x.shape[d])) == j, 0.0, x)


# Axes confused.


# Tokens and heads may be swapped: each head has rows of its own then.
@mutation(
    *ROWS, "queries", "scores", "probs", "mask", "weights", codes=(Code.PER_HEAD_ROPE, Code.HEAD_DEPENDENT_LATENT)
)
def axes_swapped(rng, x):
    a, b = two_axes(rng, x)
    return lambda x: x.transpose(a, b)


# As above, and after the rotation of a key.
@mutation(
    *ROWS, "queries", "scores", "probs",
    codes=(Code.PER_HEAD_ROPE, Code.HEAD_DEPENDENT_LATENT, Code.POSITION_DEPENDENT),
)  # fmt: skip
def scrambled_view(rng, x):
    """A reshape where a transposition was meant: ``x.transpose(1, 2).reshape(x.shape)``."""
    a, b = axis(rng, x), axis(rng, x)
    return lambda x: x.transpose(a, b).reshape(x.shape)


@mutation(*ROWS)
def broadcast(rng, x):
    """One entry of an axis stands for all, or their mean or largest does."""
    d = axis(rng, x)
    how = rng.choice(("first", "mean", "amax", "repeat"))
    if how == "first":
        return lambda x: x.narrow(d, 0, 1).expand(x.shape)
    if how == "repeat":
        return lambda x: x.narrow(d, 0, 1).repeat_interleave(x.shape[d], d)
    if how == "mean":
        return lambda x: x.mean(d, keepdim=True).expand(x.shape)
    return lambda x: x.amax(d, keepdim=True).expand(x.shape)


@mutation(*ROWS, "scores")
def symmetrised(rng, x):
    """x plus its own transpose along two axes of one size."""
    a, b = two_axes(rng, x)
    return lambda x: x + x.transpose(a, b)


# Not linear.

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "square": torch.square,
    "sin": torch.sin,
    "int8": lambda x: (x * 20).to(torch.int8).to(x.dtype) / 20,
    "sign": torch.sign,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "fill": lambda x: x.masked_fill(x < 0, 0.0),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(torch.stack([x, x], -1)) ** 2)[..., 0],
    "round": torch.round,
}


@mutation(*ROWS, "scores", "probs", "queries")
def nonlinearity(rng, x):
    return FUNCTIONS[rng.choice(sorted(FUNCTIONS))]


@mutation(*ROWS, codes=(Code.POSITION_DEPENDENT,))
def norm(rng, x):
    d = axis(rng, x)
    how = rng.choice(("rms", "l2", "softmax", "centred"))
    if how == "softmax":
        return lambda x: x.softmax(d)
    if how == "centred":
        return lambda x: x - x.mean(d, keepdim=True)
    if how == "l2":
        return lambda x: F.normalize(x, dim=d)
    return lambda x: x * torch.rsqrt(x.square().mean(d, keepdim=True) + 1e-6)


@mutation(*ROWS, "probs", "scores", outside=(Code.DROPOUT,))
def dropout(rng, x):
    return lambda x: F.dropout(x, 0.3, training=True)


# What should be fixed depends on the input.


@wiring(*ROWS, "weights", "scores", "probs", "queries")
def input_factor(rng, base, edge):
    """A factor, or a weight, that is computed from one of the inputs."""
    inputs = [n for n in base.program.placeholders if is_tensor(n) and val(n).is_floating_point()]
    return Edit(lambda x, z: x * (1 + z.sum().tanh()), (choose(rng, inputs),))


@mutation(*ROWS, codes=(Code.POSITION_DEPENDENT,))
def gate(rng, x):
    """A factor computed from the tensor itself, the same along one axis: for every head, token or batch entry."""
    d = axis(rng, x)
    return lambda x: x * torch.sigmoid(x.sum(d, keepdim=True))
