"""Runs the passes, :data:`PASSES`, in order over one captured program.

All passes have one shape. The pipeline times each of them, lints its graph and checks its metadata. Three rules
determine the order:

* Canonicalisation comes first, so that analyses see one spelling of each operator.
* All decisions come before all rewrites. An analysis never edits the graph: rows that no node holds are virtual
  sources, and what only a trial can decide (heads in groups) is tried on a copy, which is kept if it is better.
* Rewrites come last, and apply decisions only. ``verify`` compares with the captured graph, and runs before rewrites
  that replace the inputs of its checks (folding, narrowing of up-projections).

The input program is never changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mla_compile.caching import with_latent_cache
from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord
from mla_compile.errors import MlaCompileError, VerificationError
from mla_compile.options import Options
from mla_compile.pass_state import Outcome, PassState
from mla_compile.pass_table import PASSES, Pass
from mla_compile.passes.ir.collectives import collectives
from mla_compile.passes.ir.expr import evaluated_once
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.stand_ins import settled, with_stand_ins


class PassError(MlaCompileError, RuntimeError):
    """A pass left an invalid graph: a bug of this library, found before the graph ran."""


def run(
    program: Program,
    options: Options,
    name: str = "",
    *,
    frozen: bool = False,
    own_cache: bool = False,
    draw: bool = False,
    recompiles: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Rewrite a copy of ``program`` as far as that is proved correct and pays.

    ``frozen``: the result goes into a file. Its weights will not change any more, so that folding them costs nothing in
    a call, and the kernels that will run it are not known here. ``own_cache``: with ``cache="latent"``, inputs that
    hold K and V are assumed to come from the program itself. ``draw``: the report keeps a drawing of each attention.
    ``recompiles``: the caller of the result checks its size guards and recompiles where they fail. ``refused``:
    attentions that other ranks do not absorb, with the reason.

    With ``options.verify`` every distinct rewritten site is compared with the original in float64; a site that fails is
    left as it was (``options.strict``: raises :class:`VerificationError`).
    """
    with evaluated_once(program.fake_mode):
        start = time.perf_counter()
        plain = with_stand_ins(program, options)
        packs = options.cache_dtype == "fp8"
        base, read = (
            with_latent_cache(plain, assume=own_cache, packs=packs) if options.cache == "latent" else (plain, None)
        )
        kept = PassRecord("latent_cache", len(base.cache.recipes) if base.cache else 0, time.perf_counter() - start)
        before = (PassRecord("capture", 0, program.seconds), kept)
        # A failed site may have prevented another from being absorbed, or been absorbed together with it, so everything
        # is decided again without it. The loop ends because every round adds a site.
        failed = {name: (Code.RANKS_DIFFER, why) for name, why in refused.items()}
        while True:
            state = PassState(base, options, failed, read, frozen=frozen, draw=draw, recompiles=recompiles)
            read = None  # the passes rewrite the copy that it analysed
            for one in PASSES:
                _apply(one, state)
            new = {node: check.problem for node, check in state.checks.items() if check.problem is not None}
            if not new:
                done = state.outcome(name, before)
                _check_collectives(program, done)
                if plain is program:
                    return done
                return replace(done, base=program if base is plain else settled(base))
            if options.strict:
                raise VerificationError(f"a rewritten attention {next(iter(new.values()))}; it was not used")
            failed.update((name, (Code.VERIFY_FAILED, problem)) for name, problem in new.items())


def _apply(one: Pass, state: PassState) -> None:
    """Run a pass, record its time, and check the graph if the pass changed it."""
    start = time.perf_counter()
    changes = one.work(state)
    if changes and one.changes:
        _check(one, state.program)
    state.records.append(PassRecord(one.name, changes if one.changes else 0, time.perf_counter() - start))


def _check(one: Pass, program: Program) -> None:
    """Lint the graph and look for new nodes without metadata; torch leaves some of its own without."""
    try:
        program.gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the pass {one.name} left an invalid graph: {error}") from error
    new = (n for n in program.gm.graph.nodes if n.op == "call_function" and ORIGIN not in n.meta)
    bare = [n.name for n in new if "val" not in n.meta]
    if bare:
        raise PassError(f"the pass {one.name} left nodes without metadata: {', '.join(bare)}")


def _check_collectives(program: Program, done: Outcome) -> None:
    """Check that the collectives are unchanged: another rank may run another form and would wait for a missing one."""
    before = collectives(program.gm.graph)
    for after in (done.program, done.base, done.long):
        if collectives(after.gm.graph) != before:
            raise PassError(f"the passes changed the {len(before)} collectives of the graph: ranks would hang")
