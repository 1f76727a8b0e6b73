"""flex_attention with a block mask made in each call, as torchtitan's models have it. Legal: what its lists of blocks
and its mask_mod hide is a mask like others."""

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        S, T = q.shape[-2], k.shape[-2]
        mask = create_block_mask(lambda b, h, i, j: i + (T - S) >= j, None, None, S, T, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)


build = Attention
session = carried
