"""Runs the source of a Hopper Gluon kernel on the CPU: numpy stand-ins for the part of ``gluon`` that it uses."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import types
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.support.gluon_simulator import (
    Barrier,
    Copy,
    Int,
    Layout,
    Scheduler,
    Tile,
    Tiles,
    array,
    round_to,
)
from tests.support.tiers import full

INTERLEAVINGS = int(os.environ.get("MLA_INTERLEAVINGS", "3"))
"""In how many orders each case is run, the first of them by default; see :func:`interleaved`."""
PRODUCER = 128  # threads of a partition of 4 warps, as all are: each arrives for its own copies by cp.async


def _product(a, b):
    """By torch, whose threads wait without spinning: those of NumPy made it ten times as dear."""
    return torch.matmul(torch.from_numpy(np.asarray(a)), torch.from_numpy(np.asarray(b))).numpy()


class _Product:
    """An asynchronous accumulator; ``value`` is None until the product has been computed."""

    def __init__(self):
        self.value = None


class Handle:
    """A barrier as the kernel has it: its CTA's own, or one at which all CTAs of a cluster arrive."""

    def __init__(self, machine, barrier, joint=False):
        self.machine, self.barrier, self.joint, self.dtype = machine, barrier, joint, "int64"

    def _reinterpret(self, dtype, shape, layout):
        assert not any(map(any, layout.bases)), "only to the first CTA's for all"
        return Handle(self.machine, self.machine.barriers[0][self.barrier.number], True)


