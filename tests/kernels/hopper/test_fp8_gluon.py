"""The Hopper kernel for float8 rows: its own source on the CPU, under many interleavings, and with seeded bugs."""

import numpy as np
import pytest

from tests.support.gluon_cases import assert_one_place
from tests.support.gluon_fp8_cases import (
    FLASH_MLA,
    FP8_CASES,
    FP8_LIST_CASES,
    FP8_SOURCE,
    assert_fp8_caught,
    simulate_fp8,
    simulate_fp8_lists,
)
from tests.support.gluon_machine import INTERLEAVINGS, interleaved, load
from tests.support.tiers import also


def random_form(rng):
    """Of scales, and of rope beside them."""
    groups = int(rng.choice([0, 0, 0, 1, 2, 4, 8]))
    scales = ("one", "token", "group")[rng.integers(2 + (groups > 0))]
    return {"scales": scales, "groups": groups if scales == "group" else min(groups, 1)}


def random_case(seed):
    rng = np.random.default_rng(seed)
    lens = [int(n) for n in rng.choice([0, 1, 63, 64, 65, 100, 129, 257], rng.integers(1, 4))]
    lens[0] = max(1, lens[0])
    case = {"lens": lens, "H": int(rng.choice([12, 20, 64])), "S": int(rng.integers(1, 4)), "sinks": bool(seed % 2)}
    case |= {"page": int(rng.choice([0, 1, 8, 48, 64])), "causal": bool(rng.random() < 0.7), **random_form(rng)}
    case |= {"window": int(rng.choice([0, 0, 1, 40, 130])), "softcap": float(rng.choice([0.0, 2.0]))}
    how = rng.integers(3)
    if not case["page"] and how != 1:
        case["mask"] = (None, "each", "all")[rng.integers(3)]
    case["apart"] = bool(case["page"] and seed % 3 == 0)
    return case | ({"splits": int(rng.integers(1, 4))}, {"partitions": int(rng.integers(1, 9))}, {})[how]


def random_list(seed):
    rng = np.random.default_rng(seed)
    lens = [int(n) for n in rng.choice([1, 63, 64, 65, 129, 257], rng.integers(1, 4))]
    case = {"lens": lens, "H": int(rng.choice([16, 20, 64, 80])), "S": int(rng.integers(1, 4)), "sinks": bool(seed % 2)}
    case |= {"k": int(rng.choice([1, 63, 64, 65, 128, 300])), "page": int(rng.choice([0, 1, 16, 64]))}
    case |= {"causal": bool(rng.random() < 0.7), "splits": int(rng.integers(1, 5)), **random_form(rng)}
    case |= {"window": int(rng.choice([0, 0, 30, 100])), "kind": str(rng.choice(["mixed", "full", "holes"]))}
    case |= {"apart": bool(case["page"] and seed % 3 == 0), "softcap": float(rng.choice([0.0, 0.0, 2.0]))}
    return case | ({} if case["page"] else {"mask": (None, "BS", "B")[rng.integers(3)]})


@interleaved(
    FP8_CASES,
    others=(
        "one row",
        "two row blocks",
        "page 48",
        "page 128",
        "scales of tokens, contiguous",
        "mask, splits",
        "window, mask",
        "schedule, window",
        "656 bytes, page 64",
        "656 bytes, contiguous",
        "656 bytes, mask, soft-cap",
        "656 bytes, window",
        "656 bytes, schedule",
        "2 groups, not causal",
        "rope beside scales of tokens",
    ),
)
def test_every_interleaving_gives_the_reference(name, seed):
    simulate_fp8(load(FP8_SOURCE), seed, **FP8_CASES[name])


@interleaved(
    FP8_LIST_CASES,
    others=(
        "one entry",
        "page of a row",
        "656 bytes, page 64",
        "656 bytes, contiguous, 128 heads",
        "656 bytes, mask",
        "656 bytes, two looks",
        "2 groups",
        "rope beside scales of tokens",
    ),
)
def test_every_interleaving_gives_the_reference_for_lists(name, seed):
    simulate_fp8_lists(load(FP8_SOURCE), seed, **FP8_LIST_CASES[name])


