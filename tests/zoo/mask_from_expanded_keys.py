"""Padding is recognised by expanded keys that are all zero, as old translation code did. The absorbed form has
no keys to look at: K stays."""

from tests.zoo.base import InPart, Usual, carried

EXPECTED = InPart("values", "mask_depends_on_keys")


class Attention(Usual):
    def attend(self, q, k, v):
        padding = k[..., : self.dims.N].abs().sum(-1) == 0
        scores = (q @ k.mT * self.scale).masked_fill(padding.unsqueeze(2), -1e9)
        return scores.softmax(-1) @ v


build = Attention
session = carried
