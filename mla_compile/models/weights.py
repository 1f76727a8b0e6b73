"""How many parameters a model has, and how many of them one token reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mla_compile.errors import InputError
from mla_compile.report.facts import Weights


def weights_of(model: nn.Module) -> Weights:
    """Counts parameters, on any device. Raises :class:`InputError` if a token takes more experts than there are."""
    total = sum(p.numel() for p in model.parameters())
    lookup = 0
    if hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings"):
        owner: Any = model
        try:
            table, head = owner.get_input_embeddings(), owner.get_output_embeddings()
        except NotImplementedError:  # transformers raises it for a model made of several
            table = head = None
        if isinstance(table, nn.Module) and (head is None or head.weight is not table.weight):
            lookup = sum(p.numel() for p in table.parameters())
    config = text_config(model)
    count = first_int(config, ("num_local_experts", "n_routed_experts", "num_experts"))
    top_k = first_int(config, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
    if not count or not top_k:
        return Weights(total, lookup)
    idle = first_int(config, ("zero_expert_num",)) or 0  # experts without weights, which a token may take too
    if top_k > count + idle:
        raise InputError(f"a token takes {top_k} experts by the model's config, and there are {count + idle}")
    experts, unused = _expert_values(model, count, idle)
    return Weights(total - unused, lookup, experts, count, top_k * count / (count + idle))


def _expert_values(model: nn.Module, count: int, idle: int) -> tuple[int, int]:
    """Weights of the routed experts, and weights that some code allocates for experts that have none.

    The experts of a layer are either one tensor or a list of that many modules.
    """
    used = unused = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            used += sum(p.numel() for p in module.parameters())
        for p in module.parameters(recurse=False):
            if p.dim() == 3 and p.shape[0] in (count, count + idle):
                used += p.numel() // p.shape[0] * count
                unused += p.numel() // p.shape[0] * (p.shape[0] - count)
    return used, unused


def text_config(model: nn.Module) -> Any:
    """The config of the language model, if there is one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def first_int(config: Any, names: Iterable[str]) -> int | None:
    """The first of several fields that a config has as a whole number; each family has its own names for them."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), None)
