"""``optimize``, ``explain`` and ``migrate_cache`` for an nn.Module, an ExportedProgram or a GraphModule."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, overload

import torch
from torch import fx

from mla_compile import pipeline
from mla_compile.capture import cache_change, capture, emit
from mla_compile.capture.autocast import without_autocast
from mla_compile.capture.cache_change import CacheChange
from mla_compile.capture.migrate import Migrated, migrate
from mla_compile.core.inner import called_within, copy_called
from mla_compile.core.modules import HookOf, Module, remember_original, shallow
from mla_compile.core.program import Program
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo.forward import CompiledForward
from mla_compile.dynamo.progress import Compilations
from mla_compile.dynamo.telling import tell
from mla_compile.dynamo.trace import explain_module
from mla_compile.errors import InputError, OptionError
from mla_compile.options import Options
from mla_compile.report.report import Report
from mla_compile.runtime.choice import pays_as_traced
from mla_compile.runtime.folds import folded_values

_ONE_FORM = (
    "the number of queries is symbolic, and expanding is cheaper for the traced number; a saved program has only one "
    'form: use forms="absorbed", or trace with few queries'
)
_CASTS = "the program contains the casts of autocast: run it outside of autocast"
_DYNAMO_SETTINGS = ("dynamic", "fullgraph")


@overload
def optimize(
    obj: torch.export.ExportedProgram, example_inputs: object = None, *, progress: bool | None = None, **options: object
) -> torch.export.ExportedProgram: ...


@overload
def optimize(
    obj: Module, example_inputs: object = None, *, progress: bool | None = None, **options: object
) -> Module: ...


def optimize(obj: object, example_inputs: object = None, *, progress: bool | None = None, **options: Any) -> object:
    """Return a version of the model with absorbed decode. The model itself is not changed.

    The result shares the model's weights.

    * For an ``nn.Module``, the result is a new object of the same class with the same parameters, buffers and layers.
      Its forward is compiled in the first call. That call also turns empty buffers of K and V into buffers of rows, and
      copies the modules that hold these buffers. Methods that call the model, such as ``generate()``, run the compiled
      forward. If a method calls an inner model, the inner model is copied and compiled, too. All other modules are
      shared. If gradients are enabled, the original forward runs. The attribute ``mla_report`` says what was done.
      A deep copy of the result is optimized, too.
    * For an ``ExportedProgram``, the result is a new program with the same signature. ``lowering`` is "aten" by
      default, so that a package made from the program loads where mla_compile is not installed. Folded weights
      (``fold="always"``) become constants of the program.
    * For a ``GraphModule``, the result is a new one, captured at the shapes of ``meta["val"]`` or ``example_inputs``.

    Args:
        obj: the model.
        example_inputs: a tuple of positional or a dict of keyword arguments. If given, a module is traced on fake
            tensors at once, as in :func:`explain`. Errors in the inputs or the model are then raised here, and
            ``mla_report`` is filled.
        progress: whether to print to stderr what is being compiled and, after each graph, the seconds of each stage.
            ``None`` prints on a terminal only.
        **options: options of Inductor; ``mode``, ``dynamic`` and ``fullgraph`` as in ``torch.compile``; and the
            following options, which ``help(mla_compile.Options)`` explains:

            - ``forms`` ("auto", "absorbed", "expanded"): choose the form of each call by cost, or always use one form
            - ``fold`` ("auto", "never", "always"): whether weights are multiplied ahead of time
            - ``lowering`` ("op", "aten"): call mla_compile's operators, or emit plain ATen
            - ``codegen`` ("inductor", "eager"): compile the rewritten graph, or run it as it is
            - ``cache`` ("auto", "latent", "expanded"), ``cache_dtype`` ("model", "fp8"): how cached K and V are kept
            - ``appends`` ("auto", "in_place", "copy"): how new rows are appended to a growing cache
            - ``quantized`` ("absorb", "exact"), ``dequantize`` ("auto", "once", "step"): quantized up-projections
            - ``sparse`` ("auto", "never"): read only the keys of an index list, or all keys
            - ``products`` ("auto", "native", "torch"): the operators for products with weights on a CPU
            - ``layers`` ("once", "whole"): compile equal layers once, or the graph as a whole
            - ``expanded_bytes`` (2**30): the memory beyond which an expanded attention is computed by groups of heads
            - ``ranks`` ("agree", "alone"): whether ranks decide together which attentions to absorb
            - ``context_parallel`` (None): a mesh of ranks that share the rows of a cache
            - ``verify`` (True): check each rewritten attention against float64
            - ``strict`` (False): raise an error instead of warning

    Raises:
        InputError: ``obj`` is not a model, has no ``forward``, or does not fit the example inputs.
        OptionError: an option does not exist, or has an invalid value.
        CaptureError: the model cannot be captured as one functional graph.
        WeightError: a weight has no usable values.
    """
    if not (progress is None or isinstance(progress, bool)):
        raise OptionError(f"progress is {progress!r}, expected True, False or None")
    if isinstance(obj, torch.export.ExportedProgram):
        with one_at_a_time(), Compilations("the program", show=progress).during("passes"):
            return _optimize_exported(obj, _artifact_options(options, lowering="aten"))
    if isinstance(obj, fx.GraphModule):
        with one_at_a_time(), Compilations("the program", show=progress).during("passes"):
            return _optimize_graph_module(obj, example_inputs, _artifact_options(options))
    if _is_plain_module(obj):
        if not called_within(obj):  # no method calls an inner model, so ``obj`` needs a forward
            _needs_forward(obj, "optimize()")
        return _optimize_module(obj, example_inputs, dict(options), progress=progress)
    raise InputError(
        f"optimize() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(obj).__name__}; "
        'for a function use torch.compile(function, backend="mla"), for TorchScript pass the module it was made from'
    )


@one_at_a_time()
def explain(model: object, /, *example_inputs: object, **arguments: Any) -> Report:
    """Report which attentions of a model would be rewritten, and why others would not.

    The model is neither run nor changed. A module is traced on fake tensors: nothing is computed, and no cache is
    written to. A model that is too large for memory can therefore be explained on the meta device.

    Args:
        model: an ``nn.Module``, an ``ExportedProgram`` or a ``GraphModule``.
        *example_inputs: the positional arguments of the model's forward. To see what happens in decode, pass the
            arguments of a decode step. An ExportedProgram needs no inputs. A GraphModule needs inputs only if its
            placeholders have no ``meta["val"]``.
        **arguments: options, or keyword arguments of the model's forward. An argument with the name of an option sets
            the option. The forward receives the argument instead if the forward has an argument of that name, and the
            option cannot have that value (for example, a ``cache`` that is not a string).

    Returns:
        A report with one entry per attention site. If a module breaks into several graphs, the report covers all of
        them.

    Raises:
        InputError: ``model`` is not a model, has no ``forward``, or does not run on these inputs.
        OptionError: an option does not exist, or has an invalid value.
        CaptureError: the model cannot be captured as a functional graph.
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


