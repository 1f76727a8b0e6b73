"""K and V get into their buffers by scatter_, whose index is one position for each token, expanded to all its numbers.
Legal."""

from tests.zoo.base import EXPANDED_CACHE, Absorbed, Buffered, at_positions

EXPECTED = Absorbed()
EXPORTED = EXPANDED_CACHE


class Attention(Buffered):
    def __init__(self, dims):
        super().__init__(dims)
        self.hold(*self.empty())

    def forward(self, x, positions):
        B = x.shape[0]
        q, k, v = self.step(x, positions)
        at = positions[None, None, :, None]
        self.k_cache[:B].scatter_(2, at.expand_as(k), k)
        self.v_cache[:B].scatter_(2, at.expand_as(v), v)
        return self.over(q, self.k_cache[:B], self.v_cache[:B], positions)


build, session = Attention, at_positions
