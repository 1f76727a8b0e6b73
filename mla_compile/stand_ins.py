"""The steps around all passes where products are quantized: plain operators stand for them while the passes reason."""

from __future__ import annotations

from mla_compile.analysis import weights_of
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.read import add_stand_ins, is_quantized


def with_stand_ins(program: Program, options: Options) -> Program:
    """A copy in which plain operators stand for quantized ones; the program itself where there are none."""
    if not is_quantized(program.gm.graph):
        return program
    copied = program.copy()
    exact = options.quantized == "exact"
    added = add_stand_ins(copied.gm.graph, weights_of(copied), copied.fake_mode, exact=exact)
    return copied if added or exact else program


def settled(program: Program) -> Program:
    """The program, with the quantized operators back where they are still needed."""
    settle(program.gm.graph)
    remove_dead_code(program.gm.graph)
    program.gm.recompile()
    return program
