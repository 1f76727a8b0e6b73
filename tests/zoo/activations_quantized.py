"""W8A8: the latent is rounded to int8 with a scale a token *after* the cache and before the up-projection. Legal: the
absorbed form multiplies the unrounded rows, and is nearer to the model that was quantized."""

import torch.nn.functional as F

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()
TOLERANCE = 2e-2  # of a rounding to 255 steps


class Attention(LatentLayer):
    def expand(self, c):
        d = self.dims
        scale = c.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        digits = (c / scale).round().clamp(-127, 127)
        return self.heads(F.linear(digits * scale, self.up.weight)).split([d.N, d.V], -1)


build = Attention
session = carried
