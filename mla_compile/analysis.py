"""What the passes read off one program before anything is rewritten: one spelling, the attentions, their linear maps.

The caches kept as rows, an attention split by heads and the pipeline itself all begin like this, each on a copy.
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
from mla_compile.passes.decide.cost import Device, default_device
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
"""The passes that leave one spelling of everything, in order: each returns the number of its changes."""


def weights_of(program: Program) -> set[fx.Node]:
    """The nodes computed from weights and constants only."""
    return weight_nodes(program.gm.graph, program.weights)


def copy_with_origins(program: Program) -> Program:
    """A copy, each of whose nodes knows what it is in ``program``."""
    copied = program.copy()
    for node in copied.gm.graph.nodes:
        # Names survive copies of a graph and nodes do not: the check looks up its inputs by name.
        node.meta[ORIGIN] = node.name
    return copied


def canonicalize(program: Program) -> dict[str, int]:
    """Rewrites ``program`` itself to one spelling; the number of changes of each pass."""
    return {name: change(program) for name, change in CANONICAL.items()}


@dataclass(frozen=True)
class Analysis:
    """One canonical program, read only. ``maps`` knows the virtual sources of its attentions."""

    program: Program
    sites: list[AttentionSite]
    maps: Maps

    def with_slices(self) -> Analysis:
        """The same, where a slice along the tokens of K or V may be what the same slice of its rows makes."""
        return replace(self, maps=with_row_slices(self.sites, with_groups(self.sites, self.maps)))

    @property
    def weights(self) -> Collection[fx.Node]:
        """The nodes computed from weights and constants only."""
        return self.maps.weights

    def judged(self, forms: Forms, fold: Fold, device: Device | None = None, *, sparse: bool = True) -> list[Verdict]:
        """The verdict on each attention, in order; ``device``: by default that of the program.

        ``sparse``: whether attention may read the keys of a list only.
        """
        gm = self.program.gm
        on = device or default_device(device_type(gm))
        verdicts = judge(gm.graph, self.sites, self.maps, on, forms, fold, sparse=sparse)
        return verdicts if forms == "expanded" else with_fusions(gm.graph, verdicts, self.maps, sparse=sparse)

    def without_softmax(self) -> list[tuple[fx.Node, Stop]]:
        """Attentions over a latent that have none, each with what is there in its place."""
        gm = self.program.gm
        found = find_other_weights(gm.graph, self.weights)
        if not found:
            return []
        sites, functions = [site for site, _ in found], [function for _, function in found]
        maps, device = with_row_slices(sites, self.maps), default_device(device_type(gm))
        return not_softmax(judge(gm.graph, sites, maps, device, "absorbed", "never", sparse=False), functions)


@dataclass(frozen=True)
class Read:
    """A canonical copy of a program as it was read, unchanged since: ``changes`` of each canonical pass, no slices."""

    changes: dict[str, int]
    analysis: Analysis


def analyse(program: Program, *, slices: bool = True) -> Analysis:
    """The attentions of a canonical program, and the analysis of its linear maps.

    ``slices``: as :meth:`Analysis.with_slices`.
    """
    weights = weights_of(program)
    sites = find_attention(program.gm.graph, weights)
    shared = find_shared_rows(sites, weights, program.fake_mode)
    nearby = Nearby({site.node: [p.q.node for p in site.products] for site in sites})
    maps = LinearMaps(weights, program.fake_mode, virtual=VirtualSources(shared=shared), nearby=nearby)
    found = Analysis(program, sites, maps)
    return found.with_slices() if slices else found


def device_type(gm: fx.GraphModule) -> str:
    """Where the first tensor of a graph lies."""
    tensors = (n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")
