"""Remove operators that do not matter to the analysis, and simplify others.

Before::

    _assert_tensor_metadata(x, None, None, float32)      # a check that tracing left behind
    y = detach(x); z = dropout(y, 0.1, False)

After: the users of ``y`` and ``z`` read ``x``, and the check is removed, because Dynamo's guards cover the check.
Operators whose result the graph returns stay.

Before: ``new = slice_scatter(k, copy(part_of_k, x), dim, a, b)``, the trace of ``k[..., a:b] = x``

After: ``new = slice_scatter(k, x, dim, a, b)``, which does not read the overwritten part; or ``x``, if ``x`` covers all
of ``k``

Before: ``k = select(stack([q, k, v], dim), dim, 1)``, which unpacks the packed operands of an attention

After: ``k`` itself, in the memory layout of the selection

Before: ``new = index_put(k, [None, None, at], view(x, x.shape[1:]))``, if the first axis has size 1

After: ``new = index_put(k, [None, None, at], unsqueeze(view(x, ...), 0))``, with all axes of ``k``

Before: ``new = select_scatter(k, x, dim, at)``, if no other position of the buffer ``k`` is written

After: ``new = slice_scatter(k, unsqueeze(x, dim), dim, at, at + 1)``, the form in which rows are written

Before: ``zero(k)``; ``fill(k, lift_fresh_copy(constant))``, the traces of ``k.zero_()`` and ``k[:] = 0``

After: ``zeros_like(k)``; ``full_like(k, 0.0)``, which do not read the overwritten values

Before: ``ones_like(k)``; ``k.new_empty(size)``; ``type_as(q, k)``, if the graph computes ``k``

After: ``full(k's sizes, 1)``; ``empty(size)``; ``_to_copy(q, dtype)``, which do not need the values of ``k``
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import Builder, args_of, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Assign, Dropout, Expand, Fill, Select, Slice, Stack, Write, WriteOne, WriteRows
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same_sizes
from mla_compile.passes.ir.walk import length_behind

aten = torch.ops.aten


def normalize(graph: fx.Graph, fake_mode: FakeTensorMode | None = None) -> int:
    """Apply the rewrites above; return how many nodes were removed."""
    removed = 0
    for node in list(graph.nodes):
        if (number := _filled_with(node)) is not None:
            like = Builder(node, fake_mode).call(aten.full_like.default, args_of(node)[0], number)
            node.replace_all_uses_with(like)
        elif (told := _told(node, fake_mode)) is not None:
            node.replace_all_uses_with(told)
        elif _is_empty(node):
            node.replace_all_uses_with(args_of(node)[0])
        elif _is_write_of_all(node) or _is_write_over_all(node):
            node.replace_all_uses_with(args_of(node)[1])
        elif (part := _stacked_part(node)) is not None:
            node.replace_all_uses_with(same_layout(Builder(node, fake_mode), part, node))
        elif (write := _write_of_slice(node, fake_mode)) is not None:
            node.replace_all_uses_with(write)
        elif packet(node) is aten.index_put:
            _write_all_axes(node, fake_mode)
            continue
        elif packet(node) is not aten._assert_tensor_metadata:
            continue
        graph.erase_node(node)
        removed += 1
    return removed


def _told(node: fx.Node, fake_mode: FakeTensorMode | None) -> fx.Node | None:
    """Rewrite ``node`` without an operand that only gives a dtype, device or sizes; None if there is none."""
    op, given = packet(node), args_of(node)
    converts = op is aten.type_as or (op is aten.to and len(given) > 1 and is_tensor(given[1]))
    asked = given[1] if converts else given[0] if op in (*_LIKE, *_NEW) else None
    if asked is None or not _is_computed(asked) or node.kwargs.get("pin_memory"):
        return None
    builder, made = Builder(node, fake_mode), val(node)
    if converts:
        same = val(given[0]).device == made.device and len(given) == 2 and not node.kwargs and not _is_returned(node)
        return builder.cast(given[0], made.dtype) if same else None
    if made.layout is not torch.strided:
        return None
    sizes = given[1] if op in _NEW else [length_behind(builder, asked, dim) for dim in range(made.dim())]
    value = {**_LIKE, **_NEW}[op]
    new = builder.filled(sizes, given[-1] if value is _LAST else value, node)
    return same_layout(builder, new, node)


_LAST = object()
_LIKE = {aten.zeros_like: 0, aten.ones_like: 1, aten.full_like: _LAST, aten.empty_like: None}
_NEW = {aten.new_zeros: 0, aten.new_ones: 1, aten.new_full: _LAST, aten.new_empty: None}
"""Operators that create a tensor like another tensor, and the fill value: a number, the last argument, or None."""


def _is_computed(node: fx.Node) -> bool:
    """Whether the graph computes ``node``.

    Inputs and attributes are not computed, nor are views of them and writes into them. A model may clear a buffer with
    ``zeros_like(buffer)``, so operators that read an input's sizes stay unchanged.
    """
    while node.op == "call_function" and (how := decode(node)) is not None:
        if isinstance(how, (Write, WriteOne, WriteRows)):
            node = how.base
        elif isinstance(x := getattr(how, "x", None), fx.Node):
            node = x
        else:
            break
    return node.op == "call_function"


def _stacked_part(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``node`` selects from a stack; None for other operators."""
    how = decode(node)
    stacked = decode(how.x) if isinstance(how, Select) else None
    if not isinstance(how, Select) or not isinstance(stacked, Stack) or _is_returned(node):
        return None
    if how.index is None or how.dim != stacked.dim:
        return None
    part = stacked.parts[how.index]
    return part if val(part).dtype == val(node).dtype else None


