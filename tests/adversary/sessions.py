"""One tampered layer, optimized, through two sessions: every number is the original's, and rows take less memory.

The oracle is the module itself in float64: what it returns, and what is in its memory after every call. Nothing of
``passes`` is asked.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

import mla_compile
from mla_compile.errors import MlaCompileWarning
from mla_compile.runtime.latent import LatentTensor
from tests.adversary.buffers import TAMPERINGS, Mutant, Pair, Tampered
from tests.adversary.check import EXACT, THROUGH_FLOAT32, same_numbers
from tests.adversary.places import Refused
from tests.support.generated_own import visible


@torch.no_grad()
def check_buffers(mutant: Mutant) -> str:
    """``absorbed`` where all of K and V are rows, ``part`` or ``refused``.

    Raises AssertionError for a wrong number, for rows that are wider than K and V, and where a legal mutant is not
    absorbed; :class:`Refused` where the mutant does not run.
    """
    case, own = mutant.own.case, mutant.own
    tampering = TAMPERINGS[mutant.tampering]
    module = Pair(mutant) if tampering.stage == "layers" else Tampered(mutant)
    layer = Tampered(mutant)
    plain = copy.deepcopy(module)
    torch._dynamo.reset()
    # Two inputs that show one memory cannot be made functional: a failure that is only told, and the original runs.
    strict = tampering.stage != "layers"
    fast: Any = mla_compile.optimize(
        module, codegen="eager", strict=strict, forms="absorbed", fold=case.fold, lowering=case.lowering
    )
    allowed = max(tampering.allowed, THROUGH_FLOAT32 if case.softmax == "cast" else EXACT)
    generator = torch.Generator().manual_seed(case.seed)
    verdict = ""
    for number in range(2):
        done = 0
        for count in (case.T, *[1] * (case.steps if number == 0 else 1)):
            x = torch.randn(case.B, count, case.D, generator=generator, dtype=torch.float64)
            keep = visible(own, layer, done, count)
            where = f"after {done + count} tokens of session {number}"
            try:
                wanted = plain(x, done, keep)
            except (RuntimeError, IndexError) as error:
                raise Refused("it does not run") from error
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MlaCompileWarning)
                same_numbers(fast(x, done, keep), wanted, allowed, f"y {where}")
            held = fast.held()
            for k, (mine, theirs) in enumerate(zip(held, plain.held(), strict=True)):
                same_numbers(mine + 0, theirs, allowed, f"memory {k} {where}")
            rows = [c for c in held if isinstance(c, LatentTensor) and c.recipe is not None]
            takes = {id(row): row.numel() for cache in rows for row in cache.shown_rows()}
            assert not rows or sum(takes.values()) < sum(c.numel() for c in held), f"rows that save nothing {where}"
            done += count
            if isinstance(module, Pair) and mutant.calls != "always" and number == 0 and done == case.T:
                fast.tamper()
                plain.tamper()
        if number == 0:
            sites = {site.verdict for site in fast.mla_report.sites}
            verdict = "refused" if not rows else "absorbed" if len(rows) == len(held) else "part"
            if tampering.legal:
                said = [f"{site.verdict} ({site.code}): {site.reason}" for site in fast.mla_report.sites]
                # A row that no weight expands has no recipe where each of its columns has a factor.
                scaled = case.beside == "key" and case.key_scale in ("vector", "heads")
                assert verdict == "absorbed" or (scaled and verdict == "part"), f"a legal mutant is {verdict}: {said}"
                assert sites == {"absorbed"}, said
        for one in (fast, plain):
            one.empty()
    return verdict
