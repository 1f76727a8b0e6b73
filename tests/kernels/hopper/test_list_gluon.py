"""The Hopper kernel for lists of keys: its own source on the CPU, under many interleavings, and with seeded bugs."""

import numpy as np
import pytest

from tests.support.gluon_cases import assert_one_place
from tests.support.gluon_list_cases import LIST_CASES, LIST_SOURCE, assert_list_caught, simulate_lists
from tests.support.gluon_machine import INTERLEAVINGS, interleaved, load
from tests.support.tiers import also


def random_case(seed):
    rng = np.random.default_rng(seed)
    lens = [int(n) for n in rng.choice([1, 63, 64, 100, 129, 257], rng.integers(1, 4))]
    case = {"lens": lens, "H": int(rng.choice([16, 20, 64, 80])), "S": int(rng.integers(1, 4)), "sinks": bool(seed % 2)}
    case |= {"k": int(rng.choice([1, 63, 64, 65, 128, 150, 300])), "page": int(rng.choice([0, 16, 64]))}
    case |= {"causal": bool(rng.random() < 0.7), "splits": int(rng.integers(1, 5))}
    case |= {"window": int(rng.choice([0, 0, 30, 100])), "rope": int(rng.choice([0, 64]))}
    case |= {"kind": str(rng.choice(["mixed", "full", "holes"])), "apart": bool(case["page"] and seed % 3 == 0)}
    return case | ({} if case["page"] else {"mask": (None, "BS", "B")[rng.integers(3)]})


@interleaved(
    LIST_CASES,
    others=(
        "one entry",
        "a block",
        "more entries than keys",
        "blocks without a key, splits",
        "page 64",
        "page 64, apart",
        "unused capacity",
        "contiguous, whole",
        "a list that takes two looks",
        "mask",
        "no rope, sinks",
        "no rope, apart, splits",
    ),
)
def test_every_interleaving_gives_the_reference(name, seed):
    simulate_lists(load(LIST_SOURCE), seed, **LIST_CASES[name])


@pytest.mark.parametrize("draws", [range(2), *also("draws", range(2, 3 * INTERLEAVINGS))], ids=str)
def test_random_lists(draws):
    loaded = load(LIST_SOURCE)
    for seed in draws:
        simulate_lists(loaded, seed, **random_case(seed))


COPIED = "    async_copy.mbarrier_arrive(bar, increment_count=False)\n"
COPIES = "    load_rows(tile, x + (gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)), mask=seen)\n"
FREED = "\n        mbarrier.wait(bars.index(FREE + 2 * stage{}), phase)\n"
FENCE = "    if COPIED:\n        fence_async_shared()\n"
MANY = {"lens": [447, 430], "H": 20, "S": 2, "k": 400}
CAUSAL = {"lens": [100, 120], "H": 20, "S": 3, "k": 120, "kind": "full"}
SHARED = LIST_CASES["no rope, sinks"]
PAGED = LIST_CASES["page 16"]
APART = LIST_CASES["page 64, apart"]

BUGS = {  # what is wrong: (text, replacement, a case that shows it)
    "no fence after waiting for copied rows": (FENCE, "", MANY),
    "rows not waited for": ("    mbarrier.wait(bars.index(i), phase, pred=pred)\n", "", MANY),
    "one thread arrives for all": ("count=THREADS if i < FREE else 2 if", "count=1 if i < FREE else 2 if", MANY),
    "bits that are never announced": ("    mbarrier.arrive(bars.index(LIST_READY))\n", "    _ = 0\n", MANY),
    "entries past the end": (
        "mask=i < gl.minimum(hi * BN, entries), other=-1",
        "mask=i < entries, other=0",
        LIST_CASES["two blocks, 16 heads"],
    ),
    "length forgotten": ("seen = (n >= 0) & (n < length)", "seen = n >= 0", {**PAGED, "causal": False}),
    "mask forgotten": ("mask=seen, other=0) != 0)", "mask=seen, other=0) >= 0)", LIST_CASES["mask"]),
    "list of the wrong token": ("s.to(gl.int64) * indices_s", "b.to(gl.int64) * indices_s", MANY),
    "distance of pages forgotten": ("* (stride_page // 8 * 8)", "* (PAGE * row)", APART),
    "no rope: a half filled that is not free": (FREED.format(""), "\n", SHARED),
}

MORE_BUGS = {  # of kinds that are among the others, in another place or form of the kernel
    "a fence before waiting for copied rows": (
        "    mbarrier.wait(bars.index(i), phase, pred=pred)\n" + FENCE,
        FENCE + "    mbarrier.wait(bars.index(i), phase, pred=pred)\n",
        MANY,
    ),
    "a half filled that is not free": (FREED.format(""), "\n", MANY),
    "rope overwritten while P is read": (FREED.format(" + 1"), "\n", MANY),
    "the wrong phase": ("phase = ((block - lo) // 2 & 1) ^ 1", "phase = (block - lo) // 2 & 1", MANY),
    "bits read before they are written": (
        "                mbarrier.wait(bars.index(LIST_READY), 0)\n",
        "                pass\n",
        MANY,
    ),
    "rows copied that nobody sees": ("expand_dims(place >= 0, 1)", "expand_dims(place >= -1, 1)", MANY),
    "the second half's columns": ("_copy(latent + HALF, place", "_copy(latent, place", MANY),
    "window forgotten": ("seen = seen & (n >= lower)", "_ = lower", LIST_CASES["soft-cap, window"]),
    "page of the wrong request": ("table += b.to(gl.int64) * table_b", "table += 0 * table_b", PAGED),
    "rows of the wrong request": ("latent += b.to(gl.int64)", "latent += 0 * b.to(gl.int64)", MANY),
    "halves of the bits exchanged": ("gl.where(c < 32, bit, 0)", "gl.where(c < 32, 0, bit)", MANY),
    "bits of the wrong token": ("words += token.to(gl.int64) * blocks * 2", "words += 0 * blocks", MANY),
    "query of the wrong token": ("(b % S).to(gl.int64) * stride_qs", "0 * stride_qs", MANY),
    "arrivals that count for nothing": (COPIED, "    async_copy.mbarrier_arrive(bar)\n", MANY),
    "arrival before the copies": (COPIES + COPIED, COPIED + COPIES, MANY),
    "no rope: no fence after waiting for copied rows": (FENCE, "", SHARED),
    "causality forgotten": ("seen = seen & (n <= own)", "_ = own", CAUSAL),
    "heads of the wrong block": ("first_row = heads * ROWS", "first_row = 0 * ROWS", LIST_CASES["128 heads"]),
}


def test_every_bug_has_its_place():
    for text, _, _ in (BUGS | MORE_BUGS).values():
        assert_one_place(LIST_SOURCE, text)


@pytest.mark.parametrize("bug", [*BUGS, *also("family", *MORE_BUGS)])
def test_a_seeded_bug_is_caught(bug):
    assert_list_caught(*(BUGS | MORE_BUGS)[bug])
