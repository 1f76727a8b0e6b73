"""flex_attention with causality and ALiBi in its score_mod, a function of score and indices. Legal."""

import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        past = k.shape[-2] - q.shape[-2]

        def alibi(score, b, h, i, j):
            return torch.where(i + past >= j, score - 0.1 * (h + 1) * (i + past - j), -torch.inf)

        return flex_attention(q, k, v, score_mod=alibi)


build = Attention
session = carried
