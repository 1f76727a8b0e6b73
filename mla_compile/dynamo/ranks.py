"""Agreement between the ranks of a distributed program when they compile a graph.

Each rank verifies an attention with its own shard of the weights, so ranks may reach different verdicts. An attention
is absorbed only if every rank absorbs it.

Ranks exchange their decisions through the store of torch.distributed. A collective would not work: if guards fail on
only one rank, only that rank compiles, and its collective would be matched with a collective of the other ranks'
models.

Decisions are exchanged only if a graph has collectives or tensors that several ranks hold, or if the option
``context_parallel`` is set.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from mla_compile.capture.dtensors import weight_meshes
from mla_compile.core.program import Inputs, Program
from mla_compile.core.records import SiteReport
from mla_compile.core.sharing import Sharing
from mla_compile.errors import RankError, brief
from mla_compile.options import Options
from mla_compile.pipeline.outcome import Outcome
from mla_compile.version import __version__

Told = dict[int, dict[str, Any]]
"""Global rank -> the message of that rank."""

_SLICE = timedelta(seconds=5)
"""The longest single wait on the store, during which Python handles no signal."""

_met: WeakKeyDictionary[object, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""Store -> the number of past meetings of each group of ranks."""
_lock = threading.Lock()


class OtherRankFailedError(RuntimeError):
    """Another rank could not rewrite the graph, so this rank does not rewrite it either."""


def meeting(gm: fx.GraphModule, example_inputs: Inputs, options: Options) -> Meeting | None:
    """Return the meeting of the ranks that run this graph together; None for a single rank or ``ranks="alone"``."""
    return _meeting(_groups(gm, example_inputs), options)


def meeting_of(model: torch.nn.Module, options: Options) -> Meeting | None:
    """Return the meeting of the ranks that together hold a model's weights; None for a single rank."""
    return _meeting(_groups_of(model), options)


def _meeting(of: Iterable[dist.ProcessGroup], options: Options) -> Meeting | None:
    if options.ranks == "alone" or not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_backend() == "fake":  # a single process that plays one of many ranks
        return None
    own = dist.get_rank()
    groups = dict.fromkeys(tuple(dist.get_process_group_ranks(group)) for group in of)
    if options.context_parallel is not None:
        groups |= {ranks_of(options): None}
    together = [ranks for ranks in groups if len(ranks) > 1 and own in ranks]
    return Meeting(together, own, options) if together else None


def sharing_of(gm: fx.GraphModule, example_inputs: Inputs, options: Options) -> Sharing | None:
    """Return how this rank shares rows with the ranks of ``options.context_parallel``; None if rows are not shared.

    Ranks that share tensors or collectives of the graph are assumed to compute different heads. For other ranks,
    :meth:`Meeting.alike` compares weights to find out.
    """
    return _sharing(_groups(gm, example_inputs), options)


def sharing_of_model(model: torch.nn.Module, options: Options) -> Sharing | None:
    """Like :func:`sharing_of`, but for a whole model.

    Ranks that share the model's weights may compute different heads.
    """
    return _sharing(_groups_of(model), options)


def _sharing(of: Iterable[dist.ProcessGroup], options: Options) -> Sharing | None:
    mesh = options.context_parallel
    if mesh is None or mesh.size() == 1:
        return None
    ranks = ranks_of(options)
    heads = any(len(set(ranks).intersection(dist.get_process_group_ranks(other))) > 1 for other in of)
    return Sharing(mesh.get_group().group_name, ranks, mesh.get_local_rank(), heads)


def _groups_of(model: torch.nn.Module) -> Iterator[dist.ProcessGroup]:
    return (group for mesh in weight_meshes(model) for group in mesh.get_all_groups())


def ranks_of(options: Options) -> tuple[int, ...]:
    """Return the global ranks of ``options.context_parallel``."""
    return tuple(dist.get_process_group_ranks(options.context_parallel.get_group()))


