"""Random arithmetic by which new tokens get into a buffer: whatever is made of it, the numbers stay."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import mla_compile
from tests.passes.cache.test_buffers import _no_grad, buffers, tokens
from tests.passes.cache.test_writes import Two, of_other_tokens, side_by_side
from tests.support.latent_modules import B, H
from tests.support.tiers import also

__all__ = ["_no_grad"]
pytestmark = pytest.mark.thorough
DRAWS = 4  # of each test, side by side in one program


class Drawn:
    """One to four operators, one upon the other, each of which writes the new tokens or others.

    ``shared``: whether heads and columns share all factors.
    """

    def __init__(self, seed):
        self.seed, self.shared = seed, random.Random(seed).random() < 0.8
        self.__name__ = f"seed {seed}"

    def __call__(self, buffer, first, second, at):
        draw = random.Random(self.seed)
        for _ in range(draw.randint(1, 4)):
            buffer = self.step(draw, buffer, draw.choice([first, first, second]), at, slice(None))
        return buffer

    def step(self, draw, old, new, at, where):
        """One operator on the tokens ``where`` of the buffer, which are ``old``."""
        kind = draw.choice(["add", "take off", "from new", "scale", "choose", "keep", "between", "empty", "a part",
                            "a number", "divide", "opposite"])  # fmt: skip
        seen = (torch.arange(13)[:, None] % draw.choice([2, 3]) == at)[where]
        factor = self.factor(draw, new, at)
        factor = factor[..., where, :] if factor.dim() > 1 and factor.shape[-2] > 1 else factor
        if kind == "a part" and old.shape[2] == 13:
            inner = slice(1, draw.randint(4, 12))
            return old.slice_scatter(self.step(draw, old[:, :, inner], new, at, inner), 2, inner.start, inner.stop)
        return {
            "add": lambda: old + new * factor,
            "take off": lambda: old - factor * new,
            "from new": lambda: new * factor - old,
            "scale": lambda: old * factor,
            "a number": lambda: old + new * 0.25,
            "divide": lambda: old / 2 - (new * factor) / 3,
            "opposite": lambda: -old - -new * factor,
            "choose": lambda: torch.where(seen, new, old),
            "keep": lambda: torch.where(seen, old, new),
            "between": lambda: torch.lerp(old, new.expand_as(old), factor),
            "empty": lambda: old.masked_fill(seen, 0.0),
            "a part": lambda: old,
        }[kind]()

    def factor(self, draw, new, at):
        token = torch.arange(13, dtype=new.dtype)[:, None]
        sequence = torch.arange(B, dtype=new.dtype).view(B, 1, 1, 1)
        shared = [F.one_hot(at, 13).to(new.dtype).view(-1, 1), token / 13 + 0.2, sequence / 2 + token / 10 - 0.4]
        own = [torch.linspace(0.5, 1, H, dtype=new.dtype).view(H, 1, 1), torch.linspace(1, 2, new.shape[3])]
        return draw.choice(shared if self.shared else [*shared, *own]).to(new.dtype)


@pytest.mark.parametrize("part", [0, *also("draws", *range(1, 14))])
def test_random_writes_leave_the_numbers(part):
    module = Two([Drawn(seed) for seed in range(part * DRAWS, (part + 1) * DRAWS)], of_other_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_compile.MlaCompileWarning)
        program, run, theirs = side_by_side(module, 1)
    mine = [buffers() for _ in module.writes]
    for start in (2, 3, 2):
        x, at = tokens(start, 1)
        (expected, mine), (got, theirs) = module(x, mine, at), run(x, theirs, at)
        for write, one, other in zip(module.writes, expected, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, msg=lambda m, w=write: f"{w.__name__}: {m}")
    assert len({t.name.rpartition("_")[0] for t in program.graph_module.meta["mla_cache"].inputs}) > DRAWS // 4
