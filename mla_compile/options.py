"""The options of every door as one frozen record: their names, their values, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from mla_compile.core.choices import Dequantize, Fold, Forms
from mla_compile.errors import OptionError, nearest

Lowering = Literal["op", "aten"]
Codegen = Literal["inductor", "eager"]
CacheMode = Literal["auto", "latent", "expanded"]
CacheDtype = Literal["model", "fp8"]
Appends = Literal["auto", "in_place", "copy"]
Quantized = Literal["absorb", "exact"]
Sparse = Literal["auto", "never"]
Products = Literal["auto", "native", "torch"]
Layers = Literal["once", "whole"]
Ranks = Literal["agree", "alone"]


@dataclass(frozen=True)
class Options:
    """What a user may ask for.

    Attributes:
        forms: ``auto`` chooses the cheaper form for each call; ``absorbed`` and ``expanded`` use one form everywhere.
        fold: where weights are multiplied ahead of time: where the cost model gains, nowhere, or wherever possible.
        lowering: ``op`` calls ``mla_compile::decode_attention``; ``aten`` leaves plain ATen, which runs without us.
        codegen: ``inductor`` compiles the graph, ``eager`` runs the rewritten graph as it is.
        cache: what becomes of K and V per head that the caller keeps from call to call. ``latent`` keeps the rows
            that they are computed from, ``expanded`` leaves them as they are. ``auto`` is ``latent`` for modules, whose
            cache then holds tensors that look like K and V to everybody else, and ``expanded`` for programs, whose
            signature ``latent`` would change.
        cache_dtype: the numbers of the rows that ``cache="latent"`` keeps: in the dtype of the ``model``, or in ``fp8``
            (e4m3), each row with a scale of its own. Rotary keys stay as they are, and so do caches whose tensors the
            model itself makes.
        appends: how new rows get behind those of a cache that grows by ``cat``. ``in_place`` keeps the rows in memory
            with room for more, which doubles when it is full, and writes the new ones there; what the caller keeps is a
            tensor of the same shape that shows them. ``copy`` copies old and new rows in every call, as the model
            does. ``auto`` is ``in_place`` for modules and ``copy`` for programs, which cannot make room.
        quantized: what becomes of up-projections whose rows are rounded to few bits in every call (W8A8 and the like).
            ``absorb`` absorbs them with the dequantized weight and without that rounding, as serving engines do;
            ``exact`` leaves them. Weights that are stored quantized are absorbed either way.
        dequantize: when the quantized weights of absorbed attentions are dequantized: ``once`` for each version of a
            weight, kept in the precision of the model beside the stored one, or in every ``step``. ``auto`` takes for
            each weight what moves fewer bytes in a step; for programs, whose weights may change unseen, ``step``.
        sparse: attentions whose mask shows each query the keys of a list (the top k of an indexer). ``auto`` reads the
            rows of these keys only, where that is cheaper; ``never`` reads all rows and the mask.
        products: of a few rows with a weight, on a CPU, in graphs with an absorbed attention. ``native`` takes the
            kernel of this library where it was measured to be faster on this machine, ``torch`` leaves them to the
            compiler, as ``lowering="aten"`` does. ``auto`` is ``native`` for modules and ``torch`` for programs, which
            may run elsewhere.
        layers: ``once`` compiles layers that are equal but for their weights and caches one time and calls the code for
            each of them; ``whole`` makes one piece of code of each graph, as CUDA graphs and freezing always do.
        expanded_bytes: the most bytes that what one expanded attention makes for its heads (queries, keys, values,
            outputs, scores that are written out) may hold in a call of several queries. Beyond that it is computed for
            a few heads at a time. ``None``: all heads at once, whatever they hold.
        ranks: how the ranks of a distributed program decide about a graph that they run together. ``agree``: an
            attention is absorbed where every rank absorbs it, and ranks wait for each other when they compile.
            ``alone``: each by itself, for programs whose ranks compile at different points.
        context_parallel: a ``DeviceMesh`` of one axis, over whose ranks the latent rows of a cache are shared: each
            holds those of every n-th token, attends to them with the heads of all, and the results are put together.
            The ranks have to run the model on the same tokens; they may have different heads of it. For modules, and
            for the pages of ``continuous_batching``.
        verify: check each distinct rewritten site against float64 before it is used.
        strict: raise where otherwise there would be a warning and the original graph.
        inductor: options passed on to Inductor.
    """

    forms: Forms = "auto"
    fold: Fold = "auto"
    lowering: Lowering = "op"
    codegen: Codegen = "inductor"
    cache: CacheMode = "auto"
    cache_dtype: CacheDtype = "model"
    appends: Appends = "auto"
    quantized: Quantized = "absorb"
    dequantize: Dequantize = "auto"
    sparse: Sparse = "auto"
    products: Products = "auto"
    layers: Layers = "once"
    expanded_bytes: int | None = 2**30
    ranks: Ranks = "agree"
    context_parallel: Any = None
    verify: bool = False
    strict: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if name == "inductor":
                if not isinstance(value, Mapping):
                    raise OptionError(f"inductor is {value!r}, expected a mapping of Inductor options")
            elif kind == int | None:
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                    raise OptionError(f"{name} is {value!r}, expected a number of bytes or None")
            elif name == "context_parallel":
                if value is not None:
                    self._check_mesh(value)
            elif kind is bool:
                if not isinstance(value, bool):
                    raise OptionError(f"{name} is {value!r}, expected True or False")
            elif value not in get_args(kind):
                known = [str(choice) for choice in get_args(kind)]
                hint = nearest(value, known) if isinstance(value, str) else ""
                raise OptionError(f"{name} is {value!r}, expected one of {', '.join(known)}{hint}")

    def _check_mesh(self, mesh: Any) -> None:
        # On use: what shares nothing need not have torch.distributed.
        from torch import distributed as dist

        if not dist.is_available() or not isinstance(mesh, dist.device_mesh.DeviceMesh):
            raise OptionError(f"context_parallel is {mesh!r}, expected a DeviceMesh of one axis, or None")
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("its axes have no names",)
            raise OptionError(
                f"context_parallel is a mesh of {mesh.ndim} axes ({', '.join(names)}), expected one of them: "
                'mesh["name of the axis"]'
            )
        if mesh.get_coordinate() is None:
            raise OptionError(
                f"context_parallel is a mesh of the ranks {mesh.mesh.tolist()}, not of rank {dist.get_rank()}"
            )
        if self.ranks == "alone":
            raise OptionError('context_parallel: ranks that share a cache decide together; leave out ranks="alone"')
        if self.appends == "copy":
            raise OptionError('context_parallel: each rank writes its rows in place; leave out appends="copy"')

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(entry.name for entry in dataclasses.fields(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None = None, **defaults: Any) -> Options:
        """Options from a user's mapping on top of ``defaults``.

        A name that is not ours but Inductor's (``max_autotune``, ``triton.cudagraphs``) is passed on to it.

        Raises:
            OptionError: for any other name; it suggests the nearest known one.
        """
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options must be a mapping of names to values, got {type(given).__name__}")
        inductor = dict(defaults.pop("inductor", {}))
        ours = dict(defaults)
        for name, value in (given or {}).items():
            if name == "inductor" and isinstance(value, Mapping):
                inductor.update(value)
            elif name in cls.names():
                ours[name] = value
            else:
                inductor[str(name)] = value
        if inductor:
            _check_inductor(inductor, cls.names())
        ours.setdefault("inductor", inductor)
        return cls(**ours)


def _check_inductor(given: Mapping[str, Any], ours: tuple[str, ...]) -> None:
    # On use: all of Inductor, needed only where one of its options is named.
    from torch._inductor import config, list_options

    known = {name.replace("-", "_") for name in list_options()}
    for name, value in given.items():
        if not isinstance(name, str):
            raise OptionError(f"options of Inductor have names, got {name!r}")
        if name.replace("-", "_") not in known:
            hint = nearest(name, ours) or nearest(name, known)
            raise OptionError(f"there is no option {name!r}{hint}; options: {', '.join(ours)}, and those of Inductor")
        kind = config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]  # torch adds it to the module
        if isinstance(kind, type) and not isinstance(value, kind):
            raise OptionError(f"{name} is {value!r}, expected {kind.__name__}")
