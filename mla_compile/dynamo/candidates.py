"""Check cheaply, before capture, whether a Dynamo graph could contain an attention, with or without a softmax."""

from __future__ import annotations

import torch
from torch import fx

PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm", "__matmul__", "rmatmul", "__rmatmul__", "imatmul"})
_ENDS = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d", "conv3d", "embedding"})
_MAPS = (
    "sigmoid", "relu", "gelu", "silu", "elu", "swish", "tanh", "softplus", "square", "pow", "clamp", "clip", "mish",
    "threshold", "erf", "abs", "maximum", "max",
)  # fmt: skip
_REACH = 24
"""How many nodes upstream of a product are searched for another product.

Scales, masks, casts and a function of the scores may lie between an attention's two products.
"""


def has_attention(gm: fx.GraphModule) -> bool:
    """Whether a graph, or a graph nested in it, calls something that could be the core of an attention."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_module":
                name = type(module.get_submodule(node.target)).__name__
            else:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            known = name == "exp" or any(word in name.lower() for word in ("softmax", "attention", "attn"))
            if node.op.startswith("call_") and (known or _takes_three_tensors(node.target)):
                return True
        if joined_by_a_function(module.graph):
            return True
    return False


def _takes_three_tensors(target: object) -> bool:
    """Whether a library's operator starts with three tensor arguments, which could be queries, keys and values."""
    packet = getattr(target, "overloadpacket", target)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or packet._qualified_op_name.startswith(("aten::", "prim")):
        return False
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(len(s.arguments) > 2 and all(str(a.type) == "Tensor" for a in s.arguments[:3]) for s in schemas)


def joined_by_a_function(graph: fx.Graph) -> bool:
    """Whether a product of activations reads the result of another such product through an elementwise function.

    Products with parameters are ignored, so the layers of an MLP or a router do not match.
    """
    products = {n for n in graph.nodes if _is_product(n)}
    return len(products) > 1 and any(_behind_a_function(n, products) for n in products)


def _behind_a_function(product: fx.Node, products: set[fx.Node]) -> bool:
    queue = [(n, _is_map(n)) for n in product.all_input_nodes]
    seen: set[tuple[fx.Node, bool]] = set()
    while queue and len(seen) < _REACH:
        node, mapped = queue.pop(0)
        if (node, mapped) in seen:
            continue
        seen.add((node, mapped))
        if node in products:
            if mapped:
                return True
        elif _name(node) not in _ENDS:
            queue += [(n, mapped or _is_map(n)) for n in node.all_input_nodes]
    return False


def _is_product(node: fx.Node) -> bool:
    return _name(node) in PRODUCTS and not any(_is_parameter(n) for n in node.all_input_nodes)


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _is_map(node: fx.Node) -> bool:
    return any(word in _name(node) for word in _MAPS)


def _name(node: fx.Node) -> str:
    if not node.op.startswith("call_"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
