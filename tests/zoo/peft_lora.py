"""peft's LoRA on the up-projection, not merged. Legal."""

import pytest

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

peft = pytest.importorskip("peft")
EXPECTED = Absorbed()


def build(dims):
    layer = LatentLayer(dims)
    layer = peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_alpha=3, target_modules=["up"]), layer)
    adapter = layer.up.lora_B["default"].weight
    adapter.data = layer.random.tensor(*adapter.shape)
    layer.up.lora_A["default"].weight.data = layer.random.tensor(2, dims.L)
    return layer.to(dims.dtype)


session = carried
