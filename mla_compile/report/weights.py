"""How many parameters a model has, and how many of them a token reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from mla_compile.errors import InputError


@dataclass(frozen=True)
class Weights:
    """Parameters, in values.

    Attributes:
        total: all of them, tied ones once.
        lookup: the input embedding, of which a token reads one row; 0 where it is the output projection too.
        experts: all routed experts of all layers.
        expert_count, expert_top_k: routed experts per layer, and how many of them a token takes on average.
    """

    total: int
    lookup: int = 0
    experts: int = 0
    expert_count: int = 1
    expert_top_k: float = 1.0

    @property
    def dense(self) -> int:
        """Read by every token: neither routed experts nor the input embedding."""
        return self.total - self.experts - self.lookup

    @property
    def active(self) -> int:
        """Read for one token, routed experts included."""
        return self.dense + round(self.experts * self.expert_top_k / self.expert_count)


def weights_of(model: nn.Module) -> Weights:
    """Count the parameters of a model, on any device. Raises :class:`InputError` for a token of too many experts."""
    total = sum(p.numel() for p in model.parameters())
    lookup = 0
    if hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings"):
        owner: Any = model
        try:
            table, head = owner.get_input_embeddings(), owner.get_output_embeddings()
        except NotImplementedError:  # transformers, of a model that is made of several
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
    """Weights of the routed experts, and those that some code allocates for experts that have none.

    All experts of a layer are one tensor, or a list of as many modules.
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
    """The config of the language model, where there is one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def first_int(config: Any, names: Iterable[str]) -> int | None:
    """The first of several fields that a config has as a whole number: each family has its own names."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), None)
