"""Counts the bytes in which a quantized checkpoint stores the weights of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from mla_compile.core.dims import Dims
from mla_compile.core.quantities import BYTES
from mla_compile.models.quantization import Packing, Quantization
from mla_compile.models.weights import Tensor
from mla_compile.report.stored import PartName, StoredPart, StoredWeights, UpProjections


def stored_weights(
    tensors: Iterable[Tensor], quantization: Quantization, attentions: Mapping[str, Dims | None]
) -> StoredWeights:
    """Count a model's weights as a checkpoint stores them.

    ``attentions`` maps the path of each attention to sizes, or to None if the attention is not absorbed.
    """
    values: dict[PartName, list[int]] = {"attention": [0] * 4, "routed experts": [0] * 4, "rest": [0] * 4}
    packings: dict[str, None] = {}
    unquantized: dict[str, None] = {}
    lookup = 0
    found: dict[str, list[tuple[Tensor, Packing | None, int]]] = {}
    for tensor in tensors:
        packing = quantization.packing(tensor)
        if packing is not None:
            rows, columns = tensor.shape
            size, scales = (tensor.copies * n for n in packing.sizes(rows, columns))
            packings[packing.words] = None
        else:
            size, scales = tensor.values * BYTES[quantization.dtype], 0
            if len(tensor.shape) > 1:
                unquantized[re.sub(r"\.\d+(?=\.|$)", ".N", tensor.module)] = None
        owner = next((path for path in _above(tensor.module) if path in attentions), None)
        part: PartName = "routed experts" if tensor.expert else "rest" if owner is None else "attention"
        for i, n in enumerate((tensor.values, tensor.values if packing else 0, size + scales, scales)):
            values[part][i] += n
        lookup += tensor.table * (size + scales)
        if owner is not None:
            found.setdefault(owner, []).append((tensor, packing, size + scales))
    return StoredWeights(
        quantization.method, tuple(packings), quantization.dtype, quantization.arithmetic,
        tuple(StoredPart(name, *counts) for name, counts in values.items()), lookup, tuple(unquantized),
        _up_projections({path: (attentions[path], owned) for path, owned in found.items()}),
    )  # fmt: skip


def _above(path: str) -> Iterable[str]:
    """Yield a path and the paths of its parent modules, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _up_projections(
    found: Mapping[str, tuple[Dims | None, Sequence[tuple[Tensor, Packing | None, int]]]],
) -> UpProjections | None:
    """Sum up the weights that expand rows to K and V over all attentions. The shapes identify these weights."""
    names: dict[str, None] = {}
    words: dict[str, None] = {}
    layers = values = size = 0
    for dims, owned in found.values():
        if dims is None:
            continue
        both = (dims.H * (dims.N + dims.V), dims.L)
        apart = {(dims.H * dims.N, dims.L), (dims.H * dims.V, dims.L)}
        # The query's up-projection may have this shape, too. The later one of two such weights reads the latent.
        taken = [one for one in owned if one[0].shape == both][-1:] or [one for one in owned if one[0].shape in apart]
        if sum(tensor.values for tensor, _, _ in taken) != both[0] * both[1]:
            continue
        layers, values = layers + 1, values + both[0] * both[1]
        size += sum(n for _, _, n in taken)
        names |= {tensor.module.rpartition(".")[2]: None for tensor, _, _ in taken}
        words |= {packing.words: None for _, packing, _ in taken if packing}
    return UpProjections(tuple(names), layers, values, size, " or ".join(words) or None) if layers else None
