"""Products of rows with a weight in a quantized format, and how each weight is dequantized.

:mod:`mla_compile.passes.quantized.library` lists the known products. Users add products with
:func:`mla_compile.register_quantized_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx, nn

from mla_compile.passes.ir.schema import schema_name

DequantizeFunction = Callable[..., "torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]"]


@dataclass(frozen=True)
class QuantizedLinear:
    """An operator that computes ``rows W^T + bias`` [..., out] from rows [..., in].

    Attributes:
        rows: the name of the argument that holds the rows.
        dequantize: takes all other arguments of the operator by name. Returns W [out, in] in a floating dtype, or a
            pair of W and the bias [out] (or None). If ``dequantize`` is None, the operator is applied to unit vectors
            to get W.
        rounds: whether the operator also rounds the rows.
    """

    rows: str
    dequantize: DequantizeFunction | None
    rounds: bool = False


class ProductTable:
    """Maps operators' qualified names to products. Names may be patterns: some namespaces end in a build's hash."""

    def __init__(self, known: Mapping[str, QuantizedLinear]) -> None:
        self._known = dict(known)
        self._found: dict[str, QuantizedLinear | None] = {}  # a cache, because every node of every graph is looked up
        self.layers: dict[type[nn.Module], QuantizedLinear] = {}

    def add(self, name: str, product: QuantizedLinear) -> None:
        self._known[name] = product
        self._found.clear()

    def get(self, node: fx.Node) -> QuantizedLinear | None:
        """Return the description of the product that ``node`` calls."""
        name = schema_name(node)
        if name and name not in self._found:
            matching = (known for pattern, known in self._known.items() if fnmatchcase(name, pattern))
            self._found[name] = self._known.get(name) or next(matching, None)
        return self._found.get(name)


registered = ProductTable({})
"""The products that users registered."""
