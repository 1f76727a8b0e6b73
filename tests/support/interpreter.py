"""Runs our Triton kernels in Triton's interpreter, on the CPU, in a process of its own.

Whether a kernel is interpreted is decided when it is decorated, by TRITON_INTERPRET, and so it is for every helper of
Triton's own: a process either interprets or compiles. :func:`worker` starts one that interprets; the tests send it
work.

Two of the interpreter's habits would make bfloat16 results worthless, in silence: ``tl.dot`` multiplies the bit
patterns, and a conversion cuts instead of rounding. :func:`_mend` replaces both, and gives a condition that
is the same for a whole block the dtype of a mask (Triton 3.9 makes int32 of it, and refuses it as one).

A third habit takes a third of the time: at each call of a helper, its language is replaced by the interpreter's again.
:func:`_replace_language_once` does it once for each file of kernels.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor


@lru_cache(maxsize=1)
def worker() -> ProcessPoolExecutor:
    """The process that interprets, one for all files. Functions and arguments sent to it are pickled by name.

    Skips the test where Triton is missing, or is one whose interpreter does not work with the NumPy at hand.
    """
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs NumPy below 2.4, not {numpy.__version__}")
    started = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)
    with pytest.MonkeyPatch.context() as patch:  # which the process inherits when it starts, with the first work
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads spin, and its products are small here
        started.submit(_interpreted)
    return started


def _release(module: Any) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    _mend()
    _replace_language_once()


def _mend() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, trunc, convert = builder.create_dot, builder.create_fp_trunc, builder.create_fp_to_fp
    splat = builder.create_splat

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            return interpreter.TensorHandle(np.matmul(widened(a), widened(b)) + d.data, d.dtype.scalar)
        return dot(self, a, b, d, *how)

    def rounded(src: Any, dst_type: Any) -> Any:
        """float32, or float16 without a step between, to bfloat16, to nearest even; None for other conversions."""
        if src.dtype.scalar not in (tl.float32, tl.float16) or dst_type.scalar != tl.bfloat16:
            return None
        bits = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(src.data.shape), dst_type.scalar)

    def create_fp_trunc(self: Any, src: Any, dst_type: Any) -> Any:
        found = rounded(src, dst_type)
        return trunc(self, src, dst_type) if found is None else found

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, mode: Any) -> Any:
        found = rounded(src, dst_type)
        return convert(self, src, dst_type, mode) if found is None else found

    def create_splat(self: Any, to: Any, x: Any) -> Any:
        made = splat(self, to, x)
        return interpreter.TensorHandle(made.data.astype(bool), made.dtype) if x.data.dtype == bool else made

    builder.create_dot, builder.create_fp_trunc, builder.create_fp_to_fp = create_dot, create_fp_trunc, create_fp_to_fp
    builder.create_splat = create_splat


class _Kept:
    """Stands for the interpreter's list of what it has replaced, which a launch restores at its end."""

    def restore(self) -> None:
        """Nothing: this process does not compile, and so needs the language of the compiler no more."""


def _replace_language_once() -> None:
    from triton.runtime import interpreter

    replace, done = interpreter._patch_lang, set()

    def once(fn: Any) -> _Kept:
        if fn.__module__ not in done:
            replace(fn)
            done.add(fn.__module__)
        return _Kept()

    interpreter._patch_lang = once


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    from mla_compile.kernels.triton import decode_triton

    return type(decode_triton.attend).__name__ == "InterpretedFunction"


def _as_triton_takes_it(x: Tensor | None, kind: str) -> Tensor | None:
    """bool masks, and fp8 rows whose signature says bytes, are passed as bytes."""
    return x.view(torch.uint8) if x is not None and kind == "*u8" and x.dtype != torch.uint8 else x


def run(
    call: Any,
    plan: Any,
    device: Any = None,
    *,
    least: int | None = None,
    seen: dict[str, Tensor] | None = None,
    bound: Any = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a call under a plan. Scratch starts as NaN (or -1): nothing may be read before it is written.

    ``seen`` receives the scratch buffers. ``bound`` is the call that the launches were bound for, of other tokens.
    """
    from mla_compile.kernels.devices import PRESETS
    from mla_compile.kernels.triton import steps

    assert _interpreted(), "this process compiles: send the work to interpreter.worker()"
    device = device or PRESETS["sm_90"]
    scratch = {
        name: torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)
        for name, (shape, dtype) in steps.scratch(call, plan, device).items()
    }
    described = steps.steps(bound or call, plan, device, least=least)
    _interpret(described, call, scratch | _inside(call, plan, device), anew=bound is not None)
    if seen is not None:
        seen.update(scratch)
    return scratch["out"], scratch["lse"]


def schedule(call: Any, plan: Any, device: Any = None) -> Tensor:
    """The schedule of a call under a plan; what nobody writes of it is -1."""
    from mla_compile.kernels import shared
    from mla_compile.kernels.devices import PRESETS
    from mla_compile.kernels.triton import steps

    device = device or PRESETS["sm_90"]
    made = torch.full((shared.elements(call),), -1)
    _interpret(steps.preparing(call, plan, device), call, _inside(call._replace(schedule=made), plan, device))
    return made


def _inside(call: Any, plan: Any, device: Any) -> dict[str, Tensor]:
    """The buffers in the schedule of a call, if it has one."""
    from mla_compile.kernels import shared
    from mla_compile.kernels.triton import steps

    if call.schedule is None:
        return {}
    buffers = steps.prepared(call, plan, device)
    found, content = {}, call.schedule.view(torch.uint8)
    for name, start in shared.offsets(buffers).items():
        shape, dtype = buffers[name]
        found[name] = content[start:][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return found


def _interpret(described: Any, call: Any, own: dict[str, Tensor], *, anew: bool = False) -> None:
    """``anew``: the launches are told what may change from call to call."""
    from mla_compile.kernels import kinds
    from mla_compile.kernels.triton import steps

    told = dict(zip(kinds.SIZED, kinds.grown(call).scalars, strict=True)) if anew else {}
    buffers = dict(zip(steps.BUFFERS, call, strict=False)) | own  # the tensors are a call's first fields
    for step in described:
        given = step.arguments(buffers)
        given.update((name, value) for name, value in told.items() if name in step.scalars)
        for argument in step.buffers:
            given[argument] = _as_triton_takes_it(given[argument], step.types[argument])
        step.fn[step.grid](**given)


def index_scores(call: Any, most: int = 0) -> Tensor:
    """The scores of an indexer by the Triton kernel; what it does not write is NaN."""
    from mla_compile.kernels.triton.index_steps import BUFFERS, index_step

    assert _interpreted(), "this process compiles: send the work to interpreter.worker()"
    out = torch.full((*call.query.shape[:2], call.keys.shape[1]), torch.nan)
    step = index_step(call, most)
    step.fn[step.grid](**step.arguments(dict(zip(BUFFERS, (*call[:3], out), strict=True))))
    return out
