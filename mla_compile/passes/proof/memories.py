"""Split an attention over rows from several memories, which the model joins along the tokens in each step.

DeepSeek-V4 reads ``cat([window, compressed])``: rows of the last tokens, and rows that each represent several older
tokens. Attention over both memories equals two separate attentions, merged by their log-sum-exps. So the join can be
omitted, and each memory has its own length, mask and sparse index list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.passes.attention.affine import OpaqueError
from mla_compile.passes.attention.masks import Masks
from mla_compile.passes.attention.scores import align_right
from mla_compile.passes.attention.site import AttentionSite, MaskTerm, Operand, Visible
from mla_compile.passes.ir.axes import Axes, Axis, axis_size, fresh_axis
from mla_compile.passes.ir.graph import args_of, shape, val
from mla_compile.passes.ir.moves import Copy, Expand, Join
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, at_least, same, same_sizes
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.linear.rows import zero_widths
from mla_compile.passes.proof.plan import make_plan
from mla_compile.passes.sources.reads import COLUMNS, ColumnRead, reads
from mla_compile.passes.sources.records import AbsorbPlan
from mla_compile.passes.sources.refine import value_features


def memories(plan: AbsorbPlan, maps: Maps, first: Mapping[fx.Node, fx.Node]) -> tuple[AbsorbPlan, ...]:
    """Return a plan for each memory; () if the attention cannot be split."""
    site = plan.site
    rows = _rows(site, first)
    how = None if rows is None else decode(rows.rows)
    if rows is None or not isinstance(how, Join) or rows.roles[how.dim] != site.keys or site.causal:
        return ()
    if any(user.op == "output" for user in rows.rows.users):  # a growing cache, which is joined in any case
        return ()
    parts = [part for part in how.parts if not same(shape(part)[how.dim], 0)]
    if len(parts) < 2 or any(same(shape(part)[how.dim], 1) for part in parts):
        return ()
    sizes = [shape(part)[how.dim] for part in parts]
    masks = [of for term in site.masks if (of := _taken_apart(term, site.keys, sizes)) is not None]
    if len(masks) < len(site.masks):
        return ()
    found: list[AbsorbPlan] = []
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        keys = fresh_axis(size)
        terms = tuple(_along(term, site.keys, keys) for of in masks if (term := of[index]) is not None)
        one = make_plan(_over(site, rows, part, keys, terms), maps.with_sources({part}), by_hand=True)
        if not isinstance(one, AbsorbPlan) or not one.whole or (one.batch, one.heads) != (plan.batch, plan.heads):
            return ()
        # A query may see only keys of other memories. Such a query must not attend to all keys of this memory.
        found.append(replace(one, visible=one.visible.dense) if one.visible.alike else one)
    # If large finite numbers hide all keys of two memories, rounding loses the ratio of the two sums of exponentials.
    apart = not any(one.visible.alike for one in found) and sum(_may_sink(one) for one in found) < 2
    return tuple(found) if apart else ()


def _may_sink(one: AbsorbPlan) -> bool:
    """Whether a query may see no key although a mask adds finite numbers to the scores."""
    return not one.visible.always and any(_adds_numbers(mask) for mask in one.site.masks)


def _adds_numbers(mask: MaskTerm) -> bool:
    """Whether ``mask`` may add numbers other than 0 and minus infinity."""
    try:
        _, fill = Masks(any_numbers=False).term(mask)
    except OpaqueError:
        return True
    return fill > float("-inf")


def together(each: Sequence[AbsorbPlan]) -> Visible:
    """Merge the conditions that decide which keys of each memory are seen."""
    seen = [one.visible for one in each]
    lists = [v.chosen for v in seen if v.chosen is not None]
    return Visible(
        masks=tuple(m for v in seen for m in v.masks),
        lengths=tuple(length for v in seen for length in v.lengths),
        numbers=tuple(n for v in seen for n in v.numbers),
        chosen=lists[0] if lists else None,
        # An empty memory shows no key, even if there is no mask.
        always=any(p.visible.always and at_least(axis_size(p.site.keys), 1) for p in each),
        left=tuple(dict.fromkeys(why for v in seen for why in v.left)),
    )


def _rows(site: AttentionSite, first: Mapping[fx.Node, fx.Node]) -> ColumnRead | None:
    """Return the rows if all columns, in order, are both the keys and the values; otherwise None."""
    if len(site.products) != 1:
        return None
    keys = reads(site.products[0].k, site.products[0].features, first)
    values = reads(site.v, value_features(site), first)
    if len(keys) != 1 or keys != values or keys[0].cuts or COLUMNS not in keys[0].roles:
        return None
    (one,) = keys
    width = shape(one.rows)[one.roles.index(COLUMNS)]
    return one if (one.start, one.stop) == (0, width) and one.roles == values[0].roles else None


def _over(
    site: AttentionSite, rows: ColumnRead, part: fx.Node, keys: Axis, masks: tuple[MaskTerm, ...]
) -> AttentionSite:
    """Return ``site`` over the rows of ``part`` alone."""

    def operand(columns: Axis) -> Operand:
        roles = [columns if role == COLUMNS else keys if role == site.keys else role for role in rows.roles]
        axes: Axes = tuple(role for role in roles if not isinstance(role, str))
        return Operand(part, axes)

    product = replace(site.products[0], k=operand(site.products[0].features), node=None, out=())
    values = operand(value_features(site))
    return replace(site, products=(product,), v=values, keys=keys, masks=masks, sinks=None, probs=None)


def _along(term: MaskTerm, old: Axis, new: Axis) -> MaskTerm:
    axes = tuple(new if axis == old else axis for axis in term.operand.axes)
    return replace(term, operand=replace(term.operand, axes=axes))


def _taken_apart(term: MaskTerm, keys: Axis, sizes: Sequence[Size]) -> list[MaskTerm | None] | None:
    """Split a mask into one term per memory, given the ``sizes`` of all memories; return None if that fails.

    The term of a memory is None if the mask hides no key of this memory.
    """
    if keys not in term.operand.axes:  # the mask is the same for all keys
        return [term] * len(sizes)
    found = _parts(term.operand.node, term.operand.axes.index(keys), term, sizes)
    if found is None:
        return None
    # A part may lack leading axes that broadcasting added.
    axes = [None if part is None else align_right(part, term.operand.axes) for part in found]
    return [
        None if part is None or own is None else replace(term, operand=Operand(part, own))
        for part, own in zip(found, axes, strict=True)
    ]


def _parts(node: fx.Node, dim: int, term: MaskTerm, sizes: Sequence[Size]) -> list[fx.Node | None] | None:
    """Return the parts that ``node`` joins along ``dim``; a part that hides nothing is None.

    Return None if ``node`` does not join one part per memory.
    """
    how = decode(node)
    if isinstance(how, (Copy, Expand)) and val(how.x).dtype == val(node).dtype:
        before = dim - (len(shape(node)) - len(shape(how.x)))
        kept = before >= 0 and same(shape(how.x)[before], shape(node)[dim])
        return _parts(how.x, before, term, sizes) if kept else None
    if isinstance(how, Join) and how.dim == dim:
        parts = [part for part in how.parts if not same(shape(part)[dim], 0)]
        return list(parts) if same_sizes([shape(part)[dim] for part in parts], sizes) else None
    x = _before_zeros(node, dim)
    hides = term.kind == "keep"  # a pad adds 0 or False, which hides keys in this kind of mask only
    return None if x is None or hides or len(sizes) != 2 or not same(shape(x)[dim], sizes[0]) else [x, None]


def _before_zeros(node: fx.Node, dim: int) -> fx.Node | None:
    """Return the tensor to which ``node`` adds zeros at the end of axis ``dim`` and nowhere else."""
    widths, behind = zero_widths(node) or (), 2 * (len(shape(node)) - 1 - dim) + 1
    others = [w for k, w in enumerate(widths) if k != behind]
    alone = len(widths) > behind and all(isinstance(w, int) and w == 0 for w in others)
    return args_of(node)[0] if alone else None
