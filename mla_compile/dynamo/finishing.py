"""Handles libraries that replace weights in a model's first call. That call runs uncompiled.

For example, bitsandbytes packs 4-bit weights when a layer first runs on a CPU (``weight.data = packed``). A functional
graph cannot express that. Code that is compiled for the weights as loaded would fit no later call.
"""

from __future__ import annotations

import logging

from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from mla_compile.core.program import Inputs
from mla_compile.core.shared_state import replaced_weights
from mla_compile.errors import CaptureError

logger = logging.getLogger("mla_compile")


class UnfinishedError(CaptureError):
    """A traced copy's first call would replace weights, and the copy shares its weights with the user's model."""


class Finishing:
    """Keeps track of the weights that calls of a model have replaced.

    Attributes:
        allowed: whether weights may be replaced.
        happened: whether any weights were replaced since this attribute was last set to False.
    """

    def __init__(self) -> None:
        self.allowed = True
        self.happened = False
        self._finished = WeakIdKeyDictionary()

    def takes(self, gm: fx.GraphModule, example_inputs: Inputs) -> bool:
        """Whether ``gm`` has to run uncompiled because it replaces weights for the first time.

        Raises :class:`UnfinishedError` if replacing is not allowed.
        """
        weights = [w for w in replaced_weights(gm, example_inputs) if w not in self._finished]
        if not weights:
            return False
        if not self.allowed:
            raise UnfinishedError(f"the first call replaces {len(weights)} weights: call the model once before")
        self._finished.update(dict.fromkeys(weights))
        self.happened = True
        logger.info("a call replaced %d weights of the model and ran uncompiled; the next is compiled", len(weights))
        return True
