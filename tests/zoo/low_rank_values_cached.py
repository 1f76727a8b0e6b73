"""Low-rank values beside ordinary rotated keys, both cached per head as a DynamicCache does it (Palu in Llama's code).
V is kept as the rows that it is made of, which are absorbed; K stays what it is."""

import torch
import torch.nn.functional as F

from tests.zoo.base import EXPANDED_CACHE, Carry, InPart, causal, rope
from tests.zoo.values_of_low_rank import Attention as LowRank

EXPECTED = InPart("values", "not_mla")
EXPORTED = EXPANDED_CACHE


class Attention(LowRank):
    def forward(self, x, k_past=None, v_past=None):
        d, S = self.dims, x.shape[1]
        start = 0 if k_past is None else k_past.shape[2]
        positions = torch.arange(start, start + S)
        q, k = (rope(w(x).unflatten(-1, (d.H, -1)).transpose(1, 2), positions) for w in (self.q, self.k))
        v = self.up(self.down(x)).unflatten(-1, (d.H, d.V)).transpose(1, 2)
        if k_past is not None:
            k, v = torch.cat([k_past, k], 2), torch.cat([v_past, v], 2)
        mask = causal(S, k.shape[2]) if S > 1 else None
        return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), k, v


build, session = Attention, Carry
