"""What runs around a compiled graph that appends to caches: room for new rows, and each rank's share of them."""

from __future__ import annotations

from typing import Any

from mla_compile.core.program import Call, Program
from mla_compile.runtime.appending import length_marker, room_for
from mla_compile.runtime.shared_rows import SharedRows


def with_room(call: Call, program: Program) -> Call:
    """A callable that takes the rows and returns them joined with the new ones, around one that appends in place.

    Where a cache begins, its rows are moved to memory with room, or this rank's share of them is. Rows that ranks share
    come as :class:`SharedRows`; a program that does not append to this rank's is given all of them.
    """
    mark, sharing = length_marker(), program.sharing
    position = {node.name: index for index, node in enumerate(program.placeholders)}
    appends = sorted(program.appends, key=lambda one: one.output)
    places = [(None if one.input is None else position[one.input], one) for one in appends]
    whole = sorted(position[name] for name in program.shared - {one.input for one in appends})

    def around(*inputs: Any) -> Any:
        given = list(inputs)
        for index in whole:
            if isinstance(given[index], SharedRows):
                given[index] = given[index].full_tensor()
        grown: dict[int, SharedRows] = {}
        for at, one in places:
            if at is None:
                continue
            if one.shared:
                grown[at] = given[at].grown(one.count)
                given[at] = grown[at].local
            else:
                given[at] = room_for(given[at], one.axis, one.count)
        results = list(call(*given))
        for at, one in places:  # in the order of the outputs, so that each finds those before it filled
            if at is not None:
                results.insert(one.output, grown.get(at, given[at]))
            elif one.shared:
                assert sharing is not None
                results[one.output] = SharedRows.of(results[one.output], one.axis, sharing)
            else:
                results[one.output] = room_for(results[one.output], one.axis, 0)
            mark(results[one.output], one.axis)
        return results

    return around
