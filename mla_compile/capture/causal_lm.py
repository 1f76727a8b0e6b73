"""Exports a causal language model of transformers as one function of flat tensors.

Only the calling convention of transformers is assumed. The model takes ``input_ids``, ``attention_mask``,
``position_ids`` and a cache, and returns ``logits`` and the cache. The cache is an object whose ``layers`` hold
tensors. Running the model shows which tensors the cache holds, and which axis of each grows with the context.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim, ExportedProgram

from mla_compile.capture.exporting import traced_program
from mla_compile.capture.unroll import UnrolledExperts
from mla_compile.core.cache_argument import cache_argument, cache_of
from mla_compile.errors import ExportError, InputError, brief

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

# The sizes must differ from each other and from 1, because torch.export equates equal sizes and specialises size 1.
BATCH, QUERY, PAST = 2, 3, 7


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a cache: its place, the token axis, and its shape.

    ``axis`` is ``None`` for a tensor of fixed size. ``shape`` has ``None`` for the batch and for the tokens. If
    ``squeezed``, the tensor has four axes and a single head, and the graph uses it without the head axis.
    """

    layer: int
    attribute: str
    key: int | None
    axis: int | None
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    squeezed: bool

    def of(self, cache: Cache) -> torch.Tensor:
        """Return this tensor of a cache, in the shape that the exported graph uses."""
        tensor: torch.Tensor = _read(cache.layers[self.layer], self.attribute, self.key)
        return tensor.squeeze(1) if self.squeezed else tensor

    def put(self, cache: Cache, tensor: torch.Tensor) -> None:
        """Store ``tensor`` at its place in a cache."""
        layer = cache.layers[self.layer]
        tensor = tensor.unsqueeze(1) if self.squeezed else tensor
        if self.key is None:
            setattr(layer, self.attribute, tensor)
        else:
            getattr(layer, self.attribute)[self.key] = tensor


@dataclass(frozen=True)
class CausalLM:
    """A model, the tensors of its cache, and a template cache that is copied for each trace."""

    model: torch.nn.Module
    caches: tuple[CacheTensor, ...]
    template: Cache

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights, taken from the first floating-point weight."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def filled(self, tensors: Sequence[torch.Tensor]) -> Cache:
        """Return a copy of the template cache that holds ``tensors``."""
        cache = copy.copy(self.template)
        cache.layers = [_copied(layer) for layer in self.template.layers]
        for entry, tensor in zip(self.caches, tensors, strict=True):
            entry.put(cache, tensor)
        return cache

    def empty(self, batch: int, past: int = 0) -> list[torch.Tensor]:
        """Return cache tensors of zeros for ``past`` tokens."""
        device = next(self.model.parameters()).device
        return [
            torch.zeros(batch, *(past if d is None else d for d in c.shape[1:]), dtype=c.dtype, device=device)
            for c in self.caches
        ]


def wire(model: torch.nn.Module) -> CausalLM:
    """Find a model's cache tensors by running it on two short prompts.

    Raises :class:`InputError` for a module that does not follow the calling convention. Raises :class:`ExportError` for
    a model that does not run or has weights on the meta device, and for an unsupported cache tensor. A cache tensor
    must have the batch as first axis, at most one token axis, and one row per token or a fixed size.
    """
    names = inspect.signature(model.forward).parameters
    missing = [n for n in ("input_ids", "attention_mask", cache_argument(model)) if n not in names]
    if missing:
        raise InputError(
            f"{type(model).__name__}.forward takes no {', '.join(missing)}, so its inputs cannot be wired as those of "
            "a causal language model of transformers; trace it with torch.export and export the ExportedProgram"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ExportError(f"{type(model).__name__} has weights on the meta device; load the weights before exporting")
    short, long = (_run(model, length) for length in (PAST - 2, PAST))
    return CausalLM(model, tuple(_tensors(short, long)), long)


def export_program(lm: CausalLM, *, last_only: bool, experts: str, one_token: bool = False) -> ExportedProgram:
    """Return the model as an ExportedProgram.

    The program maps ``(input_ids, attention_mask, position_ids, *caches)`` to ``(logits, *caches)``. ``last_only``:
    return only the last token's logits, if the model supports this. ``experts``: the traced implementation of mixtures
    of experts, if the model offers a choice. ``one_token``: trace calls with one query token.
    """
    query = 1 if one_token else QUERY
    device = next(lm.model.parameters()).device
    ids = torch.arange(3, 3 + BATCH * query, device=device).reshape(BATCH, query)
    positions = torch.arange(PAST, PAST + query, device=device).repeat(BATCH, 1)
    mask = torch.ones(BATCH, PAST + query, dtype=torch.long, device=device)
    batch, tokens, past = Dim("batch"), Dim("query"), Dim("past", min=0)
    new = {0: batch} if one_token else {0: batch, 1: tokens}
    shapes = (
        new,
        {0: batch, 1: Dim.AUTO},
        new,
        [{0: batch} if c.axis is None else {0: batch, c.axis: past} for c in lm.caches],
    )
    wrapper = _Flat(
        lm,
        last_only=last_only and "logits_to_keep" in inspect.signature(lm.model.forward).parameters,
        one_token=one_token,
    )
    inputs = (ids, mask, positions, lm.empty(BATCH, PAST))
    with torch.no_grad(), _experts(lm.model, experts), evaluating(lm.model), UnrolledExperts():
        try:
            return traced_program(wrapper, inputs, dynamic_shapes=shapes)
        except Exception as error:  # tracing runs the user's model, which may raise anything
            raise ExportError(f"{type(lm.model).__name__} cannot be traced by torch.export: {brief(error)}") from error


class _Flat(torch.nn.Module):
    def __init__(self, lm: CausalLM, *, last_only: bool, one_token: bool) -> None:
        super().__init__()
        self._one_token = one_token
        self.model = lm.model
        self._lm = (lm,)  # in a tuple, so that it does not become a submodule
        self._cache = cache_argument(lm.model)
        self._extra = {"logits_to_keep": 1} if last_only else {}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        (lm,) = self._lm
        # States of fixed size are cloned: the model may write them in place, but the caller's tensors are read below.
        given = [t.clone() if entry.axis is None else t for entry, t in zip(lm.caches, caches, strict=True)]
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self._cache: lm.filled(given)},
            **self._extra,
        )
        new = [entry.of(cache_of(out)) for entry in lm.caches]
        if self._one_token:
            # A padding token must not change a state of fixed size. In longer calls, the model itself ensures this.
            real = attention_mask[:, -1] != 0
            for i, entry in enumerate(lm.caches):
                if entry.axis is None:
                    new[i] = torch.where(real.view(-1, *[1] * (new[i].dim() - 1)), new[i], caches[i])
        return out.logits, new


