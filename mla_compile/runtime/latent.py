"""A tensor that looks like K or V of a cache, but holds latent rows.

If the caller keeps K and V (in a Cache object, a tuple or an attribute), a compiled graph returns a
:class:`LatentTensor` for each. Other code sees a tensor with the shape of K: an operator that reads the tensor gets K,
computed from the rows. The next compiled graph takes the rows. How the caller keeps the cache does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from mla_compile.passes.cache.recipe import Recipe
from mla_compile.runtime.latent_cell import Cell, once
from mla_compile.runtime.ranges import range_of

aten = torch.ops.aten


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that a cache's tensors occupy. Rows that several tensors share are counted once."""
    held = (row for t in tensors for row in (t._cell.rows if isinstance(t, LatentTensor) and t.recipe else (t,)))
    return sum({(t.data_ptr(), t.shape): t.nbytes for t in held}.values())


def _not_compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep Dynamo from tracing a function that Dynamo's guards call. Since torch 2.13, Dynamo needs no such help."""
    return function if TorchVersion(torch.__version__) >= "2.13" else torch.compiler.disable(function)


class LatentTensor(torch.Tensor):
    """K (or V) of shape ``recipe.shape(rows)``, held as rows of ``recipe.widths`` values per token.

    ``rows`` and ``leaves`` have the order of the recipe. ``leaves`` are the weights that expand the rows. Tensors of
    one :class:`Cell` share memory, like views. ``span`` is the range of the cell's tokens that this tensor shows;
    ``None`` means all tokens.
    """

    _cell: Cell
    _tokens: int
    _span: tuple[int, int] | None
    _part: tuple[torch.Tensor, ...] | None
    _view: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def __new__(cls: type[LatentTensor], cell: Cell, tokens: int, span: tuple[int, int] | None = None) -> LatentTensor:
        """Create a tensor that shows a cell; :meth:`of` creates one from rows."""
        if cell.full is not None:  # slices of K itself are plain tensors
            assert span is None
            like, shape, dtype = cell.full, tuple(cell.full.shape), cell.full.dtype
        else:
            assert cell.recipe is not None
            like, at = cell.rows[0], cell.recipe.token_axis
            rows = like if span is None else like.narrow(at, span[0], span[1] - span[0])
            shape, dtype = cell.recipe.shape(rows.shape), cell.recipe.dtype
        made: LatentTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
        made._cell = cell
        made._tokens = tokens
        made._span = span
        made._part = None
        made._view = None
        return made

    @classmethod
    def of(
        cls, recipe: Recipe, rows: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], *, own: bool = False
    ) -> LatentTensor:
        """Create a tensor from ``rows``. If ``own``, the tensor is a buffer, and graphs may write to the rows."""
        return cls(Cell(recipe, rows, leaves, own=own), recipe.tokens)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch prescribes

    # The subclass protocol of torch.compile.

    def __tensor_flatten__(self) -> tuple[list[str], Recipe | int | None]:
        if not self._cell.rows:
            return ["full"], self._tokens
        names = [f"rows{i}" for i in range(len(self._cell.rows))] + [f"leaf{i}" for i in range(len(self._cell.leaves))]
        return names, self._cell.recipe

    @_not_compiled
    def __getattr__(self, name: str) -> torch.Tensor:
        kind, number = name[:4], name[4:]
        if name == "full":
            return self.expanded()
        if number.isdigit() and kind in ("rows", "leaf"):
            values = self.shown_rows() if kind == "rows" else self._cell.leaves
            if int(number) < len(values):
                return values[int(number)]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], recipe: Recipe | int, *_: object) -> LatentTensor:
        if isinstance(recipe, int):
            return LatentTensor(Cell(None, full=inner["full"]), recipe)
        rows = [inner[f"rows{i}"] for i in range(len(recipe.widths))]
        return LatentTensor.of(recipe, rows, [inner[f"leaf{i}"] for i in range(recipe.leaves)])

    @classmethod
    def __metadata_guard__(cls, a: object, b: object) -> bool:
        return a is b or bool(a == b)

    # The interface that this package reads.

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that computes K from the rows; ``None`` once K has replaced the rows."""
        return None if self._cell.full is not None else self._cell.recipe

    @property
    def is_own(self) -> bool:
        """Whether this tensor is a module's buffer. Compiled graphs write to the rows of buffers."""
        return self._cell.own

    def shares_only_with(self, others: Iterable[LatentTensor]) -> bool:
        """Whether ``others`` include every buffer that shares rows with this buffer."""
        return self._cell.sharers() <= {self._cell, *(other._cell for other in others)}

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The weights that expand the rows."""
        return self._cell.leaves

    def rows(self) -> tuple[torch.Tensor, ...]:
        """Return the rows. Raises :class:`StaleWeightError` if a weight has changed since the rows were made."""
        self._cell.check()
        return self.shown_rows()

    def shown_rows(self) -> tuple[torch.Tensor, ...]:
        """Return the rows without checking the weights. K and V of one attention return the same tensors."""
        cell = self._cell
        if self._span is None or cell.recipe is None:
            return cell.rows
        start, stop = self._span
        how = cell.recipe.token_axis, start, stop - start
        if cell.own:  # later writes must show in the rows: return a view
            return tuple(once((r,), torch.Tensor.narrow, *how) for r in cell.rows)
        if self._part is None:
            # Copy the range: a view could have another layout, and graphs would be recompiled for it.
            self._part = tuple(once((r,), _narrowed, *how) for r in cell.rows)
        return self._part

    def expanded(self) -> torch.Tensor:
        """Return K as a plain tensor. The result shares this tensor's memory only if K has replaced the rows."""
        full = self._cell.full
        return self._cell.expand(self.rows()) if full is None else self._shown(full)

    def settled(self) -> torch.Tensor:
        """Replace the rows by K for good, and return K. This tensor and all its views then use K's memory."""
        return self._shown(self._cell.settle())

    def _shown(self, full: torch.Tensor) -> torch.Tensor:
        if self._span is None:
            return full
        # Return the same tensor object each time, because compilers recognise inputs by identity.
        if self._view is None or self._view[0] is not full:
            with torch.inference_mode(mode=False):
                self._view = full, full.narrow(self._tokens, self._span[0], self._span[1] - self._span[0])
        return self._view[1]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its disabled stand-in
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        kept = _on_rows(func, args, kwargs)
        if kept is not None:
            return kept
        shared = [
            given for given, spec in zip(args, func._schema.arguments, strict=False) if spec.alias_info is not None
        ] + [
            kwargs[spec.name] for spec in func._schema.arguments if spec.alias_info is not None and spec.name in kwargs
        ]
        for given in pytree.tree_leaves(shared):
            if isinstance(given, LatentTensor):
                given.settled()
        plain_args, plain_kwargs = pytree.tree_map_only(LatentTensor, LatentTensor.expanded, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for given, plain in zip(args, plain_args, strict=True):  # an in-place operator returns its argument
            if result is plain and isinstance(given, LatentTensor):
                return given
        return result

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Index the tensor. The result for a range of tokens is again a :class:`LatentTensor`.

        Indexing is not handled in the dispatcher, because autograd would record the view, and compilers would replay
        it.
        """
        rows = self.recipe is not None and not torch.compiler.is_compiling()
        tokens = range_of(index, self.dim(), self._tokens) if rows else None
        if tokens is None:
            return super().__getitem__(index)
        low, high, _ = tokens.indices(self.shape[self._tokens])
        first = 0 if self._span is None else self._span[0]
        return LatentTensor(self._cell, self._tokens, (first + low, first + max(low, high)))

    # These methods read memory without going through the dispatcher.

    def data_ptr(self) -> int:
        """Return the address of K. K then replaces the rows."""
        return self.settled().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return K as an array that shares K's memory. K then replaces the rows."""
        return self.settled().numpy(force=force)

    def tolist(self) -> Any:
        """Return K as nested lists."""
        return self.expanded().tolist()

    def __array__(self, dtype: object = None) -> object:
        return self.settled().__array__(dtype) if dtype is not None else self.settled().__array__()

    def __dlpack__(self, **arguments: Any) -> object:
        return self.settled().__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.settled().__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in memo:
            if self.recipe is None:
                memo[id(self)] = self.expanded().clone()
            elif self.is_own:  # deepcopy of a module copies the weights, too
                rows, leaves = copy.deepcopy((self.rows(), self.leaves), memo)
                memo[id(self)] = LatentTensor.of(self.recipe, rows, leaves, own=True)
            else:
                memo[id(self)] = self.clone()
        made: torch.Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.expanded().__reduce_ex__(protocol)  # a saved cache holds plain tensors

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        how = "expanded" if self.recipe is None else f"made from rows of {self.recipe.widths} values"
        return f"LatentTensor(shape={list(self.shape)}, dtype={self.dtype}, {how})"


def _on_rows(func: object, args: tuple[Any, ...], kwargs: dict[str, object]) -> LatentTensor | None:
    """Apply an operation of caches (copy, concatenate, reorder, clear) to the rows; return None for any other."""
    if func is aten.cat.default:
        return _joined(args[0], args[1] if len(args) > 1 else 0)
    x = args[0] if args else None
    if not isinstance(x, LatentTensor) or x.recipe is None or kwargs:
        return None
    recipe = x.recipe
    if x.is_own and x._span is None and (func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0)):
        x._cell.clear()
        return x
    if func is aten.copy_.default and x._span is None and not isinstance(args[1], LatentTensor):
        x._cell.replace(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(args[1]))
        return x
    if func is aten.detach.default:
        return LatentTensor(x._cell, x._tokens, x._span)
    if func is aten.clone.default:
        # Rows that are never written to need no copy.
        rows = [once((r,), torch.Tensor.clone) for r in x.rows()] if x.is_own else x.rows()
        return LatentTensor.of(recipe, rows, x.leaves)
    if func is aten.index_select.default:
        dim = args[1] % len(recipe.kinds)
        if recipe.kinds[dim] == "row":
            rows = [once((r, args[2]), _select, recipe.row_axis(dim)) for r in x.rows()]
            return LatentTensor.of(recipe, rows, x.leaves)
    return None


def _narrowed(rows: torch.Tensor, *how: int) -> torch.Tensor:
    return rows.narrow(*how).contiguous()


def _select(rows: torch.Tensor, order: torch.Tensor, axis: int) -> torch.Tensor:
    return rows.index_select(axis, order).contiguous()


def _cat(*rows_then_axis: Any) -> torch.Tensor:
    *rows, axis = rows_then_axis
    return torch.cat(rows, axis).contiguous()


def _joined(parts: Sequence[object], dim: int) -> LatentTensor | None:
    held = [part for part in parts if isinstance(part, LatentTensor)]
    recipe, leaves = held[0].recipe if held else None, held[0].leaves if held else ()
    if recipe is None or len(held) < len(parts) or dim % len(recipe.kinds) != recipe.tokens:
        return None
    if any(p.recipe != recipe or any(a is not b for a, b in zip(p.leaves, leaves, strict=True)) for p in held):
        return None
    rows = [once(one, _cat, recipe.token_axis) for one in zip(*(p.rows() for p in held), strict=True)]
    return LatentTensor.of(recipe, rows, leaves)