def _groups(gm: fx.GraphModule, example_inputs: Inputs) -> Iterator[dist.ProcessGroup]:
    """Yield the groups of ranks that share inputs of a Dynamo graph, and the groups that the graph's operators name."""
    for value in example_inputs:
        if isinstance(value, dist.ProcessGroup):
            yield value
        mesh = getattr(value, "device_mesh", value)
        if isinstance(mesh, dist.device_mesh.DeviceMesh):
            yield from mesh.get_all_groups()
    named: dict[str, dist.ProcessGroup] = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and "c10d" in str(node.target):
                given = (*node.args, *node.kwargs.values())
                yield from (named[a] for a in given if isinstance(a, str) and a in named)


class Meeting:
    """An exchange between the ranks that compile one graph.

    ``groups`` are the groups of ranks that share collectives, in the order in which the graph names them. Each rank
    sends its decision to the first group, then everything that it has received so far to the next group. The groups of
    a program are the axes of a mesh, so after the last group every rank has heard from all others.
    """

    def __init__(self, groups: list[tuple[int, ...]], rank: int, options: Options) -> None:
        self.groups = groups
        self.rank = rank
        self.shares = options.context_parallel is not None
        self.program = {
            "mla_compile": __version__,
            "torch": torch.__version__,
            **{name: repr(value) for name, value in vars(options).items() if name != "context_parallel"},
            # Only the size is compared, because each group of the mesh shares its own rows.
            "context_parallel": repr(options.context_parallel and options.context_parallel.size()),
        }

    def refused(self, outcome: Outcome) -> dict[str, str] | None:
        """Exchange decisions, and return the attentions that this rank must not absorb; None if all ranks agree.

        The result maps names in ``outcome.sites`` to what the other ranks decided. It is empty if only other ranks have
        to change a decision. All ranks receive None in the same round. Until then, each rank has to call this method
        again with its new decisions.

        Raises:
            OtherRankFailedError: another rank failed.
            RankError: ranks compile different programs, or a rank does not take part; raised on all ranks.
        """
        sites = [_said_of(site) for site in outcome.report.sites]
        told = self._heard({"sites": sites, "rows": list(outcome.warnings)})
        self._check(told)
        left: dict[str, str] = {}
        again = False
        for index, name in enumerate(outcome.sites):
            said = {rank: one["sites"][index] for rank, one in told.items()}
            forms = {rank: one["form"] for rank, one in said.items()}
            if len(set(forms.values())) == 1 or not any(one["absorbed"] for one in said.values()):
                continue
            again = True
            if outcome.report.sites[index].verdict == "absorbed":
                others = {rank: one["why"] for rank, one in said.items() if not one["absorbed"]}
                left[name] = _each(others or forms)
        return left if again else None

    def failed(self, error: Exception) -> None:
        """Tell the other ranks that this rank does not rewrite the graph, because of ``error``."""
        self._exchange({"program": self.program, "problem": brief(error)})

    def ready(self) -> None:
        """Wait until all ranks have reached this point.

        Raises the same errors as :meth:`refused`.
        """
        self._heard({})

    def alike(self, program: Program, group: tuple[int, ...]) -> bool:
        """Whether the ranks of a group have the same weights, judged by a few values of each weight.

        Raises the same errors as :meth:`refused`.
        """
        told = self._heard({"weights": _mark(program.weights.values())})
        return len({told[rank]["weights"] for rank in group}) == 1

    def _heard(self, mine: dict[str, object]) -> Told:
        """Return the messages of all ranks. Raise an error if a rank failed."""
        told = self._exchange({"program": self.program, "problem": None, **mine})
        problems = {rank: one["problem"] for rank, one in told.items() if one["problem"] is not None}
        if problems:
            raise OtherRankFailedError(_each(problems))
        for name in self.program:
            _same({rank: one["program"].get(name) for rank, one in told.items()}, name)
        return told

    def _exchange(self, mine: dict[str, object]) -> Told:
        store = dist.distributed_c10d._get_default_store()
        told: Told = {self.rank: mine}
        for ranks in self.groups:
            with _lock:
                counts = _met.setdefault(store, Counter())
                counts[ranks] += 1
            where = f"mla_compile/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{counts[ranks]}"
            keys = {rank: f"{where}/{rank}" for rank in ranks}
            try:
                store.set(keys[self.rank], json.dumps(told))
                self._wait(store, keys)
                for rank in ranks:
                    heard = json.loads(store.get(keys[rank]))
                    told.update({int(of): said for of, said in heard.items()})
            except RuntimeError as error:
                if isinstance(error, RankError):
                    raise
                raise RankError(f"the other ranks cannot be asked what they compile: {brief(error)}") from error
        return told

    def _wait(self, store: Any, keys: Mapping[int, str]) -> None:
        """Wait for the messages of all ranks, but no longer than the store's timeout."""
        end = time.monotonic() + store.timeout.total_seconds()
        missing = list(keys)
        while missing := [rank for rank in missing if not store.check([keys[rank]])]:
            left = timedelta(seconds=max(0.0, end - time.monotonic()))
            if not left:
                names = ", ".join(map(str, missing))
                raise RankError(
                    f"rank {self.rank} compiles a graph that it runs together with rank {names}, which did not compile "
                    f"it within {store.timeout}: it ended, or its call needed no compilation; ranks that compile at "
                    'different points need the option ranks="alone"'
                )
            with suppress(RuntimeError):  # every kind of store raises RuntimeError on timeout
                store.wait([keys[rank] for rank in missing], min(left, _SLICE))

    def _check(self, told: Told) -> None:
        """Raise an error if the ranks compile different programs. All ranks then raise the same error."""
        _same({rank: len(one["sites"]) for rank, one in told.items()}, "attentions in the graph")
        for index in range(len(told[self.rank]["sites"])):
            _same({rank: one["sites"][index]["source"] for rank, one in told.items()}, f"attention {index}")
            if self.shares:
                _same({rank: one["sites"][index]["heads"] for rank, one in told.items()}, f"heads of attention {index}")
        _same({rank: one["rows"] for rank, one in told.items()}, "what is made of the rows of a cache")


