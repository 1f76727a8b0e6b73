"""Passes over the caches of a rewritten program: rows that ranks share, and rows that are appended in place."""

from __future__ import annotations

from mla_compile.codes import Code
from mla_compile.passes.cache.append import append_in_place
from mla_compile.passes.cache.share import grown_rows, share_rows
from mla_compile.pipeline.state import PassState

_UNSHARED = "ranks no longer share the rows of this cache; each rank has all rows from now on: {problem}"
_GATHERED = "the rows of a cache that ranks share are gathered in every call of this graph: {problem}"
_NOT_SHARED = (
    "context_parallel: each rank has all rows of this cache. Ranks share the rows of a cache only if it began in a "
    "call of this model, grows by cat or is written in place, and holds the rows themselves"
)
_NOT_ONE_FORM = "no attention is absorbed in every call"


def share(state: PassState) -> int:
    """Rewrite attention to read this rank's rows, if the rows of all caches that ranks share allow it."""
    program = state.program
    if not program.shared:
        return 0
    problem = share_rows(program) if _one_form(state) else _NOT_ONE_FORM
    several = any(v.by_call for v in state.chosen)
    if problem is None:
        return sum(one.shared for one in program.appends)
    buffers = program.shared.intersection(program.mutations)
    if several:
        state.shared |= grown_rows(program)  # a prompt: ranks share its rows after the call
    elif program.shared - buffers:
        state.warnings += (_UNSHARED.format(problem=problem),)
    if buffers and not several and not _is_prompt(state):
        state.warnings += (_GATHERED.format(problem=problem),)
    return 0


def _is_prompt(state: PassState) -> bool:
    """Whether a call has more queries than absorbing pays for."""
    codes = {v.code for v in state.verdicts if v.plan is not None}
    return codes == {Code.COST_PREFILL}


def _one_form(state: PassState) -> bool:
    return bool(state.rewritten) and _in_one_form(state)


def _in_one_form(state: PassState) -> bool:
    return bool(state.rewritten or state.fused) and not any(v.by_call for v in state.chosen)


def append(state: PassState) -> int:
    """Write new rows in place behind the old ones."""
    attended = state.fused or any(v.plan is not None for v in state.verdicts)
    if state.options.appends != "in_place" or not attended:
        return 0
    # If two programs run on the same inputs, either both append in place or neither does.
    count = append_in_place(state.program, rewrite=_in_one_form(state), shared=state.shared)
    if state.program.sharing is not None and _one_form(state):
        shared = state.program.shared or any(one.shared for one in state.program.appends)
        state.warnings += () if shared else (_NOT_SHARED,)
    return count
