"""The values of the options that passes read as well as doors."""

from __future__ import annotations

from typing import Literal

Forms = Literal["auto", "absorbed", "expanded"]
Fold = Literal["auto", "never", "always"]
Dequantize = Literal["auto", "once", "step"]
