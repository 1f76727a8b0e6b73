"""The processes that serve one model together, started by torchrun.

All processes load the same model, compile the same graphs and run the same steps. Only the first process listens. The
scheduler of transformers distributes requests to the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mla_compile.errors import OptionError
from mla_compile.serving.settings import Settings


@dataclass(frozen=True)
class ServerRanks:
    """This rank's ``number`` among ``count`` ranks.

    ``tensor``: how many ranks share weights. ``context``: how many ranks share rows. Ranks that share rows either share
    weights, too, or have a copy each.
    """

    number: int = 0
    count: int = 1
    tensor: int = 1
    context: int = 1

    @classmethod
    def of(cls, settings: Settings) -> ServerRanks:
        """Return the ranks of torchrun. Raises :class:`OptionError` if ``settings`` specify other ranks."""
        started = dist.is_available() and dist.is_torchelastic_launched()
        number, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if started else (0, 1)
        context = settings.context_parallel
        tensor = count if settings.tensor_parallel is None else settings.tensor_parallel
        if not (tensor == count and tensor % context == 0) and (tensor, context) != (1, count):
            raise OptionError(
                f"tensor_parallel is {tensor} and context_parallel {context} of {count} in all: expected that all ranks"
                " hold the weights together, in groups that share rows, or that all have copies (tensor_parallel=1) and"
                f" share rows; `torchrun --nproc-per-node {max(tensor, context)} -m mla_compile serve` starts them"
            )
        kind = _device_kind()
        if count > 1 and settings.device not in ("auto", kind):
            raise OptionError(f"device is {settings.device!r}, expected auto: each of several ranks has its own")
        return cls(number, count, tensor, context)

    def placed(self) -> dict[str, object]:
        """Return the arguments of ``from_pretrained`` that place the weights of this rank."""
        from transformers.distributed import DistributedConfig

        if self.tensor > 1:
            return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=self.tensor)}
        kind = _device_kind()
        return {"device_map": kind if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"}

    def sharing(self) -> dict[str, DeviceMesh]:
        """Return the option of :func:`mla_compile.continuous_batching` that makes ranks share rows."""
        if self.context == 1:
            return {}
        groups = init_device_mesh(
            _device_kind(), (self.count // self.context, self.context), mesh_dim_names=("groups", "context")
        )
        return {"context_parallel": groups["context"]}


def _device_kind() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type
