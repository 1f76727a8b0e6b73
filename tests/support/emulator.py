"""The native kernels compiled for another processor, and run by an emulator: each call goes to a process of its own.

What a call points to is copied into a file, at most 8 MiB from each pointer on, so tensors have to be smaller.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from mla_compile.kernels.cpu import native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MOST = 1 << 23
MAIN = r"""
#include <cstdio>
int main(int, char** argv) {  // a file: which kernel, how many fields and pointers; these; what is pointed to
  std::FILE* file = std::fopen(argv[1], "rb");
  std::fseek(file, 0, SEEK_END);
  const long size = std::ftell(file);
  std::rewind(file);
  char* all = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
  if (std::fread(all, 1, size, file) != size_t(size)) return 9;
  std::fclose(file);
  long *head = reinterpret_cast<long*>(all), *call = head + 3, *pointers = call + head[1];
  char* data = reinterpret_cast<char*>(pointers + head[2]);
  for (long i = 0; i < head[2]; ++i) call[pointers[i]] += reinterpret_cast<long>(data);
  const int failed = head[0] == 0   ? mla_decode_attention(reinterpret_cast<mla::Call*>(call))
                     : head[0] == 1 ? mla_index_scores(reinterpret_cast<mla::IndexCall*>(call))
                                    : mla_few_rows(reinterpret_cast<mla::RowsCall*>(call));
  file = std::fopen(argv[2], "wb");
  std::fwrite(data, 1, all + size - data, file);
  std::fclose(file);
  return failed;
}
"""
BYTES = {0: 4, 1: 2, 2: 2}  # of an element, by native.KINDS


def available() -> bool:
    """Whether a cross compiler and an emulator are there."""
    return all(map(shutil.which, (COMPILER, EMULATOR)))


def library(folder: Path) -> native.Library:
    """The kernels for 64-bit ARM, built in ``folder``."""
    (folder / "kernels.cpp").write_text(native.source() + MAIN)
    flags = ("-std=c++20", "-O1", "-static", "-fopenmp", *native.FLAGS)
    made = subprocess.run(
        [COMPILER, *flags, "kernels.cpp", "-o", "kernels"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr

    def attention(f: tuple[int, ...]) -> dict[int, int]:
        rows = f[0] * f[1] * f[2]
        return {26: rows * f[6] * BYTES[f[28]], 27: rows * 4}

    return native.Library(
        _caller(folder, 0, native.CALL, (7, 11, 14, 17, 20, 25, 26, 27, 35, 38, 42, 48), attention),
        _caller(folder, 1, native.INDEX_CALL, (5, 9, 12, 13), lambda f: {13: f[0] * f[1] * f[3] * 4}),
        _caller(folder, 2, native.ROWS_CALL, (4, 7, 11, 12, 17, 18), lambda f: {12: f[0] * f[1] * f[2] * BYTES[f[13]]}),
        float16=True,
        amx=0,
        path=str(folder / "kernels"),
    )


def _caller(
    folder: Path, kernel: int, form: struct.Struct, pointers: tuple[int, ...], written: Callable[..., dict[int, int]]
) -> Callable[[bytes], int]:
    """``pointers``: which fields are; ``written``: how many bytes a call writes where some of them point to."""

    def run(packed: bytes) -> int:
        fields = list(struct.unpack(f"={form.size // 8}q", packed))
        given = [i for i in pointers if fields[i]]
        addresses, data = {i: fields[i] for i in given}, bytearray()
        for i in given:
            fields[i] = len(data)
            data += ctypes.string_at(addresses[i], _readable(addresses[i]))
            data += bytes(-len(data) % 64)
        head = (kernel, len(fields), len(given), *fields, *given)
        (folder / "call").write_bytes(struct.pack(f"={len(head)}q", *head) + data)
        done = subprocess.run([EMULATOR, "kernels", "call", "done"], cwd=folder, check=False)
        after = (folder / "done").read_bytes()
        for i, count in written(fields).items():
            ctypes.memmove(addresses[i], after[fields[i] : fields[i] + count], count)
        return done.returncode

    return run


def _readable(address: int) -> int:
    """How many bytes from an address on belong to this process, at most :data:`MOST`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return min(end - address, MOST)
    raise AssertionError(f"{address:#x} is not in memory")