def _run(model: torch.nn.Module, length: int) -> object:
    """Return the cache after a prompt of ``length`` tokens."""
    device = next(model.parameters()).device
    ids = torch.arange(3, 3 + BATCH * length, device=device).reshape(BATCH, length)
    with torch.no_grad(), evaluating(model):
        try:
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
        except Exception as error:  # the user's model runs here, and may raise anything
            raise ExportError(
                f"{type(model).__name__} does not run on a prompt of {length} tokens: {type(error).__name__}: {error}"
            ) from error
    cache = cache_of(out)
    if not hasattr(cache, "layers"):
        raise ExportError(
            f"{type(model).__name__} keeps its cache in a {type(cache).__name__}, expected a transformers Cache with "
            "layers; trace it with torch.export and export the ExportedProgram"
        )
    return cache


def _tensors(short: Cache, long: Cache) -> Iterator[CacheTensor]:
    for layer, (a, b) in enumerate(zip(short.layers, long.layers, strict=True)):
        for attribute, key, x in _slots(a):
            y = _read(b, attribute, key)
            where = f"{attribute} of cache layer {layer}"
            grown = [axis for axis, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n]
            if x.dim() == 0:
                continue  # a layer's token counter, kept as a tensor
            if x.shape[0] != BATCH or len(grown) > 1 or 0 in grown:
                raise ExportError(
                    f"{where} has shape {list(x.shape)} after {PAST - 2} tokens and {list(y.shape)} after {PAST}, "
                    f"batch {BATCH}: expected the batch first and one axis of tokens"
                )
            axis = grown[0] if grown else None
            if axis is not None and (x.shape[axis], y.shape[axis]) != (PAST - 2, PAST):
                raise ExportError(
                    f"{where} has {y.shape[axis]} rows after {PAST} tokens, expected one for each or a fixed number: "
                    "a graph has no phases. Trace a step, with its cache as inputs and outputs, with torch.export and "
                    "export the ExportedProgram; optimize(model) runs all phases in torch"
                )
            squeezed = axis is not None and y.dim() == 4 and axis == 2 and y.shape[1] == 1
            shape = [None if i == axis else n for i, n in enumerate(y.shape)]
            if squeezed:
                del shape[1]
                axis = 1
            yield CacheTensor(layer, attribute, key, axis, (None, *shape[1:]), y.dtype, squeezed)


def _slots(layer: object) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            yield name, None, value
        elif isinstance(value, dict):
            yield from ((name, key, v) for key, v in value.items() if isinstance(v, torch.Tensor))


def _read(layer: CacheLayerMixin, attribute: str, key: int | None) -> torch.Tensor:
    value: Any = getattr(layer, attribute)
    tensor: torch.Tensor = value if key is None else value[key]
    return tensor


def _copied(layer: object) -> object:
    result = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, (dict, list)):
            setattr(result, name, copy.copy(value))
    return result


@contextlib.contextmanager
def _experts(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Select an implementation of mixtures of experts for the block, if the model offers a choice."""
    if not getattr(model, "_can_set_experts_implementation", lambda: False)():
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in eval mode for the block."""
    training = {m for m in model.modules() if m.training}
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
