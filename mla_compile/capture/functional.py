"""Traces a module into a functional graph: in-place writes to inputs become results.

``aot_export_module(pre_dispatch=True)`` runs the module twice. The first run only finds the inputs that are written,
and takes up to a third of a capture. :func:`traced_once` traces once, with torch's functional tensors, which record
writes. ``aot_export_module`` is still called if its result might differ: for writes to inputs that share memory, inputs
whose shape or memory is replaced, operators with side effects, streams, and sizes that become constants during the
trace.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.functional_utils import (
    assert_functional_graph,
    from_fun,
    has_data_mutation,
    has_metadata_mutation,
    to_fun,
)
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx, maybe_disable_thunkify, maybe_enable_thunkify
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils import stateless

from mla_compile.capture.autocast import is_active
from mla_compile.core.program import results_of


@dataclass(frozen=True)
class Functional:
    """A functional graph of (parameters, buffers, inputs).

    Attributes:
        gm: the graph. It returns the new value of each input that is written to, then the results of the module.
        written: the positions of the inputs that are written to, in the order of the new values.
        tokens: the number of tokens that order side effects. Tokens precede the inputs and the results.
    """

    gm: fx.GraphModule
    written: tuple[int, ...]
    tokens: int


def functionalized(gm: fx.GraphModule, values: Sequence[object]) -> Functional:
    """Return the functional graph of ``gm`` for ``values``, one per placeholder. Raises whatever an operator raises."""
    return traced_once(gm, values) or _by_aot_export(gm, values)


@contextmanager
def _whole_operators() -> Iterator[None]:
    """Silence torch's warning about library operators that stay one node, as intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "At pre-dispatch tracing", UserWarning)
        yield


def _by_aot_export(gm: fx.GraphModule, values: Sequence[object]) -> Functional:
    traced: Any
    with _whole_operators():
        traced, signature = aot_export_module(gm, values, trace_joint=False, pre_dispatch=True)
    tokens = len(signature.output_tokens)
    graph: fx.Graph = traced.graph
    placeholders = [node.name for node in graph.find_nodes(op="placeholder")][tokens:]
    state = (*signature.parameters, *signature.buffers)
    places = {name: place for place, name in enumerate((*state, *placeholders[len(state) :]))}
    changed = (signature.parameters_to_mutate, signature.buffers_to_mutate, signature.user_inputs_to_mutate)
    owners: dict[str, str] = {new: name for one in changed for new, name in one.items()}
    returned = results_of(graph)
    new = returned[tokens : len(returned) - len(signature.user_outputs)]
    return Functional(traced, tuple(places[owners[value.name]] for value in new), tokens)


@dataclass(frozen=True)
class FakeInputs:
    """The fake inputs of a trace: the parameters and buffers named in ``state``, then the placeholders."""

    state: tuple[str, ...]
    fakes: list[object]
    mode: FakeTensorMode


def fake_inputs(gm: fx.GraphModule, values: Sequence[object]) -> FakeInputs | None:
    """Return the inputs of a trace of ``gm`` for ``values``, or None if only torch's own trace supports a value."""
    state = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    given = [*state.values(), *values]
    mode = detect_fake_mode(given)
    if mode is None or not all(_is_plain(value) for value in given) or _has_streams(gm.graph):
        return None
    with mode:
        fakes = _apart([_fake(mode, value, of_module=place < len(state)) for place, value in enumerate(given)])
    return FakeInputs(tuple(state), fakes, mode)


