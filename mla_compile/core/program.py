"""The program: a functional pre-dispatch ATen graph and facts about its inputs. Every entry point uses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from mla_compile.core.sharing import Sharing

Compute = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
Inputs = Sequence[Any]
"""The flat inputs of a call: tensors and numbers."""
Call = Callable[..., Any]
"""A graph that is called with its flat inputs as separate arguments and returns one flat sequence."""


def results_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the values (nodes and constants) of a graph whose output is a tuple or a list."""
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]  # never a single value


@dataclass(frozen=True)
class FoldedWeight:
    """A product of weights that a graph takes as an extra input instead of computing it in every call.

    ``compute`` maps the live tensors of ``weights`` (names in :attr:`Program.weights`) to the value of ``placeholder``.
    If the value is dequantized from quantized weights, ``stored`` is a key of the computation. Graphs with equal keys
    share the value, and compare tensor versions and addresses to detect changed weights.
    """

    placeholder: str
    compute: Compute
    weights: tuple[str, ...]
    stored: Hashable | None = None


@dataclass(frozen=True)
class Append:
    """New rows of a cache. The program writes them in place instead of returning a concatenation with the old rows.

    Attributes:
        input: the placeholder of the cache, which has capacity for ``count`` more rows at the end of axis ``axis``.
            None if the cache begins in this call or grows by any number of rows. The program then returns all rows, and
            the caller allocates spare capacity.
        output: the position of the cache (old and new rows) among the values that the caller receives. If ``input`` is
            set, the graph itself does not return the cache. ``output`` is None if the program writes to a buffer of the
            caller.
        axis: the token axis.
        count: the number of rows that a call writes.
        shared: whether the rows are distributed over the ranks of the program's ``sharing``. The placeholder then has
            only this rank's old and new rows, and the program writes only this rank's rows.
        grows: whether the cache grows. Otherwise, the cache is a buffer of full length without spare capacity.
        total: the number of rows of a shared buffer that begins in this call; 0 if unknown. If it is known, the emitted
            graph returns only this rank's rows, because whole buffers of all layers would need too much memory.
    """

    input: str | None
    output: int | None
    axis: int
    count: int
    shared: bool = False
    grows: bool = True
    total: int = 0


@dataclass(frozen=True)
class Capture:
    """Facts about a program that come from the capture and its caller. No pass changes them.

    Attributes:
        original: the captured object, from which the result is emitted.
        parts: name of an input that is a tensor subclass -> name of a node that reads one of the input's plain tensors
            -> the plain tensor.
        latents: placeholder name -> the example input that carries latent rows (``LatentTensor``).
        own: placeholder names of the buffers that may be kept as rows. An optimized module owns these buffers, and the
            program writes or returns their new values.
        plain: whether K and V are still cached and read, in addition to rows.
        sharing: how the ranks share the rows of caches, or None.
        shared: placeholder names of the inputs whose rows are distributed over the ranks.
        autocast: whether autocast was active in the graph or around its capture. If so, the graph contains the casts.
        seconds: how long the capture took.
    """

    original: fx.GraphModule | torch.export.ExportedProgram | None = None
    parts: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    latents: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    plain: bool = False
    sharing: Sharing | None = None
    shared: frozenset[str] = frozenset()
    autocast: bool = False
    seconds: float = 0.0


@dataclass
class Program:
    """A captured graph: functional pre-dispatch ATen with ``meta["val"]`` on every node.

    Attributes:
        gm: the graph. Its placeholders have the order of the captured callable's flat inputs. Its output is one flat
            tuple: the new values of ``mutations``, then the values that the callable returned.
        mutations: names of the nodes (placeholders, or get_attr of a mutated buffer) whose new values come first in the
            output.
        weights: node name (placeholder or get_attr) -> live tensor, for parameters, module buffers and constants. A
            fake or meta tensor has no values and is replaced by ``None``.
        fake_mode: the fake tensor mode of the metadata.
        aliases: index of a returned value -> name of the mutated input that the value is a view of. The view is
            computed again after the write, so that it shares the input's memory as in the original program.
        capture: facts that come from the capture and its caller.
        folds: extra placeholders that passes append after all others. Whoever runs the program supplies their values.
        cache: the inputs and outputs that hold rows instead of K and V (a ``LatentCache`` of the passes), or None if no
            pass decided to keep rows.
        appends: the caches to which a pass appends new rows in place.
    """

    gm: fx.GraphModule
    mutations: tuple[str, ...] = ()
    weights: dict[str, torch.Tensor | None] = field(default_factory=dict)
    fake_mode: FakeTensorMode | None = None
    aliases: dict[int, str] = field(default_factory=dict)
    capture: Capture = field(default_factory=Capture)
    folds: list[FoldedWeight] = field(default_factory=list)
    cache: Any = None
    appends: tuple[Append, ...] = ()

    def copy(self) -> Program:
        """Return a copy whose graph may be rewritten. Nodes and their ``meta`` dicts are new; tensors are shared."""
        gm = graph_module(self.gm, copy_graph(self.gm.graph))
        return replace(self, gm=gm, weights=dict(self.weights), aliases=dict(self.aliases), folds=list(self.folds))

    def know(self, **facts: object) -> None:
        """Replace fields of ``capture``."""
        self.capture = replace(self.capture, **facts)  # type: ignore[arg-type]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, folds last."""
        return list(self.gm.graph.find_nodes(op="placeholder"))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The values of the output node: new values of the mutated inputs, then the caller's values."""
        return results_of(self.gm.graph)

    def named(self) -> dict[str, fx.Node]:
        """Return all nodes by name, for repeated look-ups."""
        return {node.name: node for node in self.gm.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """Return the node called ``name``. Raises ``KeyError`` if there is none."""
        found: fx.Node | None = next((node for node in self.gm.graph.nodes if node.name == name), None)
        if found is None:
            raise KeyError(name)
        return found


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, including names and metadata. The copy takes and returns positional values."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    returned = copied.graph_copy(graph, nodes)
    copied.output(returned).meta = dict(graph.output_node().meta)
    return copied


def graph_module(root: torch.nn.Module | dict[str, object], graph: fx.Graph) -> fx.GraphModule:
    """Return a module that generates Python code only when it first runs, because most graphs never run."""
    return _LazyGraphModule(root, graph)


def view_source(node: object) -> fx.Node | None:
    """Return the node (a tensor or a tuple of views) of which ``node`` is a direct view, or ``None``."""
    # Operator schemas mark views. The passes' decoder is not used, because it requires canonical graphs.
    if not isinstance(node, fx.Node) or node.op != "call_function" or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        return source if view_source(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    returned = schema.returns[0].alias_info if schema.returns else None
    given = schema.arguments[0].alias_info
    return source if returned is not None and given is not None and not given.is_write else None
