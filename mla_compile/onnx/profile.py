"""How caches enter and leave an exported graph: each profile rewrites the appends to caches in its own way.

========== ===========================================================================================================
portable   ``present = Concat(past, new)``: the graph as exported, for any runtime of opset 21
inplace    ``present = TensorScatter(past, new)``: one buffer with spare rows, of which new tokens take the first
genai      the row [latent, k_rope] in two equal halves, named key and value, as onnxruntime-genai allocates them
ort-paged  pages of rows for ``com.microsoft::PagedAttention``: see :mod:`mla_compile.onnx.paged`
========== ===========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mla_compile.errors import OptionError, nearest

CacheLayout = Literal["appended", "in place", "halves", "pages"]
"""How a profile stores and updates a cache, in the order of the table above."""


@dataclass(frozen=True)
class Profile:
    """One profile: what it does to a cache, and what its files need.

    Attributes:
        layout: the layout of its caches.
        minimum_onnxruntime: the oldest ONNX Runtime that loads the files.
        runner: the program that runs the files, in words, if a :class:`~mla_compile.onnx.session.Session` does not.
            Such a program takes one graph for prompts and steps of any number of tokens, with inputs that it knows by
            name.
        cpu: whether ONNX Runtime has all operators of the profile for the CPU.
        lists: whether its attention can read the rows of listed keys only.
    """

    name: str
    layout: CacheLayout
    opset: int
    minimum_onnxruntime: str
    runner: str = ""
    cpu: bool = True
    lists: bool = True


_GENAI = "onnxruntime-genai runs it: pip install onnxruntime-genai, then onnxruntime_genai.Model(directory)"
_SERVER = "a server that manages pages of a cache on a CUDA device runs it, with onnxruntime-gpu"

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("portable", "appended", 21, "1.20.0"),
        Profile("inplace", "in place", 24, "1.25.0"),
        Profile("genai", "halves", 21, "1.20.0", _GENAI),
        Profile("ort-paged", "pages", 21, "1.29.0", _SERVER, cpu=False, lists=False),
    )
}
RUN_HERE = " or ".join(name for name, profile in PROFILES.items() if not profile.runner)
"""The profiles that a Session runs, in words."""


def find_profile(name: str) -> Profile:
    """Return the profile of that name. Raises :class:`OptionError` for any other name."""
    if name not in PROFILES:
        hint = nearest(name, PROFILES) if isinstance(name, str) else ""
        raise OptionError(f"profile is {name!r}, expected one of {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
