"""The values of options that both the passes and the entry points read."""

from __future__ import annotations

from typing import Literal

Forms = Literal["auto", "absorbed", "expanded"]
Fold = Literal["auto", "never", "always"]
Dequantize = Literal["auto", "once", "step"]