def _is_write_of_all(node: fx.Node) -> bool:
    """Whether ``node`` is a ``copy(part, x)`` that equals ``x`` and is only written into a larger tensor."""
    how = decode(node)
    if not isinstance(how, Assign) or not all(_writes(node, decode(user)) for user in node.users):
        return False
    old, new = val(how.x), val(node)
    # If one of these differs, the `copy` also converts, moves or broadcasts, and has to stay.
    return old.dtype == new.dtype and old.device == new.device and same_sizes(shape(how.x), shape(node))


def _is_write_over_all(node: fx.Node) -> bool:
    """Whether ``node`` writes the result of another write over a whole tensor, as for ``k[:B]`` if k has length B."""
    how = decode(node)
    if not isinstance(how, Write) or not isinstance(decode(how.x), (Write, WriteRows)):
        return False
    alike = val(how.x).dtype == val(node).dtype and val(how.x).stride() == val(node).stride()
    # If the sizes are equal, all positions are written, even if the bounds are symbolic.
    return alike and same_sizes(shape(how.x), shape(node))


def _write_of_slice(node: fx.Node, fake_mode: FakeTensorMode | None) -> fx.Node | None:
    """Rewrite a write of one position as a write of a slice.

    Return None if the position may be negative, or if other positions of the axis are written too, as for heads.
    """
    how = decode(node)
    if (
        not isinstance(how, WriteOne)
        or _is_computed(how.base)
        or isinstance(decode(how.x), (Write, WriteOne, WriteRows))
    ):
        return None
    others = map(decode, (how.base, *node.users))
    if any(isinstance(one, WriteOne) and one.dim == how.dim for one in others):
        return None
    at = args_of(node)[3] if how.index is None else how.index
    number = at.meta["val"] if isinstance(at, fx.Node) else at
    if not statically_known_true(number >= 0):  # a slice for the last position, -1, would end at 0 and be empty
        return None
    builder = Builder(node, fake_mode)
    end = builder.call(operator.add, at, 1) if isinstance(at, fx.Node) else at + 1
    return builder.call(
        aten.slice_scatter.default, how.base, builder.call(aten.unsqueeze.default, how.x, how.dim), how.dim, at, end
    )


def _write_all_axes(node: fx.Node, fake_mode: FakeTensorMode | None) -> None:
    """Give the written tensor the leading axes of size 1 that ``k[:, :, at] = x`` omits for a batch of one."""
    base, indices, x, *accumulate = args_of(node)
    at = [k for k, index in enumerate(indices) if index is not None]
    if any(val(indices[k]).dtype in (torch.bool, torch.uint8) for k in at):
        return  # how many rows a mask selects depends on its values
    chosen = [shape(indices[k]) for k in at]
    if at != [*range(at[0], at[0] + len(at))] or len({len(sizes) for sizes in chosen}) > 1:
        return
    found = [next((n for n in sizes if n != 1), 1) for sizes in zip(*chosen, strict=True)]
    wanted = [*shape(base)[: at[0]], *found, *shape(base)[at[-1] + 1 :]]
    missing = len(wanted) - len(shape(x))
    if missing > 0 and all(n == 1 for n in wanted[:missing]) and same_sizes(wanted[missing:], shape(x)):
        builder = Builder(node, fake_mode)
        for _ in range(missing):
            x = builder.call(aten.unsqueeze.default, x, 0)
        node.args = (base, indices, x, *accumulate)


def _filled_with(node: fx.Node) -> object:
    """Return the known number with which ``node`` overwrites a whole tensor; None if there is none."""
    how = decode(node)
    if packet(node) is aten.zero:
        return 0
    if isinstance(how, Assign) and isinstance(of := decode(how.x), Fill):
        return 0 if of.value == 0 else None  # 0 is exact in every dtype
    if packet(node) is not aten.fill:
        return None
    value = args_of(node)[1]
    return _literal(value) if isinstance(value, fx.Node) else value


def _literal(node: fx.Node) -> object:
    """Return the number in a tensor that was created from a literal during tracing."""
    if packet(node) is not aten.lift_fresh_copy or args_of(node)[0].op != "get_attr" or shape(node):
        return None
    owner: object = node.graph.owning_module
    for name in str(args_of(node)[0].target).split("."):
        owner = getattr(owner, name, None)
    return owner.item() if isinstance(owner, torch.Tensor) and not isinstance(owner, FakeTensor) else None


def _writes(x: fx.Node, user: object) -> bool:
    return isinstance(user, (Write, WriteOne)) and user.x is x and user.base is not x


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _is_empty(node: fx.Node) -> bool:
    """Whether ``node`` can be removed because it returns its input unchanged."""
    if packet(node) is aten.alias and (x := args_of(node)[0]).op == "call_function" and not _is_returned(x):
        return True  # nothing else refers to the aliased tensor
    # A returned result must stay a separate tensor: without the operator, the caller would get the input itself.
    if _is_returned(node):
        return False
    if packet(node) in (aten.detach, aten.alias):
        return True
    how = decode(node)
    if isinstance(how, Dropout):
        # `native_dropout` is read through a `getitem`, whose first argument is a tuple and not `x`.
        return not how.active and packet(node) is aten.dropout
    if packet(node) not in (aten.expand, aten.slice) or not isinstance(how, (Expand, Slice)):
        return False
    # The strides have to agree too, because later views were traced with the strides of the result.
    return same_sizes(shape(how.x), shape(node)) and bool(val(how.x).stride() == val(node).stride())
