"""Handles libraries that finish a model in its first call, which then runs uncompiled.

bitsandbytes packs 4-bit weights when a layer first runs on a CPU (``weight.data = packed``). A functional graph cannot
express that, and code that is compiled for the loaded weights fits no later call.
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
    """The first call of a traced copy would replace weights that the copy shares with the user's model."""


class Finishing:
    """The weights of a model that its calls have replaced.

    Attributes:
        allowed: whether weights may be replaced.
        happened: whether any were replaced since this was last set to False.
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
