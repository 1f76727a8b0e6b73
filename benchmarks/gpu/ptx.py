"""Reads in PTX what the Hopper kernel's protocol rests on and no test on a CPU can see: its fences and barriers.

A tile that threads store and the tensor cores read passes through three steps: the stores, a fence of each storing
thread that makes them visible to the tensor cores' proxy, a barrier of the warpgroup. Then one thread arrives at the
mbarrier for all. The compiler places the barrier before that single arrive; were it missing, or moved, the other side
would read what slower threads have not written, or overwrite what they still read: a race that no result on a quiet
GPU need show. So it is with what threads store to global memory and then announce.

Rows that are copied by cp.async (of lists of keys) need no such barrier, because every thread arrives when its own
copies have landed. There the fence is the reader's: no product without one since the last wait for an mbarrier.

:func:`protocol` follows every path through the control flow and names the instructions that break it.
"""

from __future__ import annotations

import re

# Single words are statistics, which threads read.
_TILE_STORE = re.compile(r"st\.shared(::cta)?\.v4|stmatrix|mbarrier\.init")
_TOUCH = re.compile(r"(st|ld)\.shared|st\.global|stmatrix|ldmatrix|wgmma\.wait_group")
_BARRIER = re.compile(r"bar(rier)?\.sync")
_ARRIVE = re.compile(r"(?<!cp\.async\.)mbarrier\.arrive\b")
_LANDED = re.compile(r"cp\.async\.mbarrier\.arrive\b")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared")
_WAIT = re.compile(r"mbarrier\.(try|test)_wait")
_BRANCH = re.compile(r"^(@!?%\w+\s+)?bra(\.uni)?\s+(\S+);")
# What is still owed on some path: the fence of a tile's stores, the barrier after a fence, the barrier after a touch.
UNFENCED, UNMET, LOOSE = "stores without a fence", "a fence without a barrier", "no barrier since the last access"
UNSEEN = "a wait for copied rows without a fence"  # where cp.async brings them
PARTLY = "not every thread arrives, or one that is counted twice"
_FORBIDDEN = {"arrive": {UNFENCED, UNMET, LOOSE}, "product": {UNFENCED, UNMET, UNSEEN}, "landed": {PARTLY}}


def protocol(ptx: str) -> tuple[dict[str, int], list[str]]:
    """How many arrives, products (wgmma) and arrives of copies there are, and which some path reaches too early."""
    blocks, copied = _blocks(ptx), bool(_COPY.search(ptx))
    before: dict[int, frozenset[str]] = {0: frozenset()}
    waiting = [0]
    while waiting:  # a step that is owed on one path is owed: unions only grow, so this ends
        index = waiting.pop()
        owed = before[index]
        lines, following = blocks[index]
        for text in lines:
            owed = _after(text, owed, copied)
        for successor in following:
            met = before.get(successor)
            joined = owed if met is None else met | owed
            if joined != met:
                before[successor] = joined
                waiting.append(successor)
    counts, wrong = dict.fromkeys(_FORBIDDEN, 0), []
    for index, owed in sorted(before.items()):
        for text in blocks[index][0]:
            kind = _kind(text)
            if kind:
                counts[kind] += 1
                partly = kind == "landed" and (text.startswith("@") or ".noinc" not in text)
                found = owed | {PARTLY} if partly else owed
                wrong += [f"{kind} {counts[kind]}: {what}" for what in sorted(found & _FORBIDDEN[kind])]
            owed = _after(text, owed, copied)
    return counts, wrong


def between_ctas(ptx: str) -> dict[str, int]:
    """What the CTAs of a cluster have to do with each other; zeros where there is one.

    ``shared``: copies that go to both; ``alone``: copies to one; ``remote``: arrives at barriers of the other one;
    ``met``: barriers of all threads of both, each written once for those that run a partition and once for those that
    wait for one: after mbarriers are made, and before a CTA may be gone at whose mbarriers the other one arrives.
    """
    copies = re.findall(r"cp\.async\.bulk\.tensor\S*", ptx)
    shared = sum("multicast::cluster" in copy for copy in copies)
    return {
        "shared": shared,
        "alone": len(copies) - shared if shared else 0,
        "remote": len(re.findall(r"mbarrier\.arrive\S*shared::cluster", ptx)),
        "met": len(re.findall(r"barrier\.cluster\.wait", ptx)),
    }


def _kind(text: str) -> str | None:
    if _ARRIVE.search(text):
        return "arrive"
    if _LANDED.search(text):
        return "landed"
    return "product" if "wgmma.mma_async" in text else None


def _after(text: str, owed: frozenset[str], copied: bool) -> frozenset[str]:
    """What is owed after an instruction; ``copied``: rows come by cp.async."""
    if copied and _WAIT.search(text):
        return owed | {UNSEEN}
    if _BARRIER.search(text):
        return owed - {UNMET, LOOSE}
    if "fence.proxy.async" in text:
        owed = owed - {UNSEEN}
        return owed - {UNFENCED} | {UNMET} if UNFENCED in owed else owed
    if _TILE_STORE.search(text):
        return owed | {UNFENCED, LOOSE}
    return owed | {LOOSE} if _TOUCH.search(text) else owed


def _blocks(ptx: str) -> list[tuple[list[str], list[int]]]:
    """The basic blocks in order, each with its instructions and the blocks that may follow."""
    starts: dict[str, int] = {}
    found: list[tuple[list[str], str | None, bool]] = [([], None, True)]  # lines, target, whether it falls through
    for line in ptx.splitlines():
        text = line.strip()
        label = re.match(r"(\$L\w+):", text)
        if label:
            found.append(([], None, True))
            starts[label[1]] = len(found) - 1
            continue
        jump = _BRANCH.match(text)
        if jump and jump[3].startswith("$L"):  # the loops inside inline assembly wait for one mbarrier and do no more
            found[-1] = (found[-1][0], jump[3], bool(jump[1]))
            found.append(([], None, True))
        elif text.startswith("ret"):
            found[-1] = (found[-1][0], None, False)
            found.append(([], None, True))
        else:
            found[-1][0].append(text)
    made = []
    for index, (lines, target, falls) in enumerate(found):
        following = [starts[target]] if target else []
        made.append((lines, following + ([index + 1] if falls and index + 1 < len(found) else [])))
    return made