def traced_once(gm: fx.GraphModule, values: Sequence[object]) -> Functional | None:
    """Trace the functional graph once. Return None if torch's own result might differ.

    Raises whatever an operator raises.
    """
    given = fake_inputs(gm, values)
    if given is None:
        return None
    state, fakes, fake_mode = given.state, given.fakes, given.mode
    functionals: list[Any] = []
    written: list[int] = []

    def run(*args: Any) -> Any:
        # torch's own functionalization is off, because the functional tensors made below record writes.
        with maybe_enable_thunkify(), _without_functionalization():
            functionals[:] = [to_fun(arg) for arg in args]
            named = dict(zip(state, functionals, strict=False))
            with stateless._reparametrize_module(gm, named), maybe_disable_thunkify(), preserve_node_meta():
                fake_mode.epoch += 1  # invalidates memoized sizes that were read from tensors
                returned = PropagateUnbackedSymInts(gm).run(*functionals[len(state) :])
            written[:] = [place for place, one in enumerate(functionals) if has_data_mutation(one)]
            return tuple(from_fun(value) for value in (*(functionals[place] for place in written), *returned))

    run._orig_mod = gm  # type: ignore[attr-defined]  # make_fx looks here for the modules of nodes
    # Without this reset, torch would search all operators that this process has dispatched for cached handlers, once
    # for each traced operator. The search would find nothing, because torch caches no pre-dispatch handlers.
    torch._ops.reset_cached_ops()
    mode = FunctionalTensorMode(pre_dispatch=True, export=True, _allow_token_discovery=True)
    before, constants = is_active(), _constants(fake_mode)
    with _whole_operators(), fake_mode, preserve_rng_state(), enable_python_dispatcher(), mode:
        traced = make_fx(run, decomposition_table={}, record_module_stack=True, pre_dispatch=True)(*fakes)
        if mode._tokens or is_active() != before or _replaced(functionals, fakes) or _share_memory(fakes, written):
            return None
    if _constants(fake_mode) != constants:
        return None
    assert_functional_graph(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return Functional(traced, tuple(written), 0)


def _is_plain(value: object) -> bool:
    """Whether a value is a plain dense tensor or a number."""
    if isinstance(value, Tensor):
        known = type(value) in (Tensor, torch.nn.Parameter, FakeTensor)
        return known and value.layout is torch.strided and not value.is_nested
    return value is None or isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _has_streams(graph: fx.Graph) -> bool:
    return any(getattr(node.target, "namespace", None) == "streams" for node in graph.nodes)


def _fake(mode: FakeTensorMode, value: object, *, of_module: bool) -> object:
    """Return ``value`` as a fake tensor of ``mode``: Dynamo's fake tensor for ``value``, if there is one."""
    if not isinstance(value, Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
        return value
    context = TracingContext.try_get()
    known = None if context is None else context.tensor_to_context.get(value)
    if known is not None:
        return mode.from_tensor(value, symbolic_context=known, source=known.tensor_source, trace=False)
    return mode.from_tensor(value, static_shapes=True if of_module else None)


def _constants(mode: FakeTensorMode) -> int:
    """Return how many symbolic sizes have been specialised to constants."""
    known = {} if mode.shape_env is None else mode.shape_env.replacements
    return sum(1 for value in known.values() if value.is_number)


def _apart(fakes: Sequence[object]) -> list[object]:
    """Detach repeated tensors, so that a trace can tell which of two tied inputs is read."""
    first = {id(fake): place for place, fake in reversed(list(enumerate(fakes)))}
    return [
        fake.detach() if isinstance(fake, Tensor) and first[id(fake)] < place else fake
        for place, fake in enumerate(fakes)
    ]


def _share_memory(fakes: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether a written input shares memory with another input. The other input would not show the write."""
    storages = Counter(fake.untyped_storage()._cdata for fake in fakes if isinstance(fake, Tensor))
    return any(storages[fakes[place].untyped_storage()._cdata] > 1 for place in written)


def _replaced(functionals: Sequence[object], fakes: Sequence[object]) -> bool:
    """Whether the shape or the memory of an input was replaced."""
    return any(
        has_metadata_mutation(one, fake, check_only_storage_mutation=False)
        for one, fake in zip(functionals, fakes, strict=True)
    )


def _without_functionalization() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
