"""Run the passes of :data:`~mla_compile.pipeline.table.PASSES` in order over one captured program.

Three rules determine the order:

* Canonicalisation comes first, so that analyses see one spelling of each operator.
* All decisions come before all rewrites. An analysis never edits the graph: rows that no node holds are virtual
  sources. Caches of rows and heads in groups are tried on a copy. If the copy is better, it replaces the program.
* Rewrites come last, and only apply decisions. ``verify`` compares the rewritten graph with the graph before the
  rewrites. Folding and narrowing come after ``verify``, because they replace tensors that its checks read.

The input program is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord
from mla_compile.errors import VerificationError
from mla_compile.options import Options
from mla_compile.passes.ir.expr import evaluated_once
from mla_compile.pipeline.manager import run_passes
from mla_compile.pipeline.outcome import Outcome, outcome_of
from mla_compile.pipeline.state import PassRequest, PassState
from mla_compile.pipeline.table import PASSES


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
    """Rewrite a copy of ``program`` where this is proved correct and pays.

    Args:
        frozen: the result is written to a file. Its weights will not change, so folding costs nothing in a call. The
            kernels that will run the file are unknown.
        own_cache: if ``cache="latent"``, inputs that hold K and V are assumed to be earlier results of the program.
        draw: the report keeps a drawing of each attention.
        recompiles: the caller checks size guards, and recompiles if a guard fails.
        refused: attentions that other ranks do not absorb, with the reason.

    If ``options.verify``, every distinct rewritten site is compared with the original in float64. If a site fails, the
    original stays. If ``options.strict``, a failed site raises :class:`VerificationError` instead.
    """
    request = PassRequest(options, frozen=frozen, own_cache=own_cache, draw=draw, recompiles=recompiles)
    failed = {name: (Code.RANKS_DIFFER, why) for name, why in refused.items()}
    with evaluated_once(program.fake_mode):
        state = PassState.begin(request, program, failed)
        state.records.append(PassRecord("capture", 0, program.capture.seconds))
        run_passes(PASSES, state)
        # A failed site may have influenced the decision on other sites. So everything is decided again without the
        # failed sites. The loop ends because every round adds a failed site.
        while new := {node: check.problem for node, check in state.checks.items() if check.problem is not None}:
            if options.strict:
                raise VerificationError(f"a rewritten attention {next(iter(new.values()))}; it was not used")
            failed.update((name, (Code.VERIFY_FAILED, problem)) for name, problem in new.items())
            prepared = {one.name for one in PASSES if one.once}
            state, before = PassState.begin(request, program, failed, state.base), state.records
            state.records += [r for r in before if r.name == "capture" or r.name in prepared]
            run_passes((one for one in PASSES if not one.once), state)
        return outcome_of(state, name)
