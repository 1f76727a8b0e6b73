"""Compare the exported graphs with the original model before the files are published.

The prefill graph reads two prompts of different lengths, so that one prompt is padded on the left. Then the decode
graph runs steps. Each step reads the token that the original chose. In a second comparison, the decode graph also reads
the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mla_compile.capture.causal_lm import CausalLM
from mla_compile.core.cache_argument import cache_argument, cache_of
from mla_compile.errors import ExportError
from mla_compile.onnx.assemble import CacheIO
from mla_compile.onnx.engine import cpu_session, errors, onnxruntime
from mla_compile.onnx.exported import Verification
from mla_compile.onnx.manifest import TOKENS
from mla_compile.onnx.profile import Profile

PROMPTS = (9, 6)
STEPS = 6
# The largest allowed difference of logits, divided by the largest logit. The order of sums matters more in half
# precision.
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}

Array = npt.NDArray[np.generic]


def runs_here(dtype: str, profile: Profile) -> str:
    """Return why ONNX Runtime cannot verify a model of this kind on a CPU, or an empty string."""
    if not profile.cpu:
        return "the paged operator of ONNX Runtime runs on CUDA devices only; the graph was checked for structure"
    if dtype == "bfloat16":
        return "ONNX Runtime has no bfloat16 operators for the CPU; the graph was checked for structure"
    return ""


class TokenReader(Protocol):
    """A graph or program that reads tokens and updates caches."""

    def empty(self, batch: int) -> list[Any]:
        """Return empty caches."""

    def __call__(self, tokens: Mapping[str, Array], caches: Sequence[Any]) -> tuple[Array, list[Any]]:
        """Return logits, and the caches after the call."""


class ProgramRunner:
    """Runs, in torch, the program of a graph that ONNX Runtime cannot run here."""

    def __init__(self, program: torch.export.ExportedProgram, lm: CausalLM) -> None:
        self.module = program.module()
        self.lm = lm
        self.device = next(lm.model.parameters()).device

    def empty(self, batch: int) -> list[torch.Tensor]:
        """Return empty caches."""
        return self.lm.empty(batch)

    def __call__(self, tokens: Mapping[str, Array], caches: Sequence[torch.Tensor]) -> tuple[Array, list[torch.Tensor]]:
        """Return logits, and the caches after the call."""
        given = [torch.from_numpy(tokens[name]).to(self.device) for name in TOKENS]
        with torch.no_grad():
            logits, new = self.module(*given, list(caches))
        return logits.float().cpu().numpy(), list(new)


class Runner:
    """Runs an exported graph on the CPU, with its caches as arrays."""

    def __init__(self, file: Path, caches: Sequence[CacheIO], profile: Profile, dtypes: Sequence[str]) -> None:
        ort = onnxruntime()
        try:
            self.session = cpu_session(ort, str(file))
        except errors(ort) as error:
            raise ExportError(
                f"onnxruntime {ort.__version__} does not load the exported {file.name}: {error}"
            ) from error
        self.failures = errors(ort)
        self.caches = caches
        self.dtypes = dtypes
        self.room = 32 if profile.layout == "in place" else 0

    def empty(self, batch: int) -> list[Array]:
        """Return empty caches. Caches written in place are full of NaN, because unused rows must never be read."""
        made = []
        for cache, dtype in zip(self.caches, self.dtypes, strict=True):
            sizes = [batch, *(self.room if d is None else d for d in cache.shape[1:])]
            made.append(np.full(sizes, np.nan if self.room and cache.grows else 0.0, np.dtype(dtype)))
        return made

    def __call__(self, tokens: Mapping[str, Array], caches: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return logits, and the caches after the call."""
        feeds = dict(tokens) | {c.past: value for c, value in zip(self.caches, caches, strict=True)}
        names = {value.name for value in self.session.get_inputs()}
        try:
            logits, *new = self.session.run(
                ["logits", *(c.present for c in self.caches)], {k: v for k, v in feeds.items() if k in names}
            )
        except self.failures as error:
            raise ExportError(f"onnxruntime fails in the exported graph: {error}") from error
        return logits, new


