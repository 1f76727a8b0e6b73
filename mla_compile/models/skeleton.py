"""Builds a causal language model on the meta device, with one layer of each kind, to trace a decode step.

Layers are of one kind if their classes, weight shapes and plain attributes are equal. Only the first layer of each kind
is traced. The others are replaced by layers that return their input, so that indices keep their meaning. No memory is
allocated.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from mla_compile.core.cache_argument import cache_argument, cache_of
from mla_compile.errors import InputError
from mla_compile.models.config_file import in_one_line, transformers

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

CONTEXT = 64
"""Cached tokens in the trace. A small number is enough, because the report counts costs per cached token."""

_INDEX = re.compile("idx|index|layer_id")


@dataclass(frozen=True)
class LayerList:
    """The path of the list of decoder layers, and for every layer the index of the first equal layer."""

    path: str
    like: tuple[int, ...]

    def stands_for(self, module: str) -> tuple[str, ...]:
        """Return the paths of all modules that the traced module at the given path represents."""
        found = re.match(rf"({re.escape(self.path)}\.)(\d+)(?=\.|$)", module) if self.path else None
        if not found:
            return (module,)
        alike = (i for i, first in enumerate(self.like) if first == int(found[2]))
        return tuple(f"{found[1]}{i}{module[found.end() :]}" for i in alike)

    def kinds(self) -> dict[int, int]:
        """Return a dict: traced layer -> number of layers that it represents."""
        return {i: self.like.count(i) for i in dict.fromkeys(self.like)}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> nn.Module:
    """Build the causal language model of a config, with weights of ``dtype``.

    On the meta device, weights have no values. On other devices, weights are random. If the whole config builds no such
    model, the text part is tried. Raises :class:`InputError` if no model is built.
    """
    errors = ["it has none"]
    before = torch.get_default_dtype()
    for make, part in _makers(config):
        part.dtype = dtype
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model: nn.Module = make(part)
            return model.eval()
        except Exception as error:  # noqa: BLE001  third-party code may raise anything for wrong sizes
            errors.append(in_one_line(error))
        finally:
            torch.set_default_dtype(before)
    kind = getattr(config, "model_type", "?")
    raise InputError(f"transformers builds no causal language model from a config of type {kind!r}: {errors[-1]}")


def _makers(config: PreTrainedConfig) -> Iterator[tuple[Callable[[object], nn.Module], PreTrainedConfig]]:
    """Yield pairs of a constructor and its argument (the config or the text part), the likeliest pair first."""
    library = transformers()
    text = config.get_text_config()
    for part in (config,) if text is config else (config, text):
        if type(part) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
            yield library.AutoModelForCausalLM.from_config, part
    # Some models are in none of transformers' mappings, but their classes are named after their configs.
    usual = type(text).__name__.removesuffix("Config") + "ForCausalLM"
    for name, part in ((usual, text), (next(iter(config.architectures or ()), ""), config)):
        if (named := getattr(library, name, None)) is not None:
            yield named, part


def layers_of(model: nn.Module) -> LayerList:
    """Return the list of layers: the module list with the most parameters. Lists of one module are ignored."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            size = sum(p.numel() for p in module.parameters())
            if best is None or size > best[0]:
                best = (size, path, module)
    if best is None:
        return LayerList("", ())
    first: dict[object, int] = {}
    return LayerList(best[1], tuple(first.setdefault(_signature(layer), i) for i, layer in enumerate(best[2])))


def thin(model: nn.Module, layers: LayerList) -> None:
    """Replace, in place, every layer that equals an earlier layer by a layer that returns its input."""
    if not layers.path:
        return
    modules = model.get_submodule(layers.path)
    assert isinstance(modules, nn.ModuleList)
    returned = {first: _Returned() for first in dict.fromkeys(layers.like)}
    for first, what in returned.items():
        if layers.like.count(first) > 1:
            what.watch(modules[first])
    for i, first in enumerate(layers.like):
        if i != first:
            modules[i] = _HandOn(modules[i], returned[first])


class _Returned:
    """A record of what a layer returns when it first runs. All copies of a model share the record.

    ``others`` is the number of values after the hidden states if the layer returns a tuple, and None otherwise.
    """

    def __init__(self) -> None:
        self.others: int | None = None

    def watch(self, layer: nn.Module) -> None:
        self.handle = layer.register_forward_hook(self._look)

    def _look(self, _layer: nn.Module, _inputs: object, output: object) -> None:
        self.others = len(output) - 1 if isinstance(output, tuple) else None
        self.handle.remove()

    def __deepcopy__(self, _memo: dict[int, object]) -> _Returned:
        return self


