"""Mutants of legal attentions: never a wrong number, and no keys absorbed that are no image of one row.

Every class of :mod:`tests.adversary.mutations` is a test; it makes mutants of random legal attentions (every second one
with B = H = S = T = L = N = V) and compares each with itself after the passes. ``MLA_ADVERSARY_CASES`` is how many
mutants are made in all, ``MLA_ADVERSARY_SEED`` draws others, ``MLA_ADVERSARY_BASES`` is how many attentions they come
from: ``MLA_ADVERSARY_CASES=2000 MLA_ADVERSARY_BASES=60 MLA_ADVERSARY_SEED=1 pytest tests/test_adversary.py``.
"""

from __future__ import annotations

import functools
import os
import random
import zlib

import pytest

from mla_compile.codes import Code
from tests.adversary.aliasing import WRITES, check_write
from tests.adversary.bases import Base, bases
from tests.adversary.check import mutant, said
from tests.adversary.many import check_mutants
from tests.adversary.mutations import MUTATIONS
from tests.adversary.oracle import BOTH
from tests.adversary.scales import KINDS, MUTANTS, PARTICULAR, check_scales
from tests.support.generator import Case, check_each
from tests.support.tiers import also

SEED = int(os.environ.get("MLA_ADVERSARY_SEED", "0"))
COUNT = int(os.environ.get("MLA_ADVERSARY_CASES", "100"))
BASES = int(os.environ.get("MLA_ADVERSARY_BASES", "8"))
PARTS = 3  # in which the mutants of a kind are made, of which the default tier makes the first
TRIES = 30  # draws for one mutant: many steps do not fit many tensors


@functools.lru_cache
def pool() -> tuple[Base, ...]:
    return tuple(bases(BASES, SEED))


@pytest.mark.parametrize("name", sorted(MUTATIONS))
@pytest.mark.parametrize("part", [0, *also("draws", *range(1, PARTS))])
def test_mutants(part: int, name: str) -> None:
    rng = random.Random(zlib.crc32(name.encode()) + SEED * PARTS + part)
    wanted = -(-COUNT // len(MUTATIONS) // PARTS)
    check_mutants(wanted, TRIES * wanted, lambda: mutant(rng.choice(pool()), MUTATIONS[name], rng))


# Cores, caches and layouts; in the second and the fourth all sizes are equal.
ALIASED = [
    Case(T=4, D=5, H=2, L=3, N=2, V=2, core="matmul", scale="scores"),
    Case(B=3, T=3, D=3, H=3, L=3, N=3, R=3, V=3, chunk=3, up="two", rope="none", scale="argument", mask="keep",
         cache="index_copy"),
    Case(T=4, D=5, H=2, L=3, N=2, V=2, join="assign", layout="heads_last", core="einsum_heads_last", mask="fill",
         cache="slice"),
    Case(T=2, D=2, H=2, L=2, N=2, V=2, chunk=2, up="raw", bias=True, core="bmm", cache="joint"),
    Case(T=4, D=5, H=2, L=3, N=2, V=2, join="sum", core="einsum", cache="head_axis"),
]  # fmt: skip


@pytest.mark.parametrize("name", [w if zlib.crc32(w.encode()) % 2 else also("draws", w)[0] for w in WRITES])
def test_writes_in_place(name: str) -> None:
    """One case each; ``MLA_ADVERSARY_CASES`` of 1000 and more: all of them, with a second step."""
    write = WRITES[name]
    fused = write.stage in ("scores", "probs")
    every = [c for c in ALIASED if not (fused and c.core == "sdpa")]
    at = zlib.crc32(name.encode()) % len(every)
    thorough = COUNT >= 1000

    def check(case: Case) -> None:
        report, ranks, limit = check_write(case, write, calls=2 if thorough else 1)
        rank = ranks[BOTH]
        if write.legal is not None:
            assert (rank <= limit) == (write.legal is True), f"the oracle finds rank {rank}, limit {limit}"
        if rank > limit and write.stage != "between":
            assert report.verdict == "refused" or ranks.get(report.parts, limit + 1) <= limit, f"{report.code}: {ranks}"
            true = {write.legal, Code.UNSUPPORTED_OP}
            assert not write.legal or true.issuperset(code for _, code, _ in said(report)), said(report)
        if (write.legal is True and write.stage in ("between", "after")) or "before the scores" in name:
            assert (report.code, report.parts) == (Code.ABSORBED, ()), report.reason

    check_each(every if thorough else every[at : at + 1], check)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0, *also("draws", 1)])
def test_scales(part: int, kind: str) -> None:
    """A share of the mutants in each kind; ``MLA_ADVERSARY_CASES`` of 1000 and more: all of them."""
    plain = check_scales(kind, {})
    assert plain is not None
    assert (plain.code, plain.parts) == (Code.ABSORBED, ()), plain.reason
    of = sorted(KINDS).index(kind)

    def drawn(name: str) -> bool:
        draw = zlib.crc32(name.encode())
        if draw % len(KINDS) != of:
            return False
        return part == 0 if name in PARTICULAR else draw // len(KINDS) % 12 == 6 * part

    names = [name for name in MUTANTS if COUNT >= 1000 or drawn(name)]
    check_each(names, lambda name: check_scales(kind, MUTANTS[name]))