class Machine:
    """One CTA, or cluster of them, after another; holds what the stand-ins of ``gl`` and ``hopper`` need.

    ``cells`` and ``barriers`` are those of each CTA of the cluster, in the order in which they were allocated.
    """

    def __init__(self):
        self.scheduler, self.program, self.grid, self.ctas = None, (0, 0, 0), (1, 1, 1), 1
        self._empty()
        self.gl, self.hopper, self.ampere = self._language(), self._hopper(), self._ampere()

    def switch(self, until=None):
        self.scheduler.switch(until)

    def _empty(self):
        self.queues, self.copies, self.jobs, self.starting = {}, {}, {}, 0
        self.cells, self.barriers = ([[] for _ in builtins.range(self.ctas)] for _ in "cb")

    @property
    def rank(self):
        """Which CTA of the cluster the running partition is of; before ``warp_specialize``, which one starts."""
        name = threading.current_thread().name
        return int(name.split(".")[0]) if name in self.jobs else self.starting

    def launch(self, kernel, grid, seed, ctas=1, **arguments):
        """Runs every CTA, or cluster of ``ctas``, of the grid; the seed decides the interleaving.

        Those of a cluster start together: a barrier between them follows what the kernel does before its partitions.
        """
        for z, y, x in np.ndindex(*reversed(grid)):
            self.scheduler = Scheduler(f"{seed} {x} {y} {z}")
            self.program, self.grid, self.ctas = (x, y, z), grid, ctas
            self._empty()
            wrapped = {k: Int(v) if type(v) is int else v for k, v in arguments.items()}
            for rank in builtins.range(ctas):
                self.starting = rank
                kernel(**wrapped)

    def _allocate(self, dtype, shape, layout):
        if dtype == "int64":
            before = self.barriers[self.rank]
            made = [Barrier(len(before) + i) for i in builtins.range(shape[0])]
            before += made
            return Tiles([Handle(self, barrier) for barrier in made])
        one, before = layout.cut(shape[1:]), self.cells[self.rank]
        tiles = [
            Tile(np.full(one, np.nan, np.float32), dtype, self, number=len(before) + i)
            for i in builtins.range(shape[0])
        ]
        before += [tile.cells for tile in tiles]
        return Tiles(tiles)

    def _load(self, pointer, mask=None, other=0):
        self.switch()
        shape = np.broadcast_shapes(np.shape(pointer.offset), np.shape(mask) if mask is not None else ())
        cells, mask = pointer.cells(shape, mask)
        values = np.full(shape, other, pointer.data.dtype)
        values[mask] = pointer.data[cells]
        return array(values) if shape else Int(values) if values.dtype.kind == "i" else np.float32(values)

    def _store(self, pointer, values, mask=None):
        cells, mask = pointer.cells(np.shape(values), mask)
        values = np.asarray(values)[mask]
        whole = pointer.data.dtype.kind == "i"  # wraps around, as registers do
        pointer.data[cells] = values.astype(pointer.data.dtype) if whole else round_to(values, pointer.dtype.element_ty)

    def _specialize(self, functions, warps, registers):
        for i, (function, given) in enumerate(functions):
            self.jobs[f"{self.starting}.{i} {function.__name__}"] = lambda f=function, a=given: f(*a)
        if self.starting == self.ctas - 1:
            self.scheduler.run(self.jobs)

    def _language(self):
        gl = types.ModuleType("gluon_language")
        gl.constexpr = lambda value: value
        gl.bfloat16, gl.float16, gl.float32, gl.int32, gl.int64 = "bf16", "fp16", "fp32", "int32", "int64"
        gl.int8, gl.int16, gl.float8e4nv = "int8", "int16", "fp8"
        gl.permute = lambda x, order: array(np.transpose(x, order))
        gl.join, gl.reshape = lambda a, b: array(np.stack([a, b], -1)), lambda x, shape: array(np.reshape(x, shape))
        gl.NVMMADistributedLayout = lambda version, warps, shape, cga_layout=(): Layout(cga_layout)
        gl.BlockedLayout = lambda size, threads, warps, order, cga_layout=(): Layout(cga_layout)
        gl.NVMMASharedLayout = lambda width, bits, rank=2, turned=False, padded=False, cga_layout=(): Layout(cga_layout)
        gl.SwizzledSharedLayout = lambda vector, phase, most, order, cga_layout=(): Layout(cga_layout)
        gl.SliceLayout = lambda dim, parent: Layout([basis[:dim] + basis[dim + 1 :] for basis in parent.bases])
        gl.DotOperandLayout = lambda operand, parent, width: parent
        gl.num_ctas = lambda: self.ctas

        def of_scalars_or_arrays(function, python):
            def call(*args):
                if all(np.ndim(a) == 0 for a in args):
                    return Int(python(*args))
                return array(np.asarray(function(*args)))

            return call

        gl.minimum, gl.maximum = of_scalars_or_arrays(np.minimum, min), of_scalars_or_arrays(np.maximum, max)
        choose = of_scalars_or_arrays(np.where, lambda c, a, b: a if c else b)
        gl.where = lambda c, a, b: choose(c, *(np.float32(x) if isinstance(x, float) else x for x in (a, b)))
        gl.max, gl.sum = lambda x, axis: array(np.max(x, axis)), lambda x, axis: array(np.sum(x, axis))
        gl.exp2, gl.log2 = lambda x: array(np.exp2(x)), lambda x: array(np.log2(x))
        gl.expand_dims, gl.convert_layout = lambda x, axis: array(np.expand_dims(x, axis)), lambda x, layout: x
        gl.zeros = lambda shape, dtype, layout: array(np.zeros(layout.cut(shape), np.float32))
        gl.full = lambda shape, value, dtype, layout: array(np.full(layout.cut(shape), value)).to(dtype)
        gl.arange = lambda a, b, layout: array(np.arange(a, b)[layout.own(b - a, self.rank)])
        gl.static_range = builtins.range
        gl.program_id, gl.num_programs = lambda axis: Int(self.program[axis]), lambda axis: Int(self.grid[axis])
        gl.load, gl.store = self._load, self._store
        gl.allocate_shared_memory, gl.warp_specialize = self._allocate, self._specialize
        return gl

    def _hopper(self):
        hopper = types.ModuleType("hopper")

        def fence():
            self.switch()
            me = threading.current_thread().name
            for cells in self.cells[self.rank]:
                cells.unfenced.discard(me)
            for barrier in self.barriers[self.rank]:
                barrier.fenced[me] = barrier.known.get(me, 0)

        def init(bar, count):
            if not bar.joint:
                bar.barrier.init(count)
            elif self.rank == 0:
                bar.barrier.init(count * self.ctas)

        def wait(bar, parity, pred=True):
            if pred and (self.rank == 0 or not bar.joint):
                self.switch(lambda: bar.barrier.passed(parity))
                bar.barrier.known[threading.current_thread().name] = bar.barrier.completed

        def expect(bar, size, from_cta=None):
            """From each CTA at its own barrier, or from the first one at all."""
            self.switch()
            assert from_cta in (None, 0), "a mask of bits of a CTA's number: none"
            mine = range(self.ctas) if from_cta == 0 and self.rank == 0 else ()
            for rank in (self.rank,) if from_cta is None else mine:
                barrier = self.barriers[rank][bar.barrier.number]
                barrier.bytes += size
                barrier.arrive()

        def arrive(bar, count=1, pred=True):
            self.switch()
            if pred:
                bar.barrier.arrive(count)

        def copy(desc, coordinates, bar, tile, multicast=False):
            self.switch()
            if multicast and self.rank > 0:
                return
            assert tile.data.shape == desc.box, "the destination is one box"
            box = desc.read(*coordinates)
            for rank in range(self.ctas) if multicast else (self.rank,):
                bring(box, self.barriers[rank][bar.barrier.number], tile.of(self.cells[rank]))

        def bring(box, barrier, tile):
            """One CTA's copy of a box, which lands by itself."""
            destination = tile.asynchronously()
            destination[...] = np.nan
            tile.cells.bring(barrier, destination)

            def land():
                destination[...] = box
                barrier.bytes -= 2 * box.size
                barrier.settle()

            self.scheduler.landings.append(land)

        def multiply(a, b, acc, use_acc=True, is_async=False):
            self.switch()
            result, queue = _Product(), self.queues.setdefault(threading.current_thread().name, [])
            for tile in (a, b):
                if isinstance(tile, Tile):
                    tile.awaited()
                    tile.crossed()

            def compute():
                product = _product(a.asynchronously() if isinstance(a, Tile) else a, b.asynchronously())
                before = acc.value if isinstance(acc, _Product) else acc
                result.value = array(before + product if use_acc else product)

            queue.append((result, compute))
            for _ in builtins.range(self.scheduler.random.choice([0, 0, 1, len(queue)])):
                next((c for r, c in queue if r.value is None), lambda: None)()
            return result if is_async else retire(0, [result])

        def retire(outstanding, deps):
            self.switch()
            queue = self.queues.get(threading.current_thread().name, [])
            while len(queue) > outstanding:
                result, compute = queue.pop(0)
                if result.value is None:
                    compute()
            (result,) = deps
            if any(result is r for r, _ in queue):  # not certain to be there yet
                return array(np.full((1,), np.nan, np.float32))
            return result.value

        hopper.fence_async_shared = fence
        hopper.mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda cga_layout=(): Layout(cga_layout),
            init=init,
            wait=wait,
            expect=expect,
            arrive=arrive,
        )
        hopper.tma = types.SimpleNamespace(async_copy_global_to_shared=copy)
        hopper.warpgroup_mma, hopper.warpgroup_mma_wait = multiply, retire
        return hopper

    def _ampere(self):
        ampere = types.ModuleType("ampere")

        def copy(tile, pointer, mask=None):
            self.switch()
            shape = np.broadcast_shapes(np.shape(pointer.offset), np.shape(mask) if mask is not None else ())
            assert shape == tile.data.shape, "the destination has the pointers' shape"
            cells, mask = pointer.cells(shape, mask)
            rows = np.zeros(shape, np.float32)  # where the mask is not set
            rows[mask] = pointer.data[cells]
            tile.data[...] = np.nan
            one = Copy(tile.cells, tile.data)
            self.copies.setdefault(threading.current_thread().name, []).append(one)

            def land():
                tile.data[...] = rows
                one.land()

            self.scheduler.landings.append(land)

        def arrive(bar, increment_count=True):
            """All threads of the partition arrive, each when its own copies have landed: what counts is the last."""
            self.switch()
            barrier, before = bar.barrier, self.copies.get(threading.current_thread().name, [])
            if increment_count:
                barrier.pending += PRODUCER
            for one in before:
                if not one.counted:
                    one.counted = True
                    one.cells.bring(barrier, one.data)
                    one.cells.copied[barrier] = barrier.completed + 1
            flying = [one for one in before if not one.landed]
            left = len(flying)

            def landed():
                nonlocal left
                left -= 1
                if left == 0:
                    barrier.arrive(PRODUCER)

            for one in flying:
                one.followers.append(landed)
            if not flying:
                barrier.arrive(PRODUCER)

        ampere.async_copy = types.SimpleNamespace(async_copy_global_to_shared=copy, mbarrier_arrive=arrive)
        return ampere


