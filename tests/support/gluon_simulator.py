"""A Hopper CTA, or a cluster of two, on the CPU, to find races and deadlocks in a Gluon kernel: scheduler and memory.

The kernel's own text is executed against numpy stand-ins for ``gluon`` (tests/support/gluon_machine.py). Every
partition of ``warp_specialize`` is a thread; exactly one runs at a time, and a seeded scheduler may switch at every
operation on shared memory, barriers and asynchronous copies or products. What the hardware may do late, happens late:

* A TMA copy fills its destination with NaN when it is issued and lands at some later point.
* An asynchronous wgmma reads its operands at some point between its issue and the wait that retires it, in order of
  issue per warpgroup. A result taken before it is certain to be retired is NaN.
* wgmma and TMA must not touch a tile that was written by ordinary stores without ``fence_async_shared``.
* A partition that reads what a TMA copy brought must have waited itself for the phase that the copy counted on.
* cp.async fills its destination with NaN when it is issued and lands later, in any order; the arrivals that follow come
  when all copies before them have landed. Its writes are those of threads: a partition whose wgmma reads them must have
  waited for the phase, and then have issued ``fence_async_shared``.
* Fresh shared memory and fresh output are NaN. Reading outside a tensor, or a page that does not exist, is an error.

Not modelled: layouts, registers, what happens inside a warpgroup, timing.
"""

from __future__ import annotations

import operator
import queue
import random
import threading
import types

import numpy as np


class SimulationError(AssertionError):
    """The kernel did something that is wrong whatever the numbers: a deadlock, a missing fence, a wild address."""


class _Stop(BaseException):
    """Unwinds the other partitions once one has failed."""


def round_to(values, dtype):
    """float32 values rounded to a 16-bit type and back; other types as they are."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype != "bf16":
        return values
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.float32("nan"), rounded.view(np.float32))


def _e4m3(byte):
    """The value of a byte: sign, 4 bits of exponent with a bias of 7, 3 of mantissa, and no infinity."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([_e4m3(byte) for byte in range(256)], np.float32)


class Int(int):
    """A device integer: arithmetic stays in the class, because the kernel calls ``.to`` on what comes out."""

    def to(self, dtype):
        return self


def _int_method(name, op):
    def method(self, other):
        if isinstance(other, (int, np.integer)):
            return Int(op(int(self), int(other)))
        return NotImplemented

    setattr(Int, name, method)


_OPERATORS = [
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "rshift",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
]
for _name in _OPERATORS:
    _int_method(f"__{_name.rstrip('_')}__", getattr(operator, _name))
    if _name in ("add", "mul"):
        _int_method(f"__r{_name}__", getattr(operator, _name))
Int.__hash__ = int.__hash__


class Array(np.ndarray):
    """A register tensor."""

    def to(self, dtype, bitcast=False):
        if dtype == "fp8":
            assert bitcast, "float8 is read, not made"
            return array(E4M3[np.asarray(self) & 255])
        if bitcast:
            bits = (np.asarray(self) & 0xFFFF).astype(np.uint16)
            halves = bits.view(np.float16) if dtype == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)
            return array(halves.astype(np.float32))
        if dtype in ("bf16", "fp16"):
            return array(round_to(self, dtype))
        if dtype in ("int8", "int16"):
            sign = 1 << (int(dtype[3:]) - 1)
            return array((np.asarray(self) & 2 * sign - 1 ^ sign) - sign)
        return array(self.astype(np.int64 if dtype in ("int32", "int64") else np.float32))


def array(values):
    return np.asarray(values).view(Array)


