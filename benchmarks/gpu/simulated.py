"""Runs the tests of the Hopper kernels in triton-viz, a simulator of Gluon that is not ours. No GPU is needed.

    PYTHONPATH=DIR:. python -m pytest -p benchmarks.gpu.simulated tests/kernels/hopper/test_decode_gluon.py

``DIR`` is a checkout of triton-viz, whose requirements are installed beside Triton 3.8: it does not load with 3.6 and
3.9. The kernels' text is executed with Gluon's own functions, which check types, shapes and layouts, over triton-viz's
NumPy, in place of our stand-ins (tests/support/gluon_machine.py). ``SIMULATOR_RESULTS`` names a file for outcomes and
seconds.

What triton-viz lacks is added here, and says so: a barrier that counts arrivals and bytes, a wait that lets the other
partitions go on and notices a deadlock, bfloat16, and rows in a swizzled tile. It has no clusters of CTAs; what is
asynchronous happens at once, and no fence is missed. So it can say that numbers and phases are right, and not that the
kernel is free of races.
"""

from __future__ import annotations

import builtins
import inspect
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_viz.core.simulation.gluon as viz
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton_viz.core.frontend import gluon as frontend

from benchmarks.gpu.executed import Results
from tests.support import gluon_cases, gluon_machine, interpreter
from tests.support.gluon_simulator import Descriptor, Pointer

COMMIT = "triton-viz 203b0c7cbb35"  # with which this was written
PATIENCE = 10.0  # seconds after which a wait is taken for a deadlock
THREADS = 128  # of a partition: each arrives for its own copies by cp.async
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_failed: list[BaseException] = []  # what ended a partition of this launch; the others wait for it in vain


class Counting:
    """Replaces the barriers of triton-viz's ``Builder``, which complete with any arrival."""

    def create_mbarrier_init(self: Any, barrier: Any, count: Any = 1, *_: Any) -> None:
        """A fresh barrier lets a wait for the phase before its first one pass."""
        state = self._barrier_state(barrier)
        state.count = state.left = viz._to_int(count)
        state.bytes, state.phase = 0, 1

    def create_mbarrier_arrive(self: Any, barrier: Any, pred: Any = True, count: Any = 1, *_: Any) -> None:
        """So many arrivals."""
        if viz._to_python_scalar(pred):
            _arrive(self._barrier_state(barrier), viz._to_int(count))

    def create_mbarrier_expect(self: Any, barrier: Any, size: Any, *_: Any) -> None:
        """An arrival, and bytes that are to come."""
        state = self._barrier_state(barrier)
        state.bytes += viz._to_int(size)
        _arrive(state, 1)

    def create_mbarrier_wait(self: Any, barrier: Any, phase: Any, pred: Any = True, *_: Any) -> None:
        """Lets the other partitions go on until the phase is over."""
        state, since = self._barrier_state(barrier), time.monotonic()
        while viz._to_python_scalar(pred) and state.phase != viz._to_int(phase) & 1:
            frontend._maybe_yield_warp_specialize()
            assert not _failed, "another partition has failed"
            assert time.monotonic() < since + PATIENCE, "deadlock"

    def create_async_tma_copy_global_to_local(
        self: Any, desc: Any, at: Any, barrier: Any, tile: Any, pred: Any, *_: Any
    ) -> None:
        """A copy, whose bytes count."""
        if viz._to_python_scalar(pred):
            tile.data[...] = desc.load_block(at)
            state = self._barrier_state(barrier)
            state.bytes -= desc.block_type.nbytes
            _settle(state)

    def create_async_copy_mbarrier_arrive(self: Any, barrier: Any, increment: Any = True, *_: Any) -> None:
        """Arrivals of all threads, whose copies have landed."""
        if not viz._to_python_scalar(increment):
            _arrive(self._barrier_state(barrier), THREADS)


def _arrive(state: Any, count: int) -> None:
    assert count <= state.left, "more arrivals at a barrier than it was initialised for"
    state.left -= count
    _settle(state)


