"""Runs the tests of the Triton kernels on AMD machine code, in an emulator that is not ours. No GPU is needed.

    EMULATOR=DIR python -m pytest -p benchmarks.gpu.emulated tests/kernels/triton -k "test_pages"

``DIR`` is a checkout of tinygrad, whose tests have an emulator of AMD's instructions (benchmarks/gpu/README.md says
what has to be mended in it). What the tests would have sent to Triton's interpreter is compiled by
Triton for ``EMULATOR_ARCH`` (gfx1100), and every instruction of every wave is executed, in this process. The
reference, the bounds and the calls are the tests' own.

A wave runs for a random number of instructions, and then another one does, so that a missing barrier can show
(``EMULATOR_WAVES`` is a seed, or ``forward`` or ``backward``: each wave runs to the next barrier, in this order).
Registers and shared memory start as NaN. A buffer ends where memory that must not be read begins: an access beyond it
ends the process. ``EMULATOR_RESULTS`` names a file for outcomes and seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.executed import Results
from mla_compile.kernels.triton.step import Arguments, Step

COMMIT = "tinygrad a9069c177a9d"  # with which this was written
ARCH = os.environ.get("EMULATOR_ARCH", "gfx1100")
FAMILY, LANES = {"gfx11": ("rdna3", 32), "gfx94": ("cdna", 64), "gfx95": ("cdna", 64)}[ARCH[:5]]
WAVES = os.environ.get("EMULATOR_WAVES", "0")
LONGEST = 300  # instructions that a wave executes before another one does
FLAT = 1 << 26  # bytes of a storage that is not copied
PAGE = mmap.PAGESIZE
_END = 0xFFFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Bytes that end where memory begins that nobody may access; they start as NaN, of whatever dtype."""

    def __init__(self, size: int) -> None:
        self.size = -(-max(size, 1) // 16) * 16
        room = -(-self.size // PAGE) * PAGE
        self.memory = mmap.mmap(-1, room + PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if _libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = start + room - self.size
        self.poison()

    def poison(self) -> None:
        """All bits are set: NaN."""
        ctypes.memset(self.address, 0xFF, self.size)


class Buffers:
    """Tensors of a launch in guarded memory: one copy of each storage, which :meth:`back` copies back."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Guarded, int]] = {}

    def address(self, x: Tensor) -> int:
        """Where the copy of a tensor is."""
        storage = x.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if size > FLAT:
            return x.data_ptr()
        if start not in self.copies:
            copy = Guarded(size)
            ctypes.memmove(copy.address, start, size)
            self.copies[start] = copy, size
        return self.copies[start][0].address + x.data_ptr() - start

    def back(self) -> None:
        """Copies to the tensors what a launch has written."""
        for start, (copy, size) in self.copies.items():
            ctypes.memmove(start, copy.address, size)


class Program:
    """A compiled kernel in memory, as a loader leaves it."""

    def __init__(self, kernel: Any) -> None:
        blob: bytes = kernel.asm["hsaco"]
        self.shared, self.threads = kernel.metadata.shared, kernel.metadata.num_warps * LANES
        self.memory = mmap.mmap(-1, 1 << 22)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        headers, size, count = struct.unpack_from("<Q", blob, 32)[0], *struct.unpack_from("<HH", blob, 54)
        for i in range(count):
            kind, _, offset, where, _, length = struct.unpack_from("<IIQQQQ", blob, headers + i * size)
            if kind == 1:  # PT_LOAD
                self.memory[where : where + length] = blob[offset : offset + length]
        descriptor = self._symbol(blob, f"{kernel.metadata.name}.kd".encode())
        self.scratch, self.kernarg = struct.unpack_from("<II", self.memory, descriptor + 4)
        self.entry = self.base + descriptor + struct.unpack_from("<q", self.memory, descriptor + 16)[0]
        rsrc2, self.properties, self.preload = struct.unpack_from("<IHH", self.memory, descriptor + 52)
        self.rsrc2 = rsrc2 | (-(-self.shared // 512) << 15)
        # What each argument is and where it lies.
        words = re.search(r"\.amdgpu_metadata(.*?)\.end_amdgpu_metadata", kernel.asm["amdgcn"], re.DOTALL)
        assert words is not None
        found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", words[1])
        self.fields = [(int(offset), int(size), kind) for offset, size, kind in found]

    @staticmethod
    def _symbol(blob: bytes, name: bytes) -> int:
        sections, size, count = struct.unpack_from("<Q", blob, 40)[0], *struct.unpack_from("<HH", blob, 58)
        tables = [struct.unpack_from("<IIQQQQIIQQ", blob, sections + i * size) for i in range(count)]
        for table in tables:
            if table[1] in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                names = tables[table[6]][4]
                for at in range(table[4], table[4] + table[5], 24):
                    begin = names + struct.unpack_from("<I", blob, at)[0]
                    if blob[begin : blob.index(b"\0", begin)] == name:
                        return int(struct.unpack_from("<Q", blob, at + 8)[0])
        raise ValueError(f"no symbol {name!r}")

    def arguments(self, values: list[tuple[str, int | float]], grid: tuple[int, ...]) -> bytes:
        """The kernel's arguments, then the hidden ones that a launch adds."""
        packed = bytearray(self.kernarg)
        hidden = dict(zip(("hidden_block_count_x", "hidden_block_count_y", "hidden_block_count_z"), grid, strict=True))
        hidden |= {"hidden_group_size_x": self.threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
        hidden |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": self.shared}
        given = iter(values)
        for offset, size, kind in self.fields:
            if kind.startswith("hidden"):
                packed[offset : offset + size] = hidden.get(kind, 0).to_bytes(size, "little")
                continue
            letter, value = next(given, ("Q", 0))  # Triton's own scratch, which these kernels do not use
            struct.pack_into("<" + letter, packed, offset, value)
        assert next(given, None) is None, "more arguments than the kernel takes"
        return bytes(packed)

    def user_data(self, arguments: int) -> list[int]:
        """What a dispatch puts into the first scalar registers: the arguments' address, and some of them."""
        if self.properties & 0b1110111:
            raise NotImplementedError(f"scalar registers of a dispatch {self.properties:#b}")
        length, offset = self.preload & 127, self.preload >> 7
        words = [arguments & _END, arguments >> 32]
        words += [ctypes.c_uint32.from_address(arguments + 4 * (offset + i)).value for i in range(length)]
        return words


class Machine:
    """Executes programs, workgroup by workgroup."""

    def __init__(self, checkout: str) -> None:
        sys.path.insert(0, checkout)
        import test.mockgpu.amd.emu as emulator

        self.emulator = emulator
        self.programs: dict[str, Program] = {}
        self.decoded: dict[int, tuple[Callable[..., None] | None, tuple[int, ...], int]] = {}
        self.memory = emulator.Buffer(
            "CPU", 1 << 40, emulator.dtypes.uint32, options=emulator.BufferSpec(external_ptr=0)
        ).ensure_allocated()
        self.random = random.Random(int(WAVES) if WAVES.isdigit() else 0)
        self.executed = 0

    def program(self, step: Step) -> Program:
        """A step as Triton compiles it."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if "PRECISION" in step.constants:  # tf32, unused in half precision, does not exist there
            step = replace(step, constants={**step.constants, "PRECISION": "ieee"})
        source, target = ASTSource(*step.source()[:4]), GPUTarget("hip", ARCH, LANES)
        options = {name: value for name, value in step.options.items() if name != "launch_pdl"}
        kernel = triton.compile(source, target=target, options=options)
        if kernel.hash not in self.programs:
            self.programs[kernel.hash] = Program(kernel)
        return self.programs[kernel.hash]

    def run(self, program: Program, grid: tuple[int, int, int], values: list[tuple[str, int | float]]) -> None:
        """Executes a launch. ``values``: the arguments, each with its letter in a ``struct``."""
        packed = program.arguments(values, grid)
        arguments = Guarded(len(packed))
        ctypes.memmove(arguments.address, packed, len(packed))
        shared = Guarded(program.capture.shared)
        waves = range(0, program.threads, LANES)
        scratch = [Guarded(max(1, program.scratch) * LANES) for _ in waves]
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    shared.poison()
                    started = [
                        self._wave(program, start, (x, y, z), arguments.address, (shared.address, own.address))
                        for start, own in zip(waves, scratch, strict=True)
                    ]
                    self._workgroup(started)

    def _wave(
        self, program: Program, start: int, at: tuple[int, int, int], arguments: int, places: tuple[int, int]
    ) -> tuple[Any, list[ctypes.c_uint64]]:
        e, data = self.emulator, program.user_data(arguments)
        entry = program.entry + (256 if program.preload & 127 else 0)
        state = e._init_wave(
            entry, start, program.threads, program.threads, 1, 1, arguments, program.rsrc2, program.scratch, FAMILY,
            *at, data, LANES,
        )  # fmt: skip
        held = state.vgpr_buf._buf.va_addr
        ctypes.memset(held + 4 * LANES, 0xFF, 255 * 4 * LANES)  # all but the thread's number
        used = ((program.rsrc2 >> 1) & 31) + 3
        ctypes.memset(state.sgpr_buf._buf.va_addr + 4 * used, 0xFF, 4 * (102 - used))
        shared, scratch = places
        addresses = (state.sgpr_buf, state.vgpr_buf, self.memory, shared, scratch, state.accvgpr_buf)
        return state, [ctypes.c_uint64(a if isinstance(a, int) else a._buf.va_addr) for a in addresses]

    def _workgroup(self, waves: list[tuple[Any, list[ctypes.c_uint64]]]) -> None:
        runs = [self._steps(*wave) for wave in waves]
        ready, waiting = list(range(len(runs))), []
        while ready or waiting:
            if not ready:
                ready, waiting = sorted(waiting), []
            i = {"forward": ready[0], "backward": ready[-1]}.get(WAVES)
            i = self.random.choice(ready) if i is None else i
            what = next(runs[i])
            if what != "paused":
                ready.remove(i)
            if what == "barrier":
                waiting.append(i)

    def _steps(self, state: Any, addresses: list[ctypes.c_uint64]) -> Iterator[str]:
        """Runs a wave: yields "barrier" at each, "paused" where another may go on, and "done"."""
        registers, decoded = state._sgpr_mv, self.decoded
        high = registers[257] << 32
        bound: dict[tuple[int, ...], list[ctypes.c_uint64]] = {}
        while True:
            left = self.random.randint(1, LONGEST) if WAVES.isdigit() else 1 << 30
            self.executed += left
            while left:
                left -= 1
                at = registers[256]
                if at == _END:
                    self.executed -= left + 1
                    yield "done"
                    return
                found = decoded.get(at)
                if found is None:
                    found = decoded[at] = self._decode(high | at)
                function, needs, size = found
                if function is None:
                    registers[256] = at + abs(size)
                    if size > 0:
                        continue
                    self.executed -= left
                    yield "barrier"
                    break
                given = bound.get(needs)
                if given is None:
                    given = bound[needs] = [addresses[i] for i in needs]
                function(*given)
            else:
                yield "paused"

    def _decode(self, at: int) -> tuple[Callable[..., None] | None, tuple[int, ...], int]:
        """An instruction as a function of buffers. None and a size: nothing to do; a negative size: a barrier."""
        e = self.emulator
        code = ctypes.string_at(at, 16)
        if FAMILY == "rdna3" and int.from_bytes(code[:4], "little") & 0xFFF80000 == 0xE0A80000:
            return None, (), 8  # buffer_gl0_inv and buffer_gl1_inv, which it does not decode
        instruction = e.decode_inst(code, FAMILY)
        name, size = e._op_name(instruction), instruction.size()
        if name == "S_BARRIER":
            return None, (), -size
        # Caches, waits and scheduling are not modelled.
        if name.startswith(("BUFFER_GL", "BUFFER_INV", "BUFFER_WB", "S_WAITCNT", "S_DELAY", "S_NOP", "S_CLAUSE")):
            return None, (), size
        program, runtime = e._get_runner(code[: size + 4], FAMILY)
        return runtime.fxn, tuple(program.arg.globals), 0


class Entry:
    """Stands for a step's function: ``entry[grid](**arguments)`` launches it."""

    def __init__(self, machine: Machine, step: Step) -> None:
        self.machine, self.step = machine, step

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**given: Any) -> None:
            program, buffers, values = self.machine.program(self.step), Buffers(), []
            for name, kind in self.step.source()[1].items():
                value = given[name]
                if kind.startswith("*"):
                    values.append(("Q", buffers.address(value)))
                elif kind != "constexpr":
                    values.append(({"fp32": "f", "i32": "i", "i64": "q"}[kind], value))
            self.machine.run(program, (*grid, 1, 1)[:3], values)
            buffers.back()

        return launch


class Launched:
    """Stands for a Triton function that is launched by its own name, with tensors and integers in order."""

    def __init__(self, machine: Machine, fn: Any) -> None:
        self.machine, self.fn = machine, fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **constants: Any) -> None:
            given, to = dict(zip(self.fn.arg_names, values, strict=False)), Arguments()
            for name, value in given.items():
                if isinstance(value, int):
                    to.strides({name: value})
                else:
                    to.pointer(name, value)
            to.constants |= constants
            step = to.step(self.fn.__name__, self.fn, (*grid, 1, 1)[:3], {"num_warps": 4})
            Entry(self.machine, step)[grid](**given, **constants)

        return launch


class Here:
    """An executor that calls a function at once, in this process."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """The result of the function, or its exception."""
        done: Future[Any] = Future()
        done.set_result(function(*given))
        return done


def put(machine: Machine) -> None:
    """Puts the machine into the interpreter's place."""
    from mla_compile.kernels.hopper import steps as hopper_steps
    from mla_compile.kernels.triton import index_steps, mean_triton, schedule_triton
    from tests.support import interpreter

    interpret, index_step, cut = interpreter._interpret, index_steps.index_step, hopper_steps._cut

    def entered(step: Step) -> Step:
        return replace(step, fn=Entry(machine, step))

    interpreter._interpreted = lambda: True
    interpreter.worker = Here
    interpreter._interpret = lambda described, *rest, **how: interpret([entered(s) for s in described], *rest, **how)
    index_steps.index_step = lambda *given: entered(index_step(*given))
    hopper_steps._cut = lambda *given: entered(cut(*given))
    mean_triton.means = Launched(machine, mean_triton.means)
    schedule_triton.combine_slots = Launched(machine, schedule_triton.combine_slots)


def pytest_configure(config: pytest.Config) -> None:
    """Puts the machine into the interpreter's place, before tests are imported."""
    os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"  # their descriptors are not emulated for RDNA
    checkout = os.environ.get("EMULATOR")
    if checkout is None:
        raise pytest.UsageError("EMULATOR is not set; expected a checkout of tinygrad")
    torch.set_num_threads(1)
    machine = Machine(checkout)
    put(machine)
    if path := os.environ.get("EMULATOR_RESULTS"):
        about = {"of": COMMIT, "arch": ARCH, "waves": WAVES}
        config.pluginmanager.register(Results(path, about, lambda: machine.executed))
