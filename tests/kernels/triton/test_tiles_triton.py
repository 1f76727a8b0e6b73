"""Masks as lists of tiles, in Triton's interpreter: which tiles are listed, and what the kernel makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support import interpreter_cases
from tests.support.interpreter_cases import Case, same
from tests.support.tiers import also

Run = Callable[..., Any]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


AXES = ["1111", "111T", "B11T", "1H1T", "11ST", "B1ST", "BHST", "BHS1"]


def of_axes(kind: str, several: list[str]) -> list[Case]:
    return [Case(mask=f"{kind} {axes}", S=3, H=5, causal=axes[2] == "S") for axes in several]


@same(
    of_axes("bool", [*AXES[0::2], "BHST"])
    + of_axes("add", AXES[1::2])
    + also(
        "combination", *of_axes("bool", [axes for axes in AXES[1::2] if axes != "BHST"]), *of_axes("add", AXES[0::2])
    )
)
def test_masks_of_every_form(case: Case, run: Run):
    run(interpreter_cases.check, case)


def skipping(mask: str, splits: int, block_n: int, *sees: str) -> list[Case]:
    how: dict[str, Any] = {"splits": splits, "block_n": block_n, "S": 2, "causal": True, "T": 160, "lens": (160, 131)}
    return [Case(mask=mask, sees=some, **how) for some in sees]


@same(
    skipping("bool B11T", 1, 32, "left", "holes")
    + skipping("add B1ST", 3, 16, "tail")
    + skipping("bool 111T", 2, 64, "nothing")
    + also(
        "combination",
        *skipping("bool B11T", 1, 32, "tail", "nothing"),
        *skipping("add B1ST", 3, 16, "left", "nothing"),
        *skipping("bool 111T", 2, 64, "left", "holes"),
    )
    + [Case(mask="half B11T", window=20, sinks=True, splits=2), Case(mask="bool B1ST", S=3, window=9, causal=True)]
    + [Case(mask="bool B11T", Lv=24, splits=2), Case(mask="add BHST", dtype=F32, softcap=5.0, S=2)]
)
def test_masks_skip_what_nobody_sees(case: Case, run: Run):
    run(interpreter_cases.check, case)


@same(
    [
        Case(mask=f"{kind} {axes}", S=2, causal=True, splits=n, T=T, lens=(T, 61), block_n=block_n)
        for kind, axes, n, T, block_n in (
            ("bool", "B11T", 1, 160, 16), ("bool", "111T", 3, 151, 32), ("add", "B1ST", 2, 160, 64)
        )
    ]
)  # fmt: skip
def test_layers_share_the_lists_of_one_schedule(case: Case, run: Run):
    run(interpreter_cases.two_layers, case)


@same([Case(mask=f"lowest {axes}", sees="tail", splits=n, S=2) for axes in ("B11T", "B1ST") for n in (1, 2)])
def test_lowest_values_hide(case: Case, run: Run):
    """A finite mask at its dtype's lowest value hides: NaN behind it stays out, its tiles are not on the list."""
    run(interpreter_cases.check, case)


def test_tiles_of_a_mask(run: Run):
    sees = torch.zeros(2, 1, 2, 300, dtype=torch.bool)
    sees[0, :, 0, 70:75] = True
    sees[0, :, 1, 290] = True
    sees[1, :, :, 0] = True
    assert run(interpreter_cases.counted, sees.expand(2, 4, 2, 300), 32, False, (300, 300)) == [[2, 9], [0]]
    assert run(interpreter_cases.counted, sees.expand(2, 4, 2, 300), 32, False, (280, 0)) == [[2], []]
    # Causality takes what a row's mask leaves; here query 0 sees keys up to 289 and so never key 290.
    sees[0, :, 0] = False
    sees[0, :, 0, 295] = True
    assert run(interpreter_cases.counted, sees.expand(2, 4, 2, 300), 32, True, (292, 300)) == [[9], [0]]


def test_only_lowest_keys_are_weighed(run: Run):
    """Where a query has nothing but lowest-masked keys, softmax weighs them all, so all tiles are walked."""
    low = torch.finfo(F32).min
    mask = torch.full((1, 1, 2, 100), low)
    mask[:, :, 0, 3] = 0.0
    assert run(interpreter_cases.counted, mask.expand(1, 4, 2, 100), 32, False, (100,)) == [[0, 1, 2, 3]]
    mask[:, :, 1, 5] = 0.0
    assert run(interpreter_cases.counted, mask.expand(1, 4, 2, 100), 32, False, (100,)) == [[0]]
