"""Turns a step into a function of a stream and addresses. A step is compiled and bound to its arguments only once.

``triton.compile`` gets exactly what :func:`mla_compile.kernels.triton.steps.steps` describes, as in compilation without
a GPU. Triton's normal launch collects metadata and calls profiler hooks even if no profiler is attached, and passes on
all arguments (some 70 for these kernels) three times. :func:`bind` avoids this work unless a profiler is attached. If
Triton's internals differ from those of 3.6 and 3.7, the normal launch is used, which takes some 10 us longer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from mla_compile.kernels.triton.step import TYPES, Step

LOG = logging.getLogger("mla_compile.kernels")
Launch = Callable[[int, list[int]], None]  # stream, addresses
_compiled: dict[object, object] = {}


class Address:
    """An address and a dtype, which Triton takes in place of a tensor. The tensor's memory is not kept alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


def launch_of(step: Step, places: dict[str, int], index: int) -> Launch:
    """Return a function that launches a step on device ``index``, given a stream and a list of addresses.

    ``places`` maps buffers, and scalars that change between launches, to positions in the list of addresses.
    """
    try:
        run = bind(_compile(step, index), step.grid)
    except (ImportError, AttributeError, TypeError) as error:  # Triton's internals are not as expected
        LOG.info("%s: launched through Triton's normal entry (%s: %s)", step.name, type(error).__name__, error)
        return _normal_launch(step, places)
    given = {**step.scalars, **step.constants}
    template = [given.get(name) for name in step.fn.arg_names]
    slots = [(step.fn.arg_names.index(argument), place) for argument, place in placed(step, places).items()]

    def go(stream: int, addresses: list[int]) -> None:
        arguments = template.copy()
        for i, place in slots:
            arguments[i] = addresses[place]
        run(stream, arguments)

    return go


def placed(step: Step, places: dict[str, int]) -> dict[str, int]:
    """Map each argument that is set at each launch to its position in the list of addresses."""
    found = {argument: places[name] for argument, name in step.buffers.items()}
    return found | {name: places[name] for name in step.scalars if name in places}


def bind(kernel: Any, grid: tuple[int, int, int]) -> Callable[[int, list[Any]], None]:
    """Load a kernel on the current device and return ``go(stream, arguments)``, which launches the kernel.

    Raises AttributeError or ImportError if Triton's internals are not those of 3.6 and 3.7.
    """
    from triton import knobs

    hooks = knobs.runtime
    entry = kernel[grid]
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata

    def go(stream: int, arguments: list[Any]) -> None:
        if _heard(hooks.launch_enter_hook) or _heard(hooks.launch_exit_hook):
            entry(*arguments, stream=stream)
        else:
            run(*grid, stream, function, packed, None, None, None, *arguments)

    return go


def _heard(hook: object) -> bool:
    """Whether a hook is set: a chain of Triton's that is not empty, or a caller's own function."""
    return bool(getattr(hook, "calls", hook))


def _compile(step: Step, index: int) -> object:
    """Return the compiled kernel for a device. Calls that differ only in runtime sizes share a kernel."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    fn, signature, constants, attributes, options = step.source()
    key = (index, step.name, *map(str, (signature, constants, attributes, options)))
    if key not in _compiled:
        source = ASTSource(fn, signature, constants, attributes)
        _compiled[key] = triton.compile(source, target=driver.active.get_current_target(), options=options)
    return _compiled[key]


def _normal_launch(step: Step, places: dict[str, int]) -> Launch:
    dtypes = {kind: dtype for dtype, kind in TYPES.items() if dtype != torch.bool}

    def go(stream: int, addresses: list[int]) -> None:
        given: dict[str, object] = {**step.scalars, **step.constants}
        for argument, place in placed(step, places).items():
            value = addresses[place]
            given[argument] = Address(value, dtypes[step.types[argument]]) if argument in step.types else value
        step.fn[step.grid](**given, **step.options)  # on the current stream, which equals ``stream``

    return go
