"""torch.autocast around expansion and core. Its casts are written out when the graph is captured."""

import torch

from tests.support.latent_layer import InPrecision
from tests.zoo.base import Absorbed, carried

TOLERANCE = 0.05
EXPECTED = Absorbed()


class Attention(InPrecision):
    def forward(self, x, c_past, r_past):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, c_past, r_past)


build = Attention
session = carried
