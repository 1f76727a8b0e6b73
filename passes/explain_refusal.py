"""Why an attention that looks like MLA cannot be absorbed: the operator to blame, not just a no.

The walk of the linear maps ended somewhere. If behind that node there is an up-projection from rows narrower than what
it makes, then this is MLA with something in the way, and the node where the walk ended is the explanation. If there is
none, the attention is plain MHA, GQA or MQA.
"""

from __future__ import annotations

from torch import fx

from mla_compile.passes.graph import ancestors, bytes_hint, is_tensor, packet
from mla_compile.passes.linear_map import LinearMaps, Stop, unexplained
from mla_compile.passes.site import AttentionSite

_REACH = 48  # operators between an up-projection and the scores: a rotation is a dozen


def explain_refusal(site: AttentionSite, failed: Stop, maps: LinearMaps, wide: fx.Node | None) -> Stop:
    """The best explanation for ``site``, whose plan failed with ``failed``."""
    if failed.code != "not_mla":
        return failed
    if wide is not None and wide not in _of_queries(site):
        return Stop(wide, "cost_latent_wide", "the rows that are expanded are no narrower than K and V")
    own = _of_queries(site)
    for operand in (*(p.k for p in site.products), site.v):
        for piece in maps.map(operand.node).pieces:
            if piece.source is not None:
                found = _behind(piece.source, maps, own)
                if found is not None:
                    return found
    if site.problem is not None and site.problem.code == "dropout":
        return Stop(site.node, "not_mla", "K and V are no image of narrower rows")
    return failed


def _of_queries(site: AttentionSite) -> set[fx.Node]:
    """What the queries are computed from: rows that are among it are the model's hidden state, not a latent."""
    return {a for p in site.products for a in (p.q.node, *ancestors(p.q.node))}


def _behind(source: fx.Node, maps: LinearMaps, own: set[fx.Node]) -> Stop | None:
    """A blocked up-projection among the nearest ancestors of ``source``."""
    parent: dict[fx.Node, fx.Node] = {}
    queue = [source]
    while queue and len(parent) < _REACH:
        node = queue.pop(0)
        for child in node.all_input_nodes:
            if child in parent or child is source or maps.is_weight(child):
                continue
            parent[child] = node
            if is_tensor(child):
                if _is_expansion(child, maps, own):
                    return _blame(child, parent, source, maps)
                queue.append(child)
            elif isinstance(child.meta.get("val"), (tuple, list)):
                queue.append(child)
    return None


def _is_expansion(node: fx.Node, maps: LinearMaps, own: set[fx.Node]) -> bool:
    for piece in maps.map(node).pieces:
        if not piece.path or not piece.path[-1].contractions:
            continue
        total = piece.path[-1].contractions
        wide = min(bytes_hint(v.node) for v in piece.path if v.contractions == total)
        if any(v.contractions < total and bytes_hint(v.node) < wide and v.node not in own for v in piece.path):
            return True
    return False


def _blame(child: fx.Node, parent: dict[fx.Node, fx.Node], source: fx.Node, maps: LinearMaps) -> Stop:
    """The first node after the up-projection that has no linear map."""
    node = parent[child]
    while node is not source and node not in maps.reasons:
        node = parent[node]
    stop = maps.reasons.get(node) or unexplained(node)
    if (
        packet(node) is not None
        and stop.code == "token_mixing"
        and any(n.op == "placeholder" for n in node.all_input_nodes)
    ):
        return Stop(node, "expanded_cache", "the cache holds K and V per head, not the latent")
    return stop
