"""Linear layers whose weight, or whose rows, are quantized, by hand and in as many spellings as people use."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile

H, N, V, L, R, T, B = 4, 32, 24, 64, 16, 40, 2


class Int8(nn.Module):
    """Weights [out, in] in int8 with a scale for each row; ``product`` says how rows meet them."""

    def __init__(self, product: Callable[[Int8, Tensor], Tensor], out: int = H * (N + V), width: int = L) -> None:
        super().__init__()
        weight = torch.randn(out, width) / width**0.5
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self, x)

    def dense(self) -> Tensor:
        """The weight that the layer stands for [out, in], in float64."""
        return self.weight.double() * self.scale.double()[:, None]


class Attention(nn.Module):
    """K and V of all heads by one up-projection from a latent, rotary keys beside it."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, q: Tensor, latent: Tensor, rotary: Tensor) -> Tensor:
        return attention(q, self.up(latent), rotary)


def attention(q: Tensor, kv: Tensor, rotary: Tensor) -> Tensor:
    """An attention [B,H,S,V] over up-projected rows [B,T,H(N+V)] and rotary keys [B,T,R]."""
    k, v = kv.unflatten(-1, (H, N + V)).transpose(1, 2).split([N, V], -1)
    k = torch.cat([k, rotary[:, None].expand(-1, H, -1, -1)], -1)
    return F.scaled_dot_product_attention(q, k, v)


def exact(weight: Tensor) -> Tensor:
    """The attention over :func:`inputs` with a dense weight [H(N+V),L], in float64."""
    q, latent, rotary = (x.double() for x in inputs())
    return attention(q, latent @ weight.double().T, rotary)


def inputs(dtype: torch.dtype = torch.bfloat16, batch: int = B, tokens: int = T, seed: int = 1) -> tuple[Tensor, ...]:
    """Queries [B,H,1,N+R], latents [B,T,L], rotary keys [B,T,R]; the rows differ in size by a factor of a thousand."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (3 * torch.rand(batch, tokens, 1, generator=generator) - 2)
    shapes = ((batch, H, 1, N + R), (batch, tokens, L), (batch, tokens, R))
    q, latent, rotary = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), (latent * size).to(dtype), rotary.to(dtype)


def optimized(
    layer: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[nn.Module, Tensor, Tensor]:
    """An attention with ``layer``, absorbed where it may be; its result, and that of the original."""
    torch._dynamo.reset()
    module = Attention(layer).eval()
    given = inputs(dtype)
    fast = mla_compile.optimize(module, **{"codegen": "eager", "forms": "absorbed", "strict": True, **options})
    with torch.no_grad(), warnings.catch_warnings():
        # Said of attentions that are refused, as some have to be.
        warnings.filterwarnings("ignore", "nothing was absorbed", mla_compile.MlaCompileWarning)
        before = module(*given)
        return fast, fast(*given), before


def error(result: Tensor, truth: Tensor) -> float:
    """Relative RMS error against a truth in float64."""
    return float((result.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
