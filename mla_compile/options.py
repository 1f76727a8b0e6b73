"""The options of all entry points as one frozen record, with errors for wrong names and values."""

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
    """The options that a user may set.

    Attributes:
        forms: ``auto`` chooses the cheaper form for each call; ``absorbed`` and ``expanded`` use one form everywhere.
        fold: which products of weights are computed ahead of time. ``auto`` folds if the cost model finds folding
            cheaper, ``never`` folds none, and ``always`` folds all that can be folded.
        lowering: ``op`` calls ``mla_compile::decode_attention``. ``aten`` emits plain ATen, which runs without this
            package.
        codegen: ``inductor`` compiles the rewritten graph, ``eager`` runs it as it is.
        cache: how to keep a cache of K and V per head that the caller passes from call to call. ``latent`` keeps the
            rows from which K and V are computed. ``expanded`` keeps K and V. For modules, ``auto`` is ``latent``. The
            cache then holds tensors that still look like K and V to all other code. For programs, ``auto`` is
            ``expanded``, because ``latent`` would change the signature.
        cache_dtype: the dtype of the rows that ``cache="latent"`` keeps, and of the pages of ``continuous_batching``.
            ``model`` keeps the model's dtype. ``fp8`` (e4m3) has one scale per row; rotary keys keep their dtype. If
            the model itself caches latent rows, ``fp8`` affects only the pages of ``continuous_batching``.
        appends: how new rows are appended to a cache that grows by ``cat``. ``in_place`` writes the new rows into a
            buffer with spare capacity. A full buffer is replaced by a buffer of twice the size. The caller still
            receives a tensor of the usual shape, which shares the buffer's memory. ``copy`` copies old and new rows in
            every call, like the original model. ``auto`` is ``in_place`` for modules. It is ``copy`` for programs,
            which cannot reserve capacity.
        quantized: how to treat up-projections that round their rows to few bits in every call (such as W8A8).
            ``absorb`` uses the dequantized weight and does not round the rows, as serving engines do. ``exact`` leaves
            these up-projections unchanged. If only the stored weight is quantized, an up-projection is always absorbed.
        dequantize: when the quantized weights of absorbed attentions are dequantized. ``once`` dequantizes each version
            of a weight once. The result is kept in the model's precision, in addition to the stored weight. ``step``
            dequantizes in every step. ``auto`` chooses, for each weight, the way that moves fewer bytes in a step. For
            programs, ``auto`` is ``step``, because their weights may change unnoticed.
        sparse: how to treat attentions whose mask shows each query only the keys of an index list (the top k of an
            indexer). ``auto`` reads only the rows of the listed keys if that is cheaper. ``never`` reads all rows and
            the mask.
        products: how a CPU multiplies rows by a weight, in graphs of latent attentions. ``native`` uses mla_compile's
            operators if they were measured to be faster on this machine. ``torch`` leaves the products to the
            compiler, as ``lowering="aten"`` does. ``auto`` is ``native`` for modules. It is ``torch`` for programs,
            which may run on another machine.
        layers: how layers that differ only in weights and caches are compiled. ``once`` compiles one of them and runs
            its code for all. ``whole`` compiles each graph as a whole. CUDA graphs and freezing always require
            ``whole``.
        expanded_bytes: a limit in bytes on the memory of one expanded attention's per-head tensors (queries, keys,
            values, outputs, and scores that are written out), in calls with several queries. Above the limit, a few
            heads are computed at a time. ``None`` always computes all heads at once.
        ranks: how the ranks of a distributed program decide about a graph that they run together. With ``agree``, an
            attention is absorbed if every rank absorbs it, and ranks wait for each other when they compile. With
            ``alone``, each rank decides for itself. Use ``alone`` for programs whose ranks compile at different points.
        context_parallel: a ``DeviceMesh`` of one axis whose ranks share the latent rows of a cache. Each of the n ranks
            holds every n-th token, and attends to these tokens with the heads of all ranks. Then the results are
            merged. All ranks must run the model on the same tokens, but may have different heads. This option is for
            modules, and for the pages of ``continuous_batching``.
        verify: check each distinct rewritten site against float64 before it is used.
        strict: raise an error instead of warning and falling back to the original graph.
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
    inductor: Mapping[str, object] = field(default_factory=dict)

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
        # Imported on use, because a build of torch may lack torch.distributed.
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
        """Return the names of all options."""
        return tuple(entry.name for entry in dataclasses.fields(cls))

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None = None, **defaults: Any) -> Options:
        """Return the options in a user's mapping. ``defaults`` apply to options that the mapping does not set.

        Options of Inductor (``max_autotune``, ``triton.cudagraphs``) are passed on to Inductor.

        Raises:
            OptionError: an option does not exist, or has an invalid value. The message suggests the nearest known name.
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


def _check_inductor(given: Mapping[str, object], ours: tuple[str, ...]) -> None:
    # Imported on use, because this import loads all of Inductor.
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
