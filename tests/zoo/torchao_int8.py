"""torchao's int8 weight-only quantization: weights are tensor subclasses. Legal."""

import pytest

from tests.support.latent_layer import InPrecision
from tests.zoo.base import Absorbed, carried

quantization = pytest.importorskip("torchao.quantization")
EXPECTED = Absorbed()
TOLERANCE = 1e-4


def build(dims):
    layer = InPrecision(dims)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


session = carried
