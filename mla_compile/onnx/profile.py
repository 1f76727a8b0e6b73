"""How caches go in and out of an exported graph: each profile rewrites their appends in its own way.

========== ===========================================================================================================
portable   ``present = Concat(past, new)``: what the graph is exported as; any runtime of opset 21
inplace    ``present = TensorScatter(past, new)``: one buffer with room for more rows, ``total`` of them in use
genai      the row [latent, k_rope] in two equal halves, named key and value, as onnxruntime-genai allocates them
ort-paged  pages of rows for ``com.microsoft::PagedAttention``: see :mod:`mla_compile.onnx.paged`
========== ===========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_compile.errors import OptionError, nearest


@dataclass(frozen=True)
class Profile:
    """What files of a profile need: the opset, and the oldest ONNX Runtime that loads them."""

    name: str
    opset: int
    minimum_onnxruntime: str


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("portable", 21, "1.20.0"),
        Profile("inplace", 24, "1.25.0"),
        Profile("genai", 21, "1.20.0"),
        Profile("ort-paged", 21, "1.29.0"),
    )
}


def find_profile(name: str) -> Profile:
    """The profile of that name. Raises :class:`OptionError` for any other name."""
    if name not in PROFILES:
        hint = nearest(name, PROFILES) if isinstance(name, str) else ""
        raise OptionError(f"profile is {name!r}, expected one of {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
