"""``optimize`` and ``explain``: a module, an ExportedProgram or a GraphModule in, the same kind (or a report) out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import fx

from mla_compile import pipeline
from mla_compile.backend import tell
from mla_compile.capture import cache_change, capture
from mla_compile.capture.cache_change import Migrated
from mla_compile.core.program import Program
from mla_compile.errors import InputError, OptionError
from mla_compile.forward import CompiledForward
from mla_compile.options import Options
from mla_compile.report.report import Report
from mla_compile.runtime import calls as runtime
from mla_compile.trace import explain_module

Model = TypeVar("Model", bound=torch.nn.Module)
_ONE_FORM = (
    "the number of queries is symbolic, and for the traced one expanding is cheaper; an artifact holds one form: use "
    'forms="absorbed", or trace with few queries'
)
_DYNAMO_SETTINGS = ("dynamic", "fullgraph")


@overload
def optimize(
    obj: torch.export.ExportedProgram, example_inputs: Any = None, **options: Any
) -> torch.export.ExportedProgram: ...


@overload
def optimize(obj: Model, example_inputs: Any = None, **options: Any) -> Model: ...


def optimize(obj: Any, example_inputs: Any = None, **options: Any) -> Any:
    """The same model with absorbed decode, sharing the original's weights; the original stays as it was.

    * ``nn.Module``: a new object of the same class with the same parameters, buffers and submodules, whose forward is
      compiled when it is first called. Methods that call the model (``generate()``) run the compiled forward. With
      gradients enabled the original runs. Its ``mla_report`` tells what was done so far. A deep copy is optimized too.
    * ``ExportedProgram``: a new one with the same signature. ``lowering`` is "aten" by default, so that a package made
      of it loads where mla_compile is not installed; folded weights (``fold="always"``) become constants of it.
    * ``GraphModule``: a new one, captured at the shapes of ``meta["val"]`` or of ``example_inputs``.

    Args:
        obj: the model.
        example_inputs: a tuple of positional or a dict of keyword arguments. A module is then explained with them (on
            fake tensors, nothing is run) before this returns, so that inputs that do not fit and models that cannot
            be captured are found here and ``mla_report`` is filled.
        **options: fields of ``Options`` (``verify`` is on by default), options of Inductor, and ``mode``, ``dynamic``,
            ``fullgraph`` as in ``torch.compile``.

    Raises:
        InputError: ``obj`` is no model, or the example inputs do not fit it.
        OptionError: there is no such option, or it has no such value.
        CaptureError: the model does not become one functional graph.
        WeightError: a weight has no values that could be used.
    """
    if isinstance(obj, torch.export.ExportedProgram):
        return _optimize_exported(obj, _artifact_options(options, lowering="aten"))
    if isinstance(obj, fx.GraphModule):
        return _optimize_graph_module(obj, example_inputs, _artifact_options(options))
    if isinstance(obj, torch.nn.Module) and not isinstance(obj, torch.jit.ScriptModule):
        return _optimize_module(obj, example_inputs, dict(options))
    raise InputError(
        f"optimize() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(obj).__name__}; "
        'for a function use torch.compile(function, backend="mla"), for TorchScript the module it was made from'
    )


def explain(model: Any, /, *example_inputs: Any, **arguments: Any) -> Report:
    """What would be done to a model and why not where it would not, without changing or running it.

    A module is traced on fake tensors: nothing is computed, no cache is written to, and a model on the meta device (one
    that fits in no memory) is explained like any other.

    Args:
        model: an ``nn.Module``, an ``ExportedProgram`` or a ``GraphModule``.
        *example_inputs: the arguments of its forward; those of a decode step show what happens in decode. An
            ExportedProgram needs none, a GraphModule only where its placeholders have no ``meta["val"]``.
        **arguments: keyword arguments of its forward; those that are names of ``Options`` are options, unless the
            forward has an argument of that name and the option has no such value (a ``cache`` that is no string).

    Returns:
        One entry for each attention site. A module that breaks into several graphs has one report for all of them.

    Raises:
        InputError: ``model`` is no model, or does not run on these inputs.
        OptionError: an option has no such value.
        CaptureError: the model does not become a functional graph.
    """
    own = {name for name in Options.names() if name in arguments and not _is_argument(model, name, arguments[name])}
    chosen = {name: arguments.pop(name) for name in own}
    options = Options.parse(chosen)
    if isinstance(model, (torch.export.ExportedProgram, fx.GraphModule)) and arguments:
        raise OptionError(f"there is no option {', '.join(arguments)}; options: {', '.join(Options.names())}")
    if isinstance(model, torch.export.ExportedProgram):
        return pipeline.run(capture.from_exported(model), options, draw=True).report
    if isinstance(model, fx.GraphModule):
        return pipeline.run(
            capture.from_graph_module(model, _flat_inputs(model, example_inputs) if example_inputs else None),
            options,
            draw=True,
        ).report
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"explain() takes an nn.Module, an ExportedProgram or a GraphModule, got {type(model).__name__}"
        )
    return explain_module(model, example_inputs, arguments, options)


def _is_argument(model: Any, name: str, value: Any) -> bool:
    """Whether ``value`` is meant for the forward of ``model``, which has an argument called like an option."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, (fx.GraphModule, torch.jit.ScriptModule)):
        return False
    if name not in inspect.signature(model.forward).parameters:
        return False
    try:
        Options.parse({name: value})
    except OptionError:
        return True
    return False


