"""Lists the weights of a model, and counts all parameters and the parameters of routed experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mla_compile.errors import InputError
from mla_compile.report.facts import Weights


@dataclass(frozen=True)
class Tensor:
    """One weight as a checkpoint stores it, or ``copies`` weights of one shape.

    A checkpoint has one weight for each routed expert, and separate weights for gate and up.

    Attributes:
        module: the path of the module under which a checkpoint stores the weight; for experts, the first expert's path.
        shape: outputs and inputs of a matrix.
        linear: whether a linear layer has the weight. Other weights (embeddings, norms) are not quantized.
        expert: whether the weight belongs to a routed expert.
        table: whether the weight is the input embedding, and is not also the output projection.
        head: whether the weight is the output projection.
    """

    module: str
    shape: tuple[int, ...]
    copies: int = 1
    linear: bool = False
    expert: bool = False
    table: bool = False
    head: bool = False

    @property
    def values(self) -> int:
        """The number of values of all copies."""
        return torch.Size(self.shape).numel() * self.copies


def tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    """Return all weights of a model on any device. Tied weights are listed once. Weightless experts are left out."""
    count, idle = _experts(model)
    table, head = _embeddings(model)
    lists = _lists_of_experts(model, count, idle)
    found: list[Tensor] = []
    for path, parameter in model.named_parameters():
        module, _, name = path.rpartition(".")
        owner = model.get_submodule(module)
        if _stacked(parameter, count, idle):
            found += _unstacked(module, name, parameter, count)
            continue
        found.append(
            Tensor(
                module,
                tuple(parameter.shape),
                linear=isinstance(owner, nn.Linear) and name == "weight",
                expert=any(module.startswith(f"{experts}.") for experts in lists),
                table=_within(module, table),
                head=_within(module, head),
            )
        )
    return tuple(found)


def _lists_of_experts(model: nn.Module, count: int, idle: int) -> list[str]:
    """Return the paths of module lists with one item per expert. A list of layers of equal length is left out."""
    lists = {p: m for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    return [
        path
        for path, modules in lists.items()
        if not any(other.startswith(f"{path}.") for other in lists)
        and not any(_stacked(parameter, count, idle) for parameter in modules.parameters())
    ]


def _stacked(parameter: nn.Parameter, count: int, idle: int) -> bool:
    """Whether a parameter holds one matrix for each expert of a layer."""
    return count > 0 and parameter.dim() == 3 and parameter.shape[0] in (count, count + idle)


def _unstacked(module: str, name: str, parameter: nn.Parameter, count: int) -> Iterator[Tensor]:
    """Yield the matrices in a tensor that stacks all experts. ``gate_up_proj`` also concatenates gate and up."""
    joined = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    rows, columns = parameter.shape[1] // len(joined), parameter.shape[2]
    for part in joined:
        yield Tensor(f"{module}.0.{part}", (rows, columns), count, linear=True, expert=True)


def _within(path: str, outer: str | None) -> bool:
    return outer is not None and f"{path}.".startswith(f"{outer}.")


def _embeddings(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the paths of the input embedding (None if tied) and the output projection. An unknown path is None."""
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")):
        return None, None
    owner: Any = model
    try:
        table, head = owner.get_input_embeddings(), owner.get_output_embeddings()
    except NotImplementedError:  # transformers raises this for a model that consists of several models
        return None, None
    tied = head is not None and isinstance(table, nn.Module) and head.weight is table.weight
    paths = {id(module): path for path, module in model.named_modules()}
    return (None if tied else paths.get(id(table))), paths.get(id(head))


def weights_of(model: nn.Module, tensors: Iterable[Tensor] | None = None) -> Weights:
    """Count a model's parameters on any device. Raises :class:`InputError` if a token takes more experts than exist."""
    tensors = tuple(tensors_of(model) if tensors is None else tensors)
    total, lookup = sum(t.values for t in tensors), sum(t.values for t in tensors if t.table)
    _, head = _embeddings(model)
    projection = None if head is None else model.get_submodule(head)
    vocabulary = projection.out_features if isinstance(projection, nn.Linear) else 0
    count, idle = _experts(model)
    top_k = first_int(text_config(model), ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
    if not count or not top_k:
        return Weights(total, lookup, vocabulary=vocabulary)
    if top_k > count + idle:
        raise InputError(f"a token takes {top_k} experts by the model's config, and there are {count + idle}")
    experts = sum(t.values for t in tensors if t.expert)
    return Weights(total, lookup, experts, count, top_k * count / (count + idle), vocabulary)


def _experts(model: nn.Module) -> tuple[int, int]:
    """Return the number of routed experts in a layer, and the number of weightless experts.

    A token may take a weightless expert instead of a routed one. Some models allocate memory for weightless experts.
    """
    config = text_config(model)
    count = first_int(config, ("num_local_experts", "n_routed_experts", "num_experts"))
    return count or 0, first_int(config, ("zero_expert_num",)) or 0


def text_config(model: nn.Module) -> object:
    """Return the config of the language model, if there is one."""
    config: object = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def first_int(config: object, names: Iterable[str]) -> int | None:
    """Return the first integer among several config fields. Model families use different names for one field."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), None)
