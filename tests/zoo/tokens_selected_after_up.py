"""Sparse attention that picks its keys after the expansion: top-k by an index score, then gather. Refused: the
selection runs over expanded rows (selecting latents first would be legal)."""

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("token_mixing")
LEGAL = True


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        k = self.join(k, r)
        best = (c @ c[:, -1:].mT).squeeze(-1).topk(min(3, c.shape[1]), dim=1).indices[:, None, :, None]
        k = k.gather(2, best.expand(-1, d.H, -1, d.N + d.R))
        v = v.gather(2, best.expand(-1, d.H, -1, d.V))
        scores = self.queries(x, start) @ k.mT * self.scale
        return self.finish(scores.softmax(-1) @ v), c, r


build = Attention
session = carried