def migrate_cache(optimized: Any, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """A cache of K and V that exists already, as the rows that a program optimized with ``cache="latent"`` takes.

    Args:
        optimized: what ``optimize(program, cache="latent")`` returned.
        cached: K [B,H,T,N+R] and V [B,H,T,V] of every layer, with axes and order of the program's old inputs.
        tolerance: largest relative error (2-norm) of K and V as they are made again from the rows; 64 roundings of
            their dtype by default.

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
    return cache_change.migrate(change, cached, tolerance)


def _optimize_module(module: torch.nn.Module, example_inputs: Any, options: dict[str, Any]) -> Any:
    mode = options.pop("mode", None)
    settings = {name: options.pop(name) for name in _DYNAMO_SETTINGS if name in options}
    for name, value in settings.items():
        if not (isinstance(value, bool) or (name == "dynamic" and value is None)):
            raise OptionError(f"{name} is {value!r}, expected True or False")
    parsed = Options.parse(options, verify=True)
    fast = _shallow_copy(module)
    forward = CompiledForward(fast, parsed, mode, settings, vars(fast).get("forward"))
    if example_inputs is not None:
        args, kwargs = _arguments(example_inputs)
        vars(fast)["mla_report"] = explain_module(module, args, kwargs, parsed)
    forward.install()
    return fast


def _shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A module object that shares parameters, buffers and submodules (also those replaced later) but not hooks."""
    fast = copy.copy(module)
    for name, value in vars(module).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            vars(fast)[name] = copy.copy(value)
    forward = vars(fast).get("forward")
    if isinstance(forward, CompiledForward):  # already one of ours: start again from what it was made from
        forward.uninstall(fast)
    return fast


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _optimize_exported(exported: torch.export.ExportedProgram, options: Options) -> torch.export.ExportedProgram:
    program = capture.from_exported(exported)
    rewritten, report = _one_form(program, options)
    change = None if rewritten.cache is None else cache_change.of_program(rewritten, rewritten.weights)
    result = capture.to_exported(rewritten, runtime.folded_values(rewritten), change)
    result.graph_module.meta["mla_report"] = report
    if change is not None:
        result.graph_module.meta["mla_cache"] = change
    return result


def _optimize_graph_module(gm: fx.GraphModule, example_inputs: Any, options: Options) -> fx.GraphModule:
    values = None
    if example_inputs is not None:
        args, kwargs = _arguments(example_inputs)
        if kwargs:
            raise InputError("example_inputs of a GraphModule must be a tuple, one value per argument of its call")
        values = _flat_inputs(gm, args)
    program = capture.from_graph_module(gm, values)
    rewritten, report = _one_form(program, options)
    change = None if rewritten.cache is None else cache_change.of_program(rewritten, rewritten.weights)
    result = capture.to_plain_graph_module(rewritten, runtime.folded_values(rewritten), change)
    result.meta["mla_report"] = report
    if change is not None:
        result.meta["mla_cache"] = change
    return result


def _flat_inputs(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """One value per placeholder, through the graph's own flattening of nested inputs where it has one."""
    try:
        return list(gm.graph.process_inputs(*args))
    except (TypeError, ValueError) as error:
        raise InputError(f"the example inputs do not fit the graph: {error}") from error


def _one_form(program: Program, options: Options) -> tuple[Program, Report]:
    """The program in the one form an artifact can hold: where calls would choose, the traced sizes choose."""
    outcome = pipeline.run(program, options, own_cache=True)
    report = outcome.report
    if outcome.variants and not runtime.pays_as_traced(outcome.base, outcome.variants):
        outcome = pipeline.run(program, replace(options, forms="expanded"), own_cache=True)
        report = replace(
            outcome.report,
            messages=(
                *outcome.report.messages,
                _ONE_FORM,
            ),
        )
    tell(report)
    return outcome.program, report


def _artifact_options(given: Mapping[str, Any], **defaults: Any) -> Options:
    """Options for a program that is saved: nobody watches its weights, so folding them has to be asked for."""
    options = Options.parse(given, **{"verify": True, **defaults})
    if options.inductor:
        raise OptionError(f"{', '.join(options.inductor)}: give options of Inductor to what compiles the program")
    return replace(options, fold="never") if options.fold == "auto" else options
