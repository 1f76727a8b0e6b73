"""Share one schedule between attentions on a GPU, so that the tiles of a mask are listed once per graph.

Before, for every layer i::

    mask_i = unsqueeze(mask, 1)                                                 # the same in all layers
    out_i, lse_i = mla_compile.decode_attention(q_i, c_i, r_i, None, mask_i)    # lists the tiles of mask_i, every time

After::

    schedule = mla_compile.decode_schedule(q_0, c_0, r_0, None, mask_0)
    out_i, lse_i = mla_compile.decode_attention(q_i, c_i, r_i, None, mask_0, schedule=schedule)

Attentions without a mask need no schedule. Rewritten attentions read contiguous caches, and the lengths of contiguous
caches need no preparation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile import ops
from mla_compile.passes.ir.graph import Builder, is_tensor, packet, shape, val
from mla_compile.passes.ir.walk import first_equals, remove_dead_code

_ARGUMENTS = [argument.name for argument in ops.decode_attention._schema.arguments]
# A schedule depends on the values of these arguments. For other tensors, only shape, dtype and device matter.
_READ = ("mask", "seq_lens")
_APART = ("scale", "sinks")  # a schedule does not depend on these


def share_schedules(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Give a common schedule to attentions that need the same preparation; return the number of schedules."""
    nodes = [n for n in graph.nodes if packet(n) is torch.ops.mla_compile.decode_attention and _prepares(n)]
    if len(nodes) < 2:
        return 0
    first = first_equals(graph)
    groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        groups[_depends_on(node, first)].append(node)
    shared = [group for group in groups.values() if len(group) > 1]
    for group in shared:
        _share(group, first, fake_mode)
    remove_dead_code(graph)
    return len(shared)


def _arguments(node: fx.Node) -> dict[str, object]:
    """Return the arguments of ``node`` that are not None, by name."""
    given = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    return {name: value for name, value in given.items() if value is not None}


def _prepares(node: fx.Node) -> bool:
    given = _arguments(node)
    query = given["query"]
    return is_tensor(query) and val(query).device.type == "cuda" and "mask" in given and "schedule" not in given


def _depends_on(node: fx.Node, first: dict[fx.Node, fx.Node]) -> Hashable:
    """Return a key that is equal for attentions that need the same preparation."""

    def told(name: str, value: object) -> object:
        if not is_tensor(value):
            return value
        return first[value] if name in _READ else (val(value).dtype, shape(value), val(value).device)

    given = _arguments(node)
    return tuple((name, told(name, given[name])) for name in sorted(given.keys() - {*_APART}))


def _share(group: list[fx.Node], first: dict[fx.Node, fx.Node], fake_mode: FakeTensorMode | None) -> None:
    for node in group:
        # All readers get the same tensor, because the compiler may lay out equal tensors in different ways.
        for name, value in _arguments(node).items():
            if name in _READ and isinstance(value, fx.Node):
                node.replace_input_with(value, first[value])
    builder = Builder(group[0], fake_mode)
    schedule = builder.call(ops.decode_schedule, **_arguments(group[0]))
    for node in group:
        node.update_kwarg("schedule", schedule)
