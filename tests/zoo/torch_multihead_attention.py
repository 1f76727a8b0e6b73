"""nn.MultiheadAttention with kdim = vdim = L over the cached latents: MLA without rotary keys, made of torch's own
module and its F.multi_head_attention_forward. Legal: its biases on K and V come with it."""

import torch
from torch import nn

from tests.zoo.base import Absorbed, Carry, causal, rows

EXPECTED = Absorbed()


class Attention(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = d = dims
        random = dims.random()
        width = 2 * d.L * d.H  # K and V of all heads are wider than the latent
        self.down, self.up = random.linear(d.D, d.L), random.linear(d.D, width)
        self.attention = nn.MultiheadAttention(width, d.H, kdim=d.L, vdim=d.L, batch_first=True, dtype=d.dtype)
        for p in self.attention.parameters():
            p.data = random.tensor(*p.shape)

    def forward(self, x, c_past):
        c = torch.cat([c_past, self.down(x)], 1)
        mask = ~causal(x.shape[1], c.shape[1])
        y, _ = self.attention(self.up(x), c, c, attn_mask=mask, need_weights=False)
        return y[..., : self.dims.D], c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
