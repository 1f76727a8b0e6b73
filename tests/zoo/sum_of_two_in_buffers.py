"""Keys and values that are sums of images of two rows (the latent and a nonlinear branch of it), kept per head in
buffers of the layer: both rows take their place, with both weights."""

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_positions

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty())
        self.beside = self.random.linear(dims.L, 2)
        self.beside_up = self.random.linear(2, dims.H * (dims.N + dims.V))

    def expand(self, c):
        d = self.dims
        kv = self.up(c) - self.beside_up(self.beside(c).sigmoid())
        k, v = kv.unflatten(-1, (d.H, -1)).transpose(1, 2).split([d.N, d.V], -1)
        return k, v

    def forward(self, x, positions):
        q, k, v = self.step(x, positions)
        self.k_cache[: x.shape[0], :, positions] = k
        self.v_cache[: x.shape[0], :, positions] = v
        return self.over(q, self.k_cache[: x.shape[0]], self.v_cache[: x.shape[0]], positions)


build, session = Attention, at_positions
