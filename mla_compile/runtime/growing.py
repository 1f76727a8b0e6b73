"""Code that runs around a compiled graph that appends to caches. It provides memory for new rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mla_compile.core.program import Call, Program
from mla_compile.runtime.appending import length_marker, room_for
from mla_compile.runtime.shared_rows import RankRows


def with_room(call: Call, program: Program) -> Call:
    """Wrap a program that appends in place. The wrapper takes old rows and returns one tensor of old and new rows.

    A cache's first rows (or this rank's share) are moved to memory with spare capacity. Rows that ranks share are
    received as :class:`RankRows`. A program that does not append to shared rows is given all rows. If the program
    writes to shared rows in another way, each rank stores its share of the result.
    """
    mark, sharing = length_marker(), program.capture.sharing
    position = {node.name: index for index, node in enumerate(program.placeholders)}
    returned = [(one.output, one) for one in program.appends if one.output is not None]
    places = [
        (None if one.input is None else position[one.input], output, one)
        for output, one in sorted(returned, key=lambda pair: pair[0])
    ]
    own = [position[one.input] for one in program.appends if one.output is None and one.input is not None]
    whole = {position[name]: name for name in program.capture.shared - {one.input for one in program.appends}}
    # Marking a tensor makes Dynamo recompile code that reads the tensor. If the graph is already compiled for any
    # length, no mark is needed.
    inserted = [output for at, output, _ in places if at is not None]
    marked = {
        output
        for at, output, one in places
        if one.grows and not _is_open(_shown(program, at, output - sum(o < output for o in inserted)), one.axis)
    }
    # Dynamo keeps this closure alive, so it must not refer to the program, which holds the weights.
    shown, mutated = {*program.aliases.values()}, {*program.mutations}

    def around(*inputs: Any) -> object:
        given = list(inputs)
        written: list[tuple[RankRows, torch.Tensor]] = []
        for index in sorted(whole):
            rows = given[index]
            if isinstance(rows, RankRows):
                given[index] = rows.full_tensor()
                if whole[index] in shown:
                    rows.refuse("a graph writes to it and returns a view of it")
                if whole[index] in mutated:
                    written.append((rows, given[index]))
        for index in own:
            given[index] = given[index].buffer()
        grown: dict[int, RankRows] = {}
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
        for at, output, one in places:  # in the order of outputs, because an insertion shifts later outputs
            if at is not None:
                results.insert(output, grown.get(at, given[at]))
            elif one.shared:
                assert sharing is not None
                if one.total:
                    results[output] = RankRows.made_of(results[output], one.axis, one.total, sharing, grows=False)
                else:
                    results[output] = RankRows.of(results[output], one.axis, sharing, grows=one.grows)
            else:
                results[output] = room_for(results[output], one.axis, 0)
            if output in marked:
                mark(results[output], one.axis)
        return results

    return around


def _shown(program: Program, at: int | None, output: int) -> object:
    """Return a cache's fake value, from input ``at``, or from ``output`` if ``at`` is None."""
    node = program.outputs[output] if at is None else program.placeholders[at]
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _is_open(value: object, axis: int) -> bool:
    """Whether a graph is compiled for any length of the fake ``value`` along ``axis``."""
    return isinstance(value, torch.Tensor) and isinstance(value.shape[axis], torch.SymInt)
