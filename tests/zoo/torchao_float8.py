"""torchao's float8 weight-only quantization: weights are tensor subclasses. Legal."""

import pytest

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

quantization = pytest.importorskip("torchao.quantization")
EXPECTED = Absorbed()
TOLERANCE = 1e-6  # torchao multiplies values and scales in float32


def build(dims):
    layer = LatentLayer(dims)
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
    return layer


session = carried
