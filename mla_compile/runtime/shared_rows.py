"""A tensor for cache rows that ranks share. It has the shape of all rows, but holds only this rank's share.

Compiled graphs of this library read the local share. Any other read raises an error, because it would need a collective
in which the other ranks may not take part. A few operations are applied to the share: reordering, repeating and copying
along axes before the token axis, clearing, and truncation to the first tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mla_compile.core.sharing import Sharing
from mla_compile.errors import SharedCacheError
from mla_compile.runtime.appending import first_rows, larger
from mla_compile.runtime.ranges import range_of

aten = torch.ops.aten
_lock = threading.Lock()
_HOW = "call full_tensor() on all ranks for all of its rows, or compile without context_parallel"


@dataclass
class _RankMemory:
    """Memory for one rank's share of the rows of ``tokens`` tokens."""

    rows: torch.Tensor
    tokens: int


class RankRows(torch.Tensor):
    """Rows of all tokens along ``axis``. This rank holds only ``local``: its share, and possibly one more row.

    Rows of a growing cache lie in memory with spare capacity. Rows of a full-length buffer have no spare capacity.
    """

    local: torch.Tensor
    axis: int
    sharing: Sharing
    _memory: _RankMemory | None

    @staticmethod
    def __new__(
        cls: type[RankRows],
        local: torch.Tensor,
        axis: int,
        tokens: int,
        sharing: Sharing,
        memory: _RankMemory | None = None,
    ) -> RankRows:
        """Create a tensor that shows ``tokens`` rows; :meth:`of` creates one from a tensor of all rows."""
        shape = (*local.shape[:axis], tokens, *local.shape[axis + 1 :])
        made: RankRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.axis, made.sharing, made._memory = local, axis, sharing, memory
        return made

    @classmethod
    def of(cls, rows: torch.Tensor, axis: int, sharing: Sharing, *, grows: bool = True) -> RankRows:
        """Take this rank's share of ``rows``. Every rank has this plain tensor of all rows.

        If ``grows``, the share is stored in memory with spare capacity.
        """
        return cls.made_of(_share(rows, axis, sharing), axis, rows.shape[axis], sharing, grows=grows)

    @classmethod
    def made_of(cls, own: torch.Tensor, axis: int, tokens: int, sharing: Sharing, *, grows: bool) -> RankRows:
        """Copy ``own``, this rank's share of ``tokens`` rows. If ``grows``, the new memory has spare capacity."""
        count = sharing.capacity(tokens)
        own = own.narrow(axis, 0, min(count, own.shape[axis]))
        if grows:
            memory = _RankMemory(larger(own, axis, count), tokens)
            return cls(first_rows(memory.rows, axis, count), axis, tokens, sharing, memory)
        with torch.inference_mode(mode=False), torch.no_grad():  # ``own`` may have been made in inference mode
            local = torch.zeros((*own.shape[:axis], count, *own.shape[axis + 1 :]), dtype=own.dtype, device=own.device)
            local.narrow(axis, 0, own.shape[axis]).copy_(own)
        return cls(local, axis, tokens, sharing)

    def buffer(self) -> torch.Tensor:
        """Return this rank's rows as a dense tensor that may be written to."""
        if not self.local.is_contiguous():  # a cache that grew is not contiguous
            self.local, self._memory = self.local.contiguous(), None
        return self.local

    def write(self, rows: torch.Tensor) -> None:
        """Store this rank's share of ``rows``. Every rank has this plain tensor of all rows."""
        own = _share(rows, self.axis, self.sharing)
        with torch.no_grad():
            self.local.narrow(self.axis, 0, own.shape[self.axis]).copy_(own)

    def grown(self, count: int) -> RankRows:
        """Return these rows and ``count`` unwritten rows, in the same memory if its capacity suffices.

        Only the newest tensor can grow in place. The rows of an older tensor are copied.
        """
        tokens = self.shape[self.axis] + count
        with _lock:
            memory, capacity = self._memory, self.sharing.capacity(tokens)
            room = memory is not None and memory.tokens == self.shape[self.axis]
            if memory is None or not room or memory.rows.shape[self.axis] < capacity:
                return self.made_of(self.local, self.axis, tokens, self.sharing, grows=True)
            memory.tokens = tokens
        return RankRows(first_rows(memory.rows, self.axis, capacity), self.axis, tokens, self.sharing, memory)

    def full_tensor(self) -> torch.Tensor:
        """Return all rows as a plain tensor. This is a collective: every rank that shares the rows has to call it."""
        axis = self.axis
        with torch.no_grad():
            rows = self.sharing.all_rows(self.local.movedim(axis, 0), self.shape[axis])
            return rows.movedim(0, axis).contiguous()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch prescribes

    # The subclass protocol of torch.compile.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, Sharing]]:
        return ["local"], (self.axis, self.sharing)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], how: tuple[int, Sharing], size: Sequence[int], *_: object
    ) -> RankRows:
        return RankRows(inner["local"], how[0], size[how[0]], how[1])

    # The operations of caches.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its disabled stand-in
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, RankRows)]
        # Dynamo traces with fake tensors. Only their shapes matter, so operators run on all rows.
        if all(isinstance(x.local, FakeTensor) for x in given):
            plain = pytree.tree_map_only(RankRows, _empty, (args, kwargs))
            return func(*plain[0], **plain[1])
        x = args[0] if args else None
        if isinstance(x, RankRows) and func is aten.zero_.default:
            x.local.zero_()
            return x
        if isinstance(x, RankRows) and func is aten.detach.default:
            return RankRows(x.local, x.axis, x.shape[x.axis], x.sharing, x._memory)
        if isinstance(x, RankRows) and len(given) == 1 and _spares_tokens(func, args, x.axis):
            return x._with(func(x.local, *args[1:], **kwargs))
        return given[0].refuse(f"{func} reads it")

    def __getitem__(self, index: Any) -> Any:
        """Index the rows. The first tokens are again shared rows; any other index is left to the dispatcher."""
        if torch.compiler.is_compiling():
            return super().__getitem__(index)
        tokens = range_of(index, self.dim(), self.axis)
        low, high, _ = (1, 0, 1) if tokens is None else tokens.indices(self.shape[self.axis])
        if low != 0:
            return super().__getitem__(index)
        return self.made_of(self.local, self.axis, high, self.sharing, grows=self._memory is not None)

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **how: Any) -> torch.Tensor:
        """Repeat entries of an axis that precedes the tokens. Any other ``dim`` raises an error, except in a trace."""
        if dim is None or not 0 <= dim < self.axis or torch.compiler.is_compiling():
            return super().repeat_interleave(repeats, dim, **how)
        return self._with(self.local.repeat_interleave(repeats, dim, **how))

    def _with(self, local: torch.Tensor) -> RankRows:
        """Return a tensor with other local rows for the same tokens."""
        return self.made_of(local, self.axis, self.shape[self.axis], self.sharing, grows=self._memory is not None)

    def refuse(self, what: str) -> NoReturn:
        """Raise :class:`SharedCacheError`."""
        raise SharedCacheError(f"{what}, and this rank has 1/{self.sharing.size} of the rows of this cache: {_HOW}")

    def data_ptr(self) -> int:
        """Raise :class:`SharedCacheError`: no memory holds all rows."""
        self.refuse("data_ptr() asks for its memory")

    def numpy(self, *, force: bool = False) -> Any:
        """Raise :class:`SharedCacheError`: no memory holds all rows."""
        self.refuse("numpy() reads it")

    def tolist(self) -> Any:
        """Raise :class:`SharedCacheError`: no memory holds all rows."""
        self.refuse("tolist() reads it")

    def __array__(self, dtype: object = None) -> Any:
        self.refuse("numpy reads it")

    def __deepcopy__(self, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._with(self.local)
        made: torch.Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        self.refuse("it is to be saved")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        share = f"rank {self.sharing.rank} of {self.sharing.size}"
        return f"RankRows(shape={list(self.shape)}, dtype={self.dtype}, {share} holds {list(self.local.shape)})"


def _share(rows: torch.Tensor, axis: int, sharing: Sharing) -> torch.Tensor:
    """Return this rank's share of ``rows``, which contains all rows."""
    return rows[(slice(None),) * axis + (slice(sharing.rank, None, sharing.size),)]


def _empty(x: RankRows) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _spares_tokens(func: object, args: tuple[Any, ...], axis: int) -> bool:
    """Whether an operator copies rows, or selects entries of an axis before the token axis."""
    if func is aten.clone.default:
        return True
    if func is aten.index_select.default:
        return bool(0 <= args[1] < axis)
    if func is aten.index.Tensor:
        chosen = [at for at, x in enumerate(args[1]) if x is not None]
        return chosen == [0] and axis > 0 and args[1][0].dim() == 1
    return False
