"""Check that a model can serve a request: its prompts, its number of new tokens, and the tokens that end a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mla_compile.errors import InputError, OptionError
from mla_compile.onnx.manifest import Manifest


def check_prompts(manifest: Manifest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise :class:`InputError` unless every prompt is a list of token ids that the model can read."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise InputError(f"prompts is {prompts!r}, expected a list with at least one list of token ids")
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
            todo = "tokenize it first" if isinstance(prompt, str) else "convert it with .tolist()"
            raise InputError(f"prompt {row} is {type(prompt).__name__}, expected a list of token ids; {todo}")
        if not prompt:
            raise InputError(f"prompt {row} is empty, expected at least one token id")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InputError(f"prompt {row} holds {token!r}, expected whole numbers")
            if not 0 <= token < manifest.vocab_size:
                raise InputError(f"prompt {row} holds {token}, expected ids from 0 to {manifest.vocab_size - 1}")
        if manifest.max_position is not None and len(prompt) > manifest.max_position:
            raise InputError(f"prompt {row} has {len(prompt)} tokens, the model reads at most {manifest.max_position}")


def check_lengths(manifest: Manifest, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> None:
    """Raise :class:`OptionError` unless each row's prompt and new tokens fit into the model's positions.

    The model does not read the last new token, so this token needs no position.
    """
    if len(new_tokens) != len(prompts):
        raise OptionError(
            f"max_new_tokens has {len(new_tokens)} entries, expected one for each of {len(prompts)} prompts"
        )
    for row, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionError(f"max_new_tokens is {count!r}, expected a whole number of at least 1")
        needed = len(prompt) + count - 1
        if manifest.max_position is not None and needed > manifest.max_position:
            raise OptionError(
                f"prompt {row} has {len(prompt)} tokens, with {count} new ones it needs {needed} positions; the model "
                f"has {manifest.max_position}: max_new_tokens may be at most {manifest.max_position - len(prompt) + 1}"
            )


def eos_ids(manifest: Manifest, given: Sequence[int] | None) -> frozenset[int]:
    """Return the tokens that end a row: ``given``, or the manifest's if ``given`` is None."""
    if given is None:
        return frozenset(manifest.eos_token_ids)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < manifest.vocab_size:
            raise OptionError(f"eos_token_ids holds {token!r}, expected ids from 0 to {manifest.vocab_size - 1}")
    return frozenset(given)
