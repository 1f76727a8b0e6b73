"""A latent as wide as all K and V together: nothing is compressed, so there is nothing to save. Legal, kept."""

from tests.zoo.base import Carry, Dims, Kept, Usual, rows

EXPECTED = Kept("cost_latent_wide")


def build(dims):
    return Usual(Dims(**{**vars(dims), "L": dims.H * (dims.N + dims.V) + 1}))


def session(module):
    return Carry(module, *rows(module, module.dims.L, module.dims.R))
