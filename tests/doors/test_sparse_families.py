"""Models whose indexer chooses the keys of each query: decode steps read the chosen rows, and tokens stay the same."""

from __future__ import annotations

import pytest
import torch

import mla_compile
from tests.support import models
from tests.support.tiers import also

INDEXED = {"deepseek_v32": 2, "glm_moe_dsa": 3, "axk2": 2, "hy_v4": 3, "mistral_large4": 3, "dots3_note": 2}
"""How many attentions of each model have lists of keys."""


# Eager attention fills in the lowest finite number, also in rows of padding, which see no key.
# By default, test_property_sparse.py and the zoo have small modules with an indexer; test_chosen.py has that number.
CASES = [
    *also(
        "family",
        ("deepseek_v32, one layer", "eager", "static", 4),
        *((family, "sdpa", "dynamic", 12) for family in ("deepseek_v32", "glm_moe_dsa", "dots3_note")),
        *((family, "sdpa", "dynamic", 12) for family in ("axk2", "mistral_large4")),
        ("deepseek_v32", "sdpa", "static", 12),
        ("deepseek_v32", "eager", "dynamic", 24),
        ("hy_v4", "eager", "dynamic", 12),
    ),
]


@pytest.mark.parametrize(("family", "attn", "cache", "steps"), CASES)
def test_steps_read_the_listed_rows_and_tokens_stay(family, attn, cache, steps):
    torch.compiler.reset()
    family, _, one_layer = family.partition(", ")
    model = models.build(family, attn=attn, **({"num_hidden_layers": 1} if one_layer else {}))
    inputs = models.prompt(length=13, pad=5)
    with torch.no_grad():
        expected, _ = models.greedy(model, inputs, steps=steps, cache=cache)
        fast = mla_compile.optimize(model, codegen="eager", strict=True)
        got, _ = models.greedy(fast, inputs, steps=steps, cache=cache)
    assert torch.equal(got, expected)
    sites = [site for site in fast.mla_report.sites if site.chosen is not None]
    assert len({site.where.module for site in sites}) == (1 if one_layer else INDEXED[family]), sites
    assert all(site.verdict == "absorbed" for site in sites)
    # Layers that take the keys of the layer before were chosen for by the same scores.
    assert {site.choosing_fused for site in sites} <= {True, None}, "an indexer is left as the model writes it"