def _settle(state: Any) -> None:
    if state.left == 0 and state.bytes == 0:
        state.left, state.phase = state.count, state.phase ^ 1


class Numbers:
    """Replaces what triton-viz's ``Builder`` does with bfloat16's bits, with layouts of loads and swizzled tiles."""

    def create_warpgroup_mma(self: Any, a: Any, b: Any, acc: Any, use_acc: Any = True, *_: Any, **__: Any) -> Any:
        """A product in float32."""
        product = np.matmul(_widened(a), _widened(b))
        if viz._to_python_scalar(use_acc):
            product = product + np.asarray(acc.data, np.float32)
        return viz._tensor_result(product, acc.dtype, viz._get_handle_layout(acc))

    def create_local_load(self: Any, kind: Any, tile: Any) -> Any:
        """In the layout that was asked for, and not in the tile's."""
        return viz._tensor_result(np.asarray(tile.data).copy(), tile.element_ty, self._ret_layout(kind))

    def create_memdesc_reinterpret(self: Any, kind: Any, tile: Any) -> Any:
        """A tile as one box, or as many."""
        data = np.asarray(tile.data)
        data = Boxes(data, kind.shape[2]) if len(kind.shape) == 4 else data.reshape(kind.shape)
        return viz.SharedMemoryHandle(kind.element_ty, list(kind.shape), kind.layout, data)


def _widened(x: Any) -> Any:
    data, kind = np.asarray(x.data), (getattr(x, "element_ty", None) or x.dtype).scalar
    return (data.astype(np.uint32) << 16).view(np.float32) if kind == tl.bfloat16 else data.astype(np.float32)


