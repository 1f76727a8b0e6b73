"""Calls of the dense op on CPU, compared with the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall

# Relative RMS error and maximum error over the largest value, by latent's dtype: rounding of the result, little more.
TOLERANCE = {
    torch.float64: (1e-14, 1e-13),
    torch.float32: (3e-6, 2e-5),
    torch.bfloat16: (2.5e-3, 5e-3),
    torch.float16: (4e-4, 8e-4),
}


@dataclass(frozen=True)
class Case:
    B: int = 1
    S: int = 1
    H: int = 4
    T: int = 111
    L: int = 48
    R: int = 8
    Lv: int | None = None
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    strided: bool = False
    size: float = 1.0
    scale: float = 0.2
    causal: bool = False
    window: int = 0
    lengths: tuple[int, ...] | None = None

    def tensors(self, seed: int = 0) -> dict[str, Tensor | None]:
        """query, latent, rope, values, seq_lens; ``strided``: the rows are views of a larger cache [B,1,T+5,L+R+3]."""
        g = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.B, 1, self.T + 5, self.L + self.R + 3, generator=g).to(self.dtype)
        rows = rows[:, 0, : self.T, : self.L + self.R]
        latent, rope = rows[..., : self.L], rows[..., self.L :]
        query = self.size * torch.randn(self.B, self.S, self.H, self.L + self.R, generator=g)
        values = None if self.Lv is None else torch.randn(self.B, self.T, self.Lv, generator=g).to(self.dtype)
        if not self.strided:
            latent, rope = latent.contiguous(), rope.contiguous()
        return {
            "query": query.to(self.query_dtype or self.dtype),
            "latent": latent,
            "rope": rope if self.R else None,
            "values": values,
            "seq_lens": None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int32),
        }


def check(case: Case, mask: Tensor | None = None, tensors: dict[str, Tensor | None] | None = None) -> Tensor:
    """Runs the op and the float64 reference on the same values; shapes, infinities and dtypes first, then size."""
    given = case.tensors() if tensors is None else tensors
    how: dict[str, Any] = {"scale": case.scale, "causal": case.causal, "window": case.window}
    out, lse = ops.decode_attention(**given, mask=mask, **how)
    exact = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in given.items()}
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want_out, want_lse = reference.decode_attention(DecodeCall(**exact, mask=wide, **how))
    shown = (case, None if mask is None else (mask.dtype, mask.shape))
    assert out.shape == (case.B, case.S, case.H, case.Lv or case.L), shown
    assert lse.shape == (case.B, case.S, case.H), shown
    assert out.dtype == (case.query_dtype or case.dtype), shown
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32), shown
    assert out.is_contiguous(), shown
    assert lse.is_contiguous(), shown
    assert torch.isfinite(out).all(), shown
    blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), shown
    rms, largest = TOLERANCE[case.dtype]
    if case.dtype in (torch.float32, torch.float64):  # the softmax turns a score's absolute error into a relative one
        growth = max(1.0, case.size * case.scale / 0.2)
        rms, largest = rms * growth, largest * growth
    error = out.double() - want_out
    assert error.norm() <= rms * want_out.norm(), shown
    assert error.abs().max() <= largest * want_out.abs().max(), shown
    lse_error = ((lse - want_lse) / (1 + want_lse.abs())).masked_fill(blind, 0.0)
    assert lse_error.abs().max() <= (1e-13 if case.dtype == torch.float64 else 1e-5), shown
    return out


def keys_before(T: int, *counts: int) -> Tensor:
    """[B,1,1,T] bool: batch entry b sees its first counts[b] keys."""
    return torch.stack([torch.arange(T) < n for n in counts])[:, None, None]
