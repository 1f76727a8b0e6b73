"""The analyses of a program: functions whose results :class:`~mla_compile.pipeline.manager.Analyses` keeps.

All analyses assume a canonical program. :func:`canonicalize` prepares a copy for trials outside of the pass table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.core.choices import Fold, Forms
from mla_compile.core.program import Program
from mla_compile.passes.attention.find import find_attention, find_other_weights
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.attention.unfollowed import unfollowed
from mla_compile.passes.blame.not_softmax import not_softmax
from mla_compile.passes.canonical.heads import read_heads
from mla_compile.passes.canonical.joins import join_rows
from mla_compile.passes.canonical.normalize import normalize
from mla_compile.passes.canonical.products import split_products
from mla_compile.passes.canonical.scatters import read_scatters
from mla_compile.passes.canonical.softmax import write_softmax
from mla_compile.passes.canonical.views import canonicalize as canonicalize_views
from mla_compile.passes.cost.cost import DeviceModel, default_device
from mla_compile.passes.decide.fuse import with_fusions
from mla_compile.passes.decide.judge import judge
from mla_compile.passes.ir.graph import ORIGIN
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import weight_nodes
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.linear.nearby import Nearby
from mla_compile.passes.linear.records import Maps, VirtualSources
from mla_compile.passes.sources.groups import with_groups
from mla_compile.passes.sources.records import Verdict
from mla_compile.passes.sources.row_slices import with_row_slices
from mla_compile.passes.sources.shared_rows import find_shared_rows
from mla_compile.pipeline.manager import Analyses


def weights(known: Analyses) -> set[fx.Node]:
    """Return the nodes that are computed from weights and constants only."""
    return weight_nodes(known.program.gm.graph, known.program.weights)


def read_weights(known: Analyses) -> set[fx.Node]:
    """Return the nodes that are computed only from weights, constants, and the inputs that hold folds."""
    kept = {fold.placeholder for fold in known.program.folds}
    return weight_nodes(known.program.gm.graph, {*known.program.weights, *kept})


def sites(known: Analyses) -> list[AttentionSite]:
    """Return the attentions, in the order of their outputs."""
    return find_attention(known.program.gm.graph, known.get(weights))


def linear_maps(known: Analyses) -> LinearMaps:
    """Return the linear maps of any node, without virtual sources."""
    return LinearMaps(known.get(weights), known.program.fake_mode)


def site_maps(known: Analyses) -> Maps:
    """Return the linear maps of K and V. Rows that are copied for every head have maps, too."""
    found, own = known.get(sites), known.get(weights)
    shared = find_shared_rows(found, own, known.program.fake_mode)
    nearby = Nearby({site.node: [p.q.node for p in site.products] for site in found})
    return LinearMaps(own, known.program.fake_mode, virtual=VirtualSources(shared=shared), nearby=nearby)


def sliced_maps(known: Analyses) -> Maps:
    """Return :func:`site_maps`. In addition, slices of source rows may be sources of slices of K or V."""
    found = known.get(sites)
    return with_row_slices(found, with_groups(found, known.get(site_maps)))


@dataclass(frozen=True)
class Judgement:
    """An analysis that returns the verdict on each attention, in order.

    ``sparse``: whether an attention may read only the keys of an index list. ``device``: the device for which costs are
    estimated; None means the program's device. ``slices``: whether slices of rows may be sources.
    """

    forms: Forms
    fold: Fold
    sparse: bool = True
    device: DeviceModel | None = None
    slices: bool = True

    def __call__(self, known: Analyses) -> list[Verdict]:
        """Judge the attentions of a program."""
        graph, found = known.program.gm.graph, known.get(sites)
        maps = known.get(sliced_maps if self.slices else site_maps)
        on = self.device or default_device(device_type(known.program.gm))
        verdicts = judge(graph, found, maps, on, self.forms, self.fold, sparse=self.sparse)
        return verdicts if self.forms == "expanded" else with_fusions(graph, verdicts, maps, sparse=self.sparse)


def lost(known: Analyses) -> list[tuple[fx.Node, Stop]]:
    """Return suspected attentions that were not found or have no softmax, each with a :class:`Stop` as reason."""
    graph, own, gm = known.program.gm.graph, known.get(weights), known.program.gm
    found = unfollowed(graph, own, known.get(sites))
    others = find_other_weights(graph, own)
    if not others:
        return found
    without, functions = [site for site, _ in others], [function for _, function in others]
    maps, device = with_row_slices(without, known.get(sliced_maps)), default_device(device_type(gm))
    return found + not_softmax(judge(graph, without, maps, device, "absorbed", "never", sparse=False), functions)


CANONICAL: dict[str, Callable[[Analyses], int]] = {
    "normalize": lambda known: normalize(known.program.gm.graph, known.program.fake_mode),
    "views": lambda known: canonicalize_views(known.program.gm.graph),
    "scatters": lambda known: read_scatters(known.program.gm.graph, known.program.fake_mode),
    "split_products": lambda known: split_products(known.program.gm.graph, known.get(weights), known.program.fake_mode),
    "join_rows": lambda known: join_rows(known.program.gm.graph, known.get(weights), known.program.fake_mode),
    "write_softmax": lambda known: write_softmax(known.program.gm.graph, known.get(weights), known.program.fake_mode),
    "read_heads": lambda known: read_heads(known.program.gm.graph, known.get(weights), known.program.fake_mode),
}
"""The canonicalisation passes in order. Each returns the number of changes it made."""


def canonicalize(known: Analyses) -> None:
    """Make a program canonical."""
    for change in CANONICAL.values():
        if change(known):
            known.invalidate()


def copy_with_origins(program: Program) -> Program:
    """Return a copy in which every node records the name of its original in ``meta[ORIGIN]``."""
    copied = program.copy()
    for node in copied.gm.graph.nodes:
        # Verification looks up its inputs by name, because a copied graph has new nodes with the same names.
        node.meta[ORIGIN] = node.name
    return copied


def device_type(gm: fx.GraphModule) -> str:
    """Return the device type of the first tensor of a graph."""
    tensors = (n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((tensor.device.type for tensor in tensors), "cpu")