class Boxes:
    """A 128-byte-swizzled tile as boxes of some rows of 64 columns: such chunks lie one after the other."""

    def __init__(self, tile: Any, rows: int) -> None:
        self.tile, self.rows = tile, rows
        self.dtype, self.itemsize, self.size, self.shape = tile.dtype, tile.itemsize, tile.size, tile.shape

    def __getitem__(self, i: int) -> Any:
        chunk, box = divmod(int(i), len(self.tile) // self.rows)
        return self.tile[box * self.rows : (box + 1) * self.rows, chunk * 64 : (chunk + 1) * 64][None]


def _host(x: torch.Tensor) -> Any:
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def _tensor(semantic: Any, x: Any, check_type: bool = True, *, before: Any = viz.GluonSemantic.to_tensor) -> Any:
    plain = type(x) is tl.tensor  # what a sum that begins with a number gives
    return viz.gluon_core.tensor(x.handle, x.type) if plain else before(semantic, x, check_type)


def _specialized(semantic: Any, pairs: Any, *rest: Any, before: Any = viz.GluonSemantic.warp_specialize) -> None:
    def watched(partition: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> None:
            try:
                partition(*given)
            except BaseException as error:
                _failed.append(error)
                raise

        return run

    _failed.clear()
    try:
        before(semantic, [(watched(partition), given) for partition, given in pairs], *rest)
    except AssertionError:
        raise _failed[0] from None


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, axis: int) -> Any:
        data = function(x.handle.data, axis).astype(x.handle.data.dtype)
        layout = gl.SliceLayout(axis, getattr(x.type, "layout", None) or viz._get_handle_layout(x.handle))
        kind = viz.gluon_core.distributed_type(x.dtype, list(data.shape), layout)
        return viz.gluon_core.tensor(viz._tensor_result(data, x.dtype, layout), kind)

    return reduce


def _semantic(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **more: method(*given, **{**more, "_semantic": viz.gluon_semantic})


def put() -> None:
    """Makes Gluon's functions those of triton-viz, with what it lacks, for the rest of the process."""
    interpreter._mend()  # rounding to bfloat16
    for mends in (Counting, Numbers):
        for name, method in inspect.getmembers(mends, inspect.isfunction):
            setattr(viz.Builder, name, method)
    viz.GluonSemantic.to_tensor, viz.GluonSemantic.warp_specialize = _tensor, _specialized
    viz._host_array = _host
    viz.patch_lang(None)
    tile = viz.gluon_core.shared_memory_descriptor
    for name, method in inspect.getmembers(tile, inspect.isfunction):
        if "_semantic" in inspect.signature(method).parameters:
            setattr(tile, name, _semantic(method))
    gl.static_range = lambda *ends: builtins.range(*(int(viz._unwrap_constexpr(end)) for end in ends))
    gl.max, gl.sum = _reduced(np.max), _reduced(np.sum)
    gl.zeros = lambda shape, dtype, layout: gl.full(shape, 0, dtype, layout)


def _range(*ends: Any) -> Iterator[Any]:
    return map(viz.gluon_semantic.to_tensor, builtins.range(*(int(viz._to_python_scalar(end)) for end in ends)))


def load(sources: dict[str, str]) -> tuple[types.ModuleType, Machine]:
    """``(module, machine)``, as of tests/support/gluon_machine.py."""
    modules = {name: types.ModuleType(name) for name in sources}
    with pytest.MonkeyPatch.context() as patch, gluon_machine._modules(modules):
        patch.setattr(gluon, "jit", lambda function=None, **_: function or (lambda f: f))
        patch.setattr(gluon, "constexpr_function", lambda function: function)
        for name, module in modules.items():
            module.__dict__["range"] = _range
            exec(gluon_machine._code(sources[name], name), module.__dict__)  # noqa: S102  our own kernel
            for key, value in list(module.__dict__.items()):
                if isinstance(value, tl.constexpr):
                    module.__dict__[key] = value.value
    return module, Machine()


class Machine:
    """Launches kernels, with the arguments that the tests have for our own simulator."""

    def launch(self, kernel: Any, grid: tuple[int, ...], _seed: int, ctas: int = 1, **given: Any) -> None:
        """Runs a kernel and copies back what it wrote."""
        if ctas > 1:
            pytest.skip("triton-viz has no clusters")
        tensors = {name: _flat(x) for name, x in given.items() if isinstance(x, Pointer)}
        arguments = {name: _argument(x) for name, x in given.items()}
        arguments |= {name: x[int(given[name].offset) :] for name, x in tensors.items()}
        function = viz.GluonInterpretedFunction(kernel)
        function.constexprs |= set(kernel.__annotations__)
        with np.errstate(all="ignore"):
            function.run(grid=grid, _patch_lang=False, **arguments)
        for name, x in tensors.items():
            given[name].data[...] = x.float().numpy() if x.is_floating_point() else x.numpy()


def _flat(x: Pointer) -> torch.Tensor:
    values = torch.from_numpy(x.data.copy())
    return values.to(DTYPES[x.dtype.element_ty]) if x.data.dtype == np.float32 else values


def _argument(x: Any) -> Any:
    if isinstance(x, Descriptor):
        rows = torch.from_numpy(np.ascontiguousarray(x.data)).to(DTYPES[x.dtype])
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(x.box), layout)
    if isinstance(x, str):
        return {"bf16": tl.bfloat16, "fp16": tl.float16}[x]
    return float(x) if isinstance(x, np.floating) else x


def _once(run: Callable[..., None], loaded: Any, case: dict[str, Any]) -> None:
    """Its partitions take turns, in one order: a seed changes nothing but the numbers."""
    run(loaded, 0, **case)


def pytest_configure(config: pytest.Config) -> None:
    """Puts triton-viz into our simulator's place, before tests are imported."""
    triton.knobs.compilation.front_end_debugging = True  # errors as they are
    torch.set_num_threads(1)
    put()
    gluon_machine.load = gluon_cases.load = load
    gluon_cases._hunt = _once
    if path := os.environ.get("SIMULATOR_RESULTS"):
        config.pluginmanager.register(Results(path, {"of": COMMIT, "arch": ""}))