class _HandOn(nn.Module):
    """A layer that returns its first argument, in a tuple if the traced layer returns a tuple.

    It has the plain attributes of the replaced layer.
    """

    def __init__(self, layer: nn.Module, returned: _Returned | None = None) -> None:
        super().__init__()
        vars(self).update(_plain(layer))
        self.returned = returned or _Returned()

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> object:
        others = self.returned.others
        return hidden_states if others is None else (hidden_states, *[None] * others)


def cached_call(model: nn.Module, context: int = CONTEXT) -> tuple[Cache, tuple[str, ...]]:
    """Return the cache after a prompt of ``context`` tokens, and a note on modules that had to be left out.

    A module that fails because it needs values (a loop over the experts that have tokens) is replaced, in place, by a
    module that returns its input. A failing module that holds a layer's index may be an attention and is not replaced.
    Instead, the call is repeated on fake tensors. If this call also fails, an error is raised.
    """
    skipped: list[str] = []
    while True:
        running: list[tuple[str, nn.Module]] = []
        try:
            with _watched(model, running):
                cache = _prefill(model, context)
        except Exception as error:  # noqa: BLE001  third-party code may raise anything
            path, module = running[-1] if running else ("", model)
            if not path or isinstance(module, _HandOn) or _holds_attention(module):
                try:
                    cache = _fake_prefill(model, context)
                except Exception:  # noqa: BLE001  as above; the first of the two errors is reported
                    raise InputError(_unable(model, path, error)) from error
                break
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _HandOn(module))
            skipped.append(f"{path} ({type(module).__name__})")
        else:
            break
    if cache is None:
        raise InputError(f"{type(model).__name__} returns no cache of keys and values, so there is nothing to inspect")
    notes = (f"left out of the trace, because their computation depends on values: {', '.join(skipped)}",)
    return cache, notes if skipped else ()


def _unable(model: nn.Module, path: str, error: Exception) -> str:
    """Return, in words, why a model does not run on a prompt."""
    name, takes = type(model).__name__, inspect.signature(model.forward).parameters
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return f"{name} is an encoder with a decoder, expected a causal language model"
    if not {"input_ids", cache_argument(model)} <= takes.keys() and not {"args", "kwargs"} <= takes.keys():
        return f"{name} takes {', '.join(takes)}, and a causal language model takes a prompt and a cache"
    return f"{name} does not run on the meta device: {in_one_line(error)}" + (f" (in {path})" if path else "")


def to_untouched_memory(model: nn.Module, cache: object) -> None:
    """Move model and cache from the meta device to the CPU, in place. Memory that is never written takes no pages."""
    model.to_empty(device="cpu")
    _replace_tensors(cache, "cpu")


def _replace_tensors(cache: object, device: str) -> None:
    """Replace the tensors of a cache by tensors without values."""
    for slot in getattr(cache, "layers", ()):
        for name, value in vars(slot).items():
            if isinstance(value, torch.Tensor):
                setattr(slot, name, torch.empty(value.shape, dtype=value.dtype, device=device))


def _prefill(model: nn.Module, context: int) -> object:
    ids = torch.zeros(1, context, dtype=torch.long, device="meta")
    with torch.no_grad():
        return cache_of(model(input_ids=ids, use_cache=True))


def _fake_prefill(model: nn.Module, context: int) -> object:
    """Run :func:`_prefill` on fake tensors, for code that reads no values if it detects a trace."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        copied = copy.deepcopy(model)
    with mode:
        cache = _prefill(copied, context)
    _replace_tensors(cache, "meta")
    return cache


@contextmanager
def _watched(model: nn.Module, running: list[tuple[str, nn.Module]]) -> Iterator[None]:
    """Within the block, maintain ``running``: the modules whose forward is in progress, innermost last."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, _, path=path: running.append((path, m))))
        handles.append(module.register_forward_hook(lambda *_: (running.pop(), None)[1]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _holds_attention(module: nn.Module) -> bool:
    """Whether a module may write a cache, because the module or a submodule holds the index of a layer."""
    return any(_INDEX.search(name) for part in module.modules() for name in vars(part))


def _plain(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and isinstance(value, (bool, int, float, str, type(None)))
    }


def _signature(layer: nn.Module) -> object:
    parts = []
    for path, module in layer.named_modules():
        plain = tuple((n, v) for n, v in sorted(_plain(module).items()) if not _INDEX.search(n))
        tensors = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
        parts.append((path, type(module), plain, tensors))
    return tuple(parts)
