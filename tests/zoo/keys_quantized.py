"""Fake quantization of the expanded keys (KIVI, QServe): the scale is that of the token, and
rounding is no linear map. Illegal for K."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import InPart, carried

EXPECTED = InPart("values", "nonlinear")


class Attention(LatentLayer):
    def join(self, k, r):
        scale = k.abs().amax(-1, keepdim=True) / 127
        return super().join((k / scale).round() * scale, r)


build = Attention
session = carried
