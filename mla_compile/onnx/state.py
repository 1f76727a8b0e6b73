"""The state of a batch during generation: its caches on the device, and the mask of the tokens read so far."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mla_compile.onnx.engine import OrtDevice
from mla_compile.onnx.manifest import Cache

if TYPE_CHECKING:
    from onnxruntime import IOBinding, OrtValue

# numpy has no bfloat16, so the bits of bfloat16 are passed as uint16. ONNX Runtime receives the ONNX type number 16.
BITS: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ELEMENT: dict[str, type[np.generic] | int] = {"float32": np.float32, "float16": np.float16, "bfloat16": 16}

Ints = npt.NDArray[np.int64]


class State:
    """The state of one batch of sequences. :meth:`mla_compile.onnx.session.Session.prefill` makes a state.

    Only one thread at a time may use a state. Different states of one session may run concurrently.

    Attributes:
        batch: the number of sequences, which are the rows of every tensor.
        length: the number of tokens in the caches, including left padding.
        positions: int64 [batch], the position of each row's next token. It is the number of the row's tokens, not
            including padding.
        ended: bool [batch], whether each row has ended. Ended rows read padding, and their positions do not advance.
        caches: one cache per entry of the manifest.
        bindings: the io binding of each graph that has run.
    """

    def __init__(
        self, ort: ModuleType, specs: tuple[Cache, ...], batch: int, *, device: OrtDevice, capacity: int | None
    ) -> None:
        """Allocate ``capacity`` rows for caches that are written in place; ``None``: each call returns new caches."""
        self.batch = batch
        self.length = 0
        self.positions: Ints = np.zeros(batch, np.int64)
        self.ended: npt.NDArray[np.bool_] = np.zeros(batch, np.bool_)
        self.bindings: dict[str, IOBinding] = {}
        self._mask: Ints = np.zeros((batch, max(capacity or 0, 64)), np.int64)
        self.caches = [_StateCache(ort, spec, batch, device, capacity) for spec in specs]

    @property
    def capacity(self) -> int | None:
        """The number of rows allocated in caches that are written in place; ``None`` if there are no such caches."""
        return next((cache.capacity for cache in self.caches if cache.in_place), None)

    def mask_with(self, new_BS: Ints) -> Ints:
        """Append the mask of the S new tokens, and return the mask of all tokens, int64 [batch, length + S]."""
        total = self.length + new_BS.shape[1]
        if total > self._mask.shape[1]:
            grown = np.zeros((self.batch, max(total, 2 * self._mask.shape[1])), np.int64)
            grown[:, : self.length] = self._mask[:, : self.length]
            self._mask = grown
        self._mask[:, self.length : total] = new_BS
        return np.ascontiguousarray(self._mask[:, :total])

    def bind(self, binding: IOBinding, total: int) -> None:
        """Bind every cache for a call that ends with ``total`` tokens. Buffers that are too short grow first."""
        for cache in self.caches:
            cache.bind(binding, self.length, total)

    def advance(self, outputs: Sequence[object], new_BS: Ints) -> None:
        """Take the caches from a call's outputs, and count the tokens that the call read."""
        for at, cache in enumerate(self.caches, start=1):
            cache.take(outputs, at)
        self.length += new_BS.shape[1]
        self.positions += np.where(self.ended, 0, new_BS.sum(1))


class _StateCache:
    """One cache: a buffer that this object allocated, or the value that the last call returned."""

    def __init__(self, ort: ModuleType, spec: Cache, batch: int, device: OrtDevice, capacity: int | None) -> None:
        self.in_place = spec.grows and capacity is not None
        self.capacity = max(capacity or 0, 1)  # never 0, because the buffer needs an address to bind
        self._ort, self._spec, self._batch, self._device = ort, spec, batch, device
        self._buffer = self._on_device(np.zeros(spec.sizes(batch, self.capacity), BITS[spec.dtype]))
        self._bound: list[IOBinding] = []
        self._value: OrtValue | None = None

    def bind(self, binding: IOBinding, length: int, total: int) -> None:
        """Bind past and present for a call that takes the cache from ``length`` to ``total`` tokens."""
        past, present, device = self._spec.past, self._spec.present, self._device
        if self.in_place:
            if total > self.capacity:
                self._grow(max(total, 2 * self.capacity), length)
            if binding not in self._bound:  # a buffer stays bound from call to call
                place = self._place(self.capacity)
                binding.bind_input(past, *place)
                binding.bind_output(present, *place)
                self._bound.append(binding)
            return
        if self._value is None:
            binding.bind_input(past, *self._place(0))
        else:
            binding.bind_ortvalue_input(past, self._value)
        binding.bind_output(present, device.type, device.id)

    def take(self, outputs: Sequence[object], at: int) -> None:
        """Keep the value that the call returned. A cache written in place already has the new rows in its buffer."""
        if not self.in_place:
            self._value = self._ort.OrtValue(outputs[at])

    def _place(self, tokens: int) -> tuple[str, int, object, list[int], int]:
        """Return the arguments that bind the first ``tokens`` rows of the buffer."""
        sizes = self._spec.sizes(self._batch, tokens)
        return self._device.type, self._device.id, ELEMENT[self._spec.dtype], sizes, int(self._buffer.data_ptr())

    def _grow(self, capacity: int, used: int) -> None:
        """Move to a larger buffer. The copy goes through main memory, but is rare, because the size doubles."""
        kept = (slice(None),) * (self._spec.axis or 0) + (slice(used),)
        rows = np.zeros(self._spec.sizes(self._batch, capacity), BITS[self._spec.dtype])
        rows[kept] = self._buffer.numpy()[kept]
        self._buffer, self.capacity = self._on_device(rows), capacity
        self._bound.clear()

    def _on_device(self, rows: npt.NDArray[np.generic]) -> OrtValue:
        """Return an OrtValue.

        In main memory, the value is a view of the array, whose untouched rows use no memory yet.
        """
        return self._ort.OrtValue.ortvalue_from_numpy(rows, self._device.type, self._device.id)


def view(value: OrtValue, dtype: str) -> npt.NDArray[np.generic]:
    """Return a view of a value in main memory. bfloat16 is viewed as its bits. The value must outlive the view."""
    bits = np.dtype(BITS[dtype])
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * bits.itemsize
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    return np.frombuffer(memoryview(memory), bits).reshape(shape)


def to_float32(bits: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """Convert float16, float32 or the bits of bfloat16 to float32. A bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)
