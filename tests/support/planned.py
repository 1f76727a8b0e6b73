"""What ``plan`` says that ranks exchange."""

from __future__ import annotations

from mla_compile.workbench import step_formulas


def context_bytes(batch: int, ranks: int, heads: int, chosen: int = 0) -> float:
    """What a machine receives for a layer, in float32, because the ranks of the heads share a context.

    Of L=64, R=16. ``chosen``: the rows of a list, where an indexer chooses them.
    """
    values = dict.fromkeys((str(letter) for letter in step_formulas.MEANING), 1.0)
    values |= {"B": batch, "H": heads, "L": 64, "R": 16, "P": ranks, "C": ranks, "A": 4}
    values |= {"J": chosen, "M": float(chosen > 0)}
    shared, whole = (
        step_formulas.number(how, "network bytes", values, latent=True) for how in ("context", "replicated")
    )
    return shared - whole