def verify(
    lm: CausalLM, decode: TokenReader, prefill: TokenReader | None, dtype: str, reason: str = "", *, one_token: bool
) -> Verification:
    """Compare the graphs with the original. Raise :class:`ExportError` if they differ by more than rounding.

    ``reason``: why torch runs the programs instead of ONNX Runtime; empty if ONNX Runtime runs the graphs.
    """
    worst, compared, equal = 0.0, 0, 0
    for reader in [prefill, decode] if prefill is not None else [decode]:
        assert reader is not None
        error, tokens, same = _compare(lm, reader, decode, one_token=one_token)
        worst, compared, equal = max(worst, error), compared + tokens, equal + same
    allowed = TOLERANCE[dtype]
    if not worst <= allowed:  # NaN fails
        raise ExportError(
            f"the exported graph differs from the original by {worst:.2e} of the largest logit, allowed are "
            f"{allowed:.0e}; nothing was written. Report this with the model's config, or export with verify=False"
        )
    return Verification(worst, allowed, compared, equal, reason)


def _compare(lm: CausalLM, reader: TokenReader, decode: TokenReader, *, one_token: bool) -> tuple[float, int, int]:
    B, longest = len(PROMPTS), max(PROMPTS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary(lm.model), (B, longest), generator=generator)
    mask = torch.ones(B, longest, dtype=torch.long)
    for row, length in enumerate(PROMPTS):
        mask[row, : longest - length] = 0
    theirs = _Original(lm)
    caches = reader.empty(B)
    expected = theirs(ids, mask)
    got: Array = np.zeros(0)
    for start in range(longest) if one_token else [0]:
        stop = start + 1 if one_token else longest
        got, caches = reader(_feeds(ids[:, start:stop], mask[:, :stop]), caches)
    worst, equal = _difference(got, expected), _same(got, expected)
    for _ in range(STEPS):
        new = expected.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones(B, 1, dtype=torch.long)], 1)
        expected = theirs(new, mask)
        got, caches = decode(_feeds(new, mask), caches)
        worst = max(worst, _difference(got, expected)) if worst == worst else worst
        equal += _same(got, expected)
    return worst, (STEPS + 1) * B, equal


class _Original:
    """The original model, uncompiled, with its own cache."""

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self.cache: object = None
        self.device = next(lm.model.parameters()).device

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits of each row's last token, float32 [B,vocabulary]."""
        feeds = {name: torch.from_numpy(a).to(self.device) for name, a in _feeds(ids, mask).items()}
        with torch.no_grad():
            out = self.lm.model(**feeds, **{cache_argument(self.lm.model): self.cache}, use_cache=True)
        self.cache = cache_of(out)
        logits: torch.Tensor = out.logits[:, -1].float().cpu()
        return logits


def _feeds(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Array]:
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return {
        "input_ids": ids.numpy(),
        "attention_mask": mask.numpy(),
        "position_ids": np.ascontiguousarray(positions.numpy()),
    }


def _difference(got: Array, expected: torch.Tensor) -> float:
    """Return the largest difference of the last tokens' logits, divided by the original's largest logit."""
    reference = expected.double().numpy()
    return float(np.abs(got[:, -1].astype(np.float64) - reference).max() / np.abs(reference).max())


def _same(got: Array, expected: torch.Tensor) -> int:
    return int((got[:, -1].argmax(-1) == expected.numpy().argmax(-1)).sum())


def vocabulary(model: torch.nn.Module) -> int:
    """Return the number of tokens that a model knows."""
    get: Any = getattr(model, "get_input_embeddings", None)
    embeddings = get() if get is not None else None
    return int(embeddings.weight.shape[0]) if embeddings is not None else 100
