"""torch.func.vmap within torch.autocast. Batched tensors exist only below the dispatcher, where autocast has cast
already: which casts belong to which operator cannot be told, so it is refused."""

import torch

from tests.zoo import vmap_over_batch
from tests.zoo.base import NotCaptured, carried

TOLERANCE = 0.05
EXPECTED = NotCaptured("autocast is active, and its casts of the batched tensors")
EXPORTED = NotCaptured("cannot be made functional")


class Attention(vmap_over_batch.Attention):
    dtype = torch.float32

    def forward(self, x, c_past, r_past):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, c_past, r_past)


build = Attention
session = carried
