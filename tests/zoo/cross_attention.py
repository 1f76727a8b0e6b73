"""An encoder's output is compressed once; the decoder attends to those latents at each step, without a mask and
without rotation. Legal."""

import torch
import torch.nn.functional as F

from tests.zoo.base import Absorbed, Carry, Layer

EXPECTED = Absorbed()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        self.q = self.random.linear(dims.D, dims.H * dims.N, scale=2.0)

    def forward(self, x, memory):
        d = self.dims
        B, S, _ = x.shape
        k, v = self.up(memory).view(B, -1, d.H, d.N + d.V).permute(0, 2, 1, 3).split((d.N, d.V), dim=3)
        o = F.scaled_dot_product_attention(self.q(x).view(B, S, d.H, d.N).transpose(1, 2), k, v)
        return self.out(o.transpose(1, 2).reshape(B, S, -1)), memory


build = Attention


def session(module):
    d = module.dims
    generator = torch.Generator().manual_seed(d.seed)
    return Carry(module, torch.randn(d.B, 13, d.L, generator=generator, dtype=torch.float64).to(d.dtype))
