"""What tests expect of the torch that runs them."""

from __future__ import annotations

import torch

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether Dynamo is an older one, which breaks more graphs and knows fewer tensor subclasses."""
