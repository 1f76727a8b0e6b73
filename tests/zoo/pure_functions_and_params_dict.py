"""Haiku style: the model is pure functions, and a nested dict of weights is handed to each of them. Legal."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.base import Absorbed, Carry, causal, rope, rows

EXPECTED = Absorbed()


def project(params, x):
    return F.linear(x, params["w"], params.get("b"))


def attention(params, d, x, c_past, r_past):
    positions = torch.arange(c_past.shape[1], c_past.shape[1] + x.shape[1])
    q_nope, q_rope = project(params["q"], x).unflatten(-1, (d.H, -1)).transpose(1, 2).split([d.N, d.R], -1)
    q = torch.cat([q_nope, rope(q_rope, positions)], -1)
    c = torch.cat([c_past, project(params["c"], x)], 1)
    r = torch.cat([r_past, rope(project(params["r"], x), positions)], 1)
    k = project(params["k"], c).unflatten(-1, (d.H, -1)).transpose(1, 2)
    v = project(params["v"], c).unflatten(-1, (d.H, -1)).transpose(1, 2)
    k = torch.cat([k, r[:, None].expand(-1, d.H, -1, -1)], -1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[-2], k.shape[-2]))
    return project(params["out"], o.transpose(1, 2).flatten(2)), c, r


class Holder(nn.Module):
    """Holds the weights for torch, and does nothing else."""

    def __init__(self, dims):
        super().__init__()
        self.dims = d = dims
        random = dims.random()
        sizes = {"q": (d.H * (d.N + d.R), d.D), "c": (d.L, d.D), "r": (d.R, d.D), "k": (d.H * d.N, d.L)}
        sizes |= {"v": (d.H * d.V, d.L), "out": (d.D, d.H * d.V)}
        self.params = nn.ModuleDict({n: nn.ParameterDict({"w": random.weight(*s)}) for n, s in sizes.items()})
        self.params["k"]["b"] = random.weight(d.H * d.N)
        self.params["v"]["b"] = random.weight(d.H * d.V)

    def forward(self, x, c_past, r_past):
        return attention({n: dict(p) for n, p in self.params.items()}, self.dims, x, c_past, r_past)


build = Holder


def session(module):
    return Carry(module, *rows(module, module.dims.L, module.dims.R))
