"""Launches the Triton kernels: compiled once per kind of call, bound once per shape, then found by a look-up.

A call is known by what its launch depends on: dtypes, shapes, strides and alignment of its tensors, and its numbers.
The first call of a kind is checked, planned and compiled; later ones allocate their results and scratch and launch.
Nothing here reads a tensor or waits for the device, sizes come from shapes, and launches go to the current stream:
after one warm-up call of the same kind, a call can be captured in a CUDA graph.

``triton.compile`` gets exactly what :func:`mla_compile.kernels.triton.steps.steps` describes, as the compilation
without a GPU does. Where a Triton has other internals than 3.6 and 3.7, launches go through its normal entry, slower by
some 10 us.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.kernels.hopper import launch as gluon_launch
from mla_compile.kernels.hopper import steps as gluon_steps
from mla_compile.kernels.plan import Device, NoPlanError, Plan, check, plan
from mla_compile.kernels.triton.bind import bind
from mla_compile.kernels.triton.steps import Call, Step, read_mask_bytes, scratch, steps

__all__ = ["Call", "Device", "Plan", "available", "chosen_plan", "clear", "launch", "steps"]

LOG = logging.getLogger("mla_compile.kernels")
REMEMBERED = 1024  # kinds of call; a cache that grows by a token a step is a new kind each time
_TENSORS = ("query", "latent", "rope", "values", "mask", "table", "lengths", "sinks", "kv_scale")
Launch = Callable[[int, list[int]], None]  # stream, addresses


class _Bound(NamedTuple):
    """What a kind of call needs: buffers to allocate after the nine tensors, and launches over the addresses of all."""

    buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    launches: tuple[Launch, ...]


_bound: dict[Any, _Bound] = {}
_compiled: dict[Any, Any] = {}


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton is installed; says so once where it is not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    LOG.warning("triton is not installed, decode attention runs the reference: pip install 'mla-compile[triton]'")
    return False


@lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    LOG.warning("decode attention runs the reference: %s", message)


def clear() -> None:
    """Forget every kind of call (after writing a new tuned.json: ``plan.table.cache_clear()`` too)."""
    _bound.clear()


def suits(query: Tensor, latent: Tensor) -> bool:
    """Whether a kernel takes this call: a GPU from sm_80 on, Triton, anything but float64, something to compute."""
    return (
        query.device.type == "cuda"
        and latent.dtype != torch.float64
        and query.numel() > 0
        and latent.numel() > 0
        and available()
        and Device.of(query.device).capability >= (8, 0)
    )


def launch(
    given: Call,
    check_call: Callable[[], None],
    *,
    num_splits: int = 0,
    deterministic: bool = False,
    chosen: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a call on CUDA. ``check_call`` raises where its arguments do not fit; it runs once per kind.

    Raises :class:`InputError` before anything is launched: from ``check_call``, or where no plan fits the device.
    """
    query = given.query
    if query.stride(-1) != 1:
        query = query.contiguous()
        given = given._replace(query=query)
    index = query.get_device()
    addresses: list[int] = []
    kind: list[Any] = [given[9:], num_splits, deterministic, chosen]
    for x in given[:9]:
        if x is None:
            kind.append(None)
            addresses.append(0)
        else:
            address = x.data_ptr()
            kind.append((x.dtype, x.shape, x.stride(), address & 15, x.get_device()))
            addresses.append(address)
    key = tuple(kind)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return _run(key, given, addresses, index, check_call, num_splits, deterministic, chosen)
    return _run(key, given, addresses, index, check_call, num_splits, deterministic, chosen)


def _run(
    key: Any,
    given: Call,
    addresses: list[int],
    index: int,
    check_call: Callable[[], None],
    num_splits: int,
    deterministic: bool,
    chosen: Plan | None,
) -> tuple[Tensor, Tensor]:
    bound = _bound.get(key)
    if bound is None:
        check_call()
        device = Device.of(given.query.device)
        try:
            picked = chosen_plan(given, device, num_splits=num_splits, deterministic=deterministic, chosen=chosen)
        except NoPlanError as error:
            _say_once(str(error))
            raise
        asked = bool(num_splits) or chosen is not None
        bound = _bind_gluon(given, picked, device, index, asked) if picked.kernel == "gluon" else None
        if bound is None and picked.kernel == "gluon":
            picked = chosen_plan(given, device, num_splits=num_splits, deterministic=deterministic, gluon=False)
        bound = bound or _bind(given, picked, device, index, asked)
        if len(_bound) >= REMEMBERED:
            _bound.clear()
        _bound[key] = bound
    made = [torch.empty(shape, dtype=dtype, device=given.query.device) for shape, dtype in bound.buffers]
    addresses += [x.data_ptr() for x in made]
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    for one in bound.launches:
        one(stream, addresses)
    return made[0], made[1]


