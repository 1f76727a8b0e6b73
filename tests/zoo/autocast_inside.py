"""torch.autocast around expansion and core. Dynamo's graph does not show the casts, so nothing can be proved of
it; torch.export's does. Refused there, absorbed here."""

import torch

from tests.support.latent_layer import InPrecision
from tests.zoo.base import Absorbed, NotCaptured, carried

TOLERANCE = 0.05
EXPECTED = NotCaptured("autocast is active")
EXPORTED = Absorbed()


class Attention(InPrecision):
    def forward(self, x, c_past, r_past):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, c_past, r_past)


build = Attention
session = carried
