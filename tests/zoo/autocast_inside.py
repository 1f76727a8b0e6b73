"""torch.autocast around expansion and core. Nothing can be proved of casts that the graph does not show."""

import torch

from tests.latent_layer import InPrecision
from tests.zoo.base import Refused, carried

TOLERANCE = 0.05
EXPECTED = Refused("unsupported_op")


class Attention(InPrecision):
    def forward(self, x, c_past, r_past):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, c_past, r_past)


build = Attention
session = carried
