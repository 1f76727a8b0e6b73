"""What runs around a compiled graph that appends to caches: room for new rows, and each rank's share of them."""

from __future__ import annotations

from typing import Any

import torch

from mla_compile.core.program import Call, Program
from mla_compile.runtime.appending import length_marker, room_for
from mla_compile.runtime.shared_rows import SharedRows


def with_room(call: Call, program: Program) -> Call:
    """A callable that takes the rows and returns them joined with the new ones, around one that appends in place.

    Where a cache begins, its rows are moved to memory with room, or this rank's share of them is. Rows that ranks share
    come as :class:`SharedRows`; a program that does not append to this rank's is given all of them, and where it writes
    to these, each rank keeps its share of what is there then.
    """
    mark, sharing = length_marker(), program.sharing
    position = {node.name: index for index, node in enumerate(program.placeholders)}
    returned = [(one.output, one) for one in program.appends if one.output is not None]
    places = [
        (None if one.input is None else position[one.input], output, one)
        for output, one in sorted(returned, key=lambda pair: pair[0])
    ]
    own = [position[one.input] for one in program.appends if one.output is None and one.input is not None]
    whole = {position[name]: name for name in program.shared - {one.input for one in program.appends}}
    # Not the program itself, which has the weights: what Dynamo keeps of a call would keep them, too.
    shown, mutated = {*program.aliases.values()}, {*program.mutations}

    def around(*inputs: Any) -> Any:
        given = list(inputs)
        written: list[tuple[SharedRows, torch.Tensor]] = []
        for index in sorted(whole):
            rows = given[index]
            if isinstance(rows, SharedRows):
                given[index] = rows.full_tensor()
                if whole[index] in shown:
                    rows.refuse("a graph writes to it and returns a view of it")
                if whole[index] in mutated:
                    written.append((rows, given[index]))
        for index in own:
            given[index] = given[index].buffer()
        grown: dict[int, SharedRows] = {}
        for at, _, one in places:
            if at is None:
                continue
            if one.shared:
                grown[at] = given[at].grown(one.count)
                given[at] = grown[at].local
            else:
                given[at] = room_for(given[at], one.axis, one.count)
        results = list(call(*given))
        for rows, full in written:
            rows.write(full)
        for at, output, one in places:  # in the order of the outputs, so that each finds those before it filled
            if at is not None:
                results.insert(output, grown.get(at, given[at]))
            elif one.shared:
                assert sharing is not None
                if one.total:
                    results[output] = SharedRows.made_of(results[output], one.axis, one.total, sharing, grows=False)
                else:
                    results[output] = SharedRows.of(results[output], one.axis, sharing, grows=one.grows)
            else:
                results[output] = room_for(results[output], one.axis, 0)
            if one.grows:
                mark(results[output], one.axis)
        return results

    return around
