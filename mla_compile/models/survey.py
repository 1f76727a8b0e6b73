"""Collects the facts about a model (:mod:`mla_compile.report.facts`): its attention sites, its cache, its weights.

The model is traced on the meta device. Sizes come from the weights and the graph, and cache sizes from a cache that the
model fills. The config is read only for facts that are not visible there, such as the number of experts that a token
uses.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

import mla_compile
from mla_compile.core.cache_argument import cache_argument
from mla_compile.core.dims import Dims
from mla_compile.core.records import SiteReport
from mla_compile.errors import CaptureError, InputError
from mla_compile.models import config_file, quantization, skeleton, sources
from mla_compile.models.held import HeldRows, held
from mla_compile.models.quantization import Quantization
from mla_compile.models.stored import stored_weights
from mla_compile.models.weights import Tensor, first_int, tensors_of, text_config, weights_of
from mla_compile.report.facts import CachedLayers, Drafting, Facts, Family, Weights, family_of, latent_sites
from mla_compile.report.report import Report

_LONGEST = 2**18
# A model in fp8 is traced in bf16, because only code for quantized weights would apply scales.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Survey(NamedTuple):
    """The facts about a model, and the report on one of its decode steps."""

    facts: Facts
    report: Report


def survey(source: str, dtype: str = "bf16") -> Survey:
    """Survey a ``config.json``, a model's directory or ``python:MODULE:FUNCTION``. Raises :class:`InputError`.

    ``FUNCTION`` has to return a causal language model of transformers, or any module with the arguments of a decode
    step: ``(model, args)`` or ``(model, args, kwargs)``.
    """
    if not source.startswith("python:"):
        config, notes = config_file.read(source)
        return survey_config(config, dtype, notes)
    made = sources.call(source)
    model, args, kwargs = _parts(made, source)
    if args is None:
        return _of_language_model(model.to("meta"), ())
    with redirect_stdout(sys.stderr):  # keep the prints of the model out of our output
        report = mla_compile.explain(model, *args, **kwargs)
    return _assemble(model, report, skeleton.LayerList("", ()), (), weights_of(model), ())


def survey_config(config: object, dtype: str = "bf16", notes: tuple[str, ...] = ()) -> Survey:
    """Survey the causal language model of a transformers config. Raises :class:`InputError`."""
    quantized, more = quantization.read(config)
    return _of_language_model(skeleton.build(config, _DTYPES[dtype]), notes + more, quantized)


def _parts(made: object, source: str) -> tuple[nn.Module, Sequence[object] | None, Mapping[str, object]]:
    model, *inputs = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise InputError(f"{source!r} returned {type(model).__name__}, expected an nn.Module, or one with its inputs")
    if not inputs:
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise InputError(
                f"{source!r} returned a {type(model).__name__} without inputs; return (model, args) or "
                "(model, args, kwargs), the arguments of one decode step"
            )
        return model.eval(), None, {}
    args, kwargs = inputs[0], inputs[1] if len(inputs) == 2 else {}
    if len(inputs) > 2 or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise InputError(f"{source!r}: expected (model, args) or (model, args, kwargs), args a tuple, kwargs a dict")
    return model.eval(), args, kwargs


def _of_language_model(model: nn.Module, notes: tuple[str, ...], quantized: Quantization | None = None) -> Survey:
    layers, tensors = skeleton.layers_of(model), tensors_of(model)
    weights = weights_of(model, tensors)
    skeleton.thin(model, layers)
    cache, left_out = skeleton.cached_call(model)
    slots = held(cache, model)
    report, context = _step_explained(model, cache), skeleton.CONTEXT
    most = max((one.every for one in slots), default=1)
    while context < _LONGEST and any((site.chosen or 0) * most >= context for site in report.sites):
        context *= 64  # queries still choose all keys, and only a longer context shows how many they choose
        report = _step_explained(model, skeleton.cached_call(model, context)[0])
    picked = _picked(report, layers)
    cached = _cached_layers(cache, layers, slots, picked)
    notes += _not_counted(cache, cached, slots)
    kinds = layers.kinds()
    if len(kinds) < len(layers.like):
        traced = ", ".join(f"layer {i} for {n}" if n > 1 else f"layer {i}" for i, n in kinds.items())
        notes += (f"of {len(layers.like)} layers {len(kinds)} are traced, one of each kind: {traced}",)
    surveyed = _assemble(model, report, layers, cached, weights, notes + left_out)
    drafting = _drafting(
        model, layers, tensors, surveyed.facts, _cached_layers(cache, layers, slots, picked, layers.like[-1:])
    )
    surveyed = surveyed._replace(facts=replace(surveyed.facts, drafting=drafting))
    if quantized is None:
        return surveyed
    attentions = {
        path: site.dims if site.verdict == "absorbed" else None
        for site in report.sites
        for path in layers.stands_for(site.where.module)
    }
    stored = stored_weights(tensors, quantized, attentions)
    return surveyed._replace(facts=replace(surveyed.facts, stored=stored))


def _step_explained(model: nn.Module, cache: object) -> Report:
    """Return the report on a decode step with ``cache``, for a model that was built on the meta device."""

    def on(device: str) -> Report:
        step = torch.zeros(1, 1, dtype=torch.long, device=device)
        return mla_compile.explain(model, input_ids=step, **{cache_argument(model): cache}, use_cache=True)

    try:
        return on("meta")
    except CaptureError as error:  # torch cannot trace everything on the meta device, such as an index that is a list
        model = copy.deepcopy(model)
        try:
            skeleton.to_untouched_memory(model, cache)
        except RuntimeError:  # more memory than this machine can reserve
            raise error from None
        return on("cpu")


def _assemble(
    model: nn.Module,
    report: Report,
    layers: skeleton.LayerList,
    cached: tuple[CachedLayers, ...],
    weights: Weights,
    notes: tuple[str, ...],
) -> Survey:
    counted = (replace(s, stands_for=len(layers.stands_for(s.where.module))) for s in report.sites)
    report = replace(report, sites=tuple(counted))
    widened = [site.dims and _with_widths(site.dims, model, site.where.module) for site in report.sites]
    sites = latent_sites(zip(report.sites, widened, strict=True))
    heads = first_int(text_config(model), ("num_attention_heads", "n_head"))
    width = next((s.dims.D for s in sites), None) or first_int(text_config(model), ("hidden_size", "n_embd"))
    family = family_of(report.sites) or _without_latent(cached, heads, report)
    facts = Facts(
        type(model).__name__, family, report.sites, sites, cached, weights, heads, width, notes, report.messages
    )
    return Survey(facts, report)


def _drafting(
    model: nn.Module,
    layers: skeleton.LayerList,
    tensors: Sequence[Tensor],
    facts: Facts,
    cached: tuple[CachedLayers, ...],
) -> Drafting | None:
    """Return the layers that predict further tokens. The config counts such layers, but transformers builds none.

    Each of these layers is assumed to equal the last layer, plus norms and a projection of the concatenated hidden
    state and token embedding (DeepSeek-V3, arXiv 2412.19437, section 2.2). ``cached`` is the last layer's cache.
    """
    count = first_int(text_config(model), ("num_nextn_predict_layers", "num_mtp_layers"))
    if not (count and layers.path and facts.width):
        return None
    at, last = f"{layers.path}.{layers.like[-1]}.", f"{layers.path}.{len(layers.like) - 1}."
    latent = latent_sites(
        (replace(site, stands_for=1), _with_widths(site.dims, model, site.where.module))
        for site in facts.sites
        if site.dims and site.where.module.startswith(at)
    )
    if not (latent or cached):
        return None
    owned = [tensor for tensor in tensors if tensor.module.startswith(last)]
    joined = 2 * facts.width**2 + 3 * facts.width
    weights = replace(
        facts.weights,
        total=sum(tensor.values for tensor in owned) + joined,
        lookup=0,
        experts=sum(tensor.values for tensor in owned if tensor.expert),
    )
    layer = replace(facts, sites=(), latent=latent, cached=cached, weights=weights, notes=(), messages=())
    return Drafting(count, layer)


def _without_latent(cached: Sequence[CachedLayers], heads: int | None, report: Report) -> Family:
    if not cached and not report.sites:
        return "no attention"
    groups = max((layer.key_heads for layer in cached), default=heads)
    if groups == 1 and heads != 1:
        return "MQA"
    return "GQA" if groups is not None and heads is not None and groups < heads else "MHA"


def _cached_layers(
    cache: object,
    layers: skeleton.LayerList,
    slots: Sequence[HeldRows],
    picked: Mapping[int, SiteReport],
    like: tuple[int, ...] | None = None,
) -> tuple[CachedLayers, ...]:
    """Return what the cache holds per token. Every layer is counted as the traced layer that represents it.

    ``like`` limits the count to some layers, given by their traced layers, as in :class:`skeleton.LayerList`. If the
    cache's slots cannot be assigned to layers, no layer of ``like`` is counted.
    """
    every = list(getattr(cache, "layers", ()))
    filled: Counter[CachedLayers] = Counter()
    # A layer may have several slots, one for each attention. Slots are divided evenly among the layers.
    per_layer = len(every) // len(layers.like) if layers.like and len(every) % len(layers.like) == 0 else 0
    for i, slot in enumerate(every):
        keys, values = getattr(slot, "keys", None), getattr(slot, "values", None)
        if not (
            isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == values.dim() == 4
        ):
            continue
        layer = i // per_layer if per_layer else 0
        copies = (layers.like if like is None else like).count(layer) if per_layer else int(like is None)
        one, site = slots[i], picked.get(layer) if per_layer and slots[i].every != 1 else None
        if copies:
            filled[
                CachedLayers(
                    keys.shape[1], keys.shape[3], values.shape[1], 0 if one.shared else values.shape[3], count=0,
                    besides=sum(one.more.values()), every=one.every, window=one.window,
                    chosen=(site and site.chosen) or 0, choosing_flops=(site and site.choosing_flops) or 0,
                    waiting_bytes=sum(one.waiting.values()), state_bytes=sum(one.state.values()),
                )
            ] += copies  # fmt: skip
    return tuple(replace(layer, count=count) for layer, count in filled.items())


def _picked(report: Report, layers: skeleton.LayerList) -> dict[int, SiteReport]:
    """Return the attentions that choose keys, by layer."""
    found = ((re.match(rf"{re.escape(layers.path)}\.(\d+)\b", site.where.module), site) for site in report.sites)
    return {int(layer[1]): site for layer, site in found if layer and site.chosen}


def _not_counted(cache: object, cached: Sequence[CachedLayers], each: Sequence[HeldRows]) -> tuple[str, ...]:
    """Return notes on what a cache holds in addition to K and V, and on what is counted roughly or not at all."""
    slots = list(getattr(cache, "layers", ()))
    notes = []
    full = sum(layer.count for layer in cached)
    if full < len(slots):
        notes.append(f"{len(slots) - full} of {len(slots)} layers cache no keys and values; their state is not counted")
    filled = [(slot, one) for slot, one in zip(slots, each, strict=True) if getattr(slot, "keys", None) is not None]
    if any(getattr(slot, "is_sliding", False) and one.every == 1 for slot, one in filled):
        notes.append("layers with a sliding window are counted as if they kept the whole context")
    for told, names in (
        ("of every token, which are counted", (one.more for one in each)),
        ("of tokens without a row, which are counted at their most", (one.waiting for _, one in filled)),
        ("that do not grow with the context, which are counted", (one.state for _, one in filled)),
    ):
        if found := sorted({*chain(*names)}):
            notes.append(f"the cache also holds {', '.join(found)} {told}")
    return tuple(notes)


def _with_widths(dims: Dims, model: nn.Module, path: str) -> Dims:
    """Return ``dims`` with Q and D. If the graph does not show them, they come from shapes of the module's weights."""
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return dims
    shapes = [p.shape for p in owner.parameters() if p.dim() == 2]
    D = dims.D or next((n for m, n in shapes if m in (dims.L + dims.R, dims.L)), None)
    widths = [n for m, n in shapes if m == dims.H * (dims.N + dims.R)]
    # The up-projection of K (if R = 0), or of K and V (if R = V), has as many outputs as the query projection.
    if dims.R in (0, dims.V) and dims.L in widths:
        widths.remove(dims.L)
    Q = dims.Q or next((n for n in widths if n != dims.L), widths[0] if widths else None)
    return replace(dims, Q=Q, D=D)