def _mark(weights: Iterable[torch.Tensor | None]) -> str:
    """Return a fingerprint of a few values of each weight. Weights of different heads have different fingerprints."""
    found = hashlib.sha256()
    for weight in weights:
        if weight is not None and not weight.is_meta and weight.layout is torch.strided:
            found.update(repr((weight.shape, weight.dtype)).encode())
            if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.numel():
                first = weight.detach()[(0,) * (weight.dim() - 1)] if weight.dim() else weight.detach()[None]
                found.update(bytes(first[:16].cpu().contiguous().view(torch.uint8).tolist()))
    return found.hexdigest()


def _said_of(site: SiteReport) -> dict[str, object]:
    absorbed = site.verdict == "absorbed"
    form = f"{site.form} {' '.join(site.parts)}".strip() if absorbed else site.verdict
    return {
        "absorbed": absorbed,
        "form": form if absorbed else "left",
        "why": f"{site.code}: {site.reason}",
        "source": site.where.source or site.where.op,
        "heads": site.dims.H if site.dims else None,
    }


def _same(found: Mapping[int, object], what: str) -> None:
    if len(set(map(repr, found.values()))) > 1:
        raise RankError(f"the ranks of one program compile different things: {what}: {_each(found)}")


def _each(found: Mapping[int, object]) -> str:
    """Format the message of each rank. Ranks with equal messages are listed together."""
    by_text: dict[str, list[int]] = {}
    for rank, said in sorted(found.items()):
        by_text.setdefault(str(said), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {said}" for said, ranks in by_text.items())