def migrate_cache(optimized: object, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """Convert an existing cache of K and V to rows, for a program that was optimized with ``cache="latent"``.

    Args:
        optimized: the result of ``optimize(program, cache="latent")``.
        cached: K [B,H,T,N+R] and V [B,H,T,V] of every layer, in the order and with the axes that the cache inputs had
            before optimization.
        tolerance: the largest relative error (2-norm) allowed for K and V recomputed from the rows. The default is 64
            times the rounding error of their dtype.

    Returns:
        The rows for each cache input of the optimized program (for example [B,T,L] or [B,T,R]), and the error.

    Raises:
        InputError: no cache input of the program became rows, the tensors have other shapes, or the tensors cannot be
            results of the program's weights.
    """
    gm = getattr(optimized, "graph_module", optimized)
    change = getattr(gm, "meta", {}).get("mla_cache")
    if change is None or not change.inputs:
        raise InputError(
            f'{type(optimized).__name__} has no cache inputs that became rows; optimize the program with cache="latent"'
        )
    return migrate(change, cached, tolerance)


def _is_plain_module(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether ``model`` is a module as its author wrote it: neither a traced graph nor TorchScript."""
    return isinstance(model, torch.nn.Module) and not isinstance(model, (fx.GraphModule, torch.jit.ScriptModule))


def _needs_forward(model: torch.nn.Module, door: str) -> None:
    if "forward" not in vars(model) and type(model).forward is torch.nn.Module.forward:
        raise InputError(
            f"{door} needs the forward of a module, and {type(model).__name__} has none; pass the module whose forward "
            "its methods call, or define a forward that calls one of them"
        )


def _is_argument(model: object, name: str, value: object) -> bool:
    """Whether an argument belongs to the forward of ``model``, although its name is also an option's."""
    if not _is_plain_module(model) or name not in inspect.signature(model.forward).parameters:
        return False
    try:
        Options.parse({name: value})
    except OptionError:
        return True
    return False


def _optimize_module(
    module: torch.nn.Module, example_inputs: object, options: dict[str, Any], *, progress: bool | None
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
    return with_forward(module, parsed, mode, settings, report, progress=progress)


def with_forward(
    module: Module,
    options: Options,
    mode: str | None,
    settings: dict[str, object],
    report: Report | None = None,
    *,
    progress: bool | None = None,
) -> Module:
    """Return a copy of ``module`` with a compiled forward. ``module`` may be optimized already.

    ``report``: the report so far.
    """
    fast = plain_copy(module)
    forward = CompiledForward(fast, options, mode, settings, vars(fast).get("forward"), progress=progress)
    if report is not None:
        vars(fast)["mla_report"] = report
    for part in called_within(fast):
        own = vars(part).get("forward")
        CompiledForward(part, options, mode, dict(settings), own, progress=progress, outer=fast).install()
    forward.install()
    return fast


def plain_copy(module: Module) -> Module:
    """Return a module object that shares the parameters, buffers and layers of ``module``, even if these are replaced.

    Inner modules that methods of ``module`` call are copied, too. Hooks of ``module`` run in the copy until ``module``
    removes them.
    """
    fast = _copy_of_model(module)
    copy_called(fast, module, _copy_of_model, _shared_copy)
    return fast


def _copy_of_model(module: Module) -> Module:
    fast = shallow(module)
    remember_original(fast, module)
    for name, value in vars(module).items():
        if name in ("_forward_hooks", "_forward_pre_hooks"):
            shared = {key: hook if isinstance(hook, HookOf) else HookOf(value, key) for key, hook in value.items()}
            vars(fast)[name] = type(value)(shared)
        elif name.endswith("_hooks") or "_hooks_" in name:
            vars(fast)[name] = copy.copy(value)
    forward = vars(fast).get("forward")
    if isinstance(forward, CompiledForward):  # already optimized: return to the original forward
        forward.uninstall(fast)
    return fast


def _shared_copy(module: Module) -> Module:
    """Return a copy of a module without layers. The copy also shares the module's hooks."""
    fast = shallow(module)
    if isinstance(forward := vars(fast).get("forward"), CompiledForward):
        forward.uninstall(fast)
    return fast


def _arguments(example_inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
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
    """A program rewritten into one form, with its report, its folded weights and the change of its cache."""

    program: Program
    report: Report
    folded: dict[str, torch.Tensor]
    change: CacheChange | None

    def attach(self, gm: fx.GraphModule) -> None:
        """Store the report and the change of the cache in ``gm.meta``, where users and ``migrate_cache`` find them."""
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


def _flat_inputs(gm: fx.GraphModule, args: Sequence[object]) -> list[object]:
    """Return one value per placeholder. The graph's own codegen flattens nested inputs."""
    try:
        return list(gm.graph.process_inputs(*args))
    except (TypeError, ValueError) as error:
        raise InputError(f"the example inputs do not fit the graph: {error}") from error


def _artifact(program: Program, options: Options) -> _Artifact:
    """Rewrite the program into one form. If the best form depends on the sizes of a call, the traced sizes decide."""
    with without_autocast():
        outcome = pipeline.run(program, options, own_cache=True)
        report = outcome.report
        if outcome.variants and not pays_as_traced(outcome.base, outcome.variants):
            outcome = pipeline.run(program, replace(options, forms="expanded"), own_cache=True)
            report = replace(outcome.report, messages=(*outcome.report.messages, _ONE_FORM))
        if program.capture.autocast and isinstance(program.capture.original, torch.export.ExportedProgram):
            report = replace(report, messages=(*report.messages, _CASTS))
        tell(report, set())
        made = outcome.program
        change = None if made.cache is None else cache_change.of_program(made, made.weights)
        return _Artifact(made, report, folded_values(made), change)


def _artifact_options(given: Mapping[str, object], **defaults: object) -> Options:
    """Return the options for a saved program.

    Nothing notices when a saved program's weights change, so by default no values derived from weights are kept.
    """
    options = Options.parse(given, **{"verify": True, **defaults})
    if options.inductor:
        raise OptionError(f"{', '.join(options.inductor)}: pass options of Inductor to the compiler of the program")
    if options.context_parallel is not None:
        raise OptionError("context_parallel: programs return all rows; only the caches of modules are shared by ranks")
    if options.appends == "in_place":
        raise OptionError(
            "appends is 'in_place', expected 'auto' or 'copy' for a program: it returns all rows, and its caller does "
            "not reserve room behind them; an optimized module does"
        )
    fold = "never" if options.fold == "auto" else options.fold
    return replace(options, fold=fold, dequantize="step" if options.dequantize == "auto" else options.dequantize)
