"""F.multi_head_attention_forward that also returns the averaged probabilities, over a latent. Its scores
are one operator with their mask (baddbmm), which is taken apart. Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.base import Absorbed, Carry, causal, rows

EXPECTED = Absorbed()


class Attention(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = d = dims
        random = dims.random()
        self.width = E = 2 * d.L * d.H
        self.down, self.up = random.linear(d.D, d.L), random.linear(d.D, E)
        self.w_q, self.w_k, self.w_v = random.weight(E, E), random.weight(E, d.L), random.weight(E, d.L)
        self.out, self.bias = random.linear(E, d.D), random.weight(3 * E)
        self.w_o = random.weight(E, E)

    def forward(self, x, c_past):
        c = torch.cat([c_past, self.down(x)], 1)
        sequence_first = c.transpose(0, 1)
        y, weights = F.multi_head_attention_forward(
            self.up(x).transpose(0, 1), sequence_first, sequence_first, self.width, self.dims.H, None, self.bias,
            None, None, False, 0.0, self.w_o, None, training=False, attn_mask=~causal(x.shape[1], c.shape[1]),
            use_separate_proj_weight=True, q_proj_weight=self.w_q, k_proj_weight=self.w_k, v_proj_weight=self.w_v,
        )  # fmt: skip
        return self.out(y.transpose(0, 1)) + weights.amax(-1, keepdim=True), c


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L))
