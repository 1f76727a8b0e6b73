"""The barrier protocol of the Hopper kernel: its own source on the CPU, under many interleavings.

Every case is compared with the reference. Then the same with a bug put into the source on purpose, because a test that
catches no bug shows nothing.
"""

import numpy as np
import pytest

from tests.support.gluon_cases import CASES, SOURCE, assert_caught, assert_one_place, simulate
from tests.support.gluon_machine import INTERLEAVINGS, interleaved, load
from tests.support.tiers import also


def random_case(seed):
    rng = np.random.default_rng(seed)
    lens = [int(n) for n in rng.choice([0, 1, 63, 64, 65, 100, 128, 129, 200, 257], rng.integers(1, 5))]
    lens[0] = max(1, lens[0])
    case = {
        "lens": lens,
        "H": int(rng.choice([8, 12, 20, 64, 100])),
        "S": int(rng.integers(1, 4)),
        "sinks": bool(seed % 2),
    }
    case |= {"page": int(rng.choice([0, 0, 16, 32, 48, 64, 128])), "causal": bool(rng.random() < 0.7)}
    case |= {"window": int(rng.choice([0, 0, 1, 40, 64, 130])), "softcap": float(rng.choice([0.0, 2.0]))}
    how = rng.integers(3)
    if not case["page"] and how != 1:  # a schedule knows lengths alone
        case["mask"] = (None, "each", "all")[rng.integers(3)]
    case |= {"parts": int(rng.choice([1, 4])), "held": bool(rng.random() < 0.5)}
    case |= {"rope": int(rng.choice([0, 64]))}
    if -(-case["H"] * case["S"] // 64) % 2 == 0:
        case["ctas"] = int(rng.choice([1, 2]))
    return case | ({"splits": int(rng.integers(1, 5))}, {"partitions": int(rng.integers(1, 9))}, {})[how]


COMBINED = (
    "one row",
    "17 rows",
    "two row blocks",
    "causal, rows of two tokens",
    "page 32",
    "page 96",
    "not causal",
    "mask",
    "mask, capacity",
    "window of three blocks",
    "window, not causal",
    "window, splits",
    "window, mask",
    "window, longer than all",
    "schedule, one partition",
    "schedule, more than blocks",
)


@interleaved(CASES, "splits, some empty", others=COMBINED)
def test_every_interleaving_gives_the_reference(name, seed):
    simulate(load(SOURCE), seed, **CASES[name])


FORMS = ({"parts": 4}, {"held": True}, {"parts": 4, "held": True})


@pytest.mark.parametrize("form", FORMS, ids=str)
@interleaved(["33 rows of three tokens", "page 16", "mask"])
def test_forms_give_the_reference(name, seed, form):
    simulate(load(SOURCE), seed, **CASES[name], **form)


PAIRS = {
    "pages": {"lens": [129, 192, 0, 64], "H": 128, "page": 64},
    "causal tokens, splits": {"lens": [300, 70], "H": 64, "S": 2, "page": 16, "splits": 2, "sinks": True},
    "schedule": {"lens": [65, 300, 1, 128], "H": 100, "page": 48, "partitions": 3},
    "mask": {"lens": [300, 129], "H": 128, "mask": "each"},
    "window": {"lens": [290, 130, 3], "H": 33, "S": 3, "page": 32, "window": 70, "softcap": 2.0},
    "two clusters": {"lens": [130], "H": 200, "page": 64},
    "9 barriers, held query": {"lens": [193, 100], "H": 128, "page": 16, "parts": 4, "held": True},
}


@interleaved(PAIRS, others=("pages", "two clusters"))
def test_two_ctas_that_share_copies_give_the_reference(name, seed):
    simulate(load(SOURCE), seed, ctas=2, **PAIRS[name])


NO_ROPE = {"rope": 0}
WITHOUT = {
    "window, sinks": {"lens": [290, 130, 0, 3], "H": 64, "window": 128, "sinks": True},
    "causal tokens, splits": {"lens": [447, 130], "H": 20, "S": 2, "page": 48, "splits": 3},
    "mask": {"lens": [300, 129, 70], "H": 12, "mask": "each", "sinks": True},
    "fp16, schedule": {"lens": [65, 300, 1, 128, 0, 64], "H": 12, "page": 16, "partitions": 3, "dtype": "fp16"},
    "9 barriers, cluster of 2": {"lens": [193, 100], "H": 128, "page": 64, "window": 130, "parts": 4, "ctas": 2},
}


@interleaved(WITHOUT)
def test_rows_without_rope_give_the_reference(name, seed):
    simulate(load(SOURCE), seed, **WITHOUT[name], **NO_ROPE)


@pytest.mark.parametrize("draws", [range(3), *also("draws", range(3, 4 * INTERLEAVINGS))], ids=str)
def test_random_batches(draws):
    loaded = load(SOURCE)
    for seed in draws:
        simulate(loaded, seed, **random_case(seed))


WAIT_P0 = "        mbarrier.wait(bars.index(P_READY), (used0 + t) & 1)\n"
RETIRE_U = "        acc = warpgroup_mma_wait(0, deps=[acc_u])\n"
ZERO = "zero_rows(tiles.index({}), {}, length, begin, {}, MASKED)"
ZERO_EVEN, ZERO_ODD = (ZERO.format(at, "first", "low, high") for at in ("TILE", "TILE + 3"))
ZERO_EVEN_TAIL, ZERO_ODD_TAIL = (f"    {ZERO.format(at, 'first', 'low, high')}" for at in ("TILE + 2", "TILE + 1"))
ZERO_BEFORE = ZERO.format("TILE + 1", "lo * BN", "low0, high0")
ZERO_OTHERS = {"even": ZERO.format("TILE + 2", 0, "low1, high1"), "odd": ZERO.format("TILE + 1", 0, "low0, high0")}
FREE_0, FREE_1, FREE_2 = (
    f"        mbarrier.arrive(joint(bars.index({at})))\n" for at in ("FREE", "FREE + 1", "FREE + 2")
)
ZEROED = ".to(tile.dtype))\n    fence_async_shared()\n\n\n"
P_STORED = "        fence_async_shared()\n        mbarrier.arrive(bars.index({}))\n"
EARLY_P = "            own(narrow.index(NARROW + 1)).store(gl.zeros([ROWS * CTAS, BN], gl.float32, S_L))\n"
ODD_ZERO = "        zero = t >> 29  # see _even_blocks\n"
Q_WAIT = "            mbarrier.wait(bars.index(Q_READY), done & 1)\n"
# What TMA brought for a block that the other consumer scored.
OTHERS = "        half_arrived(bars, {}, {}, True, COPIED, PARTS)\n"
EVEN_WAIT = "half_arrived(bars, 1, 0, ((used1 + t) & 1) ^ 1"
TAIL_M = "        m = stats.index(0).load(R_S)\n        sums = sums * a0\n"
LENGTHS = [65, 300, 1, 128, 0, 64, 190, 129]
SPLIT = {"lens": [447, 130], "H": 20, "S": 2, "page": 64}
CUT = CASES["schedule, one long request"]
TAIL = {"lens": [130], "H": 8, "page": 64}
MASK = {"lens": [447, 380, 64], "H": 12, "mask": "each"}
WINDOW = {"lens": [290, 447], "H": 20, "S": 3, "page": 64, "window": 150}
SCHEDULED = {"lens": LENGTHS, "H": 12, "page": 64, "partitions": 3}

NINE = {"lens": [447, 130, 64], "H": 20, "S": 2, "page": 64, "parts": 4}
NINE_SMALL = NINE | {"page": 16, "splits": 2}
HELD = NINE | {"parts": 1, "held": True, "partitions": 2}
PART = "            _arrived(bars, loaded(stage, half, part), phase, True, COPIED)\n"
HALF_PARTS = "    for part in gl.static_range(PARTS):\n        _arrived(bars"

PAIR = {"lens": [447, 130], "H": 128, "page": 64, "ctas": 2}
CLUSTERS = {"lens": [130], "H": 200, "page": 64, "ctas": 2}

SHARED = SPLIT | NO_ROPE

BUGS = {  # what is wrong: (text, replacement, a case that shows it)
    "one product too few waited for": ("wait(2 * PARTS + ROTARY, ", "wait(2 * PARTS + ROTARY + 1, ", SPLIT),
    "scores not waited for": ("wait(1, deps=[s_t])", "wait(2, deps=[s_t])", SPLIT),
    "P read before it is there": (WAIT_P0, "", SPLIT),
    "even: the other's block not waited for": (f"        {EVEN_WAIT}", "        #", SPLIT),
    "even: the last block not waited for": (OTHERS.format("1, 0", "(used1 + n // 2 + 1) & 1"), "", CASES["ragged"]),
    "odd: the last block not waited for": (OTHERS.format("0, 1", "(used0 + n // 2) & 1"), "", TAIL),
    "tail not zeroed, own block": (ZERO_EVEN, "pass", TAIL),
    "even: hidden keys of the other's block not zeroed": (ZERO_OTHERS["even"], "pass", MASK),
    "hidden keys scored": ("visible = visible & gl.expand_dims(bits", "_ = gl.expand_dims(bits", MASK),
    "a window's first block not zeroed": ("return is_last | (n < begin)", "return is_last", WINDOW),
    "window of the wrong token": ("lower = limit - reach + token", "lower = limit - reach", WINDOW),
    "soft-cap forgotten": ("- 1.0) * softcap", "- 1.0) * softcap * 0.9", CASES["soft-cap"]),
    "list of the wrong request": ("n = hi - lo\n", "n = hi - lo\n        listed = work\n", MASK),
    "no fence after storing P": (P_STORED.format("P_READY"), P_STORED.format("P_READY").split("\n", 1)[1], SPLIT),
    "query read before the other half is there": (Q_WAIT, "", SPLIT),
    "maximum of the last odd block not taken": (TAIL_M, "        sums = sums * a0\n", CASES["page 32"]),
    "phases start again with each item": ("            used0 += (n + 1) // 2\n", "", SCHEDULED),
    "last even block never freed": (FREE_2, "", SCHEDULED),
    "9 barriers: two parts count on one": ("bar = loaded(stage, half, part)", "bar = loaded(stage, half, 0)", NINE),
    "cluster: rows overwritten that the other CTA reads": (
        "return reshaped(bar, gl.int64, [1], barrier(False, CTAS))",
        "return bar",
        PAIR,
    ),
    "cluster: copies not shared": ("_load(desc, at, bar, tile, multicast=True)", "_load(desc, at, bar, tile)", PAIR),
    "no rope: P written before the last one is applied": (
        ODD_ZERO,
        f"{ODD_ZERO}        if t > 0:\n{EARLY_P}            fence_async_shared()\n",
        SHARED,
    ),
    "no rope: a part waited for that never comes": (
        "    if ROTARY:\n        _arrived",
        "    if True:\n        _arrived",
        SHARED,
    ),
    "no rope: columns of the next query row": ("if W == 1 and ROTARY:", "if W == 1:", SHARED),
    "wrong slot": ("gl.load(slots + b) + gl.program_id(1)", "gl.load(slots + b)", CUT),
}

MORE_BUGS = {  # of kinds that are among the others, in another place or form of the kernel
    "half freed before its product retired": (RETIRE_U + FREE_0, FREE_0 + RETIRE_U, SPLIT),
    "odd: the other's block not waited for": (OTHERS.format("0, 1", "(used0 + t) & 1"), "", SPLIT),
    "odd: hidden keys of the other's block not zeroed": (ZERO_OTHERS["odd"], "pass", MASK),
    "odd: hidden keys of its own block not zeroed": (ZERO_ODD, "pass", MASK),
    "even: hidden keys of the last block not zeroed": (ZERO_EVEN_TAIL, "    pass", MASK),
    "odd: rows before a window not zeroed": (ZERO_BEFORE, "pass", WINDOW),
    "a window's last block not zeroed": ("return is_last | (n < begin)", "return n < begin", WINDOW),
    "no fence after storing the query": ("            fence_async_shared()\n", "", SPLIT),
    "last odd block never freed": ("is_async=False)\n" + FREE_1, "is_async=False)\n", SCHEDULED),
    "9 barriers: the other's parts not waited for": (HALF_PARTS, HALF_PARTS.replace("PARTS)", "1)"), NINE),
    "9 barriers: the parts of the other stage": ("- 1 + 3 * (2 * stage + half)", "- 1 + 3 * half", NINE),
    "9 barriers: one product too few waited for": ("wait(2 * PARTS + ROTARY, ", "wait(2 * PARTS + ROTARY + 1, ", NINE),
    "no rope: half freed before its product retired": (RETIRE_U + FREE_0, FREE_0 + RETIRE_U, SHARED),
    "no rope: no fence after storing P": (
        P_STORED.format("P_READY + 1"),
        P_STORED.format("P_READY + 1").split("\n", 1)[1],
        SHARED,
    ),
    "no rope, 9 barriers: the other's parts not waited for": (
        HALF_PARTS,
        HALF_PARTS.replace("PARTS)", "1)"),
        NINE | NO_ROPE,
    ),
    "9 barriers: the first boxes in place of all": ("boxes.index(c * (BN // BOX) + r)", "boxes.index(r)", NINE_SMALL),
    "9 barriers: columns of the first part": ("[page, row, COL + c * 64]", "[page, row, COL]", NINE),
    "held query: that of the latent columns": (
        "held = own(narrow.index(0))",
        "held = tiles.index(0).slice(0, 64, 1)",
        HELD,
    ),
    "cluster: rows of another cluster": ("gl.program_id(0) * (ROWS * CTAS)", "gl.program_id(0) * ROWS", CLUSTERS),
    "even: a block waited for that there is not": (f"{EVEN_WAIT}, older, ", f"{EVEN_WAIT}, True, ", SPLIT),
    "even: the last block's phase is wrong": (
        OTHERS.format("1, 0", "(used1 + n // 2 + 1) & 1"),
        OTHERS.format("1, 0", "(used1 + n // 2) & 1"),
        CASES["ragged"],
    ),
    "half freed that was never taken": (
        "(joint(bars.index(FREE + 2)), pred=older)",
        "(joint(bars.index(FREE + 2)))",
        SPLIT,
    ),
    "tail not zeroed, last odd block": (ZERO_ODD_TAIL, "    pass", TAIL),
    "rows before a window not zeroed": ("& (r >= begin - n)", "& (r >= 0)", WINDOW),
    "keys before a window scored": ("visible & (n >= gl.expand_dims(lower, 1))", "visible", WINDOW),
    "a window's first block not walked": ("first = begin // BN", "first = (begin + BN - 1) // BN", WINDOW),
    "bits of the wrong half": ("gl.where(n < 32, low, high)", "gl.where(n < 32, high, low)", MASK),
    "no fence after zeroing": (ZEROED, ZEROED.split("    fence")[0] + "\n\n", TAIL),
    "9 barriers: a part scored before it is there": (PART, f"            if part != 2:\n    {PART}", NINE),
    "held query: taken before it is there": (Q_WAIT, "", HELD),
    "cluster: every CTA announces": ("mbarrier.expect(bar, size, from_cta=0)", "mbarrier.expect(bar, size)", PAIR),
    "no rope: one product too few waited for": ("wait(2 * PARTS + ROTARY, ", "wait(2 * PARTS + 1, ", SHARED),
    "no rope: P read before it is there": (WAIT_P0, "", SHARED),
    "wrong maximum handed on": ("stats.index(1).load(R_S), LOWEST", "stats.index(0).load(R_S), LOWEST", SPLIT),
}


def test_every_bug_has_its_place():
    for text, _, _ in (BUGS | MORE_BUGS).values():
        assert_one_place(SOURCE, text)


@pytest.mark.parametrize("bug", [*BUGS, *also("family", *MORE_BUGS)])
def test_a_seeded_bug_is_caught(bug):
    assert_caught(*(BUGS | MORE_BUGS)[bug])
