"""An in-place write after the expansion: the newest key of every head is set to the query ("attend to self"). Illegal
for K: that row is no image of the latent."""

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "unsupported_op")


class Attention(Usual):
    def attend(self, q, k, v):
        k = k.clone()
        k[:, :, -1] = q[:, :, -1]
        return super().attend(q, k, v)


build = Attention
session = carried
