"""A latent as wide as all K and V together: nothing is compressed, but its rows are cached in any case."""

from tests.zoo.base import Absorbed, Carry, Dims, Usual, rows

EXPECTED = Absorbed()


def build(dims):
    return Usual(Dims(**{**vars(dims), "L": dims.H * (dims.N + dims.V) + 1}))


def session(module):
    return Carry(module, *rows(module, module.dims.L, module.dims.R))