@pytest.mark.parametrize("draws", [range(2), *also("draws", range(2, 3 * INTERLEAVINGS))], ids=str)
def test_random_batches(draws):
    loaded = load(FP8_SOURCE)
    for seed in draws:
        simulate_fp8(loaded, seed, **random_case(seed))


@pytest.mark.parametrize("draws", [range(2), *also("draws", range(2, 3 * INTERLEAVINGS))], ids=str)
def test_random_lists(draws):
    loaded = load(FP8_SOURCE)
    for seed in draws:
        simulate_fp8_lists(loaded, seed, **random_list(seed))


FREE_0 = "                mbarrier.wait(bars.index(FREE + 2 * stage), phase)\n                if BESIDE"
FREE_1 = "                mbarrier.wait(bars.index(FREE + 2 * stage + 1), phase)\n            if i <"
PHASE = "the first blocks find the stage free.\n        phase = (used >> stage & 1) ^ 1"
ARRIVE = "                mbarrier.arrive(bars.index(3 * stage + i // IN_HALF))\n"
STORE = "stats.index(FACTOR + stage).store"
STORED = f"                if BESIDE:\n                    {STORE}(factor)\n"
FREED = "                mbarrier.wait(bars.index(FREE + 2 * stage), phase)\n"
NEXT = "begin, TABLE_PAGE, L)\n                if BESIDE:\n                    factor"
OF_REQUEST = "{} = {} + b.to(gl.int64)"
FENCED = "                fence_async_shared()\n" + ARRIVE
MANY = {"lens": [447, 430], "H": 20, "S": 2, "scales": "token"}
SHORT = {"lens": [3], "H": 20, "page": 8}  # a table of fewer rows than a block has
MASK = FP8_CASES["mask"]
ROWS_656 = {"lens": [300, 270], "H": 20, "S": 2, **FLASH_MLA}
APART = FP8_CASES["656 bytes, two layers, splits"]
LISTS = {"lens": [447, 430], "H": 20, "S": 2, "k": 300, "splits": 2, "scales": "token"}
LISTS_656 = LISTS | FLASH_MLA

BUGS = {  # what is wrong: (text, replacement, a case that shows it)
    "rope in half precision overwritten while P is read": (
        FREE_1,
        "                pass\n            if i <",
        ROWS_656,
    ),
    "the wrong phase": (PHASE, PHASE.removesuffix(" ^ 1"), MANY),
    "no fence after converting": (FENCED, ARRIVE, MANY),
    "arrival before the last piece": ("i % IN_HALF == IN_HALF - 1 or", "i % IN_HALF == IN_HALF - 2 or", MANY),
    "scales beside the other stage": (STORE, STORE.replace("stage", "1 - stage"), MANY),
    "scales of another group": ("            kv_scale += scale_g", "            kv_scale += 0", ROWS_656),
    "distance of pages forgotten": ("* stride_page + (place % PAGE)", "* (PAGE * stride_row) + (place % PAGE)", APART),
    "slot past the length looked up": ("mask=seen, other=0) * TABLE_PAGE", "mask=n >= 0, other=0) * TABLE_PAGE", SHORT),
    "bytes exchanged": ("gl.join(_values(x, factor, 1), _", "gl.join(_values(x, factor, 0), _", MANY),
    "mask forgotten": ("seen = seen & bits(low", "_ = bits(low", MASK),
    "places of another block": ("gl.load(places + i * BN + r", "gl.load(places + r", LISTS_656),
}

