"""The compiler of ``backend="mla"``. It absorbs what it can in a graph, and compiles every graph with Inductor.

A graph is not rewritten if it has no attention, if gradients are needed, if nothing can be absorbed, or if something
failed. Such a graph reaches Inductor unchanged, with the user's mode and Inductor options. There are two exceptions.
Equal layers are compiled once (:mod:`mla_compile.dynamo.code`). After a run, the first rows of a cache that the graph
returns may be moved to memory with spare capacity (:mod:`mla_compile.runtime.growing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from mla_compile import pipeline
from mla_compile.capture import capture, emit
from mla_compile.capture.autocast import is_active, without_autocast
from mla_compile.codes import Code
from mla_compile.core.program import Call, Inputs, Program
from mla_compile.core.records import PassRecord
from mla_compile.core.sharing import Sharing
from mla_compile.core.wrapped import Unwrapped
from mla_compile.dynamo.beside import Rewritten, with_rows_beside
from mla_compile.dynamo.breaks import mark_handed_over
from mla_compile.dynamo.candidates import has_attention
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.dynamo.examples import examples_of, layouts_of
from mla_compile.dynamo.finishing import Finishing
from mla_compile.dynamo.monitor import watch_current_function
from mla_compile.dynamo.outside import end_of
from mla_compile.dynamo.progress import Compilations
from mla_compile.dynamo.ranks import OtherRankFailedError, meeting, ranks_of, sharing_of
from mla_compile.dynamo.recompiles import Recompiles, guard_module, running
from mla_compile.dynamo.settling import settle, sizes_so_far
from mla_compile.dynamo.sizes import share_lengths
from mla_compile.dynamo.telling import add_to_trace, tell
from mla_compile.dynamo.wrappers import told
from mla_compile.errors import MlaCompileError, RankError, WeightError, brief, warn
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.passes.ir.collectives import is_collective
from mla_compile.pipeline.outcome import Outcome
from mla_compile.report.report import Report, is_ours
from mla_compile.runtime.beside import RowsBeside
from mla_compile.runtime.choice import choose_by_call, picker
from mla_compile.runtime.folds import FoldedWeights, with_folds
from mla_compile.runtime.growing import with_room
from mla_compile.runtime.latent import LatentTensor
from mla_compile.runtime.latent_calls import expanding, plain_examples, with_rows
from mla_compile.runtime.own_buffers import BuffersInTrace
from mla_compile.runtime.shared_rows import RankRows

logger = logging.getLogger("mla_compile")

GRADIENTS = (
    "gradients are enabled, so {what} in its original form; for the optimized decode call the model under "
    "torch.no_grad() or torch.inference_mode()"
)

_Carrier = TypeVar("_Carrier", LatentTensor, RankRows)
Latents = Mapping[str, LatentTensor]
"""Placeholder name -> the input that holds latent rows."""


class Compiler:
    """A backend with fixed options. It keeps a report of each graph with an attention that the passes have examined.

    Attributes:
        last_break: why and where Dynamo last ended a graph of this process early.
    """

    last_break: ClassVar[str | None] = None

    __name__ = "mla"  # Dynamo shows this name in messages

    def __init__(
        self,
        options: Options,
        mode: str | None = None,
        *,
        explain_only: bool = False,
        on_report: Callable[[], None] | None = None,
        recompiles: Recompiles | None = None,
        buffers: BuffersInTrace | None = None,
        beside: bool = False,
        compilations: Compilations | None = None,
    ) -> None:
        self.options = replace(
            options,
            cache="latent" if options.cache == "auto" else options.cache,
            appends="in_place" if options.appends == "auto" else options.appends,
            products="native" if options.products == "auto" else options.products,
        )
        self.explain_only = explain_only
        self.on_report = on_report
        self.recompiles = recompiles
        self.buffers = buffers
        self.beside = beside
        self.compilations = Compilations("") if compilations is None else compilations
        self.told: set[str] = set()
        self.wrapped = Unwrapped()
        self.finishing = Finishing()
        self.graphs = 0
        self.reports: list[Report] = []
        self.failures: list[Exception] = []
        self.code = CodeGenerator(options, mode, self.compilations)
        self.compilations.on_end = self._add_seconds
        self._timed = 0  # how many reports already have the seconds of torch's stages

    def __call__(self, gm: fx.GraphModule, example_inputs: Inputs) -> Call:
        """Rewrite and compile a graph. If mla_compile fails, compile the original graph instead.

        If ``strict`` is set, or other ranks rely on the rewritten graph, the failure is raised.
        """
        end = end_of(gm)
        if self.finishing.takes(gm, example_inputs):
            return gm
        self.graphs += 1
        if self.recompiles is not None:
            self.recompiles.add(gm, example_inputs)
        try:
            return self._compile(gm, example_inputs)
        finally:
            Compiler.last_break = end or Compiler.last_break
            self.compilations.stage("guards")
            if not self.explain_only and self.on_report is not None:
                self.on_report()

    def _compile(self, gm: fx.GraphModule, example_inputs: Inputs) -> Call:
        latents, shared = _carrying(gm, example_inputs, LatentTensor), _carrying(gm, example_inputs, RankRows)
        sharing = sharing_of(gm, example_inputs, self.options)
        for rows in shared.values():
            if sharing is None or sharing.ranks != rows.sharing.ranks:
                rows.refuse(
                    "a model compiled " + ("for one rank" if sharing is None else "for other ranks") + " reads it"
                )
        inputs = plain_examples(gm, example_inputs) if latents or shared else example_inputs
        done = self._rewrite(gm, inputs, latents, shared, sharing) if self._is_ours(gm, inputs) else None
        handled = done is not None and bool(done.changed or done.outcome.program.appends or shared)
        if done is not None and handled and not self.explain_only:
            alone = sharing is None and not any(map(is_collective, done.captured.gm.graph.nodes))
            rewritten = self._assembled(gm, done, alone=alone)
            if rewritten is not None:
                return rewritten if not latents or done.outcome.base.cache is not None else expanding(rewritten, gm)
            done = None
        call = gm if self.explain_only else self._unchanged(gm, inputs, done)
        if done is not None and self.buffers is not None:
            call = self.buffers.noting(call, done.captured, done.outcome.base)
        return expanding(call, gm) if latents or shared else call

    def _is_ours(self, gm: fx.GraphModule, example_inputs: Inputs) -> bool:
        attention = has_attention(gm)
        layers = watch_current_function(gm, example_inputs, attention=attention)
        if not attention:
            return False
        settle(gm)
        if layers > 1 and running() is None:
            guard_module(gm)
        if wants_gradients(gm, example_inputs):
            message = GRADIENTS.format(what="a graph with attention is compiled")
            if not self.explain_only and message not in self.told:
                self.told.add(message)
                warn(message)
            return False
        return True

    def _rewrite(
        self,
        gm: fx.GraphModule,
        example_inputs: Inputs,
        latents: Latents,
        shared: Iterable[str],
        sharing: Sharing | None,
    ) -> Rewritten | None:
        """Return the captured and the rewritten program.

        After a failure, return ``None``, and warn unless ``explain_only``.
        """
        self.compilations.stage("capture")
        ranks = None if self.explain_only else meeting(gm, example_inputs, self.options)
        try:
            share_lengths(gm, sizes_so_far())
            program = capture.from_dynamo(gm, example_inputs)
            written = {*program.mutations, *capture.replaced(program)}
            mark_handed_over(gm, program.placeholders)
            if ranks is not None and sharing is not None and not sharing.heads:
                sharing = replace(sharing, heads=not ranks.alike(program, ranks_of(self.options)))
            own = frozenset(written & self._rows_of_buffers(program, example_inputs, latents))
            program.know(latents=latents, own=own, sharing=sharing, shared=frozenset(shared))
            self.compilations.stage("passes")
            with without_autocast():
                name, left = str(gm.meta.get("dynamo_compile_id", "")), dict[str, str]()

                def run(program: Program, inputs: Inputs) -> tuple[Outcome, FoldedWeights | None]:
                    return self._outcome(program, inputs, name, left)

                alone = self.beside and ranks is None and sharing is None and self.options.cache == "latent"
                done = with_rows_beside(program, example_inputs, run) if alone else None
                if done is None:
                    done = Rewritten(program, example_inputs, *run(program, example_inputs))
                while ranks is not None and (more := ranks.refused(done.outcome)) is not None:
                    left |= more
                    done = Rewritten(program, example_inputs, *run(program, example_inputs))
        except RankError:
            raise
        except Exception as error:  # after any failure the user's model must run; the original graph is untouched
            if ranks is not None and not isinstance(error, OtherRankFailedError):
                ranks.failed(error)
            if self.options.strict and not self.explain_only:
                raise
            logger.debug("a graph could not be rewritten", exc_info=error)
            self.failures.append(_without_frames(error))
            if not self.explain_only:
                kind = "" if isinstance(error, MlaCompileError) else f"{type(error).__name__}: "
                warn(f"a graph with attention is compiled in its original form, because of a failure: {kind}{error}")
            return None
        report = told(done.outcome.report, self.wrapped.left, Compiler.last_break, optimized=not self.beside)
        self.reports.append(report)
        if not self.explain_only:
            tell(report, self.told)
            for text in done.outcome.warnings:
                warn(text)
            add_to_trace(report)
        return done

    def _add_seconds(self) -> None:
        """Add the seconds of torch's stages to the report of a compilation that has ended."""
        if len(self.reports) == self._timed:
            return
        self._timed = len(self.reports)
        before, *after = (PassRecord(name, 0, s) for name, s in self.compilations.seconds.items() if not is_ours(name))
        self.reports[-1] = replace(self.reports[-1], passes=(before, *self.reports[-1].passes, *after))
        if self.on_report is not None:
            self.on_report()

    def _rows_of_buffers(self, program: Program, example_inputs: Inputs, latents: Latents) -> set[str]:
        """Return the inputs that are buffers of the module and that are, or may be, kept as rows."""
        known = {name for name, tensor in latents.items() if tensor.is_own and tensor.recipe is not None}
        if self.buffers is not None:
            named = zip(program.placeholders, example_inputs, strict=True)
            known |= {node.name for node, value in named if value in self.buffers}
        return known

    def _outcome(
        self, program: Program, example_inputs: Inputs, name: str, left: Mapping[str, str]
    ) -> tuple[Outcome, FoldedWeights | None]:
        outcome = pipeline.run(program, self.options, name, draw=self.explain_only, recompiles=True, refused=left)
        try:
            return outcome, self._fold(outcome.program, examples_of(outcome.program, program, example_inputs, {}))
        except WeightError:
            if self.options.fold == "always":
                raise
            without = replace(self.options, fold="never", dequantize="step")
            return pipeline.run(program, without, name, recompiles=True, refused=left), None

    def _fold(self, program: Program, example_inputs: Inputs) -> FoldedWeights | None:
        """Compute the folded weights now. If that fails, the graph can still be rewritten without folds."""
        if not program.folds or self.explain_only:
            return None
        folds = FoldedWeights(program)
        folds.values(example_inputs)
        return folds

    def _unchanged(self, gm: fx.GraphModule, example_inputs: Inputs, done: Rewritten | None) -> Call:
        """Compile a graph that was not rewritten. If the captured program repeats layers, compile it by layers."""
        if done is not None and not is_active():
            with torch.no_grad():
                call = self.code.by_parts(partial(emit.to_graph_module, done.captured), example_inputs)
            if call is not None:
                return torch.no_grad()(call) if torch.is_grad_enabled() else call
        return self.code.whole(gm, example_inputs)

    def _assembled(self, gm: fx.GraphModule, done: Rewritten, *, alone: bool) -> Call | None:
        """Compile the rewritten graph. If that fails, warn and return ``None``.

        The failure is raised if ``strict`` is set, or if other ranks take part (``alone`` is False). Other ranks would
        go on with the rewritten form.
        """
        try:
            return self._assemble(gm, done)
        except RestartAnalysis:  # not a failure: Dynamo traces again with what it has learnt
            raise
        except Exception as error:  # after any failure, the original graph can be compiled
            if self.options.strict or not alone:
                raise
            logger.debug("a rewritten graph could not be compiled", exc_info=error)
            self.failures.append(_without_frames(error))
            report, reason = self.reports[-1], f"the rewritten graph could not be compiled: {brief(error)}"
            sites = [
                replace(s, verdict="kept", code=Code.CODE_FAILED, reason=reason, form="expanded", parts=(), kept=())
                if s.verdict == "absorbed"
                else s
                for s in report.sites
            ]
            self.reports[-1] = replace(report, sites=tuple(sites), messages=(*report.messages, reason))
            warn(f"a graph with attention is compiled in its original form, because {reason}")
            return None

    def _assemble(self, gm: fx.GraphModule, done: Rewritten) -> Call:
        """Return a callable of the graph's inputs, which runs the compiled programs and the code around them."""
        example_inputs = done.inputs
        if self.options.lowering == "op" and any(getattr(x, "is_cpu", False) for x in example_inputs):
            native.load()  # builds the kernel now rather than in the first decode step
        program, base = done.outcome.program, done.outcome.base
        autocast = is_active()
        layouts = layouts_of(program)
        begun = tuple(append for append in program.appends if append.total)

        def generate(one: Program) -> Call:
            if begun and one is not program:
                one = replace(one, appends=begun)
            emitted = partial(emit.to_graph_module, one)
            inputs = examples_of(one, done.captured, example_inputs, layouts)
            if (call := self.code.by_parts(emitted, inputs)) is not None:
                return call
            # Under autocast, the captured program is compiled instead of ``gm``. The captured program has explicit
            # casts, so that it can run with autocast off.
            if one is done.captured and not autocast:
                return self.code.whole(gm, example_inputs)
            return self.code.whole(emitted(), inputs)

        # Gradients may be enabled outside, but no result of this graph needs them (`wants_gradients`).
        with torch.no_grad(), without_autocast():
            call = generate(program if done.changed else done.captured)
            if done.folds is not None:
                call = with_folds(call, done.folds)
            if done.outcome.variants:
                call = choose_by_call(picker(base, done.outcome.variants), call, generate(done.outcome.long))
            if program.appends or program.capture.shared:
                call = with_room(call, program)
        if autocast:  # Dynamo guards on autocast, so this code runs only while autocast is on
            call = _outside_autocast(call)
        if base.cache is not None:
            names = [node.name for node in done.captured.placeholders]
            original = gm if not done.twins else lambda *inputs: gm(*inputs[: -len(done.twins)])
            call = with_rows(call, base, names, original, program.appends, layouts)
            if done.twins:
                call = RowsBeside(call, gm, base, names, done.twins)
        return torch.no_grad()(call) if torch.is_grad_enabled() else call


def _outside_autocast(call: Call) -> Call:
    """Run ``call`` with autocast off. The graph contains the casts, and float32 products have to stay float32."""

    def outside(*inputs: object) -> object:
        with without_autocast():
            return call(*inputs)

    return outside


def _carrying(gm: fx.GraphModule, example_inputs: Inputs, kind: type[_Carrier]) -> dict[str, _Carrier]:
    """Return placeholder name -> input, for the inputs that are tensors of class ``kind``. These tensors carry rows."""
    named = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    return {node.name: value for node, value in named if isinstance(value, kind)}


def wants_gradients(gm: fx.GraphModule, example_inputs: Inputs) -> bool:
    """Whether the graph will be differentiated, by the same test as AOTAutograd.

    At least one input and one output have to require gradients. An output of unknown value is assumed to require
    gradients.
    """
    if not torch.is_grad_enabled():
        return False
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        return False
    returned = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    tensors = [value for value in returned if isinstance(value, torch.Tensor)]
    return len(tensors) < len(returned) or any(value.requires_grad for value in tensors)


def _without_frames(error: Exception) -> Exception:
    """Remove the tracebacks from an error and its causes, and return the error.

    The frames would keep the model alive as long as torch keeps the backend.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
