"""The Hopper kernel for float8 rows: its own source on the CPU, under many interleavings, and with seeded bugs."""

import numpy as np
import pytest

from tests.support.gluon_fp8_cases import FP8_CASES, FP8_SOURCE, assert_fp8_caught, simulate_fp8
from tests.support.gluon_machine import INTERLEAVINGS, load


def random_case(seed):
    rng = np.random.default_rng(seed)
    lens = [int(n) for n in rng.choice([0, 1, 63, 64, 65, 100, 129, 257], rng.integers(1, 4))]
    lens[0] = max(1, lens[0])
    case = {"lens": lens, "H": int(rng.choice([12, 20, 64])), "S": int(rng.integers(1, 4)), "sinks": bool(seed % 2)}
    case |= {"page": int(rng.choice([0, 1, 8, 48, 64])), "causal": bool(rng.random() < 0.7)}
    case |= {"window": int(rng.choice([0, 0, 1, 40, 130])), "softcap": float(rng.choice([0.0, 2.0]))}
    case |= {"scales": ("one", "token")[rng.integers(2)]}
    how = rng.integers(3)
    if not case["page"] and how != 1:
        case["mask"] = (None, "each", "all")[rng.integers(3)]
    case["apart"] = bool(case["page"] and seed % 3 == 0)
    return case | ({"splits": int(rng.integers(1, 4))}, {"partitions": int(rng.integers(1, 9))}, {})[how]


@pytest.mark.parametrize("name", FP8_CASES)
def test_every_interleaving_gives_the_reference(name):
    loaded = load(FP8_SOURCE)
    for seed in range(INTERLEAVINGS):
        simulate_fp8(loaded, seed, **FP8_CASES[name])


def test_random_batches():
    loaded = load(FP8_SOURCE)
    for seed in range(4 * INTERLEAVINGS):
        simulate_fp8(loaded, seed, **random_case(seed))


FREE_0 = "                    mbarrier.wait(bars.index(FREE + 2 * stage), phase)\n                    if kv"
FREE_1 = "                    mbarrier.wait(bars.index(FREE + 2 * stage + 1), phase)\n                if i <"
PHASE = "the first blocks find the stage free.\n            phase = (used >> stage & 1) ^ 1"
ARRIVE = "                    mbarrier.arrive(bars.index(3 * stage + i // IN_HALF))\n"
STORE = "stats.index(FACTOR + stage).store"
STORED = f"                    if kv_scale is not None:\n                        {STORE}(factor)\n"
FREED = "                    mbarrier.wait(bars.index(FREE + 2 * stage), phase)\n"
NEXT = "begin, TABLE_PAGE, L)\n                    if kv_scale is not None:\n                        factor"
MANY = {"lens": [447, 430], "H": 20, "S": 2, "scales": "token"}
SHORT = {"lens": [3], "H": 20, "page": 8}  # a table of fewer rows than a block has
MASK = FP8_CASES["mask"]

BUGS = {  # what is wrong: (text, replacement, a case that shows it)
    "a half filled that is not free": (FREE_0, "                    if kv", MANY),
    "rope overwritten while P is read": (FREE_1, "                    pass\n                if i <", MANY),
    "the wrong phase": (PHASE, PHASE.removesuffix(" ^ 1"), MANY),
    "no fence after converting": ("                    fence_async_shared()\n" + ARRIVE, ARRIVE, MANY),
    "arrival before the last piece": ("i % IN_HALF == IN_HALF - 1 or", "i % IN_HALF == IN_HALF - 2 or", MANY),
    "scales beside the other stage": (STORE, STORE.replace("stage", "1 - stage"), MANY),
    "scales overwritten while they are read": (FREED + STORED, STORED + FREED, MANY),
    "scales of the first block": (NEXT, NEXT.replace("factor", "_"), MANY),
    "scales of tokens forgotten in the result": ("p = p * gl.expand_dims(", "_ = gl.expand_dims(", MANY),
    "a scale forgotten in the result": ("factor = factor * gl.load(kv_scale)", "pass", FP8_CASES["contiguous"]),
    "a scale forgotten in the scores": ("scale = scale * gl.load(kv_scale)", "pass", FP8_CASES["contiguous"]),
    "scales of the wrong request": ("scales = kv_scale + b.to(gl.int64)", "scales = kv_scale + 0 * b", MANY),
    "rows of the wrong request": ("latents = latent + b.to(gl.int64)", "latents = latent + 0 * b", MANY),
    "rope of the wrong request": ("ropes = rope + b.to(gl.int64)", "ropes = rope + 0 * b", MANY),
    "rows read that nobody sees": ("    return gl.where(seen, n, -1)\n", "    return n\n", MANY),
    "slot past the length looked up": ("mask=seen, other=0) * TABLE_PAGE", "mask=n >= 0, other=0) * TABLE_PAGE", SHORT),
    "the next block a piece too late": ("if i + AHEAD == PIECES - 1:", "if i + AHEAD == PIECES:", MANY),
    "pieces in the wrong columns": ("slice(i % IN_HALF * COLUMNS,", "slice((i + 1) % IN_HALF * COLUMNS,", MANY),
    "bytes exchanged": ("gl.join(_values(x, 1), _values(x, 3))", "gl.join(_values(x, 3), _values(x, 1))", MANY),
    "mask forgotten": ("seen = seen & bits(low", "_ = bits(low", MASK),
    "window forgotten": ("seen = seen & (n >= begin)", "_ = begin", FP8_CASES["window inside a block"]),
    "the wrong tile of a list": ("n = place_of(work, plane, listed) * BN + r", "n = listed * BN + r", MASK),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(bug):
    assert_fp8_caught(*BUGS[bug])
