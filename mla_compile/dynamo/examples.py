"""Example inputs of rewritten programs, for code generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mla_compile.core.program import Inputs, Program
from mla_compile.passes.ir.sizes import hint
from mla_compile.runtime.latent_calls import example_in_order


def examples_of(
    program: Program, captured: Program, example_inputs: Inputs, layouts: Mapping[str, Sequence[int]]
) -> list[object]:
    """Return example inputs of a rewritten program: those of the captured program, and fake tensors for added inputs.

    ``layouts``: for each input that another graph made, the memory order of the input's axes.
    """
    given = {node.name: value for node, value in zip(captured.placeholders, example_inputs, strict=True)}
    grown = {one.input for one in program.appends if one.input is not None}
    for name in grown.intersection(given):
        del given[name]  # the program's input has more rows than the caller passes
    for node in program.placeholders:
        if (order := layouts.get(node.name)) is not None:
            given[node.name] = example_in_order(node.meta["val"], order)
    values = [given.get(node.name, node.meta["val"]) for node in program.placeholders]
    return [_as_sizes_say(v) for v in values] if grown else values


def _as_sizes_say(value: object) -> object:
    """Update the symbols of a symbolic number. Inductor does not know symbols that guards have replaced."""
    if not isinstance(value, torch.SymInt) or value.node.expr == value.node._expr:
        return value
    now: object = value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)
    return now


def layouts_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the memory order of axes (slowest first) of each rows tensor that a program only reads.

    Another graph made these rows. If that graph left spare capacity, the rows are stored token by token.
    """
    if program.cache is None:
        return {}
    grown = {one.input for one in program.appends} | {row for rows in program.cache.written.values() for row in rows}
    found: dict[str, tuple[int, ...]] = {}
    for name, rows in program.cache.inputs.items():
        if grown.issuperset(rows):
            continue
        for row, given in zip(rows, program.capture.latents[name].shown_rows(), strict=True):
            if row not in grown:
                order = sorted((-hint(stride, stride), dim) for dim, stride in enumerate(given.stride()))
                found[row] = tuple(dim for _, dim in order)
    return found
