"""Launches calls on a GPU. Each kind of call is checked, planned, compiled and bound once, then looked up.

The kind of a call is everything on which its launch depends: dtypes, shapes, strides and alignment of its tensors, and
its scalars. The number of tokens of a contiguous cache is set at each launch (kernels/kinds.py), so a growing cache
does not make a new kind at every step.

Later calls of a kind only allocate results and scratch memory, and launch. This module never reads the contents of a
tensor and never waits for the device. Launches go to the current stream. After one warm-up call of the same kind, a
call can be captured in a CUDA graph.

The plan chooses between the portable kernel (kernels/triton) and the Hopper kernel (kernels/hopper). The portable
kernel is the fallback if the Hopper kernel lacks a feature that the call uses, or does not compile with the installed
Triton.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import checks
from mla_compile.kernels.call import TENSORS, DecodeCall
from mla_compile.kernels.devices import Device
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.hopper.step import GluonStep
from mla_compile.kernels.kinds import SIZED, grown
from mla_compile.kernels.known import remember
from mla_compile.kernels.plan import MIN_CAPABILITY, NoPlanError, Plan, check, plan
from mla_compile.kernels.reference import additive_mask
from mla_compile.kernels.shared import ALIGNMENT, Buffers, elements, offsets
from mla_compile.kernels.triton import lists, runner, steps
from mla_compile.kernels.triton.runner import Launch
from mla_compile.kernels.triton.step import Step

LOG = logging.getLogger("mla_compile.kernels")
# plan.kernel -> the module that describes its launches
_KERNELS: dict[str, ModuleType] = {"triton": steps, "gluon": hopper_steps}
_SCHEDULE = DecodeCall._fields.index("schedule")
_ROWS = frozenset(DecodeCall._fields.index(name) for name in ("latent", "rope", "values", "kv_scale", "indices"))


class _Bound(NamedTuple):
    """The launches of a kind of call, and the buffers to allocate for them.

    A launch receives one list of numbers, in this order:

    * the addresses of the call's tensors
    * ``scalars``, which change between launches (kernels/kinds.py)
    * the addresses of the allocated ``buffers``
    * the addresses of the buffers in the call's schedule, at the byte offsets ``inside``
    """

    scalars: tuple[int, ...]
    buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inside: tuple[int, ...]
    launches: tuple[Launch, ...]


_Binder = Callable[
    [DecodeCall, int, Plan | None, int], _Bound
]  # call, device index, the caller's own plan, largest number of tokens
_bound: dict[object, _Bound] = {}  # keyed by all sizes: most calls need only this look-up
_kinds: dict[object, _Bound] = {}  # keyed by kind, which does not change as a cache grows


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton is installed; logs a warning once if it is not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    LOG.warning("triton is not installed, decode attention runs the reference: pip install 'mla-compile[triton]'")
    return False


@lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    LOG.warning("decode attention runs the reference: %s", message)


def clear() -> None:
    """Forget every kind of call. If tuned.json changed, also clear the caches of ``tuned.table`` and ``plan.plan``."""
    _bound.clear()
    _kinds.clear()


def reads(rows: Tensor) -> bool:
    """Whether a kernel can read these rows: not float64, on a GPU from sm_80 on, with Triton installed."""
    return (
        rows.is_cuda
        and rows.dtype != torch.float64
        and available()
        and Device.of(rows.device).capability >= MIN_CAPABILITY
    )


def suits(call: DecodeCall) -> bool:
    """Whether a kernel takes this call: its rows pass :func:`reads`, and there is something to compute.

    Calls with index lists and a mask that differs between heads are left to :mod:`mla_compile.kernels.chosen`, which
    copies the listed rows.
    """
    return (
        call.query.is_cuda
        and (call.indices is None or lists.suits(call))
        and call.query.numel() > 0
        and call.latent.numel() > 0
        and (call.block_table is None or call.block_table.numel() > 0)
        and reads(call.latent)
    )


def launch(call: DecodeCall, own: Plan | None = None) -> tuple[Tensor, Tensor] | None:
    """Run a call on CUDA and return ``(out, lse)``. ``own`` is the caller's own plan, if there is one.

    Returns None (logged once) if rows are too wide for the device's shared memory. Raises :class:`InputError` before
    any launch if the arguments do not fit together, or ``own`` does not fit the device.
    """
    made = _launch(call, own, _attention)
    return None if made is None else (made[0], made[1])


def schedule(call: DecodeCall) -> Tensor:
    """Return the schedule of a call, int64 [:func:`shared.elements`]: data that is prepared before attention.

    If the call prepares nothing, the result is uninitialized. Raises :class:`InputError` as :func:`launch` does.
    """
    made = call.query.new_empty(elements(call), dtype=torch.int64)
    _launch(call._replace(schedule=made), None, _preparation)
    return made


def _launch(call: DecodeCall, own: Plan | None, bind: _Binder) -> list[Tensor] | None:
    """Run the launches made by ``bind``. Return the buffers that were allocated, or None if there is no plan."""
    query = call.query
    if query.stride(-1) != 1:
        call = call._replace(query=query.contiguous())
    if call.indices is not None and call.indices.dim() == 3 and call.indices.stride(2) != 1:
        call = call._replace(indices=call.indices.contiguous())
    if call.mask is not None and call.mask.dtype == torch.float64:
        call = call._replace(mask=additive_mask(call.mask, torch.float32))
    index = query.get_device()
    addresses: list[int] = []
    kind: list[object] = [call[TENSORS:], own, bind]
    tensors: tuple[Tensor | None, ...] = call[:TENSORS]  # type: ignore[assignment]  # the first fields
    for x in tensors:
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
            return _run(key, call, addresses, index)
    return _run(key, call, addresses, index)


def _run(key: tuple[object, ...], call: DecodeCall, addresses: list[int], index: int) -> list[Tensor] | None:
    bound = _bound.get(key)
    if bound is None:
        try:
            bound = _found(key, call, index)
        except NoPlanError as error:
            _say_once(str(error))
            return None
        remember(_bound, key, bound)
    made = [torch.empty(shape, dtype=dtype, device=call.query.device) for shape, dtype in bound.buffers]
    addresses += bound.scalars
    addresses += [x.data_ptr() for x in made]
    if bound.inside:
        start = addresses[_SCHEDULE]
        addresses += [start + offset for offset in bound.inside]
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    for one in bound.launches:
        one(stream, addresses)
    return made


def _found(key: tuple[Any, ...], call: DecodeCall, index: int) -> _Bound:
    """Return the bound launches for ``call``. Calls of one kind may have different numbers of tokens."""
    _, own, bind = key[:3]
    rows = grown(call)
    if rows is None:
        return bind(call, index, own, 0)  # type: ignore[no-any-return]
    others = [x if i not in _ROWS or x is None else (x[0], *x[3:]) for i, x in enumerate(key[3:])]
    kind = (*key[:3], rows.most, rows.forms, *others)
    bound = _kinds.get(kind)
    if bound is None:
        bound = bind(call, index, own, rows.most)
        remember(_kinds, kind, bound)
    return bound._replace(scalars=rows.scalars)


def _attention(call: DecodeCall, index: int, own: Plan | None, most: int) -> _Bound:
    """Check, plan, compile and bind a new kind of call."""
    _check(call)
    if own is not None and call.schedule is not None:
        raise InputError(f"{call.op}: plan and schedule, which is made for the planner's plan; leave one of them out")
    device = Device.of(call.query.device)
    chosen = chosen_plan(call, device, own, most=most)
    asked = bool(call.num_splits) or own is not None
    if chosen.kernel == "gluon":
        bound = _bind(call, chosen, device, index, most, asked=asked) if hopper_steps.suits(call, device) else None
        if bound is not None:
            return bound
        chosen = chosen_plan(call, device, most=most, gluon=False)
        if hopper_steps.takes(call, device):
            call = call._replace(schedule=None)  # the schedule was made for the tiles of the Hopper kernel
    bound = _bind(call, chosen, device, index, most, asked=asked)
    assert bound is not None  # the portable kernel always compiles
    return bound


def _preparation(call: DecodeCall, index: int, own: Plan | None, most: int) -> _Bound:
    """Bind the launches that write a schedule. All layers share it, so one layer's layout of rows does not matter.

    If the Hopper kernel cannot address the rows of one layer, that layer runs the portable kernel and prepares its own
    data.
    """
    _check(call)
    device = Device.of(call.query.device)
    chosen = chosen_plan(call, device, own, most=most)
    if chosen.kernel == "gluon" and not hopper_steps.takes(call, device):
        chosen = chosen_plan(call, device, own, most=most, gluon=False)
    kernel = _KERNELS[chosen.kernel]
    bound = _bound_to({}, kernel.prepared(call, chosen, device), kernel.preparing(call, chosen, device), index, most)
    assert bound is not None  # only Gluon kernels may fail to compile
    return bound


def _check(call: DecodeCall) -> None:
    checks.check(call)
    if call.schedule is not None and call.schedule.data_ptr() % ALIGNMENT:
        raise InputError(f"{call.op}: schedule is not aligned to {ALIGNMENT} bytes; pass the whole tensor, or clone it")


def chosen_plan(
    call: DecodeCall, device: Device, own: Plan | None = None, *, most: int = 0, gluon: bool = True
) -> Plan:
    """Return the plan of a call: the caller's own plan after a check, or the planner's.

    If ``most`` is not 0, the planner plans for ``most`` tokens. With index lists, each query token is planned as a
    request over the keys of its list.
    """
    z = call.sizes
    width = None if call.values is None else z.V
    masked, mask_bytes = call.mask is not None, steps.read_mask_bytes(call.mask)
    listed = call.indices is not None
    if call.indices is not None:
        z = z._replace(B=z.B * z.S, S=1, T=call.indices.shape[2])
    if own is not None:
        return check(
            own,
            L=z.L,
            R=z.R,
            Lv=width,
            cache_dtype=call.latent.dtype,
            device=device,
            paged=bool(z.page),
            masked=masked,
            mask_bytes=mask_bytes,
            listed=listed,
        )
    return plan(
        B=z.B,
        S=z.S,
        H=z.H,
        L=z.L,
        R=z.R,
        T=most or z.T,
        Lv=width,
        query_dtype=call.query.dtype,
        cache_dtype=call.latent.dtype,
        page_size=z.page or None,
        masked=masked,
        mask_bytes=mask_bytes,
        device=device,
        splits=call.num_splits or None,
        deterministic=call.deterministic,
        gluon=gluon,
        listed=listed,
        window=call.window,
        grouped=call.groups > 0,
    )


def _bind(call: DecodeCall, chosen: Plan, device: Device, index: int, most: int, *, asked: bool) -> _Bound | None:
    """Bind a call to a plan. Return None if the kernel does not compile, which happens only with the Hopper kernel."""
    kernel = _KERNELS[chosen.kernel]
    inside = {} if call.schedule is None else kernel.prepared(call, chosen, device)
    # A split has a minimum number of tokens (None: the default), unless the caller chose the number of splits.
    least = 0 if asked and chosen.chunk is None else None
    described = kernel.steps(call, chosen, device, least=least)
    return _bound_to(kernel.scratch(call, chosen, device), inside, described, index, most)


def _bound_to(buffers: Buffers, inside: Buffers, described: tuple[Step, ...], index: int, most: int) -> _Bound | None:
    """Bind steps to a call's tensors, to ``buffers``, and to the buffers ``inside`` its schedule.

    If ``most`` is not 0, the actual number of tokens is set at each launch. Returns None if a step does not compile.
    """
    sized = SIZED if most else ()
    places = {name: i for i, name in enumerate((*steps.BUFFERS, *sized, *buffers, *inside))}
    launches = []
    for step in described:
        launch_of: Callable[..., Launch | None] = runner.launch_of
        if isinstance(step, GluonStep):
            launch_of = hopper_runner.launch_of
        one = launch_of(step, places, index)
        if one is None:
            return None
        launches.append(one)
    return _Bound((), tuple(buffers.values()), tuple(offsets(inside).values()), tuple(launches))
