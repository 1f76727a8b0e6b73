"""Stand-ins: plain operators that represent operators of libraries while the passes run."""

from __future__ import annotations

from mla_compile.analysis import weights_of
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.fused.read import add_plain_attention, has_fused
from mla_compile.passes.ir.stand_in import settle
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.read import add_stand_ins, is_quantized


def with_stand_ins(program: Program, options: Options) -> Program:
    """A copy in which plain operators stand in for operators of libraries, or the program itself if it has none."""
    fused, quantized = has_fused(program.gm.graph), is_quantized(program.gm.graph)
    if not fused and not quantized:
        return program
    copied = program.copy()
    added = add_plain_attention(copied.gm.graph, copied.fake_mode) if fused else 0
    exact = options.quantized == "exact"
    if quantized:
        added += add_stand_ins(copied.gm.graph, weights_of(copied), copied.fake_mode, exact=exact)
    return copied if added or fused or exact else program


def settled(program: Program) -> Program:
    """The program with the library operators restored where they are still needed."""
    settle(program.gm.graph)
    remove_dead_code(program.gm.graph)
    program.gm.recompile()
    return program
