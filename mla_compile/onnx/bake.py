"""Store weights in the layout that the exported graph's products need.

Before: ``einsum("bshn,hnl->bshl", q, slice(reshape(kv_b_proj.weight)))``, which slices the weight in every call.

After: ``matmul(reshape(permute(q), [H, -1, N]), w)``, where ``w`` [H,N,L] is a separate constant, contiguous and in the
dtype of the product. Most runtimes run Einsum as a chain of transposes, but have a fast MatMul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mla_compile.core.program import FoldedWeight, Program
from mla_compile.passes.ir.graph import OURS, Builder, args_of, new_input, packet, val
from mla_compile.passes.ir.walk import remove_dead_code, weight_nodes

aten = torch.ops.aten


def bake_projections(program: Program) -> dict[str, tuple[str, ...]]:
    """Rewrite the products of activations and weights that absorption emitted. The results multiply by baked weights.

    The baked weights become folds of the program, and replace the folds from which they are computed. Returns the name
    of each new input -> the node names of the weights from which it is computed.
    """
    graph = program.gm.graph
    products = {fold.placeholder: fold for fold in program.folds}
    weights = weight_nodes(graph, {*program.weights, *products})
    # Products share a constant if they use the same weight node with the same order of axes. For example, layers may
    # share a weight, or several blocks of queries may be multiplied by one key.
    baked: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    made: dict[str, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        if packet(node) is not aten.einsum or OURS not in node.meta:
            continue
        equation, operands = args_of(node)
        if len(operands) != 2 or operands[1] not in weights or operands[0] in weights:
            continue
        _as_matmul(program, node, equation, operands, baked, made)
    remove_dead_code(graph)
    for placeholder in products:
        if not program.node(placeholder).users:
            graph.erase_node(program.node(placeholder))
            program.folds.remove(products[placeholder])
    return made


def _as_matmul(
    program: Program,
    node: fx.Node,
    equation: str,
    operands: list[fx.Node],
    baked: dict[tuple[fx.Node, tuple[int, ...]], fx.Node],
    made: dict[str, tuple[str, ...]],
) -> None:
    x, weight = operands
    (lx, lw), out = equation.split("->")[0].split(","), equation.split("->")[1]
    shared = [c for c in lx if c in lw and c in out]
    summed = [c for c in lx if c in lw and c not in out]
    free = [c for c in lx if c not in lw]
    new = [c for c in lw if c not in lx]
    order = tuple(lw.index(c) for c in (*shared, *summed, *new))
    key = (weight, order)
    if key not in baked:
        baked[key], source = _constant(program, weight, order, [len(shared), len(summed), len(new)])
        made[baked[key].name] = source
    constant = baked[key]

    builder = Builder(node, program.fake_mode)
    sizes = {c: builder.size(x, k) for k, c in enumerate(lx)}
    sizes |= {c: int(val(weight).shape[k]) for k, c in enumerate(lw)}
    batch = [_product(sizes, shared)] if shared else []
    rows = builder.call(aten.permute.default, x, [lx.index(c) for c in (*shared, *free, *summed)])
    rows = builder.call(aten.reshape.default, rows, [*batch, -1, _product(sizes, summed)])
    product = builder.call(aten.matmul.default, rows, constant)
    wide = [*shared, *free, *new]
    product = builder.call(aten.reshape.default, product, [sizes[c] for c in wide])
    product = builder.call(aten.permute.default, product, [wide.index(c) for c in out])
    node.replace_all_uses_with(product)
    program.gm.graph.erase_node(node)


def _product(sizes: Mapping[str, Any], letters: list[str]) -> int:
    total = 1
    for letter in letters:
        total *= int(sizes[letter])  # never symbolic, because shared and summed axes are axes of a weight
    return total


def _constant(
    program: Program, weight: fx.Node, order: tuple[int, ...], counts: list[int]
) -> tuple[fx.Node, tuple[str, ...]]:
    """Add an input that holds ``weight``, permuted to ``order``. Return the input and the node names of its weights.

    ``counts``: how many consecutive axes are merged into each new axis. If the first count is 0, it adds no axis.
    """
    module, names = _closed(weight)
    products = {fold.placeholder: fold for fold in program.folds if fold.placeholder in names}
    leaves = dict.fromkeys(n for name in names for n in (products[name].weights if name in products else (name,)))
    shape = [int(val(weight).shape[k]) for k in order]
    flat, start = [], 0
    for position, count in enumerate(counts):
        part = shape[start : start + count]
        start += count
        if part or position > 0:  # if no axes are shared, there is no batch axis
            flat.append(int(torch.Size(part).numel()))

    def compute(live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs = [products[name].compute(live) if name in products else live[name] for name in names]
        tensor: torch.Tensor = module(*inputs)
        return tensor.permute(order).reshape(flat).contiguous()

    value = val(weight).permute(order).new_empty(flat)
    placeholder = new_input(program.gm.graph, f"baked_{len(program.folds)}", value)
    program.folds.append(FoldedWeight(placeholder.name, compute, tuple(leaves)))
    return placeholder, tuple(leaves)


def _closed(weight: fx.Node) -> tuple[fx.GraphModule, list[str]]:
    """Return a module that computes ``weight``, and the names of the graph's inputs that the module reads."""
    copied: dict[fx.Node, fx.Node] = {}
    own = fx.Graph()
    names: list[str] = []

    def copy(node: fx.Node) -> fx.Node:
        if node not in copied:
            if node.op == "call_function":
                for source in node.all_input_nodes:
                    copy(source)
                copied[node] = own.node_copy(node, lambda n: copied[n])
            else:
                names.append(node.name)
                copied[node] = own.placeholder(node.name)
        return copied[node]

    own.output(copy(weight))
    return fx.GraphModule({}, own), names
