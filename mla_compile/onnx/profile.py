"""The profiles of exported graphs. A profile defines the form of the caches, and how new rows are appended to them.

========== ===========================================================================================================
portable   ``present = Concat(past, new)``: the graph as exported, for any runtime of opset 21
inplace    ``present = TensorScatter(past, new)``: one buffer, whose first spare rows receive the new rows
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
    """One profile: the form of its caches, and what its files need.

    Attributes:
        layout: the layout of the caches.
        minimum_onnxruntime: the oldest ONNX Runtime that loads the files.
        runner: a description of another program that runs the files; empty if a
            :class:`~mla_compile.onnx.session.Session` runs them. Such a program finds inputs by name, and needs a
            single graph for prompts and steps of any number of tokens.
        cpu: whether ONNX Runtime has all operators of the profile for the CPU.
        lists: whether the attention can read only the rows of listed keys.
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
"""The names of the profiles that a Session runs, for messages."""


def find_profile(name: str) -> Profile:
    """Return the profile called ``name``. Raises :class:`OptionError` if there is none."""
    if name not in PROFILES:
        hint = nearest(name, PROFILES) if isinstance(name, str) else ""
        raise OptionError(f"profile is {name!r}, expected one of {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
