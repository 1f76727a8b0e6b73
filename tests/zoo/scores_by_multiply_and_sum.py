"""No matrix products between activations: scores are `(q * k).sum(-1)` over an axis that was unsqueezed, the output is
`(p * v).sum`. People write it to see what happens. Legal."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def attend(self, q, k, v):
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * self.scale
        probs = scores.masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf")).softmax(-1)
        return (probs.unsqueeze(-1) * v.unsqueeze(2)).sum(dim=3)


build = Attention
session = carried
