"""cos and sin tables are buffers, looked up by position ids that the caller passes; every sequence of the batch has
positions of its own (left padding). Legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Carry, Usual, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        angle = torch.arange(CAPACITY)[:, None] * 0.6 ** torch.arange(dims.R // 2, dtype=dims.dtype)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def turn(self, x, positions):
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[positions].unsqueeze(1) + turned * self.sin[positions].unsqueeze(1)

    def forward(self, x, c_past, r_past, lengths):
        d = self.dims
        B, S, _ = x.shape
        positions = (c_past.shape[1] + torch.arange(S) - lengths[:, None]).clamp(min=0)
        c, r = self.down(x).split([d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c)], 1)
        r = torch.cat([r_past, self.turn(r.unsqueeze(1), positions).squeeze(1)], 1)
        T = c.shape[1]
        q = self.q(x).view(B, S, d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], self.turn(q[..., d.N :], positions)], -1)
        keep = torch.arange(T)[None, None] <= torch.arange(T - S, T)[None, :, None]
        keep = keep & (torch.arange(T) >= lengths[:, None])[:, None]
        k, v = self.expand(c)
        scores = q @ self.join(k, r).mT * self.scale + (~keep).unsqueeze(1).to(x.dtype) * torch.finfo(x.dtype).min
        return self.finish(torch.softmax(scores, -1) @ v), c, r, lengths


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, d.L, d.R), torch.arange(d.B) % 3)
