"""``optimize`` and ``explain``: an nn.Module, ExportedProgram or GraphModule in, the same kind (or a report) out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, TypeVar, overload

import torch
from torch import fx

from mla_compile import pipeline
from mla_compile.capture import cache_change, capture, emit
from mla_compile.capture.autocast import without_autocast
from mla_compile.capture.cache_change import CacheChange
from mla_compile.capture.migrate import Migrated, migrate
from mla_compile.core.modules import HookOf, copy_models, models_within, remember_original, shallow
from mla_compile.core.program import Program
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo.compiler import tell
from mla_compile.dynamo.forward import CompiledForward
from mla_compile.dynamo.progress import Compilations
from mla_compile.dynamo.trace import explain_module
from mla_compile.errors import InputError, OptionError
from mla_compile.options import Options
from mla_compile.report.report import Report
from mla_compile.runtime.choice import pays_as_traced
from mla_compile.runtime.folds import folded_values

Model = TypeVar("Model", bound=torch.nn.Module)
_ONE_FORM = (
    "the number of queries is symbolic, and for the traced one expanding is cheaper; an artifact holds one form: use "
    'forms="absorbed", or trace with few queries'
)
_CASTS = "the casts of autocast are written out in the program: run it outside of autocast"
_DYNAMO_SETTINGS = ("dynamic", "fullgraph")


@overload
def optimize(
    obj: torch.export.ExportedProgram, example_inputs: Any = None, *, progress: bool | None = None, **options: Any
) -> torch.export.ExportedProgram: ...


@overload
def optimize(obj: Model, example_inputs: Any = None, *, progress: bool | None = None, **options: Any) -> Model: ...


def optimize(obj: Any, example_inputs: Any = None, *, progress: bool | None = None, **options: Any) -> Any:
    """The same model with absorbed decode, sharing the original's weights; the original stays as it was.

    * ``nn.Module``: a new object of the same class with the same parameters, buffers and layers, whose forward is
      compiled when it is first called. Empty buffers of K and V become rows then, and the modules that hold them are
      copied for it. Methods that call the model, such as ``generate()``, run the compiled forward; so do those that
      call a model within it, of which there is a copy that shares all else. With gradients enabled the original runs.
      ``mla_report`` says what has been done so far. A deep copy of it is optimized too.
    * ``ExportedProgram``: a new one with the same signature. ``lowering`` is "aten" by default, so that a package made
      from it loads where mla_compile is not installed; folded weights (``fold="always"``) become its constants.
    * ``GraphModule``: a new one, captured at the shapes of ``meta["val"]`` or of ``example_inputs``.

    Args:
        obj: the model.
        example_inputs: a tuple of positional or a dict of keyword arguments. A module is then explained for them, on
            fake tensors and without running it, before this returns: inputs that do not fit and models that cannot be
            captured are reported at once, and ``mla_report`` is filled.
        progress: whether stderr shows what is being compiled, and after each graph how long its stages took (s). By
            default it does on a terminal.
        **options: options of Inductor; ``mode``, ``dynamic`` and ``fullgraph`` as in ``torch.compile``; and these, of
            which ``help(mla_compile.Options)`` has more:

            - ``forms`` ("auto", "absorbed", "expanded"): the form of each call, by its cost or fixed
            - ``fold`` ("auto", "never", "always"): whether weights are multiplied ahead of time
            - ``lowering`` ("op", "aten"): call our operators, or leave plain ATen
            - ``codegen`` ("inductor", "eager"): compile the graph, or run the rewritten one as it is
            - ``cache`` ("auto", "latent", "expanded"), ``cache_dtype`` ("model", "fp8"): what becomes of cached K and V
            - ``appends`` ("auto", "in_place", "copy"): how rows get behind those of a growing cache
            - ``quantized`` ("absorb", "exact"), ``dequantize`` ("auto", "once", "step"): quantized up-projections
            - ``sparse`` ("auto", "never"): read the keys of a list alone, or all of them
            - ``products`` ("auto", "native", "torch"): the kernel for products of few rows on a CPU
            - ``layers`` ("once", "whole"): compile equal layers one time, or each
            - ``expanded_bytes`` (2**30): what an expanded attention may hold before it goes by groups of heads
            - ``ranks`` ("agree", "alone"), ``context_parallel`` (a mesh): several processes
            - ``verify`` (True): check each rewritten attention against float64
            - ``strict`` (False): raise where otherwise there is a warning

    Raises:
        InputError: ``obj`` is not a model, or a module without a ``forward``, or the example inputs do not fit it.
        OptionError: an option does not exist, or cannot have that value.
        CaptureError: the model does not become one functional graph.
        WeightError: a weight has no values that could be used.
    """
    if not (progress is None or isinstance(progress, bool)):
        raise OptionError(f"progress is {progress!r}, expected True, False or None")
    if isinstance(obj, torch.export.ExportedProgram):
        with one_at_a_time(), Compilations("the program", progress).during("passes"):
            return _optimize_exported(obj, _artifact_options(options, lowering="aten"))
    if isinstance(obj, fx.GraphModule):
        with one_at_a_time(), Compilations("the program", progress).during("passes"):
            return _optimize_graph_module(obj, example_inputs, _artifact_options(options))
    if _is_plain_module(obj):
        if not models_within(obj):  # methods may call these
            _needs_forward(obj, "optimize()")
        return _optimize_module(obj, example_inputs, progress, dict(options))
    raise InputError(
        f"optimize() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(obj).__name__}; "
        'for a function use torch.compile(function, backend="mla"), for TorchScript the module it was made from'
    )


@one_at_a_time()
def explain(model: Any, /, *example_inputs: Any, **arguments: Any) -> Report:
    """What would be done to a model, and why not where it would not be, without changing or running it.

    A module is traced on fake tensors: nothing is computed, no cache is written to, and a model on the meta device (one
    that fits in no memory) is explained like any other.

    Args:
        model: an ``nn.Module``, an ``ExportedProgram`` or a ``GraphModule``.
        *example_inputs: the arguments of its forward; those of a decode step show what happens in decode. An
            ExportedProgram needs none, a GraphModule only where its placeholders have no ``meta["val"]``.
        **arguments: keyword arguments of its forward. A name that is one of ``Options`` is taken for the option, unless
            the forward has an argument of that name and the option cannot have that value (a ``cache`` that is not a
            string).

    Returns:
        One entry for each attention site. A module that breaks into several graphs has one report for all of them.

    Raises:
        InputError: ``model`` is not a model, or a module without a ``forward``, or does not run on these inputs.
        OptionError: an option cannot have that value.
        CaptureError: the model does not become a functional graph.
    """
    own = {name for name in Options.names() if name in arguments and not _is_argument(model, name, arguments[name])}
    options = Options.parse({name: arguments.pop(name) for name in own})
    if _is_plain_module(model):
        _needs_forward(model, "explain()")
        return explain_module(model, example_inputs, arguments, options)
    if not isinstance(model, (torch.export.ExportedProgram, fx.GraphModule)):
        raise InputError(
            f"explain() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(model).__name__}"
        )
    if arguments:
        raise OptionError(f"there is no option {', '.join(arguments)}; options: {', '.join(Options.names())}")
    if isinstance(model, torch.export.ExportedProgram):
        program = capture.from_exported(model)
    else:
        program = capture.from_graph_module(model, _flat_inputs(model, example_inputs) if example_inputs else None)
    with without_autocast():
        return pipeline.run(program, options, draw=True).report


def migrate_cache(optimized: Any, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """Converts an existing cache of K and V to the rows that a program optimized with ``cache="latent"`` takes.

    Args:
        optimized: what ``optimize(program, cache="latent")`` returned.
        cached: K [B,H,T,N+R] and V [B,H,T,V] of every layer, with the axes and the order of the program's old inputs.
        tolerance: the largest relative error (2-norm) allowed for K and V recomputed from the rows; by default 64 times
            the rounding error of their dtype.

    Returns:
        The rows for each of the inputs ([B,T,L] or [B,T,R] and the like), and the error.

    Raises:
        InputError: tensors of another shape, a program without such inputs, or tensors that the program's weights
            cannot have made.
    """
    gm = getattr(optimized, "graph_module", optimized)
    change = getattr(gm, "meta", {}).get("mla_cache")
    if change is None or not change.inputs:
        raise InputError(
            f'{type(optimized).__name__} has no cache inputs that became rows; optimize the program with cache="latent"'
        )
    return migrate(change, cached, tolerance)


def _is_plain_module(model: object) -> TypeGuard[torch.nn.Module]:
    """A module as its author wrote it: neither a traced graph nor TorchScript."""
    return isinstance(model, torch.nn.Module) and not isinstance(model, (fx.GraphModule, torch.jit.ScriptModule))


def _needs_forward(model: torch.nn.Module, door: str) -> None:
    if "forward" not in vars(model) and type(model).forward is torch.nn.Module.forward:
        raise InputError(
            f"{door} is for what runs when a module is called, and {type(model).__name__} has no forward; pass the "
            "module whose forward its methods call, or give it a forward that calls one of them"
        )


def _is_argument(model: object, name: str, value: object) -> bool:
    """Whether ``value`` is meant for the forward of ``model``, which has an argument with the name of an option."""
    if not _is_plain_module(model) or name not in inspect.signature(model.forward).parameters:
        return False
    try:
        Options.parse({name: value})
    except OptionError:
        return True
    return False


def _optimize_module(
    module: torch.nn.Module, example_inputs: object, progress: bool | None, options: dict[str, Any]
) -> torch.nn.Module:
    mode = options.pop("mode", None)
    settings = {name: options.pop(name) for name in _DYNAMO_SETTINGS if name in options}
    for name, value in settings.items():
        if not (isinstance(value, bool) or (name == "dynamic" and value is None)):
            raise OptionError(f"{name} is {value!r}, expected True or False")
    parsed = Options.parse(options, verify=True)
    report = None
    if example_inputs is not None:
        args, kwargs = _arguments(example_inputs)
        report = explain_module(module, args, kwargs, parsed)
    return with_forward(module, parsed, mode, settings, progress, report)


def with_forward(
    module: Model,
    options: Options,
    mode: str | None,
    settings: dict[str, Any],
    progress: bool | None = None,
    report: Report | None = None,
) -> Model:
    """The optimized module of ``module``, which may be one itself; ``report``: what is known of it so far."""
    fast = plain_copy(module)
    copy_models(fast, plain_copy)
    forward = CompiledForward(fast, options, mode, settings, vars(fast).get("forward"), progress)
    if report is not None:
        vars(fast)["mla_report"] = report
    for part in models_within(fast):
        own = vars(part).get("forward")
        CompiledForward(part, options, mode, dict(settings), own, progress, outer=fast).install()
    forward.install()
    return fast


def plain_copy(module: Model) -> Model:
    """A module object that shares parameters, buffers and submodules (also those replaced later) but not hooks.

    It has the hooks of ``module``, as long as that has them.
    """
    fast = shallow(module)
    remember_original(fast, module)
    for name, value in vars(module).items():
        if name in ("_forward_hooks", "_forward_pre_hooks"):
            shared = {key: hook if isinstance(hook, HookOf) else HookOf(value, key) for key, hook in value.items()}
            vars(fast)[name] = type(value)(shared)
        elif name.endswith("_hooks") or "_hooks_" in name:
            vars(fast)[name] = copy.copy(value)
    forward = vars(fast).get("forward")
    if isinstance(forward, CompiledForward):  # already one of ours: start again from what it was made from
        forward.uninstall(fast)
        copy_models(fast, plain_copy)
    return fast


def _arguments(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        if not all(isinstance(name, str) for name in example_inputs):
            raise InputError(f"example_inputs by keyword need names, got {list(example_inputs)}")
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InputError(
        "example_inputs must be a tuple of positional or a dict of keyword arguments, "
        f"got {type(example_inputs).__name__}"
    )


@dataclass(frozen=True)
class _Artifact:
    """A program in the one form that can be saved, with what belongs to it."""

    program: Program
    report: Report
    folded: dict[str, torch.Tensor]
    change: CacheChange | None

    def attach(self, gm: fx.GraphModule) -> None:
        """Put the report, and what became of the cache, where users and ``migrate_cache`` find them."""
        gm.meta["mla_report"] = self.report
        if self.change is not None:
            gm.meta["mla_cache"] = self.change


def _optimize_exported(exported: torch.export.ExportedProgram, options: Options) -> torch.export.ExportedProgram:
    made = _artifact(capture.from_exported(exported), options)
    result = emit.to_exported(made.program, made.folded, made.change)
    made.attach(result.graph_module)
    return result


def _optimize_graph_module(gm: fx.GraphModule, example_inputs: object, options: Options) -> fx.GraphModule:
    values = None
    if example_inputs is not None:
        args, kwargs = _arguments(example_inputs)
        if kwargs:
            raise InputError("example_inputs of a GraphModule must be a tuple, one value per argument of its call")
        values = _flat_inputs(gm, args)
    made = _artifact(capture.from_graph_module(gm, values), options)
    result = emit.to_plain_graph_module(made.program, made.folded, made.change)
    made.attach(result)
    return result


def _flat_inputs(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """One value per placeholder, through the graph's own flattening of nested inputs where it has one."""
    try:
        return list(gm.graph.process_inputs(*args))
    except (TypeError, ValueError) as error:
        raise InputError(f"the example inputs do not fit the graph: {error}") from error


