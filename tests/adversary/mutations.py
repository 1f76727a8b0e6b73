"""All mutations, by name."""

from __future__ import annotations

from tests.adversary import steps, wires  # noqa: F401  each registers its own
from tests.adversary.registry import MUTATIONS, Mutation

__all__ = ["MUTATIONS", "Mutation"]
