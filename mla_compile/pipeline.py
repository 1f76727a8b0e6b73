"""The passes, in order, over one captured program: :data:`PASSES`.

Every pass is one object of one shape; each is timed, and its graph linted and its metadata checked, in the same way.
Three rules make the order:

* spelling first: what reads operators reads one spelling of each;
* then everything is decided before anything is changed. An analysis never edits: rows that no node holds are virtual
  sources, and what can only be told by trying (heads in groups) is tried on a copy, of which the better is kept;
* rewrites last, and only of what was decided. ``verify`` compares with the graph as it was captured, before rewrites
  that replace the inputs of its checks (folding, up-projections made narrower).

The program that comes in is never changed.
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
from mla_compile.pass_state import Outcome, State
from mla_compile.pass_table import PASSES, Pass
from mla_compile.passes.ir.collectives import collectives
from mla_compile.passes.ir.expr import evaluated_once
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.stand_ins import settled, with_stand_ins


class PassError(MlaCompileError, RuntimeError):
    """A pass left a graph that is not valid: a mistake of this library, found before anything was run."""


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
    """Rewrites a copy of ``program`` as far as it can be proved right and pays.

    ``frozen``: the result goes into a file. Its weights will not change any more, so that folding them costs nothing in
    a call, and which kernels run it is not known here. ``own_cache``: with
    ``cache="latent"``, inputs that hold K and V are taken to come from the program itself. ``draw``: the report keeps
    each attention as a drawing. ``recompiles``: whoever runs the result checks guards of its sizes, and compiles anew
    where they do not hold. ``refused``: attentions that other ranks do not absorb, and why.

    With ``options.verify`` every distinct rewritten site is compared with the original in float64; a site that fails is
    left as it was (``options.strict``: raises :class:`VerificationError`).
    """
    with evaluated_once(program.fake_mode):
        start = time.perf_counter()
        plain = with_stand_ins(program, options)
        packs = options.cache_dtype == "fp8"
        base, read = with_latent_cache(plain, own_cache, packs=packs) if options.cache == "latent" else (plain, None)
        kept = PassRecord("latent_cache", len(base.cache.recipes) if base.cache else 0, time.perf_counter() - start)
        before = (PassRecord("capture", 0, program.seconds), kept)
        # A failed site may have been what kept another from being absorbed, or absorbed with it: everything is decided
        # again without it. This ends, because every round adds a site.
        failed = {name: (Code.RANKS_DIFFER, why) for name, why in refused.items()}
        while True:
            state = State(base, options, frozen, failed, draw, recompiles, read)
            read = None  # the passes go on with its copy
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


def _apply(one: Pass, state: State) -> None:
    """Runs a pass, records how long it took, and checks the graph it leaves where it changed one."""
    start = time.perf_counter()
    changes = one.work(state)
    if changes and one.changes:
        _check(one, state.program)
    state.records.append(PassRecord(one.name, changes if one.changes else 0, time.perf_counter() - start))


def _check(one: Pass, program: Program) -> None:
    """Lints the graph and looks for new nodes without metadata; torch leaves some of its own without."""
    try:
        program.gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the pass {one.name} left an invalid graph: {error}") from error
    new = (n for n in program.gm.graph.nodes if n.op == "call_function" and ORIGIN not in n.meta)
    bare = [n.name for n in new if "val" not in n.meta]
    if bare:
        raise PassError(f"the pass {one.name} left nodes without metadata: {', '.join(bare)}")


def _check_collectives(program: Program, done: Outcome) -> None:
    """Other ranks may run another form of the graph, and wait for what this one sends."""
    before = collectives(program.gm.graph)
    for after in (done.program, done.base, done.long):
        if collectives(after.gm.graph) != before:
            raise PassError(f"the graph has {len(before)} collectives, and others after the passes: ranks would hang")
