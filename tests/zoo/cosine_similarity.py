"""Keys and queries are scaled to length one (cosine attention). Illegal for K."""

import torch.nn.functional as F

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "nonlinear")


class Attention(Usual):
    def attend(self, q, k, v):
        return super().attend(10 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)


build = Attention
session = carried
