"""`output_attentions=True`: the weights are returned too. Legal: they are still made, over the latent rows."""

from tests.zoo.base import Absorbed, Carry, Usual, causal, rows

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past, _=None):
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        scores = self.queries(x, start) @ self.join(k, r).mT * self.scale
        weights = scores.masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf")).softmax(-1)
        return self.finish(weights @ v), c, r, weights


build = Attention


def session(module):
    return Carry(module, *rows(module, module.dims.L, module.dims.R))
