"""Trace a decode step and a piece of a prompt for all sizes, and rewrite both."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mla_compile import pipeline
from mla_compile.batching.table import FIND, TIDY, PagesState
from mla_compile.capture import capture
from mla_compile.capture.autocast import without_autocast
from mla_compile.capture.causal_lm import CausalLM
from mla_compile.capture.causal_step import export_step
from mla_compile.capture.dtensors import shared_weight
from mla_compile.core.program import Program
from mla_compile.core.sharing import Sharing
from mla_compile.dynamo.ranks import Meeting, sharing_of_model
from mla_compile.dynamo.step import trace_step
from mla_compile.errors import CaptureError, MlaCompileError, warn
from mla_compile.options import Options
from mla_compile.passes.cache.pages import PagedRows, not_shared
from mla_compile.pipeline.manager import Analyses, run_passes
from mla_compile.pipeline.outcome import Outcome
from mla_compile.report.report import count_sites

logger = logging.getLogger("mla_compile")


class NotMlaError(MlaCompileError, TypeError):
    """The model has no latent attention to absorb."""


@dataclass(frozen=True)
class Traced:
    """The rewritten graphs for a decode step and a prompt piece, the caches, and how ranks share cache rows."""

    decode: Outcome
    prompt: Outcome
    rows: tuple[PagedRows, ...]
    sharing: Sharing | None


def trace(lm: CausalLM, options: Options, ranks: Meeting | None) -> Traced:
    """Trace and rewrite both graphs of ``lm``. All ``ranks`` make the same decisions.

    Raises :class:`NotMlaError` for a model without latent attention, and :class:`CaptureError` for a model whose steps
    cannot run over pages.
    """
    with without_autocast():
        decode = _rewritten(lm, options, ranks, one_token=True)
        if not decode.absorbed:
            reasons = dict.fromkeys(f"{site.code}: {site.reason}" for site in decode.report.sites)
            told = "; ".join(reasons) or "no attention was found"
            if not any(site.latent for site in decode.report.sites):
                raise NotMlaError(f"{type(lm.model).__name__} has no latent attention to absorb ({told})")
            raise CaptureError(f"no attention of {type(lm.model).__name__} can be decoded in absorbed form: {told}")
        run_passes(FIND, found := PagesState(Analyses(decode.program), lm))
        sharing = _shared(lm, options, ranks, decode.program, found.rows)
        return Traced(decode, _rewritten(lm, options, ranks, one_token=False), found.rows, sharing)


def _shared(
    lm: CausalLM, options: Options, ranks: Meeting | None, program: Program, rows: Sequence[PagedRows]
) -> Sharing | None:
    """Return how the ranks of ``options.context_parallel`` share pages, or None. Warn if sharing is impossible."""
    sharing = sharing_of_model(lm.model, options)
    if sharing is None:
        return None
    if (why := not_shared(rows)) is not None:
        told = f"context_parallel: each rank has all rows of {type(lm.model).__name__} in its pages: {why}"
        warn(told)
        return None
    if ranks is not None and not sharing.heads:
        sharing = replace(sharing, heads=not ranks.alike(program, sharing.ranks))
    return sharing


def _rewritten(lm: CausalLM, options: Options, ranks: Meeting | None, *, one_token: bool) -> Outcome:
    if shared_weight(lm.model) is None:
        program = capture.from_exported(export_step(lm, one_token=one_token))
    else:
        program = trace_step(lm, one_token=one_token)
    own = replace(options, cache_dtype="model")
    if one_token:
        # The decode step must read rows in place, even if this costs more at the traced sizes. The step runs on this
        # machine, so native products are possible.
        products = "native" if options.products == "auto" else options.products
        own = replace(own, forms="absorbed", products=products)
    name, left = "a decode step" if one_token else "a piece of a prompt", dict[str, str]()
    done = pipeline.run(program, own, name)
    while ranks is not None and (more := ranks.refused(done)) is not None:
        left |= more
        done = pipeline.run(program, own, name, refused=left)
    logger.info("%s", done.report.summary())
    count_sites(done.report)
    for one in (done.program, done.base):
        run_passes(TIDY, PagesState(Analyses(one), lm))
    return done
