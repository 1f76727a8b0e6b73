"""How a checkpoint stores the weights of a model: bytes by part, and what is dequantized to be absorbed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mla_compile.core.quantities import BYTES, amount, gigabytes, scaled

_SHOWN = 6
"""Names that the text lists; the record has all of them."""

PartName = Literal["attention", "routed experts", "rest"]


@dataclass(frozen=True)
class StoredPart:
    """Some of the weights: how many there are, how many of them are quantized, and bytes.

    ``scale_bytes``, of scales, zero points and group indices, are among ``bytes``.
    """

    name: PartName
    values: int
    quantized: int
    bytes: int
    scale_bytes: int


@dataclass(frozen=True)
class UpProjections:
    """The weights that make K and V from latent rows, of ``layers`` attentions: W_kc and W_v, in values and as stored.

    ``names`` are those of their modules, ``packing`` says in words how they are stored if they are quantized.
    """

    names: tuple[str, ...]
    layers: int
    values: int
    bytes: int
    packing: str | None

    def dequantized(self, dtype: str) -> int:
        """Bytes in which they are kept to be absorbed, beside what is stored; 0 where they are stored as they are."""
        return self.values * BYTES[dtype] if self.packing else 0


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a model as its checkpoint stores them.

    Attributes:
        method: the format's name, ``quant_method`` in the config.
        packings: how quantized weights are stored, in words.
        dtype: of weights that are not quantized, and of those that are dequantized.
        arithmetic: the dtype in which quantized weights are multiplied.
        parts: attention, routed experts and the rest, in this order.
        lookup_bytes: of the input embedding, where it is not also the output projection; part of the rest.
        unquantized: the modules of the matrices that are not quantized; the index of a layer is ``N``.
        up: what absorbing takes apart; ``None`` where there is no latent, or its weights were not found.
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
        """Of all weights, with their scales."""
        return sum(part.bytes for part in self.parts)

    @property
    def kept_bytes(self) -> int:
        """Of W_kc and W_v, dequantized to be absorbed and kept beside what is stored."""
        return self.up.dequantized(self.dtype) if self.up else 0

    @property
    def read_in_their_place(self) -> int:
        """Bytes that an absorbed step does not read, because it reads the dequantized W_kc and W_v."""
        return self.up.bytes if self.up and self.up.packing else 0

    def part(self, name: PartName) -> StoredPart:
        """The part of this name."""
        return next(part for part in self.parts if part.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "bytes": self.bytes, "kept_bytes": self.kept_bytes}

    def lines(self) -> list[str]:
        """The same in words."""
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
