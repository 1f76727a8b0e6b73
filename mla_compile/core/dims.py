"""The letters used everywhere: code, formulas, documentation and error messages.

===== ============================================================ =============
B     batch
S     query tokens in this call
T     tokens attended to (cached and new)
H     attention heads
D     model width
L     latent width, d_c in the papers (kv_lora_rank)                512 in V3
Q     query latent width, d_c' (q_lora_rank)                        1536
N     per-head width of the unrotated part of q and k (qk_nope)     128
R     width of the rotary key shared by all heads (qk_rope)         64
V     per-head value width (v_head_dim)                             128
A     columns of R added to other key columns, not appended        0
G     groups of H heads, each with a latent of its own (else 1)    1
===== ============================================================ =============
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """The sizes of one Multi-head Latent Attention site (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    ``Q`` is the input width of the query projection: the width of the query latent, or the model width if queries are
    not compressed. ``D`` is the model width. ``Q`` and ``D`` are ``None`` if the graph does not show them. ``A`` of the
    ``R`` rotary values are added to other columns of a key instead of being concatenated. There are ``G`` groups of
    ``H`` heads. Each group has these sizes and its own latent.
    """

    H: int
    L: int
    R: int
    N: int
    V: int
    Q: int | None = None
    D: int | None = None
    A: int = 0
    G: int = 1

    @property
    def expanded_values(self) -> int:
        """Values per cached token and group when K and V are stored per head: H(N+R-A+V)."""
        return self.H * (self.N + self.R - self.A + self.V)

    @property
    def latent_values(self) -> int:
        """Values per cached token and group when only the latent and the shared rotary key are stored: L+R."""
        return self.L + self.R

    def __str__(self) -> str:
        shown = {k: getattr(self, k) for k in "HLRNVQD" if getattr(self, k) is not None}
        shown |= {"A": self.A} if self.A else {}
        shown |= {"G": self.G} if self.G > 1 else {}
        return " ".join(f"{k}={v}" for k, v in shown.items())
