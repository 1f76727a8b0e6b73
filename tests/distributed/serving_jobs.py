"""What the ranks of tests of continuous batching run: every function is called on each of them, with its rank first."""

from __future__ import annotations

from typing import Any

import mla_compile
from tests.distributed.jobs import EAGER, by_heads, by_transformers
from tests.support import models
from tests.support.serving import alone, prompts, tokens

LENGTHS = (21, 5, 1, 33, 7)


def served(rank: int, family: str, directory: str | None, options: dict[str, Any] = EAGER) -> dict[str, Any]:
    """Requests to all ranks together, and to one process."""
    whole = models.build(family, tie_word_embeddings=False)
    model = by_heads(whole) if directory is None else by_transformers(whole, directory)
    fast = mla_compile.continuous_batching(model, **options)
    ids = prompts(LENGTHS)
    got = tokens(fast, ids, new=8, max_batch_tokens=16)
    one = models.build(family, tie_word_embeddings=False)
    batching = fast.mla_batching
    return {
        "tokens": got == [alone(one, prompt, 8) for prompt in ids],
        "sites": [(str(s.code), s.dims.H, s.decode_flops_after) for s in batching.report.sites],
        "bytes": batching.bytes_of_token,
        "graphs": list(map(str, batching.graphs)),
    }
