"""JAX habits: projections by einsum with weights [in, heads, width], heads last, scores by einsum.
Legal."""

import torch

from tests.zoo.base import Absorbed, Layer, carried, causal, rope

EXPECTED = Absorbed()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        d, r = dims, self.random
        self.w_qn, self.w_qr = r.weight(d.D, d.H, d.N), r.weight(d.D, d.H, d.R)
        self.w_c, self.w_r = r.weight(d.D, d.L, scale=0.4), r.weight(d.D, d.R, scale=0.4)
        self.w_k, self.w_v = r.weight(d.L, d.H, d.N), r.weight(d.L, d.H, d.V)
        self.w_o = r.weight(d.H, d.V, d.D, scale=0.3)

    def forward(self, x, c_past, r_past):
        positions = torch.arange(c_past.shape[1], c_past.shape[1] + x.shape[1])
        q_n = torch.einsum("bsd,dhn->bshn", x, self.w_qn)
        q_r = rope(torch.einsum("bsd,dhr->bhsr", x, self.w_qr), positions)
        c = torch.cat([c_past, self.norm(torch.einsum("bsd,dl->bsl", x, self.w_c))], 1)
        r = torch.cat([r_past, rope(torch.einsum("bsd,dr->bsr", x, self.w_r), positions)], 1)
        k = torch.einsum("btl,lhn->bthn", c, self.w_k)
        v = torch.einsum("btl,lhv->bthv", c, self.w_v)
        scores = torch.einsum("bshn,bthn->bhst", q_n, k) + torch.einsum("bhsr,btr->bhst", q_r, r)
        scores = torch.where(causal(x.shape[1], c.shape[1]), scores * self.scale, float("-inf"))
        o = torch.einsum("bhst,bthv->bshv", torch.softmax(scores, dim=-1), v)
        return torch.einsum("bshv,hvd->bsd", o, self.w_o), c, r


build = Attention
session = carried
