"""``torch.compile(model, backend="mla")``: absorb what can be absorbed, give everything to Inductor.

A graph that is not rewritten (no attention, gradients wanted, nothing to absorb, or a failure) reaches Inductor exactly
as it came, with the mode and the Inductor options of the user. This module is what the entry point loads: it imports
nothing heavy until a graph arrives.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from mla_compile.errors import MlaCompileError, MlaCompileWarning, OptionError, WeightError
from mla_compile.options import Options

if TYPE_CHECKING:
    from torch import fx

    from mla_compile.capture import Program
    from mla_compile.pipeline import Outcome
    from mla_compile.report import Report
    from mla_compile.runtime import FoldedWeights

logger = logging.getLogger("mla_compile")

_KEPT = 64
_recent: deque[Report] = deque(maxlen=_KEPT)


def mla(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """The backend. ``options`` and other keyword arguments are those of :class:`mla_compile.Options` or of Inductor."""
    compiler = Compiler(Options.parse({**more, **(options or {})}), mode)
    call = compiler(gm, example_inputs)
    _recent.extend(compiler.reports)
    return call


def reports() -> tuple[Report, ...]:
    """Reports of the graphs compiled through ``backend="mla"`` in this process, oldest first, at most 64."""
    return tuple(_recent)


@dataclass(frozen=True)
class _Rewritten:
    captured: Program
    outcome: Outcome
    folds: FoldedWeights | None


class Compiler:
    """A backend with fixed options that remembers the report of every graph with attention in it."""

    __name__ = "mla"  # what Dynamo shows in its messages

    def __init__(
        self,
        options: Options,
        mode: str | None = None,
        *,
        explain_only: bool = False,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        self.options = options
        self.explain_only = explain_only
        self.on_report = on_report
        self.graphs = 0
        self.reports: list[Report] = []
        self.failures: list[Exception] = []
        self.patches = _inductor_patches(mode, options)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled graph. A failure of ours leaves it only with ``strict``; else the original graph is compiled."""
        self.graphs += 1
        if not has_attention(gm):
            return self._generate(gm, example_inputs)
        from mla_compile.monitor import watch_current_function

        watch_current_function()
        if wants_gradients(gm, example_inputs):
            logger.info("graph left as it is: gradients are enabled")
            return self._generate(gm, example_inputs)
        rewritten = self._rewrite(gm, example_inputs)
        if rewritten is None:
            return self._generate(gm, example_inputs)
        return self._compile(gm, example_inputs, rewritten)

    def _rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> _Rewritten | None:
        """The captured and the rewritten program; ``None`` where the graph stays as it is, after saying why."""
        try:
            from mla_compile import capture, pipeline

            program = capture.from_dynamo(gm, example_inputs)
            name = str(gm.meta.get("dynamo_compile_id", ""))
            outcome = pipeline.run(program, self.options, name)
            try:
                folds = self._fold(outcome.program, example_inputs)
            except WeightError:
                if self.options.fold == "always":
                    raise
                outcome, folds = pipeline.run(program, replace(self.options, fold="never"), name), None
        except Exception as error:  # whatever goes wrong, the user's model must run: the original graph is untouched
            self.failures.append(error)
            if self.options.strict and not self.explain_only:
                raise
            if self.explain_only:
                return None
            kind = "" if isinstance(error, MlaCompileError) else f"{type(error).__name__}: "
            _warn(f"a graph with attention is compiled in its original form, because of a failure: {kind}{error}")
            logger.debug("the failure was", exc_info=error)
            return None
        self.reports.append(outcome.report)
        if self.explain_only:
            return None
        tell(outcome.report)
        if self.on_report is not None:
            self.on_report()
        return _Rewritten(program, outcome, folds) if outcome.absorbed else None

    def _fold(self, program: Program, example_inputs: Sequence[Any]) -> FoldedWeights | None:
        """The folded weights, computed once now: a weight that cannot be folded is found while there is a way back."""
        from mla_compile.runtime import FoldedWeights

        if not program.folds or self.explain_only:
            return None
        folds = FoldedWeights(program)
        folds.values(example_inputs)
        return folds

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], done: _Rewritten) -> Callable[..., Any]:
        import torch

        from mla_compile import capture, runtime
        from mla_compile.kernels import cpu_native

        if self.options.lowering == "op" and any(getattr(x, "is_cpu", False) for x in example_inputs):
            cpu_native.load()  # built while everything else is, not in the first decode step
        program = done.outcome.program
        fakes = [node.meta["val"] for node in program.placeholders]
        inputs = [*example_inputs, *fakes[len(example_inputs) :]]
        # Not a training graph: where gradients are enabled outside, the captured graph itself had switched them off.
        pays = runtime.picker(done.captured, done.outcome.variants)
        with torch.no_grad():
            call = self._generate(capture.to_graph_module(program), inputs)
            if done.folds is not None:
                call = runtime.with_folds(call, done.folds)
            if done.outcome.variants:
                expanded = self._generate(gm, example_inputs)
                call = expanded if pays is None else runtime.choose_by_call(pays, call, expanded)
        return torch.no_grad()(call) if torch.is_grad_enabled() else call

    def _generate(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Code for one graph: Inductor's, or the graph itself."""
        if self.explain_only or self.options.codegen == "eager":
            return gm
        from torch._inductor.compile_fx import compile_fx

        code: Any = compile_fx(gm, list(example_inputs), config_patches=self.patches)
        return cast("Callable[..., Any]", code)


def has_attention(gm: fx.GraphModule) -> bool:
    """Whether a graph (or one nested in it) calls something that could be the core of an attention. Cheap."""
    from torch import fx

    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_module":
                name = type(module.get_submodule(node.target)).__name__
            else:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            known = name == "exp" or any(word in name.lower() for word in ("softmax", "attention"))
            if node.op.startswith("call_") and known:
                return True
    return False


def wants_gradients(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the graph is to be differentiated: as AOTAutograd decides it, by its outputs where they are known."""
    import torch

    if not torch.is_grad_enabled():
        return False
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        return False
    returned = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    tensors = [value for value in returned if isinstance(value, torch.Tensor)]
    return len(tensors) < len(returned) or any(value.requires_grad for value in tensors)


def tell(report: Report) -> None:
    """One INFO line about a graph; a warning where it has attention and nothing was absorbed."""
    logger.info("%s", report.summary())
    if report.sites and not report.absorbed and not _all_kept_by_choice(report):
        _warn(f"nothing was absorbed in a graph with attention: {report.summary()}")


def _all_kept_by_choice(report: Report) -> bool:
    """Every site was left alone because that is cheaper here, or because the user asked for it."""
    from mla_compile.codes import Code

    return all(
        site.code in (Code.COST_PREFILL, Code.COST_LATENT_WIDE, Code.FORMS_EXPANDED, Code.TRAINING)
        for site in report.sites
    )


def _inductor_patches(mode: str | None, options: Options) -> dict[str, Any]:
    """The Inductor settings of a mode, overridden by explicit Inductor options."""
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        from torch._inductor import list_mode_options

        try:
            patches.update(list_mode_options(mode))
        except RuntimeError as error:
            raise OptionError(str(error)) from error
    patches.update({name.replace("-", "_"): value for name, value in options.inductor.items()})
    return patches


def _warn(message: str) -> None:
    # A warning and not a log line: it is shown by default, once per message, and can be filtered or made an error.
    warnings.warn(message, MlaCompileWarning, stacklevel=4)
