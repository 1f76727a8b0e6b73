"""Buffers of K and V that an optimized module keeps as rows.

A cache that belongs to a module (``self.k_cache[:B, start:end] = k``) is allocated before the first token. As long as
it is empty, rows of zeros expand to the same zeros. An optimized module may therefore hold a :class:`LatentTensor` in
the buffer's place. Code that reads the attribute sees K, and compiled graphs write rows into the tensor.

The first call is traced on copies, to find the buffers that can be kept as rows, and their recipes. The buffers of the
original module do not change. For the optimized model, the modules on the path to a buffer are copied.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mla_compile.core.modules import shallow
from mla_compile.core.places import Link, Place, at_path, item, only_here, paths_of, tensors_of
from mla_compile.core.program import Call, Inputs, Program
from mla_compile.core.wrapped import OwnForward
from mla_compile.errors import InputError, warn
from mla_compile.passes.cache.recipe import Recipe
from mla_compile.runtime.latent import LatentTensor

FindKept = Callable[[nn.Module, Sequence[object], Mapping[str, object], Collection[Place]], "list[KeptBuffer]"]
"""Trace a module's forward with these arguments to find the empty buffers that can be kept as rows.

Raises :class:`InputError` for arguments with which the forward does not run.
"""


_TRIES = 3
"""The search for buffers stops after this many calls that could not be traced."""


@dataclass(frozen=True)
class KeptBuffer:
    """A buffer that rows can replace.

    Attributes:
        place: where the model holds the buffer.
        recipe: how the buffer is computed from its rows.
        leaves: the attribute path to each weight that the recipe reads.
        rows: a name and the dtype of each tensor of rows. Buffers share rows if names and shapes are equal.
    """

    place: Place
    recipe: Recipe
    leaves: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[Hashable, torch.dtype], ...]

    def fits(self, buffer: torch.Tensor) -> bool:
        """Whether rows can replace ``buffer``, even if another tensor was traced."""
        kinds = self.recipe.kinds
        return (
            buffer.dtype == self.recipe.dtype
            and buffer.dim() == len(kinds)
            and all(kind in ("row", size) for kind, size in zip(kinds, buffer.shape, strict=True))
        )

    def empty(self, model: nn.Module, buffer: torch.Tensor, shared: dict[Hashable, torch.Tensor]) -> LatentTensor:
        """Make a tensor like ``buffer`` whose rows are zeros.

        ``shared`` has the rows that other buffers already use.
        """
        rows = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for index, (name, dtype) in enumerate(self.rows):
                shape = self.recipe.row_shape(buffer.shape, self.recipe.held_width(index))
                if (name, shape) not in shared:
                    shared[name, shape] = torch.zeros(shape, dtype=dtype, device=buffer.device)
                rows.append(shared[name, shape])
            leaves = [at_path(model, path) for path in self.leaves]
            return LatentTensor.of(self.recipe, rows, leaves, own=True)


def empty_buffers(model: nn.Module, tensors: Mapping[Place, Any]) -> dict[Place, torch.Tensor]:
    """Return the tensors of a model that could be a cache of K or V, are empty, and are reachable in only one way."""
    found = {place: tensor for place, tensor in tensors.items() if may_be_cache(tensor) and is_empty(tensor)}
    return {place: found[place] for place in only_here(model, found)} if found else {}


def may_be_cache(value: object) -> bool:
    """Whether a value may be a buffer of K or V: a plain float tensor of three or more axes that needs no gradient.

    A :class:`LatentTensor` of a buffer qualifies once it has settled.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.is_floating_point():
        return False
    if value.dim() < 3 or not value.numel():
        return False
    if isinstance(value, LatentTensor):
        return value.is_own and value.recipe is None
    return type(value) is torch.Tensor and not value.requires_grad


