"""The rotary key is a head of its own, copied to all heads by repeat_interleave (`repeat_kv` habits). Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def join(self, k, r):
        r = r[:, :, None, :].transpose(1, 2)
        return torch.cat([k, torch.repeat_interleave(r, k.shape[1], dim=1)], dim=-1)


build = Attention
session = carried
