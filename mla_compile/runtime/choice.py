"""Choose between an absorbed and an expanded compiled graph in each call, based on the input sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from mla_compile.core.program import Call, Inputs, Program
from mla_compile.passes.cost import cost, formulas
from mla_compile.passes.cost.cost import SiteCost
from mla_compile.passes.ir.sizes import UNSEEN, canonical, hint, size


def picker(program: Program, variants: Sequence[SiteCost]) -> Callable[[Inputs], bool]:
    """Return a function that tells whether absorbing all sites saves FLOPs for a call's inputs.

    Sizes that no input shows, for example computed sizes, are replaced by ``UNSEEN``.
    """
    gain = _gain(program, variants)
    found = {symbol: _reader(program, symbol) for symbol in sorted(gain.free_symbols, key=str)}
    readers = {symbol: read for symbol, read in found.items() if read is not None}
    gain = gain.subs(dict.fromkeys(found.keys() - readers.keys(), UNSEEN))
    # torch's printer knows the functions of its shape expressions (FloorDiv, Mod).
    code = compile(PythonPrinter().doprint(gain), "<multiply-adds saved>", "eval")
    named = {str(symbol): read for symbol, read in readers.items()}

    def absorbed_pays(inputs: Inputs) -> bool:
        return bool(eval(code, vars(math) | {"math": math}, {name: read(inputs) for name, read in named.items()}) > 0)

    return absorbed_pays


def pays_as_traced(program: Program, variants: Sequence[SiteCost]) -> bool:
    """Whether the absorbed form pays for the sizes with which the program was traced."""
    gain = _gain(program, variants).subs({size(n): hint(size(n), n) for _, _, n in _symbolic_inputs(program)})
    return bool(gain.subs(dict.fromkeys(gain.free_symbols, UNSEEN)) > 0)


def _gain(program: Program, variants: Sequence[SiteCost]) -> sympy.Expr:
    """Return the multiply-adds that absorption saves over all sites, as an expression in the graph's symbols."""
    gain = sympy.Integer(0)
    for site, count in Counter(variants).items():
        dims, sizes = site.dims, {formulas.S: site.S, formulas.T: site.T}
        for part in site.parts:
            gain += count * site.B * cost.part_gain(part).subs(sizes)
        if not site.parts:
            letters = {**sizes, **{getattr(formulas, name): getattr(dims, name) for name in "LNVRA"}}
            if site.chosen is not None:
                letters[formulas.J] = site.chosen
            form = "chained" if site.chosen is None else "sparse"
            gain += count * site.B * dims.H * formulas.absorption_gain(form).subs(letters)
    env = next((n.node.shape_env for _, _, n in _symbolic_inputs(program)), None)
    return canonical(gain, env)  # guards may have been added since the sizes were read


def _reader(program: Program, symbol: sympy.Symbol) -> Callable[[Inputs], int] | None:
    """Return a function that reads a symbol's value from the inputs; ``None`` if no input shows the symbol."""
    for index, axis, value in _symbolic_inputs(program):
        if size(value) == symbol:
            return lambda inputs: int(inputs[index] if axis is None else inputs[index].shape[axis])
    return None


def _symbolic_inputs(program: Program) -> list[tuple[int, int | None, torch.SymInt]]:
    """List the symbolic numbers and then the symbolic axes of input tensors.

    Each entry is the input's position, the axis (None for a number) and the value.
    """
    values = [node.meta["val"] for node in program.placeholders]
    found: list[tuple[int, int | None, Any]] = [(i, None, v) for i, v in enumerate(values)]
    tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    found += [(i, axis, n) for i, value in tensors for axis, n in enumerate(value.shape)]
    return [one for one in found if isinstance(one[2], torch.SymInt)]


def choose_by_call(pays: Callable[[Inputs], bool], absorbed: Call, expanded: Call) -> Call:
    """Return a callable that runs ``absorbed`` if ``pays(inputs)`` is true, and ``expanded`` otherwise."""

    def call(*inputs: object) -> object:
        return absorbed(*inputs) if pays(inputs) else expanded(*inputs)

    return call