def interleaved(cases, *often, others=()):
    """Parametrizes a test by ``name`` of a case and ``seed`` of an order; cases named in ``often`` show all by default.

    Where one order is shown it is not the same of all cases: their kernels have much in common. What ``others`` show is
    shown by other cases too, in another combination.
    """

    def marks(at, name, seed):
        if name in others:
            return full("combination")
        return () if name in often or seed == at % INTERLEAVINGS else full("draws")

    several = [
        pytest.param(name, seed, marks=marks(at, name, seed))
        for at, name in enumerate(cases)
        for seed in range(INTERLEAVINGS)
    ]
    return pytest.mark.parametrize(("name", "seed"), several)


@contextmanager
def _modules(replacements):
    saved = {name: sys.modules.get(name) for name in replacements}
    sys.modules.update(replacements)
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@lru_cache(maxsize=64)
def _code(source, name):
    return compile(source, name, "exec")


def load(sources):
    """``(module, machine)``: sources by module name, executed in that order with stand-ins for triton; the last one."""
    machine = Machine()
    gluon = types.ModuleType("gluon")
    gluon.jit = lambda function=None, **options: function or (lambda f: f)
    gluon.constexpr_function = lambda function: function
    gluon.language = machine.gl
    root = "triton.experimental.gluon"
    names = ("triton", "triton.experimental", root, f"{root}.language", f"{root}.language.nvidia")
    stand_ins = {name: types.ModuleType(name) for name in names}
    stand_ins |= {root: gluon, f"{root}.language": machine.gl, f"{root}.language.nvidia.hopper": machine.hopper}
    stand_ins[f"{root}.language.nvidia.ampere"] = machine.ampere
    stand_ins["triton.experimental"].gluon = gluon
    modules = {name: types.ModuleType(name) for name in sources}
    with _modules(stand_ins | modules):
        for name, module in modules.items():
            module.__dict__["range"] = lambda *args: map(Int, builtins.range(*args))
            exec(_code(sources[name], name), module.__dict__)  # noqa: S102  our own kernel, as it stands
    return module, machine
