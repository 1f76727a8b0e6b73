"""torch.utils.checkpoint around expansion and core, left in for inference. Legal: without gradients it only calls."""

from torch.utils.checkpoint import checkpoint

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def core(self, q, c, r):
        k, v = self.expand(c)
        return self.attend(q, self.join(k, r), v)

    def forward(self, x, c_past, r_past):
        q, c, r = self.rows(x, c_past, r_past)
        o = checkpoint(self.core, q, c, r, use_reentrant=False)
        return self.finish(o), c, r


build = Attention
session = carried