def _are_rows(value: torch.Tensor) -> bool:
    return isinstance(value, LatentTensor) and value.recipe is not None


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but zeros. A tensor without values (on the meta device) is considered empty."""
    if tensor.is_meta:
        return True
    plain = tensor.expanded() if isinstance(tensor, LatentTensor) else tensor
    # Almost every cache in use has a nonzero value at its beginning. The rest is then not read.
    return not plain[(0,) * (plain.dim() - 1)].any() and not plain.any()


class BuffersInTrace:
    """The empty buffers of a traced module. :attr:`kept` lists the buffers that can be kept as rows."""

    def __init__(self, module: nn.Module, places: Collection[Place]) -> None:
        self._module = module
        self._places = {id(place.tensor(module)): place for place in places}
        self._paths = paths_of(module)
        self._calls = 0
        self.kept: list[KeptBuffer] = []

    def __contains__(self, value: object) -> bool:
        return id(value) in self._places

    def noting(self, call: Call, captured: Program, base: Program) -> Call:
        """Wrap ``call`` so that it also records which of its inputs are buffers that ``base`` takes as rows.

        The record is made during the call, because one graph may serve several layers.
        """

        def noted(*inputs: object) -> object:
            self._note(captured, base, inputs)
            return call(*inputs)

        return call if base.cache is None else noted

    def _note(self, captured: Program, base: Program, inputs: Inputs) -> None:
        self._calls += 1
        given = {node.name: value for node, value in zip(captured.placeholders, inputs, strict=True)}
        for name, rows in base.cache.inputs.items():
            recipe, weights = base.cache.recipes[name]
            leaves = [self._path(base.node(weight), given) for weight in weights]
            known = tuple(path for path in leaves if path is not None)
            if given[name] in self and len(known) == len(leaves):
                kinds = tuple(((self._calls, row), base.node(row).meta["val"].dtype) for row in rows)
                self.kept.append(KeptBuffer(self._places[id(given[name])], recipe, known, kinds))

    def _path(self, weight: fx.Node, given: Mapping[str, object]) -> tuple[str, ...] | None:
        """Return the attribute path to a weight; None if unknown.

        The weight may be an attribute of one of the module's tensors.
        """
        attributes: tuple[str, ...] = ()
        while weight.target is getattr:
            attributes = (str(weight.args[1]), *attributes)
            weight = weight.all_input_nodes[0]
        path = self._paths.get(id(given.get(weight.name)))
        return None if path is None else (*path, *attributes)


class OwnBuffers:
    """Manages the buffers of one optimized module; :meth:`prepare` is called before every forward.

    ``plain`` makes the same module without the additions of this package.
    """

    def __init__(self, module: nn.Module, plain: Callable[[], nn.Module], find_kept: FindKept) -> None:
        self._module = module
        self._plain = plain
        self._find_kept = find_kept
        self._kept: dict[Place, KeptBuffer] = {}
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._links: list[Link] | None = None
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """Whether any buffers are kept as rows."""
        return bool(self._kept)

    def prepare(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Replace empty buffers by rows, in the first call and whenever the buffers are empty again."""
        if self._links is None or not self._is_settled(self._links):
            with self._lock:
                self._look(args, kwargs)

    def _is_settled(self, links: Iterable[Link]) -> bool:
        """Whether every buffer still holds rows, and every module on the path to a buffer is unchanged.

        This check runs in every call, so it must be cheap.
        """
        return all(
            _are_rows(now) if isinstance(held, torch.Tensor) else now is held
            for holder, key, held in links
            for now in (item(holder, key),)
        )

    def _look(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        plain = self._plain()
        if self._links is None:
            empty = empty_buffers(plain, dict(tensors_of(plain)))
            try:
                kept = self._find_kept(plain, args, kwargs, empty) if empty else []
            except InputError:  # the call itself raises this error, unless only the trace failed
                self._failures += 1
                self._links = [] if self._failures == _TRIES else None
                return
            self._kept = {one.place: one for one in kept}
        now = {place: place.tensor(plain) for place in self._kept}
        fit = {place: x for place, x in empty_buffers(plain, now).items() if self._kept[place].fits(x)}
        shared: dict[Hashable, torch.Tensor] = {}
        try:
            made = {place: self._kept[place].empty(plain, x, shared) for place, x in fit.items()}
        except torch.OutOfMemoryError as error:  # the original model may still hold its buffers
            warn(
                f"buffers of K and V stay as they are, because there is no memory for their rows ({error}); drop the "
                "original model before the first call of the optimized one"
            )
            self._kept, made = {}, {}
        for place, rows in made.items():
            self._own(place)
            *_, (holder, key, _) = place.links(self._module)
            holder[key] = rows
        # Remove duplicates: the paths to several buffers begin with the same links.
        links = [link for place in self._kept for link in place.links(self._module)]
        self._links = list({(id(holder), key): (holder, key, held) for holder, key, held in links}.values())

    def _own(self, place: Place) -> None:
        """Copy the modules, lists and dicts on the path to a buffer, unless they have been copied already."""
        self._detach(self._module)
        for depth in range(len(place.modules)):
            owner, name, module = place.links(self._module)[depth]
            if module not in self._copies and not isinstance(vars(module).get("forward"), OwnForward):
                owner[name] = shallow(module)
            self._detach(owner[name])
        for depth in range(len(place.modules), len(place.modules) + len(place.keys) - 1):
            holder, key, items = place.links(self._module)[depth]
            holder[key] = copy.copy(items)

    def _detach(self, module: nn.Module) -> None:
        """Copy the dicts that a copied module still shares with the original."""
        if module not in self._copies:
            self._copies.add(module)
            for name in ("_modules", "_buffers", "_non_persistent_buffers_set"):
                vars(module)[name] = copy.copy(vars(module)[name])
