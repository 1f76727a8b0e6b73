"""Mutations of the wiring, of masks, weights and the core; and those that change nothing."""

from __future__ import annotations

import torch

from mla_compile.codes import Code
from mla_compile.passes.ir.graph import val
from tests.adversary.places import Edit, Refused, choose, same_shape
from tests.adversary.registry import ROWS, axis, mutation, wiring

# Wires.


@wiring(*ROWS, "queries", "scores", "probs", "weights")
def rewired(rng, base, edge):
    """Another tensor of the same shape."""
    return Edit(lambda x, other: other.clone(), (choose(rng, same_shape(base, edge)),))


@wiring(*ROWS, "queries", "scores", "weights", codes=(Code.POSITION_DEPENDENT,))
def joined(rng, base, edge):
    """The sum, the difference or the product with another tensor of the same shape."""
    fn = rng.choice((torch.add, torch.sub, torch.mul))
    return Edit(fn, (choose(rng, same_shape(base, edge)),))


# The other tensor may be the same one with tokens and heads swapped.
@wiring(*ROWS, codes=(Code.TOKEN_MIXING, Code.PER_HEAD_ROPE, Code.HEAD_DEPENDENT_LATENT))
def half_of_another(rng, base, edge):
    """The first half of one axis is that of another tensor of the same shape."""
    d = axis(rng, val(edge.node), fixed=True)
    n = val(edge.node).shape[d] // 2

    def half(x, other):
        return torch.cat([other.narrow(d, 0, n), x.narrow(d, n, x.shape[d] - n)], d)

    return Edit(half, (choose(rng, same_shape(base, edge)),))


# Beside a maximum that is subtracted from the scores the sum is another reader of K or V, which is named where it is an
# operator of this attention.
@wiring(
    "scores",
    outside=(
        Code.MASK_DEPENDS_ON_KEYS, Code.KEYS_USED_ELSEWHERE, Code.VALUES_USED_ELSEWHERE, Code.UNSUPPORTED_OP,
    ),
)  # fmt: skip
def mask_from_keys(rng, base, edge):
    """The expanded keys or values are added to the scores, one number per key."""
    site = base.plan.site
    product = rng.choice(site.products)
    operand = rng.choice((product.k, site.v))
    out = product.out
    if val(edge.node).dim() != len(out) or product.node is None:
        raise Refused("the scores have other axes by now")
    at = {a: k for k, a in enumerate(out) if a}

    def add(x, k):
        features = [d for d, own in enumerate(operand.axes) if own not in at]
        k = k.sum(features, keepdim=False) if features else k
        own = [a for a in operand.axes if a in at]
        order = sorted(range(len(own)), key=lambda j: at[own[j]])
        k = k.permute(order)
        places = sorted(at[a] for a in own)
        for d in range(len(out)):
            if d not in places:
                k = k.unsqueeze(d)
        return x + 0.3 * k

    if any(not own for own in operand.axes):
        raise Refused("an axis of one entry")
    return Edit(add, (operand.node,))


@mutation("scores")
def softmax_first(rng, x):
    """A softmax over any axis before the one over the keys."""
    d = axis(rng, x)
    return lambda x: x.softmax(d)


@mutation("probs")
def rescaled(rng, x):
    d = axis(rng, x)
    return lambda x: x / (x.sum(d, keepdim=True) + 0.1)


@mutation("mask")
def mask_rolled(rng, x):
    d = axis(rng, x)
    return lambda x: x.roll(1, d)


@mutation("weights")
def other_weight(rng, x):
    """Still a weight, whatever is done to it."""
    d = axis(rng, x)
    return rng.choice((lambda w: w.flip(d), lambda w: w.tanh(), lambda w: w.cumsum(d), lambda w: w - w.mean(d, True)))


# Legal wherever it is put.


@mutation(*ROWS, "queries", legal=True)
def constant_factor(rng, x):
    return rng.choice((lambda x: x * -1.7, lambda x: x / 0.3, lambda x: -x, lambda x: 2 * x, lambda x: x * 0.5 * 3))


@wiring(*ROWS, "queries", legal=True)
def constant_tensor_factor(rng, base, edge):
    """One number in a tensor of no or only size-1 axes."""
    shape = [1] * rng.randrange(val(edge.node).dim() + 1)
    return Edit(torch.mul, constants=(torch.full(shape, 1.3, dtype=torch.float64),))


@mutation(*ROWS, "queries", "scores", "probs", legal=True)
def there_and_back(rng, x):
    """Views, copies and transpositions that undo each other."""
    a, b = rng.randrange(x.dim()), rng.randrange(x.dim())
    return rng.choice(
        (
            lambda x: x.transpose(a, b).contiguous().transpose(a, b),
            lambda x: x.unsqueeze(a).squeeze(a),
            lambda x: x.flatten().view(x.shape) if x.is_contiguous() else x.clone(),
            lambda x: x.clone().view(x.shape),
            lambda x: x.movedim(a, b).movedim(b, a).contiguous(),
            lambda x: x.expand(x.shape).narrow(a, 0, x.shape[a]),
        )
    )


@mutation("queries", legal=True)
def any_queries(rng, x):
    """Nothing is asked of the queries."""
    d = axis(rng, x)
    return rng.choice((lambda x: x.roll(1, d), lambda x: x.cumsum(d), torch.tanh, lambda x: x.softmax(d)))


@mutation("weights", legal=True)
def scaled_weight(rng, x):
    return rng.choice((lambda w: w * 1.7, lambda w: w.clone(), lambda w: -w, lambda w: w.abs() + 0.1))