MORE_BUGS = {  # of kinds that are among the others, in another place or form of the kernel
    "a half filled that is not free": (FREE_0, "                if BESIDE", MANY),
    "rope overwritten while P is read": (FREE_1, "                pass\n            if i <", MANY),
    "no fence after converting the rows of a list": (FENCED, ARRIVE, LISTS_656),
    "scales overwritten while they are read": (FREED + STORED, STORED + FREED, MANY),
    "scales of the first block": (NEXT, NEXT.replace("factor", "_"), MANY),
    "a scale forgotten in the result": ("factor = factor * gl.load(kv_scale)", "pass", FP8_CASES["contiguous"]),
    "scales of the wrong request": (OF_REQUEST.format("scales", "kv_scale"), "scales = kv_scale + 0 * b", MANY),
    "scales of the group before": ("= PIECE * GROUPS % (2 * IN_HALF) == 0", "= PIECE == 0", ROWS_656),
    "scales of the piece after": (
        "_convert(ahead[0], factors[0], tile)",
        "_convert(ahead[0], factors[1], tile)",
        ROWS_656,
    ),
    "scales by group applied twice": ("token_scale is not None and GROUPS == 0", "token_scale is not None", ROWS_656),
    "rows of the wrong request": (OF_REQUEST.format("latents", "latent"), "latents = latent + 0 * b", MANY),
    "rows of the wrong request's list": (OF_REQUEST.format("latents", "latent"), "latents = latent + 0 * b", LISTS),
    "rope of the wrong request": (OF_REQUEST.format("ropes", "rope"), "ropes = rope + 0 * b", MANY),
    "pages of rope at float8's distance": ("_words(rope_b, ROPE_BYTES), _", "_words(rope_b, 1), _", APART),
    "words of rope's halves mixed": ("gl.join(left, right), [0, 2, 1]", "gl.join(left, right), [0, 1, 2]", ROWS_656),
    "half of rope twice": ("_store_halves(ahead[0], ahead[1]", "_store_halves(ahead[0], ahead[0]", ROWS_656),
    "neighbours in rope exchanged": ("(x.to(gl.int16), (x >> 16)", "((x >> 16).to(gl.int16), x", ROWS_656),
    "rows read that nobody sees": ("    return gl.where(seen, n, -1)\n", "    return n\n", MANY),
    "pieces in the wrong columns": ("slice(i % IN_HALF * COLUMNS,", "slice((i + 1) % IN_HALF * COLUMNS,", MANY),
    "window forgotten": ("seen = seen & (n >= begin)", "_ = begin", FP8_CASES["window inside a block"]),
    "the wrong tile of a list": ("n = place_of(work, plane, listed) * BN + r", "n = listed * BN + r", MASK),
    "places past a list's end": ("mask=r < (hi - i) * BN, other=-1", "mask=r < (hi + 1 - i) * BN, other=-1", LISTS),
    "keys of the cache counted, not of a list": ("0, query, None if LISTED else", "0, query, None if PAGE else", LISTS),
    "bits that are never announced": ("    mbarrier.arrive(bars.index(LIST_READY))\n", "    _ = 0\n", LISTS),
    "bits read before they are written": (
        "                mbarrier.wait(bars.index(LIST_READY), 0)\n",
        "                pass\n",
        LISTS_656,
    ),
    "scales of groups of the wrong request": (
        OF_REQUEST.format("scales", "kv_scale"),
        "scales = kv_scale + 0 * b",
        ROWS_656,
    ),
    "halves of rope exchanged": ("gl.join(left, right)", "gl.join(right, left)", ROWS_656),
    "the next block a piece too late": ("if i + AHEAD == PIECES - 1:", "if i + AHEAD == PIECES:", MANY),
    "a scale forgotten in the scores": ("scale = scale * gl.load(kv_scale)", "pass", FP8_LIST_CASES["fp16"]),
    "scales of tokens forgotten in the result": ("p = p * gl.expand_dims(", "_ = gl.expand_dims(", MANY),
    "rope at float8's distance": ("_words(rope_t, ROPE_BYTES)", "_words(rope_t, 1)", ROWS_656),
}


def test_every_bug_has_its_place():
    for text, _, _ in (BUGS | MORE_BUGS).values():
        assert_one_place(FP8_SOURCE, text)


@pytest.mark.parametrize("bug", [*BUGS, *also("family", *MORE_BUGS)])
def test_a_seeded_bug_is_caught(bug):
    assert_fp8_caught(*(BUGS | MORE_BUGS)[bug])