def _artifact(program: Program, options: Options) -> _Artifact:
    """The program rewritten into one form: where each call would choose, the traced sizes do."""
    with without_autocast():
        outcome = pipeline.run(program, options, own_cache=True)
        report = outcome.report
        if outcome.variants and not pays_as_traced(outcome.base, outcome.variants):
            outcome = pipeline.run(program, replace(options, forms="expanded"), own_cache=True)
            report = replace(outcome.report, messages=(*outcome.report.messages, _ONE_FORM))
        if program.autocast and isinstance(program.original, torch.export.ExportedProgram):
            report = replace(report, messages=(*report.messages, _CASTS))
        tell(report, set())
        made = outcome.program
        change = None if made.cache is None else cache_change.of_program(made, made.weights)
        return _Artifact(made, report, folded_values(made), change)


def _artifact_options(given: Mapping[str, Any], **defaults: Any) -> Options:
    """Options for a program that is saved: nobody watches its weights, so what is made of them is not kept."""
    options = Options.parse(given, **{"verify": True, **defaults})
    if options.inductor:
        raise OptionError(f"{', '.join(options.inductor)}: give options of Inductor to what compiles the program")
    if options.context_parallel is not None:
        raise OptionError("context_parallel: programs return all rows; only the caches of modules are shared by ranks")
    if options.appends == "in_place":
        raise OptionError(
            "appends is 'in_place', expected 'auto' or 'copy' for a program: it returns all rows, and cannot tell its "
            "caller to keep room behind them; a module that is optimized can"
        )
    fold = "never" if options.fold == "auto" else options.fold
    return replace(options, fold=fold, dequantize="step" if options.dequantize == "auto" else options.dequantize)
