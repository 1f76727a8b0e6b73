"""K is never joined: the scores of the latent part and of the rotary part are two products, added up before the scale.
Legal."""

from tests.zoo.base import Absorbed, Usual, carried, causal

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k, v = self.expand(c)
        q_n, q_r = self.queries(x, start).split([self.dims.N, self.dims.R], dim=-1)
        scores = q_n.matmul(k.transpose(-1, -2))
        scores = scores + q_r.matmul(r.unsqueeze(1).transpose(-1, -2))
        scores = scores.mul(self.scale).masked_fill(~causal(x.shape[1], c.shape[1]), float("-inf"))
        return self.finish(scores.softmax(-1).matmul(v)), c, r


build = Attention
session = carried
