"""The program: a functional pre-dispatch ATen graph with the facts about its inputs, the same for every entry point."""

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
    """The values that a graph returns, in a tuple or list: nodes and constants."""
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]  # never a single value


@dataclass(frozen=True)
class FoldedWeight:
    """A product of weights that a graph takes as an extra input instead of computing it in every call.

    ``compute`` maps the live tensors of ``weights`` (names of :attr:`Program.weights`) to the value of ``placeholder``.
    ``stored`` is set if the value is the dequantized form of quantized weights. It is a key that is equal for equal
    computations: graphs with equal keys share the value, and detect changes by versions and addresses of the weights.
    """

    placeholder: str
    compute: Compute
    weights: tuple[str, ...]
    stored: Hashable | None = None


@dataclass(frozen=True)
class Append:
    """Rows of a cache that a program writes in place instead of returning old and new rows joined.

    Attributes:
        input: the placeholder of the rows, which has room for ``count`` more at the end of axis ``axis``. None: the
            cache begins with this call, or grows by any number of rows. The program then returns its rows as before,
            and its caller allocates the room behind them.
        output: the position of the cache, old and new rows, among the values that the caller gets; with ``input``, the
            graph itself no longer returns it. None: the rows are a buffer of the caller, to which the program writes.
        axis: the axis of the tokens.
        count: the number of rows that a call writes.
        shared: whether each rank of the program's ``sharing`` keeps its share of the rows. The placeholder then takes
            as many rows as a rank holds of old and new ones together, and the program writes only the rank's own rows.
        grows: False: the rows are a buffer of full length, which needs no room.
        total: the number of rows of a shared buffer that begins with this call; 0 if unknown. The emitted graph returns
            only this rank's rows, since whole buffers of all layers would take the memory that sharing saves.
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
    """What the capture and its caller know of a program. No pass changes it.

    Attributes:
        original: the captured object, from which the result is emitted.
        parts: input that is a tensor subclass -> node name -> plain tensor, for the nodes that read its plain tensors.
        latents: placeholder name -> the example input that carries latent rows (``LatentTensor``).
        own: placeholder names of the buffers that may be kept as rows: those that an optimized module owns, and that
            the program writes to or returns with new values.
        plain: whether K and V are still read from buffers beside which rows are kept.
        sharing: how the ranks of the program share the rows of caches; None if they do not.
        shared: placeholder names of the inputs whose rows are distributed over the ranks.
        autocast: whether the graph contains the casts of an autocast that was active in it or around its capture.
        seconds: the time of the capture.
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
        gm: placeholders in the order of the captured callable's flat inputs; the output node returns one flat tuple,
            the new values of ``mutations`` first, then the values that the callable returned.
        mutations: names of the nodes (placeholders, or get_attr of a mutated buffer) whose new values come first in the
            output.
        weights: node name (placeholder or get_attr) -> live tensor, for parameters, module buffers and constants;
            ``None`` if there are no values (fake or meta tensors).
        fake_mode: the fake tensor mode of the metadata.
        aliases: index of a returned value -> the mutated input of which it is a view. The view is recomputed from the
            input after the write, so that the caller gets the input's memory as in the original program.
        capture: what the capture and its caller know of it.
        folds: extra placeholders that passes append after all others; whoever runs the program supplies their values.
        cache: the inputs and outputs that hold the rows of K and V instead of K and V (a ``LatentCache`` of the
            passes), where a pass has decided that.
        appends: the caches to which new rows are appended in place, where a pass has decided that.
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
        """A copy whose graph may be rewritten freely: nodes and their ``meta`` dicts are new, tensors are shared."""
        gm = graph_module(self.gm, copy_graph(self.gm.graph))
        return replace(self, gm=gm, weights=dict(self.weights), aliases=dict(self.aliases), folds=list(self.folds))

    def know(self, **facts: object) -> None:
        """Replace facts of ``capture``, by the names of its fields."""
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
        """The nodes by name, for repeated look-ups."""
        return {node.name: node for node in self.gm.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """The node of that name; raises ``KeyError`` if there is none."""
        found: fx.Node | None = next((node for node in self.gm.graph.nodes if node.name == name), None)
        if found is None:
            raise KeyError(name)
        return found


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with the same nodes, names and metadata, whose inputs and outputs are plain positional values."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    returned = copied.graph_copy(graph, nodes)
    copied.output(returned).meta = dict(graph.output_node().meta)
    return copied


def graph_module(root: torch.nn.Module | dict[str, object], graph: fx.Graph) -> fx.GraphModule:
    """A module that generates the Python of ``graph`` on its first run: most are traced or rewritten, never run."""
    return _LazyGraphModule(root, graph)


def view_source(node: object) -> fx.Node | None:
    """The tensor (or tuple of views) of which ``node`` is directly a view; ``None`` if ``node`` is no view."""
    # Decided by the schema, not by the passes' decoder: these graphs are as captured, not canonical.
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
