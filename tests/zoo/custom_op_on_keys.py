"""A custom operator of somebody's library between the up-projection and the core: what it does is unknown. Refused."""

import torch

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Refused, carried

EXPECTED = Refused("unsupported_op")


@torch.library.custom_op("mla_zoo::layout", mutates_args=())
def layout(k: torch.Tensor) -> torch.Tensor:
    return k.clone()


@layout.register_fake
def _(k):
    return torch.empty_like(k)


class Attention(LatentLayer):
    def attend(self, q, k, v):
        return super().attend(q, layout(k), layout(v))


build = Attention
session = carried
