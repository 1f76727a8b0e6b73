"""Library layers that are called as one operator: which layers are products, and how their weights are dequantized.

A layer is recognised by the function that its library installed as the layer's forward, or by its class if a user
registered the class. No library is imported: the function that dequantizes a weight is looked up in modules that the
model has imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mla_compile.core.layers import CALL, CalledLayer, find
from mla_compile.passes.ir.schema import schema_name
from mla_compile.passes.quantized.registry import DequantizeFunction, QuantizedLinear, registered

Describe = Callable[[CalledLayer], QuantizedLinear | None]


def is_known(layer: nn.Module, forward: Callable[..., object]) -> bool:
    """Whether a layer is called as one operator: its class was registered, or ``forward`` is a known library's."""
    return _given(layer) is not None or _module(forward) in LAYERS


def product_of(node: fx.Node) -> QuantizedLinear | None:
    """Return the description of the layer that ``node`` calls; None if there is no layer or no description."""
    if schema_name(node) != CALL:
        return None
    called = find(str(node.args[2]))
    if (given := _given(called.layer)) is not None:
        return QuantizedLinear("rows", _of_tensors(called, given.dequantize), given.rounds)
    describe = {**LAYERS, **OTHERS}.get(_module(called.inner))
    return None if describe is None else describe(called)


def _given(layer: nn.Module) -> QuantizedLinear | None:
    """Return what a user registered for the class of a layer or for one of its base classes."""
    return next((registered.layers[kind] for kind in type(layer).__mro__ if kind in registered.layers), None)


def _module(function: object) -> str:
    """Return the module that defines a function. ``functools.wraps`` overwrites ``__module__``, but not globals."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _of_tensors(called: CalledLayer, dequantize: Callable[[nn.Module], Any] | None) -> DequantizeFunction | None:
    """Adapt the ``dequantize`` of a layer to the operator's arguments."""
    if dequantize is None:
        return None
    given = dequantize

    def of_tensors(*, weights: list[Tensor], layer: str) -> Any:
        return given(called.with_tensors(weights))

    return of_tensors


_PACKED, _BEFORE = "compressed", ("initialized", "calibration", "frozen")


def _compressed_tensors(called: CalledLayer) -> QuantizedLinear | None:
    """Describe the layer as ``F.linear``. The layer may round its rows and, before compression, its weight.

    Return None if the layer rounds its results, or if it is another kind of layer.

    The model unpacks a packed layer in a hook before the first run, but the trace sees the packed layer.
    """
    layer: Any = called.layer
    scheme = getattr(layer, "quantization_scheme", None)
    status = str(getattr(getattr(layer, "quantization_status", None), "value", ""))
    if not isinstance(layer, nn.Linear) or scheme is None:
        return None
    rounds = getattr(layer, "quantization_enabled", True) and bool(status)
    if rounds and scheme.output_activations is not None:
        return None

    if rounds and status in _BEFORE and scheme.weights is not None:
        forward_quantize = vars(sys.modules[_module(called.inner)])["forward_quantize"]
        called.rounded = lambda own: forward_quantize(own, own.weight, "weight", scheme.weights)

        def dequantize(own: Any) -> tuple[Tensor, Tensor | None]:
            kept = (*own._parameters.values(), *own._buffers.values())
            return torch.ops.mla_compile.layer_weight([t for t in kept if t is not None], called.name), own.bias
    else:

        def dequantize(own: Any) -> tuple[Tensor, Tensor | None]:
            return _unpacked(own, scheme) if status == _PACKED else own.weight, own.bias

    return QuantizedLinear(
        "rows", _of_tensors(called, dequantize), rounds=rounds and scheme.input_activations is not None
    )


def _unpacked(own: Any, scheme: Any) -> Tensor:
    registry: Any = sys.modules["compressed_tensors.compressors.base"]
    state: dict[str, object] = dict((*own.named_parameters(), *own.named_buffers()))
    if "weight_shape" in state:  # the library reads the shape as numbers, which a trace does not have
        state["weight_shape"] = torch.Size((own.out_features, own.in_features))
    compressor = registry.BaseCompressor.get_value_from_registry(scheme.format.value)
    weight: Tensor = compressor.decompress(state, scheme)["weight"]
    return weight


LAYERS: dict[str, Describe] = {"compressed_tensors.quantization.lifecycle.forward": _compressed_tensors}
"""Maps the module of a function that replaces a layer's forward to the description of the layer."""


def _quanto(called: CalledLayer) -> QuantizedLinear | None:
    """Describe ``F.linear`` with a weight of quanto's tensor class. Dynamo can trace only weights with 8 bits.

    Return None if the layer rounds rows, because hooks then hold the scales.
    """
    if getattr(called.layer, "activation_qtype", None) is not None:
        return None

    def dequantize(own: Any) -> tuple[Tensor, Tensor | None]:
        return own.qweight.dequantize(), own.bias

    return QuantizedLinear("rows", _of_tensors(called, dequantize))


OTHERS: dict[str, Describe] = {"optimum.quanto.nn.qlinear": _quanto}
"""Descriptions of layers that are called as one operator only if Dynamo fails to trace them."""
