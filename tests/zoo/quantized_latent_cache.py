"""The cache holds int8 codes of the latents with a scale per token; they are dequantized before the up-projection.
Legal: the dequantized latent is the row."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, codes, scales, r_past):
        start = codes.shape[1]
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        c = self.norm(c)
        scale = c.abs().amax(-1, keepdim=True) / 127
        codes = torch.cat([codes, (c / scale).round().to(torch.int8)], 1)
        scales = torch.cat([scales, scale], 1)
        r = torch.cat([r_past, rope(r, torch.arange(start, start + x.shape[1]))], 1)
        k, v = self.expand(codes.to(x.dtype) * scales)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), codes, scales, r


build = Attention


def session(module):
    d = module.dims
    codes = torch.zeros(d.B, 0, d.L, dtype=torch.int8)
    return Carry(module, codes, torch.zeros(d.B, 0, 1, dtype=d.dtype), torch.zeros(d.B, 0, d.R, dtype=d.dtype))
