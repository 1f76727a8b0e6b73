"""Random attentions with an indexer: each query sees the best k keys, and a mask over all keys says so.

What varies besides the attention (:class:`tests.support.generator.Case`) is how the keys are ranked and listed, how the
list becomes a mask, and how other masks are put before it and beside it. Every form says the same: the keys of a list
and no others, unless a hook of :class:`SparseMLA` is overridden.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.generated_module import GeneratedMLA
from tests.support.generated_run import causal_keep
from tests.support.generator import Case, drawn

ORDERS = ("topk", "topk_unsorted", "sort", "stable", "argsort", "least", "transposed", "longer")
LISTS = ("plain", "int32", "contiguous", "copied", "cut_and_joined")
BOOLEANS = (
    "scatter_false", "scatter_true", "scatter_tensor", "full", "like", "in_place", "expanded", "numbers", "cast",
    "zero", "counts", "counts_ne", "counts_int", "counts_ones", "filled", "where_bool",
)  # fmt: skip
ADDED = ("scatter_inf", "scatter_inf_tensor", "fill", "fill_true", "where", "where_not")
FLAGGED = ("counts", "counts_ne", "counts_int")
BESIDE = ("and", "and_swapped", "logical_and", "mul", "nor", "where", "masked_fill")
BESIDE_ADDED = ("add", "fill", "where", "first")
SPREADS = ("repeat", "expand", "look_up", "gather")
EVERY_KEY = 99


@dataclass(frozen=True)
class SparseCase:
    """A case, and how its list of keys is made and used.

    Attributes:
        k: keys that each query chooses (or all, where there are fewer).
        indexer: the heads of the indexer; 0: one product without a ReLU.
        order: the operator that ranks.
        given: the list comes in as an input, ``flagged`` with -1 for no key; else the indexer chooses.
        list: what is done to the list that changes nothing.
        form: how the mask is written.
        seen: whether keys are hidden besides (causal, padding): by a mask that comes in, or one made inside.
        before: whether these are hidden from the indexer too, and how.
        beside: how these masks are put together with the list.
        shared: one list for all of the batch.
        layers: how many attentions use the list.
        block: how many keys an entry of the list names.
        spread: how a mask over blocks becomes one over keys.
    """

    case: Case
    k: int = 2
    indexer: int = 2
    order: str = "topk"
    given: str = ""
    list: str = "plain"
    form: str = "scatter_true"
    seen: str = "none"
    before: str = ""
    beside: str = "and"
    shared: bool = False
    layers: int = 1
    block: int = 1
    spread: str = "repeat"

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        shown = (f for f in fields(self) if f.name == "case" or getattr(self, f.name) != f.default)
        return f"SparseCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @property
    def finite(self) -> bool:
        """Whether a number that is no infinity hides."""
        return self.case.mask in ("add_min", "fill_min", "where", "visible_fill")


def sparse_cases(count: int, start: int) -> list[SparseCase]:
    """The same for each ``start``. All forms, and all of each other choice, come once before one comes twice."""
    rng = random.Random(start)
    bags: dict[str, list[Any]] = {}

    def pick(name: str, options: Sequence[Any]) -> Any:
        bags[name] = bags.get(name) or rng.sample(options, len(options))
        return bags[name].pop()

    return [_sparse(case, pick) for case in drawn(count, start)]


def _sparse(case: Case, pick: Callable[[str, Sequence[Any]], Any]) -> SparseCase:
    given = pick("given", ("", "", "", "", "", "list", "flagged"))
    form = pick("flagged", FLAGGED) if given == "flagged" else pick("form", (*BOOLEANS, *ADDED))
    fused = case.core == "sdpa"
    finite = ("add_min",) if fused else ("add_min", "fill_min", "where", "visible_fill")
    infinite = ("keep", "add") if fused else ("fill", "add", "compare")
    finite_one = form not in ADDED and pick("finite", (False, False, False, True))
    mask = "add" if form in ADDED else pick(f"mask {fused} {finite_one}", finite if finite_one else infinite)
    seen = pick("seen of a list", ("none", "inside")) if given else pick("seen", ("none", "given", "inside"))
    static = case.cache in ("index_copy", "slice")
    case = replace(case, cache="tensors") if case.cache == "none" else case  # keys to choose among are cached
    case = replace(
        case, mask=mask, mask_rank=4, library="", T=max(case.T, 2), D=max(case.D, 2), latents=1, reads=False,
        # A bias of K or V, or an open core, leaves less to look at.
        bias=case.bias and pick("bias", (False, False, True)),
        extra=case.extra if case.extra not in ("probs", "softcap") or pick("open", (False, False, True)) else "none",
        forms=pick("forms", ("absorbed", "absorbed", case.forms)),
        dtype=pick("dtype", ("float64", "float64", case.dtype)),
        door=pick("door", (*["trace"] * 7, "dynamo", "symbolic", "optimize")),
        padded=seen == "given" and pick("padded", (False, True)),
    )  # fmt: skip
    before = pick("before", ("", "fill", "add")) if seen != "none" else ""
    shared = not given and pick("shared", (False, False, False, True))
    # A query that sees no key of its list may be NaN, and then so may be all that a second layer makes of it.
    chosen_of_all = seen != "none" and (shared or not before)
    return SparseCase(
        case=case,
        k=pick("k of a list", (1, 2, 3)) if given else pick("k", (1, 2, 3, 4, EVERY_KEY)),
        indexer=pick("indexer", (0, 1, 3)),
        order=pick("order", ORDERS),
        given=given,
        list=pick("list", LISTS),
        form=form,
        seen=seen,
        before=before,
        beside=pick("beside added", BESIDE_ADDED) if form in ADDED else pick("beside", BESIDE),
        shared=shared,
        layers=1 if static or (chosen_of_all and not given) else pick("layers", (1, 1, 2)),
        block=1 if given else pick("block", (1, 1, 2, 3)),
        spread=pick("spread", SPREADS),
    )


class SparseMLA(GeneratedMLA):
    """Called as its base; the last of the state is the keys of the indexer [B,T,W], where it does not hold them itself.

    ``keep`` is a list [B,S,k] where lists come in. The indexer ranks in float64, so that it always ranks alike.
    """

    width = 4

    def __init__(self, sparse: SparseCase) -> None:
        super().__init__(sparse.case)
        self.sparse = sparse
        generator = torch.Generator().manual_seed(sparse.case.seed + 100)
        c, heads = self.case, max(sparse.indexer, 1)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator).to(self.w_c.dtype), requires_grad=False)

        self.i_q, self.i_k, self.i_w = weight(heads * self.width, c.D), weight(self.width, c.D), weight(heads, c.D)
        if self._holds:
            junk = torch.randn(c.B, c.capacity, self.width, generator=generator, dtype=torch.float64)
            self.register_buffer("cache_i", junk)

    @property
    def _holds(self) -> bool:
        return self.case.cache in ("index_copy", "slice") and not self.sparse.given

    def empty_state(self) -> tuple[Tensor, ...]:
        c = self.case
        outside = not (self.sparse.given or self._holds)
        own = (torch.zeros(c.B, 0, self.width, dtype=torch.float64),) if outside else ()
        return super().empty_state() * self.sparse.layers + own

    def forward(
        self, x: Tensor, positions: Tensor, keep: Tensor | None, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        sparse, per_layer = self.sparse, len(super().empty_state())
        own = state[per_layer * sparse.layers :]
        listed = keep if sparse.given else None
        keep = None if sparse.given else keep
        if sparse.given:
            length, keys = self._length(state[:per_layer], x), None
        else:
            keys, own = self._index_keys(x, positions, own)
            length = keys.shape[1]
        mask = self._mask(x, positions, keep, keys, listed, length)
        more: list[Tensor] = []
        after: tuple[Tensor, ...] = ()
        for layer in range(sparse.layers):
            y, *rest = super().forward(x, positions, mask, state[layer * per_layer : (layer + 1) * per_layer])
            more += rest[:per_layer]
            after += tuple(rest[per_layer:])
            x = x + y
        return (y, *more, *own, *after)

    def _length(self, state: tuple[Tensor, ...], x: Tensor) -> int:
        if not state:
            return self.case.capacity
        axis = 2 if state[0].dim() == 4 else 1
        return state[0].shape[axis] + x.shape[1]

    # The indexer.

    def _index_keys(self, x: Tensor, positions: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        new = x.double() @ self.i_k.double().t()
        if not self._holds:
            keys = torch.cat([own[0], new], 1)
            return keys, (keys,)
        if self.case.cache == "index_copy":
            self.cache_i.index_copy_(1, positions, new)
        else:
            self.cache_i[:, self.start : self.start + x.shape[1]] = new
        return self.cache_i, ()

    def _scores(self, x: Tensor, keys: Tensor) -> Tensor:
        """[B,S,T], or [S,T] where one list serves all of a batch."""
        x, heads = x.double(), max(self.sparse.indexer, 1)
        q = (x @ self.i_q.double().t()).unflatten(-1, (heads, self.width))
        scores = torch.einsum("bshw,btw->bsht", q, keys)
        if self.sparse.indexer:
            scores = torch.einsum("bsht,bsh->bst", scores.relu(), x @ self.i_w.double().t())
        else:
            scores = scores[:, :, 0]
        return scores.sum(0) if self.sparse.shared else scores

    def _visible(self, positions: Tensor, keep: Tensor | None, length: int) -> Tensor | None:
        """What other masks show: [B,S,T] or [S,T]."""
        if self.sparse.seen == "inside":
            return torch.arange(length, device=positions.device) <= positions[:, None]
        return keep

    def _ranked(self, scores: Tensor) -> Tensor:
        """[..,k], the places of the best."""
        order, k = self.sparse.order, min(self.sparse.k, scores.shape[-1])
        if order in ("topk", "topk_unsorted"):
            return scores.topk(k, dim=-1, sorted=order == "topk").indices
        if order == "sort":
            return scores.sort(dim=-1, descending=True).indices[..., :k]
        if order == "stable":
            return torch.sort(scores, dim=-1, descending=True, stable=True)[1].narrow(-1, 0, k)
        if order == "argsort":
            return scores.argsort(dim=-1, descending=True)[..., :k]
        if order == "least":
            return (-scores).topk(k, -1, largest=False)[1]
        if order == "transposed":
            return scores.transpose(-1, -2).topk(k, dim=-2).indices.transpose(-1, -2)
        return scores.topk(min(k + 1, scores.shape[-1]), -1).indices[..., :k]

    def _same_list(self, index: Tensor) -> Tensor:
        how = self.sparse.list
        if how == "int32":
            return index.to(torch.int32).long()
        if how == "contiguous":
            return index.flip(-1).contiguous()
        if how == "copied":
            return index.clone().unsqueeze(1).squeeze(1)
        return torch.cat([index[..., 1:], index[..., :1]], -1) if how == "cut_and_joined" else index

    # The mask.

    def _mask(
        self, x: Tensor, positions: Tensor, keep: Tensor | None, keys: Tensor | None, listed: Tensor | None, length: int
    ) -> Tensor:
        """[B,S,T], True or 0 where a query sees a key."""
        sparse = self.sparse
        seen = self._visible(positions, keep, length)
        flags = None
        if listed is None:
            assert keys is not None
            scores = self._scores(x, keys)
            hidden = self._hidden_first(seen)
            if hidden is not None and (hidden.dim() == scores.dim() or hidden.dim() == 2):
                scores = scores.masked_fill(~hidden, -math.inf) if sparse.before == "fill" else scores + _low(hidden)
            index = self._ranked(self._best_of_blocks(scores))
        else:
            index = listed
            if sparse.given == "flagged":
                flags = (index >= 0) & (index < length)
                index = index.clamp(0, length - 1)
        index = self._same_list(index)
        flags = flags if flags is None else self._same_list(flags) if sparse.list != "int32" else flags
        shape = (*index.shape[:-1], -(-length // sparse.block))
        if sparse.form in ADDED:
            made = self._besides_added(self._over_keys(self._added(index, shape), length), seen)
        else:
            made = self._besides(self._over_keys(self._boolean(index, flags, shape), length), seen)
        made = made if made.dim() == 3 else made[None]
        return made.expand(x.shape[0], -1, -1) if self.case.core == "bmm" else made

    def _best_of_blocks(self, scores: Tensor) -> Tensor:
        block = self.sparse.block
        if block == 1:
            return scores
        missing = -scores.shape[-1] % block
        return F.pad(scores, (0, missing), value=-math.inf).unflatten(-1, (-1, block)).amax(-1)

    def _over_keys(self, mask: Tensor, length: int) -> Tensor:
        """A mask over blocks as one over keys, of which the last block may have fewer."""
        how, block = self.sparse.spread, self.sparse.block
        if block == 1:
            return mask
        if how == "repeat":
            return mask.repeat_interleave(block, -1)[..., :length]
        if how == "expand":
            wide = mask.unsqueeze(-1).expand(*mask.shape, block)
            return wide.reshape(*mask.shape[:-1], -1)[..., :length]
        at = torch.arange(length, device=mask.device)
        if how == "look_up":
            return mask[..., at // block]
        return mask.gather(-1, at.div(block, rounding_mode="floor").expand(*mask.shape[:-1], length))

    def _hidden_first(self, seen: Tensor | None) -> Tensor | None:
        return seen if self.sparse.before else None

    def _boolean(self, index: Tensor, flags: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """True at the listed keys."""
        form, device = self.sparse.form, index.device
        none = torch.zeros(shape, dtype=torch.bool, device=device)
        if form == "scatter_false":
            return ~torch.ones(shape, dtype=torch.bool, device=device).scatter(-1, index, False)
        if form == "scatter_tensor":
            return none.scatter(-1, index, torch.ones_like(index, dtype=torch.bool))
        if form == "full":
            return torch.full(shape, False, device=device).scatter(index.dim() - 1, index, True)
        if form == "like":
            return torch.zeros_like(none).scatter(-1, index, none.new_ones(1).expand(index.shape))
        if form == "in_place":
            return none.scatter_(-1, index, True)
        if form == "expanded":
            wide = torch.zeros(1, 1, shape[-1], dtype=torch.bool).expand(1, *shape) if len(shape) == 2 else none[None]
            return wide.scatter(-1, index[None], True)[0]
        if form in ("numbers", "cast", "zero"):
            numbers = torch.full(shape, 1.0 if form == "zero" else 0.0, device=device)
            numbers = numbers.scatter(-1, index, 0.0 if form == "zero" else 1.0)
            return numbers > 0 if form == "numbers" else numbers.bool() if form == "cast" else numbers == 0
        if form.startswith("counts"):
            dtype = torch.int32 if form == "counts_int" else torch.float32
            one = torch.ones_like(index, dtype=dtype) if flags is None else flags.to(dtype)
            counts = torch.zeros(shape, dtype=dtype, device=device).scatter_add(-1, index, one)
            return counts > 0 if form == "counts" else counts >= 1 if form == "counts_ones" else counts.ne(0)
        listed = none.scatter(-1, index, True)
        if form == "filled":
            return torch.zeros(shape, dtype=torch.bool, device=device).masked_fill(listed, True)
        return torch.where(listed, True, False) if form == "where_bool" else listed

    def _added(self, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        """0 at the listed keys, minus infinity elsewhere."""
        form, dtype = self.sparse.form, self.w_c.dtype
        if form.startswith("scatter_inf"):
            whole = torch.full(shape, -math.inf, dtype=dtype, device=index.device)
            return whole.scatter(-1, index, 0.0 if form == "scatter_inf" else torch.zeros_like(index, dtype=dtype))
        zeros = torch.zeros(shape, dtype=dtype, device=index.device)
        shown = zeros.bool().scatter(-1, index, True)
        if form == "fill":
            return zeros.masked_fill(torch.ones_like(shown).scatter(-1, index, False), -math.inf)
        if form == "fill_true":
            return torch.full_like(zeros, -math.inf).masked_fill(shown, 0.0)
        if form == "where":
            return torch.where(shown, zeros, -math.inf)
        return torch.where(~shown, torch.full_like(zeros, -math.inf), zeros)

    def _besides(self, listed: Tensor, seen: Tensor | None) -> Tensor:
        how = self.sparse.beside
        if seen is None:
            return listed
        if how in ("and", "and_swapped"):
            return listed & seen if how == "and" else seen & listed
        if how == "logical_and":
            return listed.logical_and(seen)
        if how == "mul":
            return listed * seen
        if how == "nor":
            return ~(~listed | ~seen)
        if how == "where":
            return torch.where(seen, listed, False)
        # Both of all axes: masked_fill broadcasts only what is filled in.
        return (
            (listed | torch.zeros_like(seen)).masked_fill(~seen, False)
            if seen.dim() > listed.dim()
            else (listed.masked_fill(~seen, False))
        )

    def _besides_added(self, listed: Tensor, seen: Tensor | None) -> Tensor:
        how = self.sparse.beside
        if seen is None:
            return listed
        if how == "fill" and seen.dim() <= listed.dim():
            return listed.masked_fill(~seen, -math.inf)
        if how == "where":
            return torch.where(seen, listed, -math.inf)
        return _low(seen, listed.dtype) + listed if how == "first" else listed + _low(seen, listed.dtype)

    def _additive(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        return keep.to(dtype) if keep.is_floating_point() else super()._additive(keep, dtype)


def _low(seen: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -math.inf)


def keep_or_list(sparse: SparseCase) -> Any:
    """What such a module is called with as ``keep`` of a case and positions."""

    def of(case: Case, positions: Tensor) -> Tensor | None:
        if not sparse.given:
            return causal_keep(case, positions) if sparse.seen == "given" else None
        static = case.cache in ("index_copy", "slice")
        length = case.capacity if static else int(positions[-1]) + 1
        generator = torch.Generator().manual_seed(length)
        first = -1 if sparse.given == "flagged" else 0
        listed = torch.randint(first, length, (case.B, len(positions), sparse.k), generator=generator)
        # A query without a key may be NaN, and then so is all that a second layer makes of its row: the first is seen.
        if sparse.layers > 1:
            listed[..., 0] = 0
        return listed

    return of