class Scheduler:
    """Passes the baton between partitions, and lets asynchronous copies land in between."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.sticky = self.random.choice([0.0, 0.5, 0.9, 0.98])  # how long one partition tends to run
        self.batons, self.blocked, self.landings = {}, {}, []
        self.running, self.error = None, None
        self.finished = threading.Event()

    def _choose(self):
        while True:
            ready = [n for n in self.batons if n not in self.blocked or self.blocked[n]()]
            if self.landings and (not ready or self.random.random() < 0.3):
                self.landings.pop(self.random.randrange(len(self.landings)))()
            elif ready:
                stay = self.running in ready and self.random.random() < self.sticky
                return self.running if stay else self.random.choice(ready)
            elif self.batons:
                raise SimulationError(f"deadlock: {', '.join(sorted(self.batons))} wait for each other")
            else:
                return None

    def _pass_on(self):
        try:
            self.running = self._choose()
        except SimulationError as error:
            self._fail(error)
        else:
            if self.running is None:
                self.finished.set()
            else:
                self.batons[self.running].put(None)

    def _fail(self, error):
        self.error = self.error or error
        for baton in self.batons.values():
            baton.put(None)
        self.finished.set()

    def switch(self, until=None):
        """Called by the running partition at every operation: another one may go on, or the same."""
        me = threading.current_thread().name
        if me not in self.batons:
            return  # the code before warp_specialize
        if until is not None:
            self.blocked[me] = until
        self._pass_on()
        self.batons[me].get()
        if self.error:
            raise _Stop
        self.blocked.pop(me, None)

    def run(self, partitions):
        """``partitions``: name to function without arguments. Returns when all have finished, or raises."""

        def body(name, function):
            self.batons[name].get()
            try:
                with np.errstate(all="ignore"):  # NaN is at home here; the setting is per thread
                    if not self.error:
                        function()
            except _Stop:
                pass
            except BaseException as error:  # noqa: BLE001  reported by the thread that called run()
                self._fail(error)
            del self.batons[name]
            if not self.error:
                self._pass_on()

        # Queues: a failing partition wakes the others, whether they wait for their baton yet or not.
        self.batons = {name: queue.SimpleQueue() for name in partitions}
        threads = [threading.Thread(target=body, args=item, name=item[0]) for item in partitions.items()]
        for thread in threads:
            thread.start()
        self._pass_on()
        self.finished.wait()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        if self.landings:
            raise SimulationError("the kernel ended with copies in flight")


class Pointer:
    """An address in a flat numpy array of ``dtype``."""

    def __init__(self, data, dtype="fp32", offset=0):
        self.data, self.offset, self.dtype = data, offset, types.SimpleNamespace(element_ty=dtype)

    def __add__(self, offset):
        return Pointer(self.data, self.dtype.element_ty, self.offset + offset)

    def cells(self, shape, mask):
        """The flat indices where ``mask`` is set, and the mask."""
        mask = np.broadcast_to(np.asarray(True if mask is None else mask, bool), shape)
        cells = np.broadcast_to(self.offset, shape)[mask].astype(np.int64)
        if cells.size and not 0 <= cells.min() <= cells.max() < self.data.size:
            raise SimulationError(f"address {cells.min()}..{cells.max()} outside a tensor of {self.data.size} elements")
        return cells, mask


class Descriptor:
    """A TMA descriptor of a 3-D numpy array with boxes of shape ``box``."""

    def __init__(self, data, box, dtype):
        self.data, self.box, self.dtype = data, tuple(box), dtype

    def read(self, page, row, column):
        if not 0 <= page < self.data.shape[0]:
            raise SimulationError(f"page {page} of {self.data.shape[0]} was looked up")
        box = np.zeros(self.box, np.float32)  # rows outside the tensor are zeros
        part = self.data[page, row : row + self.box[1], column : column + self.box[2]]
        box[0, : part.shape[0], : part.shape[1]] = part
        return box


class Layout:
    """What a layout says of a cluster: ``bases``, where in each dimension its second CTA's part begins, in parts."""

    def __init__(self, bases):
        self.bases = bases

    def cut(self, shape):
        """The shape of one CTA's part of a tensor."""
        return [n // 2 if any(basis[dim] for basis in self.bases) else n for dim, n in enumerate(shape)]

    def own(self, size, rank):
        """Which part of so many numbers a CTA has."""
        (part,) = self.cut([size])
        return slice(rank * part, (rank + 1) * part) if part < size else slice(None)


class Cells:
    """What is known of an allocation, whatever view of it is used; ``base`` are its data.

    ``number``: the how many-th of its CTA it is.
    ``unfenced``: the partitions whose ordinary stores no fence has followed. ``brought``: for each barrier that
    copies into it counted on, the phase, counted from 1, that completes with them, and where to they went;
    ``copied``: the phases of cp.async among them.
    """

    def __init__(self, base, number):
        self.base, self.number = base, number
        self.unfenced, self.brought, self.copied = set(), {}, {}

    def bring(self, barrier, data):
        """A copy into ``data`` counts on the barrier's phase under way."""
        phase = barrier.completed + 1
        before, places = self.brought.get(barrier, (phase, []))
        self.brought[barrier] = phase, [*(places if before == phase else ()), data]


class Copy:
    """One cp.async of a partition; ``counted``: some barrier waits for it, ``followers``: what to do when it lands."""

    def __init__(self, cells, data):
        self.cells, self.data = cells, data
        self.landed, self.counted, self.followers = False, False, []

    def land(self):
        self.landed = True
        for follower in self.followers:
            follower()


class Tile:
    """Shared memory, or a view of it."""

    def __init__(self, data, dtype, machine, cells=None, number=None):
        self.data, self.dtype, self.machine, self.shape = data, dtype, machine, data.shape
        self.cells = cells or Cells(data, number)

    def view(self, data):
        return Tile(data, self.dtype, self.machine, self.cells)

    def of(self, cells):
        """The same part of what another CTA of the cluster allocated; ``cells`` are all that it did."""
        base = cells[self.cells.number].base
        start = self.data.ctypes.data - self.cells.base.ctypes.data
        same = np.ndarray(self.data.shape, base.dtype, base, start, self.data.strides)
        return Tile(same, self.dtype, self.machine, cells[self.cells.number])

    def permute(self, order):
        return self.view(self.data.transpose(order))

    def slice(self, start, length, dim=0):
        return self.view(self.data[start : start + length] if dim == 0 else self.data[:, start : start + length])

    def _reinterpret(self, dtype, shape, layout):
        if len(shape) == 2:
            assert tuple(layout.cut(shape)) == self.data.shape, "one CTA's part stays what it is"
            return self
        if len(shape) == 3:
            assert tuple(shape[1:]) == self.data.shape, "only [rows,columns] to [1,rows,columns]"
            return self.view(self.data[None])
        boxes, one, rows, columns = shape
        assert one == 1, "boxes are [1,rows,64]"
        assert boxes * rows * columns == self.data.size, "boxes fill the tile"
        return Boxes(self, rows, columns)

    def load(self, layout):
        self.machine.switch()
        self.awaited()
        return array(self.data.copy())

    def store(self, values):
        self.machine.switch()
        self.cells.unfenced.add(threading.current_thread().name)
        if self.data.size == self.cells.base.size:  # nothing is left of what was brought
            self.cells.brought.clear()
            self.cells.copied.clear()
        self.data[...] = round_to(values, self.dtype)

    def asynchronously(self):
        """The data, for wgmma and TMA."""
        if self.cells.unfenced:
            raise SimulationError(f"no fence_async_shared after a store by {', '.join(self.cells.unfenced)}")
        return self.data

    def awaited(self):
        """Checks that the running partition has waited for everything that was brought to where it reads."""
        me = threading.current_thread().name
        for barrier, (phase, places) in self.cells.brought.items():
            if barrier.known.get(me, 0) < phase and any(np.shares_memory(self.data, place) for place in places):
                raise SimulationError(f"{me} reads what was copied without having waited for it")

    def crossed(self):
        """Checks that the running partition has issued a fence since it waited for what cp.async brought."""
        me = threading.current_thread().name
        if any(barrier.fenced.get(me, 0) < phase for barrier, phase in self.cells.copied.items()):
            raise SimulationError(f"no fence_async_shared of {me} between what cp.async brought and wgmma")


class Tiles:
    """An allocation [count, ...] of tiles."""

    def __init__(self, tiles):
        self.tiles, self.dtype = tiles, tiles[0].dtype

    def index(self, i):
        if not 0 <= i < len(self.tiles):
            raise SimulationError(f"tile {i} of {len(self.tiles)}")
        return self.tiles[i]


class Boxes:
    """[rows of the tile, 64] chunks of a swizzled tile, one after the other, each cut into boxes of a few rows."""

    def __init__(self, tile, rows, columns):
        self.tile, self.rows, self.columns = tile, rows, columns

    def index(self, i):
        chunk, box = divmod(i, self.tile.data.shape[0] // self.rows)
        rows = slice(box * self.rows, (box + 1) * self.rows)
        return self.tile.view(self.tile.data[rows, chunk * self.columns : (chunk + 1) * self.columns][None])


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all expected bytes are in.

    ``completed`` counts the phases, ``known`` how many of them each partition has waited for, and ``fenced`` how many
    it had when it last issued a fence. ``number``: the how many-th of its CTA it is.
    """

    def __init__(self, number):
        self.number, self.known, self.fenced = number, {}, {}

    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.completed = 0

    def arrive(self, count=1):
        if self.pending < count:
            raise SimulationError("more arrivals at a barrier than it was initialised for")
        self.pending -= count
        self.settle()

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.completed = self.count, self.completed + 1

    def passed(self, parity):
        return self.completed & 1 != int(parity) & 1
