"""The analysis that precedes every rewrite: canonicalise, find the attentions, compute their linear maps.

The pipeline, the rewrite of caches and the splitting of heads all start with it, each on its own copy of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.core.choices import Fold, Forms
from mla_compile.core.program import Program
from mla_compile.passes.attention.find import find_attention, find_other_weights
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.canonical.normalize import normalize
from mla_compile.passes.canonical.products import split_products
from mla_compile.passes.canonical.softmax import write_softmax
from mla_compile.passes.canonical.views import canonicalize as canonicalize_views
from mla_compile.passes.decide.cost import DeviceModel, default_device
from mla_compile.passes.decide.fuse import with_fusions
from mla_compile.passes.decide.groups import with_groups
from mla_compile.passes.decide.judge import judge
from mla_compile.passes.decide.not_softmax import not_softmax
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.decide.row_slices import with_row_slices
from mla_compile.passes.decide.shared_rows import find_shared_rows
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import weight_nodes
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.linear.nearby import Nearby
from mla_compile.passes.linear.records import Maps, VirtualSources

CANONICAL: dict[str, Callable[[Program], int]] = {
    "normalize": lambda program: normalize(program.gm.graph, program.fake_mode),
    "views": lambda program: canonicalize_views(program.gm.graph),
    "split_products": lambda program: split_products(program.gm.graph, weights_of(program), program.fake_mode),
    "write_softmax": lambda program: write_softmax(program.gm.graph, weights_of(program), program.fake_mode),
}
"""The canonicalisation passes in order. Each returns the number of changes it made."""


def weights_of(program: Program) -> set[fx.Node]:
    """The nodes that are computed from weights and constants only."""
    return weight_nodes(program.gm.graph, program.weights)


def copy_with_origins(program: Program) -> Program:
    """A copy in which every node records the name of its original in ``meta[ORIGIN]``."""
    copied = program.copy()
    for node in copied.gm.graph.nodes:
        # A copied graph has new nodes with the same names: verification looks up its inputs by name.
        node.meta[ORIGIN] = node.name
    return copied


def canonicalize(program: Program) -> dict[str, int]:
    """Canonicalise ``program`` in place; return the number of changes of each pass."""
    return {name: change(program) for name, change in CANONICAL.items()}


@dataclass(frozen=True)
class Analysis:
    """The analysis of one canonical program, which is read only.

    ``maps`` includes the virtual sources of its attentions.
    """

    program: Program
    sites: list[AttentionSite]
    maps: Maps

    def with_slices(self) -> Analysis:
        """The same analysis, which may also express a token slice of K or V as the same slice of the source rows."""
        return replace(self, maps=with_row_slices(self.sites, with_groups(self.sites, self.maps)))

    @property
    def weights(self) -> Collection[fx.Node]:
        """The nodes that are computed from weights and constants only."""
        return self.maps.weights

    def judged(
        self, forms: Forms, fold: Fold, device: DeviceModel | None = None, *, sparse: bool = True
    ) -> list[Verdict]:
        """The verdict on each attention, in order. ``device`` is that of the program by default.

        ``sparse``: whether an attention may read only the keys of an index list.
        """
        gm = self.program.gm
        on = device or default_device(device_type(gm))
        verdicts = judge(gm.graph, self.sites, self.maps, on, forms, fold, sparse=sparse)
        return verdicts if forms == "expanded" else with_fusions(gm.graph, verdicts, self.maps, sparse=sparse)

    def without_softmax(self) -> list[tuple[fx.Node, Stop]]:
        """The attentions over a latent that have no softmax, each with a stop that names the function in its place."""
        gm = self.program.gm
        found = find_other_weights(gm.graph, self.weights)
        if not found:
            return []
        sites, functions = [site for site, _ in found], [function for _, function in found]
        maps, device = with_row_slices(sites, self.maps), default_device(device_type(gm))
        return not_softmax(judge(gm.graph, sites, maps, device, "absorbed", "never", sparse=False), functions)


@dataclass(frozen=True)
class CanonicalProgram:
    """The analysis of a canonical copy, without row slices, and the ``changes`` of each canonicalisation pass."""

    changes: dict[str, int]
    analysis: Analysis


def analyse(program: Program, *, slices: bool = True) -> Analysis:
    """Find the attentions of a canonical program and analyse its linear maps.

    ``slices``: apply :meth:`Analysis.with_slices`.
    """
    weights = weights_of(program)
    sites = find_attention(program.gm.graph, weights)
    shared = find_shared_rows(sites, weights, program.fake_mode)
    nearby = Nearby({site.node: [p.q.node for p in site.products] for site in sites})
    maps = LinearMaps(weights, program.fake_mode, virtual=VirtualSources(shared=shared), nearby=nearby)
    found = Analysis(program, sites, maps)
    return found.with_slices() if slices else found


def device_type(gm: fx.GraphModule) -> str:
    """The device type of the first tensor of a graph."""
    tensors = (n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")
