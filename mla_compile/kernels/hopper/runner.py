"""Turns a step of the Hopper kernel into a function of a stream and addresses. :func:`consan` adds a sanitizer.

This is the counterpart of kernels/triton/runner.py. Gluon also needs TMA descriptors, and a fallback if the installed
Triton cannot compile the kernel. Triton is imported only when a call runs on a GPU.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import lru_cache

import torch

from mla_compile.kernels.hopper.branches import comparisons
from mla_compile.kernels.hopper.step import Box, GluonStep
from mla_compile.kernels.triton.runner import Address, Launch, bind, placed

LOG = logging.getLogger("mla_compile.kernels")
_compiled: dict[object, object] = {}
_options: dict[str, object] = {}  # compile options that consan() adds


@lru_cache(maxsize=4096)
def descriptor(box: Box, address: int) -> object:
    """Return the TMA descriptor of a box at an address. The descriptor depends on nothing else, so it is cached."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    base = Address(address, box.dtype)
    return TensorDescriptor(base, list(box.shape), list(box.strides), list(box.block), layout)


def built(step: GluonStep, target: object) -> object:
    """Compile a step for a ``triton.backends.compiler.GPUTarget``."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource

    fn, signature, constants, attributes, options = step.source()
    source = GluonASTSource(fn, signature, constants, attributes)
    with comparisons() if "num_ctas" in options else nullcontext():
        return triton.compile(source, target=target, options={**options, **_options})


def compiled(step: GluonStep, index: int) -> object | None:
    """Return a step's kernel for device ``index``; None (logged once) if this Triton cannot compile the kernel."""
    from triton.runtime.driver import driver

    key = (index, step.name, *map(str, (*step.source()[1:], _options)))
    if key not in _compiled:
        import triton

        target = driver.active.get_current_target()
        try:
            _compiled[key] = built(step, target)
        except Exception as error:  # noqa: BLE001  an experimental interface: another Triton may fail in any way
            LOG.warning("the Hopper kernel does not compile with Triton %s, the portable one runs: %s: %s",
                        triton.__version__, type(error).__name__, error)  # fmt: skip
            _compiled[key] = None
    return _compiled[key]


def launch_of(step: GluonStep, places: dict[str, int], index: int) -> Launch | None:
    """Return a function that launches a step, as in kernels/triton/runner.py; None if the step does not compile."""
    kernel = compiled(step, index)
    if kernel is None:
        return None
    run = bind(kernel, step.grid)
    given = {**step.scalars, **step.constants}
    template = [given.get(name) for name in step.fn.arg_names]
    position = {name: i for i, name in enumerate(step.fn.arg_names)}
    slots = [(position[a], place) for a, place in placed(step, places).items() if a not in step.boxes]
    described = [(position[a], places[step.buffers[a]], box) for a, box in step.boxes.items()]
    tokens = places.get("T")

    def go(stream: int, addresses: list[int]) -> None:
        arguments = template.copy()
        for i, place in slots:
            arguments[i] = addresses[place]
        for i, place, box in described:
            here = box if tokens is None else box.of(addresses[tokens])
            arguments[i] = descriptor(here, addresses[place])
        run(stream, arguments)

    return go


def consan() -> None:
    """From now on, compile the Hopper kernel in this process with Triton's ConSan, which reports races.

    ConSan checks fences between proxies and single warps, which the CPU simulation does not model. The kernel then
    compiles and runs slowly. An error is a device-side assertion, after which the process cannot use the GPU. Torch
    allocates ConSan's scratch memory. Calls that were launched before keep their kernel until
    :func:`mla_compile.kernels.launch.clear`.
    """
    import triton
    from triton import knobs

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    knobs.compilation.instrumentation_mode = _options["instrumentation_mode"] = "consan"
