"""How a checkpoint stores the weights of a model: the bytes of each part, and what absorption dequantizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mla_compile.core.quantities import BYTES, amount, gigabytes, scaled

_SHOWN = 6
"""The number of names in the text. The record has all names."""

PartName = Literal["attention", "routed experts", "rest"]


@dataclass(frozen=True)
class StoredPart:
    """A part of the weights: the number of values, the number of quantized values, and the stored bytes.

    ``bytes`` include ``scale_bytes``, the bytes of scales, zero points and group indices.
    """

    name: PartName
    values: int
    quantized: int
    bytes: int
    scale_bytes: int


@dataclass(frozen=True)
class UpProjections:
    """The weights W_kc and W_v of ``layers`` attentions, which make K and V from latent rows.

    ``names``: the names of their modules. ``values``: the number of weights. ``bytes``: their stored size. ``packing``:
    how quantized weights are stored, in words; None if they are not quantized.
    """

    names: tuple[str, ...]
    layers: int
    values: int
    bytes: int
    packing: str | None

    def dequantized(self, dtype: str) -> int:
        """Return the bytes of dequantized weights, which are kept in addition; 0 if nothing is quantized."""
        return self.values * BYTES[dtype] if self.packing else 0


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a model as its checkpoint stores them.

    Attributes:
        method: the format's name, ``quant_method`` in the config.
        packings: how quantized weights are stored, in words.
        dtype: the dtype of unquantized and of dequantized weights.
        arithmetic: the dtype in which quantized weights are multiplied.
        parts: attention, routed experts and the rest, in this order.
        lookup_bytes: the bytes of the input embedding, unless it is also the output projection; included in "rest".
        unquantized: the modules of unquantized matrices. ``N`` represents the index of a layer.
        up: the up-projections, which absorption splits; ``None`` if none were found.
    """

    method: str
    packings: tuple[str, ...]
    dtype: str
    arithmetic: str
    parts: tuple[StoredPart, ...]
    lookup_bytes: int
    unquantized: tuple[str, ...]
    up: UpProjections | None

    @property
    def bytes(self) -> int:
        """The bytes of all weights and their scales."""
        return sum(part.bytes for part in self.parts)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the dequantized W_kc and W_v that absorption keeps in addition to the stored weights."""
        return self.up.dequantized(self.dtype) if self.up else 0

    @property
    def read_in_their_place(self) -> int:
        """The stored bytes of W_kc and W_v that an absorbed step replaces by dequantized weights."""
        return self.up.bytes if self.up and self.up.packing else 0

    def part(self, name: PartName) -> StoredPart:
        """Return the part with this name."""
        return next(part for part in self.parts if part.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record."""
        return {**asdict(self), "bytes": self.bytes, "kept_bytes": self.kept_bytes}

    def lines(self) -> list[str]:
        """Describe the weights in words."""
        scales = sum(part.scale_bytes for part in self.parts)
        how = "; ".join(self.packings) or "nothing of it is quantized"
        size = f"{gigabytes(self.bytes)}, {scaled(scales, 'B')} of it scales"
        said = [f"weights as stored ({self.method}): {size}; {how}"]
        for part in self.parts:
            if part.values:
                share = f"{amount(part.quantized)} of {amount(part.values)} weights quantized"
                said.append(f"  {part.name}: {gigabytes(part.bytes)}, {share}")
        names = list(self.unquantized[:_SHOWN])
        if len(self.unquantized) > _SHOWN:
            names.append(f"{len(self.unquantized) - _SHOWN} more")
        said.append(f"  in {self.dtype}: {', '.join((*names, 'norms and biases'))}")
        if self.up:
            said.append(self._of_the_up_projections(self.up))
        return said

    def _of_the_up_projections(self, up: UpProjections) -> str:
        names = " and ".join(up.names)
        if not up.packing:
            return f"  {names}: stored in {self.dtype}, absorbed as stored, nothing to dequantize"
        size = self.kept_bytes
        return (
            f"  {names}: stored as {up.packing}, dequantized to be absorbed; kept, W_kc and W_v take "
            f"{scaled(size / up.layers, 'B')} per attention in {self.dtype}, {gigabytes(size)} in all {up.layers}"
        )