def chosen_plan(
    call: Call,
    device: Device,
    *,
    num_splits: int = 0,
    deterministic: bool = False,
    chosen: Plan | None = None,
    gluon: bool = True,
) -> Plan:
    """The plan of a call: the caller's own, verified, or the planner's."""
    z = call.sizes
    width = None if call.values is None else z.V
    if chosen is not None:
        return check(
            chosen,
            L=z.L,
            R=z.R,
            Lv=width,
            cache_dtype=call.latent.dtype,
            device=device,
            paged=bool(z.page),
            masked=call.mask is not None,
            mask_bytes=read_mask_bytes(call),
        )
    return plan(
        B=z.B,
        S=z.S,
        H=z.H,
        L=z.L,
        R=z.R,
        T=z.T,
        Lv=width,
        query_dtype=call.query.dtype,
        cache_dtype=call.latent.dtype,
        page_size=z.page or None,
        masked=call.mask is not None,
        mask_bytes=read_mask_bytes(call),
        device=device,
        splits=num_splits or None,
        deterministic=deterministic,
        gluon=gluon,
    )


def _bind(call: Call, picked: Plan, device: Device, index: int, asked: bool) -> _Bound:
    buffers = scratch(call, picked, device)
    places = {name: i for i, name in enumerate((*_TENSORS, *buffers))}
    described = steps(call, picked, device, least=0 if asked and picked.chunk is None else None)
    return _Bound(tuple(buffers.values()), tuple(_launch_of(step, places, index) for step in described))


def _bind_gluon(call: Call, picked: Plan, device: Device, index: int, asked: bool) -> _Bound | None:
    """The launches of the Hopper kernel; None where this call, or this Triton, is not for it."""
    if not gluon_steps.suits(call, device):
        return None
    buffers = gluon_steps.scratch(call, picked, device)
    places = {name: i for i, name in enumerate((*_TENSORS, *buffers))}
    least = 0 if asked and picked.chunk is None else None
    launches = []
    for step in gluon_steps.steps(call, picked, device, least=least):
        one: Launch | None
        if isinstance(step, gluon_steps.GluonStep):
            one = gluon_launch.launch_of(step, places, index)
        else:
            one = _launch_of(step, places, index)
        if one is None:
            return None
        launches.append(one)
    return _Bound(tuple(buffers.values()), tuple(launches))


def _launch_of(step: Step, places: dict[str, int], index: int) -> Launch:
    """A function that launches a step over a list of addresses."""
    try:
        run = bind(_compile(step, index), step.grid)
    except (ImportError, AttributeError, TypeError) as error:  # what a Triton with other internals raises
        LOG.info("%s: launched through Triton's normal entry (%s: %s)", step.name, type(error).__name__, error)
        return _normal_launch(step, places, index)
    given = {**step.scalars, **step.constants}
    template = [given.get(name) for name in step.fn.arg_names]
    slots = [(i, places[step.buffers[name]]) for i, name in enumerate(step.fn.arg_names) if name in step.buffers]

    def go(stream: int, addresses: list[int]) -> None:
        arguments = template.copy()
        for i, place in slots:
            arguments[i] = addresses[place]
        run(stream, arguments)

    return go


def _compile(step: Step, index: int) -> Any:
    """The compiled kernel, loaded on this device; kinds of call that differ in sizes only share it."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    fn, signature, constants, attributes, options = step.source()
    key = (index, step.name, *map(str, (signature, constants, attributes, options)))
    if key not in _compiled:
        source = ASTSource(fn, signature, constants, attributes)
        _compiled[key] = triton.compile(source, target=driver.active.get_current_target(), options=options)
    return _compiled[key]


class _Address:
    """A pointer argument as Triton's normal entry takes it: an address and a dtype, without a tensor around them."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def _normal_launch(step: Step, places: dict[str, int], index: int) -> Launch:
    from mla_compile.kernels.triton.steps import TYPES

    dtypes = {kind: dtype for dtype, kind in TYPES.items() if dtype != torch.bool}

    def go(stream: int, addresses: list[int]) -> None:
        given: dict[str, Any] = {**step.scalars, **step.constants}
        for argument, name in step.buffers.items():
            given[argument] = _Address(addresses[places[name]], dtypes[step.types[argument]])
        step.fn[step.grid](**given, **step.options)  # on the current stream, which is the one that was asked for

    return go
